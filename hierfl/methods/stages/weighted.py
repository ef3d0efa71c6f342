"""Draws that a server of two_stage has weighted without asking anybody, and how good they are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.importance_sampling import K_HAT
from hierfl.core.user_warnings import warn
from hierfl.methods.stages.checks import OFF
from hierfl.methods.stages.state import ServerState
from hierfl.program.program import Program
from hierfl.summaries.carried import GOOD
from hierfl.summaries.weights import error_of_sds, k_hats_of, smoothed


class Weighted(NamedTuple):
    """A state with weighted draws, and how good they are."""

    state: ServerState
    k_hat: float
    effective: float
    share: float  # of the draws, that is effective
    error: float  # sd of the error of their log weights, in nats
    of_sds: Tensor  # (K,) relative Monte Carlo errors of the sds of z: one draw may make up most

    def is_good(self, least: float) -> bool:
        """Return whether the draws can be trusted, and at least a share of them is effective."""
        return self.k_hat < K_HAT and self.share >= least and self.error <= GOOD

    def has_sds(self) -> bool:
        """Return whether no sd rests on a few draws."""
        return bool((self.of_sds <= OFF).all())

    def worst(self) -> float:
        """Return how far means, in posterior sds, or sds may be off by the weights' error and by chance."""
        return max(math.hypot(self.error, self.effective**-0.5), *self.of_sds.tolist())


def weighted(state: ServerState, each: Tensor, base: Tensor, error: float, shared: int) -> Weighted:
    """Return the state with its final draws, (S, `shared`, ...), weighted by ratios (S, n) and `base` (S,)."""
    ratios, rows = each.sum(1), len(state.each)
    weights = smoothed(ratios + base)
    asked_ratios = each[torch.arange(rows) * (len(ratios) // rows)]
    effective = float(state.share) * weights.effective
    new = replace(
        state.with_error(error),
        final=replace(state.final, log_weights=weights.log),
        ratios=ratios,
        each=asked_ratios,
        asked=asked_ratios.sum(1),
        k_hat=torch.tensor(weights.k_hat),
        effective=torch.tensor(effective),
        k_hat_client=k_hats_of(each).max(),
        proposed=torch.tensor(True),
    )
    of_sds = error_of_sds(state.final.draws[:, :shared], weights.log)
    return Weighted(new, weights.k_hat, effective, effective / len(ratios), error, of_sds)


def warn_of_sds(weighted: Weighted, program: Program) -> None:
    """Say whose sd rests on a few draws: k-hat, of the weights alone, does not show it."""
    if weighted.has_sds():
        return
    worst, sites = int(weighted.of_sds.argmax()), program.latents.global_block.sites
    ends = torch.tensor([site.size for site in sites]).cumsum(0)
    warn(
        f"the spread of '{sites[int((ends <= worst).sum())].name}' rests on a few draws far out, and "
        f"may be off by {float(weighted.of_sds[worst]):.0%} or more: let the others weight new draws, "
        "fit.without(client, rounds=4), or fit again with more draws",
    )
