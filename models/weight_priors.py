"""Priors of a network's weights: of means and scales, and of local tensors given these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyro
import torch
from torch import Tensor

from hierfl.models.priors import Prior, check_scale, given, is_distribution, varying
from hierfl.program.sites import ScaleLink, scale_constraint

Loc = Literal["zero", "module", "learned"] | Prior
Scale = Literal["learned"] | Prior


@dataclass(frozen=True, eq=False)
class WeightPriors:
    """The priors of all weight tensors of a network; the options are those of `bayesian_network`.

    w_k ~ Normal(theta, s^2)  for each local tensor,    theta alone  for each global one
    """

    tensors: Mapping[str, Tensor]  # name -> the module's own values
    own: frozenset[str]  # names of the local tensors
    loc: Loc
    scale: Scale
    scale_start: float
    scale_link: ScaleLink
    shared: Prior | None  # of theta of the global tensors; None: point estimates
    centered: bool

    def __post_init__(self) -> None:
        """Check the arguments."""
        if isinstance(self.loc, str) and self.loc not in ("zero", "module", "learned"):
            raise ValueError(
                f"prior_loc is {self.loc!r}: "
                f"it must be 'zero', 'module', 'learned', a number or a distribution"
            )
        if isinstance(self.scale, str) and self.scale != "learned":
            raise ValueError(
                f"prior_scale is {self.scale!r}: it must be 'learned', a number or a distribution"
            )
        check_scale("scale_start", self.scale_start)
        scale_constraint(self.scale_link)
        if not isinstance(self.scale, str):
            check_scale("prior_scale", self.scale)

    def above(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Declare the global params and sites, outside the plates: theta of each tensor, and s of local ones."""
        return {name: self._theta(name) for name in self.tensors}, {
            name: self._scale(name) for name in self.tensors if name in self.own
        }

    def _theta(self, name: str) -> Tensor:
        start, prior = self.tensors[name], self.loc if name in self.own else self.shared
        if prior is None or (isinstance(prior, str) and prior == "learned"):
            return pyro.param(f"theta.{name}", start.clone)
        if isinstance(prior, str):
            return start if prior == "module" else torch.zeros_like(start)
        return given(f"theta.{name}", prior, tuple(start.shape), start=start)

    def _scale(self, name: str) -> Tensor:
        if isinstance(self.scale, str):
            start = torch.full_like(self.tensors[name], self.scale_start)
            return pyro.param(f"scale.{name}", start, constraint=scale_constraint(self.scale_link))
        return given(f"scale.{name}", self.scale)

    def below(self, theta: Mapping[str, Tensor], scale: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sample the local tensors, (C, 1, *shape) each. Call it inside the clients plate."""
        # Guides start at the prior's mean. Where that is a given number, they start at the module's
        # values instead: with all weights at 0, a network has no gradient.
        known = self.loc == "zero" if isinstance(self.loc, str) else not is_distribution(self.loc)
        return {
            name: varying(
                f"w.{name}",
                theta[name],
                s,
                centered=self.centered,
                start=self.tensors[name] if known else None,
            )
            for name, s in scale.items()
        }
