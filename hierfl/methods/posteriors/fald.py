"""FALD: a Langevin chain whose clients take local steps, averaged at the end of each round.

With U_k = -log p(y_k | z) - log p(z) / N, client k's share of the pooled problem, and S clients in
the round,

    client:  z_k <- z;  K times  z_k <- z_k - gamma N grad U_k(z_k) + sqrt(2 gamma T) e_k,
             e_k = r xi + sqrt((1 - r^2) S) xi_k,    xi ~ N(0, I) the clients' own, xi_k of each
    server:  z <- mean_k z_k

so that the noise of the mean is N(0, 2 gamma T) for every r. A round is K steps of the pooled chain
where clients are alike. Where they differ, local steps lead each toward its own posterior, and the
chain is off by a distance of the order of gamma K; own noise adds to that, and hides a client's
steps from who sees the common noise.

Source: Deng, Zhang, Ma, Song and Lin 2024, UAI, arXiv:2112.05120. Differences: clients count
equally, each as if all were like it; and own noise is scaled by the clients of the round.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import empirical
from hierfl.guides.structured import structured
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.posteriors.chain_draws import ChainDraws, check_chain
from hierfl.methods.posteriors.common_sites import common_sites
from hierfl.program.program import Program
from hierfl.program.sites import Model


@About(
    infers="draws of one global posterior, by a Langevin chain with local steps",
    source="Deng et al. 2024, arXiv:2112.05120",
    common="sites",
    guide="draws of a Langevin chain",
    crosses="its copy of the chain's state",
    new="the global posterior",
    down="the chain's state, and the number of clients in the round",
    up="`z`: where its steps led; `loss`",
)
def fald(
    model: Model,
    *,
    step_size: float = 1e-4,
    steps: int = 10,
    batch_size: int | None = None,
    common_noise: float = 0.0,
    burn_in: float = 0.5,
    draws: int = 1000,
    temperature: float = 1.0,
) -> Method:
    """Return FALD of a program whose sites are all global; the posterior is draws of its chain.

    Args:
        model: as for `qlsd`.
        step_size: gamma, > 0; it must stay below 2 / (N P_k), P_k the largest curvature of U_k. The
            default is ours: choose it by the data.
        steps: K, local steps of a round. 1: unrounded `qlsd` without memory.
        batch_size: rows of a mini-batch, scaled to the size of all; None: all.
        common_noise: r, in [0, 1]: the part of the noise that clients have in common.
        burn_in: fraction of the rounds before the first draw is kept, in [0, 1).
        draws: kept, evenly over the rounds after; if there are fewer such rounds, their states are
            repeated.
        temperature: of the noise, T, 0 or more; 0: FedAvg by gradient descent with the prior.

    Raises:
        ValueError: an option is outside its range; (during a fit) the chain diverged.
        ProgramError: (at fit) the model has local sites, or params without a prior.
    """
    check_chain(step_size, burn_in, draws, temperature)
    expect(common_noise=(common_noise, "[0, 1]"), steps=(steps, "[1, inf)"))
    spread = math.sqrt(2.0 * step_size * temperature)
    return Method(
        "fald",
        model,
        structured(shared=partial(empirical, size=draws)),
        partial(_client, step_size, steps, batch_size, common_noise, spread),
        partial(_server, step_size, ChainDraws(burn_in, draws)),
        traits=frozenset({"by rows"}),
    )


def _client(
    gamma: float,
    steps: int,
    batch_size: int | None,
    common: float,
    spread: float,
    program: Program,
) -> Client:
    sites, count = common_sites(program, "fald"), float(program.num_clients)

    def step(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        def loss(z: Tensor) -> Tensor:
            return sites.mean_loss(sites.pieces(z), batch) * batch.counts.sum()

        gradient, value = slope(loss, work["z"])
        z = work["z"] - gamma * count * gradient
        if spread:
            word, shape = noise.word("fald"), tuple(z.shape)
            ours = noise.normals(noise.fold(batch.shared_key, word), shape)
            own = noise.normals(noise.fold(batch.key[0], word), shape)
            wide = ((1.0 - common**2) * message["clients"]).sqrt()
            z = z + spread * (common * ours + wide * own)
        return {"z": z, "loss": value}

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        return {"z": Share(work["z"]), "loss": Share(work["loss"])}, own

    return Client(
        own={},
        start=lambda message, own: {"z": message["z"], "loss": torch.zeros(())},
        phases=(Phase(step, steps, batch_size=batch_size),),
        finish=finish,
        params=lambda message, own: {"_shared.points": message["points"]},
        adapt=(),
    )


def _server(gamma: float, chain: ChainDraws, program: Program) -> Server:
    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        return chain.moved(state, means["z"], clock, gamma)

    return Server(
        state=chain.start(program.latents.global_block.start.detach()),
        update=update,
        down=lambda state, clock: {
            "z": state["z"],
            "clients": torch.tensor(float(max(1, clock.clients))),
        },
        final=chain.final,
    )
