"""Posteriors that may have modes of little mass, which weighted draws about one mode do not see.

Where a row's density is a mixture, one component may serve all rows, and the other one no row;
where clients' likelihoods have no maximum of their own, as with nonlinear growth, clients may be
explained in another way altogether. Draws miss such a mode. k-hat of their weights depends on the
draws that there are: it is hardly above 0.3 in the second case, and may be 0 in the first. There,
where chains would take too long, climbs from many places on all rows say whether there is one mode.

So may the end of a ridge be missed, where a row reads several of a client's numbers by no linear
predictor: draws about weighted ones have light weights again, wherever those before had ended.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from pyro import distributions as dist
from pyro import poutine
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hierfl.engine.rounds import Progress
from hierfl.methods.stages.two_stage import LEAST_CURVED, seen_in
from hierfl.posterior.weights import base_of
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.mixture import Mixture
from hierfl.program.program import Program, once_a_program
from hierfl.program.traces import Center

HIDDEN = 0.3  # k-hat above which a mode of little mass, or the end of a ridge, may be missed
MIXTURES = (dist.MixtureSameFamily, Mixture)
SUMS = (torch.logsumexp, torch.logaddexp, torch.Tensor.logsumexp, torch.Tensor.logaddexp)


class _LogSums(TorchFunctionMode):
    """Adds a zero to each log of a sum, by which densities can be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if func not in SUMS:
            return value
        self.zeros.append(torch.zeros_like(value, requires_grad=True))
        return value + self.zeros[-1]


def may_hide_modes(program: Program, where: Progress) -> bool:
    """Return whether rounds' weighted draws may miss a mode of little mass; chains start in many places, and do not."""
    if bool(where.server.chained):
        return False
    k_hats = k_hats_of_rounds(where.history)
    is_heavy = k_hats[-1] > HIDDEN and (where.one_mode or where.server.was_anchored)
    if is_heavy or (is_mixture(program) and not where.one_mode):
        return True
    return max(k_hats) > HIDDEN and is_curved(program)


def k_hats_of_rounds(history: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return k-hat of each round that has weighted draws, after a 0."""
    return [0.0, *(r["k_hat"] for r in history if r.get("k_hat", math.nan) >= 0.0)]


def is_curved(program: Program) -> bool:
    """Return whether rows read two or more numbers of a client by no linear predictor."""
    hierarchy, score, _ = seen_in(program)
    return not len(score.line.inside) and hierarchy.normal_size >= LEAST_CURVED


@once_a_program
def is_mixture(program: Program) -> bool:
    """Return whether the density of some observed row is a mixture, or a sum over discrete sites.

    So is a factor with the log of a sum, unless the log is subtracted: a normalizing sum, as of a
    ranking or of a set at risk, is log-concave in linear predictors.
    """
    sums, tables = _LogSums(), _tables() if program.factors else nullcontext([])
    with untouched_store(), unchecked(), Center(), torch.enable_grad(), sums, tables as discrete:
        nodes: dict[str, Any] = poutine.trace(program.model).get_trace(program.prototype).nodes
    if discrete:
        return True
    if sums.zeros and program.row_sites is None:  # whose integrals are sums
        factors = [nodes[name]["fn"].log_prob(nodes[name]["value"]) for name in program.factors]
        for slope in slopes(factors, sums.zeros):  # a gradient of 0 does not say
            if bool((slope > 0.0).any()) or not bool((slope < 0.0).any()):
                return True
    return any(isinstance(base_of(nodes[name]["fn"]), MIXTURES) for name in program.labels)


def _tables() -> AbstractContextManager[list[Any]]:
    """Note the tables of discrete sites, which few programs have."""
    from hierfl.program.enumerated import noted_tables

    return noted_tables()


def slopes(densities: Sequence[Tensor], at: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the sum of log densities by the tensors that they depend on."""
    total = torch.stack([density.sum() for density in densities]).sum() if densities else None
    if total is None or not total.requires_grad:
        return []
    return [v for v in torch.autograd.grad(total, at, allow_unused=True) if v is not None]
