"""A formula's text as a tree: the response and its additions, common terms and groups, of each formula."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from hierfl.formulas.grammar import Reader, Sides
from hierfl.formulas.terms import TermReader, Terms
from hierfl.formulas.tokens import refused

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
# What other packages call them -> what to write here.
ELSEWHERE = {
    "bf": "a list in place of bf(), ['y ~ x', 'sigma ~ x']",
    "mvbind": "a formula of each response",
    "Surv": "time | event(status)",
    "p": "successes | trials(n)",
    "prop": "successes | trials(n)",
    "proportion": "successes | trials(n)",
    "c": "cbind(a, b, c)",
    "censored": "time | cens(status)",
    "truncated": "y | trunc(lb=0)",
    "rate": "count ~ offset(log(exposure))",
    "se": "a Pyro program with a known scale (docs/recipes.md)",
    "mi": "the formula of the response first, ['y ~ mi(x) + z', 'x | mi() ~ z']; rows without y are left out",
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

    terms: Terms
    by: tuple[str, ...]
    correlated: bool
    kind: str = ""
    cov: str = ""
    at: int = field(default=0, compare=False, repr=False)

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
class Parts:
    """One formula: its response, the common terms and the groups.

    `labels` are the columns of the response; an addition has its column, {"trials": "n"}; `bounds` are
    those of trunc().
    """

    response: str
    labels: tuple[str, ...]
    common: Terms
    groups: tuple[Group, ...]
    additions: Mapping[str, str] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None

    @property
    def terms(self) -> tuple[Terms, ...]:
        """The common terms, and then those of each group."""
        return (self.common, *(group.terms for group in self.groups))


@dataclass(frozen=True)
class Formulas:
    """The formula of the response, and those of parameters and of `covariates`, by name, with their texts."""

    text: str
    main: Parts
    others: Mapping[str, Parts] = field(default_factory=dict)
    covariates: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


def parse(text: str) -> Formulas:
    """Read formulas such as "y ~ x + (1 + x | hospital); sigma ~ x", or say what to write instead.

    >>> parse("y | trials(n) ~ age + (1 + age || site/ward)").main.groups[1].text
    '(1 + age || site:ward)'
    """
    first, *others = Reader(text).formulas()
    reader = _FormulaReader(text)
    main = reader.main(first)
    imputed = {
        str(call.args[0]) for call in calls_within(first.right) if call.callee == "mi" and call.args
    }
    parts: dict[str, Parts] = {}
    covariates = []
    for sides in others:
        name, is_covariate = reader.name_of(sides, imputed)
        if name in parts:
            raise refused(text, sides.at, f"'{name}' has two formulas: write one")
        common, groups = reader.right(sides.right)
        if is_covariate:
            covariates.append(name)
            parts[name] = Parts(name, (name,), common, groups)
        else:
            parts[name] = Parts(main.response, main.labels, common, groups)
    texts = (first.text, *(sides.text for sides in others))
    return Formulas(text, main, parts, tuple(covariates), texts)


class _FormulaReader(TermReader):
    """Reads the two sides of the formulas of one text."""

    def main(self, sides: Sides) -> Parts:
        """Return the formula of the response."""
        left = sides.left
        if left is None:
            raise refused(
                self.text, sides.at, "the formula has nothing on one side of '~': name the response"
            )
        additions: dict[str, str] = {}
        bounds = None
        if isinstance(left, Operation) and left.sign == "|":
            left, right = left.args
            for sign, addition in summands(right):
                if sign == "-":
                    raise self._error(
                        addition, f"the response has '- {addition}': additions are joined by '+'"
                    )
                if isinstance(addition, Call) and addition.callee == "trunc" and bounds is None:
                    bounds = self._bounds(addition)
                    continue
                for name, column in self._addition(addition):
                    if name in additions:
                        raise self._error(
                            addition, f"the response has the addition '{name}' twice: remove one"
                        )
                    additions[name] = column
        if {"cens", "event"} <= additions.keys():
            raise self._error(left, "the response has both cens() and event(): keep one")
        response, labels = self._response(left)
        common, groups = self.right(sides.right)
        return Parts(response, labels, common, groups, additions, bounds)

    def name_of(self, sides: Sides, imputed: set[str]) -> tuple[str, bool]:
        """Return the parameter or the covariate of "sigma ~ x" or "x | mi() ~ z", and whether it is the latter."""
        left, column = sides.left, None
        if isinstance(left, Operation) and left.sign == "|":
            column, addition = left.args
            if isinstance(column, Name) and addition == Call("mi", ()):
                return column.name, True
        elif isinstance(left, Name):
            column = left
        if isinstance(column, Name) and str(column) in imputed:
            more = "; a known error of measurement needs a Pyro program (docs/recipes.md)"
            raise refused(
                self.text,
                sides.at,
                f"'{sides.text}' imputes '{column.name}': write '{column} | mi() ~ {sides.right}'"
                + ("" if left is column else more),
            )
        if not isinstance(left, Name):
            raise refused(
                self.text,
                sides.at,
                f"'{sides.text}' is no formula of a parameter: write 'sigma ~ x', or leave it out",
            )
        return left.name, False

    # -------------------------------------------------------- the response
    def _response(self, left: Expression) -> tuple[str, tuple[str, ...]]:
        """Return the name and the columns of a column or of cbind(a, b, c)."""
        if isinstance(left, Name):
            return left.name, (left.name,)
        names = tuple(arg.name for arg in getattr(left, "args", ()) if isinstance(arg, Name))
        callee = "p" if isinstance(left, Operation) and left.sign == "/" else None
        if isinstance(left, Call):
            callee = left.callee
        if callee != "cbind" or not isinstance(left, Call) or len(names) < len(left.args):
            advice = (
                f"write {ELSEWHERE[callee]}" if callee in ELSEWHERE else "make a column of it first"
            )
            raise self._error(left, f"the response '{left}' is no column: {advice}")
        if len({*names}) < max(len(names), 2):
            raise self._error(
                left, f"the response '{left}' must name two different columns or more"
            )
        return str(left), names

    def _addition(self, addition: Expression) -> Iterator[tuple[str, str]]:
        """Yield an addition and its column; brms's cens(status, upper) is two."""
        called = addition.callee if isinstance(addition, Call) else str(addition)
        if called not in ADDITIONS:
            advice = ELSEWHERE.get(called)
            advice = f"write {advice}" if advice else f"the additions are {', '.join(ADDITIONS)}"
            raise self._error(
                addition, f"the addition '{addition}' of the response is not known: {advice}"
            )
        args = addition.args if isinstance(addition, Call) and not addition.options else ()
        columns = [arg.name for arg in args if isinstance(arg, Name)]
        if not columns or len(columns) < len(args) or len(columns) > 1 + (called == "cens"):
            raise self._error(
                addition,
                f"the addition '{addition}' needs one column, {ADDITIONS[called]}: write "
                f"{called}(column)",
            )
        yield from zip((called, "upper"), columns, strict=False)

    def _bounds(self, addition: Call) -> tuple[float, float]:
        """Return the numbers of trunc(lb=0, ub=10)."""
        named = [*zip(IN_TRUNC, addition.args, strict=False), *addition.options]
        bounds = {name: _number(value) for name, value in named}
        is_whole = len(bounds) == len(addition.args) + len(addition.options)
        if not bounds or not is_whole or {*bounds} - {*IN_TRUNC} or None in bounds.values():
            raise self._error(
                addition,
                f"the addition '{addition}' needs one or two numbers: write trunc(lb=0), "
                "trunc(ub=10) or trunc(lb=0, ub=10)",
            )
        low, high = bounds.get("lb"), bounds.get("ub")
        return -math.inf if low is None else low, math.inf if high is None else high

    # -------------------------------------------------------- terms
    def right(self, right: Expression) -> tuple[Terms, tuple[Group, ...]]:
        """Return the common terms of a right side, and its groups, each once."""
        common: list[tuple[str, Expression]] = []
        groups: dict[tuple[str, Terms], Group] = {}
        curves: list[tuple[Call, str]] = []
        if isinstance(right, Operation) and right.is_bar and not right.wrapped:
            raise self._error(
                right,
                f"'{right}' has a bar without parentheses: write ({right}), with all terms that vary "
                "by group inside of them",
            )
        for sign, term in summands(right):
            if curve := _factor_smooth(term):
                curves.append(curve)
            elif (isinstance(term, Operation) and term.is_bar) or _calls(term, "car"):
                if sign == "-":
                    raise self._error(
                        term, f"the formula takes '{term}' away: leave it out instead"
                    )
                for group in self._groups(term):
                    if groups.setdefault((group.name, group.terms), group) is not group:
                        raise self._error(
                            term, f"the term '{group.text}' stands in the formula twice: remove one"
                        )
            else:
                common.append((sign, term))
        for (
            call,
            column,
        ) in curves:  # their intercept is that of another term of these groups, if any
            same = [g for g in groups.values() if g.by == (column,) and not g.kind]
            has_other = any(g.terms.has_intercept for g in same)
            terms = self.terms([("+", Literal("0" if has_other else "1")), ("+", call)])
            group = Group(terms, (column,), correlated=False, at=call.at)
            groups.setdefault((group.name, terms), group)
        return self.terms(common), tuple(groups.values())

    def _groups(self, term: Expression) -> Iterator[Group]:
        """Yield the groups of one term with a bar, or of car(); `a/b` stands for `a` and `a:b`."""
        if isinstance(term, Call):
            yield self._matrix_group(term, term)
            return
        assert isinstance(term, Operation)
        left, right = term.args
        if any(isinstance(inner, Operation) and inner.is_bar for inner in within(left)):
            raise self._error(
                term, f"the term '({term})' has several bars: write one term for each"
            )
        if _calls(right, "gr"):
            if str(left) != "1":
                raise self._error(left, f"the term '({term})' must be (1 | {right}): {HOW}")
            yield self._matrix_group(right, term)
            return
        terms = self.terms([*summands(left)])
        for by in self._columns(right, term):
            yield Group(terms, by, term.sign == "|", at=term.at)

    def _columns(self, by: Expression, term: Expression) -> list[tuple[str, ...]]:
        """Return the columns of each kind of group that stands behind a bar."""
        if isinstance(by, Name):
            return [(by.name,)]
        if isinstance(by, Operation) and by.sign in (":", "/"):
            first, second = (self._columns(arg, term) for arg in by.args)
            if len(second) == 1 and (by.sign == "/" or len(first) == 1):
                return [*(first if by.sign == "/" else []), first[-1] + second[0]]
        raise self._error(
            by,
            f"the groups '{by}' of '({term})' are no columns: name one column, a:b for combinations, "
            "or a/b for b within a",
        )

    def _matrix_group(self, call: Expression, term: Expression) -> Group:
        """Return the group of `car(M, gr=county, type="escar")` or of `gr(hospital, cov=A)`."""
        assert isinstance(call, Call)
        is_car = call.callee == "car"
        options = dict(zip(("M" if is_car else "gr",), call.args, strict=False)) | dict(
            call.options
        )
        matrix, groups = options.pop("M" if is_car else "cov", None), options.pop("gr", None)
        kind = options.pop("type", Literal("'escar'")) if is_car else Literal("'gr'")
        is_read = isinstance(matrix, Name) and matrix.name.isidentifier() and groups is not None
        if options or not is_read or len(call.args) > 1 or not isinstance(kind, Literal):
            raise self._error(call, f"'{call}' cannot be read: {HOW}")
        if is_car and kind.value not in TYPES:
            raise self._error(
                kind,
                f"'{call}' has the type '{kind.value}': it must be 'escar' or 'esicar', the exact "
                "ones; for brms's 'bym2' write car(M, gr=county, type='esicar') + (1 | county)",
            )
        assert groups is not None
        by = self._columns(groups, term)[-1]
        return Group(self.terms([]), by, False, str(kind.value), str(matrix), term.at)


def _calls(expression: Expression, callee: str) -> bool:
    return isinstance(expression, Call) and expression.callee == callee


def _number(expression: Expression) -> float | None:
    """Return a number with or without a minus; None of anything else."""
    if isinstance(expression, Operation) and expression.sign == "-" and len(expression.args) == 1:
        number = _number(expression.args[0])
        return None if number is None else -number
    value = expression.value if isinstance(expression, Literal) else None
    return float(value) if isinstance(value, int | float) else None


def _factor_smooth(term: Expression) -> tuple[Call, str] | None:
    """Return `s(x, k=5)` and "g" of mgcv's `s(x, g, bs="fs", k=5)`; None of another term."""
    if not isinstance(term, Call) or term.callee != "s" or len(term.args) != 2:
        return None
    column, group = term.args
    basis = term.option("bs")
    if not isinstance(basis, Literal) or basis.value != "fs" or not isinstance(group, Name):
        return None
    options = tuple((name, value) for name, value in term.options if name != "bs")
    return replace(term, args=(column,), options=options), group.name
