"""Marginal means: the response at each value of a column, averaged over all clients' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.data.clients import ClientData
from hierfl.effects.conditional_effects import chosen, few
from hierfl.effects.contrasts import pairs, several
from hierfl.effects.drawn import Drawn, drawn
from hierfl.effects.intervals import statistics
from hierfl.effects.predictor import mean_response, predictor
from hierfl.effects.predictor_rows import Rows, evaluated, predictors, rows_of_client, typical
from hierfl.formulas.columns import by_client, complete, prepared
from hierfl.formulas.formula import Formula, Frames
from hierfl.formulas.terms import described
from hierfl.posterior.snapshot import Snapshot

AT_ONCE = 4_000_000  # draws x rows whose responses are held at once


def _shown(found: MarginalMeans) -> Shown:
    tables = (("Differences; p is P(difference > 0)", found.differences),)
    return Shown(found.title, None, tables=(("Means", found.frame), *tables))


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class MarginalMeans:
    """The response at each value of one column, averaged over the rows of all clients.

    Args:
        title: what is averaged.
        variable: the column.
        frame: one row per value and level of the response: the column `variable`, `level` of a
            response in categories, `mean`, `sd`, `low` and `high`, the ends of the 90 % interval.
        differences: one row per pair of values, with `contrast` and `p`, as in `Contrasts`: average
            effects of the column.
    """

    title: str
    variable: str
    frame: pd.DataFrame
    differences: pd.DataFrame


@one_at_a_time
def marginal_means(
    fit: Snapshot | Drawn,
    variable: str,
    rows: Frames | None = None,
    *,
    values: Sequence[Any] | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> MarginalMeans:
    """Return the response at each value of one column, averaged over the rows of all clients.

    Each client sets the column to the value in all its rows, keeps their other columns, and takes
    the mean response expected under its own coefficients. It returns the sum of these, a scalar per
    value and draw, and the number of its rows. The server adds them up. A binomial response is
    averaged as the share of successes.

    Args:
        fit: of a `hierfl.formula`, with the clients' rows.
        variable: a column that the formula reads.
        rows: frames of fitted clients, as `hierfl.fit` takes them. Default None: the rows of the
            fit, which suffice where no term reads another column beside `variable`.
        values: of the column. Default None: all levels; of a number its mean, and one sd below and
            above it.
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client of `rows` was not fitted.
        ValueError: a value is no level; or a term reads `variable` and another column, and `rows`
            is None; or groups within a client of `rows` are not those of the fit.
        RowsNotSaved: `rows` is None, and the rows were not saved with the fit.
    """
    found = drawn(fit, "marginal_means", draws=draws, seed=seed)
    (column,) = chosen(found.formula, [variable]).values()
    compared = few(column) if values is None else several(variable, column, values)
    each = _of_fit(found, variable, compared) if rows is None else _of(found, rows, variable)
    total, weight = torch.zeros(()), 0.0
    for client, remade in each:
        sums, own = _sum_of_client(found, client, [remade(value) for value in compared])
        total, weight = total + sums, weight + own
    at_draws = total / weight  # (S, values, levels)
    response = found.formula.declared.parts.response
    levels = found.response.levels if at_draws.shape[-1] > 1 else ("",)
    columns: dict[str, Any] = {variable: np.repeat(np.array(compared), len(levels))}
    if levels != ("",):
        columns["level"] = list(levels) * len(compared)
    return MarginalMeans(
        title=f"{response} by {variable}, averaged over all clients' rows",
        variable=variable,
        frame=pd.DataFrame({**columns, **statistics(at_draws)}),
        differences=pairs(at_draws, compared, levels, "difference", "response"),
    )


def _sum_of_client(found: Drawn, client: int, sets: Sequence[Rows]) -> tuple[Tensor, float]:
    """Return a client's sum of expected responses, (S, values, levels), and of its weights."""
    parts = []
    for rows in sets:
        sums = []
        for some in in_turn(rows, found.count):
            mean = mean_response(found, predictor(found, some, client))
            mean = mean[..., None] if mean.dim() == 2 else mean
            sums.append(torch.einsum("n,snl->sl", some.weights, mean))
        parts.append(torch.stack(sums).sum(0))
    return torch.stack(parts, 1), float(sets[0].weights.sum())


def in_turn(rows: Rows, draws: int) -> Iterator[Rows]:
    """Yield a client's rows in blocks whose responses at all draws fit into memory."""
    size = max(1, AT_ONCE // draws)
    for first in range(0, rows.count, size):
        place = slice(first, first + size)
        groups, codes, fields = (
            {name: value[place] for name, value in of.items()}
            for of in (rows.groups, rows.codes, rows.fields)
        )
        yield Rows(rows.common[place], rows.offset[place], groups, codes, fields)


Remade = Callable[[Any], Rows]


def _of_fit(found: Drawn, variable: str, values: Sequence[Any]) -> Iterator[tuple[int, Remade]]:
    """Yield each client, and the function of a value that returns its rows with `variable` at that value."""
    formula = found.formula
    common = _columns_of(formula, None, variable)
    groups = {
        term.site: _columns_of(formula, term.site, variable) for term in formula.layout.groups
    }
    made = {str(value): typical(formula, None, {variable: [value]}) for value in values}
    for client in range(len(found.clients)):
        own = rows_of_client(formula, found.data, client)

        def remade(value: Any, own: Rows = own) -> Rows:
            one = made[str(value)]
            new = {site: own.groups[site].clone() for site in own.groups}
            for site, places in groups.items():
                new[site][:, places] = one.groups[site][:, places]
            both = own.common.clone()
            both[:, common] = one.common[:, common]
            return replace(own, common=both, groups=new)

        yield client, remade


def _columns_of(formula: Formula, site: str | None, variable: str) -> list[int]:
    """Return the places of the common columns, or of a group's, that read a variable."""
    layout = formula.layout
    if site is None:
        text, design = formula.declared.parts.common, layout.common
        columns = design.columns
    else:
        term = next(term for term in layout.groups if term.site == site)
        text, design, columns = term.group.terms, term.design, term.columns
    known = {term.name: term.columns for term in design.terms}
    places = []
    for one in described(text).common_terms:
        read = set(getattr(one, "var_names", ())) - {""}
        if variable not in read:
            continue
        if read != {variable} or one.name not in known:
            raise ValueError(
                f"the term '{one.name}' reads '{variable}' and the fit keeps no columns apart: "
                f"pass the clients' frames, fit.marginal_means('{variable}', frames)"
            )
        places += [columns.index(name) for name in known[one.name]]
    return places


def _of(found: Drawn, frames: Frames, variable: str) -> Iterator[tuple[int, Remade]]:
    """Yield each client of some frames, and its rows with the column at a value."""
    formula, declared = found.formula, found.formula.declared
    columns = predictors(formula)
    response = declared.parts.response
    parts = by_client(frames, declared.clients)
    labeled = all(response in frame.columns for frame in parts.values())
    unseen = () if labeled else (response, *declared.parts.additions.values())
    kinds = {name: kind for name, kind in declared.rows_of.items() if name not in unseen}
    data: ClientData = formula.data(frames, labeled=labeled)
    for name, frame in parts.items():
        if name not in found.clients:
            raise KeyError(
                f"client '{name}' was not fitted: leave its rows out, or fit.personalize(its "
                "rows) first"
            )
        own = rows_of_client(formula, data, data.names.index(name))
        _check_within(found, own, name)
        plain = complete(frame, kinds, name, declared.missing)

        def remade(
            value: Any, own: Rows = own, plain: pd.DataFrame = plain, name: str = name
        ) -> Rows:
            ready = prepared(plain.assign(**{variable: value}), columns, name)
            made = evaluated(formula, ready, name, own.codes)
            return replace(own, common=made.common, offset=made.offset, groups=made.groups)

        yield found.clients.index(name), remade


def _check_within(found: Drawn, rows: Rows, client: str) -> None:
    """Refuse rows whose groups within the client, known by index, are not those of the fit."""
    for term in found.layout.at("within"):
        fitted = rows_of_client(found.formula, found.data, found.clients.index(client))
        if not torch.equal(fitted.codes[term.site], rows.codes[term.site]):
            raise ValueError(
                f"the rows of client '{client}' have other groups of '{term.group.name}' than "
                "when fitted, and these are known by index alone: pass the frames of the "
                "fit"
            )
