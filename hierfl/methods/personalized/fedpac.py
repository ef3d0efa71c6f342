"""FedPAC: a common body with class features aligned across clients, and heads mixed over clients.

    client:  with the body received, h_k <- P(y) times the mean feature of class y
             V_k <- the variance of h_k
             head:  for every mini-batch:  h <- h - lr grad nll     from its mixed head, b fixed
             body:  for every mini-batch:  b <- b - lr grad[ nll + lambda mean |phi(x) - mu_y|^2 ]
             sends b, h, h_k, V_k, and the sums and counts of its features by class
    server:  body <- sum_k (n_k / n) b_k,    mu_y <- the mean of class y's features over all clients
             head of k <- sum_j a_j head_j
             a = argmin over the simplex of  sum_j a_j^2 V_j + |h_k - sum_j a_j h_j|^2

Source: Xu et al. 2023, arXiv:2306.11867, Algorithm 1 and Eqs. (6), (10) and (11); weights below
0.001 become 0, as in the authors' code. A class whose mean nobody has sent yet pulls to the
client's own mean; the first round has no pull.

Loosely, its Bayesian part is a prior of features, phi(x) | y ~ Normal(mu_y, .), as a penalty with
plugged-in means. Heads are no hierarchy: their mix trades bias for variance.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, chosen, with_rows
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Each, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    Descent,
    OwnAndMail,
    TwoLevels,
    expect_model,
    personal_client,
)
from hierfl.methods.parts.stacked import at_each, mean_of, mixed
from hierfl.methods.personalized.fedrep import moving
from hierfl.models.memory_network import HeadedNetwork
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program

LEAST = 1e-3  # of a weight


class Classes(NamedTuple):
    """Features of a client's rows by class."""

    total: Tensor  # (K, D), sums
    rows: Tensor  # (K,)
    squares: Tensor  # (), mean over rows of |phi|^2


class FedPACFeatures(NamedTuple):
    """What a client keeps of its features in a round, beside its body and its head."""

    h: Tensor  # (K, D), shares of labels times mean features
    means: Tensor  # (K, D)
    v: Tensor  # (), variance of h
    classes: Classes  # with the round's last body


class FedPACServerState(NamedTuple):
    """What the server knows of the body, of K classes, and of N clients."""

    body: Params
    head: Params  # (N, ...)
    h: Tensor  # (N, K, D)
    v: Tensor  # (N,)
    seen: Tensor  # (N,) bool
    mu: Tensor  # (K, D)
    known: Tensor  # (K,), 1 for classes that have a mean
    mail: Params  # (N, ...), mixed heads


@About(
    infers="a common body with class features aligned across clients, and heads mixed from those of others",
    source="Xu et al. 2023, arXiv:2306.11867",
    common="a body, and mean features of classes",
    own="a head, mixed from others'",
    kept="its head, and the mixed one",
    discloses="summaries",
    new="fits a head",
    down="the body, mean features of each class, and the mean head; a mixed head, to each client its own",
    up=(
        "`theta`*: its body after training; `classes`: sums and counts of its features by "
        "class; `head`, seen individually: its head, shares of its labels times their mean "
        "features, and their variance; `loss`*"
    ),
)
def fedpac(
    model: HeadedNetwork,
    *,
    feature_weight: float = 1.0,
    mix: bool = True,
    head_optimizer: Optimizer = SGD(0.1, momentum=0.5),  # noqa: B008 (frozen)
    optimizer: Optimizer = SGD(0.01, momentum=0.5),  # noqa: B008
    head_steps: int = 1,
    body_steps: int = 5,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 50,
) -> Method:
    """Return FedPAC of `hierfl.models.HeadedNetwork(module, head=...)`.

    The server sees each client's head, its mean features and its shares of labels.

    Args:
        model: a classifier with a head.
        feature_weight: lambda, pull of features to the means of their classes, 0 or more.
            Defaults: the authors', without weight decay.
        mix: whether heads are mixed; False: each client continues from its own.
        head_optimizer: of the head, restarted in each round.
        optimizer: of the body, likewise.
        head_steps: passes over the rows on the head, or mini-batches (`unit`).
        body_steps: the same on the body.
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        TypeError: the model is another one.
        ValueError: `feature_weight` is negative.
    """
    expect_model(model, HeadedNetwork, "fedpac", "head=...")
    expect(feature_weight=(feature_weight, "[0, inf)"))
    descents = Descent(optimizer, body_steps, unit, batch_size)

    def client(program: Program) -> Client:
        head, (classes, _) = _parts(model, program)[1], _sizes(model, program)

        def features(work: TwoLevels, batch: ClientBatch) -> Classes:
            return by_class(model, classes, {**work.theta.params, **work.phi.params}, batch)

        def start(message: Tree, own: OwnAndMail) -> TwoLevels:
            mine = chosen(own.seen, own.mail if mix else own.params, message["head"])
            none, blank = torch.zeros(()), torch.zeros_like(message["mu"])
            return TwoLevels(
                Stepped(message["body"], optimizer.init(message["body"])),
                Stepped(mine, head_optimizer.init(mine)),
                none,
                FedPACFeatures(blank, blank, none, Classes(message["mu"], message["known"], none)),
            )

        def look(work: TwoLevels, message: Tree, batch: ClientBatch) -> TwoLevels:
            by_label = features(work, batch)
            share = by_label.rows / by_label.rows.sum()
            means = by_label.total / by_label.rows.clamp(min=1.0)[:, None]
            h = share[:, None] * means
            v = (by_label.squares - h.square().sum()) / by_label.rows.sum()
            return work._replace(
                beside=FedPACFeatures(h, means, v.clamp(min=1e-12), work.beside.classes)
            )

        def on_body(work: TwoLevels, message: Tree, batch: ClientBatch) -> TwoLevels:
            loss = _body_loss(program, model, feature_weight, work, message, batch)
            gradient, value = slope(loss, work.theta.params)
            return work._replace(theta=step(optimizer, gradient, work.theta), loss=value)

        def look_again(work: TwoLevels, message: Tree, batch: ClientBatch) -> TwoLevels:
            return work._replace(beside=work.beside._replace(classes=features(work, batch)))

        def finish(
            work: TwoLevels, message: Tree, own: OwnAndMail, rows: Tensor
        ) -> tuple[Up, OwnAndMail]:
            (h, _, v, (total, count, _)), mine = work.beside, work.phi.params
            up: Up = {
                "theta": Share(work.theta.params, rows),
                "classes": Share({"total": total, "count": count}),
                "head": Each({"head": mine, "h": h, "v": v}),
                "loss": Share(work.loss, rows),
            }
            return up, OwnAndMail(mine, own.mail, torch.ones(()))

        tuning = descents.taking(moving(program, {"phi": head_optimizer}), head_steps)
        return personal_client(
            OwnAndMail(head, head, torch.zeros(())),
            lambda message, own: own._replace(params=message["head"]),
            start=start,
            phases=(Phase(look), tuning, descents.taking(on_body), Phase(look_again)),
            finish=finish,
            params=lambda message, own: {**message["body"], **own.params},
            adapt=(tuning,),
            new=lambda message: OwnAndMail(message["head"], message["head"], torch.zeros(())),
            mail=("mail",),
            sums_by=model.y,
        )

    def server(program: Program) -> Server:
        return _server(program, model, mix)

    return Method("fedpac", model, delta, client, server, discloses="summaries")


def _parts(model: HeadedNetwork, program: Program) -> tuple[Params, Params]:
    params = program.start()[0]
    head = {name: v for name, v in params.items() if model.in_head(name)}
    return {name: v for name, v in params.items() if name not in head}, head


def _sizes(model: HeadedNetwork, program: Program) -> tuple[int, int]:
    params, batch = program.start()[0], program.prototype
    width = model.features(params, batch).shape[-1]
    fn, _ = program.observed({}, batch, params)[model.y]
    return fn.probs.shape[-1], width


def _body_loss(
    program: Program,
    model: HeadedNetwork,
    weight: float,
    work: TwoLevels,
    message: Tree,
    batch: ClientBatch,
) -> Callable[[Params], Tensor]:
    """Return the loss of the body: nll, and the pull of features to their classes' means."""
    head, has_mean = work.phi.params, message["known"][:, None] > 0.0
    labels = batch.fields[model.y][0].long()
    center = torch.where(has_mean, message["mu"], work.beside.means)[labels]
    pull = weight * message["known"].amax()  # none in the first round

    def loss(body: Params) -> Tensor:
        with model.features_seen() as seen:
            nll = program.mean_loss({**body, **head}, batch)
        if not weight:
            return nll
        away = (seen[-1].flatten(1) - center).square().mean(1)
        rows = torch.ones_like(away) if batch.rows is None else batch.rows[0]
        return nll + pull * (away * rows).sum() / rows.sum()

    return loss


def by_class(model: HeadedNetwork, classes: int, theta: Params, batch: ClientBatch) -> Classes:
    """Return the features of a client's rows by class."""
    z, y = model.features(theta, batch)[0], batch.fields[model.y][0]
    hot = (y[:, None] == torch.arange(classes)).to(z.dtype)
    if batch.rows is not None:
        hot = hot * batch.rows[0][:, None]
    squares = (hot.sum(1) * z.square().sum(1)).sum() / hot.sum()
    return Classes(hot.T @ z, hot.sum(0), squares)


def _server(program: Program, model: HeadedNetwork, mix: bool) -> Server:
    body, head = _parts(model, program)
    count, shape = program.num_clients, _sizes(model, program)

    def update(state: FedPACServerState, means: dict[str, Tree], clock: Clock) -> FedPACServerState:
        reports, by_label = means["head"], means["classes"]
        before = {"head": state.head, "h": state.h, "v": state.v}
        reported = with_rows(before, reports.ids, reports.value)
        seen = state.seen.index_fill(0, reports.ids, True)
        there = (by_label["count"] > 0.0).to(by_label["count"].dtype)
        mu = by_label["total"] / by_label["count"].clamp(min=1e-30)[:, None]
        mail = reported["head"]
        if mix:
            weight = weights_of(reported["h"].flatten(1), reported["v"], seen)
            mail = mixed(weight, reported["head"])
        return FedPACServerState(
            body=means["theta"],
            **reported,
            seen=seen,
            mu=torch.where(there[:, None] > 0.0, mu, state.mu),
            known=torch.maximum(state.known, there),
            mail=mail,
        )

    def down(state: FedPACServerState, clock: Clock) -> Tree:
        mean = mean_of(state.head, state.seen)
        return {"body": state.body, "head": mean, "mu": state.mu, "known": state.known}

    heads = at_each(head, count)
    begin = FedPACServerState(
        body=body,
        head=heads,
        h=torch.zeros(count, *shape),
        v=torch.ones(count),
        seen=torch.zeros(count, dtype=torch.bool),
        mu=torch.zeros(shape),
        known=torch.zeros(shape[0]),
        mail=heads,
    )
    return Server(begin, update, down=down, mail=lambda state: state.mail)


def weights_of(h: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return each client's weights of all heads (N, N), on the simplex, by non-negative least squares."""
    weight = torch.eye(len(h), dtype=torch.float64)
    others = seen.nonzero()[:, 0]
    points, spread = h[others].double().numpy(), v[others].double().numpy()
    if points.shape[1] > len(points):  # only distances count, and a rotation keeps them
        points = np.asarray(np.linalg.qr(points.T, mode="r")).T
    for place, i in enumerate(others.tolist()):
        away = (points - points[place]).T
        system = np.concatenate([away, np.diag(np.sqrt(spread)), np.ones((1, len(others)))])
        scale = max(float(np.abs(system[:-1]).max()), 1e-30)
        system[:-1] /= scale
        weights, _ = nnls(system, np.append(np.zeros(len(system) - 1), 1.0))
        weights = np.where(weights / weights.sum() < LEAST, 0.0, weights)
        weight[i] = 0.0
        weight[i, others] = torch.from_numpy(weights / weights.sum())
    return weight.to(h.dtype)
