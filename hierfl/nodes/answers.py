"""What a fit over nodes answers: what nodes send of their clients after the rounds, and what the server knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.tables import Shown, printed
from hierfl.core.trees import Tree, named_leaves, nbytes
from hierfl.data.clients import ClientData
from hierfl.diagnostics.summary import Summary, summary_of_globals
from hierfl.diagnostics.verdict import of_history
from hierfl.engine.client_store import taken
from hierfl.engine.rounds import times_left_out
from hierfl.formulas.odd_answers import far_from_most, unlike_most
from hierfl.nodes.account import END
from hierfl.nodes.local_fit import Few, without_few
from hierfl.nodes.messages import (
    SILENT,
    AfterKind,
    Answer,
    Refused,
    StateRequest,
    check_about,
    check_numbers,
    from_bytes,
    last_counted,
    mail_of,
    read_typed,
    to_bytes,
)
from hierfl.nodes.updates import FAR
from hierfl.runs.result import Fit

UNKNOWN = "Whether to trust this fit is not known: the method does not tell."
Of = TypeVar("Of")


@printed
@dataclass(frozen=True, eq=False)
class FromNodes(Generic[Of]):
    """What nodes answered: client -> what was `given`, or why it was `withheld`."""

    given: Mapping[str, Of]
    withheld: Mapping[str, str]

    def __tables__(self) -> Shown:
        rows = [(name, "given") for name in self.given] + list(self.withheld.items())
        return Shown(
            f"Answers of {len(self.given)} of {len(rows)} nodes",
            pd.DataFrame(sorted(rows), columns=["client", "answer"]),
            "What stays at a node is written into its folder.",
        )

    @property
    def table(self) -> pd.DataFrame:
        """One table of all clients, with the client in front.

        Raises:
            ValueError: no node gave a table.
        """
        frames = {k: v for k, v in self.given.items() if isinstance(v, pd.DataFrame)}
        if not frames:
            why = next(iter(self.withheld.values()), "draws are tensors: see .given")
            raise ValueError(f"no node gave a table ({why})")
        return pd.concat(frames, names=["client"]).reset_index(level=0)


def ask_nodes(
    fit: Any,
    kind: AfterKind,
    read: Callable[[Tree], Of],
    rows: ClientData | None = None,
    clients: Collection[str] | None = None,
    **options: Any,
) -> FromNodes[Of]:
    """Ask the nodes of all clients, of some, or of those that some rows belong to."""
    if clients is None:
        clients = fit.clients if rows is None else rows.names
    fit.federation.data.index(clients)  # refuses unknown clients
    contents = {name: _question(fit, kind, name, rows, options) for name in clients}
    data = fit.federation.data if rows is None else rows
    counts = dict(zip(data.names, data.counts.tolist(), strict=True))
    trees, given, withheld = dict[str, Tree](), dict[str, Of](), dict[str, str]()
    for answer in fit.ask(contents):
        if answer.client not in contents or answer.client in given:
            continue
        try:
            tree, few = _read(fit, answer, kind, counts[answer.client])
            given[answer.client] = read(without_few(tree, few))
            trees[answer.client] = tree
        except Exception as error:  # whatever crafted bytes raise
            withheld.setdefault(answer.client, str(error)[:500])
    withheld |= unlike_others(kind, trees)
    given = {name: given[name] for name in clients if name in given and name not in withheld}
    others = sorted(contents.keys() - given.keys())
    return FromNodes(given, {name: withheld.get(name, SILENT) for name in others})


def imputed_at_nodes(fit: Any, draws: int = 1000, *, seed: int = 0) -> FromNodes[None]:
    """Let each node draw what its client's rows lack of the covariates of `mi()`, as `hierfl.Fit.imputed` does.

    A node writes the table into its folder, for its owner. It sends nothing, whatever its policy says.

    Args:
        fit: over nodes, of a formula.
        draws: S.
        seed: of the draws.

    Raises:
        ValueError: the model is no formula with `mi()`.
    """
    declared = getattr(fit.method.model, "declared", None)
    if declared is None or not declared.imputed:
        raise ValueError("the model is not a formula with mi(x), so that nothing is imputed")
    return ask_nodes(fit, "imputed", lambda tree: None, draws=draws, seed=seed)


def end_run(fit: Any, clients: Collection[str]) -> frozenset[str]:
    """Send clients the state that a run has ended with; return those whose nodes answer under it alone from now on."""
    ended = set()
    with suppress(Exception):  # of a transport: a later question tells it
        for answer in fit.ask({name: _question(fit, END, name, None, {}) for name in clients}):
            with suppress(Refused):
                if from_bytes(answer.content).about == _about(fit, answer.client, END):
                    ended.add(answer.client)
    return frozenset(ended & {*clients})


def _about(fit: Any, client: str, kind: str) -> dict[str, Any]:
    """Return what a node's answer to a question says of itself."""
    return {"run": fit.joined.get(client, fit.run), "client": client, "kind": kind}


def _question(
    fit: Any, kind: str, name: str, rows: ClientData | None, options: Mapping[str, Any]
) -> bytes:
    own = taken(fit.progress.table, fit.federation.data.index([name])[:1])
    fields = {} if rows is None else dict(rows.select([name]).fields)
    counted = last_counted(fit.federation, fit.progress.history).get(name, -1)
    run, ends = fit.joined.get(name, fit.run), kind == END or name not in fit.ended
    request = StateRequest(kind, run, fit.progress.round, counted, ends, **options)  # type: ignore[arg-type]
    tree = {"message": fit.message, "mail": mail_of(fit.federation.client, own, 0), "rows": fields}
    return to_bytes(tree, asdict(request))


def _read(fit: Any, answer: Answer, kind: AfterKind, rows: int) -> tuple[Tree, Few]:
    """Return what a node released in answer to this question, and its groups of few rows; refuse any other."""
    if answer.content is None:
        raise Refused(answer.reason or SILENT)
    tree, about = from_bytes(answer.content)
    check_about(about, _about(fit, answer.client, kind), "few", "stays")
    if "stays" in about:
        raise Refused(str(about["stays"])[:500])
    check_numbers(tree)
    if not nbytes(tree):
        raise Refused("its answer is empty")
    for why in CHECKS[kind](tree, rows) if kind in CHECKS else ():
        raise Refused(why)
    return tree, read_typed(Few, about.get("few"), "list of groups")


def brief_over(fit: Any) -> Shown:
    """Return what a fit over nodes prints."""
    times = times_left_out(fit.progress.history)
    skipped = f"a client skipped {times} time{'s' * (times > 1)}, " if times else ""
    rounds = fit.progress.round
    title = (
        f"FitOverNodes({fit.method.name}, {len(fit.clients)} clients, "
        f"{rounds} round{'s' * (rounds != 1)}, {skipped}{nbytes(fit.message)} bytes sent to a client)"
    )
    hint = "fit.summary() shows the global sites; fit.local_summary() asks nodes for their own."
    return Shown(title, note="\n".join((*_chosen(fit), _judged(fit.here)[0], hint)))


def _chosen(fit: Any) -> list[str]:
    return [f"Chosen: {fit.chosen}."] if fit.chosen else []


def _judged(fit: Fit) -> tuple[str, bool | None]:
    judged = of_history(fit)
    if judged is not None:
        return judged.words, judged.trustworthy
    return fit.progress.verdict or UNKNOWN, None


def summary_over(fit: Any, prob: float, draws: int, seed: int) -> Summary:
    """Return the table of the global sites, in brms's order of a formula."""
    at_nodes = "Clients' own sites are at their nodes: fit.local_summary() asks for them."
    remarks = (*_chosen(fit), at_nodes)
    how: Any = {"prob": prob, "draws": draws, "seed": seed, "remarks": remarks}
    return summary_of_globals(fit.here, _judged(fit.here), **how)


def refused(name: str) -> Any:
    """Return a method of `hierfl.Fit` that is refused over nodes."""

    def refuse(fit: Any, *args: Any, **how: Any) -> Any:
        raise ValueError(
            f"fit.{name} reads rows, which are at the nodes: docs/nodes.md says what nodes answer"
        )

    refuse.__name__, refuse.__doc__ = name, f"Refuse `hierfl.Fit.{name}`, which reads rows."
    return refuse


# ------------------------------------------------------------ answers that no client gives
# of a distribution, in its sds: Cantelli's bounds of the quantiles of 5, 50 and 95%
REACH = (19.0**0.5, 1.0, 19.0**0.5)
NEAR = 1e-3  # of an sd, and of single precision


def _summaries(sites: Mapping[str, Mapping[str, Tensor]], rows: int) -> Iterator[str]:
    for site, of in sites.items():
        if {*of} != {"mean", "sd", "quantiles"}:
            yield f"its summary of '{site}' is of {sorted(of)}"
        mean, sd, quantiles = of["mean"], of["sd"], of["quantiles"]
        if mean.shape != sd.shape or quantiles.shape != (3, *mean.shape):
            yield f"its summary of '{site}' has shapes of different sites"
        room = NEAR * sd + 1e-5 * mean.abs() + 1e-30
        falls = (quantiles.diff(dim=0) < -room).any()
        reach = torch.tensor(REACH, dtype=sd.dtype).reshape(3, *[1] * mean.dim())
        if (sd < 0.0).any() or falls or ((quantiles - mean).abs() > reach * sd + room).any():
            yield f"no draws of '{site}' have its mean, sd and quantiles"


def _predictions(columns: Mapping[str, Tensor], rows: int) -> Iterator[str]:
    if not {"mean"} <= {*columns} <= {"mean", "sd"} or any(
        of.shape[:1] != (rows,) or of.shape != columns["mean"].shape for of in columns.values()
    ):
        yield f"it does not predict a mean, and an sd, of {rows} rows"
    if (columns.get("sd", torch.zeros(1)) < 0.0).any():
        yield "its predictions have an sd below 0"


def _scores(scores: Mapping[str, Tensor], rows: int) -> Iterator[str]:
    if any(of.numel() != 1 for of in scores.values()) or float(scores["rows"]) != rows:
        yield f"it does not score {rows} rows"
    for name, most in (("accuracy", 1.0), ("brier", 1.0), ("rmse", float("inf"))):
        if not 0.0 <= float(scores.get(name, 0.0)) <= most:
            yield f"its {name} is none that predictions have"


# yield why a client's draws, or predictions of so many rows, cannot give an answer
CHECKS: Mapping[str, Callable[[Any, int], Iterator[str]]]
CHECKS = {"summaries": _summaries, "predictions": _predictions, "scores": _scores}

QUOTING = str.maketrans("", "", "['\"]")  # of the names of leaves


def unlike_others(kind: str, trees: Mapping[str, Any]) -> dict[str, str]:
    """Return the clients whose answers have other sites or shapes than most others', or numbers far from theirs."""
    first = 1 if kind == "predictions" else 0  # their rows are a client's own
    forms: dict[str, str] = {}
    sizes: dict[str, dict[str, float]] = {}
    for client, tree in trees.items():
        leaves = sorted(named_leaves(tree).items())
        form = (f"{name} {str(of.dtype)[6:]} {tuple(of.shape[first:])}" for name, of in leaves)
        forms[client] = ", ".join(form).translate(QUOTING)
        for name, of in leaves:
            size = float(of.double().abs().max()) if of.numel() else 0.0
            sizes.setdefault(f"the numbers of {name} are", {})[client] = size
    return unlike_most({"the form of its answer": forms}) | far_from_most(sizes, FAR)
