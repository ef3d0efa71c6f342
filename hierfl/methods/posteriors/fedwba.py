"""FedWBA: particles of each client's posterior by Stein's method, and their Wasserstein barycenter.

    prior:   p(w) = (1 / P) sum_j N(w; x_j, diag b^2),   x the server's particles
    client:  w_i <- x_i;  w_i <- w_i + optimizer of
                 (1 / P) sum_j [ k(w_j, w_i) grad log(p(y_k | w_j) p(w_j)) + grad_{w_j} k(w_j, w_i) ]
    server:  x <- argmin_x sum_k a_k W_2(x, w_k)^2:   a few times, match x with each client's
             particles at the least cost, and move x_i to the mean of those matched with it

k(u, v) = exp(-|u - v|^2 / h), h the median of squared distances over log P, as by Liu and Wang
2016, arXiv:1608.04471. The barycenter of equally many particles of one weight is a fixed point of
matching and averaging (Cuturi and Doucet 2014, arXiv:1310.4375).

Source: "Personalized Bayesian Federated Learning with Wasserstein Barycenter Aggregation", 2025,
arXiv:2505.14161. Differences: widths b of the prior's kernels are Silverman's rule in each
dimension; and the server sees each client's particles, as it must.
"""

import math
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.func import grad_and_value

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.kept_draws import POINTS
from hierfl.guides.kept_draws import kept_draws as guide_of_draws
from hierfl.method import Client, Clock, Each, Method, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, DescentState, OwnParams, personal_client
from hierfl.methods.posteriors.fedpop import prior_draws
from hierfl.optimizers import Adam, Optimizer
from hierfl.program.program import Program, ProgramError
from hierfl.program.sites import Model

MATCHINGS = 5  # of a round at the server


@About(
    infers="particles of each client's posterior, and the barycenter of all clients' as its prior",
    source="FedWBA, 2025, arXiv:2505.14161",
    common="particles",
    own="sites",
    guide="particles",
    kept="its particles",
    discloses="summaries",
    down="the barycenter's particles",
    up="`particles`: its particles, (P, D); `loss`",
)
def fedwba(
    model: Model,
    *,
    particles: int = 10,
    optimizer: Optimizer = Adam(0.01),  # noqa: B008 (frozen)
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = None,
    prior_width: float | None = None,
) -> Method:
    """Return FedWBA of a program whose sites are all local, with a known prior.

    Args:
        model: such as `hierfl.models.bayesian_network(module, prior_loc="zero", prior_scale=1.0)`;
            its prior is drawn from for the first particles, and not used after.
        particles: P, of each client and of the barycenter.
        optimizer: of the particles, restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch, scaled to the size of all; None: all rows.
        prior_width: b, one number for all dimensions, > 0. None: Silverman's,
            (4 / (D + 2) / P)^(1 / (D + 4)) standard deviations of the server's particles.

    Raises:
        ValueError: `particles` is below 1, or `prior_width` is not above 0.
        ProgramError: (at fit) the model has something global, no local site, or a prior that cannot
            be drawn by a key.
    """
    expect(
        particles=(particles, "[1, inf)"),
        prior_width=(prior_width, "(0, inf) or None"),
    )

    descent = Descent(optimizer, steps, unit, batch_size, particles)

    def client(program: Program) -> Client:
        block = program.latents.local_block

        def nll(w: Tensor, batch: ClientBatch) -> Tensor:
            values, _ = block.unflatten(w[None, None])
            terms = program.log_likelihoods(values, batch, {})
            return -sum((term.sum() for term in terms.values()), torch.zeros(()))

        def move(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            w, prior = work.w["at"], message["particles"]

            def energy(particle: Tensor) -> tuple[Tensor, Tensor]:
                value = nll(particle, batch)
                return value - log_prior(particle, prior, prior_width), value

            slope, (_, value) = torch.vmap(grad_and_value(energy, has_aux=True))(w)
            return descent.stepped(work, {"at": -stein(w, -slope)}, value.mean())

        def finish(
            work: DescentState, message: Tree, own: OwnParams, rows: Tensor
        ) -> tuple[Up, OwnParams]:
            up: Up = {"particles": Each(work.w["at"]), "loss": Share(work.loss)}
            return up, OwnParams(work.w, torch.ones(()))

        return personal_client(
            OwnParams({"at": first_particles(program, particles)}, torch.zeros(())),
            lambda message, own: own._replace(params={"at": message["particles"]}),
            start=lambda message, own: descent.begin({"at": message["particles"]}),
            phases=(descent.taking(move),),
            finish=finish,
            params=lambda message, own: {POINTS: own.params["at"][None, None]},
        )

    def server(program: Program) -> Server:
        first = first_particles(program, particles)

        def update(state: Tensor, means: dict[str, Tree], clock: Clock) -> Tensor:
            return barycenter(state, means["particles"].value)

        return Server(first, update, down=lambda state, clock: {"particles": state})

    return Method(
        "fedwba",
        model,
        guide_of_draws(size=particles),
        client,
        server,
        discloses="summaries",
        traits=frozenset({"by rows"}),
    )


def first_particles(program: Program, count: int) -> Tensor:
    """Return draws of the program's prior, (P, D); refuse a program with something global."""
    above, sites = program.start()[0], program.latents.global_block.sites
    if above or sites:
        name = next(iter(above), None) or sites[0].name
        raise ProgramError(
            f"fedwba keeps all unknowns at clients, and '{name}' is global: give the sites a known "
            'prior, as bayesian_network(net, prior_loc="zero", prior_scale=1.0) does'
        )
    return prior_draws(program, {}, torch.arange(count, dtype=torch.int32))


def barycenter(start: Tensor, clouds: Tensor) -> Tensor:
    """Return particles (P, D) near the barycenter of clouds (C, P, D), from a start."""
    at = start
    for _ in range(MATCHINGS):
        cost = torch.cdist(at[None].expand_as(clouds), clouds).square().cpu().numpy()
        order = [torch.as_tensor(linear_sum_assignment(costs)[1]) for costs in cost]
        new = torch.stack([cloud[o] for cloud, o in zip(clouds, order, strict=True)]).mean(0)
        if torch.equal(new, at):
            break
        at = new
    return at


def log_prior(w: Tensor, particles: Tensor, width: float | None) -> Tensor:
    """Return the log density of the server's particles at w (D,), without its constant, ()."""
    count, size = particles.shape
    if width is None:
        spread = particles.std(0, correction=0).clamp(min=1e-3)
        widths = spread * (4.0 / (size + 2.0) / count) ** (1.0 / (size + 4.0))
    else:
        widths = torch.full((size,), width)
    return (-0.5 * ((w - particles) / widths).square().sum(-1)).logsumexp(0)


def stein(w: Tensor, slope: Tensor) -> Tensor:
    """Return Stein's direction of particles w (P, D) with gradients of the log density, (P, D)."""
    count = len(w)
    if count == 1:
        return slope
    differences = w[:, None] - w[None]
    square = differences.square().sum(-1)
    width = square.flatten().median().clamp(min=1e-12) / math.log(count)
    kernel = (-square / width).exp()
    push = (2.0 / width * kernel[..., None] * differences).sum(1)
    return (kernel @ slope + push) / count
