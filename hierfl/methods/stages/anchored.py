"""The first rounds of two_stage where clients' own likelihoods have no maximum.

A row of four measures does not determine a covariance, nor a single row a scale, and a component of
a mixture can sit on one row. There a client's likelihood grows without bound toward a point of its
own, where its curvature says nothing about the posterior; factors from such points make a posterior
that is far too narrow, at a wrong place. It shows in negative eigenvalues of the curvature at the
clients' own modes (`raised`), in the first round. Times that are censored have likelihoods that are
flat on one side, whose slopes add up to a scale that is far outside its prior (`is_far`).

The server then starts again from its prior, in small steps: it sends a belief so narrow in global
scalars that all clients expand their likelihoods at its mean, samples the posterior by these
factors, and moves the mean there, by at most `FARTHEST` in scales. This is Newton's method for the
marginal likelihood of all clients, with the steps in scales bounded. Once the mean is still,
beliefs are as wide as the posterior again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.summaries.hierarchy import Hierarchy

RAISED = 0.3  # mean number of negative eigenvalues of a client, in the first round
OUTSIDE = 4.0  # sds of the prior between its mean and the posterior's, by the factors of that round
NARROW = 0.1  # sds of the belief, in those of the prior
FARTHEST = 1.0  # step of a scale, in unconstrained units; of a mean, in sds of the prior
STILL = 0.5  # posterior sds that the mean still moves
MOST = 25  # steps


def anchor_of(hierarchy: Hierarchy, covariance: Tensor) -> Tree:
    """Return what is kept for small steps, by the prior covariance of any client's v (V, V).

    `steps` is the number of the next one, negative once they are over. `narrow` (V,) is the
    precision by which a belief is narrower than the posterior. It is 0 of local scalars: a client
    finds its own, given the global ones.
    """
    own, variance = hierarchy.reading.own_size, covariance.diagonal()
    is_shared = torch.arange(len(variance)) >= own
    narrow = torch.where(is_shared, NARROW**-2 / variance, 0.0)
    return {"steps": torch.tensor(0), "narrow": narrow}


def is_anchored(state: Tree) -> bool:
    """Return whether the posterior is approached in small steps, or is to be."""
    if "steps" not in state or not bool(state["narrow"].any()):
        return False
    begins = not bool(state["sampled"]) and float(state["raised"]) > RAISED
    return begins or int(state["steps"]) > 0


def is_far(hierarchy: Hierarchy, before: Tree, after: Tree) -> bool:
    """Return whether a scale's first posterior lies where hardly any draw of the prior does."""
    if "steps" not in before or bool(before["sampled"]):
        return False
    size = hierarchy.reading.own_size
    away = (after["loc"] - before["loc"])[size:].abs()
    far = away > OUTSIDE * before["covariance"].diagonal()[size:].sqrt()
    return bool((far & ~_is_mean(hierarchy)).any())


def was_anchored(state: Tree) -> bool:
    """Return whether the posterior was approached in small steps."""
    return "steps" in state and int(state["steps"]) < 0


def begun(state: Tree) -> Tree:
    """Return the state without the factors from clients' own modes, with a narrow belief."""
    none = {name: torch.zeros_like(state["factors"][name]) for name in ("precision", "shift")}
    covariance = _narrowed(state["covariance"], state["narrow"])
    factors = {**state["factors"], **none}
    return {**state, "steps": torch.tensor(1), "covariance": covariance, "factors": factors}


def stepped(hierarchy: Hierarchy, state: Tree, posterior: Tree) -> Tree:
    """Return the state with the next narrow belief, about the `posterior`; or with it, once still."""
    away, narrow = posterior["loc"] - state["loc"], state["narrow"]
    sds = posterior["covariance"].diagonal().sqrt()
    if bool((away.abs() <= STILL * sds).all()) or int(state["steps"]) >= MOST:
        return {**state, **posterior, "steps": -state["steps"]}
    reach = _farthest(hierarchy, narrow)
    return {
        **state,
        "loc": state["loc"] + away.clamp(-reach, reach),
        "covariance": _narrowed(posterior["covariance"], narrow),
        "steps": state["steps"] + 1,
    }


def _narrowed(covariance: Tensor, narrow: Tensor) -> Tensor:
    precision = torch.linalg.inv_ex(covariance).inverse + torch.diag(narrow)
    inverse = torch.linalg.inv_ex(precision).inverse
    return 0.5 * (inverse + inverse.mT)


def _farthest(hierarchy: Hierarchy, narrow: Tensor) -> Tensor:
    """Return the longest step of each scalar of v, (V,)."""
    size = hierarchy.reading.own_size
    shared = torch.where(_is_mean(hierarchy), 1.0 / (NARROW * narrow[size:].sqrt()), 1.0)
    return torch.cat([torch.full((size,), torch.inf), FARTHEST * shared])


def _is_mean(hierarchy: Hierarchy) -> Tensor:
    """Return which shared scalars of v are means, (D,) bool; the others are scales."""
    means = set(hierarchy.inside.tolist())
    return torch.tensor([at in means for at in hierarchy.reading.shared.tolist()], dtype=torch.bool)
