"""FedLaplace: the posterior of a hierarchy with few global sites, in about ten rounds.

Each client integrates its local sites w out by Laplace's method and returns its log marginal
likelihood of the global sites z,

    l_k(z) = log p(y_k | z) = log integral p(y_k, w | z) dw,        log p(z | y) = log p(z) + sum_k l_k(z) + constant,

its gradient and its Hessian (`hierfl.laplace.marginal`), averaged over a few points z that all
clients share. The server needs only their sums, and clients send nothing else. The server goes
through three stages; each round is one evaluation:

    climb    trust-region Newton to the mode of log p(z | y);
    settle   natural-gradient steps of q(z) = Normal(m, P^-1), on quasi-random points of q, until they are short
             (0.05 sd; 0.2 sd if a weighting stage follows):
                 P <- -E_q[d2 log p],    m <- m + P^-1 E_q[d log p];
    weight   clients return l_k at each of many points of a Student t about q. The t has two widths on each axis,
             one for either side, as the posterior had while q settled (l_k at 2 K + 1 more points).
             Pareto-smoothed weights p(z) exp(sum_k l_k(z)) / t(z) turn the points into draws of p(z
             | y). While too few points are effective, the stage is repeated with a t refitted to
             those draws, and with twice as many points. It begins with 512.

The posterior of the local sites is Gaussian given each of those draws: `guides.conditional`. All is
exact where the model is Gaussian.

This is the idea of INLA (Rue, Martino and Chopin 2009, JRSS B 71), federated; its numerical
integration over z is replaced by natural-gradient variational inference (Khan and Rue 2023,
arXiv:2107.04562) and importance weights (Vehtari et al. 2024, arXiv:1507.02646).
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, tree_map
from hierfl.core.user_warnings import warn
from hierfl.data.batch import ClientBatch
from hierfl.guides.conditional import conditional
from hierfl.guides.global_sites import empirical, full_normal
from hierfl.laplace.glm_rows import seen_linear
from hierfl.laplace.marginal import Marginal, check_integrable
from hierfl.method import Client, Method, Phase, Server, Share
from hierfl.methods.about import About
from hierfl.methods.posteriors.fedlaplace_server import (
    LaplacePoints,
    LaplaceRounds,
    LaplaceState,
    standard_points,
)
from hierfl.methods.posteriors.natural_factors import NearMode, check_even, guess, near, nowhere
from hierfl.program.program import Program
from hierfl.program.sites import Model

# Newton steps to the local mode: in the first round, from the last mode, for draws
COLD, WARM, FOR_DRAWS = 25, 4, 6
# Rounds by which `fit(..., rounds=None)` ends if q has not settled, which takes 5 to 15
# (benchmarks/ROUNDS.md); those left weight the points, and k-hat judges them.
MOST_ROUNDS = 100
# K x D above which fedlaplace says that it is slow: 56 x 28 takes 21 s per round, 18 x 9 0.6 s
SLOW = 1000
EXPANDED, VALUED = 32, 256  # points evaluated together, with derivatives and without
# the same above SLOW: there 32 points took 11 GB and 37 s, 2 points 1 GB and 21 s
FEW_EXPANDED, FEW_VALUED = 2, 64
# what a message holds: a point, points about q, points to weight
SETTLING = frozenset({"loc", "tril", "part"})
FORMS = ({"loc"}, {"loc", "first"}, SETTLING, SETTLING | {"right", "left", "points"})


class LaplaceWork(NamedTuple):
    """The mode of a client's local sites, and by name what it sends."""

    own: NearMode
    up: dict[str, Tensor]


@About(
    infers="the posterior in about ten rounds, if there are few global parameters",
    source="INLA's idea (Rue et al. 2009), federated",
    common="a few sites",
    own="sites with modes",
    guide="weighted points; Laplace given them",
    kept="mode of the local sites and how it moves with the global ones",
    new="one round: its own mode",
    down="where in the global sites to evaluate",
    up=(
        "averaged over a few points: `log_marginal`, one scalar; `gradient`, (K,); "
        "`hessian`, (K, K); `lost`, one scalar. Later rounds: one scalar at each of 512 "
        "points, or more if these do not suffice"
    ),
)
def fedlaplace(
    model: Model,
    *,
    draws: int = 4096,
    settle_draws: int = 32,
    weighting_rounds: int = 5,
    target_ess: int = 400,
    start: Mapping[str, Tensor | float] | None = None,
    radius: float = 1.0,
    max_global_size: int = 300,
) -> Method:
    """Return FedLaplace of a program with few global sites.

    Every client takes part in every round. `fit(method, data)` needs no `rounds=`: it stops
    automatically, after 100 rounds at most. Its history has the next stage (0 climb, 1 settle, 2
    weight, 3 done), how far q moved (`moved`), the number of eigenvalues of its precision that were
    raised to the prior's (`raised`), the fraction of points at which clients found no mode
    (`lost`), k-hat and the number of effective points.

    It is for few global parameters, or few local ones: where K times D, the number of local unknowns,
    is above 1,000, it warns at once that it takes minutes, and names `two_stage`.

    Args:
        model: any program whose local sites have one mode given the global ones: linear, logistic,
            Poisson hierarchies, ...
        draws: of the posterior, and the most points of a weighting round; even. A client sends one
            number per point. The first round has 512 points, and each later one twice as many as
            the one before; all points count, as draws of a mixture. The first has more where too
            few rounds are left for that.
        settle_draws: quasi-random draws of q at which clients evaluate gradients and Hessians in a
            settling round, even.
        weighting_rounds: the most of them; 0: the posterior of the global sites is q itself, a
            Gaussian. The default, 5, allows 11,776 points.
        target_ess: effective sample size at which the weighting stage ends, provided that k-hat is
            below 0.7. The default, 400, is what Vehtari et al. 2021 (arXiv:1903.08008) ask of
            Markov chains: the error of a mean is then 0.05 sd, and less as the points are
            quasi-random. On radon 315 of 512 points left 0.03 sd in a mean and 5% in an sd, 1,266
            of 1,536 points 0.014 sd and 2%.
        start: where the climb starts, site -> value; other sites start at the center of their
            prior.
        radius: largest length of the first step, in standard deviations of the prior.
        max_global_size: largest K, the number of global unknowns. A client's time and its update
            grow with K^2.

    Raises:
        ValueError: `draws` or `settle_draws` is odd or below 2, or `weighting_rounds` is negative.
        ProgramError: (at fit) there is no global site, or K is above `max_global_size`; the model
            has params to learn; `start` names a site that is not global; or a local site cannot be
            integrated by Laplace's method.
    """
    expect(weighting_rounds=(weighting_rounds, "[0, inf)"))
    check_even(draws=draws, settle_draws=settle_draws)

    first = start or {}

    def points_of(program: Program) -> LaplacePoints:
        """Return the points that all clients and the server share."""
        check_integrable(program, max_global_size, first)
        return standard_points(
            program.latents.global_block.size,
            settle=settle_draws,
            most=draws,
            rounds=weighting_rounds,
            seed=program.seed,
        )

    def client(program: Program) -> Client:
        marginal, points = Marginal(program, seen_linear(program)), points_of(program)
        slow = marginal.shared.size * marginal.own.size > SLOW
        expanded, valued = (FEW_EXPANDED, FEW_VALUED) if slow else (EXPANDED, VALUED)

        def values(own: NearMode, at: Tensor, batch: ClientBatch) -> tuple[Tensor, Tensor]:
            """Return l_k at each point, (S,), and whether no mode was found there."""
            return torch.vmap(lambda z: marginal.value(z, guess(own, z), batch), chunk_size=valued)(
                at
            )

        def step(work: LaplaceWork, message: Tree, batch: ClientBatch) -> LaplaceWork:
            """Return l_k at points to weight; else its mean, gradient and Hessian, and the mode near q."""
            own, at = work.own, points.at(message)
            steps = COLD if "first" in message else WARM
            with torch.no_grad():
                if "right" in message:
                    log_marginals, lost = values(own, at, batch)
                    no_mode = lost.to(log_marginals.dtype).mean()
                    of_draws = {"log_marginals": log_marginals, "lost": no_mode}
                    return LaplaceWork(own, of_draws)
                expansion, inner = torch.vmap(
                    lambda z: marginal.expand(z, guess(own, z), batch, steps), chunk_size=expanded
                )(at)
                value, gradient, hessian = (v.mean(0) for v in expansion)
                own = near(inner, at)
                up = {
                    "log_marginal": value,
                    "gradient": gradient,
                    "hessian": hessian,
                    "lost": inner.lost.to(value.dtype).mean(),
                }
                if "tril" in message and points.sizes:
                    up["along"], _ = values(own, points.along(message), batch)
            return LaplaceWork(own, up)

        return Client(
            own=nowhere(marginal),
            start=lambda message, own: LaplaceWork(own, {}),
            phases=(Phase(step, nested=True, turns=max(draws, settle_draws)),),
            finish=lambda work, message, own, rows: (tree_map(Share, work.up), work.own),
            params=lambda message, own: message["params"],
            adapt=(),
            like_rows=lambda message: "tril" in message,
            refuses=partial(_refused_message, points),
        )

    def server(program: Program) -> Server:
        _warn_of_many(program, settle_draws)
        points = points_of(program)
        rounds = LaplaceRounds(Marginal(program), points, target_ess, draws, first, radius)
        return Server(
            state=rounds.begin(),
            update=rounds.update,
            down=rounds.down,
            final=lambda state, clock: {"params": rounds.params(state)},
            finished=lambda state: state.is_done,
            logged=LaplaceState.logged,
            weighted=LaplaceState.weighted,
        )

    shared = partial(empirical, size=draws) if weighting_rounds else full_normal
    return Method(
        "fedlaplace",
        model,
        conditional(shared=shared, newton_steps=FOR_DRAWS),
        client,
        server,
        everyone=True,
        most_rounds=MOST_ROUNDS,
        traits=frozenset({"by rows"}),
    )


def _warn_of_many(program: Program, points: int) -> None:
    """Warn if settling rounds are slow: many global and many local unknowns."""
    size, inside = program.latents.global_block.size, program.latents.local_block.size
    if size * inside > SLOW:
        warn(
            f"fedlaplace takes minutes here: clients differentiate {inside} local parameters twice "
            f"in {size} global ones, at {points} points per round. Use two_stage(model), which "
            "sends no Hessian of the global parameters",
        )


def _refused_message(points: LaplacePoints, message: Tree, first: Tree) -> str | None:
    """Return why a message cannot be the server's, whose first one is given; None: it can."""
    size, dtype = len(first["loc"]), first["loc"].dtype
    if set(message) not in FORMS or not all(isinstance(v, Tensor) for v in message.values()):
        return f"its names are {sorted(map(str, message))[:9]}"
    weighting = "points" in message
    shapes = {"first": (), "part": (), "tril": (size, size)}
    for name, value in message.items():
        kind = torch.int64 if name == "part" else dtype
        right = value.shape == shapes.get(name, (size,)) and value.dtype == kind
        if name != "points" and not right:
            return f"'{name}' has another shape or dtype"
    sizes = points.sizes if weighting else (0,) * len(points.settling)
    part = int(message.get("part", 0))
    exists = 0 <= part < len(sizes)
    if not exists or (weighting and message["points"].shape != (sizes[part], 0)):
        return "it asks for points that do not exist"
    return None
