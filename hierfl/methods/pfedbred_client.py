"""One round of a client of pFedBreD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.core.trees import Tree, chosen, sub
from hierfl.data.batch import ClientBatch, parts
from hierfl.method import Client, Phase, Share, Up
from hierfl.methods.mirror import (
    Loss,
    domains_of_params,
    domains_of_sites,
    mirror_gradient,
    moved_inside,
)
from hierfl.methods.pfedbred_strategies import Place, Put, Strategy
from hierfl.methods.prior_params import mean_params
from hierfl.program.program import Params, Program


@dataclass(frozen=True)
class Setting:
    """The arguments of `pfedbred`; `lr` and `global_lr` are the step sizes of its optimizers."""

    strategy: Strategy
    prox: float
    lr: float
    global_lr: float
    gradient_step_size: float
    memory_step_size: float
    inner_steps: int
    steps: int
    batch_size: int | None
    inner_start: Literal["own", "global", "moved"]
    exact: bool


@dataclass(frozen=True, eq=False)
class Twins:
    """Every local param and the global one that is its prior's mean."""

    program: Program
    of: Mapping[str, str]  # local param -> global param
    mine: Params  # local params as they start

    def local(self, w: Params) -> Params:
        """Return global params as local ones: w in the place of v."""
        return {name: w[twin].view(self.mine[name].shape) for name, twin in self.of.items()}

    def shared(self, v: Params, w: Params) -> Params:
        """Return global params w with local ones v in their place."""
        return {**w, **{twin: v[name].view(w[twin].shape) for name, twin in self.of.items()}}

    def nll(self, v: Params, w: Params, batch: ClientBatch) -> Tensor:
        """Return the mean negative log likelihood of a row, ()."""
        return self.program.mean_loss({**w, **v}, batch)

    def descended(self, loss: Loss, v: Params, rate: float, at: Params) -> Params:
        """Return v after a mirror step on a loss whose gradient is taken at `at`."""
        return self.moved(v, mirror_gradient(self.program, loss, at), rate)

    def moved(self, v: Params, by: Params, rate: float) -> Params:
        """Return v - rate * by, inside the domain of every site."""
        return moved_inside(domains_of_sites(self.program), v, by, rate)


def _twins(program: Program) -> Twins:
    of = {f"{site}.at": param for site, param in mean_params(program).items()}
    return Twins(program, of, program.start()[1])


def bred_client(program: Program, how: Setting) -> Client:
    """Return the client of one program."""
    twins = _twins(program)
    two = how.strategy.moves_w and how.batch_size is not None
    inside = partial(moved_inside, domains_of_params(program))

    def objective(v: Params, mu: Params, batch: ClientBatch) -> Tensor:
        return program.mean_loss({**mu, **v}, batch, weight=how.prox)

    def put(w: Params, work: Tree, first: ClientBatch, second: ClientBatch) -> Put:
        middle = twins.local(w)

        def descended(batch: ClientBatch, at: Params) -> Params:
            nll = partial(twins.nll, w=w, batch=batch)
            return twins.descended(nll, middle, how.gradient_step_size, at)

        def remembered(at: Params) -> Params:
            return twins.moved(at, sub(work["last"], work["v"]), how.memory_step_size)

        place = Place(middle, partial(descended, first), partial(descended, second), remembered)
        return how.strategy.put(place)

    def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        first, second = parts(batch, how.batch_size or 0) if two else (batch, batch)
        w = work["w"]
        mu, near = put(w, work, first, second)
        at_mu, v = twins.shared(mu, w), near if how.inner_start == "moved" else work["v"]
        for _ in range(how.inner_steps):
            v = twins.descended(partial(objective, mu=at_mu, batch=second), v, how.lr, v)
        slope_of_mu = grad(lambda mu: objective(v, mu, second))(at_mu)
        if how.exact:
            through = vjp(lambda w: twins.shared(put(w, work, first, second).mu, w), w)[1]
            (slope_of_mu,) = through(slope_of_mu)
        w = twins.shared(near, w) if how.strategy.moves_w else w
        new = {
            "w": inside(w, slope_of_mu, how.global_lr),
            "v": v,
            "loss": twins.nll(v, at_mu, second),
        }
        return {**work, **new}

    def start(message: Tree, own: Tree) -> Tree:
        kept = {name: own[name] for name in ("v", "last") if name in own}
        new = twins.local(message)
        work = {name: chosen(own["seen"], value, new) for name, value in kept.items()}
        if how.inner_start == "global":
            work["v"] = new
        return {**work, "w": message, "loss": torch.zeros(())}

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        kept = {**work, "last": twins.local(work["w"]), "seen": torch.ones(())}
        up = {"theta": Share(work["w"]), "loss": Share(work["loss"])}
        return up, {name: kept[name] for name in own}

    def params(message: Tree, own: Tree) -> Params:
        return {**message, **chosen(own["seen"], own["v"], twins.local(message))}

    mine = twins.mine
    last = {"last": mine} if how.strategy.remembers else {}
    rows = 2 * how.batch_size if two and how.batch_size else how.batch_size
    return Client(
        own={"v": mine, "seen": torch.zeros(()), **last},
        start=start,
        phases=(Phase(move, how.steps, batch_size=rows),),
        finish=finish,
        params=params,
        seen=lambda own: own["seen"],
    )
