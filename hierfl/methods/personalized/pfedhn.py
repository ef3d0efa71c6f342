"""pFedHN: a hypernetwork on the server makes each client's params from its embedding.

    server:    client i gets w_i = h(e_i; phi)
    client i:  w <- w_i;  for every mini-batch:  w <- w - lr grad nll(w);  sends d_i = w_i - w
    server:    (phi, e_i) <- a step along  sum_i (dw_i / d(phi, e_i))' d_i, its norm clipped

Source: Shamsian et al. 2021, arXiv:2103.04628, Algorithm 1. There one client takes part in a round:
cohort=1. With more, their gradients are summed. A client that joins later keeps phi as it is, and
fits an embedding of its own. It is a link w_i = h(e_i; phi) with a flat prior; both are points.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from hierfl.core import noise
from hierfl.core.arguments import expect, spelled
from hierfl.core.trees import Tree, scaled, sub, tree_leaves, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Each, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, DescentState, common_params
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


@spelled
@dataclass(frozen=True)
class Mlp:
    """Dense layers of rectified units, and a dense layer for each tensor that comes out.

    At first the heads' biases are the model's own starting values, and their weights are small: all
    clients start near the model as it is. (The paper's code starts them at random.)

    Args:
        hidden: units of each hidden layer. Default: the authors', three of 100.
        spread: sd of what the embedding adds at first to a param, as a share of that tensor's own
            sd.
    """

    hidden: tuple[int, ...] = (100, 100, 100)
    spread: float = 0.1

    def start(self, like: Params, size: int, key: Tensor) -> Tree:
        """Return the first weights: `layers` and `heads`."""
        widths, layers = (size, *self.hidden), {}
        for i, (n, m) in enumerate(pairwise(widths)):
            drawn = noise.normals(noise.fold(key, noise.word(f"layer {i}")), (m, n))
            layers[f"{i}"] = {"weight": math.sqrt(2.0 / n) * drawn, "bias": torch.zeros(m)}
        heads = {}
        for name, v in like.items():
            drawn = noise.normals(
                noise.fold(key, noise.word(f"head {name}")), (v.numel(), widths[-1])
            )
            sd = v.std(correction=0) if v.numel() > 1 else torch.zeros(())
            wide = self.spread * torch.where(sd > 0.0, sd, 0.01) / math.sqrt(widths[-1])
            heads[name] = {"weight": wide * drawn, "bias": v.flatten().clone()}
        return {"layers": layers, "heads": heads}

    def params(self, weights: Tree, embedding: Tensor, like: Params) -> Params:
        """Return the params at an embedding (D,)."""
        z = embedding
        for layer in weights["layers"].values():
            z = torch.relu(layer["weight"] @ z + layer["bias"])
        heads = weights["heads"]
        return {
            name: (heads[name]["weight"] @ z + heads[name]["bias"]).view(v.shape)
            for name, v in like.items()
        }


class PFedHNClientState(NamedTuple):
    """A client's embedding, (D,), and the params that the server made of it, `mail`."""

    embedding: Tensor
    mail: Params


class Hypernetwork(NamedTuple):
    """Weights phi, as `Mlp.start` returns them, and the embeddings of N clients, (N, D)."""

    phi: Tree
    embedding: Tensor


@About(
    infers="personal models made by a network at the server from an embedding of each client",
    source="Shamsian et al. 2021, arXiv:2103.04628",
    common="a hypernetwork, at the server",
    own="weights it makes",
    kept="its weights",
    discloses="summaries",
    new="fits an embedding",
    down="to each client weights of its own",
    up="`away`, seen individually: how far training moved them; `loss`*",
)
def pfedhn(
    model: Model,
    *,
    hypernetwork: Mlp = Mlp(),
    embedding_size: int | None = None,
    optimizer: Optimizer = SGD(0.005, momentum=0.9),  # noqa: B008
    server_optimizer: Optimizer = SGD(0.01, momentum=0.9),  # noqa: B008
    clipping_norm: float | None = 50.0,
    steps: int = 50,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 64,
) -> Method:
    """Return pFedHN of a program whose params are all global, such as `hierfl.models.network`.

    Args:
        model: a program with global params and no latent sites.
        hypernetwork: of the server; a subclass may have other `start` and `params`. Defaults: the
            authors' for CIFAR-10, without their weight decay.
        embedding_size: D, size of a client's embedding. Default None: 1 + N / 4 for N clients.
        optimizer: of the client, restarted in each round.
        server_optimizer: of phi and the embeddings.
        clipping_norm: largest norm of the server's gradient; None: any.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ValueError: `embedding_size` is below 1, or `clipping_norm` is not above 0.
        ProgramError: (at fit) the model has latent sites or local params.
    """
    expect(
        embedding_size=(embedding_size, "[1, inf) or None"),
        clipping_norm=(clipping_norm, "(0, inf) or None"),
    )
    descent = Descent(optimizer, steps, unit, batch_size)

    def size(program: Program) -> int:
        return 1 + program.num_clients // 4 if embedding_size is None else embedding_size

    def client(program: Program) -> Client:
        like = common_params(program, "pfedhn")

        def start(message: Tree, own: PFedHNClientState) -> DescentState:
            return descent.begin(own.mail, own)

        def embed(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            own, at = work.beside, {"embedding": work.beside.embedding}

            def made(at: Params) -> Params:
                return hypernetwork.params(message["phi"], at["embedding"], like)

            pull = vjp(made, at)[1]
            gradient = _clipped(pull(sub(own.mail, work.w))[0], clipping_norm)
            at = step(server_optimizer, gradient, Stepped(at, server_optimizer.init(at))).params
            return work._replace(beside=PFedHNClientState(at["embedding"], made(at)))

        def finish(
            work: DescentState, message: Tree, own: PFedHNClientState, rows: Tensor
        ) -> tuple[Up, PFedHNClientState]:
            up: Up = {"away": Each(sub(own.mail, work.w)), "loss": Share(work.loss, rows)}
            return up, work.beside

        def new(message: Tree) -> PFedHNClientState:
            e = message["embedding"]
            return PFedHNClientState(e, hypernetwork.params(message["phi"], e, like))

        training = descent.on_likelihood(program)
        return Client(
            own=PFedHNClientState(torch.zeros(size(program)), like),
            start=start,
            phases=(training,),
            finish=finish,
            params=lambda message, own: own.mail,
            adapt=(training, Phase(embed, scores_rows=False)),
            new=new,
            mail=("mail",),
        )

    def server(program: Program) -> Server:
        like = common_params(program, "pfedhn")
        phi = hypernetwork.start(like, size(program), noise.root_key(program.seed))
        keys = noise.fold(program.client_keys, noise.word(f"embedding {program.seed}"))
        first = Hypernetwork(phi, noise.normals(keys, (size(program),)))

        def made(at: Hypernetwork) -> Params:
            of_embedding = torch.vmap(lambda e: hypernetwork.params(at.phi, e, like))
            return of_embedding(at.embedding)

        def update(state: Stepped, means: dict[str, Tree], clock: Clock) -> Stepped:
            reports = means["away"]

            def of_cohort(at: Hypernetwork) -> Tree:
                return tree_map(lambda v: v[reports.ids], made(at))

            pull = vjp(of_cohort, state.params)[1]
            gradient = _clipped(pull(reports.value)[0], clipping_norm)
            return step(server_optimizer, gradient, state)

        def final(state: Stepped, clock: Clock) -> Tree:
            return {"phi": state.params.phi, "embedding": state.params.embedding.mean(0)}

        return Server(
            Stepped(first, server_optimizer.init(first)),
            update,
            down=lambda state, clock: {},
            final=final,
            mail=lambda state: made(state.params),
        )

    return Method("pfedhn", model, delta, client, server, discloses="summaries")


def _clipped(gradient: Tree, norm_bound: float | None) -> Tree:
    if norm_bound is None:
        return gradient
    norm = sum(v.square().sum() for v in tree_leaves(gradient)) ** 0.5
    return scaled(gradient, (norm_bound / norm.clamp(min=1e-30)).clamp(max=1.0))
