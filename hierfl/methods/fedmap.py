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

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, as_tree, as_vector, tree_map, zeros_like
from hierfl.core.user_warnings import warn
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, LogShare, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, DescentState, OwnParams, personal_client
from hierfl.methods.parts.prior_params import at_prior, learned_hierarchy, mean_params
from hierfl.optimizers import SGD, Adam, Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Model

LONE = 1e9  # so steep that the weights of the first round are 1 for one client and 0 for all others
Best = Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]
Weights = Literal["rows", "uniform", "mean-likelihood", "likelihood"]
Rule = Literal["average", "gradient"] | Best


class FedMAPServerState(NamedTuple):
    """Global params, the optimizer's memory, and whether one client fits alone in the next round, ()."""

    gamma: Params
    memory: Tree
    alone: Tensor


class Influence(NamedTuple):
    """What a client's weights tell of the global params: log omega_k, (), and R's gradient in some."""

    log_omega: Tensor
    slope: Params


@About(
    infers="each client's MAP estimate under a learned prior: a penalty, a density, or a convex network",
    source="FedMAP, 2024",
    common="a learned prior",
    own="weights",
    guide="points (MAP)",
    kept="its weights",
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
    server: Rule = "average",
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
    expect(
        loss=(loss, ("mean", "sum")),
        restart=(restart, ("own", "global")),
        init=(init, ("module", "client")),
        weights=(weights, ("rows", "uniform", "mean-likelihood", "likelihood")),
    )
    if not callable(server):
        expect(server=(server, ("average", "gradient")))
    descent = Descent(optimizer, steps, unit, batch_size)
    by_fit = weights.endswith("likelihood")  # omega depends on how well weights fit the rows
    alone = init == "client"  # one client fits alone in the first round

    def by_size(rows: Tensor) -> Tensor:
        """Return the log of omega where it depends on the rows alone."""
        return rows.log() if weights == "rows" else torch.zeros_like(rows)

    def client(program: Program) -> Client:
        above, mine = learned_hierarchy(program, "fedmap")
        # a global param that is a prior's mean -> the local param of its site
        pairs = _pairs(program, server) if server != "gradient" or alone else {}
        every = server == "gradient"  # else the params that no mean of weights moves
        sloped = [] if callable(server) else [n for n in above if every or n not in pairs]
        looks = bool(by_fit or sloped or alone)  # for omega or a gradient, after the fit

        def objective(w: Params, message: Tree, batch: ClientBatch) -> Tensor:
            terms = program.terms({**message["gamma"], **w}, batch)
            nll = terms.nll / batch.counts if loss == "mean" else terms.nll
            # 0 while the first client fits alone
            pull = 1.0 - message["alone"] if alone else 1.0
            return nll + pull * terms.local_kl

        def start(message: Tree, own: OwnParams) -> DescentState:
            w = own.params if restart == "own" else at_prior(program, message["gamma"])
            none = Influence(torch.zeros(()), zeros_like({n: above[n] for n in sloped}))
            return descent.begin(w, none)

        def solve(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            """Take a Newton step."""
            w, value = _newton(lambda w: objective(w, message, batch).sum(), work.w)
            return work._replace(w=w, loss=value)

        def look(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            """Find log omega_k at the round's last weights, and R's gradient in the global params."""
            gamma, w, rows = message["gamma"], work.w, batch.counts.sum()

            def penalty(part: Params) -> Tensor:
                terms = program.terms({**gamma, **part, **w}, batch)
                return terms.local_kl.sum() + terms.global_kl

            log_omega = by_size(rows)
            if by_fit:
                terms = program.terms({**gamma, **w}, batch)
                root = rows if weights == "mean-likelihood" else 1.0
                log_omega = -(terms.nll + terms.local_kl).sum() / root
            if alone:
                drawn = LONE * noise.uniforms(batch.key[0], (), rows.dtype)
                log_omega = torch.where(message["alone"] > 0.0, drawn, log_omega)
            slopes = grad(penalty)({n: gamma[n] for n in sloped}) if sloped else {}
            return work._replace(beside=Influence(log_omega, slopes))

        def finish(
            work: DescentState, message: Tree, own: OwnParams, rows: Tensor
        ) -> tuple[Up, OwnParams]:
            (log_omega, slopes), w, gamma = work.beside, work.w, message["gamma"]
            value = {"slope": slopes}
            if pairs:
                value["away"] = {
                    theta: w[local].reshape(gamma[theta].shape) - gamma[theta]
                    for theta, local in pairs.items()
                }
            if callable(server):
                value["square"] = tree_map(torch.square, value["away"])
            omega = log_omega if looks else by_size(rows)
            seen = torch.where(message["alone"] > 0.0, own.seen, torch.ones(()))
            up: Up = {"clients": LogShare(value, omega), "loss": Share(work.loss, rows)}
            return up, OwnParams(w, seen)

        fitting = descent.phase(lambda w, work, message, batch: objective(w, message, batch))
        # a prior reads no rows: where omega needs none, one row is enough
        looking = Phase(look, int(looks), batch_size=None if by_fit else 1, scores_rows=by_fit)
        return personal_client(
            OwnParams(mine, torch.zeros(())),
            lambda message, own: own._replace(params=at_prior(program, message["gamma"])),
            start=start,
            phases=(Phase(solve, newton_steps) if newton_steps else fitting, looking),
            finish=finish,
            params=lambda message, own: {**message["gamma"], **own.params},
        )

    def server_of(program: Program) -> Server:
        return _server(program, server, server_optimizer, by_fit=by_fit, alone=alone)

    return Method("fedmap", model, delta, client, server_of)


def _server(
    program: Program, rule: Rule, optimizer: Optimizer, *, by_fit: bool, alone: bool
) -> Server:
    """Return the server; by omega it gets means `away` of w - theta, its `square`, `slope` of -log prior."""

    def update(state: FedMAPServerState, means: dict[str, Tree], clock: Clock) -> FedMAPServerState:
        moments, (gamma, memory, first) = means["clients"], state
        is_first = bool(first > 0.0)
        several = by_fit and clock.clients > 1 and not is_first
        if several and float(means["effective_clients"]) < 1.5:
            warn(
                "fedmap: nearly all weight lies on one client, the others hardly count: use weights='rows'",
            )
        averaged = {name: gamma[name] + away for name, away in moments.get("away", {}).items()}
        if is_first:
            gamma = {**gamma, **averaged}
        elif callable(rule):
            gamma = {**gamma, **_best(rule, gamma, moments)}
        else:
            slopes = {**zeros_like(gamma), **moments["slope"]}
            gamma, memory = step(optimizer, slopes, Stepped(gamma, memory))
            gamma = {**gamma, **averaged} if rule == "average" else gamma
        return FedMAPServerState(gamma, memory, torch.zeros(()))

    above = program.start()[0]
    return Server(
        FedMAPServerState(above, optimizer.init(above), torch.tensor(float(alone))),
        update,
        down=lambda state, clock: {"gamma": state.gamma, "alone": state.alone},
    )


def _pairs(program: Program, rule: object) -> dict[str, str]:
    """Return, for each global param that is a prior's mean, the local param of its site."""
    pairs = {param: f"{site}.at" for site, param in mean_params(program).items()}
    unpaired = [
        mine for theta, mine in pairs.items() if mine != f"w.{theta.removeprefix('theta.')}.at"
    ]
    if callable(rule) and unpaired:
        raise ProgramError(
            f"the exact step of a prior moves 'theta.<name>' by site 'w.<name>', and '{unpaired[0]}' "
            "has no such name: use hierfl.models.learned_prior_network, or server='average'"
        )
    return pairs


def _newton(loss: Callable[[Tree], Tensor], params: Tree) -> tuple[Tree, Tensor]:
    """Return params after a Newton step with a dense Hessian, and the loss before it."""

    def at(vector: Tensor) -> Tensor:
        return loss(as_tree(vector, params))

    vector = as_vector(params)
    move = torch.linalg.inv_ex(jacrev(grad(at))(vector)).inverse @ grad(at)(vector)
    return as_tree(vector - move, params), at(vector)


def _best(best: Best, gamma: Params, moments: Tree) -> Params:
    """Return params after a prior's exact step; those of a tensor are `<part>.<tensor>`."""
    new: Params = {}
    for theta, away in moments["away"].items():
        tensor = theta.removeprefix("theta.")
        mine = {
            name.partition(".")[0]: value
            for name, value in gamma.items()
            if name.partition(".")[2] == tensor
        }
        spread = (moments["square"][theta] - away.square()).clamp(min=0.0)
        new |= {
            f"{part}.{tensor}": value
            for part, value in best(mine, mine["theta"] + away, spread).items()
        }
    return new
