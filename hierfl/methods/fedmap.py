"""FedMAP: each client's weights at their posterior mode, under a learned prior.

    client:  w_k <- argmin (1 / n_k) NLL_k(w) + R(w, gamma),      R = -log prior; some epochs from the last w_k
             omega_k = P(Z_k | w_k) prior(w_k)                    in logs: the product underflows
    server:  gamma <- sum_k omega_k w_k / sum_k omega_k           "average": gamma's mean of an isotropic Normal prior
          or gamma <- gamma - lr sum_k omega_k grad_gamma R(w_k, gamma)                   "gradient", Eq. (3)
          or gamma <- argmin sum_k omega_k R(w_k, gamma)                                  the `best` of a prior

With fixed omega (by rows, or uniform) the gradient server descends the envelope M(gamma) = sum_k
omega_k min_w [...] (Theorem 1).

Source: "FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP
Optimization", 2024, Algorithms 1 to 3 and appendix A; and the code of its first versions, which
computes omega of Eq. (8) and then averages by rows: the default here. With `restart="global"` and
an isotropic prior it is FedProx.
"""

from __future__ import annotations

from typing import Literal

from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Server
from hierfl.methods.about import About
from hierfl.methods.fedmap_client import Setting, map_client
from hierfl.methods.fedmap_server import Best, Weights, map_server
from hierfl.optimizers import SGD, Adam, Optimizer
from hierfl.program.program import Program
from hierfl.program.sites import Model


@About(
    infers=(
        "each client's MAP estimate under a learned prior: a penalty, a density, or a "
        "convex network"
    ),
    source="FedMAP, 2024",
    common="a learned prior",
    own="weights",
    guide="points (MAP)",
    kept="its weights",
    crosses="its weights, or a gradient",
    new="its own MAP estimate",
    down="the prior's params",
    up="`clients`*: how far its weights are from the prior's mean; `loss`*",
)
def fedmap(
    model: Model,
    *,
    optimizer: Optimizer = Adam(1e-3),  # noqa: B008 (frozen)
    steps: int = 5,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 64,
    newton_steps: int = 0,
    loss: Literal["mean", "sum"] = "mean",
    restart: Literal["own", "global"] = "own",
    weights: Weights = "rows",
    server: Literal["average", "gradient"] | Best = "average",
    server_optimizer: Optimizer = SGD(1.0),  # noqa: B008 (frozen)
    init: Literal["module", "client"] = "module",
) -> Method:
    """Return FedMAP of a hierarchical program, by point estimates.

    Args:
        model: `hierfl.models.learned_prior_network(module, prior=...)`, or any program of local
            sites whose prior's mean is a global param. The `best` of a prior needs a param
            `theta.<name>` for each site `w.<name>`.
        optimizer: of the client, restarted in each round. Step size and batch_size: as in the
            authors' code.
        steps: passes over the rows of a round, or mini-batches (`unit`).
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        newton_steps: above 0: steps of Newton's method on all rows, in place of the optimizer's;
            one is exact where the loss is quadratic.
        loss: beside R, the mean negative log likelihood of a row (Eq. 7 and the code), or the sum
            (Eq. 2).
        restart: where a round starts: "own": at the client's own weights of its last round (in the
            first: at theta); "global": always at theta.
        weights: omega, of the clients. "rows": their rows; "uniform"; "likelihood": Eq. (8), which
            nearly always puts all weight on the client with the fewest rows; "mean-likelihood": its
            n_k-th root, the geometric mean of a row (the authors' later code).
        server: "average": theta <- the weighted mean, and a gradient step for any other global param;
            "gradient": a gradient step for all of them; or `prior.best` of the model's prior, its exact
            minimizer.
        server_optimizer: of the server's gradient steps.
        init: where theta starts: "module": at the module's weights; "client" (Algorithm 1): at
            those that one client, drawn in the first round, has fitted alone.

    Raises:
        ProgramError: (at fit) no local site or no learned prior above it; a prior's mean that is no
            global param; or, for the `best` of a prior, names other than `theta.<name>` and
            `w.<name>`.
        ValueError: `loss`, `restart`, `weights`, `server` or `init` is none of the words above.
    """
    _check_words(loss=(loss, "mean sum"), restart=(restart, "own global"))
    _check_words(init=(init, "module client"))
    _check_words(weights=(weights, "rows uniform mean-likelihood likelihood"))
    if not callable(server):
        _check_words(server=(server, "average gradient"))
    how = Setting(
        optimizer=optimizer,
        steps=steps,
        unit=unit,
        batch_size=batch_size,
        newton_steps=newton_steps,
        is_mean=loss == "mean",
        keeps=restart == "own",
        weights=weights,
        rule=server,
        alone=init == "client",
    )

    def client(program: Program) -> Client:
        return map_client(program, how)

    def server_of(program: Program) -> Server:
        return map_server(
            program, rule=server, optimizer=server_optimizer, weights=weights, alone=how.alone
        )

    return Method("fedmap", model, delta, client, server_of)


def _check_words(**words: tuple[object, str]) -> None:
    for name, (word, known) in words.items():
        if word not in known.split():
            raise ValueError(f"{name} is {word!r}; it must be one of {', '.join(known.split())}")
