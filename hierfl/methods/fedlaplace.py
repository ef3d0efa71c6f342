"""FedLaplace: the posterior of a hierarchy in about ten rounds, where the global sites are few.

Each client integrates its own sites w out by Laplace's method and answers with its log marginal likelihood in the global sites z,

    l_k(z) = log p(y_k | z) = log integral p(y_k, w | z) dw,        log p(z | y) = log p(z) + sum_k l_k(z) + constant,

its gradient and its Hessian (`hierfl.laplace.marginal`), averaged over a handful of points that all clients share. They add up, and
nothing else crosses. The server goes through three stages, a round an evaluation:

    climb    trust-region Newton to the mode of log p(z | y);
    settle   natural-gradient steps of q(z) = Normal(m, P^-1), on quasi-random points of q, until they are short (0.05 sd; 0.2 sd
             if weights follow):
                 P <- -E_q[d2 log p],    m <- m + P^-1 E_q[d log p];
    weigh    clients return l_k at each of many points of a Student t about q, as much wider on one side of each axis than on the
             other as the posterior was seen to be while q settled (l_k at 2 K + 1 points more). They become draws of p(z | y) by
             Pareto-smoothed weights p(z) exp(sum_k l_k(z)) / t(z); again from a t refitted to those draws while too few points are
             effective.

A client's own posterior is Gaussian given each of those draws: `guides.conditional`. Exact where everything is Gaussian.

This is the idea of INLA (Rue, Martino and Chopin 2009, JRSS B 71), federated; its numerical integration over z is replaced by
natural-gradient variational inference (Khan and Rue 2023, arXiv:2107.04562) and importance weights (Vehtari et al. 2024,
arXiv:1507.02646).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.conditional import conditional
from hierfl.guides.global_sites import Shared, empirical, full_normal
from hierfl.laplace.glm_rows import seen_linear
from hierfl.laplace.marginal import Marginal, check_integrable
from hierfl.method import Client, Method, Phase, Server, Share, Up
from hierfl.methods.fedlaplace_server import Points, Rounds, finished, logged, standard_points
from hierfl.program.program import Program, ProgramError
from hierfl.program.recipes import recorded
from hierfl.program.sites import Guide, Latents, Model, family

COLD, WARM, FOR_DRAWS = (
    25,
    4,
    6,
)  # Newton steps to a client's mode: the first time, from the last one found, for its draws
EXPANDED, VALUED = 32, 256  # points carried at once with derivatives, and without


@recorded
def fedlaplace(
    model: Model,
    *,
    points: int = 32,
    corrections: int = 3,
    weighed: int = 4096,
    enough: int = 1000,
    start: Mapping[str, Tensor | float] | None = None,
    radius: float = 1.0,
    limit: int = 300,
    seed: int = 0,
) -> Method:
    """The posterior of a program with few global sites, by its clients' marginal likelihoods.

    Every client takes part in every round. `fit` stops by itself; its history has the stage that comes next (0 climb, 1 settle,
    2 weigh, 3 done), how far q moved, eigenvalues of its precision that were raised to the prior's, the share of modes that
    clients did not find (`lost`), k-hat and the effective points.

    Args:
        model: any program whose local sites have one mode given the global ones: linear, logistic, Poisson hierarchies, ...
        points: at which clients evaluate gradients and Hessians in a settling round; even.
        corrections: weighing rounds at most; 0: the posterior of the global sites is q itself, a Gaussian.
        weighed: points of a weighing round, one number each on the way up; even.
        enough: effective points that make another weighing round needless, if k-hat is below 0.7 too.
        start: where the climb starts, site -> value; other sites start at the centre of their prior.
        radius: length of the first step at most, in standard deviations of the prior.
        limit: on K, the numbers in the global sites: a client's work and what it sends grow with K^2.
        seed: of the quasi-random points.

    Raises:
        ValueError: points that are odd, or none; negative corrections.
        ProgramError: (at fit) no global site, or more than `limit` numbers in them; params to be learned; a `start` of a site
            that is not global; a local site that Laplace's method cannot integrate, named.
    """
    if min(points, weighed) < 2 or points % 2 or weighed % 2 or corrections < 0:
        raise ValueError(
            f"points ({points}) and weighed ({weighed}) must be even and positive, corrections ({corrections}) >= 0"
        )

    def shared_points(program: Program) -> Points:
        check_integrable(program, limit, start or {})
        size = program.latents.global_block.size
        return standard_points(
            size, settle=points, weigh=weighed, corrections=corrections, seed=seed
        )

    def client(program: Program) -> Client:
        points = shared_points(program)
        return _client(Marginal(program, seen_linear(program)), points)

    def server(program: Program) -> Server:
        rounds = Rounds(Marginal(program), shared_points(program), enough, start or {}, radius)
        return Server(
            state=rounds.begin(),
            update=rounds.update,
            down=rounds.down,
            final=lambda state, clock: {"params": rounds.params(state)},
            finished=finished,
            logged=logged,
        )

    shared = partial(empirical, size=weighed) if corrections else full_normal
    return Method(
        "fedlaplace", model, family(_integrated, shared=shared), client, server, everyone=True
    )


def _integrated(model: Model, latents: Latents, *, shared: Shared) -> Guide:
    """`guides.conditional`, that names the local sites where it fails."""
    guide = conditional(shared=shared, newton_steps=FOR_DRAWS).on(model, latents)

    def named(batch: ClientBatch) -> None:
        try:
            guide(batch)
        except RuntimeError as error:
            if "linalg" not in str(error):
                raise
            sites = ", ".join(f"'{site.name}'" for site in latents.local_block.sites)
            raise ProgramError(
                f"local site {sites} cannot be integrated out: the log density of its client does not curve at its mode "
                f"({error}); give it a prior that curves, a Normal say, or take fedsvi with guides.structured"
            ) from error

    return named


_integrated.reads_all_rows = True  # type: ignore[attr-defined]


def _client(marginal: Marginal, points: Points) -> Client:
    def step(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
        own, steps, at = lane["own"], COLD if "first" in message else WARM, points.at(message)

        def guess(z: Tensor) -> Tensor:
            return own["mode"] + own["slope"] @ (z - own["loc"])

        def values(at: Tensor) -> tuple[Tensor, Tensor]:
            return torch.vmap(lambda z: marginal.value(z, guess(z), batch), chunk_size=VALUED)(at)

        with torch.no_grad():
            if "right" in message:
                found, lost = values(at)
                return {
                    "own": own,
                    "up": {"log_marginals": found, "lost": lost.to(found.dtype).mean()},
                }
            expansion, inner = torch.vmap(
                lambda z: marginal.expand(z, guess(z), batch, steps), chunk_size=EXPANDED
            )(at)
            value, gradient, hessian = (v.mean(0) for v in expansion)
            kept = {
                "mode": inner.mode.mean(0),
                "slope": inner.slope.mean(0),
                "loc": at.mean(0),
            }  # w^(z) as a line near q
            up = {
                "log_marginal": value,
                "gradient": gradient,
                "hessian": hessian,
                "lost": inner.lost.to(value.dtype).mean(),
            }
            own = kept
            if "tril" in message and len(points.weighing):
                up["along"], _ = values(points.along(message))
        return {"own": kept, "up": up}

    def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        return {name: Share(value) for name, value in lane["up"].items()}, lane["own"]

    size, own = marginal.shared.size, marginal.own.size
    return Client(
        own={"mode": torch.zeros(own), "slope": torch.zeros(own, size), "loc": torch.zeros(size)},
        start=lambda message, own: {"own": own},
        phases=(Phase(step),),
        finish=finish,
        params=lambda message, own: message["params"],
        adapt=(),
        like_rows=lambda message: "tril" in message,
    )
