"""Averages over clients' rows: the response of each row, with a column as it is, set or moved."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.arguments import expect, expect_kind
from hierfl.effects.drawn import CoefficientDraws
from hierfl.effects.imputed import completed
from hierfl.effects.predictor import Scale, on_scale
from hierfl.effects.predictor_rows import (
    DesignRows,
    data_of,
    evaluated,
    in_turn,
    predictors,
    rows_of_client,
    typical,
)
from hierfl.formulas.columns import check_column, complete, level_name, prepared
from hierfl.formulas.formula import Formula, Frames
from hierfl.formulas.imputed import with_known

NewData: TypeAlias = Frames | Literal["mean", "rows"]


@dataclass(frozen=True)
class Intervention:
    """What is done to a column of all rows: None: nothing; else it is set to `value`, or moved by `step`."""

    variable: str | None = None
    value: Any = None
    step: float | None = None

    def on(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return a frame with the column set or moved."""
        if self.variable is None:
            return frame
        if self.step is None:
            return frame.assign(**{self.variable: self.value})
        return frame.assign(**{self.variable: frame[self.variable].astype(float) + self.step})


class Responses(NamedTuple):
    """Responses, (S, clients or groups, settings, levels), and names of clients or groups and of levels."""

    draws: Tensor
    dims: Mapping[str, Sequence[str]]
    levels: tuple[str, ...]


def averages(
    draws: CoefficientDraws,
    newdata: NewData,
    settings: Sequence[Intervention],
    by: str | None,
    scale: Scale,
) -> Responses:
    """Return the mean response over rows of clients under each setting, by the values of a column."""
    expect_kind(by, str | None, "by", "give the name of one column")
    if not draws.clients:
        raise ValueError("clients' rows are at their nodes: use a typical row, newdata='mean'")
    if draws.family.kind == "angle" and scale == "response":
        raise ValueError("angles have no average: use scale='link', or fit.effects")
    sums: dict[str, Tensor] = {}
    weights: dict[str, float] = {}
    levels: tuple[str, ...] = ("",)
    source = _of_fit if isinstance(newdata, str) else _of_frames
    for client, sets, names in source(draws, newdata, settings, by):
        groups, codes = np.unique(names, return_inverse=True)
        member = torch.nn.functional.one_hot(torch.as_tensor(codes), len(groups)).double()
        member = member * sets[0].weights[:, None]
        total, levels = _sums(draws, sets, member, client, scale)
        for place, group in enumerate(groups.tolist()):
            sums[group] = sums.get(group, torch.zeros(())) + total[:, place]
            weights[group] = weights.get(group, 0.0) + float(member[:, place].sum())
    ordered = _in_order(draws, by, list(sums))
    means = torch.stack([sums[name] / weights[name] for name in ordered], 1)
    return Responses(means, {} if by is None else {by: ordered}, levels)


def _in_order(draws: CoefficientDraws, by: str | None, names: list[str]) -> list[str]:
    """Return groups in the order of the clients, of a column's levels, or of their names."""
    column = draws.formula.agreed.columns.get(by or "")
    places = draws.clients if by == draws.formula.clients else column.levels if column else ()
    return sorted(names, key=lambda n: (places.index(n) if n in places else len(places), n))


def _sums(
    draws: CoefficientDraws, sets: Sequence[DesignRows], member: Tensor, client: int, scale: Scale
) -> tuple[Tensor, tuple[str, ...]]:
    """Return a client's sums of responses, (S, groups, settings, levels), and the levels."""
    settings = []
    levels: tuple[str, ...] = ("",)
    for rows in sets:
        sums, first = [], 0
        for some in in_turn(rows, draws.count):
            value, levels = on_scale(draws, some, client, scale)
            sums.append(torch.einsum("ng,snl->sgl", member[first : first + some.count], value))
            first += some.count
        settings.append(torch.stack(sums).sum(0))
    return torch.stack(settings, 2), levels


Each = Iterator[tuple[int, list[DesignRows], NDArray[np.str_]]]


# ------------------------------------------------------------ the rows of the fit
def _of_fit(
    draws: CoefficientDraws, newdata: Any, settings: Sequence[Intervention], by: str | None
) -> Each:
    """Yield each client, its rows under each setting, and the group of each row."""
    expect(newdata=(newdata, ("rows",)))
    formula = draws.formula
    for lack in _lacks(formula, settings, by):
        raise ValueError(f"{lack}: pass the clients' frames, newdata=frames")
    made = [_set_by(formula, setting) for setting in settings]
    for client, name in enumerate(draws.clients):
        own = completed(draws, draws.data, client, client)
        sets = [own if change is None else _with_columns(own, *change) for change in made]
        yield client, sets, np.full(own.count, name if by else "")


def _lacks(formula: Formula, settings: Sequence[Intervention], by: str | None) -> Iterator[str]:
    """Yield what a fit does not keep of its rows, and settings or groups need."""
    if by not in (None, formula.clients):
        yield f"by is '{by}', and the fit stores no column except '{formula.clients}'"
    for setting in settings:
        if setting.step is not None:
            yield f"the fit stores no rows of '{setting.variable}' that could be shifted"
    variables = {s.variable for s in settings} - {None}
    if variables and formula.parameters:
        yield "the fit stores no single columns if parameters or covariates have formulas"
    for terms, columns_of_term, _ in _designs(formula):
        for product in terms.products:
            is_read = variables & product.columns
            if is_read and (len(product.columns) > 1 or product.name not in columns_of_term):
                yield f"the term '{product.name}' reads '{min(map(str, is_read))}' beside others"


Places = dict[str | None, list[int]]


def _designs(formula: Formula) -> Iterator[tuple[Any, dict[str, Any], Sequence[str]]]:
    """Yield the common terms, then those of each group: terms, the columns of each, and all columns."""
    common = formula.layout.common
    designs = [(formula.declared.parts.common, common, common.columns)]
    designs += [(term.group.terms, term.design, term.columns) for term in formula.layout.groups]
    for terms, design, columns in designs:
        yield terms, {term.name: term.columns for term in design.terms}, columns


def _set_by(formula: Formula, setting: Intervention) -> tuple[DesignRows, Places] | None:
    """Return a row with a column at a value, and the places of what reads it; None: rows stay as they are."""
    if setting.variable is None:
        return None
    places: Places = {}
    sites = [None, *(term.site for term in formula.layout.groups)]
    for site, (terms, columns_of_term, columns) in zip(sites, _designs(formula), strict=True):
        names = [
            name
            for product in terms.products
            if setting.variable in product.columns
            for of in (f"linear_{product.name}", product.name)  # a smooth has two
            for name in columns_of_term.get(of, ())
        ]
        places[site] = [columns.index(name) for name in names]
    return typical(formula, None, {setting.variable: [setting.value]}), places


def _with_columns(own: DesignRows, changed: DesignRows, places: Places) -> DesignRows:
    """Return rows with the columns at some places as in `changed`."""
    common, groups = own.common.clone(), {s: value.clone() for s, value in own.groups.items()}
    common[:, places[None]] = changed.common[:, places[None]]
    for site, value in groups.items():
        value[:, places[site]] = changed.groups[site][:, places[site]]
    return replace(own, common=common, groups=groups)


# ------------------------------------------------------------ rows of frames
def _of_frames(
    draws: CoefficientDraws, frames: Any, settings: Sequence[Intervention], by: str | None
) -> Each:
    """Yield each client of some frames, its rows under each setting, and the group of each row."""
    formula, declared = draws.formula, draws.formula.declared
    data, by_name, kinds, labeled = data_of(formula, frames)
    for name, frame in by_name.items():
        client = draws.position(name)
        own = completed(draws, data, data.names.index(name), client)
        plain = complete(frame, kinds, name, declared.missing)
        own = own if labeled else _weighted(own, plain, declared.parts.additions, name)
        before, now = (_codes(rows_of_client(formula, draws.data, client)), _codes(own))
        for term in (term for layout in formula.layouts for term in layout.at("within")):
            if not torch.equal(before[term.site], now[term.site]):
                what = f"the rows of client '{name}' have other groups of '{term.group.name}' than"
                raise ValueError(f"{what} when fitted: pass the frames of the fit")
        groups = _groups(plain, by, name, declared.clients)
        plain = with_known(plain, declared, name)
        for covariate, of in own.lacking.items():
            plain[covariate] = plain[covariate].mask(of.gone.numpy(), 0.0)
        sets = [_set_in(own, draws.formula, plain, setting, name) for setting in settings]
        yield client, sets, groups


def _set_in(
    own: DesignRows, formula: Formula, frame: pd.DataFrame, setting: Intervention, client: str
) -> DesignRows:
    """Return a client's rows under a setting, from their frame, in which 0 stands for what they lack."""
    columns = predictors(formula)

    def made(frame: pd.DataFrame) -> DesignRows:
        return evaluated(formula, prepared(setting.on(frame), columns, client), client, _codes(own))

    rows, lacking = made(frame), {}
    for name, of in own.lacking.items():
        if setting.variable != name or setting.step is not None:
            raised = made(frame.assign(**{name: frame[name] + 1.0}))
            lacking[name] = replace(of, step=_change(rows, raised, of.gone))
    return replace(rows, codes=own.codes, fields=own.fields, lacking=lacking)


def _change(rows: DesignRows, raised: DesignRows, where: Tensor) -> DesignRows:
    """Return by how much columns are larger in `raised`, in some of the rows."""
    factor = where.double()[:, None]
    groups = {site: (raised.groups[site] - value) * factor for site, value in rows.groups.items()}
    return DesignRows((raised.common - rows.common) * factor, torch.zeros_like(rows.offset), groups)


def _weighted(
    rows: DesignRows, frame: pd.DataFrame, additions: Mapping[str, str], client: str
) -> DesignRows:
    """Return rows without a response with the weights of their frame, if the formula has any."""
    if (column := additions.get("weights")) is None:
        return rows
    check_column(frame, column, client)
    weights = torch.tensor(frame[column].to_numpy(dtype=np.float64))
    if not bool(((weights >= 0.0) & weights.isfinite()).all()):
        fault = f"column '{column}' of client '{client}' has weights that are missing or negative"
        raise ValueError(f"{fault}: give each row its weight")
    return replace(rows, fields={**rows.fields, "weights": weights})


def _codes(rows: DesignRows) -> dict[str, Tensor]:
    """Return the groups of rows, of all terms."""
    codes = dict(rows.codes)
    for own in rows.of_parameters.values():
        codes |= own.codes
    return codes


def _groups(frame: pd.DataFrame, by: str | None, client: str, clients: str) -> NDArray[np.str_]:
    """Return the group of each row: its value of a column, or its client."""
    if by is None or by == clients:
        return np.full(len(frame), client if by else "")
    check_column(frame, by, client)
    if frame[by].isna().any():
        raise ValueError(f"by is '{by}', which client '{client}' has rows without: drop them")
    return np.array([level_name(value) for value in frame[by]])
