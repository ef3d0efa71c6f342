"""Contrasts: how much the response differs between values of one column, the others held fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.effects.conditional_effects import chosen
from hierfl.effects.drawn import Drawn, drawn
from hierfl.effects.intervals import share_above, statistics
from hierfl.effects.predictor import Scale, asked, check_scale, on_scale, predictor
from hierfl.effects.predictor_rows import checked, typical
from hierfl.formulas.columns import Column
from hierfl.posterior.snapshot import Snapshot

Kind = Literal["difference", "ratio"]
LOGARITHMS = ("log", "logit", "cloglog")  # links whose differences are logarithms of ratios


def _shown(found: Contrasts) -> Shown:
    edge = "0" if found.kind == "difference" else "1"
    note = f"low and high are the ends of the 90 % interval; p is P({found.kind} > {edge})."
    return Shown(found.title, found.frame, note)


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class Contrasts:
    """How much the response differs between values of one column.

    Args:
        title: what is compared.
        variable: the column.
        kind: "difference" or "ratio".
        scale: "response" or "link".
        frame: one row per pair of values, client and level of the response: `contrast`, such as "m
            - f", `client` ("" for the average client, "new" for a new one), `level` of a response
            in categories, `mean`, `sd`, `low` and `high`, the ends of the 90 % interval, and `p`,
            the posterior probability of a difference above 0, or a ratio above 1.
    """

    title: str
    variable: str
    kind: Kind
    scale: Scale
    frame: pd.DataFrame


@one_at_a_time
def contrasts(
    fit: Snapshot | Drawn,
    variable: str,
    *,
    values: Sequence[Any] | None = None,
    kind: Kind = "difference",
    at: Mapping[str, Any] | None = None,
    client: str | Sequence[str] | None = None,
    scale: Scale = "response",
    draws: int = 1000,
    seed: int = 0,
) -> Contrasts:
    """Compare the response between values of one column, the other columns held at typical values.

    No rows are read, as in `fit.effects`.

    Args:
        fit: of a `hierfl.formula`.
        variable: a column that the formula reads.
        values: every two of them are compared, the later with the earlier. Default None: all
            levels; of a number its mean, and one sd above it.
        kind: "difference", or "ratio". On the link scale a ratio is the exponential of the
            difference: the odds ratio of a logit link, the ratio of rates, times or hazards of a
            log link.
        at: as in `effects`.
        client: as in `effects`.
        scale: "response": means of the response, or probabilities of its levels; "link": linear
            predictors.
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client was not fitted.
        ValueError: fewer than two values, or a value is no level; another `kind` or `scale`; or a
            ratio of what may be negative.
    """
    check_scale(scale)
    found = drawn(fit, "contrasts", draws=draws, seed=seed)
    check_kind(found, kind, scale)
    (column,) = chosen(found.formula, [variable], at).values()
    compared = several(variable, column, values)
    rows = typical(found.formula, at, {variable: compared})
    parts = []
    for name, who in asked(found, client):
        at_draws, levels = on_scale(found, predictor(found, rows, who, seed=seed), scale)
        table = pairs(at_draws, compared, levels, kind, scale)
        table.insert(1, "client", name)
        parts.append(table)
    response = found.formula.declared.parts.response
    words = "differences" if kind == "difference" else "ratios"
    return Contrasts(
        title=f"{words} of {response} between values of {variable}, {scale} scale",
        variable=variable,
        kind=kind,
        scale=scale,
        frame=pd.concat(parts, ignore_index=True),
    )


def several(name: str, column: Column, values: Sequence[Any] | None) -> list[Any]:
    """Return the values to compare; refuse fewer than two different ones."""
    if values is None:
        if column.kind == "category":
            return list(column.levels)
        return [column.mean, column.mean + column.sd]
    found = [checked(name, column, value) for value in values]
    if len(found) < 2 or len(set(found)) < len(found):
        raise ValueError(f"values are {list(values)}: give two or more different ones")
    return found


def check_kind(found: Drawn, kind: object, scale: Scale) -> None:
    """Refuse a kind that is neither of the two words, and ratios of what may be negative."""
    if kind not in ("difference", "ratio"):
        raise ValueError(f"kind is {kind!r}: it must be 'difference' or 'ratio'")
    if kind == "difference":
        return
    family = found.family
    if scale == "link" and family.link not in LOGARITHMS and family.name != "lognormal":
        raise ValueError(
            f"kind is 'ratio', and the link of {family.name} is '{family.link}', no logarithm: "
            "take kind='difference', or scale='response'"
        )
    if scale == "response" and family.kind == "real" and family.link != "log":
        raise ValueError(
            f"kind is 'ratio', and responses of {family.name} may be negative: take "
            "kind='difference'"
        )


def pairs(
    at_draws: Tensor, values: Sequence[Any], levels: Sequence[str], kind: Kind, scale: Scale
) -> pd.DataFrame:
    """Return a row per pair of values, the later against the earlier, and level, of draws (S, values, levels)."""
    names = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    parts = []
    for i, j in combinations(range(len(values)), 2):
        first, second = at_draws[:, i], at_draws[:, j]
        if kind == "difference":
            draws, sign, edge = second - first, "-", 0.0
        else:
            draws, sign, edge = second / first, "/", 1.0
            if scale == "link":
                draws = torch.exp(second - first)
        columns: dict[str, Any] = {"contrast": [f"{names[j]} {sign} {names[i]}"] * len(levels)}
        if tuple(levels) != ("",):
            columns["level"] = list(levels)
        columns |= {**statistics(draws), "p": share_above(draws, edge)}
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)
