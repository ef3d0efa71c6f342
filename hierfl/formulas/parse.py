"""A formula's text as a tree: the response and its additions, common terms and groups, of each formula."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from hierfl.formulas.expressions import (
    Call,
    Expression,
    Literal,
    Name,
    calls_within,
    summands,
    within,
)
from hierfl.formulas.grammar import Reader, Sides, refused
from hierfl.formulas.term_reader import Fault, TermReader
from hierfl.formulas.terms import TermSum, constant_of, is_constant

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
IN_TRUNC = ("lb", "ub")


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
    """One formula: its response, the common terms and the groups.

    `labels` are the columns of the response; an addition has its column, {"trials": "n"}; `bounds` are
    those of trunc().
    """

    response: str
    labels: tuple[str, ...]
    common: TermSum
    groups: tuple[Group, ...]
    additions: Mapping[str, str] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None

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
    try:
        return _parsed(text)
    except RecursionError as error:
        raise ValueError("the formula has too many parentheses inside of others") from error


def _parsed(text: str) -> Formulas:
    first, *others = Reader(text).formulas()
    reader = FormulaReader(text)
    main = reader.main(first)
    every_call = chain.from_iterable(calls_within(term) for _, term in summands(first.right))
    imputed = {call.args[0] for call in every_call if call.callee == "mi"}
    others_by_name: dict[str, FormulaTree] = {}
    covariates = []
    for sides in others:
        name, is_covariate = reader.name_of(sides, imputed)
        if name in others_by_name:
            raise refused(text, sides.at, f"'{name}' has two formulas: write one")
        labels = (name, (name,)) if is_covariate else (main.response, main.labels)
        others_by_name[name] = FormulaTree(*labels, *reader.right(sides.right))
        covariates += [name] if is_covariate else []
    texts = (first.text, *(sides.text for sides in others))
    return Formulas(text, main, others_by_name, tuple(covariates), texts)


class FormulaReader(TermReader):
    """Reads the two sides of the formulas of one text."""

    def main(self, sides: Sides) -> FormulaTree:
        """Return the formula of the response."""
        target, additions, bounds = sides.target, dict[str, str](), None
        if target is None:
            raise refused(self.text, sides.at, "nothing on one side of '~': name the response")
        if target.sign == "|":
            target, right = target.args
            for sign, addition in summands(right):
                callee = addition.callee or str(addition)
                columns = _addition(callee, addition)
                is_twice = bounds if callee == "trunc" else not columns.keys().isdisjoint(additions)
                self.refuse(_faults_of_addition(sign, callee, addition, columns, bool(is_twice)))
                bounds = _bounds(addition) if callee == "trunc" else bounds
                additions |= columns
        if {"cens", "event"} <= additions.keys():
            raise self.error(target, "the response has both cens() and event(): keep one")
        return FormulaTree(*self._response(target), *self.right(sides.right), additions, bounds)

    def name_of(self, sides: Sides, imputed: Collection[Expression]) -> tuple[str, bool]:
        """Return what "sigma ~ x" or "x | mi() ~ z" is of, and whether it is a covariate."""
        target = column = sides.target
        if target and target.sign == "|":
            column, addition = target.args
            if isinstance(column, Name) and addition == Call("mi"):
                return column.head, True
        if isinstance(target, Name) and column not in imputed:
            return target.head, False
        fix = "is no formula of a parameter: write 'sigma ~ x', or leave it out"
        if column in imputed:
            fix = f"imputes '{column}': write '{column} | mi() ~ {sides.right}'"
            if target is not column:
                fix += "; a known error of measurement needs a Pyro program (docs/recipes.md)"
        raise refused(self.text, sides.at, f"'{sides.text}' {fix}")

    def _response(self, target: Expression) -> tuple[str, tuple[str, ...]]:
        """Return the name and the columns of a column or of cbind(a, b, c)."""
        if isinstance(target, Name):
            return target.head, (target.head,)
        names = tuple(arg.head for arg in target.args if isinstance(arg, Name))
        if target.callee != "cbind" or len(names) < len(target.args):
            fix = "write cbind(a, b, c), successes | trials(n) or time | event(status), or make a column"
            raise self.error(target, f"the response is no column: {fix}")
        if len({*names}) < max(len(names), 2):
            raise self.error(target, "cbind() must name two different columns or more")
        return str(target), names

    # -------------------------------------------------------- terms
    def right(self, right: Expression) -> tuple[TermSum, tuple[Group, ...]]:
        """Return the common terms of a right side, and its groups, each once."""
        common: list[tuple[str, Expression]] = []
        groups: dict[tuple[str, TermSum], Group] = {}
        curves: list[tuple[Call, str]] = []
        if right.is_bar and not right.wrapped:
            fix = f"write ({right}), with all terms that vary by group inside of them"
            raise self.error(right, f"a bar without parentheses: {fix}")
        for sign, term in summands(right):
            if curve := _factor_smooth(term):
                curves.append(curve)
            elif not _is_group(term):
                common.append((sign, term))
            elif sign == "-":
                raise self.error(term, "the formula takes groups away: leave them out instead")
            else:
                for group in self._groups(term):
                    if groups.setdefault((group.name, group.terms), group) is not group:
                        raise self.error(term, f"the term '{group.text}' stands twice: remove one")
        for call, column in curves:  # whose intercept is another term of these groups, if any
            same = [group for group in groups.values() if group.by == (column,) and not group.kind]
            has_other = any(group.terms.has_intercept for group in same)
            terms = self.terms([("+", Literal("0" if has_other else "1")), ("+", call)])
            group = Group(terms, (column,), correlated=False)
            groups.setdefault((group.name, terms), group)
        return self.terms(common), tuple(groups.values())

    def _groups(self, term: Expression) -> Iterator[Group]:
        """Yield the groups of one term with a bar, or of car(); `a/b` stands for `a` and `a:b`."""
        if isinstance(term, Call):
            yield self._matrix_group(term)
            return
        terms_side, right = term.args
        if any(inner.is_bar for inner in within(terms_side)):
            raise self.error(term, "a term has several bars: write one term for each")
        if isinstance(right, Call) and right.head == "gr":
            if str(terms_side) != "1":
                raise self.error(terms_side, f"the term must be (1 | {right}): {HOW}")
            yield self._matrix_group(right)
            return
        terms = self.terms(summands(terms_side))
        yield from (Group(terms, by, term.sign == "|") for by in self._columns(right))

    def _columns(self, by: Expression) -> list[tuple[str, ...]]:
        """Return the columns of each kind of group that stands behind a bar."""
        if isinstance(by, Name):
            return [(by.head,)]
        if by.sign in (":", "/"):
            first, second = map(self._columns, by.args)
            if len(second) == 1 and (by.sign == "/" or len(first) == 1):
                return [*(first if by.sign == "/" else []), first[-1] + second[0]]
        fix = "name one column, a:b for combinations, or a/b for b within a"
        raise self.error(by, f"the groups '{by}' are no columns: {fix}")

    def _matrix_group(self, call: Call) -> Group:
        """Return the group of `car(M, gr=county, type="escar")` or of `gr(hospital, cov=A)`."""
        first, matrix_name, types = {"car": ("M", "M", TYPES), "gr": ("gr", "cov", ("gr",))}[
            call.callee
        ]
        options = dict(zip((first,), call.args, strict=False)) | dict(call.options)
        matrix, groups = options.pop(matrix_name, None), options.pop("gr", None)
        kind = options.pop("type", Literal(f"'{types[0]}'"))
        is_read = isinstance(matrix, Name) and matrix.head.isidentifier() and groups is not None
        if options or not is_read or groups is None or len(call.args) > 1:
            raise self.error(call, f"'{call}' cannot be read: {HOW}")
        if not isinstance(kind, Literal) or kind.value not in types:
            fix = "write car(M, gr=county, type='esicar') + (1 | county) for brms's 'bym2'"
            raise self.error(kind, f"the type must be 'escar' or 'esicar', the exact ones; {fix}")
        return Group(self.terms([]), self._columns(groups)[-1], False, str(kind.value), str(matrix))


# ------------------------------------------------------------ additions to the response
def _addition(callee: str, addition: Expression) -> dict[str, str]:
    """Return an addition and its column; brms's cens(status, upper) is two; {} of another expression."""
    args = addition.args if addition.callee and not addition.options else ()
    columns = [arg.head for arg in args if isinstance(arg, Name)]
    if callee == "trunc" or len(columns) < len(args) or len(columns) > 1 + (callee == "cens"):
        return {}
    return dict(zip((callee, "upper"), columns, strict=False))


def _bounds(addition: Expression) -> tuple[float, float] | None:
    """Return the numbers of trunc(lb=0, ub=10); None of something else."""
    args, options = addition.args, addition.options
    values = [*zip(IN_TRUNC, args, strict=False), *options]
    bounds = {name: constant_of(value) for name, value in values if is_constant(value)}
    is_whole = len(bounds) == len(args) + len(options) and bounds.keys() <= {*IN_TRUNC}
    if not bounds or not is_whole or not all(isinstance(v, int | float) for v in bounds.values()):
        return None
    return float(bounds.get("lb", -math.inf)), float(bounds.get("ub", math.inf))


def _faults_of_addition(
    sign: str, callee: str, addition: Expression, columns: Mapping[str, str], is_twice: bool
) -> Iterator[Fault]:
    if sign == "-":
        yield addition, "additions are joined by '+', not '-'"
    if callee not in ADDITIONS:
        there = f"the additions are {', '.join(ADDITIONS)}"
        yield addition, f"there is no addition '{callee}': {there}"
    if callee == "trunc" and _bounds(addition) is None:
        fix = "write trunc(lb=0), trunc(ub=10) or trunc(lb=0, ub=10)"
        yield addition, f"trunc() needs one or two numbers: {fix}"
    if callee != "trunc" and not columns:
        fix = f"{ADDITIONS[callee]}: write {callee}(column)"
        yield addition, f"the addition needs one column, {fix}"
    if is_twice:
        yield addition, f"the addition '{callee}' stands twice: remove one"


def _is_group(term: Expression) -> bool:
    return term.is_bar or term.callee == "car"


def _factor_smooth(term: Expression) -> tuple[Call, str] | None:
    """Return `s(x, k=5)` and "g" of mgcv's `s(x, g, bs="fs", k=5)`; None of another term."""
    if not isinstance(term, Call) or term.callee != "s" or len(term.args) != 2:
        return None
    (column, group), basis = term.args, term.option("bs")
    if not isinstance(basis, Literal) or basis.value != "fs" or not isinstance(group, Name):
        return None
    options = tuple((name, value) for name, value in term.options if name != "bs")
    return replace(term, args=(column,), options=options), group.head
