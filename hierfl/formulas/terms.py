"""The functions that terms may call, and the terms of a sum of expressions, each once; what may be none is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hierfl.formulas.expressions import (
    BARS,
    CODINGS,
    COMPARISONS,
    SUMS,
    Call,
    Expression,
    Factor,
    Literal,
    Name,
    Operator,
    Product,
    TermSum,
    calls_within,
    summands,
    within,
)
from hierfl.formulas.expressions import (
    calls as calls,  # where scripts that check a node look for it
)
from hierfl.formulas.grammar import check
from hierfl.formulas.schema import STATEFUL
from hierfl.formulas.transforms import SMOOTHS, Constants

NUMPY = ("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "abs", "sin", "cos", "tanh")
# Functions of numbers, besides transforms.
FUNCTIONS: dict[str, Any] = {name: getattr(np, name) for name in NUMPY}
CALLABLE = sorted({*STATEFUL, *CODINGS, "cs", "mi", *FUNCTIONS})  # and I(), offset(), np.log() ...
EVERY_NAME = frozenset({*CALLABLE, "I", "offset", *(f"np.{name}" for name in NUMPY)})
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}
COMPARING = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
COMPARED: dict[str, Callable[[Any, Any], Any]] = dict(zip(COMPARISONS, COMPARING, strict=True))


class Option(NamedTuple):
    """An option of a function: its default, and the number of a kind that it must be; `must_be` says so."""

    default: Any
    kind: type = object
    low: float = -math.inf
    high: float = math.inf
    must_be: str = ""

    def allows(self, value: Any) -> bool:
        """Return whether the option may have a value."""
        if self.kind is object:
            return self.must_be == "" or value == self.default
        kinds = (int,) if self.kind is int else (int, float)
        return isinstance(value, kinds) and self.low <= value <= self.high


MOST_PRODUCTS = 10_000  # of terms that are multiplied; a text of 40 columns may have 2^40
K_OF_GP, BOUNDARY = 20, 2.5  # k of gp(x), and how far its sines reach, in half ranges
# Function -> its options; the first may stand without its name.
OPTIONS: dict[str, dict[str, Option]] = {
    "bs": {
        "df": Option(0, int, 1, must_be="given, the number of columns"),
        "degree": Option(3, int, 0, must_be="an integer, 0 or more"),
        "lower_bound": Option(None, float, must_be="a number"),
        "upper_bound": Option(None, float, must_be="a number"),
    },
    "poly": {"degree": Option(1, int, 1, 6, must_be="an integer from 1 to 6")},
    "s": {
        "k": Option(10, int, 3, must_be="an integer, 3 or more"),
        "by": Option(None),
        "bs": Option("cr", must_be="'cr', or s(x, hospital, bs='fs') for a curve of each hospital"),
    },
    "gp": {
        "k": Option(K_OF_GP, int, 4, must_be="an integer, 4 or more"),
        "by": Option(None),
        "c": Option(BOUNDARY, float, math.nextafter(1.0, 2.0), must_be="a number above 1"),
    },
    "S": {"omit": Option(None)},
    "T": {"ref": Option(None)},
}
# Scales between SHORT c S / k and LONG (c - 1) S, of a half range S, at which sines give a Gaussian
# process with its covariance within 1.5% of the variance, beside an intercept.
SHORT, LONG = 1.75, 0.66


def enough_sines(k: int, c: float) -> int:
    """Return k of gp(x), or how many sines with this c give a wide enough range of length scales."""
    if LONG * (c - 1.0) >= 1.25 * SHORT * c / k:
        return k
    return math.ceil(1.25 * SHORT * c / (LONG * (c - 1.0)))


def written_options(call: Call) -> list[tuple[str, Expression]]:
    """Return the options of a call as they are written, with the name of one that stands without."""
    return [*zip(OPTIONS.get(call.callee, {}), call.args[1:], strict=False), *call.options]


def options_of(call: Call) -> dict[str, Any]:
    """Return the options of a call by name, with their defaults, but its `by`."""
    values = {name: expression.value for name, expression in written_options(call) if name != "by"}
    return {name: of.default for name, of in OPTIONS.get(call.callee, {}).items()} | values


def value_of(
    expression: Expression, frame: pd.DataFrame, constants: Mapping[str, Constants]
) -> Any:
    """Return an expression's value on `prepared` rows: (n,) or (n, columns), a category, or a scalar."""
    if isinstance(expression, Name):
        series = frame[expression.head]
        return series if hasattr(series, "cat") else series.to_numpy()
    if isinstance(expression, Literal):
        return expression.value
    values = [value_of(arg, frame, constants) for arg in expression.args]
    if expression.callee in STATEFUL:
        by, text = expression.option("by"), str(expression)
        levels = None if by is None else value_of(by, frame, constants)
        return constants[text](expression.callee, text, values[0], by=levels)
    if isinstance(expression, Call):
        function = FUNCTIONS.get(expression.callee.removeprefix("np."))
        return values[0] if function is None else function(values[0])
    if expression.sign in COMPARED:
        return np.asarray(COMPARED[expression.sign](*values), dtype=np.float64)
    return -values[0] if len(values) == 1 else ARITHMETIC[expression.sign](*values)


ALONE = ("cs", "bs", *SMOOTHS)  # which no product may hold
Sum = dict[frozenset[Factor], Product]
INTERCEPT: frozenset[Factor] = frozenset()
OUTSIDE = "put 0 at the start of the terms, outside parentheses, to leave the intercept out"


def terms_of(expressions: Iterable[tuple[str, Expression]]) -> TermSum:
    """Return the terms of a sum, which has an intercept unless it is taken away."""
    total: Sum = {INTERCEPT: Product()}
    for sign, expression in expressions:
        _add(total, sign, expression, top=True)
    names: dict[str, Product] = {}
    for product in total.values():
        fix = "'Intercept' names the intercept: rename the column"
        check("Intercept" not in product.columns, product, fix)
        what = f"two terms are called '{product.name}': rename a column"
        check(names.setdefault(product.name, product) is product, product, what)
    return TermSum(tuple(total.values()))


def _add(total: Sum, sign: str, expression: Expression, *, top: bool) -> None:
    """Add a term to a sum, or take it away."""
    if expression.is_minus:
        check(_is_intercept(expression.args[0]), expression, "two signs in a row: keep one")
        sign, expression = {"+": "-", "-": "+"}[sign], expression.args[0]
    if _is_intercept(expression):
        is_there = (expression.head == "1") == (sign == "+")
        check(is_there or top, expression, OUTSIDE)
        if is_there:
            total.setdefault(INTERCEPT, Product())
        else:
            total.pop(INTERCEPT, None)
        return
    for key, product in _products(expression).items():
        if sign == "-":
            fix = "leave it out, or write I(a - b) for a difference"
            what = f"the formula removes '{product.name}', which it does not have"
            check(total.pop(key, None), expression, f"{what}: {fix}")
        else:
            is_new = total.setdefault(key, product) is product
            what = "an offset appears twice, and counts once: remove one"
            check(is_new or not product.is_offset, expression, what)


def _products(expression: Expression, *, inside: bool = False) -> Sum:
    """Return the terms of one summand, or of a factor `inside` of a product."""
    if isinstance(expression, Call):
        _check_call(expression)
    if isinstance(expression, Name | Call):
        return _once([(expression,)])
    what = "a bar is inside other parentheses: move it out of them"
    check(expression.sign not in BARS, expression, what)
    if expression.sign in SUMS and expression.wrapped:
        total: Sum = {}
        for sign, summand in summands(Operator(expression.sign, expression.args)):
            _check_no_arithmetic(not (inside and _is_intercept(summand)), summand)
            _add(total, sign, summand, top=False)
        return total
    if expression.sign == "**":
        return _power(expression)
    _check_no_arithmetic(expression.sign in (":", "*", "/"), expression)
    return _product(expression)


def _product(expression: Expression) -> Sum:
    """Return the terms of a * b, a:b or a / b."""
    factors = [*_factors(expression)]
    _check_no_arithmetic(not any(isinstance(a, Literal) for a in expression.args), expression)
    square = f"write I({' * '.join(map(str, factors))}) for the product"
    what = f"a term times itself is the same term: {square}"
    check(len({*factors}) == len(factors), expression, what)
    first, second = (_products(arg, inside=True) for arg in expression.args)
    before = [product.factors for product in first.values()]
    if expression.sign == "/":
        before = [tuple(chain.from_iterable(before))]
    crossed = ((*a, *product.factors) for a in before for product in second.values())
    return _joined({"*": first | second, "/": first, ":": {}}[expression.sign], crossed)


def _power(expression: Expression) -> Sum:
    """Return the terms of a sum, and all their products of up to so many."""
    base, power = expression.args
    size = power.value if isinstance(power, Literal) else 0
    is_sum = base.sign in SUMS and not base.is_minus
    _check_no_arithmetic(is_sum and isinstance(size, int) and size > 0, expression)
    total = _products(base, inside=True)
    factors = [product.factors for product in total.values()]
    chosen = chain(*(combinations(factors, n) for n in range(2, size + 1)))
    return _joined(total, (tuple(chain(*several)) for several in chosen))


def _joined(main: Sum, several: Iterable[tuple[Factor, ...]]) -> Sum:
    """Return terms with products of factors behind them."""
    first = [*islice(several, MOST_PRODUCTS + 1)]
    for product in (crossed := _once(first)).values():
        what = f"the formula has more than {MOST_PRODUCTS:,} products of terms: leave some out"
        check(len(first) <= MOST_PRODUCTS, product, what)
        callees = [factor.callee for factor in product.factors]
        what = "an offset has no coefficient: add it as a term of its own"
        check(len(callees) < 2 or "offset" not in callees, product, what)
        if len(callees) > 1:
            _check_not_alone(*product.factors)
        fix = "use C(x) or x as a number for one of them"
        check(callees.count("mo") < 2, product, f"a product of two monotonic effects: {fix}")
    return main | (crossed | main)


def _once(several: Iterable[tuple[Factor, ...]]) -> Sum:
    """Return products of factors, each factor and each product once."""
    total: Sum = {}
    for factors in several:
        total.setdefault(frozenset(factors), Product(tuple(dict.fromkeys(factors))))
    return total


def _is_intercept(expression: Expression) -> bool:
    return isinstance(expression, Literal) and expression.head in ("0", "1")


def _factors(expression: Expression) -> Iterator[Expression]:
    if expression.sign in (":", "*", "/"):
        yield from chain.from_iterable(map(_factors, expression.args))
    else:
        yield expression


# ------------------------------------------------------------ what cannot be a term
def _check_no_arithmetic(is_right: object, expression: Expression) -> None:
    message = (
        f"a formula reads arithmetic as terms: write I({expression}) for its value"
        if not isinstance(expression.value, str)
        else "a string is not a term: write a column without quotes"
    )
    check(is_right, expression, message)


def _check_not_alone(*factors: Expression, also: Sequence[str] = ()) -> None:
    """Refuse what must be a term of its own in a product or a function."""
    for call in factors:
        fix = f"; {call.callee}(x, by=z) varies with z" if call.callee in SMOOTHS else ""
        fix = "; poly(x, 2) may appear in products" if call.callee == "bs" else fix
        what = f"'{call}' is in a product or a function: make it a term of its own{fix}"
        check(call.callee not in (*ALONE, *also), call, what)


def _check_call(call: Call) -> None:
    """Refuse a call that the formula cannot have, or one in its arguments."""
    for part in within(call):
        what = f"no calculation has '{part.sign}': write a product as x * z"
        check(part.sign not in (*BARS, ":"), part, what)
    for inner in calls_within(call):
        if inner is not call:
            what = f"'{inner}' is inside '{call}': add it as a term"
            check(inner.callee != "offset", inner, what)
        _check_function(inner)
        _check_options(inner)
        if inner is not call:
            _check_not_alone(inner, also=("mo",))


def _check_function(call: Call) -> None:
    """Refuse a function that is not known, or that would not use its arguments."""
    name = call.callee
    fix = "make a column of it, write a column's name in backticks, or use one of "
    if name.rpartition(".")[2].lower() in ("factor", "category", "categorical"):
        fix = "numbers are categories in C(column), strings are without it. There are "
    check(name in EVERY_NAME, call, f"there is no function '{name}': {fix}{', '.join(CALLABLE)}")
    check(call.args, call, f"{name}() has no argument: write {name}(column)")
    first, *others = call.args
    is_column = isinstance(first, Name) or name not in ("cs", "mi", *CODINGS)
    check(is_column, first, f"{name}() reads no single column: make a column of it first")
    if name not in SMOOTHS:
        return
    basis, by = call.option("bs"), call.option("by")
    what = f"groups: write ({first} | hospital), or (1 | hospital)"
    check(basis is None or basis.value != "re", call, what)
    fix = f"{name}(x, k=10), or s(x, hospital, bs='fs') for a curve of each hospital"
    check(not others, call.args[-1], f"a smooth of several columns: write one of each, {fix}")
    if by is not None:
        check(isinstance(by, Name), by, "by= is not a column: make a column of it first")


def _check_options(call: Call) -> None:
    """Refuse options that are unknown, too many, not written out, or not what they must be."""
    name, options = call.callee, OPTIONS.get(call.callee, {})
    written, sizes = written_options(call), options_of(call)
    for option, expression in call.options:
        fix = f"give {', '.join(options)}" if options else "it takes a column alone"
        check(option in options, expression, f"{name}() has no option '{option}': {fix}")
    is_once = len({option for option, _ in written}) == len(written)
    usage = ", ".join(["column", *(f"{option}=..." for option in options)])
    is_right = is_once and len(call.args) <= 1 + min(len(options), 1)
    check(is_right, call.args[-1], f"one argument too many: write {name}({usage})")
    for option, expression in written:
        if option != "by":
            check(expression.is_constant, expression, "options must be numbers: write them out")
            what = f"{option} of {name}() is {expression}: it must be {options[option].must_be}"
            check(options[option].allows(expression.value), expression, what)
    if name == "bs":
        fix = f"give the number of its columns, at least its degree {sizes['degree']}"
        is_right = sizes["df"] >= max(sizes["degree"], 1)
        check(is_right, call, f"bs() has df {sizes['df']}: {fix}")
    if name == "gp":
        k = enough_sines(sizes["k"], sizes["c"])
        what = f"too few sines for a range of length scales: use k={k} or more"
        check(k <= sizes["k"], call, what)
