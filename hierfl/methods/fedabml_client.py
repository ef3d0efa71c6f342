"""One round of a client of FedABML."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.core.trees import Tree, add, chosen
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Phase, Share, Up, over_draws, slope
from hierfl.methods.prior_params import at_prior, moments_of
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError


@dataclass(frozen=True)
class Setting:
    """The arguments of `fedabml`, under the same names; `exact`: its server is "exact"."""

    kl_weight: float
    optimizer: Optimizer
    global_optimizer: Optimizer
    inner_steps: int
    steps: int
    unit: Literal["step", "epoch"]
    batch_size: int | None
    draws: int
    meta: Literal["envelope", "first", "full"]
    exact: bool


@dataclass(frozen=True, eq=False)
class Losses:
    """L(phi, theta) of one program, and its gradients."""

    program: Program
    how: Setting

    def prior(self, theta: Params) -> Params:
        """Return phi where the posterior is the prior."""
        return at_prior(self.program, theta)

    def loss(self, phi: Params, theta: Params, batch: ClientBatch) -> Tensor:
        """Return L(phi, theta), ()."""

        def one(b: ClientBatch) -> Tensor:
            terms = self.program.terms({**theta, **phi}, b)
            return ((terms.nll + self.how.kl_weight * terms.local_kl) / b.counts).sum()

        return over_draws(one, batch, self.how.draws, keyed=self.program.in_vmap)

    def penalty(self, theta: Params, phi: Params, batch: ClientBatch) -> Tensor:
        """Return the part of L that depends on theta, ()."""
        terms = self.program.terms({**theta, **phi}, batch)
        return (self.how.kl_weight * terms.local_kl / batch.counts).sum()

    def begin(self, theta: Params) -> Stepped:
        """Return phi at the prior, before the first step."""
        return self.started(self.prior(theta))

    def started(self, phi: Params) -> Stepped:
        """Return phi with the first state of its optimizer."""
        return Stepped(phi, self.how.optimizer.init(phi))

    def inner(self, phi: Stepped, theta: Params, batch: ClientBatch) -> tuple[Stepped, Tensor]:
        """Return phi after K steps, and L before the last of them."""
        value = torch.zeros(())
        for k in range(self.how.inner_steps):
            again = batch.redrawn(k)
            gradient, value = slope(partial(self.loss, theta=theta, batch=again), phi.params)
            phi = step(self.how.optimizer, gradient, phi)
        return phi, value

    def outer(self, theta: Params, batch: ClientBatch) -> tuple[Params, Stepped]:
        """Return the gradient of L(phi_K(theta), theta) in theta, and phi_K."""
        last = batch.redrawn(self.how.inner_steps)
        phi, _ = self.inner(self.begin(theta), theta, batch)
        if self.how.meta == "full":

            def through(t: Params) -> Tensor:
                return self.loss(self.inner(self.begin(t), t, batch)[0].params, t, last)

            return grad(through)(theta), phi
        by_phi, by_theta = grad(self.loss, (0, 1))(phi.params, theta, last)
        return add(by_theta, vjp(self.prior, theta)[1](by_phi)[0]), phi


def abml_client(program: Program, how: Setting) -> Client:
    """Return the client of one program."""
    above, mine = program.start()
    if not mine or not above:
        raise ProgramError(
            "fedabml needs local sites, and a learned prior above them: a pyro.param outside the "
            "clients plate"
        )
    of, moments = Losses(program, how), moments_of(program) if how.exact else None
    of.prior(above)  # refuses a guide that cannot start at the prior before the first round

    def served(message: Tree, own: Tree) -> Params:
        return chosen(own["seen"], own["phi"], of.prior(message))

    def start(message: Tree, own: Tree) -> Tree:
        theta = Stepped(message, how.global_optimizer.init(message))
        return {"theta": theta, "phi": of.started(served(message, own)), "loss": torch.zeros(())}

    def restart(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        return {**work, "phi": of.begin(message)}

    def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        theta, after = work["theta"].params, batch.redrawn(how.inner_steps)
        if how.meta == "envelope":
            phi, value = of.inner(work["phi"], theta, batch)
            if how.exact:
                return {**work, "phi": phi, "loss": value}
            gradient = grad(of.penalty)(theta, phi.params, after)
        else:
            gradient, phi = of.outer(theta, batch)
            value = of.loss(phi.params, theta, after)
        moved = step(how.global_optimizer, gradient, work["theta"])
        return {"theta": moved, "phi": phi, "loss": value}

    def tune(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        phi, value = of.inner(work["phi"], message, batch)
        return {**work, "phi": phi, "loss": value}

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up = {"loss": Share(work["loss"])}
        if moments is None:
            up["theta"] = Share(work["theta"].params)
        else:
            up["moments"] = Share(moments.of(work["phi"].params, message))
        return up, {"phi": work["phi"].params, "seen": torch.ones(())}

    passes = 1 if how.unit == "epoch" else how.steps
    return Client(
        own={"phi": mine, "seen": torch.zeros(())},
        start=start,
        phases=(
            Phase(restart, batch_size=1, scores_rows=False),
            Phase(move, how.steps, how.unit, how.batch_size),
        ),
        finish=finish,
        params=lambda message, own: {**message, **served(message, own)},
        adapt=(Phase(tune, passes, how.unit, how.batch_size),),
        seen=lambda own: own["seen"],
    )
