"""Answers after the rounds that no client's draws or predictions give, or that are unlike those of most others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hierfl.core.trees import Tree, named_leaves
from hierfl.formulas.odd_answers import far_from_most, unlike_most
from hierfl.nodes.messages import Refused
from hierfl.nodes.updates import FAR

# of a distribution, in its sds: Cantelli's bounds of the quantiles of 5, 50 and 95%
REACH = (19.0**0.5, 1.0, 19.0**0.5)
NEAR = 1e-3  # of an sd, and of single precision


def check_answer(kind: str, tree: Tree, rows: int) -> None:
    """Refuse an answer about a client that its draws, or predictions of so many rows, cannot give."""
    for why in CHECKS[kind](tree, rows) if kind in CHECKS else ():
        raise Refused(why)


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
