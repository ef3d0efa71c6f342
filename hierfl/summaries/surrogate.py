"""The surrogate posterior, the prior times the clients' factors; and moments of a client's v."""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hierfl.core import noise
from hierfl.core.gaussians import LOG_2_PI, product
from hierfl.core.process import replaced
from hierfl.core.traced import Gradient
from hierfl.data.batch import in_double
from hierfl.program.carried import OF_MANY_DRAWS
from hierfl.program.handlers import Substitute, unchecked, untouched_store
from hierfl.program.sites import Block
from hierfl.program.traces import Site
from hierfl.summaries.hierarchy import Factors, Hierarchy, given, of_means, rest_of

AT_ONCE = 1 << 21  # scalars that are carried at once
DIGITS = 36.0  # -log(2^-52): beyond, a sum with 1 is one of the two
DRAWS = 1000  # of the prior, and of the surrogate while the factors still move
FEW = 300  # of a prior that is drawn from draw by draw, such as a Gamma
# share of the draws whose variances are averaged: those of a Cauchy prior have no mean
CENTRAL = 0.9
PASSES = 2  # by which the middle covariance of draws is found
SINGULAR = 1e-9  # share of a variance that is added to it: scalars may depend on each other
SCATTER = (-0.5, 1.5)  # about the mean and sd of e, the mixing parameters of scattered sites
WIDE = 2.5  # sd of an unconstrained number whose prior cannot be drawn from
LARGE = 4  # Normal local numbers of a client, of more of which the matrices take most of the time


@dataclass(frozen=True, eq=False)
class Surrogate:
    """The surrogate posterior; a draw is (z, t of client 1, t of client 2, ...), (K + N M,)."""

    hierarchy: Hierarchy
    gradients: dict[str, Gradient] = field(default_factory=dict)  # of its densities, recorded once

    @property
    def clients(self) -> int:
        """N."""
        return self.hierarchy.program.num_clients

    @property
    def mixed(self) -> int:
        """N M, the number of mixing parameters of all clients."""
        return self.clients * self.hierarchy.mixing_size

    @property
    def work(self) -> int:
        """How many clients of few local numbers per draw costs as much as."""
        return math.ceil(self.clients * max(1.0, self.hierarchy.normal_size / LARGE) ** 3)

    def parts(self, draw: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
        """Return the first `count` entries of a draw, and t (N, M), if there are any."""
        mixed = self.hierarchy.mixing is not None
        return draw[:count], draw[count:].reshape(self.clients, -1) if mixed else None

    def scales(self, draws: Tensor) -> Tensor:
        """Return (s, t), (S, Ks + N M), of draws (S, K + N M)."""
        own = draws[:, len(self.hierarchy.reading.origin) :]
        return torch.cat([draws[:, self.hierarchy.outside], own], 1)

    def draws(
        self, scales: Tensor, mean: Tensor, covariance: Tensor, normal: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return draws (S, K + N M) at (s, t), with m by its moments and standard normals (S, Km).

        Also return log p(m | s, t), (S,).
        """
        tril = torch.linalg.cholesky_ex(covariance).L
        m = mean + (tril @ normal[..., None])[..., 0]
        square = normal.square().sum(1) + normal.shape[1] * LOG_2_PI
        log_p = -0.5 * square - tril.diagonal(dim1=1, dim2=2).log().sum(1)
        s, t = scales.tensor_split([len(self.hierarchy.outside)], 1)
        return torch.cat([torch.cat([m, s], 1)[:, self.hierarchy.order], t], 1), log_p

    def log_marginals(self, draws: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return log p(z) (S,) and the log integrals over w of p(w, t | z) factor(v) (S, N)."""

        def one(draw: Tensor) -> tuple[Tensor, Tensor]:
            z, t = self.parts(draw, len(self.hierarchy.reading.origin))
            batch = self.hierarchy.batch(factors.fields, 1 if t is None else len(t))
            sites = self.hierarchy.given(z, batch, t)
            normal = self.hierarchy.local(z, batch, t, sites)
            here, power, constant = self.hierarchy.at_scale(factors, z)
            factor = here.precision, here.shift
            factored = given(self.hierarchy, normal, z, *factor, t, power)
            log_w = factored.log_integral() + self.hierarchy.log_mixing(sites, t) + constant
            log_z = self.hierarchy.log_global(z, sites, without=())
            return log_z, log_w.expand(len(factors.shift))

        results: tuple[Tensor, Tensor] = self.mapped(one, factors, draws, narrow=not self.mixed)
        return results

    def moments(self, draws: Tensor, t: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return prior means (S, C, V) of v given z and t, and covariances (S, C, D, D) of w."""
        hierarchy = self.hierarchy
        normal = hierarchy.arrangement[: hierarchy.normal_size]
        place = torch.eye(hierarchy.reading.own_size)[normal]
        back = torch.argsort(hierarchy.arrangement)

        def one(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            batch = hierarchy.batch(factors.fields)
            own = None if hierarchy.mixing is None else t.expand(batch.num_clients, -1)
            normal = hierarchy.local(z, batch, own)
            covariance = place.mT @ torch.linalg.inv_ex(normal.precision).inverse @ place
            others = rest_of(hierarchy, z, own)
            others = others.expand(len(normal.mean), others.shape[-1])
            return torch.cat([normal.mean, others], 1)[:, back], covariance

        results: tuple[Tensor, Tensor] = self.mapped(one, factors, draws, t, narrow=True)
        return results

    def mapped(self, function: Any, factors: Factors, *draws: Tensor, narrow: bool) -> Any:
        """Return a function of one draw at all draws (S, ...), some at once.

        A `narrow` one carries no V x V matrix of each client.
        """
        clients, size = factors.shift.shape
        wide, means = (size + 1) ** 2, (len(self.hierarchy.inside) + 1) ** 2
        own = (self.hierarchy.normal_size + 1) * (size + 1)
        width = clients * own + wide if narrow else clients * wide
        at_once = max(1, AT_ONCE // (width + means))
        with unchecked(), replaced(OF_MANY_DRAWS):
            return torch.vmap(function, chunk_size=min(at_once, len(draws[0])))(*draws)


# --------------------------------------------------------------------------------------- any client
def prior_draws(hierarchy: Hierarchy, seed: int) -> Tensor:
    """Return draws of the global sites from their prior (Normal if it is improper), (S, K)."""
    program, block = hierarchy.program, hierarchy.program.latents.global_block
    batch = in_double(hierarchy.row)

    def one(d: Tensor) -> Tensor:
        drawn = batch.redrawn(noise.word("prior")).redrawn(d)
        with Substitute({}, drawn, reparameterized=False):
            nodes: dict[str, Site] = poutine.trace(program.model).get_trace(drawn).nodes
        return block.flatten({site.name: nodes[site.name]["value"] for site in block.sites})

    try:
        alone = _independent(hierarchy, seed)
        return with_digits(
            block,
            _central(
                _drawn(one, torch.arange(DRAWS, dtype=torch.int32)) if alone is None else alone
            ),
        )
    except NotImplementedError:
        g = torch.Generator().manual_seed(seed & 0x7FFFFFFF)
        away = torch.randn(DRAWS, block.size, generator=g, dtype=torch.float64)
        return block.start.double() + WIDE * away


def _drawn(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return draws by the batch's keys; where torch draws, as from a Gamma, a few one by one."""
    with untouched_store():
        try:
            return torch.vmap(function)(*tensors)
        except (RuntimeError, ValueError, NotImplementedError):
            checked = torch.stack(
                [function(*(v[d] for v in tensors)) for d in range(min(FEW, len(tensors[0])))]
            )
            return checked[torch.arange(len(tensors[0])) % len(checked)]


def with_digits(block: Block, draws: Tensor) -> Tensor:
    """Return draws of global sites (S, K) whose logs and log odds doubles have digits for."""
    has_logs = torch.tensor([s.has_logs for s in block.sites for _ in range(s.size)])
    return torch.where(has_logs, draws.clamp(-DIGITS, DIGITS), draws)


def _central(draws: Tensor) -> Tensor:
    low, high = (draws.quantile(q, 0) for q in (0.01, 0.99))
    return draws.nan_to_num().clamp(low, high)


def _independent(hierarchy: Hierarchy, seed: int) -> Tensor | None:
    """Return draws of a prior whose global sites are independent, from one trace; else None."""
    block, zero = hierarchy.program.latents.global_block, torch.zeros(hierarchy.reading.own_size)
    start = block.start.double()
    here = hierarchy.sites(start, zero, hierarchy.row)
    there = hierarchy.sites(start + 0.7, zero, hierarchy.row)
    for site in block.sites:
        value = here[site.name]["value"]
        density = here[site.name]["fn"].log_prob(value)
        if not torch.equal(density, there[site.name]["fn"].log_prob(value)):
            return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed & 0x7FFFFFFF)
        values = {s.name: here[s.name]["fn"].sample((DRAWS,)) for s in block.sites}
    return torch.vmap(block.flatten)(values)


def mixing_draws(hierarchy: Hierarchy, draws: Tensor, seed: int) -> Tensor:
    """Return draws of any client's t from about its prior, (S, M), by those of z."""
    mixing, program = hierarchy.mixing, hierarchy.program
    if mixing is None:
        return torch.zeros(len(draws), 0)
    batch, block = in_double(hierarchy.row), program.latents.local_block
    g = torch.Generator().manual_seed(seed & 0x7FFFFFFF)
    normal = torch.randn(len(draws), mixing.size - len(mixing.outside), generator=g)

    def one(z: Tensor, e: Tensor, d: Tensor) -> Tensor:
        values = program.latents.global_block.unflatten(z)[0]
        drawn = batch.redrawn(noise.word("mixing")).redrawn(d)
        with Substitute({}, drawn, reparameterized=False):
            model = poutine.condition(program.model, data=values)
            nodes: dict[str, Site] = poutine.trace(model).get_trace(drawn).nodes
        own = block.flatten({site.name: nodes[site.name]["value"] for site in block.sites})
        return torch.cat([own[0, 0, mixing.outside], SCATTER[0] + SCATTER[1] * e])

    return _central(_drawn(one, draws, normal, torch.arange(len(draws), dtype=torch.int32)))


def any_client(
    surrogate: Surrogate, draws: Tensor, log_weights: Tensor, factors: Factors
) -> tuple[Tensor, Tensor]:
    """Return mean (V,) and covariance (V, V) of p(v | z) over weighted draws of z and clients."""
    draws = draws[:, : len(surrogate.hierarchy.reading.origin)]
    mixing = mixing_draws(surrogate.hierarchy, draws, 0)
    means, covariances = surrogate.moments(draws, mixing, factors)  # (S, C, V), (S, C, D, D)
    count, size = means.shape[1], covariances.shape[-1]
    share = log_weights.exp()
    if size:
        wide = _widths(covariances)
        share = torch.where(wide <= wide[share > 0.0].quantile(CENTRAL), share, 0.0)
        share = share / share.sum()
    mean = torch.tensordot(share, means.mean(1), 1)
    away = (means - mean).flatten(0, 1)
    share_of_each = share.repeat_interleave(count) / count
    covariance = away.mT @ (away * share_of_each[:, None])
    within = torch.tensordot(share, covariances.mean(1), 1)
    covariance[:size, :size] += within
    variance = covariance.diagonal()  # each in its own unit: columns may be far from 0
    least = torch.where(variance > 0.0, variance, variance.mean())
    return mean, covariance + torch.diag(SINGULAR * least)


def _widths(covariances: Tensor) -> Tensor:
    """Return how wide covariances (S, C, D, D) are, (S,), in units of narrow ones: no column has any."""
    of_draws = covariances.mean(1)
    size = torch.linalg.slogdet(of_draws)[1]
    unit = of_draws[size.argsort()[len(size) // 2]]
    for _ in range(PASSES):
        wide = (of_draws * torch.linalg.pinv(unit, hermitian=True)).sum((-2, -1))
        unit = of_draws[wide <= wide.median()].mean(0)
    return (of_draws * torch.linalg.pinv(unit, hermitian=True)).sum((-2, -1))


class Density:
    """The density of the scales and of t, with everything else integrated out; 0 beyond bounds."""

    def __init__(self, surrogate: Surrogate, factors: Factors, bounds: Tensor) -> None:
        self.surrogate, self.factors = surrogate, factors
        self.slopes: Tensor | None = None
        wide = torch.tensor([[-torch.inf], [torch.inf]]).expand(2, surrogate.mixed)
        self.low, self.high = torch.cat([bounds, wide], 1)
        hierarchy = surrogate.hierarchy
        if hierarchy.steady:
            batch, mixing = hierarchy.batch(factors.fields), hierarchy.mixing
            t = None if mixing is None else mixing.center.expand(batch.num_clients, -1)
            with unchecked():
                self.slopes = hierarchy.slopes_at(hierarchy.reading.origin.double(), batch, t)

    def at(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p (S,), and mean (S, Km) and covariance (S, Km, Km) of m given x (S, Ks + N M)."""
        far = ((x < self.low) | (x > self.high) | ~x.isfinite()).any(1)
        near = x.nan_to_num().clamp(self.low, self.high)
        hierarchy = self.surrogate.hierarchy

        def one(at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            s, t = self.surrogate.parts(at, len(hierarchy.outside))
            of_m = of_means(hierarchy, s, self.factors, t, self.slopes)
            value, mean, root = of_m.normal()
            return value, mean, product(root, root.mT)

        same_prior = not hierarchy.fields and not self.surrogate.mixed
        value, mean, covariance = self.surrogate.mapped(one, self.factors, near, narrow=same_prior)
        return torch.where(far, -torch.inf, value), mean, covariance

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p (S,) and its gradient (S, Ks + N M); clients and points are independent."""
        gradient, tensors = self._recorded()
        return gradient(x, *tensors)

    def seconds(self, x: Tensor, times: int) -> float:
        """Return about how long so many gradients at points take, by the counted work of one."""
        gradient, tensors = self._recorded()
        return times * gradient.seconds(x, *tensors)

    def _recorded(self) -> tuple[Gradient, list[Tensor]]:
        """Return the gradient, which other factors share, and the tensors that it is a function of."""
        leaves, spec = tree_flatten((self.factors, self.slopes, self.low, self.high))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        surrogate, none = self.surrogate, [None] * len(leaves)

        def log_p(x: Tensor, *tensors: Tensor) -> Tensor:
            own = list[Any](none)
            for i, v in zip(places, tensors, strict=True):
                own[i] = v
            density = copy(self)
            density.factors, density.slopes, density.low, density.high = tree_unflatten(own, spec)
            return density.at(x)[0]

        name = f"scales {places}"
        gradient = surrogate.gradients.setdefault(name, Gradient(log_p))
        return gradient, [leaves[i] for i in places]
