"""The terms of a sum of expressions, each once; what may be none is refused."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from itertools import product as cartesian

from hierfl.formulas.expressions import (
    BARS,
    PRODUCTS,
    SUMS,
    Call,
    Expression,
    Factor,
    Literal,
    Name,
    Product,
    TermSum,
    summands,
    within,
)
from hierfl.formulas.expressions import (
    calls as calls,  # where scripts that check a node look for it
)
from hierfl.formulas.grammar import check
from hierfl.formulas.signatures import TERMS, arguments

MOST_PRODUCTS = 10_000  # of terms that are multiplied; a text of 40 columns may have 2^40
TOO_MANY = f"the formula has more than {MOST_PRODUCTS:,} products of terms: leave some out"
OUTSIDE = "put 0 at the start of the terms, outside parentheses, to leave the intercept out"
# Call that no product may hold -> what to write.
ALONE = {
    "offset": "an offset has no coefficient",
    "cs": "its coefficients are those of thresholds",
    "bs": "poly(x, 2) may appear in products",
    "s": "s(x, by=z) varies with z",
    "gp": "gp(x, by=z) varies with z",
}
Sum = dict[frozenset[Factor], Product]
INTERCEPT: frozenset[Factor] = frozenset()
Signed = Iterable[tuple[str, Expression]]


def terms_of(signed: Signed) -> TermSum:
    """Return the terms of a sum, which has an intercept unless it is taken away."""
    names: dict[str, Product] = {}
    sum_of_terms = TermSum(tuple(_added({INTERCEPT: Product()}, signed).values()))
    for product in sum_of_terms.slopes:
        first, callees = product.factors[0], [factor.callee for factor in product.factors]
        for call in product.factors if len(callees) > 1 else ():
            what = f"'{call}' is in a product: make it a term of its own; {ALONE.get(call.callee)}"
            check(call.callee not in ALONE, call, what)
        fix = "use C(x) or x as a number for one of them"
        check(callees.count("mo") < 2, first, f"a product of two monotonic effects: {fix}")
        what = f"the term '{product.name}' is a product of two covariates that may both be missing"
        check(callees.count("mi") < 2, first, f"{what}: multiply mi() by columns that are not")
        fix = "'Intercept' names the intercept: rename the column"
        check("Intercept" not in product.columns, first, fix)
        what = f"two terms are called '{product.name}': rename a column"
        check(names.setdefault(product.name, product) is product, first, what)
    return sum_of_terms


def _added(total: Sum, signed: Signed) -> Sum:
    """Return a sum to which terms are added, or from which they are taken."""
    is_inside = not total
    for sign, term in signed:
        if term.is_minus:
            check(_is_intercept(term.args[0]), term, "two signs in a row: keep one")
            sign, term = {"+": "-", "-": "+"}[sign], term.args[0]
        if _is_intercept(term):
            sign = "-" if (term.head == "0") == (sign == "+") else "+"
            check(sign == "+" or not is_inside, term, OUTSIDE)
        for key, product in _products(term).items():
            if sign == "-":
                fix = "leave it out, or write I(a - b) for a difference"
                what = f"the formula removes '{product.name}', which it does not have"
                check(total.pop(key, None) or not key, term, f"{what}: {fix}")
            else:
                is_new = total.setdefault(key, product) is product
                what = "an offset appears twice, and counts once: remove one"
                check(is_new or not product.is_offset, term, what)
    return total


def _products(term: Expression) -> Sum:
    """Return the terms of one summand, or of a factor of a product."""
    if _is_intercept(term):
        return {INTERCEPT: Product()}
    if isinstance(term, Name | Call):
        _check_calls(term)
        return {frozenset([term]): Product((term,))}
    check(term.sign not in BARS, term, "a bar is inside other parentheses: move it out of them")
    if term.sign in SUMS and term.wrapped:
        return _added({}, summands(replace(term, wrapped=False)))
    if term.sign == "**":
        base, power = term.args
        is_sum = base.sign in SUMS and not base.is_minus
        _check_no_value(is_sum and type(power.value) is int and power.value > 0, term)
        first = total = _products(base)
        for _ in range(min(power.value, len(first)) - 1):
            total = _crossed("*", total, first, term)
        return total
    is_product = term.sign in PRODUCTS and not any(isinstance(of, Literal) for of in term.args)
    _check_no_value(is_product, term)
    first, second = map(_products, term.args)
    factors = TermSum(tuple(first.values())).factors
    twice = next((factor for factor in factors if factor in {*chain(*second)}), None)
    fix = f"write I({twice} * {twice}) for its square, (a + b) ** 2 for products of a sum"
    check(twice is None, term, f"'{twice}' times itself is the same term: {fix}")
    return _crossed(term.sign, first, second, term)


def _crossed(sign: str, first: Sum, second: Sum, term: Expression) -> Sum:
    """Return the terms of a * b, a:b or a / b."""
    total = {"*": first | second, "/": first, ":": {}}[sign]
    if sign == "/":
        first = {INTERCEPT.union(*first): Product((*TermSum(tuple(first.values())).factors,))}
    for (key, before), (other, behind) in cartesian(first.items(), second.items()):
        if (whole := key | other) not in total:
            total[whole] = Product(tuple(dict.fromkeys([*before.factors, *behind.factors])))
            check(len(total) <= MOST_PRODUCTS, term, TOO_MANY)
    return total


def _is_intercept(term: Expression) -> bool:
    return isinstance(term, Literal) and term.head in ("0", "1")


def _check_no_value(is_right: object, term: Expression) -> None:
    """Refuse a calculation, or a constant, in the place of a term."""
    what = f"a formula reads arithmetic as terms: write I({term}) for its value"
    if isinstance(term.value, str):
        what = "a string is not a term: write a column without quotes"
    check(is_right, term, what)


def _check_calls(term: Factor) -> None:
    """Refuse calls that the formula cannot have, and what no calculation can."""
    for inner in within(term):
        what = f"no calculation has '{inner.sign}': write a product as x * z"
        check(inner.sign not in (*BARS, ":"), inner, what)
        if not isinstance(inner, Call):
            continue
        fix = f"make a column of it, or use one of {', '.join(name for name in sorted(TERMS) if '.' not in name)}"
        if inner.callee.rpartition(".")[2].lower() in ("factor", "category", "categorical"):
            fix = "strings are categories, and numbers are in C(column)"
        check(inner.callee in TERMS, inner, f"there is no function '{inner.callee}': {fix}")
        arguments(inner)
        what = f"'{inner}' is inside '{term}': make it a term of its own, or make a column first"
        check(inner is term or inner.callee not in (*ALONE, "mo", "mi"), inner, what)
