"""QLSD: draws of a global posterior by Langevin steps of the server, from quantized gradients.

With U_k = -log p(y_k | z) - log p(z) / N, client k's share of the pooled problem,

    client:  c_k = C(grad U_k(z) - e_k),    e_k <- e_k + a c_k
    server:  g = e + (N / S) sum_k c_k over the S clients of the round,    e <- e + a sum_k c_k
             z <- z - gamma g + sqrt(2 gamma T) xi,    xi ~ N(0, I)

    C(v)_i = |v| sign(v_i) l_i / s,    l_i a random rounding of s |v_i| / |v| to whole numbers

C is unbiased. The memory e_k, zero at first, makes what is rounded small where clients differ; a = 0
is QLSD without memory. The chain is not corrected: on a Gaussian of precision P its variance is
1 / (P (1 - gamma P / 2)) before rounding adds to it.

Source: Vono, Plassier, Durmus, Dieuleveut and Moulines 2022, arXiv:2106.00797; memory is that of
their QLSD++. Its gradients of mini-batches are corrected by a reference point; here they are plain.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.core.trees import DTYPES, Rounded, Tree, restored
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import empirical
from hierfl.guides.structured import structured
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.posteriors.chain_draws import ChainDraws, check_chain
from hierfl.methods.posteriors.common_sites import common_sites
from hierfl.program.program import Program
from hierfl.program.sites import Model

LEVELS = 127  # whole numbers in 8 bits


@About(
    infers="draws of one global posterior, by a Langevin chain of the server",
    source="Vono et al. 2022, arXiv:2106.00797",
    common="sites",
    guide="draws of a Langevin chain",
    kept="its memory, a vector",
    crosses="a gradient in 8 bits a number",
    new="the global posterior",
    down="the chain's state",
    up="`gradient`: what its gradient differs from its memory by, in 8 bits; `loss`",
)
def qlsd(
    model: Model,
    *,
    step_size: float = 1e-3,
    memory: float = 0.5,
    levels: int | None = 127,
    batch_size: int | None = None,
    burn_in: float = 0.5,
    draws: int = 1000,
    temperature: float = 1.0,
) -> Method:
    """Return QLSD of a program whose sites are all global; the posterior is draws of its chain.

    Args:
        model: as for `fola`, with any priors.
        step_size: gamma, > 0; it must stay below 2 / P, P the largest curvature of the pooled
            negative log posterior. A chain of too large steps diverges, which is refused.
        memory: a, in [0, 1], how fast a client's memory follows its gradient; 0: none. It must stay
            small where `levels` are few.
        levels: s, 1 to 127: levels above 0 of a rounded number; None: gradients cross unrounded.
        batch_size: rows of a mini-batch, scaled to the size of all; None: all.
        burn_in: fraction of the rounds before the first draw is kept, in [0, 1).
        draws: kept, evenly over the rounds after; if there are fewer such rounds, their states are
            repeated.
        temperature: of the noise, 0 or more; 0: the MAP estimate by gradient descent.

    Raises:
        ValueError: an option is outside its range; (during a fit) the chain diverged.
        ProgramError: (at fit) the model has local sites, or params without a prior.
    """
    check_chain(step_size, burn_in, draws, temperature)
    expect(memory=(memory, "[0, 1]"), levels=(levels, f"[1, {LEVELS}] or None"))
    return Method(
        "qlsd",
        model,
        structured(shared=partial(empirical, size=draws)),
        partial(_client, memory, levels, batch_size),
        partial(_server, step_size, memory, burn_in, draws, temperature),
        traits=frozenset({"by rows"} if levels is None else {"by rows", "rounded"}),
    )


def _client(memory: float, levels: int | None, batch_size: int | None, program: Program) -> Client:
    sites, block = common_sites(program, "qlsd"), program.latents.global_block

    def step(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        def loss(z: Tensor) -> Tensor:
            return sites.mean_loss(sites.pieces(z), batch) * batch.counts.sum()

        gradient, value = slope(loss, message["z"])
        difference = gradient - work["memory"]
        if levels is None:
            return {**work, "sent": difference, "loss": value}
        key = noise.fold(batch.key[0], noise.word("rounded"))
        return {**work, "sent": rounded_at_random(difference, levels, key), "loss": value}

    def start(message: Tree, own: Tree) -> Tree:
        zero = torch.zeros_like(message["z"])
        sent = zero if levels is None else Rounded(zero.to(DTYPES[8]), torch.zeros(()))
        return {"memory": own["memory"], "sent": sent, "loss": torch.zeros(())}

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        after = {"memory": own["memory"] + memory * restored(work["sent"])}
        return {"gradient": Share(work["sent"]), "loss": Share(work["loss"])}, after

    return Client(
        own={"memory": torch.zeros(block.size)},
        start=start,
        phases=(Phase(step, batch_size=batch_size),),
        finish=finish,
        params=lambda message, own: {"_shared.points": message["points"]},
        adapt=(),
    )


def rounded_at_random(vector: Tensor, levels: int, key: Tensor) -> Rounded:
    """Return C(v), whose mean over keys is v."""
    norm = vector.norm()
    exact = levels * vector.abs() / norm.clamp(min=1e-300)
    up = noise.uniforms(key, tuple(vector.shape), vector.dtype) < exact - exact.floor()
    numbers = vector.sign() * (exact.floor() + up)
    return Rounded(numbers.to(DTYPES[8]), norm / levels)


def _server(
    gamma: float, memory: float, burn_in: float, draws: int, temperature: float, program: Program
) -> Server:
    common_sites(program, "qlsd")
    begin = program.latents.global_block.start.detach()
    chain = ChainDraws(burn_in, draws)

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        gradient = state["memory"] + program.num_clients * means["gradient"]
        key = noise.fold(noise.root_key(program.seed), noise.word("qlsd"), clock.round)
        spread = math.sqrt(2.0 * gamma * temperature)
        z = state["z"] - gamma * gradient + spread * noise.normals(key, (len(begin),))
        held = state["memory"] + memory * clock.clients * means["gradient"]
        return {**chain.moved(state, z, clock, gamma), "memory": held}

    return Server(
        state={**chain.start(begin), "memory": torch.zeros_like(begin)},
        update=update,
        down=lambda state, clock: {"z": state["z"]},
        final=chain.final,
    )
