"""A formula's text as a tree: the response and its additions, common terms and groups, of each formula."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from itertools import product as cartesian

from hierfl.formulas.declaration import FormulaTree, Group
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
    calls,
    summands,
    within,
)
from hierfl.formulas.grammar import Misplaced, Reader, Sides, check, pointing
from hierfl.formulas.signatures import ADDITIONS, MATRICES, TERMS, arguments

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


@lru_cache(maxsize=64)  # a formula is made again with its schema, and at each question of a node
def parse(text: str) -> FormulaTree:
    """Read formulas such as "y ~ x + (1 + x | hospital); sigma ~ x", or say what to write instead.

    >>> parse("y | trials(n) ~ age + (1 + age || site/ward)").groups[1].text
    '(1 + age || site:ward)'
    """
    with pointing(text):
        first, *others = Reader(text).formulas()
        main = _main(first)
        every = chain.from_iterable(map(calls, main.terms))
        imputed = {call.args[0] for call in every if call.callee == "mi"}
        trees, covariates = dict[str, FormulaTree](), list[str]()
        for sides in others:
            name, is_covariate = _name_of(sides, imputed)
            check(name not in trees, sides, f"'{name}' has two formulas: write one")
            labels = (name,) if is_covariate else main.labels
            trees[name] = FormulaTree(labels, *_right(sides.right))
            covariates += [name] if is_covariate else []
        texts = (first.text, *(sides.text for sides in others))
        return replace(main, others=trees, covariates=tuple(covariates), texts=texts, text=text)


def _name_of(sides: Sides, imputed: Collection[Expression]) -> tuple[str, bool]:
    """Return what "sigma ~ x" or "x | mi() ~ z" is of, and whether it is a covariate."""
    target = column = sides.target
    if target and target.sign == "|":
        column, addition = target.args
        if isinstance(column, Name) and addition == Call("mi"):
            return column.head, True
    if isinstance(target, Name) and column not in imputed:
        return target.head, False
    fix = "is not a formula of a parameter: write 'sigma ~ x', or leave it out"
    if column in imputed:
        fix = f"imputes '{column}': write '{column} | mi() ~ {sides.right}'"
        if target is not column:
            fix += "; a known error of measurement needs a Pyro program (docs/recipes.md)"
    raise Misplaced(sides, f"'{sides.text}' {fix}")


# ------------------------------------------------------------ the response
def _main(sides: Sides) -> FormulaTree:
    """Return the formula of the response."""
    target, additions, bounds = sides.target, dict[str, str](), None
    if target is None:
        raise Misplaced(sides, "nothing on one side of '~': name the response")
    if target.sign == "|":
        target, right = target.args
        for sign, addition in summands(right):
            check(sign == "+", addition, "additions are joined by '+', not '-'")
            callee = addition.callee
            what = f"there is no addition '{callee or addition}': the additions are {', '.join(ADDITIONS)}"
            check(callee in ADDITIONS, addition, what)
            assert isinstance(addition, Call)
            values = arguments(addition, ADDITIONS)
            is_new = callee not in additions and (callee != "trunc" or bounds is None)
            check(is_new, addition, f"the addition '{callee}' appears twice: remove one")
            if callee == "trunc":
                bounds = float(values["lb"]), float(values["ub"])
            else:
                additions[callee] = values["column"].head
                additions |= {"upper": upper.head} if (upper := values.get("upper")) else {}
    what = "the response has both cens() and event(): keep one"
    check(not {"cens", "event"} <= additions.keys(), target, what)
    return FormulaTree(_labels(target), *_right(sides.right), additions, bounds)


def _labels(target: Expression) -> tuple[str, ...]:
    """Return the column of the response, or the columns of cbind(a, b, c)."""
    if isinstance(target, Name):
        return (target.head,)
    names = tuple(arg.head for arg in target.args if isinstance(arg, Name))
    fix = "write cbind(a, b, c), successes | trials(n) or time | event(status), or make a column"
    is_right = target.callee == "cbind" and len(names) == len(target.args + target.options)
    check(is_right, target, f"the response is not a column: {fix}")
    is_right = len({*names}) >= max(len(names), 2)
    check(is_right, target, "cbind() must name two different columns or more")
    return names


# ------------------------------------------------------------ terms and groups
def _right(right: Expression) -> tuple[TermSum, tuple[Group, ...]]:
    """Return the common terms of a right side, and its groups, each once."""
    common, curves = list[tuple[str, Expression]](), list[tuple[Call, str]]()
    groups: dict[tuple[str, TermSum], Group] = {}
    if right.sign in BARS and not right.wrapped:
        fix = f"write ({right}), with all terms that vary by group inside them"
        raise Misplaced(right, f"a bar without parentheses: {fix}")
    for sign, term in summands(right):
        if curve := _factor_smooth(term):
            curves.append(curve)
        elif not (term.sign in BARS or term.callee == "car"):
            common.append((sign, term))
        else:
            check(sign == "+", term, "the formula takes groups away: leave them out instead")
            for group in _groups(term):
                is_new = groups.setdefault((group.name, group.terms), group) is group
                check(is_new, term, f"the term '{group.text}' appears twice: remove one")
    for call, column in curves:  # whose intercept is another term of these groups, if any
        same = [group for group in groups.values() if group.by == (column,) and not group.kind]
        has_other = any(group.terms.has_intercept for group in same)
        terms = terms_of([("+", Literal("0" if has_other else "1")), ("+", call)])
        group = Group(terms, (column,), correlated=False)
        groups.setdefault((group.name, terms), group)
    return terms_of(common), tuple(groups.values())


def _factor_smooth(term: Expression) -> tuple[Call, str] | None:
    """Return `s(x, k=5)` and "g" of mgcv's `s(x, g, bs="fs", k=5)`; None of another term."""
    basis = term.option("bs")
    if not isinstance(term, Call) or term.callee != "s" or len(term.args) != 2 or basis is None:
        return None
    column, group = term.args
    if basis.value != "fs" or not isinstance(group, Name):
        return None
    options = tuple((name, value) for name, value in term.options if name != "bs")
    return replace(term, args=(column,), options=options), group.head


def _groups(term: Expression) -> Iterator[Group]:
    """Yield the groups of one term with a bar, or of car(); `a/b` stands for `a` and `a:b`."""
    terms, right = (Literal("1"), term) if isinstance(term, Call) else term.args
    has_bar = any(inner.sign in BARS for inner in within(terms))
    check(not has_bar, term, "a term has several bars: write one term for each")
    if isinstance(right, Call) and (right.callee == "gr" or right is term):
        check(terms == Literal("1"), terms, f"the term must be (1 | {right})")
        values = arguments(right, MATRICES)
        groups, matrix = values["gr"], values["cov" if right.callee == "gr" else "M"]
        kind = values.get("type", "gr")
        yield Group(terms_of([]), _columns(groups)[-1], False, kind, matrix.head)
        return
    sum_of_terms = terms_of(summands(terms))
    yield from (Group(sum_of_terms, by, term.sign == "|") for by in _columns(right))


def _columns(by: Expression) -> list[tuple[str, ...]]:
    """Return the columns of each kind of group that stands behind a bar."""
    if isinstance(by, Name):
        return [(by.head,)]
    if by.sign in (":", "/"):
        first, second = map(_columns, by.args)
        if len(second) == 1 and (by.sign == "/" or len(first) == 1):
            return [*(first if by.sign == "/" else []), first[-1] + second[0]]
    fix = "name one column, a:b for combinations, or a/b for b within a"
    raise Misplaced(by, f"the groups '{by}' are not columns: {fix}")


# ------------------------------------------------------------ the terms of a sum
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
        check(inner.callee in TERMS, inner, f"there is no function '{inner.callee}': {fix}")
        arguments(inner)
        what = f"'{inner}' is inside '{term}': make it a term of its own, or make a column first"
        check(inner is term or inner.callee not in (*ALONE, "mo", "mi"), inner, what)
