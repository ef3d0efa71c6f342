"""Which global params are the mean and the scale of each local site's prior, and local params placed at that prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Transform, transform_to

from hierfl.core.trees import Tree
from hierfl.program.program import Params, Program, ProgramError


def at_prior_mean(program: Program, theta: Params) -> Params:
    """Params of a `delta` guide at the middle of each local site's prior."""
    priors = program.priors(theta)
    return {
        f"{site.name}.at": site.transform.inv(priors[site.name].mean)
        for site in program.latents.local_block.sites
    }


def at_prior(program: Program, theta: Params) -> Params:
    """Params of a `delta` or `mean_field` guide whose posterior is the prior of each local site: its mean, and its scale if it has one.

    Raises:
        ProgramError: the params are those of another guide.
    """
    priors, wanted = program.priors(theta), program.start()[1]
    links = {spec.name: transform_to(spec.constraint) for spec in program.params}
    found: Params = {}
    for site in program.latents.local_block.sites:
        prior = priors[site.name]
        middle = site.transform.inv(prior.mean)
        found |= {f"{site.name}.at": middle, f"{site.name}.loc": middle}
        if f"{site.name}.scale" in wanted:
            found[f"{site.name}.scale"] = links[f"{site.name}.scale"].inv(prior.stddev)
    if not wanted.keys() <= found.keys():
        raise ProgramError(
            f"param '{min(wanted.keys() - found.keys())}' has no start at the prior: take the guide delta, or mean_field"
        )
    return {name: found[name] for name in wanted}


def paired(program: Program) -> dict[str, str]:
    """For each own param of a `delta` guide, the global param that is its prior's mean.

    Raises:
        ProgramError: a local site has none.
    """
    shared, mine = program.start()
    if not mine:
        raise ProgramError("this method needs local sites: give each client weights of its own")
    # values that no two params share, and so near the start that they are inside any domain; 0 is inside the real ones alone
    g = torch.Generator().manual_seed(0)
    parts = {name: torch.rand(value.shape, generator=g) for name, value in shared.items()}
    marked = {
        name: torch.where(value == 0.0, parts[name], value * (1.0 + 0.1 * parts[name]))
        for name, value in shared.items()
    }
    found = {}
    for name, value in at_prior(program, marked).items():
        flat = value.flatten()
        misses = {
            t: float((v.flatten() - flat).abs().max())
            for t, v in marked.items()
            if v.numel() == len(flat)
        }
        twin = min(misses, key=lambda t: misses[t], default=None)
        if twin is None or misses[twin] > 1e-3 * float(flat.abs().max()):
            raise ProgramError(
                f"the prior's mean of site '{name.removesuffix('.at')}' is no global param, and this method moves the one by the other: "
                f"give it one, as bayesian_network(module, prior_scale=1.0) does"
            )
        found[name] = twin
    return found


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
            sd = (
                self.links[f"{site}.scale"](phi[f"{site}.scale"])
                if f"{site}.scale" in phi
                else torch.zeros_like(mine)
            )
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
                new[self.scale[loc]] = (
                    self.links[self.scale[loc]].inv(sd).view(theta[self.scale[loc]].shape)
                )
        return new


def moments_of(program: Program) -> Moments:
    """Which global params are the mean and the scale of each local site's prior.

    Raises:
        ProgramError: a local site's mean is no global param, or its scale is neither one nor known.
    """
    above = program.start()[0]
    generator = torch.Generator().manual_seed(0)  # values that no two params share
    marked = {
        name: value + 0.1 * torch.rand(value.shape, generator=generator)
        for name, value in above.items()
    }
    links = {spec.name: transform_to(spec.constraint) for spec in program.params}
    values = {name: links[name](value) for name, value in marked.items()}
    known, priors = program.priors(above), program.priors(marked)

    def twin(wanted: Tensor) -> str | None:
        same = (
            n
            for n, v in values.items()
            if v.numel() == wanted.numel() and torch.allclose(v.flatten(), wanted.flatten())
        )
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


def pairs_of(above: Params, mine: Params) -> dict[str, str]:
    """Theta's param -> the own param of its site."""
    pairs = {
        f"theta.{site[2:-3]}": site for site in mine if site.startswith("w.") and site != "w.at"
    }
    missing = [theta for theta in pairs if theta not in above]
    if missing or len(pairs) < len(mine):
        odd = missing[0] if missing else next(site for site in mine if site not in pairs.values())
        raise ProgramError(
            f"fedmap averages sites 'w.<name>' to params 'theta.<name>', and finds no pair for '{odd}': use "
            f"hierfl.models.map_network, or server='gradient'"
        )
    return pairs
