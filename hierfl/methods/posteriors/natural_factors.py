"""A Gaussian q(z), the prior times one Gaussian factor of each client: state, server and guide.

    q(z) = t_0(z) prod_k t_k(z),    t_k(z) = exp(eta . z - z' Lambda z / 2)

A factor need not be a distribution, only q must be. A client sends the change of its own factor,
and the server adds the changes to q.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, add, scaled, sub
from hierfl.guides.conditional import conditional
from hierfl.guides.global_sites import diagonal_normal, full_normal, normal_params
from hierfl.laplace.marginal import Inner, Marginal
from hierfl.laplace.newton import LONGEST, length, positive, tril_of
from hierfl.method import Clock, Server, Share, Up
from hierfl.program.handlers import unchecked
from hierfl.program.sites import Family


class NaturalFactor(NamedTuple):
    """A factor t(z): `shift`, eta, (K,), and `precision`, Lambda, (K, K)."""

    shift: Tensor
    precision: Tensor


PARTS = NaturalFactor._fields


class NearMode(NamedTuple):
    """The mode of the local sites, (D,), at z = `loc`, (K,), and its slope in z there, (D, K)."""

    mode: Tensor
    slope: Tensor
    loc: Tensor


class FactorClientState(NamedTuple):
    """A client's factor, and the mode of its local sites."""

    factor: NaturalFactor
    near: NearMode


class Visit(NamedTuple):
    """A client's q_k, its cavity q / t_k, the mode of its local sites, and 1 if the last step was improper, ()."""

    q: NaturalFactor
    cavity: NaturalFactor
    near: NearMode
    improper: Tensor


class FactorServerState(NamedTuple):
    """The posterior q, the prior's factor, and how many standard deviations q moved last, ()."""

    q: NaturalFactor
    prior: NaturalFactor
    moved: Tensor


def check_visits(damping: float | None, draws: int, steps: int) -> None:
    """Refuse options of pvi and fedep that are out of range."""
    expect(damping=(damping, "(0, 1] or None"), steps=(steps, "[1, inf)"))
    check_even(draws=draws)


def check_even(**counts: int) -> None:
    """Refuse numbers of draws that are not even, of 2 or more: half of them mirror the others."""
    for name, count in counts.items():
        if count < 2 or count % 2:
            raise ValueError(f"{name} is {count}: it must be even, 2 or more")


def factor_in(message: Tree) -> NaturalFactor:
    """Return the factor, q or its change, of a message or of means."""
    return NaturalFactor(message["shift"], message["precision"])


def no_factor(size: int) -> NaturalFactor:
    """Return the factor 1 of K = `size` global unknowns."""
    return NaturalFactor(torch.zeros(size), torch.zeros(size, size))


def nowhere(marginal: Marginal) -> NearMode:
    """Return the state before a client's local mode is found."""
    size, inside = marginal.shared.size, marginal.own.size
    return NearMode(torch.zeros(inside), torch.zeros(inside, size), torch.zeros(size))


def near(inner: Inner, at: Tensor) -> NearMode:
    """Return the mode of the local sites as a linear function of z near points z, (S, K)."""
    return NearMode(inner.mode.mean(0), inner.slope.mean(0), at.mean(0))


def guess(near: NearMode, z: Tensor) -> Tensor:
    """Return a guess of the mode of the local sites at z, (D,), linear about the last one found."""
    return near.mode + near.slope @ (z - near.loc)


def visited(work: Visit, message: Tree, own: Tree, damping: float) -> tuple[Up, Tree]:
    """Return what a client sends after a visit, its factor's damped change, and what it keeps."""
    change: NaturalFactor = scaled(sub(work.q, factor_in(message)), damping)
    up: Up = {name: Share(value) for name, value in change._asdict().items()}
    after = FactorClientState(add(own.factor, change), work.near) if own else own
    return {**up, "improper": Share(work.improper)}, after


def newton_step(
    q: NaturalFactor, loc: Tensor, gradient: Tensor, hessian: Tensor, cavity: NaturalFactor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return precision and mean after a bounded Newton step on the tilted log density, and if proper."""
    precision = cavity.precision - hessian
    slope = gradient + cavity.shift - cavity.precision @ loc
    move = torch.linalg.inv_ex(precision).inverse @ slope
    return precision, loc + bounded(move, q), torch.linalg.eigvalsh(precision).amin() > 0.0


def renyi_step(
    q: NaturalFactor,
    loc: Tensor,
    gradient: Tensor,
    hessian: Tensor,
    cavity: NaturalFactor,
    order: float,
    full: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `newton_step` returns, where the divergence from the cavity is Renyi's."""
    covariance = torch.linalg.inv_ex(q.precision).inverse
    around = torch.linalg.inv_ex(cavity.precision).inverse
    mixed = torch.linalg.inv_ex(order * around + (1.0 - order) * covariance).inverse
    pull = mixed @ (loc - around @ cavity.shift)
    move = torch.linalg.inv_ex(mixed - hessian).inverse @ (gradient - pull)
    bent, along = mixed / order - hessian, math.sqrt(1.0 - order) * covariance @ pull
    if full:
        tril = torch.linalg.cholesky_ex(bent).L
        far = (tril.mT @ along).square().sum()
        longest = 0.5 * (1.0 / order + (order**-2 + 4.0 * far).sqrt())
        less = (order - 1.0 / longest) / far.clamp(min=1e-300)
        precision = order * bent - less * torch.outer(bent @ along, bent @ along)
    else:
        curvature = bent.diagonal()
        root = (order**-2 + 4.0 * curvature * along.square()).sqrt()
        precision = (2.0 * curvature / (1.0 / order + root)).diag()
    checked = torch.stack([bent, cavity.precision, precision])
    return precision, loc + bounded(move, q), torch.linalg.eigvalsh(checked).amin() > 0.0


def bounded(move: Tensor, q: NaturalFactor) -> Tensor:
    """Return a move of q's mean, shortened to `LONGEST` of its standard deviations."""
    return move * (LONGEST / length(move, q.precision).clamp(min=1e-300)).clamp(max=1.0)


def factor_guide(*, full: bool) -> Family:
    """Return the guide of q: Normal global sites, and Laplace's Normal of local ones."""
    return conditional(shared=full_normal if full else diagonal_normal, newton_steps=10)


def factor_server(
    marginal: Marginal,
    standard: Tensor,
    *,
    full: bool,
    down: Callable[[FactorServerState, Clock], Tree] = lambda state, clock: state.q._asdict(),
) -> Server:
    """Return the server, which adds the clients' changes to q; it refits a non-Gaussian prior."""

    def factor_of_prior(at: Tensor) -> NaturalFactor:
        with torch.no_grad(), unchecked():
            expansion = torch.vmap(marginal.prior)(at)
        precision = shaped(-expansion.hessian.mean(0), full)
        return NaturalFactor(expansion.gradient.mean(0) + precision @ at.mean(0), precision)

    def update(state: FactorServerState, means: dict[str, Tree], clock: Clock) -> FactorServerState:
        q: NaturalFactor = add(state.q, scaled(factor_in(means), clock.clients))
        loc, tril = proper(q)
        prior = factor_of_prior(loc + standard @ tril.T)  # unchanged where the prior is Gaussian
        q = add(q, sub(prior, state.prior))
        moved = length(proper(q)[0] - proper(state.q)[0], state.q.precision)
        return FactorServerState(q, prior, moved)

    def final(state: FactorServerState, clock: Clock) -> Tree:
        loc, _ = proper(state.q)
        params = normal_params(loc, state.q.precision)
        of_q = params if full else {n: params[n] for n in ("_shared.loc", "_shared.scale")}
        return {"params": of_q}

    middle = marginal.shared.start[None].detach()
    begin = factor_of_prior(middle)
    with torch.no_grad():
        ones = torch.ones(len(begin.shift))
        precision, raised = positive(begin.precision, 1e-3 * ones, fold=True)
    # a prior that does not curve down at its center starts with the nearest precision that does
    if bool(raised > 0.0) or not bool(torch.allclose(precision, begin.precision)):
        begin = NaturalFactor(precision @ middle[0], precision)
    return Server(
        FactorServerState(begin, begin, torch.tensor(torch.inf)),
        update=update,
        down=down,
        final=final,
        logged=lambda state: {"moved": float(state.moved)},
        wrong=wrong_change,
    )


def with_noise(plain: Server, *, full: bool) -> Server:
    """Return a factor server for sums of changes with noise, after which q bends as the prior at least."""

    def update(state: FactorServerState, means: dict[str, Tree], clock: Clock) -> Tree:
        count = clock.clients + len(clock.left_out)  # the noise is that of all who were asked
        q, prior = state.q.precision, state.prior.precision
        noisy = shaped(count * means["precision"], full)
        values, vectors = torch.linalg.eigh(q - prior + 0.5 * (noisy + noisy.mT))
        bent = prior + vectors @ (values.clamp(min=0.0)[:, None] * vectors.mT)
        mean_change = {"shift": means["shift"], "precision": (bent - q) / count}
        return plain.update(state, mean_change, clock._replace(clients=count))

    return replace(plain, update=update, wrong=None)


def wrong_change(message: Tree, up: Mapping[str, Any], rows: int) -> str | None:
    """Return what no honest client sends: a change after which q is no distribution, or None."""
    change, improper = up["precision"].value[0], float(up["improper"].value)
    if bool(((change - change.mT).abs() > 1e-4 * change.abs().max()).any()):
        return "the change of its factor's precision is not symmetric"
    if not bool(torch.linalg.eigvalsh(message["precision"] + change)[0] > 0.0):
        return "with the change of its factor the posterior is not a distribution"
    if not 0.0 <= improper <= 1.0:
        return f"it is improper by {improper:g}: it must be 0 to 1"
    return None


def shaped(precision: Tensor, full: bool) -> Tensor:
    """Return a precision (K, K), or its diagonal alone."""
    return precision if full else precision.diagonal(dim1=-2, dim2=-1).diag_embed()


def proper(q: NaturalFactor) -> tuple[Tensor, Tensor]:
    """Return mean (K,) and covariance's Cholesky factor (K, K); refuse an improper q."""
    smallest = float(torch.linalg.eigvalsh(q.precision)[0])
    if not smallest > 0.0:
        raise ValueError(
            "the product of the clients' factors is not a distribution (its precision has an "
            f"eigenvalue {smallest:.3g}): lower damping, or leave it at None, 1 / N"
        )
    return torch.linalg.solve(q.precision, q.shift), tril_of(q.precision)
