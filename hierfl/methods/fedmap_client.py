"""One round of a client of FedMAP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, jacrev

from hierfl.core import noise
from hierfl.core.trees import Tree, as_tree, as_vector, chosen, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, LogShare, Phase, Share, Up, slope
from hierfl.methods.fedmap_server import Best, Weights
from hierfl.methods.prior_params import at_prior, mean_params
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError

LONE = 1e9  # so steep that the weights of the first round are 1 for one client and 0 for all others


@dataclass(frozen=True)
class Setting:
    """The arguments of `fedmap`."""

    optimizer: Optimizer
    steps: int
    unit: Literal["step", "epoch"]
    batch_size: int | None
    newton_steps: int
    is_mean: bool  # whether the loss is the mean of the rows
    keeps: bool  # whether a round starts at the client's own weights
    weights: Weights
    rule: Literal["average", "gradient"] | Best  # the argument `server`
    alone: bool  # whether one client fits alone in the first round

    @property
    def by_fit(self) -> bool:
        """Whether omega depends on how well a client's weights fit its rows."""
        return self.weights.endswith("likelihood")

    @property
    def averages(self) -> bool:
        """Whether the server needs means of the clients' weights."""
        return self.rule != "gradient" or self.alone

    def by_size(self, rows: Tensor) -> Tensor:
        """Return the log of omega where it depends on the rows alone."""
        return rows.log() if self.weights == "rows" else torch.zeros_like(rows)


def map_client(program: Program, how: Setting) -> Client:
    """Return the client of one program."""
    above, mine = program.start()
    if not mine or not above:
        raise ProgramError(
            "fedmap needs local sites and a learned prior above them: a pyro.param outside the "
            "clients plate"
        )
    pairs = _pairs(program, how.rule) if how.averages else {}
    sloped = () if callable(how.rule) else _sloped(above, pairs, every=how.rule == "gradient")
    looks = bool(how.by_fit or sloped or how.alone)

    def loss(w: Params, message: Tree, batch: ClientBatch) -> Tensor:
        terms = program.terms({**message["gamma"], **w}, batch)
        nll = terms.nll / batch.counts if how.is_mean else terms.nll
        pull = 1.0 - message["alone"] if how.alone else 1.0  # 0 while the first client fits alone
        return nll + pull * terms.local_kl

    def start(message: Tree, own: Tree) -> Tree:
        theta, zero = at_prior(program, message["gamma"]), torch.zeros(())
        keep = own["begun"] if how.keeps else zero
        w = chosen(keep, own["w"], theta)
        slopes = {name: 0.0 * above[name] for name in sloped}
        state = how.optimizer.init(w)
        return {"w": w, "state": state, "loss": zero, "omega": zero, "slope": slopes}

    def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        gradient, value = slope(lambda w: loss(w, message, batch), work["w"])
        w, state = step(how.optimizer, gradient, Stepped(work["w"], work["state"]))
        return {**work, "w": w, "state": state, "loss": value}

    def solve(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        w, value = _newton(lambda w: loss(w, message, batch).sum(), work["w"])
        return {**work, "w": w, "loss": value}

    def look(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        """Find log omega_k at the round's last weights, and R's gradient in the global params."""
        gamma, w, rows = message["gamma"], work["w"], batch.counts.sum()

        def penalty(part: Params) -> Tensor:
            terms = program.terms({**gamma, **part, **w}, batch)
            return terms.local_kl.sum() + terms.global_kl

        log_omega = how.by_size(rows)
        if how.by_fit:
            terms = program.terms({**gamma, **w}, batch)
            root = rows if how.weights == "mean-likelihood" else 1.0
            log_omega = -(terms.nll + terms.local_kl).sum() / root
        if how.alone:
            drawn = LONE * noise.uniforms(batch.key[0], (), rows.dtype)
            log_omega = torch.where(message["alone"] > 0.0, drawn, log_omega)
        slopes = grad(penalty)({name: gamma[name] for name in sloped}) if sloped else {}
        return {**work, "omega": log_omega, "slope": slopes}

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        value: Tree = {"slope": work["slope"]}
        if pairs:
            value["away"] = _away(work["w"], message["gamma"], pairs)
        if callable(how.rule):
            value["square"] = tree_map(torch.square, value["away"])
        weighted = LogShare(value, work["omega"] if looks else how.by_size(rows))
        begun = torch.where(message["alone"] > 0.0, own["begun"], torch.ones(()))
        up: Up = {"clients": weighted, "loss": Share(work["loss"], rows)}
        return up, {"w": work["w"], "begun": begun}

    def params(message: Tree, own: Tree) -> Params:
        gamma = message["gamma"]
        return {**gamma, **chosen(own["begun"], own["w"], at_prior(program, gamma))}

    fitting = Phase(move, how.steps, how.unit, how.batch_size)
    # a prior reads no rows: where omega needs none, one row is enough
    few = None if how.by_fit else 1
    looking = Phase(look, int(looks), batch_size=few, scores_rows=how.by_fit)
    return Client(
        own={"w": mine, "begun": torch.zeros(())},
        start=start,
        phases=(Phase(solve, how.newton_steps) if how.newton_steps else fitting, looking),
        finish=finish,
        params=params,
        seen=lambda own: own["begun"],
    )


def _pairs(program: Program, rule: object) -> dict[str, str]:
    """Return, for each global param that is a prior's mean, the local param of its site."""
    pairs = {param: f"{site}.at" for site, param in mean_params(program).items()}
    odd = [mine for theta, mine in pairs.items() if mine != f"w.{theta.removeprefix('theta.')}.at"]
    if callable(rule) and odd:
        raise ProgramError(
            f"the exact step of a prior moves 'theta.<name>' by site 'w.<name>', and '{odd[0]}' "
            f"has no such name: "
            f"use hierfl.models.learned_prior_network, or server='average'"
        )
    return pairs


def _sloped(above: Params, pairs: dict[str, str], *, every: bool) -> tuple[str, ...]:
    """Return the global params that the server moves by gradient steps."""
    return tuple(name for name in above if every or name not in pairs)


def _away(w: Params, gamma: Params, pairs: dict[str, str]) -> Params:
    """Return a client's weights minus theta."""
    return {
        theta: w[mine].reshape(gamma[theta].shape) - gamma[theta] for theta, mine in pairs.items()
    }


def _newton(loss: Callable[[Tree], Tensor], params: Tree) -> tuple[Tree, Tensor]:
    """Return params after a step of Newton's method with a dense Hessian, and the loss before it."""

    def at(vector: Tensor) -> Tensor:
        return loss(as_tree(vector, params))

    vector = as_vector(params)
    move = torch.linalg.inv_ex(jacrev(grad(at))(vector)).inverse @ grad(at)(vector)
    return as_tree(vector - move, params), at(vector)
