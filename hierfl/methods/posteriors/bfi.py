"""BFI, Bayesian federated inference: one round, in which each center sends a Gaussian.

Center k sends its posterior mode z_k and curvature A_k under the common prior; the server divides
the prior out of all but one:

    A = sum_k A_k - (N - 1) Lam,    z = A^-1 (sum_k A_k z_k - (N - 1) Lam z_0)

Here a center sends the precision A_k - Lam and the matching shift, and the server finds the mode of
the prior times these factors: the same where the prior is Gaussian, and correct where not.

Source: Jonker, Pazira and Coolen 2024, Statistics in Medicine, doi:10.1002/sim.10072, and the R
package BFI. A center's own parameters (local sites) are integrated out by Laplace's method. Each
Gaussian is taken at its center's own mode, far from the common one where rows are few.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
from hierfl.methods.about import About
from hierfl.methods.posteriors.natural_factors import NaturalFactor, NearMode, guess, nowhere
from hierfl.program.handlers import unchecked
from hierfl.program.program import Program
from hierfl.program.sites import Model

NEWTON = 5  # steps to the mode of the local sites at each z
LONGEST = 2.0  # the longest step of z
FRACTIONS = torch.tensor([1.0, 0.5, 0.25, 0.0])  # of a step, tried in a line search


class BFIWork(NamedTuple):
    """A center's z, (K,), the mode of its local sites, and its likelihood's factor."""

    z: Tensor
    near: NearMode
    factor: NaturalFactor


class BFIServerState(NamedTuple):
    """Mean, (K,), and precision, (K, K), of the posterior, and 1 after the round, ()."""

    loc: Tensor
    precision: Tensor
    done: Tensor


@About(
    infers="a Gaussian per client, combined in one round",
    source="Jonker et al. 2024, doi:10.1002/sim.10072",
    common="sites",
    own="sites with modes",
    guide="a Gaussian",
    new="one round: its own mode",
    down="the prior's Gaussian",
    up="`shift`, (K,); `precision`, (K, K), of its own posterior",
)
def bfi(model: Model, *, steps: int = 30, max_global_size: int = 300) -> Method:
    """Return BFI of a program. It takes one round, however many are allowed: `fit(method, data)`.

    The published algorithm shows the server each center's estimate and curvature. Here the server
    needs only sums over centers (`Method.discloses`).

    Args:
        model: a program with global sites; its local sites are integrated out.
        steps: safeguarded Newton steps of each center to its own mode.
        max_global_size: largest K, the number of global unknowns.

    Raises:
        ProgramError: (at fit) as for `fedlaplace`.
        ValueError: (after the round) the product of the centers' Gaussians is not a distribution.
    """
    return Method(
        "bfi",
        model,
        conditional(shared=full_normal, newton_steps=10),
        lambda program: _center(program, steps, max_global_size),
        lambda program: _server(program, steps, max_global_size),
        everyone=True,
        most_rounds=1,
        traits=frozenset({"by rows"}),
    )


def _center(program: Program, steps: int, max_global_size: int) -> Client:
    """Return a center, which climbs to the mode of its own posterior."""
    check_integrable(program, max_global_size)
    marginal = Marginal(program, seen_linear(program))

    def expand(work: BFIWork, batch: ClientBatch, newton: int) -> tuple[Expansion, NearMode]:
        expansion, inner = marginal.expand(work.z, guess(work.near, work.z), batch, newton)
        return expansion, NearMode(inner.mode, inner.slope, work.z)

    def climb(work: BFIWork, message: Tree, batch: ClientBatch) -> BFIWork:
        with torch.no_grad():
            (likelihood, near), prior = expand(work, batch, NEWTON), marginal.prior(work.z)
            step = newton_step(
                likelihood.gradient + prior.gradient,
                -likelihood.hessian - prior.hessian,
                cap=LONGEST,
            )

            def value(by: Tensor) -> Tensor:
                z = work.z + by * step
                return marginal.value(z, guess(near, z), batch, NEWTON)[0] + marginal.log_prior(z)

            fractions = FRACTIONS.to(step)
            values = torch.vmap(value)(fractions)
        best = values.nan_to_num(nan=-torch.inf).argmax(0, keepdim=True)
        return BFIWork(work.z + fractions.gather(0, best) * step, near, work.factor)

    def look(work: BFIWork, message: Tree, batch: ClientBatch) -> BFIWork:
        with torch.no_grad():
            likelihood, near = expand(work, batch, 2 * NEWTON)
        precision = -likelihood.hessian
        shift = likelihood.gradient + precision @ work.z
        return BFIWork(work.z, near, NaturalFactor(shift, precision))

    def start(message: Tree, own: Tree) -> BFIWork:
        z = message["loc"]
        return BFIWork(z, nowhere(marginal), NaturalFactor(z, message["precision"]))

    def finish(work: BFIWork, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        return {name: Share(value) for name, value in work.factor._asdict().items()}, own

    return Client(
        own={},
        start=start,
        phases=(Phase(climb, count=steps), Phase(look)),
        finish=finish,
        params=lambda message, own: message["params"],
    )


def _server(program: Program, steps: int, max_global_size: int) -> Server:
    """Return the server, which finds the mode of the prior times the centers' factors."""
    check_integrable(program, max_global_size)
    marginal = Marginal(program)

    def product(shift: Tensor, curvature: Tensor, z: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return mode and precision of the prior times a Gaussian, and the precision's smallest eigenvalue."""
        with torch.no_grad(), unchecked():
            for _ in range(steps):
                prior = marginal.prior(z)
                slope = shift - curvature @ z + prior.gradient
                z = z + newton_step(slope, curvature - prior.hessian, cap=LONGEST)
            precision = curvature - marginal.prior(z).hessian
        return z, precision, float(torch.linalg.eigvalsh(precision)[0])

    def update(state: BFIServerState, means: dict[str, Tree], clock: Clock) -> BFIServerState:
        count = marginal.program.num_clients
        z, precision, smallest = product(
            count * means["shift"], count * means["precision"], state.loc
        )
        if not smallest > 0.0:
            raise ValueError(
                "the product of the centers' Gaussians is not a distribution: its precision has an "
                f"eigenvalue {smallest:.3g}; use fedlaplace, or a prior that curves more"
            )
        return BFIServerState(z, precision, torch.ones(()))

    def wrong(message: Tree, up: Mapping[str, Any], rows: int) -> str | None:
        curvature = up["precision"].value[0]
        if bool(((curvature - curvature.mT).abs() > 1e-4 * curvature.abs().max()).any()):
            return "the precision of its Gaussian is not symmetric"
        if not product(up["shift"].value[0], curvature, message["loc"])[2] > 0.0:
            return "its own posterior is not a distribution"
        return None

    begin = marginal.shared.start.detach().clone()
    return Server(
        BFIServerState(begin, torch.eye(len(begin)), torch.zeros(())),
        update=update,
        down=lambda state, clock: state._asdict(),
        final=lambda state, clock: {"params": normal_params(state.loc, state.precision)},
        finished=lambda state: bool(state.done > 0.0),
        wrong=wrong,
    )
