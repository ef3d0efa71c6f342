"""Covariates with missing values, "y ~ mi(x) + z; x | mi() ~ z": Normal given others, and integrated out.

    x ~ Normal(eta_x, sigma_x),    eta = rest + step x

In a row without x the predictor is Normal(rest + step eta_x, |step| sigma_x): the response is averaged
over it. In the other rows x has its density.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.core.user_warnings import warn
from hierfl.formulas.columns import check_column, column_fault, numbers
from hierfl.formulas.declaration import LINKS, Declaration
from hierfl.formulas.design import Design
from hierfl.formulas.expressions import Call, DesignTerm, Name, column_of, columns_of
from hierfl.formulas.layout import Layout, rows_of_above
from hierfl.formulas.writer import INTERCEPT, NO_NAME, ProgramWriter

PROGRAM = "use a Pyro program (docs/recipes.md)"
# a mean or variance of theirs need not exist, or is no integral
NOT_AVERAGED = ("student", "von_mises")
Gone = Mapping[str, NDArray[np.bool_]]  # covariate -> which rows of a client lack it


# ------------------------------------------------------------ what is supported
def faults_of_imputed(declared: Declaration) -> Iterator[str]:
    """Yield where mi() could not be integrated out, and a covariate without a formula of its own."""
    names, family, main = declared.imputed, declared.family, declared.parts.terms
    if not names and not declared.calls_of("mi"):
        return
    words = [NO_NAME.sub("_", name) for name in names]
    if len({*words}) < len(words) or {*words} & LINKS.keys():
        yield f"the covariates {', '.join(names)} have similar names: rename one of the columns"
    for own in declared.of_parameters.values():
        for call in (call for call in own.calls if call.callee == "mi"):
            what = f"'{call}' is in the formula of '{own.parts.response}', and may be only"
            yield f"{what} in that of the response: leave it out, or {PROGRAM}"
    factors = chain.from_iterable(terms.factors for terms in main)
    read = {column_of(of) for of in factors if isinstance(of, Call) and of.callee == "mi"}
    for name in sorted(read - {*names}):
        fix = f"['{declared.parts.response} ~ mi({name}) + ...', '{name} | mi() ~ z']"
        yield f"mi({name}) needs a formula for '{name}': write {fix}"
    for name in sorted({*names} - read):
        yield f"'{name}' has a formula and no term: write mi({name}) for {name}"
    own_columns = (columns_of(terms) for terms in declared.described[len(main) :])
    plain = chain(*own_columns, *(columns_of(terms, "mi") for terms in main), *declared.groupings)
    if twice := {*plain, *declared.parts.additions.values()} & {*names}:
        name = min(twice)
        what = f"'{name}' is read as mi({name}) and in another place, where it would be missing"
        yield f"{what}: take it out there"
    if family.kind in ("category", "counts", "shares") or family.name in NOT_AVERAGED:
        what = f"mi() is for families with one linear predictor, and not for '{family.name}'"
        yield f"{what}: {PROGRAM}"


def check_known(term: DesignTerm, mean: float, sd: float, *, above: bool) -> None:
    """Refuse a column of mi() with one value at each client; warn of one that is 0 or 1."""
    if above:
        what = f"the column '{term.name}' has one value per client, and a missing one is missing"
        fix = "use a Pyro program with a site for each client"
        raise ValueError(f"{what} in all its rows: mi() is for values of rows; {fix}")
    if len(term.factors) == 1 and 0.0 < mean < 1.0 and abs(sd**2 - mean * (1.0 - mean)) < 1e-9:
        what = f"the column of '{term.name}' is 0 or 1, and mi() treats it as Normal"
        fix = "for probabilities use a Pyro program that sums over both values"
        warn(f"{what}: imputed values may be any number; {fix}")


# ------------------------------------------------------------ rows
def with_known(
    frame: pd.DataFrame, declared: Declaration, client: str, least: int = 1
) -> pd.DataFrame:
    """Return a client's rows, their covariates numbers or NaN; fewer known values than `least` are not read."""
    covariates = {}
    for name in declared.imputed:
        check_column(frame, name, client)
        values, what = frame[name], ""
        try:  # pandas makes numbers of dates
            row_values = numbers(values if values.dtype.kind in "iufbO" else values.astype(str))
        except (TypeError, ValueError) as error:
            what = f"holds words, and mi() imputes numbers ({error}): convert it"
        else:
            if (infinite := np.isinf(row_values)).any():
                what = f"is infinite in row {int(infinite.argmax())}: fix the value"
        if what:
            public = "is imputed, but holds values that are not numbers"
            raise column_fault(what, public, name, client)
        is_few = np.isfinite(row_values).sum() < least
        covariates[name] = np.full(len(row_values), np.nan) if is_few else row_values
    return frame.assign(**covariates)


def filled(names: Sequence[str], ready: pd.DataFrame) -> tuple[pd.DataFrame, Gone]:
    """Return `prepared` rows with 0 for what is missing, and which rows lack which covariate."""
    gone = {name: ready[name].isna().to_numpy() for name in names}
    return ready.fillna(dict.fromkeys(names, 0.0)), gone


def known_values(
    designs: Sequence[Design], ready: pd.DataFrame, gone: Gone, client: str
) -> dict[str, NDArray[np.bool_]]:
    """Return the rows of a client in which a column that reads a covariate is known, (n,)."""
    is_known: dict[str, NDArray[np.bool_]] = {}
    for name, lost in gone.items():
        other = ready.assign(**{name: ready[name] + 1.0})
        for design in designs:
            for column in _columns(design, name):
                change = design.evaluate(other, client)[0] - design.evaluate(ready, client)[0]
                moved = change[:, design.columns.index(column)] != 0.0
                is_known[column] = ~(lost & moved)
    return is_known


def _columns(design: Design, name: str) -> list[str]:
    """Return the columns of a design that read mi(name)."""
    terms = [term for term in design.terms if Call("mi", (Name(name),)) in term.factors]
    return [column for term in terms for column in term.columns]


def stepped(layout: Layout, name: str) -> Layout:
    """Return the terms that read mi(name), as a predictor without an intercept: what a unit of it adds."""
    suffix = f"_by_{NO_NAME.sub('_', name)}"
    groups = tuple(
        replace(term, field=f"{term.field}{suffix}")
        for term in layout.groups
        if _columns(term.design, name)
    )
    reads = {*_columns(layout.common, name)} & {*layout.read}
    again = {term.site: term for term in groups}
    own = {column: again.get(term.site, term) for column, term in layout.own.items()}
    if groups or reads:
        own.setdefault(INTERCEPT, next(iter(groups), None))  # type: ignore[arg-type]
    return replace(
        layout,
        common=replace(layout.common, offsets=()),
        groups=groups,
        own=own,
        read=layout.read if reads else (),
        steps=(),
        suffix=suffix,
    )


def fields_of(
    layout: Layout, names: Sequence[str], ready: pd.DataFrame, gone: Gone, client: str
) -> dict[str, NDArray[Any]]:
    """Return each covariate, whether a row has it, and by how much a unit of a missing one moves columns."""
    fields: dict[str, NDArray[Any]] = {}
    for name in names:
        word, lost = NO_NAME.sub("_", name), gone[name]
        fields[f"mi_{word}"], fields[f"has_{word}"] = ready[name].to_numpy(), 1.0 - lost
        step, other = stepped(layout, name), ready.assign(**{name: ready[name] + 1.0})
        if step.read:
            here, moved = (layout.common.evaluate(rows, client)[0] for rows in (ready, other))
            change = (moved - here) * lost[:, None]
            fields[f"x{step.suffix}"] = change[:, np.isin(layout.common.columns, layout.read)]
        for term in step.groups:
            change = (term.evaluate(other, client) - term.evaluate(ready, client)) * lost[:, None]
            if term.place == "above":
                change = change * np.isin(term.columns, rows_of_above(layout, term))
            fields[term.field] = change
    return fields


# ------------------------------------------------------------ the program
def write_imputed(out: ProgramWriter, declared: Declaration, likelihood: str) -> str:
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
