"""Reads the terms of a sum of expressions, each once, and refuses what may be none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations

from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.expressions import (
    CODINGS,
    FUNCTIONS,
    OPTIONS,
    OTHERS,
    Call,
    Expression,
    Literal,
    Name,
    Operator,
    calls_within,
    enough_sines,
    summands,
    within,
)
from hierfl.formulas.grammar import refused
from hierfl.formulas.terms import (
    Factor,
    Product,
    TermSum,
    constant_of,
    is_constant,
    options_of,
)
from hierfl.formulas.transforms import SMOOTHS

ALONE = ("cs", "bs", *SMOOTHS)  # which no product may hold
FUNCTIONS_HERE = {*STATEFUL, *CODINGS, *OTHERS, *FUNCTIONS} - {"np"}
Sum = dict[frozenset[Factor], Product]
Fault = tuple[Expression | Product, str]  # where, and what to write
OUTSIDE = "put 0 at the start of the terms, outside of parentheses, to leave the intercept out"


class TermReader:
    """Reads the terms of the expressions of one text."""

    def __init__(self, text: str) -> None:
        """Read expressions whose places are in this text."""
        self.text = text

    def error(self, at: Expression | Product, message: str) -> ValueError:
        """Return an error that points at an expression."""
        return refused(self.text, (at.factors[0] if isinstance(at, Product) else at).at, message)

    def refuse(self, faults: Iterable[Fault]) -> None:
        """Raise the error of the first of some faults."""
        for at, message in faults:
            raise self.error(at, message)

    def terms(self, expressions: Iterable[tuple[str, Expression]]) -> TermSum:
        """Return the terms of a sum, which has an intercept unless it is taken away."""
        total: Sum = {frozenset(): Product()}
        for sign, expression in expressions:
            self._add(total, sign, expression, top=True)
        self.refuse(_faults_of_names(total.values()))
        return TermSum(tuple(total.values()))

    # -------------------------------------------------------- sums
    def _add(self, total: Sum, sign: str, expression: Expression, *, top: bool) -> None:
        """Add a term to a sum, or take it away."""
        if expression.is_minus:
            if not _is_intercept(expression.args[0]):
                raise self.error(expression, "two signs in a row: keep one")
            sign, expression = {"+": "-", "-": "+"}[sign], expression.args[0]
        if _is_intercept(expression):
            is_there = (str(expression) == "1") == (sign == "+")
            if is_there:
                total.setdefault(frozenset(), Product())
            elif top:
                total.pop(frozenset(), None)
            else:
                raise self.error(expression, OUTSIDE)
            return
        for key, product in self._products(expression).items():
            if sign == "-" and total.pop(key, None) is None:
                fix = "leave it out, or write I(a - b) for a difference"
                message = f"the formula takes '{product.name}' away, which is not there: {fix}"
                raise self.error(expression, message)
            if sign == "+" and total.setdefault(key, product) is not product and product.is_offset:
                raise self.error(expression, "an offset stands twice, and counts once: remove one")

    def _products(self, expression: Expression, *, inside: bool = False) -> Sum:
        """Return the terms of one summand, or of a factor `inside` of a product."""
        if isinstance(expression, Call):
            self.refuse(_faults_of_call(expression))
        if isinstance(expression, Name | Call):
            return _once([(expression,)])
        if expression.is_bar:
            raise self.error(expression, "a bar stands inside of other parentheses: take it out")
        if expression.is_sum and expression.wrapped:
            total: Sum = {}
            for sign, summand in summands(Operator(expression.sign, expression.args)):
                self.refuse([_arithmetic(summand)] if inside and _is_intercept(summand) else [])
                self._add(total, sign, summand, top=False)
            return total
        if expression.sign == "**":
            return self._power(expression)
        if expression.sign in (":", "*", "/"):
            return self._product(expression)
        raise self.error(*_arithmetic(expression))

    def _product(self, expression: Expression) -> Sum:
        """Return the terms of a * b, a:b or a / b."""
        factors = [*_factors(expression)]
        if any(isinstance(arg, Literal) for arg in expression.args):
            raise self.error(*_arithmetic(expression))
        if len({*factors}) < len(factors):
            square = f"write I({' * '.join(map(str, factors))}) for the product"
            raise self.error(expression, f"a term times itself is the same term: {square}")
        first, second = (self._products(arg, inside=True) for arg in expression.args)
        before = [product.factors for product in first.values()]
        if expression.sign == "/":
            before = [tuple(chain.from_iterable(before))]
        crossed = _once([(*a, *product.factors) for a in before for product in second.values()])
        main = {"*": first | second, "/": first, ":": {}}[expression.sign]
        return self._with_products(main, crossed)

    def _power(self, expression: Expression) -> Sum:
        """Return the terms of a sum, and all their products of up to so many."""
        base, power = expression.args
        size = power.value if isinstance(power, Literal) else 0
        is_sum = base.is_sum and not base.is_minus
        if not is_sum or not isinstance(size, int) or size < 1:
            raise self.error(*_arithmetic(expression))
        total = self._products(base, inside=True)
        chosen = chain(*(combinations(total.values(), n) for n in range(2, size + 1)))
        several = [tuple(chain.from_iterable(p.factors for p in some)) for some in chosen]
        return self._with_products(total, _once(several))

    def _with_products(self, main: Sum, crossed: Sum) -> Sum:
        """Return terms with products behind them."""
        self.refuse(chain.from_iterable(map(_faults_of_product, crossed.values())))
        return main | {key: product for key, product in crossed.items() if key not in main}


# ------------------------------------------------------------ what cannot be a term
def _faults_of_names(products: Iterable[Product]) -> Iterator[Fault]:
    names: dict[str, Product] = {}
    for product in products:
        if "Intercept" in product.columns:
            yield product, "'Intercept' names the intercept: rename the column"
        if names.setdefault(product.name, product) is not product:
            yield product, f"two terms are called '{product.name}': rename a column"


def _faults_of_product(product: Product) -> Iterator[Fault]:
    """Yield why there is no product with an offset, of a curve, or of two mo()."""
    callees = [factor.callee for factor in product.factors]
    if len(callees) > 1 and "offset" in callees:
        yield product, "an offset has no coefficient: add it as a term of its own"
    if len(callees) > 1 and {*callees} & {*ALONE}:
        yield _alone(next(f for f in product.factors if f.callee in ALONE))
    if callees.count("mo") > 1:
        fix = "take C(x) or x as a number for one of them"
        yield product, f"a product of two monotonic effects: {fix}"


def _arithmetic(expression: Expression) -> Fault:
    if isinstance(expression, Literal) and isinstance(expression.value, str):
        return expression, "a text is no term: write a column without quotes"
    fix = f"write I({expression}) for its value"
    return expression, f"a formula reads arithmetic as terms: {fix}"


def _alone(call: Expression) -> Fault:
    fix = f"; {call.callee}(x, by=z) varies with z" if call.callee in SMOOTHS else ""
    fix = "; poly(x, 2) may stand in products" if call.callee == "bs" else fix
    return call, f"'{call}' stands in a product or a function: let it be a term of its own{fix}"


def _faults_of_call(call: Call) -> Iterator[Fault]:
    """Yield why the formula cannot have a call, or one in its arguments."""
    for part in within(call):
        if part.is_bar or part.sign == ":":
            yield part, f"no calculation has '{part.sign}': write a product as x * z"
    for inner in calls_within(call):
        if inner is not call and inner.callee == "offset":
            yield inner, f"'{inner}' stands in '{call}': add it as a term"
        yield from _faults_of_function(inner)
        if inner is not call and inner.callee in (*ALONE, "mo"):
            yield _alone(inner)


def _faults_of_function(call: Call) -> Iterator[Fault]:
    """Yield why a function is not known, or would not use its arguments."""
    name = call.callee
    if name not in FUNCTIONS_HERE and name.removeprefix("np.") not in FUNCTIONS:
        names = ", ".join(sorted(FUNCTIONS_HERE - {"offset", "I"}))
        fix = f"make a column of it, write a column's name in backticks, or use one of {names}"
        yield call, f"there is no function '{name}': {fix}"
    if not call.args:
        yield call, f"{name}() has no argument: write {name}(column)"
    first, *others = call.args
    if not isinstance(first, Name) and name in ("cs", "mi", *CODINGS):
        yield first, f"{name}() reads no single column: make a column of it first"
    if name in SMOOTHS:
        basis, by = call.option("bs"), call.option("by")
        if isinstance(basis, Literal) and basis.value == "re":
            yield call, f"groups: write ({first} | hospital), or (1 | hospital)"
        if others:
            fix = f"{name}(x, k=10), or s(x, hospital, bs='fs') for a curve of each hospital"
            yield others[0], f"a smooth of several columns: write one of each, {fix}"
        if by is not None and not isinstance(by, Name):
            yield by, "by= is no column: make a column of it first"
    yield from _faults_of_options(call, others)


def _faults_of_options(call: Call, others: Sequence[Expression]) -> Iterator[Fault]:
    """Yield why options are unknown, too many, not written out, or not what they must be."""
    name, options = call.callee, OPTIONS.get(call.callee, {})
    for option, value in call.options:
        if option not in options:
            fix = f"give {', '.join(options)}" if options else "it takes a column alone"
            yield value, f"{name}() has no option '{option}': {fix}"
    is_twice = bool(others and options) and call.option(next(iter(options))) is not None
    if len(others) > min(len(options), 1) or is_twice:
        written = ", ".join(["column", *(f"{option}=..." for option in options)])
        yield call.args[-1], f"an argument too many: write {name}({written})"
    for option, value in (*zip(options, others, strict=False), *call.options):
        if option == "by":
            continue
        if not is_constant(value):
            yield value, "options must be numbers: write them out"
        if not options[option].allows(constant_of(value)):
            must_be = options[option].must_be
            yield value, f"{option} of {name}() is {value}: it must be {must_be}"
    sizes = options_of(call)
    if name == "bs" and sizes["df"] < max(sizes["degree"], 1):
        fix = f"give the number of its columns, at least its degree {sizes['degree']}"
        yield call, f"bs() has df {sizes['df']}: {fix}"
    if name == "gp" and (k := enough_sines(sizes["k"], sizes["c"])) > sizes["k"]:
        yield call, f"too few sines for a range of length scales: take k={k} or more"


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
