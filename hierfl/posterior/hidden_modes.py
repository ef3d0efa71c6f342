"""Posteriors that may have modes of little mass, which weighted draws about one mode do not see.

Where a row's density is a mixture, one component may serve all rows, and the other one no row;
where clients' likelihoods have no maximum of their own, as with nonlinear growth, clients may be
explained in another way altogether. Draws miss such a mode, and k-hat of their weights, which
depends on the draws that there are, is hardly above 0.3.
"""

from __future__ import annotations

from typing import Any

from pyro import distributions as dist
from pyro import poutine

from hierfl.core.trees import Tree
from hierfl.methods.stages.anchored import was_anchored
from hierfl.posterior.weights import base_of
from hierfl.program.handlers import Answer, unchecked, untouched_store
from hierfl.program.mixture import Mixture
from hierfl.program.program import Program, once_a_program

HIDDEN = 0.3  # k-hat above which a mode of little mass may be missed
MIXTURES = (dist.MixtureSameFamily, Mixture)


def may_hide_modes(program: Program, state: Tree, k_hat: float) -> bool:
    """Return whether draws of two_stage with such a k-hat may have missed a mode of little mass."""
    return k_hat > HIDDEN and (was_anchored(state) or is_mixture(program))


@once_a_program
def is_mixture(program: Program) -> bool:
    """Return whether the density of some observed row is a mixture, or a sum over discrete sites."""
    if any("+" in name for name in program.factors):  # the terms of a discrete site, joined
        return True
    with untouched_store(), unchecked(), Answer({}, program.prototype, reparameterized=False):
        nodes: dict[str, Any] = poutine.trace(program.model).get_trace(program.prototype).nodes
    return any(isinstance(base_of(nodes[name]["fn"]), MIXTURES) for name in program.labels)
