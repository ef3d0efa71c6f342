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

from dataclasses import replace

import torch
from torch import Tensor

from hierfl.methods.stages.state import Anchor, Belief, ServerState
from hierfl.summaries.hierarchy import Hierarchy

RAISED = 0.3  # mean number of negative eigenvalues of a client, in the first round
OUTSIDE = 4.0  # sds of the prior between its mean and the posterior's, by the factors of that round
NARROW = 0.1  # sds of the belief, in those of the prior
FARTHEST = 1.0  # step of a scale, in unconstrained units; of a mean, in sds of the prior
STILL = 0.5  # posterior sds that the mean still moves
MOST = 25  # steps


def anchor_of(hierarchy: Hierarchy, covariance: Tensor) -> Anchor:
    """Return what is kept for small steps, by the prior covariance of any client's v (V, V).

    Beliefs are no narrower in local scalars: a client finds its own, given the global ones.
    """
    own, variance = hierarchy.reading.own_size, covariance.diagonal()
    is_shared = torch.arange(len(variance)) >= own
    narrow = torch.where(is_shared, NARROW**-2 / variance, 0.0)
    return Anchor(torch.tensor(0), narrow)


def is_anchored(state: ServerState) -> bool:
    """Return whether the posterior is approached in small steps, or is to be."""
    if state.anchor is None or not bool(state.anchor.narrow.any()):
        return False
    begins = not bool(state.sampled) and float(state.raised) > RAISED
    return begins or int(state.anchor.step) > 0


def is_far(hierarchy: Hierarchy, before: ServerState, after: Belief) -> bool:
    """Return whether a scale's first posterior lies where hardly any draw of the prior does."""
    if before.anchor is None or before.belief is None or bool(before.sampled):
        return False
    size, prior = hierarchy.reading.own_size, before.belief
    away = (after.loc - prior.loc)[size:].abs()
    far = away > OUTSIDE * prior.covariance.diagonal()[size:].sqrt()
    return bool((far & ~_is_mean(hierarchy)).any())


def begun(state: ServerState) -> ServerState:
    """Return the state without the factors from clients' own modes, with a narrow belief."""
    assert state.belief is not None and state.anchor is not None
    old, narrow = state.factors, state.anchor.narrow
    return replace(
        state,
        factors=replace(
            old, precision=torch.zeros_like(old.precision), shift=torch.zeros_like(old.shift)
        ),
        belief=_narrowed(state.belief.loc, state.belief.covariance, narrow),
        anchor=Anchor(torch.tensor(1), narrow),
    )


def stepped(hierarchy: Hierarchy, state: ServerState, posterior: Belief) -> ServerState:
    """Return the state with the next narrow belief, about the `posterior`; or with it, once still."""
    assert state.belief is not None and state.anchor is not None
    step, narrow = state.anchor.step, state.anchor.narrow
    away, sds = posterior.loc - state.belief.loc, posterior.covariance.diagonal().sqrt()
    if bool((away.abs() <= STILL * sds).all()) or int(step) >= MOST:
        return replace(state, belief=posterior, anchor=Anchor(-step, narrow))
    reach = _farthest(hierarchy, narrow)
    loc = state.belief.loc + away.clamp(-reach, reach)
    belief = _narrowed(loc, posterior.covariance, narrow)
    return replace(state, belief=belief, anchor=Anchor(step + 1, narrow))


def _narrowed(loc: Tensor, covariance: Tensor, narrow: Tensor) -> Belief:
    precision = torch.linalg.inv_ex(covariance).inverse + torch.diag(narrow)
    inverse = torch.linalg.inv_ex(precision).inverse
    return Belief.of(loc, 0.5 * (inverse + inverse.mT))


def _farthest(hierarchy: Hierarchy, narrow: Tensor) -> Tensor:
    """Return the longest step of each scalar of v, (V,)."""
    size = hierarchy.reading.own_size
    shared = torch.where(_is_mean(hierarchy), 1.0 / (NARROW * narrow[size:].sqrt()), 1.0)
    return torch.cat([torch.full((size,), torch.inf), FARTHEST * shared])


def _is_mean(hierarchy: Hierarchy) -> Tensor:
    """Return which shared scalars of v are means, (D,) bool; the others are scales."""
    means = set(hierarchy.inside.tolist())
    return torch.tensor([at in means for at in hierarchy.reading.shared.tolist()], dtype=torch.bool)
