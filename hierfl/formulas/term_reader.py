"""Reads the terms of a sum of expressions, each once, and refuses what may be none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, combinations

from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.expressions import (
    Call,
    Expression,
    Literal,
    Name,
    Operation,
    calls_within,
    summands,
    within,
)
from hierfl.formulas.functions import (
    CODINGS,
    ELSEWHERE,
    FUNCTIONS,
    OPTIONS,
    OTHERS,
    SMOOTHS,
    Option,
    enough_sines,
)
from hierfl.formulas.grammar import refused
from hierfl.formulas.terms import Factor, Product, Terms, callee_of, constant_of, options_of

ALONE = ("cs", "bs", *SMOOTHS)  # which no product may hold
FUNCTIONS_HERE = {*STATEFUL, *CODINGS, *OTHERS, *FUNCTIONS} - {"np"}
Sum = dict[frozenset[Factor], Product]
OUTSIDE = "put 0 at the start of the terms, outside of parentheses, to leave the intercept out"


class TermReader:
    """Reads the terms of the expressions of one text."""

    def __init__(self, text: str) -> None:
        """Read expressions whose places are in this text."""
        self.text = text

    def error(self, at: Expression | Product, message: str) -> ValueError:
        """Return an error that points at an expression."""
        return refused(self.text, (at.factors[0] if isinstance(at, Product) else at).at, message)

    def terms(self, expressions: Iterable[tuple[str, Expression]]) -> Terms:
        """Return the terms of a sum, which has an intercept unless it is taken away."""
        total: Sum = {frozenset(): Product()}
        for sign, expression in expressions:
            self._add(total, sign, expression, top=True)
        names: dict[str, Product] = {}
        for product in total.values():
            if "Intercept" in product.columns:
                raise self.error(product, "'Intercept' names the intercept: rename the column")
            if names.setdefault(product.name, product) is not product:
                raise self.error(product, f"two terms are called '{product.name}': rename a column")
        return Terms(tuple(total.values()))

    # -------------------------------------------------------- sums
    def _add(self, total: Sum, sign: str, expression: Expression, *, top: bool) -> None:
        """Add a term to a sum, or take it away."""
        if isinstance(expression, Operation) and expression.is_minus:
            if not _is_intercept(expression.args[0]):
                raise self.error(expression, "two signs in a row: keep one")
            sign, expression = {"+": "-", "-": "+"}[sign], expression.args[0]
        if _is_intercept(expression):
            is_there = (str(expression) == "1") == (sign == "+")
            if not is_there and not top:
                raise self.error(expression, OUTSIDE)
            if is_there:
                total.setdefault(frozenset(), Product())
            else:
                total.pop(frozenset(), None)
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
            self._check_call(expression)
        if isinstance(expression, Name | Call):
            return _once([(expression,)])
        if isinstance(expression, Operation) and expression.is_bar:
            raise self.error(expression, "a bar stands inside of other parentheses: take it out")
        if isinstance(expression, Operation) and expression.is_sum and expression.wrapped:
            total: Sum = {}
            for sign, summand in summands(Operation(expression.sign, expression.args)):
                if inside and _is_intercept(summand):
                    raise self._arithmetic(summand)
                self._add(total, sign, summand, top=False)
            return total
        if not isinstance(expression, Operation) or expression.sign not in (":", "*", "/", "**"):
            raise self._arithmetic(expression)
        return self._power(expression) if expression.sign == "**" else self._product(expression)

    def _product(self, expression: Operation) -> Sum:
        """Return the terms of a * b, a:b or a / b."""
        factors = [*_factors(expression)]
        if any(isinstance(arg, Literal) for arg in expression.args):
            raise self._arithmetic(expression)
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

    def _power(self, expression: Operation) -> Sum:
        """Return the terms of a sum, and all their products of up to so many."""
        base, power = expression.args
        size = power.value if isinstance(power, Literal) else 0
        is_sum = isinstance(base, Operation) and base.is_sum and not base.is_minus
        if not is_sum or not isinstance(size, int) or size < 1:
            raise self._arithmetic(expression)
        total = self._products(base, inside=True)
        chosen = chain(*(combinations(total.values(), n) for n in range(2, size + 1)))
        several = [tuple(chain.from_iterable(p.factors for p in some)) for some in chosen]
        return self._with_products(total, _once(several))

    def _with_products(self, main: Sum, crossed: Sum) -> Sum:
        """Return terms with products behind them; refuse offsets, curves and two mo() in a product."""
        for product in crossed.values():
            callees = [callee_of(factor) for factor in product.factors]
            if len(callees) > 1 and "offset" in callees:
                fix = "add it as a term of its own"
                raise self.error(product, f"an offset has no coefficient: {fix}")
            if len(callees) > 1 and {*callees} & {*ALONE}:
                raise self._alone(next(f for f in product.factors if callee_of(f) in ALONE))
            if callees.count("mo") > 1:
                fix = "take C(x) or x as a number for one of them"
                raise self.error(product, f"a product of two monotonic effects: {fix}")
        return main | {key: product for key, product in crossed.items() if key not in main}

    def _arithmetic(self, expression: Expression) -> ValueError:
        if isinstance(expression, Literal) and isinstance(expression.value, str):
            return self.error(expression, "a text is no term: write a column without quotes")
        fix = f"write I({expression}) for its value"
        return self.error(expression, f"a formula reads arithmetic as terms: {fix}")

    # -------------------------------------------------------- calls
    def _alone(self, call: Expression) -> ValueError:
        fix = f"; {callee_of(call)}(x, by=z) varies with z" if callee_of(call) in SMOOTHS else ""
        fix = "; poly(x, 2) may stand in products" if callee_of(call) == "bs" else fix
        message = f"'{call}' stands in a product or a function: let it be a term of its own"
        return self.error(call, message + fix)

    def _check_call(self, call: Call) -> None:
        """Refuse a call, or one in its arguments, that the formula cannot have."""
        for part in within(call):
            if isinstance(part, Operation) and (part.is_bar or part.sign == ":"):
                fix = "write a product as x * z"
                raise self.error(part, f"no calculation has '{part.sign}': {fix}")
        for inner in calls_within(call):
            if inner is not call and inner.callee == "offset":
                raise self.error(inner, f"'{inner}' stands in '{call}': add it as a term")
            self._check_function(inner)
            if inner is not call and inner.callee in (*ALONE, "mo"):
                raise self._alone(inner)

    def _check_function(self, call: Call) -> None:
        """Refuse a function that is not known, and arguments that it would not use."""
        name, options = call.callee, OPTIONS.get(call.callee, {})
        if name not in FUNCTIONS_HERE and name.removeprefix("np.") not in FUNCTIONS:
            names = ", ".join(sorted(FUNCTIONS_HERE - {"offset", "I"}))
            fix = f"make a column of it, write a column's name in backticks, or use one of {names}"
            fix = ELSEWHERE.get(name, fix)
            raise self.error(call, f"there is no function '{name}': {fix}")
        if not call.args:
            raise self.error(call, f"{name}() has no argument: write {name}(column)")
        first, *others = call.args
        by, basis = call.option("by"), call.option("bs")
        if not isinstance(first, Name) and name in ("cs", "mi", *CODINGS):
            raise self.error(first, f"{name}() reads no single column: make a column of it first")
        if name in SMOOTHS and isinstance(basis, Literal) and basis.value == "re":
            raise self.error(call, f"groups: write ({first} | hospital), or (1 | hospital)")
        if name in SMOOTHS and others:
            fix = f"{name}(x, k=10), or s(x, hospital, bs='fs') for a curve of each hospital"
            raise self.error(others[0], f"a smooth of several columns: write one of each, {fix}")
        if by is not None and name in SMOOTHS and not isinstance(by, Name):
            raise self.error(by, "by= is no column: make a column of it first")
        for option, value in call.options:
            if option not in options:
                fix = f"give {', '.join(options)}" if options else "it takes a column alone"
                raise self.error(value, f"{name}() has no option '{option}': {fix}")
        is_twice = bool(others and options) and call.option(next(iter(options))) is not None
        if len(others) > min(len(options), 1) or is_twice:
            written = ", ".join(["column", *(f"{option}=..." for option in options)])
            raise self.error(call.args[-1], f"an argument too many: write {name}({written})")
        for option, value in (*zip(options, others, strict=False), *call.options):
            if option != "by":
                self._check_option(f"{option} of {name}()", options[option], value)
        self._check_sizes(call)

    def _check_option(self, name: str, option: Option, value: Expression) -> None:
        """Refuse an option whose value is not written out, or not what it must be."""
        try:
            is_allowed = option.allows(constant_of(value))
        except TypeError as error:
            raise self.error(value, "options must be numbers: write them out") from error
        if not is_allowed:
            raise self.error(value, f"{name} is {value}: it must be {option.must_be}")

    def _check_sizes(self, call: Call) -> None:
        """Refuse a spline of fewer columns than its degree, and too few sines of gp()."""
        options = options_of(call)
        if call.callee == "bs" and options["df"] < max(options["degree"], 1):
            fix = f"give the number of its columns, at least its degree {options['degree']}"
            raise self.error(call, f"bs() has df {options['df']}: {fix}")
        if call.callee == "gp" and (k := enough_sines(options["k"], options["c"])) > options["k"]:
            raise self.error(
                call, f"too few sines for a range of length scales: take k={k} or more"
            )


def _once(several: Iterable[tuple[Factor, ...]]) -> Sum:
    """Return products of factors, each factor and each product once."""
    total: Sum = {}
    for factors in several:
        total.setdefault(frozenset(factors), Product(tuple(dict.fromkeys(factors))))
    return total


def _is_intercept(expression: Expression) -> bool:
    return isinstance(expression, Literal) and expression.text in ("0", "1")


def _factors(expression: Expression) -> Iterator[Expression]:
    if isinstance(expression, Operation) and expression.sign in (":", "*", "/"):
        yield from chain.from_iterable(map(_factors, expression.args))
    else:
        yield expression
