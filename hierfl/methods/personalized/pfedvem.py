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

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import transform_to

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, chosen
from hierfl.data.batch import ClientBatch
from hierfl.guides.mean_field import mean_field
from hierfl.method import (
    Client,
    Clock,
    LogShare,
    Method,
    Phase,
    Server,
    Share,
    Up,
    over_draws,
    slope,
)
from hierfl.methods.about import About
from hierfl.methods.parts.prior_params import mean_params
from hierfl.models.bayesian_network import SPREAD
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Model

LEAST = 1e-3  # the smallest rho_k


@About(
    infers="each client's posterior about common weights, clients weighted by confidence",
    source="Zhu et al. 2023, arXiv:2305.12557",
    common="weights; a prior mean",
    own="weights",
    guide="mean field",
    kept="its posterior and its spread",
    crosses="the mean of its posterior, and its spread",
    new="its own posterior, about the common weights",
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
    how = PFedVEMSetting(optimizer, base_optimizer, draws, confidence)

    def client(program: Program) -> Client:
        em = Expectation(program, how)
        heads = Phase(em.expect, head_steps, batch_size=head_batch_size)
        count = steps if em.base else 0
        return em.client(heads, Phase(em.move, count, unit, batch_size))

    return Method("pfedvem", model, mean_field, client, _server)


def _server(program: Program) -> Server:
    def update(theta: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        return {**theta, **means["head"], **means["base"]}

    return Server(program.start()[0], update)


@dataclass(frozen=True)
class PFedVEMSetting:
    """The arguments of `pfedvem` that clients need."""

    optimizer: Optimizer
    base_optimizer: Optimizer
    draws: int
    confidence: bool


class Expectation:
    """A client of one program."""

    def __init__(self, program: Program, how: PFedVEMSetting) -> None:
        self.program, self.how = program, how
        self.above, self.mine = program.start()
        if SPREAD not in self.mine:
            raise ProgramError(
                f"pfedvem fits a scale for each client, a local param '{SPREAD}', and the model "
                'has none: take bayesian_network(module, prior_scale="client")'
            )
        self.means = mean_params(program)  # site -> its prior's mean
        self.links = {spec.name: transform_to(spec.constraint) for spec in program.params}
        heads = set(self.means.values())
        self.base = [name for name in self.above if name not in heads]

    def client(self, heads: Phase, base: Phase) -> Client:
        """Return the client of two phases."""
        return Client(
            own={"phi": self.mine, "seen": torch.zeros(())},
            start=self.start,
            phases=(heads, base),
            finish=self.finish,
            params=lambda message, own: {**message, **self.served(message, own)},
            adapt=(heads,),
            seen=lambda own: own["seen"],
        )

    def served(self, message: Tree, own: Tree) -> Params:
        """Return a client's own params; before its first round, those about the common weights."""
        begin = dict(self.mine)
        for site, param in self.means.items():
            begin[f"{site}.loc"] = message[param].reshape(self.mine[f"{site}.loc"].shape)
        return chosen(own["seen"], own["phi"], begin)

    def start(self, message: Tree, own: Tree) -> Tree:
        """Return the working state: the last q, the spread that it shows, and the base."""
        phi = self.served(message, own)
        if self.how.confidence:
            spread = chosen(own["seen"], self.spread_of(phi, message), phi[SPREAD])
        else:
            spread = phi[SPREAD]
        q = {name: value for name, value in phi.items() if name != SPREAD}
        base = {name: message[name] for name in self.base}
        return {
            "q": Stepped(q, self.how.optimizer.init(q)),
            "spread": spread,
            "base": Stepped(base, self.how.base_optimizer.init(base)),
            "loss": torch.zeros(()),
        }

    def spread_of(self, phi: Params, message: Tree) -> Tensor:
        """Return the most likely rho_k, unconstrained, of the shape of its param."""
        total, count = torch.zeros(()), 0
        for site, param in self.means.items():
            name = f"{site}.scale"
            away = phi[f"{site}.loc"] - message[param].reshape(phi[f"{site}.loc"].shape)
            total = total + self.links[name](phi[name]).square().sum() + away.square().sum()
            count += away.numel()
        rho = (total / count).sqrt().clamp(min=LEAST)
        return self.links[SPREAD].inv(rho).expand(self.mine[SPREAD].shape)

    def loss(self, params: Params, batch: ClientBatch, *, prior: bool) -> Tensor:
        """Return [ E_q NLL_k (+ KL) ] / n_k, ()."""

        def one(b: ClientBatch) -> Tensor:
            terms = self.program.terms(params, b)
            total = terms.nll + terms.local_kl if prior else terms.nll
            return (total / b.counts).sum()

        return over_draws(one, batch, self.how.draws, keyed=self.program.in_vmap)

    def expect(self, work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        """Take a step of q_k."""
        fixed = {**message, SPREAD: work["spread"]}
        gradient, value = slope(
            lambda q: self.loss({**fixed, **q}, batch, prior=True), work["q"].params
        )
        return {**work, "q": step(self.how.optimizer, gradient, work["q"]), "loss": value}

    def move(self, work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        """Take a step of the base."""
        fixed = {**message, **work["q"].params, SPREAD: work["spread"]}
        gradient, _ = slope(
            lambda base: self.loss({**fixed, **base}, batch, prior=False), work["base"].params
        )
        return {**work, "base": step(self.how.base_optimizer, gradient, work["base"])}

    def finish(self, work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        """Return the update, the head's means by confidence and the base by rows, and the client state."""
        q, rho = work["q"].params, self.links[SPREAD](work["spread"]).mean()
        head = {p: q[f"{site}.loc"].reshape(message[p].shape) for site, p in self.means.items()}
        weight = -2.0 * rho.log() if self.how.confidence else torch.zeros(())
        up: Up = {
            "head": LogShare(head, weight),
            "base": Share(work["base"].params, rows),
            "loss": Share(work["loss"]),
            "rho": Share(rho),
        }
        phi = {**q, SPREAD: work["spread"]}
        return up, {"phi": {name: phi[name] for name in self.mine}, "seen": torch.ones(())}
