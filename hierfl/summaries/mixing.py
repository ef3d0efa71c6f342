"""Local parameters that are not Normal: the server samples them; given them the others are Normal.

Each client has mixing parameters t = (o, e):

    o   the unconstrained values of sites that are not Normal (the local scale of a horseshoe, a
        Gamma rate), or on which the spread of a Normal site depends
    e   one for each entry of a Student t, Cauchy or Laplace site, which is Normal with its variance
        divided by exp(e); exp(e) has a known density
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hierfl.program.sites import Block, LatentSite
from hierfl.program.traces import Site, per_client, scored
from hierfl.summaries.normal_sites import unwrapped

SCATTERED = (torch.distributions.StudentT, torch.distributions.Cauchy, torch.distributions.Laplace)


@dataclass(frozen=True, eq=False)
class Mixing:
    """The mixing parameters of a client.

    Args:
        block: of the local sites.
        sampled: names of the sites whose own values are mixing parameters.
        scattered: names of the sites that are Normal given one mixing parameter per entry.
    """

    block: Block
    sampled: tuple[str, ...]
    scattered: tuple[str, ...]

    def __post_init__(self) -> None:
        """Build cached tensors outside torch.func transforms."""
        _ = self.normal, self.outside, self.order, self.center

    @cached_property
    def normal_sites(self) -> tuple[LatentSite, ...]:
        """The sites that are Normal given the mixing parameters."""
        return tuple(site for site in self.block.sites if site.name not in self.sampled)

    @cached_property
    def normal(self) -> Tensor:
        """Positions of w in all local parameters, (Dn,) int64."""
        return self._positions(sampled=False)

    @cached_property
    def outside(self) -> Tensor:
        """Positions of o in all local parameters, (O,) int64."""
        return self._positions(sampled=True)

    def _positions(self, *, sampled: bool) -> Tensor:
        flags = [site.name in self.sampled for site in self.block.sites for _ in range(site.size)]
        return torch.tensor([i for i, f in enumerate(flags) if f == sampled], dtype=torch.long)

    @cached_property
    def order(self) -> Tensor:
        """Where each local parameter lies in (w, o), (D,) int64."""
        return torch.argsort(torch.cat([self.normal, self.outside]))

    @property
    def size(self) -> int:
        """M, the number of mixing parameters of a client."""
        return sum(s.size for s in self.block.sites if s.name in (*self.sampled, *self.scattered))

    @cached_property
    def center(self) -> Tensor:
        """Where the search for mixing parameters starts, (M,)."""
        start = self.block.start.flatten()[self.outside].double()
        return torch.cat([start, start.new_zeros(self.size - len(start))])

    def sampled_part(self, t: Tensor) -> Tensor:
        """Return o (..., O) of t (..., M)."""
        return t[..., : len(self.outside)]

    def whole(self, w: Tensor, t: Tensor) -> Tensor:
        """Return all local parameters (C, D) of w (C, Dn) and t (C, M)."""
        o = self.sampled_part(t)
        return torch.cat([w.expand(len(o), w.shape[-1]), o], -1)[:, self.order]

    def given(self, found: dict[str, Site], t: Tensor) -> dict[str, Site]:
        """Return the sites, scattered ones with their Normal distributions given t (C, M)."""
        return found | {
            site.name: {**found[site.name], "fn": _normal(site, found[site.name]["fn"], part)}
            for site, part in self._parts(t)
        }

    def log_p(self, found: dict[str, Site], t: Tensor) -> Tensor:
        """Return the log density of each client's t (C, M) given the global sites, (C,)."""
        o = self.sampled_part(t)
        jacobians = self.block.unflatten(self.whole(t.new_zeros(len(self.normal)), t)[:, None])[1]
        total = o.new_zeros(len(o))
        for name in self.sampled:
            site = found[name]
            total = total + per_client(scored(site, site["fn"].log_prob(site["value"])))
            total = total + per_client(jacobians[name])
        for site, part in self._parts(t):
            each = _log_density(unwrapped(found[site.name]["fn"]), _shaped(site, part))
            total = total + _flat(site, each).sum(1)
        return total

    def guess(self, found: dict[str, Site], count: int) -> tuple[Tensor, Tensor]:
        """Return rough means and sds of e given the global sites, (count, E) each."""
        means, sds = [torch.zeros(count, 0)], [torch.zeros(count, 0)]
        for site, part in self._parts(torch.zeros(count, self.size)):
            mean, sd = _moments(unwrapped(found[site.name]["fn"]))
            like = _shaped(site, part)
            means.append(_flat(site, mean.expand_as(like)))
            sds.append(_flat(site, sd.expand_as(like)))
        return torch.cat(means, 1), torch.cat(sds, 1)

    def _parts(self, t: Tensor) -> list[tuple[LatentSite, Tensor]]:
        """Return each scattered site with its mixing parameters (C, size)."""
        sites = [site for site in self.block.sites if site.name in self.scattered]
        parts = t[..., len(self.outside) :].split([s.size for s in sites], -1) if sites else ()
        return list(zip(sites, parts, strict=True))


def _shaped(site: LatentSite, part: Tensor) -> Tensor:
    """Return values (C, size) in the shape of a site's value, (*inner, C, 1, *event)."""
    inner = site.batch_shape[:-2]
    apart = part.reshape(len(part), 1, *inner, *site.event_shape)
    return apart.movedim((0, 1), (len(inner), len(inner) + 1))


def _flat(site: LatentSite, value: Tensor) -> Tensor:
    """Return values in the shape of a site's value as (C, size)."""
    inner = len(site.batch_shape) - 2
    apart = value.movedim((inner, inner + 1), (0, 1))
    return apart.reshape(len(apart), -1)


def _normal(site: LatentSite, fn: Any, part: Tensor) -> Any:
    fn = unwrapped(fn)
    scale = fn.scale * (-0.5 * _shaped(site, part)).exp()
    return torch.distributions.Normal(*torch.broadcast_tensors(fn.loc, scale))


def _half_freedom(fn: Any) -> Tensor:
    found: Tensor = fn.df if isinstance(fn, torch.distributions.StudentT) else torch.ones(())
    return 0.5 * found.to(torch.get_default_dtype())


def _log_density(fn: Any, e: Tensor) -> Tensor:
    """Return the log density of each mixing parameter of a scattered site, in the shape of e."""
    if isinstance(fn, torch.distributions.Laplace):  # exp(-e) / 2 is Exponential(1)
        return math.log(0.5) - e - 0.5 * (-e).exp()
    half = _half_freedom(fn)  # exp(e) is Gamma(half, half)
    return half * (half.log() + e - e.exp()) - half.lgamma()


def _moments(fn: Any) -> tuple[Tensor, Tensor]:
    """Return mean and sd of a mixing parameter: log of a Gamma, or minus log of an exponential."""
    if isinstance(fn, torch.distributions.Laplace):
        one = torch.ones(())
        return -(math.log(2.0) + one.digamma()), torch.polygamma(1, one).sqrt()
    half = _half_freedom(fn)
    return half.digamma() - half.log(), torch.polygamma(1, half).sqrt()
