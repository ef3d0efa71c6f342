"""Sites that are Normal on the unconstrained scale, and local ones that are Normal given others.

What is not Normal is sampled by the server: each client has mixing parameters t = (o, e):

    o   the unconstrained values of sites that are not Normal (the local scale of a horseshoe, a
        Gamma rate), or on which the spread of a Normal site depends
    e   one for each entry of a Student t, Cauchy or Laplace site, which is Normal with its variance
        divided by exp(e); exp(e) has a known density
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import ExpTransform, TransformedDistribution

from hierfl.program.sites import Block, LatentSite
from hierfl.program.supports import kind_of
from hierfl.program.traces import Site, per_client, scored

WRAPPERS = (torch.distributions.Independent, dist.ExpandedDistribution)
SCATTERED = (torch.distributions.StudentT, torch.distributions.Cauchy, torch.distributions.Laplace)


class NotNormal(Exception):
    """A site whose distribution is not Normal on the unconstrained scale."""


def means_of(sites: tuple[LatentSite, ...], values: dict[str, Site]) -> Tensor:
    """Return the means of sites, unconstrained: (C, D) of local sites, (1, K) of global ones."""
    normals = [(site, normal_of(values[site.name]["fn"])) for site in sites]
    locs = [
        _in_roots(site, fn.loc) if site.has_root else fn.loc / _unit(site) for site, fn in normals
    ]
    return torch.cat([_flat(*of) for of in zip(sites, locs, strict=True)], -1)


def precision_of(
    sites: tuple[LatentSite, ...], values: dict[str, Site]
) -> tuple[Tensor, Tensor, bool]:
    """Return the precision (C, D, D) of sites, given what their means read, its log det, and whether it is diagonal."""
    is_diagonal = True
    sizes = [site.size for site in sites]
    before = [sum(sizes[:i]) for i in range(len(sizes))]
    total, log_det = torch.zeros(()), torch.zeros(())
    for site, start in zip(sites, before, strict=True):
        fn = normal_of(values[site.name]["fn"])
        if isinstance(fn, torch.distributions.MultivariateNormal):
            is_diagonal = False
            tril, unit = fn.scale_tril, _unit(site).to(fn.scale_tril)
            if not site.has_root:
                unit = torch.diag_embed(unit * torch.ones_like(tril[..., 0]))
            # in units before it is squared: precisions of correlated sites have few digits
            root = _blocks(site, torch.linalg.solve_triangular(tril, unit, upper=False))
            dense = _block_diagonal(root.mT @ root)
            wide = unit.diagonal(dim1=-2, dim2=-1).log() - tril.diagonal(dim1=-2, dim2=-1).log()
            log_det = log_det + 2.0 * _flat(site, wide).sum(-1)
        else:
            scale = _flat(site, fn.scale / _unit(site))
            dense = torch.diag_embed(scale**-2.0)
            log_det = log_det - 2.0 * scale.log().sum(-1)
        after = sum(sizes) - start - site.size
        total = total + torch.nn.functional.pad(dense, (start, after, start, after))
    return total, log_det, is_diagonal


def normal_of(fn: Any) -> Any:
    """Return the Normal distribution of a site's unconstrained value, expanded; or `NotNormal`."""
    shape = fn.batch_shape
    fn = unwrapped(fn)
    transforms = fn.transforms if isinstance(fn, TransformedDistribution) else ()
    if [type(t) for t in transforms] == [ExpTransform]:
        fn = unwrapped(fn.base_dist)
    if isinstance(fn, torch.distributions.LowRankMultivariateNormal):
        fn = dist.MultivariateNormal(fn.loc, fn.covariance_matrix)
    # the batch of what `to_event` has made an event stays
    if isinstance(fn, torch.distributions.MultivariateNormal | torch.distributions.Normal):
        whole: Any = fn
        return whole.expand((*shape, *fn.batch_shape[len(shape) :]))
    raise NotNormal(kind_of(fn))


def unwrapped(fn: Any) -> Any:
    """Return a distribution without what expands it or declares events of it."""
    while isinstance(fn, WRAPPERS):
        fn = fn.base_dist
    return fn


def _unit(site: LatentSite) -> Tensor:
    return torch.ones(()) if site.unit is None else site.unit


def _in_roots(site: LatentSite, loc: Tensor) -> Tensor:
    """Return vectors (..., d) in units of a site whose unit is a root."""
    root = _unit(site).to(loc)
    return torch.linalg.solve_triangular(root, loc[..., None], upper=True)[..., 0]


def _flat(site: LatentSite, value: Tensor) -> Tensor:
    """Return a parameter, one scalar per entry, as (C, size), or (1, size) of a global site."""
    clients_first = _clients_first(site, value)
    return clients_first.reshape(len(clients_first), -1)


def _blocks(site: LatentSite, value: Tensor) -> Tensor:
    """Return a parameter with one matrix per event: (C, blocks, d, d), or (1, blocks, d, d)."""
    clients_first = _clients_first(site, value)
    return clients_first.reshape(len(clients_first), -1, *value.shape[-2:])


def _clients_first(site: LatentSite, value: Tensor) -> Tensor:
    # a prior made outside the program, and passed to `models.regression`, has its own dtype
    value = value.to(torch.get_default_dtype())
    if not site.is_local:
        return value[None]
    inner = len(site.batch_shape) - 2
    return value.movedim((inner, inner + 1), (0, 1))[:, 0]


def _block_diagonal(blocks: Tensor) -> Tensor:
    """Return (C, b, d, d) as one matrix a client, (C, b d, b d)."""
    eye = torch.eye(blocks.shape[-3], dtype=blocks.dtype)
    return (eye[:, None, :, None] * blocks[..., :, :, None, :]).flatten(-2).flatten(-3, -2)


# -------------------------------------------------------------------------------- mixing parameters
@dataclass(frozen=True, eq=False)
class Mixing:
    """The mixing parameters of a client."""

    block: Block  # of the local sites
    sampled: tuple[str, ...]  # names of the sites whose own values are mixing parameters
    scattered: tuple[str, ...]  # of those that are Normal given one mixing parameter per entry

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

    def given(self, sites: dict[str, Site], t: Tensor) -> dict[str, Site]:
        """Return the sites, scattered ones with their Normal distributions given t (C, M)."""
        return sites | {
            site.name: {**sites[site.name], "fn": _normal(site, sites[site.name]["fn"], part)}
            for site, part in self._parts(t)
        }

    def of_variances(self, sites: dict[str, Site], t: Tensor) -> Tensor:
        """Return t (2, C, M), given which scattered entries have the variances that they have without it.

        The two differ in those of infinite variance. No site is `sampled`.
        """
        parts = []
        for site, part in self._parts(t):
            variance = _variance_in_scales(sites[site.name]["fn"])
            e = -_flat(site, (variance * torch.ones_like(_shaped(site, part))).log())
            parts.append(torch.stack([e.nan_to_num(nan=0.0), e.nan_to_num(nan=-1.0)]))
        return torch.cat(parts, -1)

    def log_p(self, sites: dict[str, Site], t: Tensor) -> Tensor:
        """Return the log density of each client's t (C, M) given the global sites, (C,)."""
        o = self.sampled_part(t)
        jacobians = self.block.unflatten(self.whole(t.new_zeros(len(self.normal)), t)[:, None])[1]
        total = o.new_zeros(len(o))
        for name in self.sampled:
            site = sites[name]
            total = total + per_client(scored(site, site["fn"].log_prob(site["value"])))
            total = total + per_client(jacobians[name])
        for site, part in self._parts(t):
            densities = _log_density(unwrapped(sites[site.name]["fn"]), _shaped(site, part))
            total = total + _flat(site, densities).sum(1)
        return total

    def _parts(self, t: Tensor) -> list[tuple[LatentSite, Tensor]]:
        """Return each scattered site with its mixing parameters (C, size)."""
        sites = [site for site in self.block.sites if site.name in self.scattered]
        parts = t[..., len(self.outside) :].split([s.size for s in sites], -1) if sites else ()
        return list(zip(sites, parts, strict=True))


def _shaped(site: LatentSite, part: Tensor) -> Tensor:
    """Return values (C, size) in the shape of a site's value, (*inner, C, 1, *event)."""
    inner = site.batch_shape[:-2]
    shaped = part.reshape(len(part), 1, *inner, *site.event_shape)
    return shaped.movedim((0, 1), (len(inner), len(inner) + 1))


def _normal(site: LatentSite, fn: Any, part: Tensor) -> Any:
    fn = unwrapped(fn)
    scale = fn.scale * (-0.5 * _shaped(site, part)).exp()
    return torch.distributions.Normal(*torch.broadcast_tensors(fn.loc, scale))


def _half_freedom(fn: Any) -> Tensor:
    df: Tensor = fn.df if isinstance(fn, torch.distributions.StudentT) else torch.ones(())
    return 0.5 * df.to(torch.get_default_dtype())


def _variance_in_scales(fn: Any) -> Tensor:
    """Return the variance of a scattered site over its squared scale; NaN where it is infinite.

    By hand: torch's of a Student t cannot be mapped over draws.
    """
    fn = unwrapped(fn)
    if isinstance(fn, torch.distributions.Laplace):
        return torch.full_like(fn.scale, 2.0)
    df = 2.0 * _half_freedom(fn)
    return torch.where(df > 2.0, df / (df - 2.0), torch.nan)


def _log_density(fn: Any, e: Tensor) -> Tensor:
    """Return the log density of each mixing parameter of a scattered site, in the shape of e."""
    if isinstance(fn, torch.distributions.Laplace):  # exp(-e) / 2 is Exponential(1)
        return math.log(0.5) - e - 0.5 * (-e).exp()
    half = _half_freedom(fn)  # exp(e) is Gamma(half, half)
    return half * (half.log() + e - e.exp()) - half.lgamma()
