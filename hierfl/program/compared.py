"""Latent sites that are only compared: the likelihood has no slope in them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hierfl.data.batch import ClientBatch
from hierfl.program.check_dependence import leaves, tensors_of
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import ProgramError
from hierfl.program.sites import Model
from hierfl.program.supports import PriorCenters
from hierfl.program.traces import AtSites, Site, is_deterministic, is_latent, samples

NAMES = ("gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__")
KINDS = {getattr(of, name) for of in (torch, Tensor) for name in NAMES if hasattr(of, name)}


class Comparisons(TorchFunctionMode):
    """Notes the two sides of every comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KINDS and len(args) == 2:
            self.sides.append(args)
        return func(*args, **(kwargs or {}))


def check_slopes(model: Model, batch: ClientBatch) -> None:
    """Refuse a latent site that is compared, and that no density but its own has a slope in."""
    marks, compared = dict[str, Tensor](), Comparisons()

    def note(site: Site) -> None:
        """Mark the value of a latent site by `requires_grad`, which dependents inherit."""
        if is_latent(site) and site["value"].is_floating_point():
            marks[site["name"]] = site["value"] = site["value"].detach().clone().requires_grad_()

    marked = AtSites(note, after=True)
    with untouched_store(), unchecked(), torch.enable_grad(), marked, PriorCenters():
        try:
            with compared:
                trace: Any = poutine.trace(model).get_trace(batch)
        except RuntimeError:
            return  # the program takes values out of autograd (`.numpy()`), and cannot be checked
        sides = (side for pair in compared.sides for side in pair if isinstance(side, Tensor))
        in_comparisons = set(chain.from_iterable(map(leaves, sides)))
        for name, mark in marks.items():
            if mark in in_comparisons and not _is_followed(name, mark, trace):
                raise ProgramError(
                    f"site '{name}' is only compared, so that the likelihood changes with it in "
                    "jumps, and has no slope that a method could follow: write a smooth switch in "
                    f"place of the comparison, torch.sigmoid((x - {name}) / width), or make the site "
                    "a dist.Categorical with infer={'enumerate': 'parallel'}, which is summed out"
                )


def _is_followed(name: str, mark: Tensor, trace: Any) -> bool:
    """Return whether the density of another site depends on a value by a differentiable path."""
    others = (site for other, site in samples(trace) if other != name)
    densities = (tensors_of(site) for site in others if not is_deterministic(site))
    return any(leaf is mark for tensor in chain.from_iterable(densities) for leaf in leaves(tensor))
