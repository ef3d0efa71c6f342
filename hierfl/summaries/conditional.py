"""A client's own parameters given the global ones: weighted points.

A likelihood that is flat on one side is steeper near the posterior's bulk than far out, so that the
factor misses a tail at draws with wide priors. Half of the candidates are by a factor about a wider
belief; the two are one where the likelihood is Gaussian. With mixing parameters half of the points
are from the prior alone: weights stay finite where it has wide tails.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import LOG_2_PI, Quadratic, dot, product, times
from hierfl.core.importance_sampling import normal_points
from hierfl.data.batch import ClientBatch
from hierfl.laplace.mode import LogDensity, climb, curvature
from hierfl.program.sites import Values
from hierfl.summaries.hierarchy import Factors, Hierarchy, given

# a proposal is the sinh of a Normal: its tails are wider than exponential ones
BEND = 0.5
# nats below the highest, at most; a rise of less is none; a width or mass that is not 0
LOWEST, EVEN, TINY = 1e3, 1e-6, 1e-30
CLIMB = 8  # Newton steps to the mode
LEAST = 0.04  # curvature at the mode, at least: most t are logs, for which 5 is a wide sd
PASSES, POINTS = 3, 64  # of adaptive importance sampling after it
NODES, FARTHEST = 32, 4.5  # of a proposal of one t by each side, as standard normals


class Proposal(NamedTuple):
    """Proposals of t: t = loc + tril sinh(BEND e) / BEND, with e standard normal."""

    loc: Tensor  # (..., M)
    tril: Tensor  # (..., M, M), lower triangular

    def at(self, e: Tensor) -> Tensor:
        """Return t (..., M) at e (..., M)."""
        return self.loc + (self.tril @ ((BEND * e).sinh() / BEND)[..., None])[..., 0]

    def log_prob(self, t: Tensor) -> Tensor:
        """Return the log density at t (..., M)."""
        away = torch.linalg.solve_triangular(self.tril, (t - self.loc)[..., None], upper=False)
        e = (BEND * away[..., 0]).asinh() / BEND
        slope = (BEND * e).cosh().log() + self.tril.diagonal(dim1=-2, dim2=-1).log()
        return -(0.5 * e.square() + 0.5 * LOG_2_PI + slope).sum(-1)


class NodeProposal(NamedTuple):
    """Proposals of one t each, whose log density is linear between nodes."""

    nodes: Tensor  # (..., G), ascending
    log: Tensor  # (..., G), of the density

    @staticmethod
    def through(nodes: Tensor, log: Tensor) -> "NodeProposal":
        """Return proposals through log densities known up to a constant."""
        log = log.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        log = (log - log.amax(-1, keepdim=True)).nan_to_num(0.0, neginf=-LOWEST).clamp(min=-LOWEST)
        total = NodeProposal(nodes, log)._masses().sum(-1, keepdim=True)
        return NodeProposal(nodes, log - total.clamp(min=TINY).log())

    def at(self, e: Tensor) -> Tensor:
        """Return t (..., 1) at standard normals e (..., 1)."""
        masses = self._masses()
        below = masses.cumsum(-1)
        mass = torch.special.ndtr(e) * below[..., -1:]
        k = (below < mass).sum(-1, keepdim=True).clamp(max=masses.shape[-1] - 1)
        start, width, _, rise = self._piece(k)
        mass = mass - (below - masses).gather(-1, k)
        share = (mass / masses.gather(-1, k).clamp(min=TINY)).clamp(0.0, 1.0)
        # from the higher end, where an exponential does not overflow
        share, fall = torch.where(rise > 0.0, 1.0 - share, share), rise.abs().clamp(min=EVEN)
        away = (-(share * (-fall).expm1()).log1p() / fall).clamp(0.0, 1.0)
        return start + width * torch.where(rise > 0.0, 1.0 - away, away)

    def log_prob(self, t: Tensor) -> Tensor:
        """Return the log density at t (..., 1), (...)."""
        k = ((self.nodes <= t).sum(-1, keepdim=True) - 1).clamp(0, self.nodes.shape[-1] - 2)
        start, width, log, rise = self._piece(k)
        return (log + rise * (t - start) / width.clamp(min=TINY))[..., 0]

    def _masses(self) -> Tensor:
        """Return the integrals between nodes, (..., G - 1)."""
        higher = self.log[..., :-1].maximum(self.log[..., 1:])
        fall = self.log.diff(dim=-1).abs().clamp(min=EVEN)
        return self.nodes.diff(dim=-1) * higher.exp() * -torch.expm1(-fall) / fall

    def _piece(self, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return start and width of pieces k (..., 1), and the log density at its start and how far it rises."""
        start, log = self.nodes.gather(-1, k), self.log.gather(-1, k)
        return start, self.nodes.gather(-1, k + 1) - start, log, self.log.gather(-1, k + 1) - log


def proposals_at(
    hierarchy: Hierarchy,
    z: Tensor,
    row: ClientBatch,
    factor: tuple[Tensor, Tensor],
    proposals: Proposal,
) -> Proposal | NodeProposal:
    """Return clients' proposals (C, 2, M) at z, of both sides, (2, C, ...): of one number by its density there."""
    both = Proposal(*(v.movedim(1, 0) for v in proposals))
    if hierarchy.mixing_size > 1:
        return both

    def densities(t: Tensor) -> Tensor:
        sites = hierarchy.given(z, row, t)
        of_w = given(hierarchy, hierarchy.local(z, row, t, sites), z, *factor, t)
        prior = hierarchy.log_mixing(sites, t)
        return torch.stack([prior + of_w.log_integral(), prior.expand(len(t))])

    e = torch.linspace(-FARTHEST, FARTHEST, NODES, dtype=z.dtype)[:, None, None, None]
    nodes = both.at(e).flatten(0, 1)[..., 0].sort(0).values  # (G, C)
    log = torch.vmap(densities)(nodes[..., None])  # (G, 2, C)
    return NodeProposal.through(nodes.mT.expand(2, -1, -1), log.permute(1, 2, 0))


def point(
    hierarchy: Hierarchy,
    z: Tensor,
    row: ClientBatch,
    factor: tuple[Tensor, Tensor],
    proposals: Proposal | NodeProposal | None,
    e: Tensor,
    side: Tensor,
    *,
    wide: tuple[Tensor, Tensor] | None = None,
    wider: float = 1.0,
    with_prior: bool = False,
    located: Proposal | None = None,
) -> tuple[Tensor, Tensor]:
    """Return points (C, D) for e (C, M + Dn), and log p(w, t | z) factor(v) over their density.

    `proposals` are those of both sides at z.
    Those with a `side` of 1 are by the factor `wide` or, with mixing parameters, of the prior alone;
    those with a `side` of 2, of which there are some if `with_prior`, are of the prior alone. With
    mixing parameters these are by `located`, proposals of whole vectors, if it is given.
    """
    alone = (factor[0] * 0.0, factor[1] * 0.0)
    if hierarchy.mixing is None or proposals is None:
        normal = hierarchy.local(z, row)
        of_w = given(hierarchy, normal, z, *factor)
        if wide is None:
            integral, mean, tril = of_w.normal(wider)
            # the Normal density at w, over that of the point
            over = 0.5 * (1.0 - wider**2) * e.square().sum(-1) + e.shape[-1] * math.log(wider)
            return mean + (tril @ e[..., None])[..., 0], integral + over
        others = (wide, alone) if with_prior else (wide,)
        sides = [of_w, *(given(hierarchy, normal, z, *other) for other in others)]
        w, log_q = _of_sides(sides, e, side, wider)
        return w, of_w.log(w) - log_q.logsumexp(0) + math.log(len(sides))
    size = hierarchy.mixing_size
    t = proposals.at(e[:, :size].expand(2, -1, -1))
    t, mixing = torch.where(side > 0, t[1], t[0]), hierarchy.mixing
    at = None if located is None else located.at(e)
    if at is not None:
        t = torch.where(side > 1, at[:, mixing.outside], t)
    sites = hierarchy.given(z, row, t)
    normal = hierarchy.local(z, row, t, sites)
    sides = [given(hierarchy, normal, z, *of, t) for of in (factor, alone)]
    by_mode = () if at is None else (at[:, mixing.normal],)
    w, log_q = _of_sides(sides, e[:, size:], side, wider, by_mode)
    log_q, whole = log_q + proposals.log_prob(t), mixing.whole(w, t)
    if located is not None:
        log_q = torch.cat([log_q, located.log_prob(whole)[None]])
    log_p = hierarchy.log_mixing(sites, t) + sides[0].log(w)
    return whole, log_p - log_q.logsumexp(0) + math.log(len(log_q))


def _of_sides(
    sides: Sequence[Quadratic],
    e: Tensor,
    side: Tensor,
    wider: float,
    others: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Return points (C, D) of a widened Normal, or of others, and log densities of all Normals there, (n, C)."""
    normals = [of.normal(wider)[1:] for of in sides]
    of_normals = [mean + (tril @ e[..., None])[..., 0] for mean, tril in normals]
    points = torch.stack([*of_normals, *others])
    w = points.gather(0, side.expand(1, *points.shape[1:]).long())[0]
    log_q = []
    for of, (mean, tril) in zip(sides, normals, strict=True):
        away = (w - mean) / wider
        square = dot(times(of.precision, away), away) + w.shape[-1] * LOG_2_PI
        log_q.append(-0.5 * square - tril.diagonal(dim1=-2, dim2=-1).log().sum(-1))
    return w, torch.stack(log_q)


def normals_of(
    hierarchy: Hierarchy, fields: Values, factor: tuple[Tensor, Tensor], draws: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean (C, S, D) and scale (C, S, D, D) of the Normal p(w | z) factor(v)."""
    own = hierarchy.batch(fields)

    def at(z: Tensor) -> tuple[Tensor, Tensor]:
        return given(hierarchy, hierarchy.local(z, own), z, *factor).normal()[1:]

    mean, tril = torch.vmap(at)(draws)
    return mean.movedim(1, 0), tril.movedim(1, 0)


def terms_of_clients(
    hierarchy: Hierarchy, factors: Factors, places: Tensor
) -> Callable[[int, Tensor], Tensor] | None:
    """Return a function of i and draws z (S, K): all that the log ratio of the client at places[i] depends on.

    It is the mean and covariance of p(w | z) factor(v), and u, (S, D + D (D + 1) / 2 + U). None: some
    local sites are not Normal.
    """
    if hierarchy.mixing is not None:
        return None

    def terms(i: int, draws: Tensor) -> Tensor:
        k, u = int(places[i]), draws[:, hierarchy.reading.shared]
        if not hierarchy.normal_size:
            return u
        factor = factors.precision[k, None], factors.shift[k, None]
        fields = {name: value[k, None] for name, value in factors.fields.items()}
        mean, tril = normals_of(hierarchy, fields, factor, draws)
        row, column = torch.tril_indices(*tril.shape[-2:])
        return torch.cat([mean[0], product(tril, tril.mT)[0][:, row, column], u], 1)

    return terms


def sides_of(count: int, hierarchy: Hierarchy) -> Tensor:
    """Return the sides of points, (count,); with mixing parameters half are of the prior."""
    return torch.arange(count) % 2 * (hierarchy.mixing is not None)


def proposals_of(
    hierarchy: Hierarchy, draws_z: Tensor, fields: Values, factor: tuple[Tensor, Tensor]
) -> Proposal:
    """Return clients' proposals (C, 2, M), with the factor and without, by draws of z, (F, K)."""
    points, sides = normal_points(POINTS, hierarchy.mixing_size), torch.tensor([1.0, 0.0])

    def of_client(precision: Tensor, shift: Tensor, own: Values) -> Proposal:
        row = hierarchy.batch({name: v[None] for name, v in own.items()})

        def of_side(by: Tensor) -> Proposal:
            return _proposal_of(
                hierarchy, draws_z, row, (by * precision[None], by * shift[None]), points
            )

        proposal: Proposal = torch.vmap(of_side)(sides)
        return proposal

    found: Proposal = torch.vmap(of_client)(*factor, fields)
    return found


def mixing_density(
    hierarchy: Hierarchy, row: ClientBatch, factor: tuple[Tensor, Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return log p(t | z) times the integral of a client's factor, a function of t (M,) and z (K,)."""

    def density(t: Tensor, z: Tensor) -> Tensor:
        t = t[None]
        sites = hierarchy.given(z, row, t)
        of_w = given(hierarchy, hierarchy.local(z, row, t, sites), z, *factor, t)
        return (hierarchy.log_mixing(sites, t) + of_w.log_integral())[0]

    return density


def mixing_modes(
    density: Callable[[Tensor, Tensor], Tensor], draws_z: Tensor, center: Tensor
) -> tuple[Tensor, Tensor]:
    """Return modes (F, M) of a density of t at draws of z, and covariances (F, M, M) there."""

    def each(t: Tensor) -> Tensor:  # (F, 1, M) -> (F,)
        return torch.vmap(density)(t[:, 0], draws_z)

    modes = climb(each, center.to(draws_z.dtype).expand(len(draws_z), 1, -1), steps=CLIMB)
    return modes[:, 0], covariance_by(each, modes)


def covariance_by(density: LogDensity, modes: Tensor) -> Tensor:
    """Return covariances (C, D, D) by the curvature of a log density at its modes (C, 1, D)."""
    values, vectors = torch.linalg.eigh(curvature(density, modes)[1][:, 0])
    values = values.nan_to_num(nan=LEAST).clamp(min=LEAST)
    return (vectors / values[:, None]) @ vectors.mT


def _proposal_of(
    hierarchy: Hierarchy,
    draws_z: Tensor,
    row: ClientBatch,
    factor: tuple[Tensor, Tensor],
    points: Tensor,
) -> Proposal:
    """Fit a proposal to p(t | z) times a client's factor, by Laplace and by importance sampling."""
    mixing = hierarchy.mixing
    assert mixing is not None

    density = mixing_density(hierarchy, row, factor)
    modes, within = mixing_modes(density, draws_z, mixing.center)
    mean = modes.mean(0)
    covariance = within.mean(0) + (modes - mean).mT @ (modes - mean) / len(modes)
    for _ in range(PASSES):
        proposal = Proposal(mean, torch.linalg.cholesky_ex(covariance).L)
        t = proposal.at(points)
        log_q = proposal.log_prob(t)
        at = torch.vmap(lambda z, t=t: torch.vmap(lambda t: density(t, z))(t))(draws_z)
        share = (at - log_q).nan_to_num(nan=-torch.inf).softmax(1).mean(0)
        mean = share @ t
        away = t - mean
        eye = torch.eye(len(mean), dtype=mean.dtype)
        covariance = away.mT @ (share[:, None] * away) + 1e-4 * eye
    return Proposal(mean, torch.linalg.cholesky_ex(covariance).L)
