"""FedMAP: every client's weights at their posterior mode, under a prior that the server learns from them.

    client:  w_k <- argmin (1 / n_k) NLL_k(w) + R(w, gamma),      R = -log prior; by some epochs, from where it last stood
             omega_k = P(Z_k | w_k) prior(w_k)                    in logs: as a product it is 0 for any real client
    server:  gamma <- sum_k omega_k w_k / sum_k omega_k           "average": gamma's mean of an isotropic Normal prior
          or gamma <- gamma - lr sum_k omega_k grad_gamma R(w_k, gamma)                   "gradient", Eq. (3)
          or gamma <- argmin sum_k omega_k R(w_k, gamma)                                  a prior's own `best`

With fixed omega (by rows, or uniform) the gradient server descends the envelope M(gamma) = sum_k omega_k min_w [...] (Theorem 1).

Source: "FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP Optimization", 2024, Algorithms 1 to 3
and appendix A; and the code of its first versions, which computes omega of Eq. (8) and then averages by rows: the default here.
With `restart="global"` and an isotropic prior it is FedProx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, jacrev
from torch.utils._pytree import tree_flatten, tree_unflatten

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, LogShare, Method, Phase, Server, Share, Up, slope
from hierfl.methods.fedmap_server import Best, Omega, map_server
from hierfl.methods.prior_params import at_prior, mean_params
from hierfl.optimisers import SGD, Adam, Optimiser, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model

LONE = 1e9  # so steep that the weights of the first round are 1 for one client and 0 for all others


@recorded
def fedmap(
    model: Model,
    *,
    optimiser: Optimiser = Adam(1e-3),  # noqa: B008 (frozen)
    steps: int = 5,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 64,
    newton_steps: int = 0,
    loss: Literal["mean", "sum"] = "mean",
    restart: Literal["own", "global"] = "own",
    omega: Omega = "size",
    server: Literal["average", "gradient"] | Best = "average",
    server_optimiser: Optimiser = SGD(1.0),  # noqa: B008 (frozen)
    init: Literal["module", "client"] = "module",
) -> Method:
    """FedMAP of a hierarchical program, by point estimates.

    Args:
        model: `hierfl.models.map_network(module, prior=...)`; or any program of local sites, their prior's mean a global param.
            "average" and a prior's `best` ask for a param `theta.<name>` to each site `w.<name>`.
        optimiser: of the client, started anew each round; rate and batch as in the authors' code.
        steps: passes over the rows a round, or mini-batches (`unit`).
        unit: "epoch" or "step".
        batch_size: rows a mini-batch; None: all.
        newton_steps: instead of all that, so many steps of Newton's method on all rows: exact in one where the loss is quadratic.
        loss: beside R, the mean negative log likelihood of a row (Eq. 7, the code), or the sum (Eq. 2).
        restart: a round starts from the client's own weights of its last one (the first: from theta), or always from theta.
        omega: the clients' weights: "size", by rows; "uniform"; "likelihood", Eq. (8), all but always one client, that of fewest
            rows; "mean-likelihood", its n_k-th root, the geometric mean of a row (the authors' later code).
        server: "average": theta <- the weighted mean, any other global param a gradient step; "gradient" for all of them; or
            `prior.best` of the model's prior: its exact minimiser.
        server_optimiser: of those gradient steps.
        init: begin at the module's weights, or (Algorithm 1) at those that one client, drawn in the first round, has fitted alone.

    Raises:
        ProgramError: (at fit) no local site, nothing global to learn, or names that `server` cannot match.
        ValueError: another word than those above.
    """
    _check_words(
        loss=(loss, "mean sum"), restart=(restart, "own global"), init=(init, "module client")
    )
    _check_words(omega=(omega, "size uniform mean-likelihood likelihood"))
    if not callable(server):
        _check_words(server=(server, "average gradient"))

    def client(program: Program) -> Client:
        above, mine = program.start()
        if not mine or not above:
            raise ProgramError(
                "fedmap needs local sites and a learned prior above them: a pyro.param outside the clients plate"
            )
        pairs = {} if server == "gradient" and init == "module" else _pairs(program, server)
        sloped = (
            ()
            if callable(server)
            else tuple(name for name in above if server == "gradient" or name not in pairs)
        )
        by_fit = omega.endswith("likelihood")
        looks = bool(by_fit or sloped or init == "client")

        def objective(
            w: Params, gamma: Params, batch: ClientBatch, pull: Tensor | float = 1.0
        ) -> Tensor:
            terms = program.terms({**gamma, **w}, batch)
            return (
                terms.nll / batch.counts if loss == "mean" else terms.nll
            ) + pull * terms.local_kl

        def pull(message: Tree) -> Tensor | float:  # none, while the first client fits alone
            return 1.0 - message["alone"] if init == "client" else 1.0

        def start(message: Tree, own: Tree) -> Tree:
            theta = at_prior(program, message["gamma"])
            keep = own["begun"] if restart == "own" else torch.zeros(())
            w = tree_map(lambda mine, at: torch.where(keep > 0.0, mine, at), own["w"], theta)
            zero = torch.zeros(())
            return {
                "w": w,
                "state": optimiser.init(w),
                "loss": zero,
                "omega": zero,
                "slope": {name: 0.0 * above[name] for name in sloped},
            }

        def move(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            gradient, value = slope(
                lambda w: objective(w, message["gamma"], batch, pull(message)), lane["w"]
            )
            w, state = step(optimiser, gradient, Stepped(lane["w"], lane["state"]))
            return {**lane, "w": w, "state": state, "loss": value}

        def solve(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            w, value = _newton(
                lambda w: objective(w, message["gamma"], batch, pull(message)).sum(), lane["w"]
            )
            return {**lane, "w": w, "loss": value}

        def by_size(rows: Tensor) -> Tensor:
            return rows.log() if omega == "size" else torch.zeros_like(rows)

        def look(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            """Log omega_k, and the slope of R in what is learned by gradients, at the weights the client has come to."""
            gamma, w, rows = message["gamma"], lane["w"], batch.counts.sum()

            def penalty(part: Params) -> Tensor:
                terms = program.terms({**gamma, **part, **w}, batch)
                return terms.local_kl.sum() + terms.global_kl

            log_omega = by_size(rows)
            if by_fit:
                terms = program.terms({**gamma, **w}, batch)
                log_omega = -(terms.nll + terms.local_kl).sum() / (
                    rows if omega == "mean-likelihood" else 1.0
                )
            if init == "client":
                drawn = LONE * noise.uniforms(batch.key[0], (), rows.dtype)
                log_omega = torch.where(message["alone"] > 0.0, drawn, log_omega)
            slopes = grad(penalty)({name: gamma[name] for name in sloped}) if sloped else {}
            return {**lane, "omega": log_omega, "slope": slopes}

        def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            gamma, w = message["gamma"], lane["w"]
            value: Tree = {"slope": lane["slope"]}
            if (
                pairs
            ):  # away from theta: squares of small differences, not small differences of squares
                value["away"] = {
                    theta: w[site].reshape(gamma[theta].shape) - gamma[theta]
                    for theta, site in pairs.items()
                }
            if callable(server):
                value["square"] = tree_map(torch.square, value["away"])
            up: Up = {
                "clients": LogShare(value, lane["omega"] if looks else by_size(rows)),
                "loss": Share(lane["loss"], rows),
            }
            return up, {
                "w": w,
                "begun": torch.where(message["alone"] > 0.0, own["begun"], torch.ones(())),
            }

        work = Phase(solve, newton_steps) if newton_steps else Phase(move, steps, unit, batch_size)
        return Client(
            own={"w": mine, "begun": torch.zeros(())},
            start=start,
            phases=(
                work,
                Phase(look, int(looks), batch_size=None if by_fit else 1),
            ),  # priors read no rows
            finish=finish,
            params=lambda message, own: {**message["gamma"], **own["w"]},
        )

    def server_of(program: Program) -> Server:
        return map_server(
            program, rule=server, optimiser=server_optimiser, omega=omega, alone=init == "client"
        )

    return Method("fedmap", model, delta, client, server_of)


def _pairs(program: Program, server: Literal["average", "gradient"] | Best) -> dict[str, str]:
    """Return global param -> the local one whose prior's mean it is."""
    pairs = {param: f"{site}.at" for site, param in mean_params(program).items()}
    odd = [site for theta, site in pairs.items() if site != f"w.{theta.removeprefix('theta.')}.at"]
    if callable(server) and odd:
        raise ProgramError(
            f"the exact step of a prior moves 'theta.<name>' by site 'w.<name>', and '{odd[0]}' has no such name: "
            f"use hierfl.models.map_network, or server='average'"
        )
    return pairs


def _check_words(**words: tuple[object, str]) -> None:
    for name, (word, known) in words.items():
        if word not in known.split():
            raise ValueError(f"{name} is {word!r}; it must be one of {', '.join(known.split())}")


def _newton(loss: Callable[[Tree], Tensor], params: Tree) -> tuple[Tree, Tensor]:
    """One step of Newton's method, and the loss before it; reverse over reverse, for few weights."""
    leaves, spec = tree_flatten(params)
    sizes = [leaf.numel() for leaf in leaves]

    def unflat(vector: Tensor) -> Tree:
        return tree_unflatten(
            [v.reshape(leaf.shape) for v, leaf in zip(vector.split(sizes), leaves, strict=True)],
            spec,
        )

    def at(vector: Tensor) -> Tensor:
        return loss(unflat(vector))

    vector = torch.cat([leaf.flatten() for leaf in leaves])
    move = torch.linalg.inv_ex(jacrev(grad(at))(vector)).inverse @ grad(at)(vector)
    return unflat(vector - move), at(vector)
