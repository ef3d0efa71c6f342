"""A formula's text as a tree: the response and its additions, common terms and groups, of each formula."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from hierfl.formulas.expressions import (
    BARS,
    Call,
    Expression,
    Literal,
    Name,
    TermSum,
    calls,
    summands,
    within,
)
from hierfl.formulas.grammar import Misplaced, Reader, Sides, check, pointing
from hierfl.formulas.terms import terms_of

# Addition to the response -> what its column holds.
ADDITIONS = {
    "trials": "the number of trials",
    "weights": "how many times a row counts in the likelihood",
    "cens": "how a time is censored: 0 or 'none', 1 or 'right', -1 or 'left', 2 or 'interval'",
    "event": "1 where a time was observed, 0 where it is right-censored",
    "upper": "the upper end of the interval in which an event happened",
    "entry": "the time at which observation began",
    "trunc": "the bounds between which responses were recorded",
}
TYPES = ("escar", "esicar")  # of car(), as in brms
HOW = "write car(M, gr=county), or (1 | gr(hospital, cov=A))"


def grouping_name(by: Sequence[str]) -> str:
    """Return the name of the groups of some columns; two sets of columns never have the same."""
    return ":".join(f"`{name}`" if ":" in name else name for name in by)


@dataclass(frozen=True)
class Group:
    """A term with a bar: `(1 + age | hospital:ward)` is by ("hospital", "ward"); correlated: `|`, not `||`.

    `kind`: "gr", "escar" or "esicar" of groups with the matrix `cov`; "": they are independent.
    """

    terms: TermSum
    by: tuple[str, ...]
    correlated: bool
    kind: str = ""
    cov: str = ""

    @property
    def name(self) -> str:
        """The groups' name, "hospital", "hospital:ward" or "gr(hospital)"."""
        if self.kind:
            return f"{'gr' if self.kind == 'gr' else 'car'}({grouping_name(self.by)})"
        return grouping_name(self.by)

    @property
    def text(self) -> str:
        """The term as it stands in a formula."""
        if self.kind:
            return f"{self.name[:-1]}, cov={self.cov})"
        return f"({self.terms} {'|' if self.correlated else '||'} {self.name})"


@dataclass(frozen=True)
class FormulaTree:
    """One formula: the columns of its response, `labels`, the common terms and the groups.

    An addition to the response has its column, {"trials": "n"}; `bounds` are those of trunc().
    """

    labels: tuple[str, ...]
    common: TermSum
    groups: tuple[Group, ...]
    additions: Mapping[str, str] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None

    @property
    def response(self) -> str:
        """The name of the response, "y" or "cbind(a, b)"."""
        several = len(self.labels) > 1
        return str(Call("cbind", tuple(map(Name, self.labels)))) if several else self.labels[0]

    @property
    def terms(self) -> tuple[TermSum, ...]:
        """The common terms, and then those of each group."""
        return (self.common, *(group.terms for group in self.groups))


@dataclass(frozen=True)
class Formulas:
    """The formula of the response, and those of parameters and of `covariates`, by name, with their texts."""

    text: str
    main: FormulaTree
    others: Mapping[str, FormulaTree] = field(default_factory=dict)
    covariates: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


def parse(text: str) -> Formulas:
    """Read formulas such as "y ~ x + (1 + x | hospital); sigma ~ x", or say what to write instead.

    >>> parse("y | trials(n) ~ age + (1 + age || site/ward)").main.groups[1].text
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
        return Formulas(text, main, trees, tuple(covariates), texts)


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
            callee = addition.callee or str(addition)
            check(sign == "+", addition, "additions are joined by '+', not '-'")
            what = f"there is no addition '{callee}': the additions are {', '.join(ADDITIONS)}"
            check(callee in ADDITIONS, addition, what)
            what = f"the addition '{callee}' appears twice: remove one"
            if callee == "trunc":
                check(bounds is None, addition, what)
                bounds = _bounds(addition)
                continue
            columns = _columns_of_addition(addition)
            check(columns.keys().isdisjoint(additions), addition, what)
            additions |= columns
    what = "the response has both cens() and event(): keep one"
    check(not {"cens", "event"} <= additions.keys(), target, what)
    return FormulaTree(_labels(target), *_right(sides.right), additions, bounds)


def _labels(target: Expression) -> tuple[str, ...]:
    """Return the column of the response, or the columns of cbind(a, b, c)."""
    if isinstance(target, Name):
        return (target.head,)
    names = tuple(arg.head for arg in target.args if isinstance(arg, Name))
    fix = "write cbind(a, b, c), successes | trials(n) or time | event(status), or make a column"
    is_right = target.callee == "cbind" and len(names) == len(target.inner)
    check(is_right, target, f"the response is not a column: {fix}")
    is_right = len({*names}) >= max(len(names), 2)
    check(is_right, target, "cbind() must name two different columns or more")
    return names


def _columns_of_addition(addition: Expression) -> dict[str, str]:
    """Return an addition and its column; brms's cens(status, upper) is two."""
    callee, columns = addition.callee, [a.head for a in addition.args if isinstance(a, Name)]
    is_right = columns and len(columns) == len(addition.args) <= 1 + (callee == "cens")
    name = callee or str(addition)
    what = f"the addition needs one column, {ADDITIONS[name]}: write {name}(column)"
    check(callee and is_right and not addition.options, addition, what)
    return dict(zip((callee, "upper"), columns, strict=False))


def _bounds(addition: Expression) -> tuple[float, float]:
    """Return the numbers of trunc(lb=0, ub=10)."""
    bounds = {"lb": -math.inf, "ub": math.inf}
    written = [*zip(bounds, addition.args, strict=False), *addition.options]
    numbers = {name: v.value for name, v in written if isinstance(v.value, int | float)}
    is_right = 0 < len(numbers) == len(addition.inner) and numbers.keys() <= bounds.keys()
    fix = "write trunc(lb=0), trunc(ub=10) or trunc(lb=0, ub=10)"
    check(is_right, addition, f"trunc() needs one or two numbers: {fix}")
    low, high = (bounds | numbers).values()
    return float(low), float(high)


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
    if isinstance(term, Call):
        yield _matrix_group(term)
        return
    terms, right = term.args
    has_bar = any(inner.sign in BARS for inner in within(terms))
    check(not has_bar, term, "a term has several bars: write one term for each")
    if isinstance(right, Call) and right.head == "gr":
        check(str(terms) == "1", terms, f"the term must be (1 | {right}): {HOW}")
        yield _matrix_group(right)
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


def _matrix_group(call: Call) -> Group:
    """Return the group of `car(M, gr=county, type="escar")` or of `gr(hospital, cov=A)`."""
    first, matrix_name, types = ("gr", "cov", ("gr",)) if call.callee == "gr" else ("M", "M", TYPES)
    options = dict(zip((first,), call.args, strict=False)) | dict(call.options)
    matrix, groups = options.pop(matrix_name, None), options.pop("gr", None)
    kind = options.pop("type", Literal(f"'{types[0]}'"))
    is_read = isinstance(matrix, Name) and matrix.head.isidentifier() and len(call.args) < 2
    if groups is None or options or not is_read:
        raise Misplaced(call, f"'{call}' cannot be read: {HOW}")
    fix = "write car(M, gr=county, type='esicar') + (1 | county) for brms's 'bym2'"
    what = f"the type must be 'escar' or 'esicar', the exact ones; {fix}"
    check(kind.value in types, kind, what)
    return Group(terms_of([]), _columns(groups)[-1], False, str(kind.value), str(matrix))
