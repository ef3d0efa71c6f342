"""One run of a program with the sites of its rows at values that are chosen for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pyro.poutine import runtime
from torch import Tensor

from hierfl.program.handlers import TakesWeights, unchecked
from hierfl.program.traces import Site, center, is_latent


class RowTerm(NamedTuple):
    """A site that depends on sites of its row.

    sites: these.
    before: the terms before it that depend on them too.
    steps: which comparisons of the program have its only site on one side, if it is only compared.
    order: nodes of the quadrature for each number; 0 for Laplace's approximation.
    quadratic: whether the log density is quadratic in the sites, so that it needs neither.
    """

    name: str
    sites: tuple[str, ...]
    before: tuple[str, ...]
    steps: tuple[int, ...] = ()
    order: int = 0
    quadratic: bool = False


@dataclass(frozen=True)
class Structure:
    """What a program does with the sites of its rows.

    sites: those that something depends on.
    hidden: the others, and what is computed from any.
    terms: what depends on them, in the program's order.
    by_mean: site -> whether its center is the mean of its prior.
    joined: terms that are one factor together, which the last of them counts; by that one's name.
    """

    sites: tuple[str, ...]
    hidden: frozenset[str]
    terms: Mapping[str, RowTerm]
    by_mean: Mapping[str, bool]
    joined: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def center(self, site: Site) -> Tensor:
        """Return the center of the prior of a row's site."""
        return center(site["fn"], self.by_mean[site["name"]])


def log_prob_of(fn: Any, value: Tensor) -> Tensor:
    """Return the log density of a value, as a float where the distribution takes no integers."""
    try:
        log: Tensor = fn.log_prob(value)
    except (RuntimeError, TypeError, ValueError):
        if value.is_floating_point():
            raise
        log = fn.log_prob(value.to(torch.get_default_dtype()))
    return log


class RowDensity(NamedTuple):
    """A term at given values of its row: its distribution, observed value and mask."""

    fn: Any
    value: Any
    mask: Any

    def log_prob(self, value: Tensor | None = None) -> Tensor:
        """Return the log density of a value, or of the observed one; 0 where it is masked."""
        log = log_prob_of(self.fn, self.value if value is None else value)
        return log if self.mask is None else torch.where(torch.as_tensor(self.mask), log, 0.0)


class TermReached(Exception):
    """A program has come to the last site that is asked for."""


@contextmanager
def isolated() -> Iterator[None]:
    """Run a program inside of another one's run: no handler and no plate of that one is seen."""
    stack, plates = list(runtime._PYRO_STACK), list(runtime._DIM_ALLOCATOR._stack)
    runtime._PYRO_STACK.clear()
    runtime._DIM_ALLOCATOR._stack.clear()
    try:
        with unchecked():
            yield
    finally:
        runtime._PYRO_STACK[:] = stack
        runtime._DIM_ALLOCATOR._stack[:] = plates


class At(TakesWeights):
    """Sets the sites of rows by `choose`, all others and params to what they are; notes some terms."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        choose: Callable[[Site], Tensor],
        term: RowTerm,
    ) -> None:
        super().__init__()
        self.values, self.params, self.choose, self.term = values, params, choose, term
        self.terms: dict[str, RowDensity] = {}

    def _pyro_param(self, msg: Site) -> None:
        msg["value"], msg["done"] = self.params[msg["name"]], True

    def _pyro_sample(self, msg: Site) -> None:
        name = msg["name"]
        if name == self.term.name or name in self.term.before:
            self.terms[name] = RowDensity(msg["fn"], msg["value"], msg["mask"])
            if name == self.term.name:
                raise TermReached
        elif is_latent(msg) and not msg["done"]:
            value = self.values.get(name)
            if name in self.term.sites or value is None:
                value = self.choose(msg)
            msg["value"], msg["done"] = value, True
