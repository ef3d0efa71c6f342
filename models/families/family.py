"""`ResponseFamily`: a response's likelihood, link, parameters, default priors and checks."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hierfl.models.priors import Prior
from hierfl.program.sites import Recipe, recipe_of

ABOVE_ZERO = (math.ulp(0.0),)  # the edge of a family whose zeros have a probability of their own


@dataclass(frozen=True)
class Response:
    """What is known of the response column of all clients together, from counts and sums alone.

    Args:
        mean: of the column; of successes / trials for a binomial response, nan for categories.
        sd: standard deviation of the same numbers.
        levels: of a response in categories, in their order, or the columns of one in parts; empty
            for numbers.
    """

    mean: float
    sd: float
    levels: tuple[str, ...] = ()


def one_predictor(response: Response) -> int:
    """Return 1: most families have one linear predictor a row."""
    return 1


def no_parameters(response: Response) -> dict[str, Prior]:
    """Return no parameter: the linear predictor is the family's only unknown."""
    return {}


@dataclass(frozen=True)
class ResponseFamily:
    """The distribution of a response given its linear predictor.

    Args:
        name: such as "negative_binomial".
        link: maps the mean of the response to the linear predictor, such as "log".
        kind: of the response's values: "real", "positive", "amount" (0 or more), "count", "binary",
            "unit" (strictly between 0 and 1), "share" (from 0 to 1), "angle" (from -pi to pi),
            "category", "ordered", "time" (a positive number that may be a censored time), and in
            several columns "counts" or "shares" (of a sum of 1).
        likelihood: a Python expression, the Pyro distribution of one row with all additions of the
            family. Its names are `eta` (the linear predictor, (C, B), or (C, B, outputs) with
            several outputs), the parameters, the additions as `batch.<addition>`, and `dist`
            (pyro.distributions), `torch` and `families` (this package). Take `expression` for rows
            that have only some additions.
        parameters: the response -> global unknowns besides the linear predictor, with their default
            priors.
        scale: the response -> its center and spread on the scale of the linear predictor. The
            default prior of the intercept is `intercept_prior`.
        additions: row fields that the likelihood may read: "trials", "cens", "upper", "entry".
        required: the additions that it cannot do without.
        has_intercept: False where thresholds or baseline hazards take the intercept's place.
        outputs: the response -> number of linear predictors a row.
        bounds: between which responses were recorded. Default None: all were.
        edges: the values, increasing, from which on the likelihood takes another form: a node counts
            the responses of each before it sends sums of them. Default: it has one form.
    """

    name: str
    link: str
    kind: str
    likelihood: str
    parameters: Callable[[Response], dict[str, Prior]] = field(compare=False)
    scale: Callable[[Response], tuple[float, float]]
    additions: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    has_intercept: bool = True
    outputs: Callable[[Response], int] = one_predictor
    bounds: tuple[float, float] | None = None
    edges: tuple[float, ...] = ()

    def __reduce__(self) -> Any:
        """Pickle the call that made the family: its parameters may be closures."""
        recipe = recipe_of(self)
        return super().__reduce__() if recipe is None else (Recipe.again, (recipe,))

    def expression(self, present: Collection[str] = ()) -> str:
        """Return the likelihood for rows that have some of the additions.

        Args:
            present: the additions that the rows have. Default none.

        Raises:
            ValueError: the family has no such addition, or lacks one that it requires.
        """
        self._check_present(present)
        text = self.likelihood
        for name in self.additions:
            if name not in present and name not in self.required:
                text = text.replace(f", {name}=batch.{name}", "")
        alone = not set(self.additions) & set(present)
        if alone and text.startswith("families.Censored("):
            return text.removeprefix("families.Censored(").removesuffix(")")
        return text

    def of(self, eta: Tensor, **names: Any) -> dist.TorchDistribution:
        """Return the distribution of rows.

        Args:
            eta: linear predictor, (C, B), or (C, B, outputs) with several outputs.
            **names: the parameters, and the additions, (C, B), that the rows have.

        Raises:
            ValueError: a required addition is missing.
            NameError: a parameter is missing.
        """
        rows = {name: names.pop(name) for name in self.additions if name in names}
        code = _compiled(self.expression(rows), self.name)
        scope = {
            "dist": dist,
            "torch": torch,
            "families": import_module("hierfl.models.families"),
            "batch": SimpleNamespace(**rows),
            "eta": eta,
            **names,
        }
        return eval(code, scope)  # the family's own text

    def check(self, values: ArrayLike, additions: Mapping[str, ArrayLike] | None = None) -> None:
        """Refuse responses that the family cannot have.

        Args:
            values: (N,) responses, or (N, K) in parts. Categories are names, or codes 0, 1, 2, ...
            additions: name -> (N,) values of the row fields of that name. Default none.

        Raises:
            ValueError: the first such value, with its row (the first row is 0) and what to do.
        """
        rows = dict(additions or {})
        self._check_present(rows)
        check_values(self.name, self.kind, values)
        if self.bounds is not None:
            y, (low, high) = np.asarray(values, dtype=np.float64), self.bounds
            fix = f"trunc() says that only values from {low:g} to {high:g} are recorded: correct its bounds"
            _refuse((y < low) | (y > high), "value", y, fix)
        if rows:
            check_additions(self.name, values, rows)

    def _check_present(self, present: Collection[str]) -> None:
        takes = " and ".join(self.additions) if self.additions else "no row fields"
        problems = [
            f"family '{self.name}' takes {takes}, not '{name}': leave it out"
            for name in present
            if name not in self.additions
        ]
        if "upper" in present and "cens" not in present:
            problems.append("'upper' is read where the row field 'cens' is 2 alone: add 'cens'")
        problems += [
            f"family '{self.name}' needs the row field '{name}': add it"
            for name in self.required
            if name not in present
        ]
        if problems:
            raise ValueError(problems[0])


@lru_cache(maxsize=256)
def _compiled(expression: str, name: str) -> CodeType:
    return compile(expression, f"<likelihood of {name}>", "eval")


Numbers = NDArray[np.float64]
CODES = (0, 1, -1, 2)
SUM = 1e-6  # by how much the sum of shares may differ from 1
CENS = "it must be 0 (exact), 1 (right), -1 (left) or 2 (interval)"
# kind of values -> which are allowed, and in words
ALLOWED: dict[str, tuple[Callable[[Numbers], NDArray[np.bool_]], str]] = {
    "real": (np.isfinite, "a finite number"),
    "positive": (lambda x: x > 0, "a number above 0"),
    "time": (lambda x: x > 0, "a time above 0"),
    "amount": (lambda x: x >= 0, "a number of 0 or more"),
    "count": (lambda x: (x >= 0) & _whole(x), "a count 0, 1, 2, ..."),
    "binary": (lambda x: (x == 0) | (x == 1), "0 or 1"),
    "unit": (lambda x: (x > 0) & (x < 1), "a number strictly between 0 and 1"),
    "share": (lambda x: (x >= 0) & (x <= 1), "a number from 0 to 1"),
    "angle": (lambda x: abs(x) <= np.pi + 1e-6, "an angle from -pi to pi, in radians"),
    "counts": (lambda x: (x >= 0) & _whole(x), "counts 0, 1, 2, ..."),
    "shares": (lambda x: (x > 0) & (x < 1), "shares strictly between 0 and 1"),
    "category": (lambda x: (x >= 0) & _whole(x), "a level, or its code 0, 1, 2, ..."),
    "ordered": (lambda x: (x >= 0) & _whole(x), "a level, or its code 0, 1, 2, ..."),
}
FIXES = {
    "binary": "use family='poisson' for counts, 'binomial' for successes among trials, 'beta' for "
    "shares, or 'gaussian'",
    "positive": "use family='poisson' for counts, 'hurdle_gamma' for amounts with zeros, or "
    "'gaussian'",
    "time": "give a time above 0 (an interval from 0 on is its upper end, with cens -1)",
    "count": "use family='gamma' for positive amounts, or 'gaussian'",
    "unit": "use family='ordered_beta' for shares with 0 and 1, 'bernoulli' for these "
    "alone, or 'gaussian'",
    "share": "divide percentages by 100, or use family='gaussian'",
    "category": "give the levels as text",
    "ordered": "give the levels as text",
    "angle": "take numpy.deg2rad of degrees, and subtract 2 pi from angles above pi",
    "counts": "use family='dirichlet' for shares",
    "shares": "use family='multinomial' for counts; shares of 0 and 1 have no density",
}  # kind of values -> what to do about another one


def _whole(x: Numbers) -> NDArray[np.bool_]:
    return x == np.floor(x)


def check_values(family: str, kind: str, values: ArrayLike) -> None:
    """Refuse responses (N,), or (N, K) in parts, outside of what a kind of `ResponseFamily` allows."""
    column = np.asarray(values)
    if kind in ("counts", "shares") and column.ndim < 2:
        raise ValueError(
            f"the response of family '{family}' is one column: it has several, (N, K); in a "
            "formula write cbind(a, b, c) ~ ..."
        )
    if column.dtype.kind in "OUS" and kind in ("category", "ordered"):
        missing = [value != value or value is None for value in column.tolist()]
        _refuse_missing(np.array(missing, dtype=bool), "response")
        return
    numbers = _numbers(family, column)
    inside, words = ALLOWED[kind]
    bad = np.argwhere(~(inside(numbers) & np.isfinite(numbers)))
    if bad.size:
        value = float(numbers[tuple(bad[0])])
        fix = FIXES.get(kind, "use family='gaussian'") if np.isfinite(value) else "drop the row"
        what = f"value {value:g} in row {bad[0][0]}: a response of family '{family}' is {words}"
        raise ValueError(f"{what}; {fix}")
    if kind == "shares":
        total = numbers.sum(-1)
        fix = "divide the row's shares by their sum"
        _refuse(abs(total - 1.0) > SUM, "the sum of shares", total, fix)


def check_additions(family: str, values: ArrayLike, additions: Mapping[str, ArrayLike]) -> None:
    """Refuse row fields ("trials", "cens", "upper", "entry") that do not fit the responses (N,)."""
    rows = {name: _numbers(family, np.asarray(column), name) for name, column in additions.items()}
    y = _numbers(family, np.asarray(values))
    in_parts, y = y.ndim > 1, y.sum(-1) if y.ndim > 1 else y
    for name, column in rows.items():
        if column.shape != y.shape:
            raise ValueError(
                f"'{name}' has {column.size} values for {y.size} responses: give one a row"
            )
    cens = rows.get("cens", np.zeros_like(y))
    if "trials" in rows and in_parts:
        fix = "trials must be the sum of the row's counts"
        _refuse(rows["trials"] != y, "trials", rows["trials"], fix)
    elif "trials" in rows:
        trials = rows["trials"]
        fix = "trials must be whole, 0 or more, and no fewer than the row's successes"
        _refuse(~((trials >= y) & _whole(trials) & np.isfinite(trials)), "trials", trials, fix)
    _refuse(~np.isin(cens, CODES), "cens", cens, CENS)
    interval = cens == 2
    if "entry" in rows:
        entry = rows["entry"]
        fits = (entry >= 0) & ((entry < y) | (interval & (entry == y)))
        _refuse(~fits, "entry", entry, "it must be 0 or more, and below the row's time")
    if "upper" in rows:
        bad = interval & ~((rows["upper"] > y) & np.isfinite(rows["upper"]))
        fix = "it must be above the row's time and finite; a time with no upper end has cens 1"
        _refuse(bad, "upper", rows["upper"], fix)
    elif interval.any():
        fix = "it is an interval without an upper end: add the row field 'upper'"
        _refuse(interval, "cens", cens, fix)


def _refuse(bad: NDArray[np.bool_], name: str, column: Numbers, fix: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{name} {column[row]:g} in row {row}: {fix}")


def _refuse_missing(missing: NDArray[np.bool_], name: str) -> None:
    if missing.any():
        raise ValueError(f"the {name} in row {np.argwhere(missing)[0][0]} is missing: drop the row")


def _numbers(family: str, column: NDArray[np.generic], name: str = "response") -> Numbers:
    """Return a column as float64, refusing words and missing values; `upper` may be missing."""
    try:
        numbers: Numbers = column.astype(np.float64)
    except (TypeError, ValueError) as error:
        fix = f"{error}; code it as a number, or use family='categorical'"
        raise ValueError(f"family '{family}' needs numbers in the {name}: {fix}") from error
    if name != "upper":
        _refuse_missing(np.isnan(numbers), name)
    return numbers
