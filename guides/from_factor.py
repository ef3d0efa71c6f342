"""The guide of two_stage: weighted draws of the local prior times the client's own factor."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.nn.functional import pad
from torch.quasirandom import SobolEngine

from hierfl.core import noise
from hierfl.core.gaussians import inverse, product, times, times_one
from hierfl.core.importance_sampling import normal_points
from hierfl.core.process import double_precision
from hierfl.data.batch import ClientBatch, in_double
from hierfl.guides.global_sites import Drawn, Shared, emit
from hierfl.laplace.mode import LogDensity, client_density, climb, curvature
from hierfl.laplace.trials import first_row
from hierfl.program.sites import Latents, Model, Values, family
from hierfl.summaries.conditional import (
    NodeProposal,
    Proposal,
    covariance_by,
    point,
    proposals_at,
)
from hierfl.summaries.exact import Spread
from hierfl.summaries.hierarchy import Factors, Hierarchy, given
from hierfl.summaries.own_scale import drawn as exactly
from hierfl.summaries.quartic import Quartic

AUXILIARY: Any = {"is_auxiliary": True}
# mixing parameters at most, over which shrinkage is summed; values of one, to so many sds; of several
MOST_MIXING, MIXING_NODES, FARTHEST, MIXING_POINTS = 4, 24, 6.0, 64
MORE = 2, 4  # times as many candidates where one local scalar alone is not Normal, or with others
# Scale of the candidates of D scalars, in those of the prior times the factor: 1 + WIDER / sqrt(D).
WIDER = 0.5
# Newton steps to where D local scalars are likeliest given the global ones: each takes 1 + D passes
MOST_STEPS, PASSES = 2, 12
ROUNDING = 1e-9  # of a precision, up to which it has none by the rows
NEAR = 2.0**-10  # of the start, where densities are finite
OWN_PARAM = "_factor"  # first part of the names of the local params


class FromFactor:
    """A guide that draws local sites given the global ones by the client's factor.

        q(w | z) = Normal, proportional to p(w | z) exp(eta . v - v' Lambda v / 2),    v = (w, u)

    Of an even number of candidates, half from a wider q and half by a second factor or of the prior
    alone, one is kept by importance weight; `with_prior`, a third each by all of these; `located`, all
    by the curvature of the log joint where it is highest given z. The mean weight gives an unbiased
    estimate of p(y | z).
    `hierarchy` is set once the program is read, with the `shapes` of the client's own params; so is
    `spread`, if the client keeps the sums of a Gaussian likelihood whose noise scale is its own: draws
    are then exact. Where a client's params hold a polynomial, it stands for the rows, of which none is
    read.
    """

    def __init__(
        self,
        model: Model,
        latents: Latents,
        posterior: Callable[[ClientBatch], Drawn],
        candidates: int,
    ) -> None:
        self.model, self.latents, self.posterior = model, latents, posterior
        self.candidates = candidates
        self.hierarchy: Hierarchy | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.spread: Spread | None = None
        self.with_prior, self.located = False, False

    def __call__(self, batch: ClientBatch) -> None:
        """Draw all sites of the clients of a batch."""
        block, none = self.latents.local_block, torch.zeros(0)
        # a program without global sites is refused once it has been read
        shared = self.latents.global_block.size
        drawn = self.posterior(batch) if shared else Drawn(none, none, {})
        if not block.size:
            return
        hierarchy, width, shapes = self.hierarchy, block.size, own_shapes(block.size, 0)
        if hierarchy is not None:
            width, shapes = hierarchy.mixing_size + hierarchy.normal_size, self.shapes
        own = _own_params(shapes, batch)
        zero = torch.zeros(batch.num_clients, 1, width, dtype=own["shift"].dtype)
        normal = dist.Normal(zero, torch.ones_like(zero)).to_event(1)
        with batch.clients():
            first = pyro.sample("_local", normal, infer=AUXILIARY)
        if hierarchy is None:  # the program is read near the start, where densities are finite
            emit(block, block.start + NEAR * first, batch)
            return
        vector, log_q = self._chosen(hierarchy, drawn, own, first[:, 0], batch)
        moved = dist.Delta(torch.zeros_like(log_q), log_density=log_q - normal.log_prob(first))
        with batch.clients():
            pyro.sample("_local.chosen", moved, infer=AUXILIARY)
        emit(block, vector, batch)

    @property
    def has_shrinkage(self) -> bool:
        """Whether local sites are Normal, or scale mixtures of few entries, and the factor of one scale."""
        mixing = None if self.hierarchy is None else self.hierarchy.mixing
        is_few = mixing is None or (not mixing.sampled and mixing.size <= MOST_MIXING)
        return self.hierarchy is not None and self.spread is None and is_few

    @property
    def evaluated(self) -> int:
        """At how many candidates of a draw its client's density is evaluated; 1 if the factor is exact."""
        hierarchy = self.hierarchy
        if hierarchy is None or self.spread is not None or hierarchy.spread is not None:
            return 1
        if hierarchy.mixing is None:
            return self.candidates
        return self.candidates * MORE[self.located or hierarchy.mixing_size > 1]

    @property
    def mixing_nodes(self) -> int:
        """At how many values of the mixing parameters the shrinkage is summed."""
        size = 0 if self.hierarchy is None else self.hierarchy.mixing_size
        return MIXING_POINTS if size > 1 else MIXING_NODES if size else 1

    def shrinkage(self, batch: ClientBatch, turn: Tensor) -> Values:
        """Return Var(w_k | z, y_k) / Var(w_k | z) at a draw of z by the client's factor, without draws of w.

        It is that of the entries of `turn` w, `turn` (D, D). It is exact where the likelihood is
        Gaussian: s^2 / (s^2 + tau^2) of a scalar with standard error s. The mixing parameters
        of Student t's are summed over.
        """
        hierarchy = self.hierarchy
        assert hierarchy is not None
        shared = self.latents.global_block.size
        z = self.posterior(batch).vector if shared else torch.zeros(0)
        own = _own_params(self.shapes, batch)
        factor = _factor_at(hierarchy, own, z)
        with poutine.block(hide_types=["sample", "observe"]):
            after, before = self._covariances(hierarchy, z, first_row(batch), factor, own)
        if hierarchy.reading.effects is not None:  # the local sites are what effects are made of
            back = torch.linalg.inv_ex(hierarchy.reading.effects.at(z)[1]).inverse
            turn = turn.to(back) @ back
        turn = turn.to(after)
        spreads = [(turn @ of @ turn.mT).diagonal(dim1=-2, dim2=-1) for of in (after, *before)]
        same = (spreads[1] - spreads[-1]).abs() <= 1e-5 * spreads[1]
        ratio = torch.where(same, spreads[0] / spreads[1], torch.nan)
        return self.latents.local_block.shaped(ratio[:, None])

    def _covariances(
        self,
        hierarchy: Hierarchy,
        z: Tensor,
        row: ClientBatch,
        factor: tuple[Tensor, Tensor],
        own: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return covariances of w given z, with factors, (C, D, D), and without, (1 or 2, C, D, D)."""
        mixing = hierarchy.mixing
        if mixing is None:
            normal = hierarchy.local(z, row)
            after, _ = inverse(given(hierarchy, normal, z, *factor).precision)
            return after, torch.linalg.inv_ex(normal.precision).inverse.expand_as(after)[None]
        proposals = Proposal(own["loc"][:, 0], own["tril"][:, 0])

        def at(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            sites = hierarchy.given(z, row, t)
            of_w = given(hierarchy, hierarchy.local(z, row, t, sites), z, *factor, t)
            integral, mean, root = of_w.normal()
            return hierarchy.log_mixing(sites, t) + integral, mean, product(root, root.mT)

        e, log_e = _mixing_normals(hierarchy.mixing_size)
        t = proposals.at(e.to(z)[:, None])
        log_p, means, within = torch.vmap(at)(t)
        share = (log_p - proposals.log_prob(t) + log_e.to(z)[:, None]).softmax(0)[..., None]
        away = means - (share * means).sum(0)
        between = torch.einsum("sci,scj->scij", share * away, away)
        after = (share[..., None] * within + between).sum(0)
        t = mixing.center.to(z).expand(len(after), -1)
        sites = hierarchy.given(z, row, t)

        def prior(t: Tensor) -> Tensor:
            precision = hierarchy.local(z, row, t, sites).precision
            return torch.linalg.inv_ex(precision).inverse.expand_as(after)

        return after, torch.vmap(prior)(mixing.of_variances(sites, t))

    def _chosen(
        self,
        hierarchy: Hierarchy,
        drawn: Drawn,
        own: dict[str, Tensor],
        first: Tensor,
        batch: ClientBatch,
    ) -> tuple[Tensor, Tensor]:
        """Return the candidate (C, 1, D) chosen by weight, and its log density; `first` are its normals."""
        if self.spread is not None:
            z, row = drawn.vector.double(), in_double(first_row(batch))
            # evaluations, not its own sites
            with poutine.block(hide_types=["sample", "observe"]), double_precision():
                w, log_q = exactly(hierarchy, self.spread, z, own, row, first.double())
            return w[:, None].to(drawn.vector), log_q[:, None].to(drawn.vector)
        count = self.evaluated
        e = first[None] if count == 1 else spread_out(first, count)
        # half of them are by the wide factor, or of the prior alone where there are mixing variables
        with_prior = self.with_prior and hierarchy.mixing is None
        by_mode = self.located and hierarchy.mixing is not None
        sides = torch.arange(count) * (3 if with_prior or by_mode else 2) // count
        density = client_density(self.model, self.latents.local_block, drawn.values, batch)
        with poutine.block(hide_types=["sample", "observe"]):  # evaluations, not its own sites
            factor, row = _factor_at(hierarchy, own, drawn.vector), first_row(batch)
            if self.located and not by_mode:
                own = {name: v for name, v in own.items() if not name.startswith("wide")}
                factor = _located(density, hierarchy, drawn.vector, factor, row)
            proposals = None
            if hierarchy.mixing is not None:
                of_draws = Proposal(own["loc"], own["tril"])
                proposals = proposals_at(hierarchy, drawn.vector, row, factor, of_draws)
            where = hierarchy, drawn.vector, factor, proposals, own, row
            of_noise = partial(candidate, *where, with_prior=with_prior)
            if by_mode:
                of_noise = partial(of_noise, located=_about_mode(density, of_noise, first))
            candidates: Candidate = torch.vmap(of_noise)(e, sides)
            if count == 1:
                return candidates.vector[0, :, None], -candidates.log_weight[0, :, None]
            if "terms" in own and own["terms"].shape[-1]:
                by = Quartic(own["center"], own["terms"])
                joint = candidates.log_prior + by.values(candidates.read.movedim(0, 1)).mT
            else:
                joint = torch.vmap(density)(candidates.vector[:, :, None])  # (candidates, C)
        # a candidate far out, where a rate overflows, has no density: it is never chosen
        log_weights = (joint + candidates.log_weight).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        choice = noise.fold(batch.key, noise.word("_local.choice"))
        uniform = noise.uniforms(choice, (1,), first.dtype)
        at = (log_weights.softmax(0).cumsum(0) < uniform[:, 0]).sum(0, keepdim=True)
        at = at.clamp(max=count - 1)
        vectors = candidates.vector
        drawn_vectors = vectors.gather(0, at[..., None].expand(1, *vectors.shape[1:]))[0]
        evidence = log_weights.logsumexp(0) - math.log(count)
        return drawn_vectors[:, None], (joint.gather(0, at)[0] - evidence)[:, None]


def _own_params(shapes: dict[str, tuple[int, ...]], batch: ClientBatch) -> dict[str, Tensor]:
    """Return the clients' own params, (C, ...) each."""
    with batch.clients():  # one of each client in dimension 0
        start = {name: torch.zeros(batch.num_clients, 1, *shape) for name, shape in shapes.items()}
        return {name: pyro.param(f"{OWN_PARAM}.{name}", start[name])[:, 0] for name in shapes}


def _factor_at(hierarchy: Hierarchy, own: dict[str, Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """Return precision and shift of the clients' factors at z."""
    factors = Factors(own["precision"], own["shift"], {}, own.get("num_rows"), belief=own)
    here, power, _ = hierarchy.at_scale(factors, z)
    return power * here.precision, power * here.shift


def _located(
    density: LogDensity,
    hierarchy: Hierarchy,
    z: Tensor,
    factor: tuple[Tensor, Tensor],
    row: ClientBatch,
) -> tuple[Tensor, Tensor]:
    """Return factors (C, V, V) and (C, V) of w alone by the curvature of log joints where w is likeliest given z.

    Newton steps start where `factor` has it.
    """
    normal = hierarchy.local(z, row)
    more = factor[1].shape[-1] - normal.mean.shape[-1]

    def of_w(w: Tensor) -> Tensor:
        return density(hierarchy.local_vectors(w[:, 0], z)[:, None])

    start = given(hierarchy, normal, z, *factor).normal()[1][:, None]
    w = _climbed(of_w, start)
    slope, minus_hessian = curvature(of_w, w)
    precision = minus_hessian[:, 0]
    of_rows = precision - normal.precision
    shift = times(precision, w[:, 0]) + slope[:, 0] - times(normal.precision, normal.mean)
    peaked = torch.linalg.cholesky_ex(precision).info == 0
    # rows with kinks have no curvature, and steps by the prior's end nowhere
    is_curved = of_rows.abs().amax((1, 2)) > ROUNDING * precision.abs().amax((1, 2))
    usable = (peaked & is_curved & shift.isfinite().all(1))[:, None]
    whole = pad(of_rows, (0, more, 0, more)), pad(shift, (0, more))
    located = torch.where(usable[..., None], whole[0], factor[0])
    return located, torch.where(usable, whole[1], factor[1])


def _about_mode(
    density: LogDensity, of_noise: Callable[[Tensor, Tensor], "Candidate"], like: Tensor
) -> Proposal:
    """Return proposals of whole vectors (C, D), `like` their normals, by log joints where these are highest.

    Newton steps start where the factor has the mode.
    """
    size, by_factor = like.shape[-1], torch.zeros((), dtype=torch.long)
    start = of_noise(torch.zeros_like(like), by_factor).vector[:, None]
    x = _climbed(density, start)
    wider = 1.0 + WIDER / size**0.5
    tril = torch.linalg.cholesky_ex(covariance_by(density, x)).L
    return Proposal(x[:, 0], wider * tril)


def _climbed(density: LogDensity, start: Tensor) -> Tensor:
    """Return clients' vectors (C, 1, D) after as many Newton steps as a draw can afford."""
    return climb(density, start, steps=max(1, min(MOST_STEPS, PASSES // (1 + start.shape[-1]))))


def _mixing_normals(size: int) -> tuple[Tensor, Tensor]:
    """Return normals (F, M) and log weights (F,): of one in equal steps, whose sums are as good as those of Gauss."""
    if size > 1:
        return normal_points(MIXING_POINTS, size), torch.zeros(MIXING_POINTS)
    e = torch.linspace(-FARTHEST, FARTHEST, MIXING_NODES)
    return e[:, None], -0.5 * e.square()


def spread_out(first: Tensor, count: int) -> Tensor:
    """Return normals (count, C, M) by Sobol' points shifted by `first` (doi:10.1137/0713071)."""
    points = SobolEngine(first.shape[-1]).draw(count, dtype=first.dtype)[1:]
    uniform = (torch.special.ndtr(first) + points[:, None]) % 1.0
    least = torch.finfo(first.dtype).eps
    return torch.cat([first[None], torch.special.ndtri(uniform.clamp(least, 1.0 - least))])


class Candidate(NamedTuple):
    """Local vectors of clients."""

    vector: Tensor  # (C, D)
    log_weight: Tensor  # (C,) of p(w, t | z) over its density and the prior's
    read: Tensor  # (C, V) v, what the likelihood reads
    log_prior: Tensor  # (C,) log p(w | z)


def candidate(
    hierarchy: Hierarchy,
    z: Tensor,
    factor: tuple[Tensor, Tensor],
    proposals: Proposal | NodeProposal | None,
    own: dict[str, Tensor],
    row: ClientBatch,
    e: Tensor,
    side: Tensor,
    *,
    with_prior: bool = False,
    located: Proposal | None = None,
) -> Candidate:
    """Return the candidate by a factor and normals e (C, M + Dn), of a `side` () as of `conditional.point`."""
    exact = hierarchy.spread is not None
    wider = 1.0 if exact else 1.0 + WIDER / max(1, e.shape[-1]) ** 0.5
    wide = (own["wide_precision"], own["wide_shift"]) if "wide_shift" in own else None
    where = hierarchy, z, row, factor, proposals
    how: dict[str, Any] = {"wide": wide, "wider": wider, "with_prior": with_prior}
    at, log_weight = point(*where, e, side, located=located, **how)
    u, size, (precision, shift) = z[hierarchy.reading.shared], at.shape[1], factor
    v = torch.cat([at, u.expand(len(at), -1)], 1)
    by_u = times_one(precision[:, :, size:], u)
    slope = shift - torch.cat([by_u[:, :size], 0.5 * by_u[:, size:]], 1)
    inside = times(precision[:, :size, :size], at)
    log_factor = (slope * v).sum(-1) - 0.5 * (inside * at).sum(-1)
    vector = hierarchy.local_vectors(at, z)
    prior = hierarchy.log_local(hierarchy.sites(z, vector, row), vector)
    return Candidate(vector, log_weight - log_factor - prior, v, prior)


@family
def from_factor(
    model: Model, latents: Latents, *, shared: Shared, candidates: int = 4
) -> FromFactor:
    """Build the guide of two_stage."""
    return FromFactor(model, latents, shared(latents.global_block), candidates)


from_factor.build.reads_all_rows = True  # type: ignore[attr-defined]
from_factor.build.has_global_sites = True  # type: ignore[attr-defined]


def own_shapes(
    size: int, mixing: int, sums: tuple[str, ...] = (), *, wide: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a client's factor, V = `size`, of its proposals, M = `mixing`, and of sums."""
    shapes: dict[str, tuple[int, ...]] = {"precision": (size, size), "shift": (size,)}
    if wide:
        shapes |= {f"wide_{name}": shape for name, shape in shapes.items()}
    if mixing:
        shapes |= {"loc": (2, mixing), "tril": (2, mixing, mixing)}
    return shapes | dict.fromkeys(sums, ())


def belief_shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what is believed of any client's v, V = `size` (`Factors.belief`)."""
    square = ("within", "common", "design", "between")
    return {"mean": (size,), **dict.fromkeys(square, (size, size))}
