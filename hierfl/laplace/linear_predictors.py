"""Rows that depend on a vector w only through a linear predictor, eta = base + design w.

Whether they do is tested at random points, on made-up features. It is not proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.laplace.links import all_linked, log_likelihoods, predictors, scores
from hierfl.laplace.trials import alike, perturbed
from hierfl.program.few_rows import double_precision, in_double
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Program
from hierfl.program.traces import Site

# Linearity is tested at random points near 0 and far from it, so that a predictor that bends or is
# clamped is recognized: at these distances, at each of them TRIES times.
SIZES, TRIES = (0.3, 2.0, 8.0), 3
# Raised by a program at points that it cannot compute. The general methods need no structure, and
# report what is wrong with the program.
FAILS = (RuntimeError, ValueError, NotImplementedError, TypeError, AttributeError, IndexError)

Terms = Callable[[Tensor], Mapping[str, Site]]  # w (D,) -> the observed sites, by name


class Predictors(NamedTuple):
    """The linear predictors of all rows, site after site."""

    terms: Mapping[str, Site]  # the observed sites at w = 0
    base: Tensor  # (n,) predictors there
    design: Tensor  # (n, D)

    def scores(self, eta: Tensor) -> Tensor:
        """Return the log likelihood of each row at other predictors eta (n,): (n,)."""
        return scores(self.terms, eta)


def predictors_of(terms: Terms, size: int, dtype: torch.dtype | None = None) -> Predictors:
    """Return the linear predictors, read off at w = 0 and at each unit vector; size is D."""
    at_zero = terms(torch.zeros(size, dtype=dtype))
    base = predictors(at_zero)
    along = torch.vmap(lambda w: predictors(terms(w)))(torch.eye(size, dtype=dtype))
    return Predictors(at_zero, base, (along - base).mT)


def is_linear(terms: Terms, w: Tensor) -> bool:
    """Return whether each row's log likelihood at w (D,) equals that at its linear predictor."""
    there = terms(w)
    if not all_linked(there):
        return False
    read, known = predictors_of(terms, len(w)), log_likelihoods(there)
    return bool(known.isfinite().all()) and alike(read.scores(read.base + read.design @ w), known)


@contextmanager
def trial() -> Iterator[None]:
    """Evaluate programs in double precision, without gradients, checks and changes of params."""
    with untouched_store(), torch.no_grad(), unchecked(), double_precision():
        yield


def moved_rows(
    program: Program, g: torch.Generator, batch: ClientBatch | None = None
) -> ClientBatch:
    """Return rows, by default the prototype's, in double precision with perturbed features."""
    rows = in_double(program.prototype if batch is None else batch)
    labels = frozenset(program.labels.values())
    return perturbed(rows, names_of_labels=labels, g=g, codes=program.codes)
