"""Shrinkage: how far clients' estimates are pulled toward the population."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import at_each_draw, each_draw
from hierfl.posterior.draws import joined_local, mapped_or_in_turn
from hierfl.posterior.moments import mean_and_variance
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values

# draws of the global sites, and of the local sites at each: a relative error of about sqrt(2 / 750)
POINTS, AT_POINT = 50, 16


def shrinkage(
    fit: Snapshot, sites: list[str], *, points: int = POINTS, draws: int = AT_POINT, seed: int = 0
) -> dict[str, Tensor]:
    """Estimate the shrinkage Var(w_k | z, y_k) / Var(w_k | z) of local sites, averaged over z.

    z are the global sites. Where w_k ~ Normal(mu, tau^2) and the client's own estimate has standard
    error s, this is B = s^2 / (s^2 + tau^2), and the client's posterior mean is B mu + (1 - B)
    times its own estimate: 0 where its rows decide alone, 1 where they say nothing. A guide whose
    local sites are too narrow gives too low a value.

    Sources: B of Morris 1983, JASA 78, Eq. 1.9; the pooling factor of each group in Gelman and
    Pardoe 2006, Technometrics 48, section 1.

    Returns:
        Site -> (N, *shape), at most 1; NaN where the prior has no variance in closed form, where it
        depends on another local site, and at point estimates.
    """
    program = fit.program
    known = [site for site in sites if site not in program.derived]

    def at_one(params: Params, own: ClientBatch, m: Tensor) -> Tree:
        # the root key stays, and so do the draws of the global sites
        keys = noise.fold(own.own_keys, noise.word("own"), m)
        values = program.draw(params, replace(own, own_keys=keys))
        return {
            site: _moments(site, fn, values[site])
            for site, fn in program.priors(params, values, batch=own).items()
            if site in known
        }

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Tree:
        found = at_each_draw(partial(at_one, params, own), draws, program)
        return {site: _ratio(moments) for site, moments in found.items()}

    if not known:
        return {}
    width = draws * width_of(program)
    chunks = mapped_or_in_turn(
        fit, lambda s: each_draw(s, one, draws=points, seed=seed, width=width, salt="shrinkage")
    )
    parts = [chunk.found for chunk in chunks]
    # (N, S, ...), with the same plates as a draw
    found = joined_local(program, parts)
    # a guide may be wider than the prior
    return {site: value.mean(0).clamp(max=1.0) for site, value in found.items()}


def width_of(program: Program) -> int:
    """Return the width of a draw for `each_draw`, in rows; 2 or more."""
    return 2 + (program.latents.global_block.size + program.latents.local_block.size) // 16


def _moments(site: str, fn: object, value: Tensor) -> Tree:
    """Return a draw beside the mean and the variance of its prior, all of one shape."""
    try:
        mean, variance = mean_and_variance(site, fn)
    except ValueError:
        mean = variance = torch.full_like(value, torch.nan)
    expanded = tree_map(lambda v: v.expand(value.shape), {"mean": mean, "variance": variance})
    return {"value": value, **expanded}


def _ratio(found: Values) -> Tensor:
    """Return the variance of draws over that of their prior; NaN without one prior."""
    spread = found["value"].var(0)
    prior = found["variance"][0]
    same = ((found["variance"] == prior) & (found["mean"] == found["mean"][0])).all(0)
    return torch.where(same & (spread > 0.0) & prior.isfinite(), spread / prior, torch.nan)
