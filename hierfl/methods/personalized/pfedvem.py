"""pFedVEM: variational EM, in which clients count by their confidence.

    model:   w_k ~ N(w, rho_k^2 I) of d weights, y_k ~ p(y | w_k, theta);  q(w_k) = N(m_k, diag s_k^2)
    client:  rho_k^2 <- (sum_j s_kj^2 + |m_k - w|^2) / d,   at its last q and the new w
             q_k <- steps down [ E_q NLL_k + KL(q_k || N(w, rho_k^2 I)) ] / n_k
             theta_k <- theta;  steps down E_q NLL_k / n_k
    server:  w <- sum_k m_k rho_k^-2 / sum_k rho_k^-2,    theta <- sum_k (n_k / n) theta_k

A client whose weights are certain, and near the common ones, counts for more: 1 / rho_k^2 is its
confidence, the precision of its weights about w that is most likely.

Source: Zhu, Ma and Blaschko 2023, arXiv:2305.12557. Differences: clients that the round does not
sample do not train; new means start at w; and the objective is divided by the rows, which scales
step sizes. With few weights each, the server's can collapse on one client whose rho_k goes to 0
(here 0.001): `effective_head` in the history is the number of clients that count. The pull toward w
is then stiff, and plain steps diverge, which is refused.
"""

from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import chosen
from hierfl.data.batch import ClientBatch
from hierfl.guides.mean_field import mean_field
from hierfl.method import Client, LogShare, Method, Phase, Server, Share, Up, over_draws, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import OwnParams, TwoLevels, personal_client
from hierfl.methods.parts.prior_params import links_of, mean_params
from hierfl.models.bayesian_network import SPREAD
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Model

LEAST = 1e-3  # the smallest rho_k


@About(
    infers="each client's posterior around common weights, clients weighted by confidence",
    source="Zhu et al. 2023, arXiv:2305.12557",
    common="weights; a prior mean",
    own="weights",
    guide="mean field",
    kept="its posterior and its spread",
    new="its own posterior, around the common weights",
    up="`head`: the mean of its posterior, by its confidence; `base`*: other weights; `loss`; `rho`: its spread",
)
def pfedvem(
    model: Model,
    *,
    optimizer: Optimizer = SGD(0.01, momentum=0.9),  # noqa: B008 (frozen)
    base_optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    head_steps: int = 10,
    head_batch_size: int | None = None,
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 50,
    draws: int = 5,
    confidence: bool = True,
) -> Method:
    """Return pFedVEM of a hierarchical program whose prior has one scale for each client.

    Args:
        model: `hierfl.models.bayesian_network(module, local=..., prior_loc="learned",
            prior_scale="client")`; what is not local is the base.
        optimizer: of q_k, restarted in each round. head_steps, draws, batch_size and momentum: the
            authors' code; step sizes are ours.
        base_optimizer: of the base, restarted in each round.
        head_steps: steps of a round on q_k.
        head_batch_size: rows of a mini-batch of these; None: all, as the authors.
        steps: mini-batches of a round on the base, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch of the base; None: all.
        draws: of q_k, that each gradient is averaged over.
        confidence: whether clients count by 1 / rho_k^2, and rho_k is fitted; False: equally,
            with rho_k where it starts.

    Raises:
        ValueError: `head_steps` or `draws` is below 1.
        ProgramError: (at fit) the model has no local sites, no local param `spread`, or prior means
            that are no global params.
    """
    expect(head_steps=(head_steps, "[1, inf)"), draws=(draws, "[1, inf)"))

    def client(program: Program) -> Client:
        above, mine = program.start()
        if SPREAD not in mine:
            raise ProgramError(
                f"pfedvem fits a scale for each client, a local param '{SPREAD}', and the model "
                'has none: use bayesian_network(module, prior_scale="client")'
            )
        means = mean_params(program)  # site -> the global param that is its prior's mean
        links = links_of(program)
        base_names = [name for name in above if name not in means.values()]

        def about(message: Params) -> Params:
            """Return a client's own params about the common weights."""
            locs = {
                f"{s}.loc": message[p].reshape(mine[f"{s}.loc"].shape) for s, p in means.items()
            }
            return {**mine, **locs}

        def most_likely(phi: Params, message: Params) -> Tensor:
            """Return the most likely rho_k, unconstrained, of the shape of its param."""
            total, count, center = torch.zeros(()), 0, about(message)
            for site in means:
                loc, scale = f"{site}.loc", f"{site}.scale"
                away, sd = phi[loc] - center[loc], links[scale](phi[scale])
                total = total + sd.square().sum() + away.square().sum()
                count += away.numel()
            rho = (total / count).sqrt().clamp(min=LEAST)
            return links[SPREAD].inv(rho).expand(mine[SPREAD].shape)

        def loss(params: Params, batch: ClientBatch, *, prior: bool) -> Tensor:
            """Return [ E_q NLL_k (+ KL) ] / n_k, ()."""

            def at(b: ClientBatch) -> Tensor:
                terms = program.terms(params, b)
                return ((terms.nll + terms.local_kl if prior else terms.nll) / b.counts).sum()

            return over_draws(at, batch, draws, keyed=program.in_vmap)

        def start(message: Params, own: OwnParams) -> TwoLevels:
            """Return the base as theta, q_k as phi, and rho_k, unconstrained, `beside`."""
            phi = own.params
            spread = phi[SPREAD]
            if confidence:
                spread = chosen(own.seen, most_likely(phi, message), spread)
            q = {name: value for name, value in phi.items() if name != SPREAD}
            base = {name: message[name] for name in base_names}
            at_base, at_q = Stepped(base, base_optimizer.init(base)), Stepped(q, optimizer.init(q))
            return TwoLevels(at_base, at_q, torch.zeros(()), spread)

        def on_head(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
            fixed, q = {**message, SPREAD: work.beside}, work.phi
            gradient, value = slope(lambda p: loss({**fixed, **p}, batch, prior=True), q.params)
            return work._replace(phi=step(optimizer, gradient, q), loss=value)

        def on_base(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
            fixed, base = {**message, **work.phi.params, SPREAD: work.beside}, work.theta
            gradient, _ = slope(lambda p: loss({**fixed, **p}, batch, prior=False), base.params)
            return work._replace(theta=step(base_optimizer, gradient, base))

        def finish(
            work: TwoLevels, message: Params, own: OwnParams, rows: Tensor
        ) -> tuple[Up, OwnParams]:
            q, rho = work.phi.params, links[SPREAD](work.beside).mean()
            head = {p: q[f"{site}.loc"].reshape(message[p].shape) for site, p in means.items()}
            weight = -2.0 * rho.log() if confidence else torch.zeros(())
            up: Up = {
                "head": LogShare(head, weight),
                "base": Share(work.theta.params, rows),
                "loss": Share(work.loss),
                "rho": Share(rho),
            }
            phi = {**q, SPREAD: work.beside}
            return up, OwnParams({name: phi[name] for name in mine}, torch.ones(()))

        heads = Phase(on_head, head_steps, batch_size=head_batch_size, turns=draws)
        base = Phase(on_base, steps if base_names else 0, unit, batch_size, turns=draws)
        return personal_client(
            OwnParams(mine, torch.zeros(())),
            lambda message, own: own._replace(params=about(message)),
            start=start,
            phases=(heads, base),
            finish=finish,
            params=lambda message, own: {**message, **own.params},
            adapt=(heads,),
        )

    def server(program: Program) -> Server:
        return Server(
            program.start()[0], lambda theta, means, clock: theta | means["head"] | means["base"]
        )

    return Method("pfedvem", model, mean_field, client, server)
