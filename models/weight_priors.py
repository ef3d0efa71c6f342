"""Priors of a network's weights: what stands above each tensor, and a client's own given that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyro
import torch
from torch import Tensor

from hierfl.models.priors import Prior, check_scale, given, is_distribution, varying
from hierfl.program.scale_links import ScaleLink, scale_constraint

Loc = Literal["zero", "module", "learned"] | Prior
Scale = Literal["learned"] | Prior


@dataclass(frozen=True, eq=False)
class WeightPriors:
    """w_k ~ Normal(theta, s^2) for each tensor that is a client's own, theta alone for each other.

    Args:
        tensors: name -> the module's own values.
        own: names of those that are a client's own.
        loc: theta of those.
        scale: s.
        scale_start: where a learned s starts.
        scale_link: how it is learned.
        shared: prior of the other tensors' theta; None: point estimates.
        centred: see `priors.varying`.

    Raises:
        ValueError: another word than those allowed, or a scale that is not > 0.
    """

    tensors: Mapping[str, Tensor]
    own: frozenset[str]
    loc: Loc
    scale: Scale
    scale_start: float
    scale_link: ScaleLink
    shared: Prior | None
    centred: bool

    def __post_init__(self) -> None:
        """Refuse what is no prior."""
        if isinstance(self.loc, str) and self.loc not in ("zero", "module", "learned"):
            raise ValueError(
                f"prior_loc is {self.loc!r}; it must be 'zero', 'module', 'learned', a number or a distribution"
            )
        if isinstance(self.scale, str) and self.scale != "learned":
            raise ValueError(
                f"prior_scale is {self.scale!r}; it must be 'learned', a number or a distribution"
            )
        check_scale("scale_start", self.scale_start)
        scale_constraint(self.scale_link)
        if not isinstance(self.scale, str):
            check_scale("prior_scale", self.scale)

    def above(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Theta of every tensor and s of the clients' own, by name: global params and sites, outside the plate."""
        return {name: self._theta(name) for name in self.tensors}, {
            name: self._scale(name) for name in self.tensors if name in self.own
        }

    def _theta(self, name: str) -> Tensor:
        start, prior = self.tensors[name], self.loc if name in self.own else self.shared
        if prior is None or (isinstance(prior, str) and prior == "learned"):
            value: Tensor = pyro.param(f"theta.{name}", start.clone)
            return value
        if isinstance(prior, str):
            return start if prior == "module" else torch.zeros_like(start)
        return given(f"theta.{name}", prior, tuple(start.shape), start=start)

    def _scale(self, name: str) -> Tensor:
        if isinstance(self.scale, str):
            start = torch.full_like(self.tensors[name], self.scale_start)
            value: Tensor = pyro.param(
                f"scale.{name}", start, constraint=scale_constraint(self.scale_link)
            )
            return value
        return given(f"scale.{name}", self.scale)

    def below(self, theta: Mapping[str, Tensor], scale: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The clients' own tensors, (C, 1, *shape) each, inside the plate."""
        # A guide starts at the prior's mean. Where that is not the module's values it must be told: at 0 a network has no slope.
        known = self.loc == "zero" if isinstance(self.loc, str) else not is_distribution(self.loc)
        return {
            name: varying(
                f"w.{name}",
                theta[name],
                s,
                centred=self.centred,
                start=self.tensors[name] if known else None,
            )
            for name, s in scale.items()
        }
