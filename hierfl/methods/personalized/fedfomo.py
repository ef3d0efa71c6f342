"""FedFomo: each client moves toward others' models that are better on its validation rows.

    client i:  theta_i: its model before its last training; theta_n: models that the server sends, and its own last one
               s_n <- (L_i(theta_i) - L_i(theta_n)) / |theta_n - theta_i|        L_i: nll on its validation rows
               theta_i <- theta_i + sum_n w_n (theta_n - theta_i),   w_n = max(s_n, 0) / sum of these
               for every mini-batch of its other rows:  w <- w - lr grad nll(w), from theta_i;  sends w and all s_n
    server:    P_in <- P_in + s_n;  sends client i the models of the M clients of the largest P_in, a random one in
               place of each with probability eps

Source: Zhang et al. 2021, arXiv:2012.08565, Eqs. (3) and (4) and Algorithm 1. A client's own last
model does not count among the M here, and is never sent back. Where no s_n is positive, theta_i
stays. The README of the authors' code compares with the client's first model; the paper, and this,
with the previous one.

Nothing in it is Bayesian: it is a heuristic average of models.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, chosen, tree_leaves, tree_map, with_rows
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Each, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, DescentState, common_params
from hierfl.methods.parts.stacked import at_each, mean_of, of_each
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model

LEAST = 1e-12  # distance of two models that are one
EXPLORE, DECAY = 0.3, 0.05  # eps of the first round, and by how much it falls in each: the authors'


class FedFomoClientState(NamedTuple):
    """A client's model before and after its last training, and those of M others, `mail`; `seen`, ()."""

    before: Params
    last: Params
    mail: Tree
    seen: Tensor


class FedFomoRound(NamedTuple):
    """What a client holds while it trains: its state, `before` moved, and the scores s_n, (M,)."""

    own: FedFomoClientState
    scores: Tensor


class FedFomoServerState(NamedTuple):
    """Models of N clients, who has trained (N,), P (N, N), and whose models each gets (N, M), if they are `there`."""

    w: Params
    seen: Tensor
    affinity: Tensor
    picked: Tensor
    there: Tensor


@About(
    infers="personal models, each moved toward those of others that score well on its validation rows",
    source="Zhang et al. 2021, arXiv:2012.08565",
    common="none",
    own="weights",
    kept="its weights before and after training, and those of M others",
    discloses="summaries",
    new="moves from the mean to the best",
    down="to each client the weights of M others",
    up="`model`, seen individually: its weights after training, and M scores; `loss`*",
)
def fedfomo(
    model: Model,
    *,
    validation: str | None = None,
    models: int = 5,
    optimizer: Optimizer = SGD(0.1),  # noqa: B008 (frozen)
    steps: int = 5,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 50,
) -> Method:
    """Return FedFomo of a program whose params are all global, such as `hierfl.models.network`.

    Args:
        model: a program with global params and no latent sites.
        validation: row field that is above 0 at validation rows, which are not trained on; the
            authors hold a fifth out. Default None: all rows serve for both, so that a client's own
            model looks best to it.
        models: M, of other clients, 0 or more; 0: each client alone, unless training makes its
            validation loss worse. Defaults: the authors'.
        optimizer: of the client, restarted in each round.
        steps: passes over the rows of a round, or mini-batches (`unit`).
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ValueError: `models` is negative.
        ProgramError: (at fit) the model has latent sites or local params.
    """
    expect(models=(models, "[0, inf)"))
    descent = Descent(optimizer, steps, unit, batch_size)

    def client(program: Program) -> Client:
        first = common_params(program, "fedfomo")

        def loss_of(rows: bool, theta: Params, batch: ClientBatch) -> Tensor:
            """Return the loss on validation rows, or the others; 0 if there are none."""
            if validation is None:
                return program.mean_loss(theta, batch)
            masked, any_left = some_rows(batch, (batch.fields[validation] > 0) == rows)
            return program.mean_loss(theta, masked) * any_left

        def start(message: Tree, own: FedFomoClientState) -> DescentState:
            return descent.begin(own.before, FedFomoRound(own, torch.zeros(models)))

        def mix(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            """Move the model toward those that are better on validation rows."""
            own, before = work.beside.own, work.beside.own.before
            sent, there = own.mail["models"], own.mail["there"]
            tried = tree_map(lambda last, others: torch.cat([last[None], others]), own.last, sent)
            here = loss_of(True, before, batch)
            of_tried = of_each(program, lambda theta: loss_of(True, theta, batch), tried)
            available = torch.cat([torch.ones(1), there])
            mixed, score = _moved(before, tried, here - of_tried, available)
            return descent.begin(mixed, FedFomoRound(own._replace(before=mixed), score[1:]))

        def finish(
            work: DescentState, message: Tree, own: FedFomoClientState, rows: Tensor
        ) -> tuple[Up, FedFomoClientState]:
            moved, scores = work.beside
            up: Up = {
                "model": Each({"w": work.w, "scores": scores}),
                "loss": Share(work.loss, rows),
            }
            return up, FedFomoClientState(moved.before, work.w, own.mail, torch.ones(()))

        def new(message: Tree) -> FedFomoClientState:
            """Return the state of a new client: the mean, and the models of the best."""
            mean = message["mean"]
            mail = {"models": message["best"], "there": torch.ones(models)}
            return FedFomoClientState(mean, mean, mail, torch.zeros(()))

        none = {"models": at_each(first, models), "there": torch.zeros(models)}
        training = descent.phase(lambda w, work, message, batch: loss_of(False, w, batch))
        if validation is not None:  # all rows of a mini-batch but one may be validation rows
            training = replace(training, alone=1)
        return Client(
            own=FedFomoClientState(first, first, none, torch.zeros(())),
            start=start,
            phases=(Phase(mix, turns=max(1, models)), training),
            finish=finish,
            params=lambda message, own: chosen(own.seen, own.last, message["mean"]),
            seen=lambda own: own.seen,
            new=new,
            mail=("mail",),
            sums_by=validation or "",
        )

    return Method("fedfomo", model, delta, client, partial(_server, models), discloses="summaries")


def _server(models: int, program: Program) -> Server:
    count = program.num_clients
    begin = FedFomoServerState(
        w=at_each(common_params(program, "fedfomo"), count),
        seen=torch.zeros(count, dtype=torch.bool),
        affinity=torch.zeros(count, count),
        picked=torch.zeros(count, models, dtype=torch.long),
        there=torch.zeros(count, models),
    )

    def update(
        state: FedFomoServerState, means: dict[str, Tree], clock: Clock
    ) -> FedFomoServerState:
        reports = means["model"]
        ids = reports.ids
        affinity = state.affinity.clone()
        rows = ids[:, None].expand(-1, models)
        score = reports.value["scores"].to(affinity.dtype) * state.there[ids]
        affinity.index_put_((rows, state.picked[ids]), score, accumulate=True)
        w = with_rows(state.w, ids, reports.value["w"])
        seen = state.seen.index_fill(0, ids, True)
        eps = max(EXPLORE - DECAY * clock.round, 0.0)
        picks, there = _picked(affinity, seen, eps, *_drawn(program, models, clock.round))
        return FedFomoServerState(w, seen, affinity, picks, there)

    def mail(state: FedFomoServerState) -> Tree:
        sent = tree_map(lambda v: v[state.picked], state.w)
        return {"models": sent, "there": state.there}

    def final(state: FedFomoServerState, clock: Clock) -> Tree:
        """Return the models of the largest affinity of all clients together, and the mean."""
        liked = state.affinity.sum(0).argsort(descending=True)[:models]
        short = models - len(liked)  # fewer clients than models
        liked = torch.cat([liked, liked[:1].expand(short)]) if short > 0 else liked
        best = tree_map(lambda v: v[liked], state.w)
        return {"best": best, "mean": mean_of(state.w, state.seen)}

    return Server(begin, update, down=lambda state, clock: {}, final=final, mail=mail)


def _moved(before: Params, tried: Params, gain: Tensor, available: Tensor) -> tuple[Params, Tensor]:
    """Return params moved toward others by their scores, Eqs. (3) and (4), and the scores (M,)."""
    squares = tree_map(lambda v, w: (v - w).flatten(1).square().sum(1), tried, before)
    far = sum(tree_leaves(squares)) ** 0.5
    score = torch.where(available * (far > LEAST) > 0.0, gain / far.clamp(min=LEAST), 0.0)
    weight = score.clamp(min=0.0)
    weight = weight / weight.sum().clamp(min=1e-30)

    def mixed(w: Tensor, v: Tensor) -> Tensor:
        away = v - w
        return w + (weight.to(away.dtype).view(-1, *[1] * (away.dim() - 1)) * away).sum(0)

    return tree_map(mixed, before, tried), score


def some_rows(batch: ClientBatch, keep: Tensor) -> tuple[ClientBatch, Tensor]:
    """Return a batch with the rows of `keep` (1, B), scaled up, and 1; if none, all rows and 0."""
    there = torch.ones_like(keep) if batch.rows is None else batch.rows
    inside = keep & there
    any_left = inside.any()
    rows = torch.where(any_left, inside, there)
    return replace(batch, rows=rows, is_mini_batch=True), any_left.to(batch.counts.dtype)


def _drawn(program: Program, models: int, round_: int) -> tuple[Tensor, Tensor]:
    """Return a round's random order of others for each client (N, N), and its dice (N, M)."""
    keys, count, seed = program.client_keys, program.num_clients, program.seed
    pairs = noise.fold(keys[:, None].expand(count, count, 2), keys[:, 0], keys[:, 1], seed)
    order = noise.uniforms(noise.fold(pairs, round_), (), torch.float64)
    return order, noise.uniforms(noise.fold(keys, seed, round_), (models,), torch.float64)


def _picked(
    affinity: Tensor, seen: Tensor, eps: float, order: Tensor, dice: Tensor
) -> tuple[Tensor, Tensor]:
    """Return whose models each client gets, (N, M), and whether there is one."""
    count, ids, there = len(seen), [], []
    free = seen & ~torch.eye(count, dtype=torch.bool)
    for at_random in (dice < eps).unbind(1):
        value = affinity.masked_fill(~free, -torch.inf)
        best = free & (value == value.amax(1, keepdim=True))
        pool = torch.where(at_random[:, None], free, best)
        pick = order.masked_fill(~pool, -1.0).argmax(1)
        there.append(free.any(1))
        ids.append(pick)
        free = free & (torch.arange(count) != pick[:, None])
    if not ids:
        return torch.zeros(count, 0, dtype=torch.long), torch.zeros(count, 0)
    return torch.stack(ids, 1), torch.stack(there, 1).to(affinity.dtype)
