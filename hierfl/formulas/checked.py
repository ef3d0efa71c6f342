"""What a user declares, checked: the family, missing values, the response, and what the formula reads."""

from collections.abc import Iterator, Mapping
from itertools import chain, combinations
from typing import Any

from hierfl.core.arguments import expect, expect_kind
from hierfl.formulas.declaration import Declaration, additions_of
from hierfl.formulas.expressions import Name, columns_of
from hierfl.formulas.imputed import faults_of_imputed
from hierfl.formulas.prior_texts import as_given
from hierfl.models import families
from hierfl.models.families import ResponseFamily


def given(*, family: Any, priors: Any, missing: Any) -> dict[str, Any]:
    """Return what a formula is made of, from what a user gave."""
    chosen = families.named(family) if isinstance(family, str) else family
    expect_kind(chosen, ResponseFamily, "family", "give a name, 'bernoulli', or a ResponseFamily")
    fix = "give a dict of sites' names, {'b': 'normal(0, 1)'}"
    expect_kind(priors or {}, Mapping, "priors", fix)
    for name in priors or ():
        expect_kind(name, str, "a name in priors", fix)
    expect(missing=(missing, ("refuse", "drop")))
    own = {name: as_given(name, prior) for name, prior in (priors or {}).items()}
    return {"family": chosen, "priors": own, "missing": missing}


def check_declared(declared: Declaration) -> None:
    """Refuse a response that is read elsewhere, and additions that the family does not have or lacks."""
    every = (declared, *declared.of_parameters.values())
    faults = chain(
        chain.from_iterable(map(_faults_of_groups, every)),
        _faults_of_columns(declared),
        _faults_of_terms(declared),
        faults_of_imputed(declared),
    )
    if fault := next(faults, ""):
        raise ValueError(fault)
    declared.family.expression(additions_of(declared))


def _faults_of_groups(declared: Declaration) -> Iterator[str]:
    """Yield two terms with a bar that give the same groups the same effect, as brms refuses them."""
    groups = declared.parts.groups
    names = [{product.name for product in group.terms.products} for group in groups]
    for (first, of_first), (second, of_second) in combinations(zip(groups, names, strict=True), 2):
        shared = sorted(of_first & of_second)
        if not shared or {*first.by} != {*second.by} or first.kind != second.kind:
            continue
        what = f"'{first.text}' and '{second.text}' both have '{shared[0]}' of '{first.name}'"
        yield f"{what}: take it out of one of them (write 0 for an intercept)"


def _faults_of_terms(declared: Declaration) -> Iterator[str]:
    """Yield what is read twice, and terms and additions that do not go with the family or its clients."""
    additions, family, response = declared.parts.additions, declared.family, declared.parts.response
    labels = declared.parts.labels
    columns = chain(*map(columns_of, declared.described), *declared.groupings, additions.values())
    if twice := {*labels} & {*columns, declared.clients}:
        what = "is the response, and is also read in another place"
        yield f"'{min(twice)}' {what}: take it out there"
    if declared.calls_of("cs") and family.name not in ("sratio", "acat"):
        what = f"cs() has a coefficient for each threshold, which those of '{family.name}'"
        yield f"{what} do not allow: use family='sratio' or 'acat'"
    if "trials" in family.required and "trials" not in additions:
        fix = "n the sum of a row" if len(labels) > 1 else "or family='bernoulli' for 0 and 1"
        what = f"family '{family.name}' counts successes of trials"
        yield f"{what}: write '{response} | trials(n) ~ ...', {fix}"
    for call in declared.calls:
        if call.option("by") == Name(declared.clients):
            fix = f"write s({call.args[0]}, {declared.clients}, bs='fs')"
            yield f"'{call}' is a curve of each client that learns nothing from the others: {fix}"


# ------------------------------------------------------------ the response
IN_PARTS = ("counts", "shares")  # kinds of families whose responses have several columns


def _faults_of_columns(declared: Declaration) -> Iterator[str]:
    """Yield several columns of a family that reads one, and one of a family that reads several."""
    family, labels = declared.family, declared.parts.labels
    what = f"family '{family.name}' reads one column, not '{declared.parts.response}'"
    if family.kind in IN_PARTS:
        what = f"family '{family.name}' reads several columns, not '{declared.parts.response}'"
    other = {"counts": "binomial", "shares": "beta"}.get(family.kind, "")
    if family.kind in IN_PARTS and len(labels) == 2:
        text = f"{labels[0]} | trials(n)" if other == "binomial" else labels[0]
        fix = f"write '{text} ~ ...', family='{other}'"
        yield f"the response has two columns, one of which determines the other: {fix}"
    if family.kind in IN_PARTS and len(labels) == 1:
        yield f"{what}: write cbind(a, b, c)"
    if family.kind not in IN_PARTS and len(labels) > 1:
        fix = "use 'multinomial' for counts, 'dirichlet' for shares, or write "
        yield f"{what}: {fix}'{labels[0]} | trials(n) ~ ...' for a binomial"
