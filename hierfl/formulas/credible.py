"""Answers about a schema that no rows give: by themselves, or beside what the client has answered before.

A client whose lies agree in all its answers tells of other rows, and nothing here can know.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hierfl.formulas.answers import OfCall, OfDesign
from hierfl.formulas.columns import ColumnSums
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import every_design_of
from hierfl.formulas.expressions import CODINGS, Call, Expression, Factor, Name
from hierfl.formulas.questions import Question
from hierfl.formulas.schema import OFFSET, Implausible, Schema, check_moments
from hierfl.formulas.transforms import EDGES, Smooth

MOST_ROWS = 1 << 26  # of a client
NEAR = 1e-6
LARGEST = 1e15  # value that a row may have
RESPONSE = "the response"  # in the sums of an answer
ROOM = 4.0  # of squares above those of the largest values, as these are of coarser ones
PLACES = 1001  # at which a transform is tried


@dataclass
class Heard:
    """What a client has answered: its rows, sums of columns and arguments, and counts of levels by column."""

    rows: int | None = None
    sums: dict[Expression, ColumnSums] = field(default_factory=dict)
    counts: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def check(self, question: Question, answer: Any, declared: Declaration) -> None:
        """Keep an answer; raise ValueError where no rows give it and those before."""
        why = next(self._wrong(question, answer, declared), "")
        if why:
            raise ValueError(f"it answers '{question.kind}' {why}")

    def _wrong(self, question: Question, answer: Any, declared: Declaration) -> Iterator[str]:
        for sums in sums_in(answer).values():
            if not is_possible(sums):
                yield "by sums that no rows have"
        if question.kind == "rows":
            self.rows = answer
            if any(sums.count not in (0, answer) for sums in self.sums.values()):
                yield "by another number of rows than before"
            for counts in self.counts.values():
                yield from _wrong_counts(counts, 1, answer + 3 * len(counts))
        elif question.kind == "outside" and answer > 1:
            yield "by neither 0 nor 1"
        elif question.kind == "columns":
            yield from self._wrong_columns(question, answer, declared)
        elif question.kind == "groups":
            rows = self.rows or MOST_ROWS
            if not len(answer.counts) <= answer.distinct <= rows:
                yield "by more groups than rows, or than it counts"
            yield from _wrong_counts(answer.counts, question.least, rows)
        elif question.kind == "call":
            yield from self._wrong_call(question, answer, declared)
        elif question.kind == "design":
            yield from self._wrong_design(question, answer, declared)

    def _wrong_columns(
        self, question: Question, answer: Any, declared: Declaration
    ) -> Iterator[str]:
        if answer.keys() != declared.columns.keys():
            yield "with other columns than the formula's"
        if any((of.kind == "number") != (of.sums is not None) for of in answer.values()):
            yield "with a number without sums, or sums of names"
        whole = {name: of for name, of in answer.items() if name not in declared.imputed}
        self.sums = {Name(n): of.sums for n, of in whole.items() if of.sums is not None}
        self.counts = {n: of.counts for n, of in whole.items() if of.counts}
        if len({sums.count for sums in self.sums.values()} - {0}) > 1:
            yield "by columns of different numbers of rows"
        for counts in self.counts.values():
            yield from _wrong_counts(counts, question.least, MOST_ROWS)

    def _agrees(self, of: Expression, sums: ColumnSums, mean: float = 0.0) -> bool:
        """Return whether sums are those of the same values before, to rounding about a mean; none tell nothing."""
        before = self.sums.setdefault(of, sums)
        if not sums.count or not before.count:
            return True
        squares = before.squares + before.count * mean**2
        return (
            before.count == sums.count
            and abs(before.squares - sums.squares) <= NEAR * squares + 1e-300
            and abs(before.total - sums.total) <= NEAR * math.sqrt(before.count * squares) + 1e-300
        )

    def _wrong_call(
        self, question: Question, answer: OfCall, declared: Declaration
    ) -> Iterator[str]:
        """Yield why sums of a transform's argument are none; what is asked at a mean is of coarser values."""
        call = declared.transform(question.text)
        name, argument = call.callee, call.args[0]
        if any(not math.isfinite(number) for number in answer.more):
            yield "by numbers that are not finite"
        elif self.rows is not None and answer.sums.count not in (0, self.rows):
            yield "by another number of rows than before"
        elif (question.at is None or name != "poly") and not self._agrees(argument, answer.sums):
            yield f"by sums of '{argument}' that differ from those before"
        if question.at is None or not answer.sums.count:
            return
        scaled, numbers = _scaled(answer.sums, *question.at), np.array(answer.more)
        least = 1 if question.schema is None else question.schema.min_count
        # of a function's values, sums may be of coarser ones than counts
        is_column = isinstance(argument, Name) and argument.head in declared.columns
        right = name == "poly" or not is_column
        right = right or _are_counts(numbers, scaled, least)
        if not right or (name == "poly" and not _are_powers(numbers, scaled)):
            yield f"by numbers of '{question.text}' that its sums do not allow"

    def _wrong_design(
        self, question: Question, answer: OfDesign, declared: Declaration
    ) -> Iterator[str]:
        schema = question.schema
        assert schema is not None
        if not answer.constant <= answer.columns.keys():
            yield "with constants that are not columns"
        every = (term for design in every_design_of(declared, schema) for term in design.terms)
        terms = {name: term for term in every for name in term.columns}
        imputed = {name for name, term in terms.items() if term.calls("mi")}
        for name, sums in answer.columns.items():
            if name in imputed or not sums.count:
                continue
            if self.rows is not None and sums.count != self.rows:
                yield "by another number of rows than before"
            size = sums.count * sums.squares
            if name in answer.constant and size - sums.total**2 > NEAR * size:
                yield f"with '{name}' as constant, and sums of a spread"
            factors = [*terms[name].factors] if name in terms else []
            largest = math.prod(self._largest(factor, schema) for factor in factors)
            largest = math.inf if name == OFFSET else largest  # which has no factors
            if sums.squares > ROOM * sums.count * largest**2:
                yield f"by squares of '{name}' above those that its values allow"
            if len(factors) == 1:
                term = terms[name]
                level = term.coords[term.columns.index(name)] if term.coords else ""
                yield from self._wrong_level(factors[0], level, sums, schema)
                yield from self._wrong_number(factors[0], level, term.smooth, sums, schema)
        if answer.response is None or "trials" in declared.parts.additions:
            return
        if not self._agrees(Name(declared.parts.labels[0]), answer.response):
            yield "by sums of the response that differ from those before"

    def _largest(self, factor: Factor, schema: Schema) -> float:
        """Return the largest size of a factor of a term on rows with the sums before; infinite: it is not known.

        A transform, whichever it is, is applied to all values that such rows can have.
        """
        text, by = str(factor), factor.option("by")
        argument: Expression = factor.args[0] if isinstance(factor, Call) else factor
        column = schema.columns.get(argument.head) if isinstance(argument, Name) else None
        sums = self.sums.get(argument)
        is_coded = isinstance(factor, Call) and factor.callee in CODINGS
        if is_coded or (column is not None and column.kind == "category"):
            return 1.0
        if sums is None or not sums.count:
            return math.inf
        if isinstance(factor, Name):
            return math.sqrt(sums.squares)
        if text not in schema.transforms:
            return math.inf
        constants = schema.transforms[text]
        reach = constants.sd * math.sqrt(_scaled(sums, constants.mean, constants.sd).squares)
        low, high = constants.mean - reach, constants.mean + reach
        if constants.boundary:  # beyond it there are no sines
            middle = sum(constants.knots) / 2.0
            low = max(low, middle - 0.999 * constants.boundary)
            high = min(high, middle + 0.999 * constants.boundary)
        values = constants(factor.callee, text, np.linspace(low, high, PLACES))
        times = self._largest(by, schema) if isinstance(by, Name) else 1.0
        return float(np.abs(values).max()) * times

    def _wrong_level(
        self, factor: Factor, level: str, sums: ColumnSums, schema: Schema
    ) -> Iterator[str]:
        """Yield why sums of the rows of a level are not of its count: both are rounded, and few others may be added."""
        name = factor.head
        is_counted = isinstance(factor, Name) and name in self.counts
        if not level or not is_counted or level not in schema.columns[name].levels:
            return
        is_far = abs(sums.total - self.counts[name].get(level, 0)) > 2.0 * schema.min_count
        if sums.total != sums.squares or (is_far and level != schema.columns[name].rare):
            yield f"by another number of rows of '{name}[{level}]' than before"

    def _wrong_number(
        self, factor: Factor, level: str, smooth: Smooth | None, sums: ColumnSums, schema: Schema
    ) -> Iterator[str]:
        """Yield why sums of a number, or of a line of it, are not those of its values before."""
        of: Expression = factor
        mean, callee = 0.0, factor.callee
        binary = sums.total == sums.squares  # rounded, where others tell of few rows
        if level:
            return
        if callee in ("scale", "standardize", "center") or (callee == "s" and smooth is None):
            constants, of = schema.transforms[str(factor)], factor.args[0]
            sd = 1.0 if callee == "center" else constants.sd
            mean = constants.mean
            total = sd * sums.total + mean * sums.count
            squares = sd**2 * sums.squares + 2.0 * mean * total - mean**2 * sums.count
            sums, binary = ColumnSums(sums.count, total, max(squares, 0.0)), False
        if of in self.sums and not binary and not self._agrees(of, sums, mean):
            yield f"by sums of '{factor}' that differ from those before"


def is_possible(sums: ColumnSums) -> bool:
    """Return whether some rows have these sums: (sum of x)^2 <= n (sum of x^2)."""
    if not (0 <= sums.count < MOST_ROWS and 0.0 <= sums.squares <= sums.count * LARGEST**2):
        return False
    return abs(sums.total) <= math.sqrt(sums.count * sums.squares) * (1.0 + NEAR) + 1e-150


def _scaled(sums: ColumnSums, mean: float, sd: float) -> ColumnSums:
    """Return the sums of (x - mean) / sd."""
    total = (sums.total - sums.count * mean) / sd
    squares = (sums.squares - 2.0 * mean * sums.total + sums.count * mean**2) / sd**2
    return ColumnSums(sums.count, total, max(squares, 0.0))


def _wrong_counts(counts: Mapping[str, int], least: int, rows: int) -> Iterator[str]:
    """Yield why counts, rounded to multiples of `least`, are not of so many rows."""
    if any(count < least or count % least for count in counts.values()):
        yield "by counts that are not rounded"
    if sum(counts.values()) > rows + len(counts) * least / 2.0:
        yield "by more rows than it has"


def _are_powers(powers: Any, scaled: ColumnSums) -> bool:
    """Return whether sums of u^0 to u^2d are of values with these sums.

    No eigenvalue of their Hankel matrix is < 0, and |sum of u^k| <= (sum of u^2)^(k / 2).
    """
    degree = (len(powers) - 1) // 2
    size = NEAR * (scaled.count + scaled.squares)
    sums = np.array([scaled.count, scaled.total, scaled.squares])
    if len(powers) < 3 or len(powers) % 2 == 0 or not np.allclose(powers[:3], sums, NEAR, size):
        return False
    largest = scaled.squares ** (np.arange(len(powers)) / 2.0)  # of one row that has all squares
    if (np.abs(powers[3:]) > largest[3:] + size).any():
        return False
    hankel = powers[np.add.outer(np.arange(degree + 1), np.arange(degree + 1))]
    scale = np.sqrt(np.maximum(hankel.diagonal(), 1e-300))
    return bool(np.linalg.eigvalsh(hankel / np.outer(scale, scale))[0] > -NEAR)


def _are_counts(counts: Any, scaled: ColumnSums, least: int) -> bool:
    """Return whether counts of values up to `EDGES`, rounded down, are of values with this sum.

    sum of u = 6 n - integral of N(t) over (-6, 6), N(t) the values up to t, and the part of values
    beyond is at most sqrt(k sum of u^2), for k of them.
    """
    highest = np.minimum(counts + least - 1, scaled.count)
    right = len(counts) == len(EDGES) and (np.diff(counts) >= 0.0).all() and counts[0] >= 0.0
    if not right or (counts % least).any() or counts[-1] > scaled.count:
        return False
    width, n = EDGES[1] - EDGES[0], scaled.count
    beyond = highest[0] + n - counts[-1]
    slack = math.sqrt(beyond * scaled.squares) + EDGES[-1] * beyond + NEAR * n
    low = EDGES[-1] * n - width * highest[1:].sum() - slack
    high = EDGES[-1] * n - width * counts[:-1].sum() + slack
    return bool(low <= scaled.total <= high)


def sums_in(answer: Any) -> dict[str, ColumnSums]:
    """Return the sums of an answer about a schema, by their names."""
    if isinstance(answer, OfDesign):
        every = {**answer.columns, RESPONSE: answer.response}
    elif isinstance(answer, dict):
        every = {name: of.sums for name, of in answer.items()}
    else:
        every = {"the argument": getattr(answer, "sums", None)}
    return {name: sums for name, sums in every.items() if sums is not None}


def check_margins(schema: Schema, own: OfDesign) -> None:
    """Refuse means and sds of a design that clients cannot agree on if one has its `own` sums (`Implausible`)."""
    sums, margins = sums_in(own), dict(schema.design)
    if schema.response is not None:
        margins[RESPONSE] = schema.response
    if margins.keys() != sums.keys():
        raise Implausible("the schema has means and sds of other columns than its design")
    for name, of in margins.items():
        check_moments(name, of.mean, of.sd, sums[name], schema.rows, constant=True)
