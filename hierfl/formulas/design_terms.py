"""The terms of a design, and what the coefficients of a smooth one share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.formulas.terms import Factor
from hierfl.formulas.transforms import Constants

FLOOR = 1e-8  # of a sine's share of the variance: short waves keep a density


@dataclass(frozen=True)
class Smooth:
    """What shares a scale: `size` coefficients for each of the `levels` of `by`, or of one curve, ()."""

    kind: str
    size: int
    levels: tuple[str, ...]
    constants: Constants
    has_by: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """What its scales are called: brms's names."""
        return ("sds",) if self.kind == "s" else ("sdgp", "lscale")

    @property
    def step(self) -> float:
        """The frequency of the first sine."""
        return math.pi / (2.0 * self.constants.boundary)

    def shape(self, length: Tensor) -> Tensor:
        """Return the sds of sines (..., k) relative to that of the process, at length scales (...).

        Of exp(-(x - x')^2 / (2 length^2)), Riutort-Mayol et al. 2023, Statistics and Computing
        33:17, equations 9 and 13, with sines in place of sines / sqrt(L).
        """
        waves = self.step * torch.arange(1, self.size + 1, dtype=length.dtype)
        unit = math.sqrt(2.0 * math.pi) / self.constants.boundary
        part = unit * length[..., None] * torch.exp(-0.5 * (length[..., None] * waves) ** 2)
        return (part + FLOOR).sqrt()


@dataclass(frozen=True)
class DesignTerm:
    """A term and the names of its columns, such as "sex[male]"; `coords` has those in brackets, "male".

    `factors` says what it is made of: a column called "x:z" is not the product of x and z.
    """

    name: str
    columns: tuple[str, ...]
    coords: tuple[str, ...]
    factors: frozenset[Factor]
    steps: tuple[str, ...] = ()  # of mo(x): the levels up to which each of its columns is a step
    curves: tuple[str, ...] = ()  # what mo(x) is multiplied by: each has steps of its own, in a row
    smooth: Smooth | None = None  # of curves, whose coefficients share a scale
    by_step: bool = False  # cs(x): it has a coefficient for each threshold

    @property
    def monotone(self) -> bool:
        """It is mo(x), or a product with it: the coefficients of a curve are of one sign."""
        return bool(self.steps)

    def calls(self, callee: str) -> bool:
        """Return whether a factor of it is a call of this function."""
        return any(getattr(factor, "callee", "") == callee for factor in self.factors)

    def of_curves(self, site: str) -> tuple[str, ...]:
        """Return what the entries of a site of curves are called: the site itself where there is one curve."""
        return tuple(f"{site}[{curve}]" for curve in self.curves) or (site,)
