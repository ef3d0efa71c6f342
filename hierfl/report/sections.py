"""The sections of a page, from what was measured."""

from __future__ import annotations

import platform
from importlib.metadata import version

import numpy as np
import pandas as pd

from hierfl.diagnostics import across_clients
from hierfl.report import figures
from hierfl.report.blocks import Picture, Section, Table, Text, number, share
from hierfl.report.measurements import Entry, Measured

SHOWN = 3  # numbers of clients that are drawn: those in which clients differ most
ROWS = 200  # of a table


def sections(found: Measured) -> list[Section]:
    """Those that there is something to say in."""
    made = (
        _run(found),
        _convergence(found),
        _shared(found),
        *_own(found),
        _predictions(found),
        _strangers(found),
    )
    return [section for section in made if section]


def _run(found: Measured) -> Section:
    fit, data = found.fit, found.fit.federation.data
    history, counts = fit.history, data.counts
    guide, latents = fit.method.guide, fit.program.latents
    software = {"hierfl": "hierfl", "torch": "torch", "pyro-ppl": "Pyro", "arviz": "ArviZ"}
    facts = {
        "Method": fit.method.name,
        "Model": getattr(fit.method.model, "__name__", type(fit.method.model).__name__),
        "Guide": getattr(guide, "__name__", type(guide).__name__),
        "Clients": f"{data.num_clients}, with {int(counts.min())} to {int(counts.max())} rows (median {int(counts.median())})",
        "Latent numbers": f"{latents.global_block.size:,} for all, {latents.local_block.size:,} for each client",
        "Rounds": f"{len(history)}, {int(history['clients'].max()) if 'clients' in history else data.num_clients} clients in each",
        "Sent": _bytes(history),
        "Time": f"{number(float(history['seconds'].sum()))} s"
        if "seconds" in history
        else "not recorded",
        "Seed": str(fit.federation.seed),
        "Software": ", ".join(f"{name} {version(of)}" for of, name in software.items())
        + f", Python {platform.python_version()}",
    }
    return Section(
        "run",
        "What was run",
        (Table("The run", ("Item", "Value"), tuple(facts.items()), words=True),),
    )


def _bytes(history: pd.DataFrame) -> str:
    if "bytes_up" not in history:
        return "not recorded"
    down, up = (float(history[f"bytes_{way}"].sum()) for way in ("down", "up"))
    return f"{_size(down)} to clients, {_size(up)} from them; no row of data"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000.0 or unit == "GB":
            return f"{number(count)} {unit}"
        count /= 1000.0
    raise AssertionError


def _convergence(found: Measured) -> Section | None:
    drawn = figures.run(found)
    verdict = [] if isinstance(found.run, str) else [Text(found.run.verdict)]
    return None if drawn is None else Section("convergence", "Convergence", (*verdict, drawn))


def _shared(found: Measured) -> Section | None:
    if not found.shared:
        return None
    head = ("Number", "Mean", "Sd", "5 %", "Median", "95 %")
    rows = [
        (
            e.label,
            *map(number, (e.draws.mean(), e.draws.std(), *np.quantile(e.draws, [0.05, 0.5, 0.95]))),
        )
        for e in found.shared
    ]
    table = Table(
        "Posterior of what all clients share",
        head,
        tuple(rows[:ROWS]),
        note=_left_out(len(rows), "numbers"),
    )
    return Section("global", "The global level", (table,))


def _own(found: Measured) -> list[Section]:
    entries = found.own
    if not entries:
        return []
    shown = sorted(entries, key=lambda e: -e.apart)[:SHOWN]
    blocks: list[Text | Table | Picture] = []
    if len(entries) > SHOWN:
        words = f"A client has {len(entries)} numbers. Drawn are the {len(shown)} in which clients differ most"
        blocks.append(Text(f"{words}, for how well each is known."))
    blocks += [figures.forest(found, e) for e in shown]
    if shown[0].expected is not None:
        blocks.append(figures.densities(found, shown[0]))
    map_ = figures.clients(found)
    sections = [
        Section(
            "clients",
            "The clients",
            (*blocks, *([map_] if map_ else []), _client_table(found, shown[:2])),
        )
    ]
    return [*sections, _shrinkage(found, [e for e in shown if e.alone is not None])]


def _client_table(found: Measured, shown: list[Entry]) -> Table:
    data = found.fit.federation.data
    k_hat = None if isinstance(found.weighed, str) else found.weighed.k_hat_clients
    head = ["Client", "Rows", *(f"{e.label} (sd)" for e in shown)]
    extra: list[tuple[str, pd.Series, str]] = []
    if found.told is not None:
        extra.append(
            (
                "Told, nats",
                found.told["nats"],
                "Told: what its own rows add to what is expected of a client.",
            )
        )
        extra.append(
            (
                "Narrower by",
                found.told["narrower"],
                "Narrower: its variance beside the one expected, a mean over its numbers.",
            )
        )
    if k_hat is not None:
        extra.append(
            ("k-hat", k_hat, "k-hat: of its own numbers given the global ones, to be under 0.7.")
        )
    order, rows = np.argsort(-data.counts.numpy(), kind="stable"), []
    for i in order[:ROWS]:
        cells = [data.names[i], str(int(data.counts[i]))]
        cells += [
            f"{number(float(e.draws[:, i].mean()))} ({number(float(e.draws[:, i].std()), 2)})"
            for e in shown
        ]
        values = [(name, float(series.iloc[i])) for name, series, _ in extra]
        rows.append(
            (*cells, *(share(v) if name == "Narrower by" else number(v, 2) for name, v in values))
        )
    head += [name for name, _, _ in extra]
    note = " ".join([words for _, _, words in extra] + [_left_out(len(order), "clients")]).strip()
    return Table("Posterior of every client, by rows", tuple(head), tuple(rows), note=note)


def _shrinkage(found: Measured, shown: list[Entry]) -> Section:
    blocks: list[Text | Picture] = []
    if found.told is not None:
        told = found.told["narrower"].sort_values()
        least, most = (f"{told.index[k]} ({share(float(told.iloc[k]))})" for k in (0, -1))
        words = (
            f"A client's own rows narrow the spread (variance) that the global level leaves it by {share(float(told.mean()))} on "
            f"average: least at {least}, most at {most}."
        )
        blocks.append(Text(words))
    if shown:
        blocks += [figures.shrinkage(found, e) for e in shown]
    else:
        blocks.append(
            Text(
                "What each client would say alone was not given (alone=), so that estimates are not drawn beside it."
            )
        )
    return Section("shrinkage", "Shrinkage", tuple(blocks))


SCORES = {
    "rows": "Rows",
    "log_score": "Log score",
    "accuracy": "Accuracy",
    "brier": "Brier score",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage": "In 90 % interval",
    "ece": "Calibration error",
    "ece_by_chance": "by chance",
    "sharpness": "Sharpness",
}


def _predictions(found: Measured) -> Section | None:
    if found.scores is None:
        return None
    rows = "held-out" if found.held_out else "training"
    drawn = [figure for figure in (figures.calibration(found), figures.rates(found)) if figure]
    columns = [name for name in SCORES if name in found.scores]
    each = [
        (str(name), *(str(int(row[c])) if c == "rows" else number(float(row[c])) for c in columns))
        for name, row in found.scores.iterrows()
    ]
    note = (
        "The log score is in nats a row, higher is better; sharpness is the Brier score (of numbers: the sd) that such predictions "
        "would have were they calibrated."
    )
    clients = Table(
        f"Scores of every client, on {rows} rows",
        ("Client", *(SCORES[c] for c in columns)),
        tuple(each[:ROWS]),
        note=f"{note} {_left_out(len(each), 'clients')}".strip(),
    )
    summary = across_clients(found.scores)
    lines = [
        (
            SCORES[str(name)],
            *(number(float(row[c])) for c in ("weighted", "mean", "worst_decile", "variance")),
            str(row["worst"]),
        )
        for name, row in summary.iterrows()
    ]
    head = ("Score", "By rows", "By clients", "Worst tenth", "Variance", "Worst client")
    over = Table(
        "How even scores are over clients",
        head,
        tuple(lines),
        note="Worst tenth: the mean over the worst tenth of the clients, one at least.",
    )
    return Section("predictions", "Predictions and calibration", (*drawn, over, clients))


def _strangers(found: Measured) -> Section | None:
    drawn = figures.strangers(found)
    if drawn is None or found.foreign is None:
        return None
    names = {
        "auroc": "AUROC, entropy",
        "fpr95": "FPR95",
        "mi_auroc": "AUROC, mutual information",
        "mi_fpr95": "FPR95",
    }
    columns = [c for c in names if c in found.foreign.clients]
    rows = [("All", *(number(float(found.foreign.overall[c])) for c in columns))]
    rows += [
        (str(name), *(number(float(row[c])) for c in columns))
        for name, row in found.foreign.clients.iterrows()
    ]
    note = (
        "AUROC: the chance that a foreign row scores higher than an own one. FPR95: the share of foreign rows that pass where 95 % of "
        "own rows do."
    )
    table = Table(
        "Foreign rows told from own ones",
        ("Client", *(names[c] for c in columns)),
        tuple(rows[: ROWS + 1]),
        note=note,
    )
    return Section("foreign", "Out of distribution", (drawn, table))


def _left_out(count: int, what: str) -> str:
    return f"{count - ROWS} more {what} are left out." if count > ROWS else ""
