"""Sections of the page, made from the measurements."""

import math
import platform
from importlib.metadata import version

import numpy as np
import pandas as pd

from hierfl.core.importance_sampling import K_HAT
from hierfl.core.process import one_at_a_time
from hierfl.diagnostics import across_clients
from hierfl.diagnostics.check import R_HAT, number, share
from hierfl.diagnostics.formula_tables import titled
from hierfl.formulas.formula import Formula
from hierfl.report import pictures
from hierfl.report.measure import Measured, SiteEntry
from hierfl.report.pictures import Picture, ReportTable, Section, Text

SHOWN = 3  # local scalars that are drawn: those in which clients differ most
ROWS = 200  # most rows of a table
REDUCTION = "Variance reduction"
# guides whose name says little to a reader of the page
GUIDES = {
    "from_factor": "none is fitted: draws of the global parameters are weighted; given each of them, a client's "
    "own parameters are drawn by its Gaussian factor, and weighted"
}


@one_at_a_time
def sections(measured: Measured) -> list[Section]:
    """Return the sections of the page, leaving out those without content."""
    made = (
        _run(measured),
        _convergence(measured),
        _shared(measured),
        *_own(measured),
        _predictions(measured),
        _strangers(measured),
    )
    return [section for section in made if section]


def _run(measured: Measured) -> Section:
    fit, data = measured.fit, measured.fit.federation.data
    history, counts = fit.history, data.counts
    latents, model = fit.program.latents, fit.method.model
    name = getattr(model, "__name__", type(model).__name__)
    if isinstance(model, Formula):
        name = titled(model)
    guide: str = getattr(fit.method.guide, "__name__", type(fit.method.guide).__name__)
    finished = fit.federation.server.finished(fit.progress.server)
    cohort = int(history["clients"].max()) if "clients" in history else data.num_clients
    stopped = ", after which the method stopped automatically" if finished else ""
    software = {"hierfl": "hierfl", "torch": "torch", "pyro-ppl": "Pyro", "arviz": "ArviZ"}
    facts = {
        "Method": fit.progress.chosen or fit.method.name,
        "Model": name,
        "Guide (approximate posterior)": GUIDES.get(guide, guide),
        "Clients": f"{data.num_clients}, with {int(counts.min())} to {int(counts.max())} rows "
        f"(median {int(counts.median())})",
        "Parameters": f"{latents.global_block.size:,} global, {latents.local_block.size:,} for "
        "each client",
        "Rounds": f"{len(history)}{stopped}, with at most {cohort} clients in each",
        "Communication": _bytes(history),
        "Time": f"{number(float(history['seconds'].sum()))} s"
        if "seconds" in history
        else "not recorded",
        "Seed": str(fit.federation.seed),
        "Software": ", ".join(f"{name} {version(of)}" for of, name in software.items())
        + f", Python {platform.python_version()}",
    }
    items = tuple(facts.items())
    table = ReportTable("Settings, size and cost of the run", ("Item", "Value"), items, words=True)
    return Section("run", "The run", (table,))


def _bytes(history: pd.DataFrame) -> str:
    if "bytes_up" not in history:
        return "not recorded"
    down, up = (float(history[f"bytes_{way}"].sum()) for way in ("down", "up"))
    return f"{_size(down)} to clients, {_size(up)} from clients; no rows of data"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000.0:
            return f"{number(count)} {unit}"
        count /= 1000.0
    return f"{number(count)} GB"


def _convergence(measured: Measured) -> Section | None:
    drawn = pictures.run(measured) or table_of_rounds(measured.fit.history)
    verdict = (
        [] if isinstance(measured.evidence.run, str) else [Text(measured.evidence.run.verdict)]
    )
    return None if drawn is None else Section("convergence", "Convergence", (*verdict, drawn))


def _shared(measured: Measured) -> Section | None:
    if not measured.shared:
        return None
    head, ends = ("Parameter", "Mean", "SD", "5%", "Median", "95%"), [0.05, 0.5, 0.95]
    rows = [
        (e.label, *map(number, (e.draws.mean(), e.draws.std(), *np.quantile(e.draws, ends))))
        for e in measured.shared
    ]
    table = ReportTable(
        "Posterior of the global parameters, which all clients share: mean, standard deviation (SD) and quantiles",
        head,
        tuple(rows[:ROWS]),
        note=_left_out(len(rows), "parameters"),
    )
    return Section("global", "The global level", (table,))


def _own(measured: Measured) -> list[Section]:
    entries = measured.own
    if not entries:
        return []
    shown = sorted(entries, key=lambda e: -e.apart)[:SHOWN]
    blocks: list[Text | ReportTable | Picture] = []
    if len(entries) > SHOWN:
        words = (
            f"Each client has {len(entries)} parameters. The figures show the {len(shown)} in "
            "which clients differ most"
        )
        blocks.append(Text(f"{words}, relative to their uncertainty."))
    blocks += [pictures.forest(measured, e) for e in shown]
    if shown[0].expected is not None:
        blocks.append(pictures.densities(measured, shown[0]))
    map_ = pictures.clients(measured)
    blocks += [*([map_] if map_ else []), _client_table(measured, shown[:2])]
    shrunk = _shrinkage(measured, [e for e in shown if e.local_only is not None])
    return [Section("clients", "The clients", tuple(blocks)), shrunk]


def _client_table(measured: Measured, shown: list[SiteEntry]) -> ReportTable:
    data = measured.fit.federation.data
    head = ["Client", "Rows", *(f"{e.label}, mean (SD)" for e in shown)]
    extra = _client_columns(measured)
    order, rows = np.argsort(-data.counts.numpy(), kind="stable"), []
    for i in order[:ROWS]:
        cells = [data.names[i], str(int(data.counts[i]))]
        cells += [
            f"{number(float(e.draws[:, i].mean()))} ({number(float(e.draws[:, i].std()), 2)})"
            for e in shown
        ]
        values = [(name, float(series.iloc[i])) for name, series, _ in extra]
        cells += [share(v) if name == REDUCTION else number(v, 2) for name, v in values]
        rows.append(tuple(cells))
    head += [name for name, _, _ in extra]
    note = " ".join([words for _, _, words in extra] + [_left_out(len(order), "clients")]).strip()
    return ReportTable(
        "Posterior of each client, sorted by number of rows", tuple(head), tuple(rows), note=note
    )


def _client_columns(measured: Measured) -> list[tuple[str, pd.Series, str]]:
    """Return further columns of the table of clients: header, value of each client, explanation."""
    k_hat = measured.evidence.k_hats
    extra: list[tuple[str, pd.Series, str]] = []
    if measured.evidence.information is not None:
        nats, narrower = (measured.evidence.information[name] for name in ("nats", "narrower"))
        words = "what the client's own rows add to the global prior (Kullback-Leibler divergence)"
        extra.append(("Information, nats", nats, f"Information: {words}."))
        words = "from the global prior to the client's posterior, mean over its parameters"
        extra.append((REDUCTION, narrower, f"{REDUCTION}: {words}."))
    if k_hat is not None:
        words = "of the guide for the client's parameters, given the global ones"
        extra.append(("k-hat", k_hat, f"k-hat: {words}; it should be below {K_HAT}."))
    return extra


def _shrinkage(measured: Measured, shown: list[SiteEntry]) -> Section:
    blocks: list[Text | Picture] = []
    if measured.evidence.information is not None:
        narrower = measured.evidence.information["narrower"].sort_values()
        least, greatest = (
            f"{narrower.index[k]} ({share(float(narrower.iloc[k]))})" for k in (0, -1)
        )
        words = (
            "On average, a client's own rows reduce the variance of its parameters by "
            f"{share(float(narrower.mean()))}, compared with the global prior: least for {least}, "
            f"most for {greatest}."
        )
        blocks.append(Text(words))
    if shown:
        blocks += [pictures.shrinkage(measured, e) for e in shown]
    else:
        blocks.append(Text("Pass a local-only fit, local_only=, to compare with it."))
    return Section("shrinkage", "Shrinkage", tuple(blocks))


SCORES = {
    "rows": "Rows",
    "log_score": "Log score",
    "accuracy": "Accuracy",
    "brier": "Brier score",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage": "Coverage of 90% intervals",
    "ece": "Calibration error",
    "ece_by_chance": "Calibration error by chance",
    "sharpness": "Sharpness",
}


def _predictions(measured: Measured) -> Section | None:
    if measured.scores is None:
        return None
    rows = "held-out" if measured.scored.held_out else "training"
    drawn = [
        figure for figure in (pictures.calibration(measured), pictures.rates(measured)) if figure
    ]
    tables = (_score_summary(measured.scores), _score_table(measured.scores, rows))
    return Section("predictions", "Predictions and calibration", (*drawn, *tables))


def _score_summary(scores: pd.DataFrame) -> ReportTable:
    summary = across_clients(scores)
    columns = ["weighted", "mean", "worst_decile", "variance"]
    lines = [
        (SCORES[str(name)], *map(number, row[columns].astype(float)), str(row["worst"]))
        for name, row in summary.iterrows()
    ]
    head = "Score,Weighted by rows,Equal weights,Worst tenth,Variance over clients,Worst client"
    return ReportTable(
        "Scores over all clients, and how much they vary",
        tuple(head.split(",")),
        tuple(lines),
        note="Weighted by rows, equal weights: mean over clients (of RMSE weighted by rows, the "
        "root mean square). Worst tenth: mean over the worst tenth of the clients, at least one.",
    )


def _score_table(scores: pd.DataFrame, rows: str) -> ReportTable:
    columns = [name for name in SCORES if name in scores]
    lines = [
        (str(name), *(str(int(row[c])) if c == "rows" else number(float(row[c])) for c in columns))
        for name, row in scores.iterrows()
    ]
    note = (
        "Higher is better for the log score (nats per row) and the accuracy; lower is better for "
        "the Brier score, RMSE, CRPS and calibration error. By chance: the calibration error of "
        "perfectly calibrated predictions for so few rows. Sharpness: the Brier score that the "
        "predictions would have if they were calibrated; for numeric labels, the mean predictive SD."
    )
    return ReportTable(
        f"Scores of each client on {rows} rows",
        ("Client", *(SCORES[c] for c in columns)),
        tuple(lines[:ROWS]),
        note=f"{note} {_left_out(len(lines), 'clients')}".strip(),
    )


def _strangers(measured: Measured) -> Section | None:
    drawn = pictures.strangers(measured)
    if drawn is None or measured.scored.foreign is None:
        return None
    names = {
        "auroc": "AUROC, entropy",
        "fpr95": "FPR95, entropy",
        "mi_auroc": "AUROC, mutual information",
        "mi_fpr95": "FPR95, mutual information",
    }
    columns = [c for c in names if c in measured.scored.foreign.clients]
    groups = [("All", measured.scored.foreign.overall), *measured.scored.foreign.clients.iterrows()]
    rows = [(str(name), *(number(float(row[c])) for c in columns)) for name, row in groups]
    note = (
        "AUROC: the probability that a foreign row has a higher entropy (or mutual information), "
        "and so a less certain prediction, than an own row; 0.5 is chance. FPR95: the share of "
        "foreign rows accepted by a threshold that accepts 95% of own rows; lower is better."
    )
    table = ReportTable(
        "How well the uncertainty of predictions separates foreign rows from own rows",
        ("Client", *(names[c] for c in columns)),
        tuple(rows[: ROWS + 1]),
        note=note,
    )
    return Section("foreign", "Foreign rows", (drawn, table))


def _left_out(count: int, what: str) -> str:
    """Say how many entries a table of at most 200 rows leaves out; empty if none."""
    return f"{count - ROWS} more {what} are not shown." if count > ROWS else ""


COLUMNS = {
    "moved": "Means moved, SD",
    "changed": "SDs changed, share",
    "r_hat": "R-hat",
    "k_hat": "k-hat",
    "effective": "Effective draws",
}
NOTES = {
    "moved": "Means moved: the largest shift of a mean since the round before, in posterior SDs.",
    "changed": "SDs changed: the largest relative change of an SD.",
    "r_hat": f"R-hat: split R-hat of the server's chains; below {R_HAT} they have mixed.",
    "k_hat": f"k-hat: Pareto shape of the importance weights; below {K_HAT} they can be trusted.",
    "effective": "Effective draws: 1 / the sum of squared weights.",
}


def table_of_rounds(history: pd.DataFrame) -> ReportTable | None:
    """Tabulate how far the posterior moved in each round, without numbers carried over, or None."""
    columns = [name for name in COLUMNS if name in history]
    if not {"moved", "k_hat"} & set(columns):
        return None
    rows, before = [], dict.fromkeys(columns, math.nan)
    for place, record in enumerate(history[columns].to_dict("records")):
        cells = [
            "" if math.isnan(value) or value == before[name] else number(value)
            for name, value in ((name, float(record[name])) for name in columns)
        ]
        before = {name: float(record[name]) for name in columns}
        rows.append((str(place + 1), *cells))
    return ReportTable(
        "What changed in each round",
        ("Round", *(COLUMNS[name] for name in columns)),
        tuple(rows),
        note=" ".join(NOTES[name] for name in columns),
    )
