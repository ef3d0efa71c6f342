"""FedPop: each client runs a Langevin chain of its local sites; global sites and params are points.

    client:  z <- its chain's last state (first: a draw of the prior);  for every mini-batch:
                 z <- z - gamma grad U(z) + sqrt(2 gamma) noise
                 U(z) = NLL_k(theta, z) - log p(z | theta)
             after the burn-in, keep z, and add up  g_k = mean grad_theta U
    server:  theta <- theta - SGD or Adam of  (N / S) sum_k g_k - grad log p(theta),  S of N clients

By Fisher's identity the server's sum is the gradient of the log marginal likelihood, with z
integrated out.

Source: Kotelevskii, Vono, Moulines and Durmus 2022, arXiv:2206.03611, Algorithm 1 (FedSOUL). This
follows the paper, not its code, which leaves the noise out, steps theta at one client after
another, and returns the best of all rounds on the test rows. The paper's chain is not corrected: on
a Gaussian of precision P its variance is 1 / (P (1 - gamma P / 2)). `stiffness` in the history is
the mean of gamma P, P the curvature along each client's steps; where it is 2 or more the chain
diverges, and the client fails. With `metropolis=True` each step is accepted or rejected (MALA:
Roberts and Tweedie 1996, Bernoulli 2(4), section 1.4.2), so that the draws are of the posterior
given theta.

Its Bayesian part are the local sites, by draws that clients keep (the guide). What is global is a
point, at the mode of its marginal posterior, or of its marginal likelihood where it has no prior.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, chosen, scaled, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.kept_draws import POINTS
from hierfl.guides.kept_draws import kept_draws as guide_of_draws
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import personal_client, stepping_server
from hierfl.optimizers import Adam, Optimizer
from hierfl.program.handlers import KeyedNoise, NoKeyedDraw, draw, log_joint, unchecked
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Model, Values

DIVERGES = 2.0  # gamma times the curvature from which a chain diverges


class FedPopClientState(NamedTuple):
    """The state of the chain, (D,), the last draws, (kept_draws, D), and `seen`, ()."""

    z: Tensor
    points: Tensor
    seen: Tensor


class ChainPoint(NamedTuple):
    """A state z (D,) of the chain, and the slope of U in it; of proposals also that in theta, and U, ()."""

    z: Tensor
    slope: Tensor
    theta: Params
    loss: Tree


class FedPopWork(NamedTuple):
    """A client's chain in a round, of `taken` steps, ()."""

    at: Tensor  # (D,), the state, or the next proposal
    last: ChainPoint
    seen: Tensor  # (), 1 if the chain has begun
    draws: Tensor  # (steps - burn_in, D)
    gradient: Params  # mean of those in theta
    taken: Tensor
    loss: Tensor  # (), the last
    measured: Tensor  # (1,), accepted proposals; or (2,), squares of moves and of changes of slope


@About(
    infers="Langevin draws of each client's local sites, and point estimates of the common parameters",
    source="Kotelevskii et al. 2022, arXiv:2206.03611",
    common="params",
    own="sites",
    guide="draws of a Langevin chain",
    kept="state and last draws of its chain",
    new="runs a chain of its own",
    down="the common params",
    up=(
        "`gradient`: its mean gradient in the common params; `loss`; `stiffness`: one "
        "scalar (two with `metropolis=True`: acceptance, and how often a chain was stuck)"
    ),
)
def fedpop(
    model: Model,
    *,
    step_size: float = 1e-3,
    steps: int = 10,
    burn_in: int = 5,
    batch_size: int | None = None,
    kept_draws: int = 100,
    temperature: float = 1.0,
    server_optimizer: Optimizer = Adam(0.001),  # noqa: B008 (frozen)
    schedule: Literal["constant", "cosine"] = "constant",
    metropolis: bool = False,
) -> Method:
    """Return FedPop of a hierarchical program; clients keep their chain and their last draws.

    Args:
        model: with local sites; what is global, sites or params, is estimated by a point.
        step_size: gamma, of the chain, > 0. It must stay below 2 / P, P the largest curvature of
            any client's U, and well below 1 / P for draws of the right spread: where a prior's
            scale is learned and rows say little of it, an excess of a few per cent in the spread of
            z adds up to much more in that scale. Non-centered programs (effects in units of their
            prior) suffer less. Default: hierfl's own choice.
        steps: M, steps of the chain in a round. Defaults of steps, burn_in, batch_size and
            server_optimizer: the authors' code.
        burn_in: steps of each round before draws are kept, below `steps`.
        batch_size: rows of a mini-batch, scaled to the size of all; None: all rows.
        kept_draws: the last draws that a client keeps for predictions, of all its rounds.
        temperature: of the noise; 1: draws of the posterior. 0: none, the MAP estimate of z by
            gradient descent.
        server_optimizer: of the server, on the gradient of minus the log marginal posterior.
        schedule: of the server's steps. "cosine": they fall to 0 in the last round, so that theta
            and the draws come to rest. Default "constant" (the authors' code multiplies by 0.7
            twice).
        metropolis: accept or reject each step by Metropolis and Hastings, on all rows, so that the
            spread of the draws is right at any `step_size`. Each round evaluates its first state
            again, so it makes steps - 1 proposals. The history has `accepted`, the proportion
            accepted, in place of `stiffness`, and `stuck`, the proportion of clients that accepted
            none in the round; lower `step_size` until `accepted` is above about 0.6. Default False:
            the paper's chain.

    Raises:
        ValueError: `step_size` is not above 0, `burn_in` is negative or not below `steps`,
            `kept_draws` is below 1, `temperature` is negative, or `schedule` is neither "constant"
            nor "cosine". `metropolis` is with mini-batches, a single step or temperature 0.
        ProgramError: (at fit) the model has no local site, or a prior that cannot be drawn by a
            key.
    """
    expect(
        step_size=(step_size, "(0, inf)"),
        temperature=(temperature, "[0, inf)"),
        kept_draws=(kept_draws, "[1, inf)"),
        burn_in=(burn_in, f"[0, {steps})"),
        schedule=(schedule, ("constant", "cosine")),
    )
    if metropolis and (batch_size is not None or steps < 2 or not temperature):
        raise ValueError(
            f"metropolis is True with batch_size {batch_size}, steps {steps} and temperature "
            f"{temperature}: use all rows (None), 2 or more steps, and a temperature above 0"
        )

    def accepts(last: ChainPoint, here: ChainPoint, batch: ClientBatch) -> Tensor:
        """Return 1 where the step from `last` to `here` is accepted, else 0, ()."""
        forth = here.z - last.z + step_size * last.slope
        back = last.z - here.z + step_size * here.slope
        lead = (forth.square().sum() - back.square().sum()) / (4.0 * step_size)
        key = noise.fold(batch.key[0], noise.word("accept"))
        level = noise.uniforms(key, ()).log() * temperature
        return (level < last.loss - here.loss + lead).to(level.dtype)

    def measures(measured: Tensor) -> dict[str, Share]:
        """Return what a round tells of its steps: how stiff, or how often accepted."""
        if metropolis:
            return {
                "accepted": Share(measured[0] / (steps - 1)),
                "stuck": Share(1.0 * (measured[0] == 0.0)),
            }
        moved, bent = measured.unbind()
        stiff = step_size * (bent / moved.clamp(min=1e-300)).sqrt()
        return {"stiffness": Share(torch.where(stiff < DIVERGES, stiff, torch.nan))}

    def langevin_noise(batch: ClientBatch, size: int) -> Tensor | float:
        """Return the noise of a step, (D,); 0 at temperature 0."""
        if not temperature:
            return 0.0
        key = noise.fold(batch.key[0], noise.word("langevin"))
        return math.sqrt(2.0 * step_size * temperature) * noise.normals(key, (size,))

    def client(program: Program) -> Client:
        above, _ = program.start()
        size, draws = program.latents.local_block.size, steps - burn_in
        # refuses a program without local sites before the first round
        prior_draws(program, above, torch.zeros(1, dtype=torch.int32))

        def first(message: Params, own: FedPopClientState) -> FedPopClientState:
            numbers = torch.arange(kept_draws, dtype=torch.int32)
            return own._replace(points=prior_draws(program, message, numbers))

        def start(message: Params, own: FedPopClientState) -> FedPopWork:
            zero, last = torch.zeros(()), ChainPoint(own.z, torch.zeros(size), {}, ())
            if metropolis:
                last = last._replace(theta=zeros_like(message), loss=zero)
            measured = torch.zeros(1 if metropolis else 2)
            drawn, gradient = torch.zeros(draws, size), zeros_like(message)
            return FedPopWork(own.z, last, own.seen, drawn, gradient, zero, zero, measured)

        def begin(work: FedPopWork, message: Params, batch: ClientBatch) -> FedPopWork:
            which = (batch.key[0, :1].long() & 0x7FFFFFFF) % kept_draws
            drawn = prior_draws(program, message, which.int())[0]
            return work._replace(at=chosen(work.seen, work.at, drawn))

        def move(work: FedPopWork, message: Params, batch: ClientBatch) -> FedPopWork:
            at = {"theta": message, "z": work.at}
            gradient, value = slope(lambda u: energy(program, u["theta"], u["z"], batch), at)
            state, of_theta = ChainPoint(work.at, gradient["z"], {}, ()), gradient["theta"]
            if metropolis:
                here = state._replace(theta=of_theta, loss=value)
                accepted = accepts(work.last, here, batch)
                measured = accepted[None]
                state = chosen(accepted + (work.taken == 0.0), here, work.last)
                of_theta, value = state.theta, state.loss
            else:
                moves = state.z - work.last.z, state.slope - work.last.slope
                measured = torch.stack([v.square().sum() for v in moves])
            late = work.taken - burn_in
            now = (torch.arange(draws) == late).to(late.dtype)
            mean = torch.where(late >= 0.0, 1.0 / draws, 0.0)
            return FedPopWork(
                at=state.z - step_size * state.slope + langevin_noise(batch, size),
                last=state,
                seen=work.seen,
                draws=torch.where(now[:, None] > 0.0, state.z, work.draws),
                gradient=tree_map(lambda s, g: s + mean * g, work.gradient, of_theta),
                taken=work.taken + 1.0,
                loss=value,
                measured=work.measured + (work.taken > 0.0) * measured,
            )

        def finish(
            work: FedPopWork, message: Params, own: FedPopClientState, rows: Tensor
        ) -> tuple[Up, FedPopClientState]:
            up: Up = {"gradient": Share(work.gradient), "loss": Share(work.loss)}
            # at first all kept draws are of the first round, so that none is of the prior
            whole = work.draws.repeat(math.ceil(kept_draws / draws), 1)[-kept_draws:]
            later = torch.cat([own.points, work.draws])[-kept_draws:]
            z = work.last.z if metropolis else work.at
            after = FedPopClientState(z, chosen(own.seen, later, whole), torch.ones(()))
            return {**up, **measures(work.measured)}, after

        return personal_client(
            FedPopClientState(torch.zeros(size), torch.zeros(kept_draws, size), torch.zeros(())),
            first,
            start=start,
            phases=(
                Phase(begin, batch_size=1, scores_rows=False),
                Phase(move, steps, batch_size=batch_size),
            ),
            finish=finish,
            params=lambda message, own: {**message, POINTS: own.points[None, None]},
        )

    def rate(clock: Clock) -> float:
        falls = schedule == "cosine"
        return 0.5 * (1.0 + math.cos(math.pi * clock.round / clock.rounds)) if falls else 1.0

    def server(program: Program) -> Server:
        def gradient(means: dict[str, Tree]) -> Tree:
            return scaled(means["gradient"], program.num_clients)

        return stepping_server(program.start()[0], server_optimizer, gradient, rate=rate)

    guide = guide_of_draws(size=kept_draws)
    return Method("fedpop", model, guide, client, server, traits=frozenset({"by rows"}))


def energy(program: Program, theta: Params, z: Tensor, batch: ClientBatch) -> Tensor:
    """Return U(z) - log p(theta) / N of one client, (), at unconstrained z (D,) and theta."""
    values, jacobians = program.latents.local_block.unflatten(z[None, None])
    own, above = log_joint(program.model, {**_globals(program, theta), **values}, batch, theta)
    bent = sum((j.sum() for j in jacobians.values()), torch.zeros(()))
    return -own.sum() - bent - program.share * above


def _globals(program: Program, theta: Params) -> Values:
    return {
        site.name: site.constrain(theta[f"{site.name}.at"])[0]
        for site in program.latents.global_block.sites
    }


def prior_draws(program: Program, theta: Params, numbers: Tensor) -> Tensor:
    """Return unconstrained draws (S, D) of any client's local prior, one for each number."""
    block = program.latents.local_block
    if not block.size:
        raise ProgramError("fedpop needs local sites: give each client weights of its own")
    with unchecked():
        priors = program.priors(theta, _globals(program, theta))

        def one(number: Tensor) -> Tensor:
            values = {}
            for name, prior in priors.items():
                key = noise.fold(noise.root_key(0), noise.word(name), number)[None]
                values[name] = draw(prior, KeyedNoise(key, axis=len(prior.batch_shape) - 2))
            return block.flatten(values)[0, 0]

        try:
            return torch.vmap(one)(numbers)
        except NoKeyedDraw as error:
            raise ProgramError(
                f"a chain starts at a draw of the prior, and {error} cannot be drawn by a key: "
                "use another prior, such as a LogNormal for a Gamma"
            ) from error
