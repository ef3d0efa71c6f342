"""What a user declares, checked: the family, missing values, the response, and what the formula reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from hierfl.core.arguments import shown
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.expressions import Name
from hierfl.formulas.prior_texts import as_given
from hierfl.formulas.source import additions_of
from hierfl.formulas.terms import calls, columns_of
from hierfl.models import families
from hierfl.models.families import ResponseFamily


def given(*, family: Any, priors: Any, missing: Any) -> dict[str, Any]:
    """Return what a formula is made of, from what a user gave."""
    chosen = families.named(family) if isinstance(family, str) else family
    if not isinstance(chosen, ResponseFamily):
        fix = "give a name such as 'bernoulli', or hierfl.models.families.bernoulli()"
        raise TypeError(f"family is {family!r}: {fix}")
    if missing not in ("refuse", "drop"):
        raise ValueError(f"missing is {missing!r}: it must be 'refuse' or 'drop'")
    is_named = isinstance(priors, Mapping) and all(isinstance(name, str) for name in priors)
    if priors is not None and not is_named:
        raise TypeError(
            f"priors is {shown(priors)}: give a dict of sites' names, {{'b': 'normal(0, 1)'}}"
        )
    own = {name: as_given(name, prior) for name, prior in (priors or {}).items()}
    return {"family": chosen, "priors": own, "missing": missing}


def check_declared(declared: Declaration) -> None:
    """Refuse a response that is read elsewhere, and additions that the family does not have or lacks."""
    additions, family, response = declared.parts.additions, declared.family, declared.parts.response
    labels = declared.parts.labels
    for own in (declared, *declared.of_parameters.values()):
        _check_groups(own)
    if len(labels) > 1 or family.kind in ("counts", "shares"):
        check_columns(declared)
    columns = chain(*map(columns_of, declared.described), *declared.groupings, additions.values())
    if twice := {*labels} & {*columns, declared.clients}:
        what = "has the name of the response, and is read in another place too"
        raise ValueError(f"'{min(twice)}' {what}: take it out there")
    if declared.calls_of("cs") and family.name not in ("sratio", "acat"):
        raise ValueError(
            f"cs() has a coefficient for each threshold, which those of '{family.name}' do not allow: "
            "take family='sratio' or 'acat'"
        )
    if "trials" in family.required and "trials" not in additions:
        raise ValueError(
            f"family '{family.name}' counts successes of trials: write '{response} | trials(n) ~ ...', "
            + ("n the sum of a row" if len(labels) > 1 else "or family='bernoulli' for 0 and 1")
        )
    for call in chain(*map(calls, declared.described)):
        if call.option("by") == Name(declared.clients):
            raise ValueError(
                f"'{call}' is a curve of each client that learns nothing from the others: write "
                f"s({call.args[0]}, {declared.clients}, bs='fs')"
            )
    if declared.imputed or declared.calls_of("mi"):
        from hierfl.formulas.imputed import check_imputed

        check_imputed(declared)
    family.expression(additions_of(declared))


def _check_groups(declared: Declaration) -> None:
    """Refuse two terms with a bar that give the same groups the same effect, as brms does."""
    groups = declared.parts.groups
    names = [{product.name for product in group.terms.products} for group in groups]
    for (first, of_first), (second, of_second) in combinations(zip(groups, names, strict=True), 2):
        shared = sorted(of_first & of_second)
        if shared and {*first.by} == {*second.by} and first.kind == second.kind:
            advice = f"take '{shared[0]}' out of one of them"
            if shared == ["Intercept"]:
                larger = second if len(of_second) > 1 else first
                slopes = replace(larger.terms, products=larger.terms.slopes)
                advice = f"write ({slopes} | {larger.name}) for slopes "
                advice += "that are independent of the intercepts, or leave the other out"
            raise ValueError(
                f"'{first.text}' and '{second.text}' both have '{shared[0]}' of '{first.name}': {advice}"
            )


# ------------------------------------------------------------ the response
IN_PARTS = ("counts", "shares")  # kinds of families whose responses have several columns


def check_columns(declared: Declaration) -> None:
    """Refuse several columns of a family that reads one, and one of a family that reads several."""
    family, parts = declared.family, declared.parts
    if (len(parts.labels) > 1) == (family.kind in IN_PARTS):
        if len(parts.labels) == 2:
            first, other = parts.labels[0], {"counts": "binomial", "shares": "beta"}[family.kind]
            text = f"{first} | trials(n)" if other == "binomial" else first
            fix = f"write '{text} ~ ...', family='{other}'"
            raise ValueError(f"the response has two columns, of which one says all: {fix}")
        return
    if len(parts.labels) > 1:
        fix = "take 'multinomial' for counts, 'dirichlet' for shares, or write "
        fix += f"'{parts.labels[0]} | trials(n) ~ ...' for a binomial"
        raise ValueError(f"family '{family.name}' reads one column, not '{parts.response}': {fix}")
    other = "'categorical' for a column of levels" if family.kind == "counts" else "'beta'"
    raise ValueError(
        f"family '{family.name}' reads several columns, not '{parts.response}': write "
        f"cbind(a, b, c), or take family={other}"
    )


def with_bounds(declared: Declaration) -> Declaration:
    """Return a declaration whose family is that between the bounds of trunc()."""
    parts = declared.parts
    if parts.bounds is None:
        return declared
    of_times = {"cens", "event", "upper", "entry"} & parts.additions.keys()
    if of_times:
        fix = "write entry(start) for those that entered late"
        raise ValueError(f"the response has trunc() and {min(of_times)}(): of times {fix}")
    return replace(declared, family=families.truncated(declared.family, *parts.bounds))
