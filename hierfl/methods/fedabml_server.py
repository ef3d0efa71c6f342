"""FedABML's server: the clients' copies of the prior averaged, or the prior that fits their posteriors best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Transform, transform_to

from hierfl.core.trees import Tree, lerp
from hierfl.method import Clock, Server
from hierfl.program.program import Params, Program, ProgramError


@dataclass(frozen=True)
class Moments:
    """Of each global param that is a prior's mean: the local site, and the param that is the scale, if learned; links of all."""

    site: Mapping[str, str]
    scale: Mapping[str, str]
    links: Mapping[str, Transform]

    def of(self, phi: Params, theta: Params) -> Tree:
        """What a client's posterior adds to the sums: its mean away from the prior's, and the second moment about that."""
        away, square = {}, {}
        for loc, site in self.site.items():
            mine = phi[f"{site}.loc"] if f"{site}.loc" in phi else phi[f"{site}.at"]
            sd = self.links[f"{site}.scale"](phi[f"{site}.scale"]) if f"{site}.scale" in phi else torch.zeros_like(mine)
            away[loc] = mine.view(theta[loc].shape) - theta[loc]
            square[loc] = away[loc].square() + sd.square().view(theta[loc].shape)
        return {"away": away, "square": square}

    def best(self, theta: Params, found: Tree) -> Params:
        """The M-step: m <- mean m_i,  s^2 <- mean [ s_i^2 + (m_i - m)^2 ], which minimises the mean of KL(q_i || p)."""
        new = dict(theta)
        for loc, away in found["away"].items():
            new[loc] = theta[loc] + away
            if loc in self.scale:
                sd = (found["square"][loc] - away.square()).clamp(min=0.0).sqrt()
                new[self.scale[loc]] = self.links[self.scale[loc]].inv(sd).view(theta[self.scale[loc]].shape)
        return new


def moments_of(program: Program) -> Moments:
    """Which global params are the mean and the scale of each local site's prior.

    Raises:
        ProgramError: a local site's mean is no global param, or its scale is neither one nor known.
    """
    above = program.start()[0]
    generator = torch.Generator().manual_seed(0)  # values that no two params share
    marked = {name: value + 0.1 * torch.rand(value.shape, generator=generator) for name, value in above.items()}
    links = {spec.name: transform_to(spec.constraint) for spec in program.params}
    values = {name: links[name](value) for name, value in marked.items()}
    known, priors = program.priors(above), program.priors(marked)

    def twin(wanted: Tensor) -> str | None:
        same = (n for n, v in values.items() if v.numel() == wanted.numel() and torch.allclose(v.flatten(), wanted.flatten()))
        return next(same, None)

    sites, scale = {}, {}
    for site in program.latents.local_block.sites:
        mean, sd = twin(priors[site.name].mean), twin(priors[site.name].stddev)
        fixed = torch.equal(known[site.name].stddev, priors[site.name].stddev)
        if mean is None or (sd is None and not fixed):
            raise ProgramError(
                f"server='exact' needs a prior of site '{site.name}' whose mean is a global param, and whose scale is one, number by "
                f"number, or known: take bayesian_network(module, prior_scale='learned'), or server='average'"
            )
        sites[mean] = site.name
        if sd is not None:
            scale[mean] = sd
    return Moments(sites, scale, links)


def abml_server(program: Program, *, exact: bool, beta: float) -> Server:
    """The server of one program.

    Args:
        program: the program.
        exact: means of `moments` come in, else of `theta`.
        beta: over-relaxation.
    """
    moments = moments_of(program) if exact else None

    def update(theta: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        return lerp(theta, means["theta"] if moments is None else moments.best(theta, means["moments"]), beta)

    return Server(program.start()[0], update)
