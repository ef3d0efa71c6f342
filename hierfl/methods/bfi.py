"""BFI, Bayesian federated inference: one round, a Gaussian from each centre.

Centre k sends its posterior mode z_k and curvature A_k under the common prior; the server divides the prior out of all but one:

    A = sum_k A_k - (N - 1) Lam,    z = A^-1 (sum_k A_k z_k - (N - 1) Lam z_0)

Here a centre sends the same with its own copy of the prior divided out already, Lam_k = A_k - Lam and the shift that belongs to
it, and the server finds the mode of prior times factors: the same where the prior is Gaussian, and right where it is not.

Source: Jonker, Pazira and Coolen 2024, Statistics in Medicine, doi:10.1002/sim.10072, and the R package BFI. What a centre keeps
to itself (BFI's "stratified" parameters, or a hierarchy's local sites, which BFI does not have) is integrated out by Laplace's
method. What it costs: each centre's Gaussian is taken at its own mode, far from the common one where it has few rows.
"""

from __future__ import annotations

import pyro
import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.conditional import conditional
from hierfl.guides.global_sites import full_normal, normal_params
from hierfl.laplace.glm_rows import seen_linear
from hierfl.laplace.marginal import Expansion, Marginal, check_integrable
from hierfl.laplace.mode import newton_step
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up
from hierfl.program.program import Program
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model

NEWTON, LONGEST = (
    5,
    2.0,
)  # steps to the mode of a client's own sites at each z; the longest step of z
SHARES = torch.tensor([1.0, 0.5, 0.25, 0.0])  # of a step that are tried


@recorded
def bfi(model: Model, *, steps: int = 30, limit: int = 300) -> Method:
    """BFI of a program. One round is all of it, however many are allowed.

    Args:
        model: with global sites; local ones are integrated out.
        steps: safeguarded Newton steps of each centre to its own mode.
        limit: on the numbers in the global sites.

    Raises:
        ProgramError: (at fit) as `fedlaplace`.
        ValueError: (after the round) the product of the centres' Gaussians is none.
    """

    def client(program: Program) -> Client:
        check_integrable(program, limit)
        return _client(Marginal(program, seen_linear(program)), steps)

    def server(program: Program) -> Server:
        check_integrable(program, limit)
        return _server(Marginal(program), steps)

    return Method(
        "bfi",
        model,
        conditional(shared=full_normal, newton_steps=10),
        client,
        server,
        everyone=True,
    )


def _client(marginal: Marginal, steps: int) -> Client:
    size, inside = marginal.shared.size, marginal.own.size

    def expand(lane: Tree, batch: ClientBatch, newton: int) -> tuple[Expansion, Tree]:
        found, inner = marginal.expand(lane["z"], _guess(lane, lane["z"]), batch, newton)
        return found, {"mode": inner.mode, "slope": inner.slope, "loc": lane["z"]}

    def climb(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
        with torch.no_grad():
            (likelihood, near), prior = expand(lane, batch, NEWTON), marginal.prior(lane["z"])
            step = newton_step(
                likelihood.gradient + prior.gradient,
                -likelihood.hessian - prior.hessian,
                cap=LONGEST,
            )
            lane = {**lane, **near}

            def value(by: Tensor) -> Tensor:
                z = lane["z"] + by * step
                return marginal.value(z, _guess(lane, z), batch, NEWTON)[0] + marginal.log_prior(z)

            values = torch.vmap(value)(SHARES.to(step.dtype))
        return {
            **lane,
            "z": lane["z"]
            + SHARES.to(step.dtype)[values.nan_to_num(nan=-torch.inf).argmax(0)] * step,
        }

    def look(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
        with torch.no_grad():
            likelihood, near = expand(lane, batch, 2 * NEWTON)
        precision = -likelihood.hessian
        shift = likelihood.gradient + precision @ lane["z"]
        return {"z": lane["z"], **near, "shift": shift, "precision": precision}

    def start(message: Tree, own: Tree) -> Tree:
        near = {
            "mode": torch.zeros(inside),
            "slope": torch.zeros(inside, size),
            "loc": torch.zeros(size),
        }
        return {
            "z": message["loc"],
            **near,
            "shift": message["loc"],
            "precision": message["precision"],
        }

    def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        return {"shift": Share(lane["shift"]), "precision": Share(lane["precision"])}, own

    return Client(
        own={},
        start=start,
        phases=(Phase(climb, count=steps), Phase(look)),
        finish=finish,
        params=lambda message, own: message["params"],
    )


def _guess(lane: Tree, z: Tensor) -> Tensor:
    guess: Tensor = lane["mode"] + lane["slope"] @ (z - lane["loc"])
    return guess


def _server(marginal: Marginal, steps: int) -> Server:
    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        count, z = marginal.program.num_clients, state["loc"]
        with torch.no_grad(), pyro.validation_enabled(False):
            for _ in range(steps):
                prior = marginal.prior(z)
                precision = count * means["precision"] - prior.hessian
                slope = count * (means["shift"] - means["precision"] @ z) + prior.gradient
                z = z + newton_step(slope, precision, cap=LONGEST)
            precision = count * means["precision"] - marginal.prior(z).hessian
        smallest = float(torch.linalg.eigvalsh(precision)[0])
        if not smallest > 0.0:
            raise ValueError(
                f"the product of the centres' Gaussians is none (an eigenvalue of its precision is {smallest:.3g})"
            )
        return {"loc": z, "precision": precision, "done": torch.ones(())}

    def final(state: Tree, clock: Clock) -> Tree:
        return {"params": normal_params(state["loc"], state["precision"])}

    size = marginal.shared.size
    state = {
        "loc": marginal.shared.start.detach().clone(),
        "precision": torch.eye(size),
        "done": torch.zeros(()),
    }
    return Server(
        state=state, update=update, final=final, finished=lambda state: bool(state["done"] > 0.0)
    )
