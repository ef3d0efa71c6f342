"""Clients' likelihoods as Gaussian factors, found by variational steps on the clients' own rows.

The server sends what it believes of any client's v, Normal(m, C). With it, q is the Normal
distribution closest to Normal(v; m, C) p(y | v) (in KL(q || .)), and the factor is what the
likelihood contributes to q:

    exp(eta . v - v' Lambda v / 2),    Lambda = -E_q[d^2 log p(y | v)],    eta = E_q[d log p(y | v)] + Lambda E_q[v]

It is exact where the likelihood is Gaussian; Lambda may be singular. Steps start at the q of the
round before, or at a mode in the first round; they are whole while a client's ELBO rises, and a
client that is still does not move, so that no factor depends on the clients beside it. A q of the
round before that lies far from the belief, where the likelihood is no better, is left for its mean.

Where no expectation is finite, a client has no factor: Lambda and eta are 0, and V eigenvalues
count as raised. (The curvature of the belief in its place would make the belief confirm itself.)

Source: conjugate-computation variational inference, Khan and Lin 2017, arXiv:1703.04265.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import NOTHING, Factor, inverse, inverse_root, times
from hierfl.summaries.packed_rows import Expected, PackedRows
from hierfl.summaries.quartic import Quartic
from hierfl.summaries.reading import QuadratureNodes

Rows = PackedRows | Quartic

# Newton steps to the mode; variational steps of the first and of later rounds
CLIMB, FIRST, LATER = 10, 4, 12
CAP = 4.0  # the longest step, in sds of the belief
SHARES = (1.0, 0.5, 0.25, 0.0625, 0.0)  # of a Newton step that are tried
UPHILL = 1e-2  # nats that a Newton step still gains
# posterior sds that a mean still moves, relative change of the precision
STILL, STILL_CURVATURE = 1e-3, 3e-3
SHORTER, SHORTEST = 0.3, 1e-3  # a rejected step is tried again so much shorter, down to the second
FEWER = (
    0.7  # share of the clients whose rows are carried that still move, below which the others rest
)
WIDE = 1e4  # an expected curvature beyond so many times the precision: q is far too wide
LARGEST = 1e30  # derivatives beyond it are none
# factors that move the whole way, of the first ones; the least share of a later one
WHOLE, LEAST_SHARE = 6.0, 0.3
NEVER = 1e6  # squared sds of the belief that no two q are apart, but for numbers that overflow
# squared sds of the belief beyond which a q of the round before is compared with its mean
FAR = 16.0


class _Found(NamedTuple):
    """Where q is, (C, ...) each: its mean and precision, the expectations there, and the ELBO."""

    mean: Tensor
    precision: Tensor
    slope: Tensor
    curvature: Tensor
    raised: Tensor
    elbo: Tensor


def factor_of(
    rows: Rows,
    belief: tuple[Tensor, Tensor],
    nodes: QuadratureNodes,
    before: Factor,
    seen: Tensor,
    *,
    steps: int = LATER,
) -> Factor:
    """Return clients' factors by `belief`, m (V,) and C (V, V), and `before` where `seen` (C,)."""
    loc, prior = belief[0], _symmetric(torch.linalg.inv_ex(belief[1]).inverse)
    mean, precision = _start(rows, loc, prior, before)
    if bool(seen.all()):
        return settled(rows, (loc, prior), nodes, mean, precision, seen, steps)
    assert isinstance(rows, PackedRows)  # a polynomial is known from the start
    mode, curvature, raised, slope = climbed(rows, loc, prior)
    # points of a wide belief are too far out: the mode's curvature, this once
    if not len(rows.line.inside):
        first = Factor(curvature, slope + times(curvature, mode), raised)
    else:
        start = prior + curvature
        first = settled(rows, (loc, prior), nodes, mode, start, torch.zeros_like(seen), FIRST)
    if not bool(seen.any()):
        return first
    later = settled(rows, (loc, prior), nodes, mean, precision, seen, LATER)
    return Factor(*(_where(seen, a, b) for a, b in zip(later, first, strict=True)))


def damped(
    now: Factor, before: Factor, turns: Tensor, belief: tuple[Tensor, Tensor] | None = None
) -> Factor:
    """Return factors that have moved a part of the way, from those after `turns` (C,) others.

    Clients with few rows and skewed likelihoods can answer each other in a cycle of whole steps.
    Nothing is kept of factors that a `belief`, m and C, shows to have been of numbers that overflow.
    """
    share = (WHOLE / turns.to(now.shift).clamp(min=1.0)).clamp(LEAST_SHARE, 1.0)
    if belief is not None and bool((share < 1.0).any()):
        prior = _symmetric(torch.linalg.inv_ex(belief[1]).inverse)
        apart = q_of((belief[0], prior), before)[0] - q_of((belief[0], prior), now)[0]
        share = torch.where((apart * (apart @ prior)).sum(1) < NEVER, share, 1.0)
    return Factor(
        torch.lerp(before.precision, now.precision, share[:, None, None]),
        torch.lerp(before.shift, now.shift, share[:, None]),
        now.raised,
    )


def q_of(belief: tuple[Tensor, Tensor], factor: Factor) -> tuple[Tensor, Tensor]:
    """Return mean (C, V) and precision (C, V, V) of Normal(v; m, P^-1) times factors, by m and P."""
    loc, prior = belief
    precision = prior + factor.precision
    return times(inverse(precision)[0], prior @ loc + factor.shift), precision


def _start(rows: Rows, loc: Tensor, prior: Tensor, before: Factor) -> tuple[Tensor, Tensor]:
    """Return mean (C, V) and precision (C, V, V) of the q by the factors of the round before."""
    mean, precision = q_of((loc, prior), before)
    away = mean - loc
    square = (away * (away @ prior)).sum(1)
    if bool((square <= FAR).all()):
        return mean, precision
    there, here = rows.values(torch.stack([mean, loc.expand_as(mean)], 1)).unbind(1)
    back = ~(there - 0.5 * square > here) & ~(square <= FAR)  # also of NaN
    mean = _where(back, loc.expand_as(mean), mean)
    return mean, _where(back, prior.expand_as(precision), precision)


def settled(
    rows: Rows,
    belief: tuple[Tensor, Tensor],
    nodes: QuadratureNodes,
    mean: Tensor,
    precision: Tensor,
    seen: Tensor,
    steps: int = LATER,
) -> Factor:
    """Take variational steps from q, a mean (C, V) and precision (C, V, V), until all are still."""
    loc, prior = belief
    clients, root = len(mean), root_of(prior)
    rate, done = torch.ones(clients), torch.zeros(clients, dtype=torch.bool)
    before, was_wide = None, torch.zeros(clients, dtype=torch.bool)
    moving = torch.arange(clients)
    for turn in range(steps):
        still_moving = (~done).nonzero()[:, 0]
        if len(still_moving) < FEWER * len(moving):
            moving = still_moving
        now, wide = _evaluated(rows.some(moving), belief, nodes, mean[moving], precision[moving])
        if before is None:
            done = wide & ~seen  # at the mode of a first round: the curvature there has to do
        else:  # where the ELBO fell, or q became too wide, go back and take a shorter step
            now = _Found(*(b.index_copy(0, moving, n) for b, n in zip(before, now, strict=True)))
            wide = was_wide.index_copy(0, moving, wide)
            now, wide, worse = _better((before, was_wide), (now, wide), done)
            rate = torch.where(worse, SHORTER * rate, (2.0 * rate).clamp(max=1.0))
        rate, before, was_wide = torch.where(wide, SHORTER, rate), now, wide
        pull = now.slope - (now.mean - loc) @ prior
        share = rate[:, None, None]
        next_precision = (1.0 - share) * now.precision + share * (prior + now.curvature)
        step = step_of(pull, next_precision, root)
        whole = _scaled(prior + now.curvature, root)
        drift = _size(whole - _scaled(now.precision, root)) / _size(whole)
        still = ((step * pull).sum(1).abs() < STILL**2) & (drift < STILL_CURVATURE)
        done = done | still | (rate < SHORTEST)
        if bool(done.all()) or turn == steps - 1:
            break
        mean = _where(done, now.mean, now.mean + rate[:, None] * step)
        precision = _where(done, now.precision, next_precision)
    return _factor(now)


def _better(
    before: tuple[_Found, Tensor], after: tuple[_Found, Tensor], done: Tensor
) -> tuple[_Found, Tensor, Tensor]:
    """Return the expectations after a step and whether q is wide, or those before it where it is worse."""
    (old, was_wide), (now, wide) = before, after
    fell = now.elbo < old.elbo - 1e-9 * old.elbo.abs().clamp(min=1.0)
    worse = ~now.elbo.isfinite() | (fell & (wide == was_wide)) | (wide & ~was_wide) | done
    chosen = _Found(*(_where(worse, a, b) for a, b in zip(old, now, strict=True)))
    return chosen, torch.where(worse, was_wide, wide), worse


def _factor(at: _Found) -> Factor:
    """Return the factors by the expectations under q; none where these are not finite."""
    usable = at.elbo.isfinite()
    shift = torch.where(usable[:, None], at.slope + times(at.curvature, at.mean), 0.0)
    precision = _where(usable, at.curvature, torch.zeros_like(at.curvature))
    every = torch.full_like(at.raised, at.mean.shape[1])
    return Factor(precision, shift, torch.where(usable, at.raised, every))


def _evaluated(
    rows: Rows,
    belief: tuple[Tensor, Tensor],
    nodes: QuadratureNodes,
    mean: Tensor,
    precision: Tensor,
) -> tuple[_Found, Tensor]:
    """Return expectations under q, where it is far too wide (the second) values at its mean."""
    loc, prior = belief
    expected = rows.expected(mean, precision, nodes)
    root = root_of(prior)
    curved, narrow = (_largest(_scaled(m, root)) for m in (expected.curvature, precision))
    wide = ~_usable(expected) | (curved > WIDE * narrow)
    if bool(wide.any()):
        there = rows.at_mean(mean, precision)
        expected = Expected(*(_where(wide, a, b) for a, b in zip(there, expected, strict=True)))
    usable = _usable(expected)
    slope = torch.where(usable[:, None], expected.slope, 0.0)
    curvature = _where(usable, expected.curvature, prior.expand_as(expected.curvature))
    curvature, raised = positive(curvature, root)
    away = mean - loc
    covariance, log_det = inverse(precision)
    distance = (away * (away @ prior)).sum(1)
    spread = (prior * covariance).sum((1, 2)) + log_det  # none of a value at the mean
    elbo = expected.value - 0.5 * (distance + torch.where(wide, 0.0, spread))
    elbo = torch.where(usable, elbo, torch.nan)
    return _Found(mean, precision, slope, curvature, raised, elbo), wide


def _usable(expected: Expected) -> Tensor:
    """Return for which clients all expectations are finite, (C,); no comparison with NaN holds."""
    largest = torch.maximum(_largest(expected.curvature), expected.slope.abs().amax(1))
    return (largest < LARGEST) & expected.value.isfinite()


def climbed(rows: PackedRows, loc: Tensor, prior: Tensor) -> tuple[Tensor, ...]:
    """Return modes of Normal(v; loc, prior^-1) p(y | v), curvatures, eigenvalues raised, slopes."""
    shares, root = torch.tensor(SHARES), root_of(prior)
    mean = loc.expand(rows.clients, -1).clone()
    precision = prior.expand(rows.clients, -1, -1)
    done = torch.zeros(rows.clients, dtype=torch.bool)
    for turn in range(CLIMB + 1):
        expected = rows.at_mean(mean, precision)
        curvature, raised = positive(expected.curvature, root)
        pull = expected.slope - (mean - loc) @ prior
        step = step_of(pull, prior + curvature, root)
        done = done | ((step * pull).sum(1).abs() < UPHILL)
        if turn == CLIMB or bool(done.all()):
            break
        tried = mean[:, None] + shares[:, None] * step[:, None]
        away = tried - loc
        density = rows.values(tried) - 0.5 * (away * (away @ prior)).sum(-1)
        best = shares[density.nan_to_num(nan=-torch.inf).argmax(1)]
        mean = _where(done, mean, mean + best[:, None] * step)
    return mean, curvature, raised, expected.slope


def root_of(prior: Tensor) -> Tensor:
    """Return a root of a belief's covariance, by its precision (V, V): steps and sizes are in its sds.

    So no step depends on the units or the origin of a column.
    """
    return inverse_root(prior)[0]


def _scaled(matrix: Tensor, root: Tensor) -> Tensor:
    return root.mT @ matrix @ root


def positive(curvature: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Return curvatures (C, V, V) with negative eigenvalues set to 0, as of `root`, and their number, (C,)."""
    curvature = _symmetric(curvature)
    none = curvature.new_zeros(len(curvature))
    size = curvature.shape[-1]
    if size == 1:
        return curvature.clamp(min=0.0), (curvature[:, 0, 0] < 0.0).to(curvature.dtype)
    scaled = _scaled(curvature, root)
    floor = 1e-12 * scaled.diagonal(dim1=1, dim2=2).abs().amax(1) + NOTHING
    fine = torch.linalg.cholesky_ex(scaled + floor[:, None, None] * torch.eye(size)).info == 0
    fine |= ~scaled.isfinite().all(1).all(1)  # which have no eigenvalues
    if bool(fine.all()):
        return curvature, none
    values, vectors = torch.linalg.eigh(scaled[~fine])
    negative = (values < -1e-6 * values.abs().amax(1, keepdim=True)).sum(1).to(none.dtype)
    raised = (vectors * values.clamp(min=0.0)[:, None]) @ vectors.mT
    raised = _scaled(raised, torch.linalg.inv_ex(root).inverse)
    return curvature.index_put((~fine,), raised), none.index_put((~fine,), negative)


def step_of(pull: Tensor, precision: Tensor, root: Tensor) -> Tensor:
    """Return Newton steps (C, V), shortened to at most `CAP` sds."""
    step = times(inverse(precision)[0], pull)
    sds = torch.linalg.solve_triangular(root, step.mT, upper=True).mT
    return step * (CAP / (sds.norm(dim=1, keepdim=True) + 1e-12)).clamp(max=1.0)


def _symmetric(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix + matrix.mT)


def _size(matrix: Tensor) -> Tensor:
    return matrix.flatten(1).norm(dim=1)


def _largest(matrix: Tensor) -> Tensor:
    return matrix.abs().amax((1, 2))


def _where(flag: Tensor, value: Tensor, other: Tensor) -> Tensor:
    return torch.where(flag.view(-1, *[1] * (value.dim() - 1)), value, other)
