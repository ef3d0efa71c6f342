"""The terms of a sum, "1 + age * sex": products of columns and calls, each once, and what may be none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.expressions import (
    Call,
    Expression,
    Literal,
    Name,
    Operation,
    calls_within,
    names_in,
    summands,
    within,
)
from hierfl.formulas.tokens import refused
from hierfl.formulas.transforms import (
    CODINGS,
    FUNCTIONS,
    NEAREST,
    OPTIONS,
    OTHERS,
    SMOOTHS,
)

ALONE = ("cs", "bs", *SMOOTHS)  # which no product may hold
FUNCTIONS_HERE = {*STATEFUL, *CODINGS, *OTHERS, *FUNCTIONS} - {"np"}
Factor = Name | Call


@dataclass(frozen=True)
class Product:
    """A term: its factors, in the order in which they are written; the intercept has none."""

    factors: tuple[Factor, ...] = ()

    @property
    def name(self) -> str:
        """The term's name, "age:sex"."""
        return ":".join(factor.label for factor in self.factors) or "Intercept"

    @property
    def is_offset(self) -> bool:
        """It has no coefficient."""
        return [_callee(factor) for factor in self.factors] == ["offset"]

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it reads."""
        return frozenset(chain.from_iterable(map(names_in, self.factors)))

    def __str__(self) -> str:
        """Return the term as text."""
        return ":".join(map(str, self.factors)) or "1"


@dataclass(frozen=True)
class Terms:
    """The terms of one sum, in order."""

    products: tuple[Product, ...]

    @property
    def has_intercept(self) -> bool:
        """Whether one of them is the intercept."""
        return Product() in self.products

    @property
    def slopes(self) -> tuple[Product, ...]:
        """The terms but the intercept."""
        return tuple(product for product in self.products if product.factors)

    def __str__(self) -> str:
        """Return the sum as text."""
        slopes = map(str, self.slopes)
        if self.has_intercept:
            return " + ".join(["1", *slopes])
        return " + ".join(["0", *slopes])


def calls(terms: Terms) -> Iterator[Call]:
    """Yield every call in some terms, inner ones first."""
    for product in terms.products:
        yield from chain.from_iterable(map(calls_within, product.factors))


def columns_of(terms: Terms) -> tuple[str, ...]:
    """Return the columns that some terms read."""
    return tuple(sorted({name for product in terms.products for name in product.columns}))


def bare_columns(terms: Terms) -> frozenset[str]:
    """Return the columns that are read outside of C(), S() and T(), as the frame has them."""
    factors = chain.from_iterable(product.factors for product in terms.products)
    return frozenset(chain.from_iterable(map(_bare, factors)))


def _bare(expression: Expression) -> Iterator[str]:
    if isinstance(expression, Name):
        yield expression.name
    elif isinstance(expression, Operation | Call) and _callee(expression) not in CODINGS:
        options = [value for _, value in getattr(expression, "options", ())]
        yield from chain.from_iterable(map(_bare, (*expression.args, *options)))


def monotone_columns(terms: Terms) -> set[str]:
    """Return the columns of the monotonic effects among some terms."""
    return {name for call in calls(terms) if call.callee == "mo" for name in names_in(call)}


def column_of(call: Call) -> str:
    """Return the column of a call that reads one, such as C(sex)."""
    (name,) = names_in(call.args[0])
    return name


def options_of(call: Call) -> dict[str, Any]:
    """Return the options of a call by name, but its `by`; they are numbers and texts."""
    named = dict(zip(OPTIONS.get(call.callee, ()), call.args[1:], strict=False)) | dict(
        call.options
    )
    return {name: _constant(value) for name, value in named.items() if name != "by"}


def _constant(expression: Expression) -> Any:
    if isinstance(expression, Operation) and expression.sign == "-" and len(expression.args) == 1:
        return -_constant(expression.args[0])
    if not isinstance(expression, Literal):
        raise TypeError(f"'{expression}' is no number")
    return expression.value


def _callee(expression: Expression) -> str:
    return expression.callee if isinstance(expression, Call) else ""


# ------------------------------------------------------------ from a text
Sum = dict[frozenset[Factor], Product]


class TermReader:
    """Reads the terms of the expressions of one text."""

    def __init__(self, text: str) -> None:
        """Read expressions whose places are in this text."""
        self.text = text

    def terms(self, sum_: list[tuple[str, Expression]]) -> Terms:
        """Return the terms of a sum, which has an intercept unless it is taken away."""
        total: Sum = {frozenset(): Product()}
        for sign, expression in sum_:
            self._add(total, sign, expression, top=True)
        names: dict[str, Product] = {}
        for product in total.values():
            if "Intercept" in product.columns:
                raise self._error(
                    product, "'Intercept' has the name of the intercept: rename the column"
                )
            if names.setdefault(product.name, product) is not product:
                raise self._error(
                    product,
                    f"two terms are called '{product.name}': rename the column of that name",
                )
        return Terms(tuple(total.values()))

    def _error(self, at: Expression | Product, message: str) -> ValueError:
        place = (at.factors[0] if isinstance(at, Product) else at).at
        return refused(self.text, place, message)

    # -------------------------------------------------------- sums
    def _add(self, total: Sum, sign: str, expression: Expression, *, top: bool) -> None:
        """Add a term to a sum, or take it away."""
        if (
            isinstance(expression, Operation)
            and expression.sign == "-"
            and len(expression.args) == 1
        ):
            if not _is_intercept(expression.args[0]):
                raise self._error(
                    expression, f"'{sign} {expression}' has two signs in a row: keep one"
                )
            sign, expression = {"+": "-", "-": "+"}[sign], expression.args[0]
        if _is_intercept(expression):
            if (str(expression) == "1") == (sign == "+"):
                total.setdefault(frozenset(), Product())
            elif top:
                total.pop(frozenset(), None)
            else:
                raise self._error(
                    expression,
                    f"'{sign} {expression}' takes the intercept away in parentheses: put 0 at the "
                    "start of the terms, outside of parentheses",
                )
            return
        for key, product in self._products(expression).items():
            if sign == "-" and key not in total:
                raise self._error(
                    expression,
                    f"the formula takes '{product.name}' away, which is not there: leave it out, or "
                    f"write I(a - {expression}) for a difference",
                )
            if sign == "-":
                del total[key]
            elif product.is_offset and key in total:
                raise self._error(
                    expression,
                    f"'{product}' stands in the formula twice, and counts once: remove one",
                )
            else:
                total.setdefault(key, product)

    def _products(self, expression: Expression, *, inside: bool = False) -> Sum:
        """Return the terms of one summand, or of a factor `inside` of a product."""
        if isinstance(expression, Name):
            return _once([(expression,)])
        if isinstance(expression, Call):
            self._check_call(expression)
            return _once([(expression,)])
        if isinstance(expression, Operation) and expression.is_bar:
            raise self._error(
                expression,
                f"'{expression}' has a bar inside of other parentheses: write its groups as a term",
            )
        if isinstance(expression, Operation) and expression.is_sum and expression.wrapped:
            total: Sum = {}
            for sign, summand in summands(Operation(expression.sign, expression.args)):
                if inside and _is_intercept(summand):
                    raise self._arithmetic(summand)
                self._add(total, sign, summand, top=False)
            return total
        if not isinstance(expression, Operation) or expression.sign not in (":", "*", "/", "**"):
            raise self._arithmetic(expression)
        return self._product(expression)

    def _product(self, expression: Operation) -> Sum:
        """Return the terms of a * b, a:b, a / b or (a + b) ** 2."""
        first, second = expression.args
        if expression.sign == "**":
            return self._power(expression)
        if isinstance(first, Literal) or isinstance(second, Literal):
            raise self._arithmetic(expression)
        factors = [*_factors(expression)]
        if twice := [factor for factor in factors if factors.count(factor) > 1]:
            square = " * ".join(map(str, factors))
            raise self._error(
                expression,
                f"'{expression}' multiplies '{twice[0]}' by itself, which a formula reads as "
                f"'{twice[0]}': write I({square}) for the product",
            )
        left, right = (self._products(arg, inside=True) for arg in (first, second))
        before = [tuple(chain.from_iterable(p.factors for p in left.values()))]  # of a / b
        if expression.sign != "/":
            before = [product.factors for product in left.values()]
        crossed = _once([(*a, *product.factors) for a in before for product in right.values()])
        for product in crossed.values():
            self._check_product(product)
        main = {"*": left | right, "/": left, ":": {}}[expression.sign]
        return main | {key: product for key, product in crossed.items() if key not in main}

    def _power(self, expression: Operation) -> Sum:
        """Return the terms of a sum and all their products of up to so many."""
        base, power = expression.args
        size = power.value if isinstance(power, Literal) else 0
        is_sum = isinstance(base, Operation) and base.is_sum and len(base.args) == 2
        if not is_sum or not isinstance(size, int) or size < 1:
            raise self._arithmetic(expression)
        total = self._products(base, inside=True)
        several = [
            tuple(chain.from_iterable(product.factors for product in chosen))
            for count in range(2, size + 1)
            for chosen in combinations(total.values(), count)
        ]
        for product in (crossed := _once(several)).values():
            self._check_product(product)
        return total | {key: product for key, product in crossed.items() if key not in total}

    def _arithmetic(self, expression: Expression) -> ValueError:
        if isinstance(expression, Literal) and isinstance(expression.value, str):
            message = (
                f"'{expression}' is a text, not a term: write columns and functions of columns"
            )
        else:
            message = (
                f"'{expression}' is arithmetic, which a formula reads as terms: write I({expression}) "
                "for its value"
            )
        return self._error(expression, message)

    # -------------------------------------------------------- checks
    def _check_product(self, product: Product) -> None:
        """Refuse a product that has an offset, a curve, or two monotonic effects."""
        if len(product.factors) < 2:
            return
        for factor in product.factors:
            callee = _callee(factor)
            if callee == "offset":
                raise self._error(
                    factor,
                    f"'{factor}' stands in a product, and an offset has no coefficient: add it as a "
                    "term of its own",
                )
            if callee in ALONE:
                raise self._alone(factor)
        if sum(_callee(factor) == "mo" for factor in product.factors) > 1:
            raise self._error(
                product,
                f"'{product.name}' is a product of two monotonic effects: take C(x) or x as a number "
                "for one of them",
            )

    def _alone(self, expression: Expression) -> ValueError:
        callee, advice = _callee(expression), ""
        if callee in SMOOTHS:
            advice = f"; {callee}(x, by=z) varies with z"
        elif callee == "bs":
            advice = ": let a spline stand alone, or use a product with poly(x, 2)"
        return self._error(
            expression,
            f"'{expression}' stands in a product or a function: let it be a term of its own{advice}",
        )

    def _check_call(self, call: Call) -> None:
        """Refuse a call, or one in its arguments, that the formula cannot have."""
        for inner in calls_within(call):
            if inner is not call and inner.callee == "offset":
                raise self._error(inner, f"'{inner}' stands in '{call}': add it as a term")
            self._check_function(inner)
            if inner is not call and inner.callee in (*ALONE, "mo"):
                raise self._alone(inner)
        for part in within(call):
            if isinstance(part, Operation) and (part.is_bar or part.sign == ":"):
                raise self._error(
                    part, f"'{call}' calculates with '{part.sign}': write a product as x * z"
                )

    def _check_function(self, call: Call) -> None:
        """Refuse a function that is not known, and arguments that it would not use."""
        name, options = call.callee, OPTIONS.get(call.callee, ())
        if name not in FUNCTIONS_HERE and name.removeprefix("np.") not in FUNCTIONS:
            if name in NEAREST:
                raise self._error(call, f"'{call}' is not supported: write {NEAREST[name]}")
            names = ", ".join(sorted(FUNCTIONS_HERE - {"offset", "I"}))
            raise self._error(
                call,
                f"the function '{name}' of '{call}' is not known: make a column of it first, write a "
                f"column's name in backticks, or use one of {names}",
            )
        if not call.args:
            raise self._error(call, f"'{call}' has no argument: write {name}(column)")
        if not isinstance(call.args[0], Name) and name in ("cs", "mi", *CODINGS):
            raise self._error(
                call, f"'{call}' reads no single column: make a column of '{call.args[0]}' first"
            )
        if name in SMOOTHS:
            self._check_smooth(call)
        for option, value in call.options:
            if option not in options:
                advice = f"give {', '.join(options)}" if options else "it takes a column alone"
                raise self._error(
                    value, f"'{call}' has the option '{option}', which is not known: {advice}"
                )
        if len(call.args) > 1 + len(options[:1]) or (
            len(call.args) > 1 and call.option(options[0]) is not None
        ):
            shown = ", ".join(["column", *(f"{option}=..." for option in options)])
            raise self._error(
                call.args[-1], f"'{call}' has an argument too many: write {name}({shown})"
            )
        try:
            options_of(call)
        except TypeError as error:
            raise self._error(
                call, f"the options of '{call}' must be numbers: write them out"
            ) from error

    def _check_smooth(self, call: Call) -> None:
        """Refuse a smooth of several columns, one of groups, and a `by` that is no column."""
        by, basis = call.option("by"), call.option("bs")
        if isinstance(basis, Literal) and basis.value == "re":
            raise self._error(
                call, f"'{call}' are groups: write ({call.args[0]} | hospital), or (1 | hospital)"
            )
        if len(call.args) > 1:
            raise self._error(
                call.args[1],
                f"'{call}' is a smooth of several columns, which is not supported: write a smooth of "
                f"each, options by name, {call.callee}(x, k=10), or s(x, hospital, bs='fs') for a "
                "curve of each hospital",
            )
        if by is not None and not isinstance(by, Name):
            raise self._error(by, f"by of '{call}' is no column: make a column of it first")


def _once(several: list[tuple[Factor, ...]]) -> Sum:
    """Return products of factors, each factor and each product once."""
    products = (Product(tuple(dict.fromkeys(factors))) for factors in several)
    total: Sum = {}
    for product in products:
        total.setdefault(frozenset(product.factors), product)
    return total


def _is_intercept(expression: Expression) -> bool:
    return isinstance(expression, Literal) and expression.text in ("0", "1")


def _factors(expression: Expression) -> Iterator[Expression]:
    if isinstance(expression, Operation) and expression.sign in (":", "*", "/"):
        yield from chain.from_iterable(map(_factors, expression.args))
    else:
        yield expression
