"""`ResponseFamily`: a response's likelihood, link, parameters, default priors and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from types import CodeType, SimpleNamespace
from typing import Any

import pyro.distributions as dist
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hierfl.models.families.checks import check_additions, check_bounds, check_values
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

    def mean(self, eta: Tensor, **names: Any) -> Tensor:
        """Return the expected response of rows, (C, B), (C, B, K) in parts, or probabilities of levels.

        A time's mean is that of the uncensored time from 0 on, whatever its censoring and entry
        are.

        Args:
            eta: as in `of`.
            **names: as in `of`.
        """
        kept_names = {
            k: v for k, v in names.items() if k not in self.additions or k in self.required
        }
        fn = self.of(eta, **kept_names)
        return fn.probs if self.kind in ("category", "ordered") else fn.mean

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
            check_bounds(values, self.bounds)
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
