"""Covariates with missing values, "y ~ mi(x) + z; x | mi() ~ z": Normal given others, and integrated out.

    x ~ Normal(eta_x, sigma_x),    eta = rest + step x

In a row without x the predictor is Normal(rest + step eta_x, |step| sigma_x): the response is averaged
over it. In the other rows x has its density.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.formulas.columns import check_column, missing_in, numbers
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import Design
from hierfl.formulas.design_terms import Term
from hierfl.formulas.expressions import Call, Name, calls_within, names_in
from hierfl.formulas.layout import Layout, rows_of_above
from hierfl.formulas.parameters import LINKS, covariate_family
from hierfl.formulas.schema import Schema
from hierfl.formulas.terms import calls, column_of, columns_of
from hierfl.formulas.writer import INTERCEPT, NO_NAME, Writer

NOT_AVERAGED = (
    "student",
    "von_mises",
)  # a mean or variance of theirs need not exist, or is no integral
Gone = Mapping[str, NDArray[np.bool_]]  # covariate -> which rows of a client lack it


def scaled(own: Declaration, schema: Schema) -> Declaration:
    """Return a covariate's declaration with the center and the spread that clients have agreed on."""
    name = own.parts.response
    column = schema.columns[name]
    if column.sd == 0.0:
        raise ValueError(f"'{name}' has one value in all rows that have it: take mi({name}) out")
    return replace(own, family=covariate_family(name, column.mean, column.sd))


# ------------------------------------------------------------ what is supported
def check_imputed(declared: Declaration) -> None:
    """Refuse mi() where it could not be integrated out, and a covariate without a formula of its own."""
    names, family = declared.imputed, declared.family
    words = [NO_NAME.sub("_", name) for name in names]
    if len({*words}) < len(words) or {*words} & LINKS.keys():
        raise ValueError(
            f"the covariates {', '.join(names)} have like names: rename one of the columns"
        )
    main = declared.described[: 1 + len(declared.parts.groups)]
    read = {name for found in main for name in _imputed_in(found)}
    for own in declared.of_parameters.values():
        if other := [
            call for found in own.described for call in calls(found) if call.callee == "mi"
        ]:
            raise ValueError(
                f"'{other[0]}' stands in the formula of '{own.parts.response}', and may stand in that of "
                "the response alone: leave it out, or take a Pyro program (docs/recipes.md)"
            )
    for name in sorted(read.symmetric_difference(names)):
        if name in read:
            raise ValueError(
                f"mi({name}) needs a formula of '{name}': write "
                f"['{declared.parts.response} ~ mi({name}) + ...', '{name} | mi() ~ z']"
            )
        raise ValueError(f"'{name}' has a formula and no term: write mi({name}) for {name}")
    additions = declared.parts.additions.values()
    own_columns = (columns_of(found) for found in declared.described[len(main) :])
    plain = {*chain(*own_columns, *map(_plain, main), *declared.groupings, additions)}
    if twice := plain & {*names}:
        name = min(twice)
        raise ValueError(
            f"'{name}' is read as mi({name}) and in another place, where it would be missing: take it "
            "out there"
        )
    if family.kind in ("category", "counts", "shares") or family.name in NOT_AVERAGED:
        raise ValueError(
            f"mi() is for families with one linear predictor, and not for '{family.name}': take "
            "a Pyro program (docs/recipes.md)"
        )


def check_known(term: Term, mean: float, sd: float, *, above: bool) -> None:
    """Refuse a column of mi() with one value at each client; warn of one that is 0 or 1."""
    if above:
        raise ValueError(
            f"the column '{term.name}' has one value at each client, and a missing one is missing in all "
            "its rows: mi() is for values of rows; take a Pyro program with a site of each client"
        )
    if len(term.parts) == 1 and 0.0 < mean < 1.0 and abs(sd**2 - mean * (1.0 - mean)) < 1e-9:
        warnings.warn(
            f"the column of '{term.name}' is 0 or 1, and mi() takes it for Normal: its missing values lie "
            "between and beyond; for probabilities take a Pyro program that sums over both values",
            stacklevel=2,
        )


def _imputed_in(found: Any) -> set[str]:
    """Return the columns of mi(x) among the terms; refuse mi() in a function, or twice in a product."""
    names = set()
    for term in found.products:
        own = [column_of(f) for f in term.factors if isinstance(f, Call) and f.callee == "mi"]
        if len(own) > 1:
            raise ValueError(
                f"the term '{term.name}' is a product of two covariates that may both be missing: "
                "multiply mi() by columns that are not"
            )
        names |= {*own}
    inner = [call for call in calls(found) if call.callee == "mi" and column_of(call) not in names]
    wrapped = [
        call
        for call in calls(found)
        if call.callee != "mi" and any(inner.callee == "mi" for inner in calls_within(call))
    ]
    if inner or wrapped:
        raise ValueError(
            f"'{(wrapped or inner)[0]}' is a function of mi(): make a column of it first, and impute "
            "that column"
        )
    return names


def _plain(found: Any) -> set[str]:
    """Return the columns that terms read outside of mi()."""
    names: set[str] = set()
    for term in found.products:
        for factor in term.factors:
            if not (isinstance(factor, Call) and factor.callee == "mi"):
                names |= {*names_in(factor)}
    return names


# ------------------------------------------------------------ rows
def with_known(
    frame: pd.DataFrame, declared: Declaration, client: str, least: int = 1
) -> pd.DataFrame:
    """Return a client's rows, their covariates numbers or NaN; fewer known values than `least` are not read."""
    found = {}
    for name in declared.imputed:
        check_column(frame, name, client)
        values = frame[name].mask(missing_in(frame[name]))
        if values.dtype.kind not in "iufbO":
            raise TypeError(
                f"column '{name}' of client '{client}' holds {values.tolist()[0]!r}, and mi() imputes "
                "numbers: convert it"
            )
        try:
            known = numbers(values)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"column '{name}' of client '{client}' holds words, and mi() imputes numbers ({error}): "
                "convert it"
            ) from error
        if np.isinf(known).any():
            row = int(np.isinf(known).argmax())
            raise ValueError(
                f"column '{name}' of client '{client}' is infinite in row {row}: fix the value"
            )
        few = np.isfinite(known).sum() < least
        found[name] = np.full(len(known), np.nan) if few else known
    return frame.assign(**found)


def filled(names: Sequence[str], ready: pd.DataFrame) -> tuple[pd.DataFrame, Gone]:
    """Return `prepared` rows with 0 for what is missing, and which rows lack which covariate."""
    gone = {name: ready[name].isna().to_numpy() for name in names}
    return ready.fillna(dict.fromkeys(names, 0.0)), gone


def known_values(
    designs: Sequence[Design], ready: pd.DataFrame, gone: Gone, client: str
) -> dict[str, NDArray[np.bool_]]:
    """Return the rows of a client in which a column that reads a covariate is known, (n,)."""
    known: dict[str, NDArray[np.bool_]] = {}
    for name, lost in gone.items():
        other = ready.assign(**{name: ready[name] + 1.0})
        for design in designs:
            for column in _columns(design, name):
                change = design.evaluate(other, client)[0] - design.evaluate(ready, client)[0]
                moved = change[:, design.columns.index(column)] != 0.0
                known[column] = ~(lost & moved)
    return known


def _columns(design: Design, name: str) -> list[str]:
    """Return the columns of a design that read mi(name)."""
    terms = [term for term in design.terms if Call("mi", (Name(name),)) in term.parts]
    return [column for term in terms for column in term.columns]


def stepped(found: Layout, name: str) -> Layout:
    """Return the terms that read mi(name), as a predictor without an intercept: what a unit of it adds."""
    suffix = f"_by_{NO_NAME.sub('_', name)}"
    groups = tuple(
        replace(term, field=f"{term.field}{suffix}")
        for term in found.groups
        if _columns(term.design, name)
    )
    reads = {*_columns(found.common, name)} & {*found.read}
    again = {term.site: term for term in groups}
    own = {column: again.get(term.site, term) for column, term in found.own.items()}
    if groups or reads:
        own.setdefault(INTERCEPT, next(iter(groups), None))  # type: ignore[arg-type]
    return replace(
        found,
        common=replace(found.common, offsets=()),
        groups=groups,
        own=own,
        read=found.read if reads else (),
        steps=(),
        suffix=suffix,
    )


def fields_of(
    found: Layout, names: Sequence[str], ready: pd.DataFrame, gone: Gone, client: str
) -> dict[str, NDArray[Any]]:
    """Return each covariate, whether a row has it, and by how much a unit of a missing one moves columns."""
    fields: dict[str, NDArray[Any]] = {}
    for name in names:
        word, lost = NO_NAME.sub("_", name), gone[name]
        fields[f"mi_{word}"], fields[f"has_{word}"] = ready[name].to_numpy(), 1.0 - lost
        step, other = stepped(found, name), ready.assign(**{name: ready[name] + 1.0})
        if step.read:
            change = (
                found.common.evaluate(other, client)[0] - found.common.evaluate(ready, client)[0]
            )
            fields[f"x{step.suffix}"] = (change * lost[:, None])[
                :, np.isin(found.common.columns, found.read)
            ]
        for term in step.groups:
            change = (term.evaluate(other, client) - term.evaluate(ready, client)) * lost[:, None]
            if term.place == "above":
                left = rows_of_above(found, term)
                change = change * np.array([column in left for column in term.columns])
            fields[term.field] = change
    return fields


# ------------------------------------------------------------ the program
def write_imputed(out: Writer, declared: Declaration, likelihood: str) -> str:
    """Write the densities of covariates, and the predictor of rows that lack some; return their likelihood."""
    variances = []
    for name in declared.imputed:
        word, sd = NO_NAME.sub("_", name), out.named(f"sigma_{name}")
        out.add(f"has = dist.Normal(eta_{word}, {sd}).log_prob(batch.mi_{word}) * batch.has_{word}")
        out.add(f"pyro.factor({name!r}, has)  # where it is missing, it is integrated out")
        out.add(f"eta = eta + eta_by_{word} * eta_{word}")
        variances.append(f"(eta_by_{word} * {sd}) ** 2")
    out.add(f"variance = {' + '.join(variances)}  # 0 where nothing is missing")
    family = declared.family
    is_normal = family.name in ("gaussian", "lognormal") and family.link == "identity"
    if is_normal and "entry" not in declared.parts.additions:
        return likelihood.replace("(eta, sigma)", "(eta, (sigma**2 + variance).sqrt())")
    return f"families.over_normal(lambda eta: {likelihood}, eta, variance)"
