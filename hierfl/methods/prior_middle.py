"""Where clients that join a fitted hierarchy start: at the middle of the prior that was learned."""

from __future__ import annotations

from typing import Any

import torch
from pyro import poutine

from hierfl.program.handlers import Answer, unchecked
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.traces import Middle, has_mean


def at_prior_middle(program: Program, theta: Params) -> Params:
    """Return the local params of a guide, with each location at the mean of its site's prior.

    The prior is given by the server's params, with global sites at the middle of their posterior.
    All params are where the guide starts them if the guide has no locations, if a prior has no
    mean, or if the model reads client fields: each client then has another prior.
    """
    mine, block = program.start()[1], program.latents.local_block
    reads = program.reads.model & program.prototype.client_fields.keys()
    with torch.no_grad(), unchecked():
        priors = {} if reads else program.priors(theta, _middles(program, {**theta, **mine}))
        if not priors or not all(has_mean(prior) for prior in priors.values()):
            return mine
        means = {name: prior.mean.expand(prior.shape()) for name, prior in priors.items()}
        found = {"_local.loc": block.flatten(means)}
        for site in block.sites:
            free = site.transform.inv(means[site.name])
            found |= {f"{site.name}.at": free, f"{site.name}.loc": free}
    return {
        name: found[name].reshape(value.shape) if name in found else value
        for name, value in mine.items()
    }


def _middles(program: Program, params: Params) -> Values:
    """Return the middle of the guide's posterior of each global site."""
    with Answer(params, program.prototype), Middle():
        nodes: dict[str, Any] = poutine.trace(program.guide).get_trace(program.prototype).nodes
    return {site.name: nodes[site.name]["value"] for site in program.latents.global_block.sites}
