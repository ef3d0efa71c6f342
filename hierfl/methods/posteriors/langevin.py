"""Langevin chains of a global posterior, of the server (QLSD) or of clients (FALD).

With U_k = -log p(y_k | z) - log p(z) / N, client k's share of the pooled problem, and S clients in
the round, QLSD steps at the server, from quantized gradients:

    client:  c_k = C(grad U_k(z) - e_k),    e_k <- e_k + a c_k
    server:  g = e + (N / S) sum_k c_k over the clients of the round,    e <- e + a sum_k c_k
             z <- z - gamma g + sqrt(2 gamma T) xi,    xi ~ N(0, I)

    C(v)_i = |v| sign(v_i) l_i / s,    l_i a random rounding of s |v_i| / |v| to whole numbers

C is unbiased. The memory e_k, zero at first, makes what is rounded small where clients differ; a = 0
is QLSD without memory. The chain is not corrected: on a Gaussian of precision P its variance is
1 / (P (1 - gamma P / 2)) before rounding adds to it.

Source: Vono, Plassier, Durmus, Dieuleveut and Moulines 2022, arXiv:2106.00797; memory is that of
their QLSD++. Its gradients of mini-batches are corrected by a reference point; here they are plain.

FALD's clients take local steps, averaged at the end of each round:

    client:  z_k <- z;  K times  z_k <- z_k - gamma N grad U_k(z_k) + sqrt(2 gamma T) e_k,
             e_k = r xi + sqrt((1 - r^2) S) xi_k,    xi ~ N(0, I) the clients' own, xi_k of each
    server:  z <- mean_k z_k

so that the noise of the mean is N(0, 2 gamma T) for every r. A round is K steps of the pooled chain
where clients are similar. Where they differ, local steps lead each toward its own posterior, and the
chain is off by a distance of the order of gamma K; own noise adds to that, and hides a client's
steps from who sees the common noise.

Source: Deng, Zhang, Ma, Song and Lin 2024, UAI, arXiv:2112.05120. Differences: clients count
equally, each as if all were like it; and own noise is scaled by the clients of the round.
"""

import math
from functools import partial
from typing import NamedTuple

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
from hierfl.methods.posteriors.common_sites import CommonSites, common_sites
from hierfl.program.program import Program
from hierfl.program.sites import Model


class LangevinChain(NamedTuple):
    """What a server keeps of a chain of K numbers."""

    z: Tensor  # (K,), the state
    points: Tensor  # (draws, K), the states kept
    kept: Tensor  # (), how many were

    @classmethod
    def begin(cls, z: Tensor, draws: int) -> "LangevinChain":
        """Return the chain before the first round."""
        return cls(z, z.expand(draws, -1).clone(), torch.zeros(()))

    def moved(self, z: Tensor, clock: Clock, step_size: float, burn_in: float) -> "LangevinChain":
        """Return the chain after a round that led to z; refuse one that diverged."""
        if not bool(z.isfinite().all()):
            raise ValueError(
                f"the chain diverged in round {clock.round}: lower step_size ({step_size:g})"
            )
        draws, first = len(self.points), math.ceil(burn_in * clock.rounds)
        every = max(1, (clock.rounds - first) // draws)
        if clock.round < first or (clock.round - first) % every:
            return self._replace(z=z)
        points = self.points.clone()
        points[int(self.kept) % draws] = z
        return LangevinChain(z, points, self.kept + 1.0)

    def final(self) -> Tree:
        """Return the state and the draws, repeated where the rounds were fewer."""
        draws, count = len(self.points), min(int(self.kept), len(self.points))
        which = torch.arange(draws) % max(1, count)
        return {
            "z": self.z,
            "points": self.points[which] if count else self.z.expand(draws, -1).clone(),
        }


def check_chain(step_size: float, burn_in: float, draws: int, temperature: float) -> None:
    """Refuse options of a chain that are out of range."""
    expect(
        step_size=(step_size, "(0, inf)"),
        burn_in=(burn_in, "[0, 1)"),
        draws=(draws, "[1, inf)"),
        temperature=(temperature, "[0, inf)"),
    )


def _loss(sites: CommonSites, batch: ClientBatch, z: Tensor) -> Tensor:
    """Return U_k of the batch's rows."""
    return sites.mean_loss(sites.pieces(z), batch) * batch.counts.sum()


LEVELS = 127  # whole numbers in 8 bits


class QLSDWork(NamedTuple):
    """A client's memory, (K,), what it sends, (K,), and the loss, ()."""

    memory: Tensor
    sent: Tensor | Rounded
    loss: Tensor


class QLSDServerState(NamedTuple):
    """The chain, and the sum of the clients' memories, (K,)."""

    chain: LangevinChain
    memory: Tensor


@About(
    infers="draws of one global posterior, by a Langevin chain of the server",
    source="Vono et al. 2022, arXiv:2106.00797",
    common="sites",
    guide="draws of a Langevin chain",
    kept="its memory, a vector",
    new="the global posterior",
    down="the chain's state",
    up="`gradient`: the difference between its gradient and its memory, in 8 bits; `loss`",
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

    def client(program: Program) -> Client:
        sites, block = common_sites(program, "qlsd"), program.latents.global_block

        def step(work: QLSDWork, message: Tree, batch: ClientBatch) -> QLSDWork:
            gradient, value = slope(partial(_loss, sites, batch), message["z"])
            difference = gradient - work.memory
            if levels is None:
                return QLSDWork(work.memory, difference, value)
            key = noise.fold(batch.key[0], noise.word("rounded"))
            return QLSDWork(work.memory, rounded_at_random(difference, levels, key), value)

        def start(message: Tree, own: Tensor) -> QLSDWork:
            zero = torch.zeros_like(message["z"])
            sent = zero if levels is None else Rounded(zero.to(DTYPES[8]), torch.zeros(()))
            return QLSDWork(own, sent, torch.zeros(()))

        def finish(work: QLSDWork, message: Tree, own: Tensor, rows: Tensor) -> tuple[Up, Tensor]:
            after = own + memory * restored(work.sent)
            return {"gradient": Share(work.sent), "loss": Share(work.loss)}, after

        return Client(
            own=torch.zeros(block.size),  # e_k
            start=start,
            phases=(Phase(step, batch_size=batch_size),),
            finish=finish,
            params=lambda message, own: {"_shared.points": message["points"]},
            adapt=(),
        )

    def server(program: Program) -> Server:
        begin = program.latents.global_block.start.detach()

        def update(state: QLSDServerState, means: dict[str, Tree], clock: Clock) -> QLSDServerState:
            gradient = state.memory + program.num_clients * means["gradient"]
            key = noise.fold(noise.root_key(program.seed), noise.word("qlsd"), clock.round)
            wide = math.sqrt(2.0 * step_size * temperature)
            z = state.chain.z - step_size * gradient + wide * noise.normals(key, (len(begin),))
            held = state.memory + memory * clock.clients * means["gradient"]
            return QLSDServerState(state.chain.moved(z, clock, step_size, burn_in), held)

        return Server(
            QLSDServerState(LangevinChain.begin(begin, draws), torch.zeros_like(begin)),
            update=update,
            down=lambda state, clock: {"z": state.chain.z},
            final=lambda state, clock: state.chain.final(),
        )

    return Method(
        "qlsd",
        model,
        structured(shared=partial(empirical, size=draws)),
        client,
        server,
        traits=frozenset({"by rows"} if levels is None else {"by rows", "rounded"}),
    )


def rounded_at_random(vector: Tensor, levels: int, key: Tensor) -> Rounded:
    """Return C(v), whose mean over keys is v."""
    norm = vector.norm()
    exact = levels * vector.abs() / norm.clamp(min=1e-300)
    up = noise.uniforms(key, tuple(vector.shape), vector.dtype) < exact - exact.floor()
    numbers = vector.sign() * (exact.floor() + up)
    return Rounded(numbers.to(DTYPES[8]), norm / levels)


class FALDWork(NamedTuple):
    """A client's copy of the chain's state, (K,), and the last loss, ()."""

    z: Tensor
    loss: Tensor


@About(
    infers="draws of one global posterior, by a Langevin chain with local steps",
    source="Deng et al. 2024, arXiv:2112.05120",
    common="sites",
    guide="draws of a Langevin chain",
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
        burn_in: burn_in and draws: as for `qlsd`.
        draws: kept of the chain.
        temperature: of the noise, T, 0 or more; 0: FedAvg by gradient descent with the prior.

    Raises:
        ValueError: an option is outside its range; (during a fit) the chain diverged.
        ProgramError: (at fit) the model has local sites, or params without a prior.
    """
    check_chain(step_size, burn_in, draws, temperature)
    expect(common_noise=(common_noise, "[0, 1]"), steps=(steps, "[1, inf)"))
    spread = math.sqrt(2.0 * step_size * temperature)

    def client(program: Program) -> Client:
        sites, count = common_sites(program, "fald"), float(program.num_clients)

        def step(work: FALDWork, message: Tree, batch: ClientBatch) -> FALDWork:
            gradient, value = slope(partial(_loss, sites, batch), work.z)
            z = work.z - step_size * count * gradient
            if spread:
                word, shape = noise.word("fald"), tuple(z.shape)
                ours = noise.normals(noise.fold(batch.shared_key, word), shape)
                own = noise.normals(noise.fold(batch.key[0], word), shape)
                wide = ((1.0 - common_noise**2) * message["clients"]).sqrt()
                z = z + spread * (common_noise * ours + wide * own)
            return FALDWork(z, value)

        def finish(work: FALDWork, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            return {"z": Share(work.z), "loss": Share(work.loss)}, own

        return Client(
            own={},
            start=lambda message, own: FALDWork(message["z"], torch.zeros(())),
            phases=(Phase(step, steps, batch_size=batch_size),),
            finish=finish,
            params=lambda message, own: {"_shared.points": message["points"]},
            adapt=(),
        )

    def update(state: LangevinChain, means: dict[str, Tree], clock: Clock) -> LangevinChain:
        return state.moved(means["z"], clock, step_size, burn_in)

    def down(state: LangevinChain, clock: Clock) -> Tree:
        return {"z": state.z, "clients": torch.tensor(float(max(1, clock.clients)))}

    def server(program: Program) -> Server:
        return Server(
            state=LangevinChain.begin(program.latents.global_block.start.detach(), draws),
            update=update,
            down=down,
            final=lambda state, clock: state.final(),
        )

    return Method(
        "fald",
        model,
        structured(shared=partial(empirical, size=draws)),
        client,
        server,
        traits=frozenset({"by rows"}),
    )
