"""What many personalised methods share: on each mini-batch, K steps on what is the client's own, one on its copy of the rest.

pFedMe is this with a delta guide, pFedBayes with a mean-field one: the method is in the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributions import transform_to

from hierfl.core.trees import Tree, lerp
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Clock, Phase, Server, Share, Up, over_draws, slope
from hierfl.optimisers import Optimiser, Stepped, step
from hierfl.program.program import Params, Program, ProgramError, Terms


@dataclass(frozen=True)
class Alternating:
    """What tells these methods apart.

    Args:
        loss: (terms, rows of the client) -> (C,), of both kinds of step.
        local: optimiser of the client's own params, started anew each round.
        shared: optimiser of its copy of the global ones, likewise.
        inner: K, steps on own params for each mini-batch.
        steps: R, mini-batches a round.
        batch_size: rows a mini-batch; None: all.
        draws: of the guide, a step.
        restart: (program, global params) -> own params that a round starts from; None: those kept from the last one.
        by_rows: whether the mean of the clients' copies is weighted by their rows.
        beta: over-relaxation of the server.
    """

    loss: Callable[[Terms, Tensor], Tensor]
    local: Optimiser
    shared: Optimiser
    inner: int
    steps: int
    batch_size: int | None
    draws: int = 1
    restart: Callable[[Program, Params], Params] | None = None
    by_rows: bool = False
    beta: float = 1.0

    def client(self, program: Program) -> Client:
        """The client of one program."""
        above, mine = program.start()
        if not mine or not above:
            raise ProgramError(
                "this method needs local sites, and a learned prior above them: a pyro.param outside the clients plate"
            )

        def loss(theta: Params, phi: Params, batch: ClientBatch) -> Tensor:
            def one(b: ClientBatch) -> Tensor:
                return self.loss(program.terms({**theta, **phi}, b), b.counts)

            return over_draws(one, batch, self.draws, keyed=program.keyed)

        def start(message: Tree, own: Tree) -> Tree:
            phi = own["phi"] if self.restart is None else self.restart(program, message)
            return {
                "theta": Stepped(message, self.shared.init(message)),
                "phi": Stepped(phi, self.local.init(phi)),
                "loss": torch.zeros(()),
            }

        def move(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            theta, phi = lane["theta"], lane["phi"]
            for k in range(self.inner):
                again = batch.redrawn(k)
                gradient, _ = slope(partial(loss, theta.params, batch=again), phi.params)
                phi = step(self.local, gradient, phi)
            gradient, value = slope(lambda p: loss(p, phi.params, batch.redrawn(self.inner)), theta.params)
            return {"theta": step(self.shared, gradient, theta), "phi": phi, "loss": value}

        def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            weight = rows if self.by_rows else 1.0
            up = {"theta": Share(lane["theta"].params, weight), "loss": Share(lane["loss"], weight)}
            return up, {"phi": lane["phi"].params}

        return Client(
            own={"phi": mine},
            start=start,
            phases=(Phase(move, self.steps, batch_size=self.batch_size),),
            finish=finish,
            params=lambda message, own: {**message, **own["phi"]},
        )

    def server(self, program: Program) -> Server:
        """The server of one program: theta <- (1 - beta) theta + beta mean."""

        def update(theta: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            return lerp(theta, means["theta"], self.beta)

        return Server(program.start()[0], update)


def at_prior_mean(program: Program, theta: Params) -> Params:
    """Params of a `delta` guide at the middle of each local site's prior."""
    priors = program.priors(theta)
    return {f"{site.name}.at": site.transform.inv(priors[site.name].mean) for site in program.latents.local_block.sites}


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
    marked = {name: torch.where(value == 0.0, parts[name], value * (1.0 + 0.1 * parts[name])) for name, value in shared.items()}
    found = {}
    for name, value in at_prior(program, marked).items():
        flat = value.flatten()
        misses = {t: float((v.flatten() - flat).abs().max()) for t, v in marked.items() if v.numel() == len(flat)}
        twin = min(misses, key=lambda t: misses[t], default=None)
        if twin is None or misses[twin] > 1e-3 * float(flat.abs().max()):
            raise ProgramError(
                f"the prior's mean of site '{name.removesuffix('.at')}' is no global param, and this method moves the one by the other: "
                f"give it one, as bayesian_network(module, prior_scale=1.0) does"
            )
        found[name] = twin
    return found
