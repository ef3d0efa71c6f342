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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributions import transform_to

from hierfl.core.arguments import expect
from hierfl.core.trees import chosen
from hierfl.data.batch import ClientBatch
from hierfl.guides.mean_field import mean_field
from hierfl.method import Client, LogShare, Method, Phase, Server, Share, Up, over_draws, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import OwnParams, personal_client
from hierfl.methods.parts.prior_params import mean_params
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

    weighting = ConfidenceWeighting(
        optimizer,
        base_optimizer,
        head_steps,
        head_batch_size,
        (steps, unit, batch_size),
        draws,
        confidence,
    )
    return Method("pfedvem", model, mean_field, weighting.client, weighting.server)


@dataclass(frozen=True)
class ConfidenceWeighting:
    """What clients compute, by the arguments of `pfedvem`; `base` are those of its phase."""

    optimizer: Optimizer
    base_optimizer: Optimizer
    head_steps: int
    head_batch_size: int | None
    base: tuple[int, Literal["step", "epoch"], int | None]
    draws: int
    confidence: bool

    def client(self, program: Program) -> Client:
        """Return the client of one program."""
        above, mine = program.start()
        if SPREAD not in mine:
            raise ProgramError(
                f"pfedvem fits a scale for each client, a local param '{SPREAD}', and the model "
                'has none: use bayesian_network(module, prior_scale="client")'
            )
        means = mean_params(program)
        links = {spec.name: transform_to(spec.constraint) for spec in program.params}
        base_names = [name for name in above if name not in means.values()]
        own = OwnPosterior(self, program, mine, means, links, base_names)
        heads = Phase(own.on_head, self.head_steps, batch_size=self.head_batch_size)
        steps, unit, batch_size = self.base
        bases = Phase(own.on_base, steps if base_names else 0, unit, batch_size)
        return personal_client(
            OwnParams(mine, torch.zeros(())),
            lambda message, state: state._replace(params=own.about(message)),
            start=own.start,
            phases=(heads, bases),
            finish=own.finish,
            params=lambda message, state: {**message, **state.params},
            adapt=(heads,),
        )

    def server(self, program: Program) -> Server:
        """Return the server of one program."""
        return Server(
            program.start()[0], lambda theta, means, clock: theta | means["head"] | means["base"]
        )


class PFedVEMWork(NamedTuple):
    """q_k, rho_k unconstrained, of the shape of its param, the copy of the base, and the last loss, ()."""

    q: Stepped
    spread: Tensor
    base: Stepped
    loss: Tensor


@dataclass(frozen=True)
class OwnPosterior:
    """A client's q_k of params `mine`, about global `means`, site -> param, and its copy of the base."""

    of: ConfidenceWeighting
    program: Program
    mine: Params
    means: Mapping[str, str]
    links: Mapping[str, Any]
    base_names: Sequence[str]

    def about(self, message: Params) -> Params:
        """Return a client's own params about the common weights."""
        locs = {
            f"{site}.loc": message[param].reshape(self.mine[f"{site}.loc"].shape)
            for site, param in self.means.items()
        }
        return {**self.mine, **locs}

    def most_likely(self, phi: Params, message: Params) -> Tensor:
        """Return the most likely rho_k, unconstrained, of the shape of its param."""
        total, count = torch.zeros(()), 0
        for name, loc in self.about(message).items():
            if name.endswith(".loc"):
                scale = name.removesuffix("loc") + "scale"
                away = phi[name] - loc
                total = total + self.links[scale](phi[scale]).square().sum() + away.square().sum()
                count += away.numel()
        rho = (total / count).sqrt().clamp(min=LEAST)
        return self.links[SPREAD].inv(rho).expand(self.mine[SPREAD].shape)

    def loss(self, params: Params, batch: ClientBatch, *, prior: bool) -> Tensor:
        """Return [ E_q NLL_k (+ KL) ] / n_k, ()."""

        def at(b: ClientBatch) -> Tensor:
            terms = self.program.terms(params, b)
            return ((terms.nll + terms.local_kl if prior else terms.nll) / b.counts).sum()

        return over_draws(at, batch, self.of.draws, keyed=self.program.in_vmap)

    def start(self, message: Params, own: OwnParams) -> PFedVEMWork:
        """Return the work at the start of a round."""
        phi = own.params
        spread = phi[SPREAD]
        if self.of.confidence:
            spread = chosen(own.seen, self.most_likely(phi, message), spread)
        q = {name: value for name, value in phi.items() if name != SPREAD}
        base = {name: message[name] for name in self.base_names}
        return PFedVEMWork(
            Stepped(q, self.of.optimizer.init(q)),
            spread,
            Stepped(base, self.of.base_optimizer.init(base)),
            torch.zeros(()),
        )

    def on_head(self, work: PFedVEMWork, message: Params, batch: ClientBatch) -> PFedVEMWork:
        """Return the work after a step on q_k."""
        fixed, q = {**message, SPREAD: work.spread}, work.q
        gradient, value = slope(lambda p: self.loss({**fixed, **p}, batch, prior=True), q.params)
        return work._replace(q=step(self.of.optimizer, gradient, q), loss=value)

    def on_base(self, work: PFedVEMWork, message: Params, batch: ClientBatch) -> PFedVEMWork:
        """Return the work after a step on the base."""
        fixed, base = {**message, **work.q.params, SPREAD: work.spread}, work.base
        gradient, _ = slope(lambda p: self.loss({**fixed, **p}, batch, prior=False), base.params)
        return work._replace(base=step(self.of.base_optimizer, gradient, base))

    def finish(
        self, work: PFedVEMWork, message: Params, own: OwnParams, rows: Tensor
    ) -> tuple[Up, OwnParams]:
        """Return the message to the server and the client's own state."""
        q, rho = work.q.params, self.links[SPREAD](work.spread).mean()
        head = {p: q[f"{site}.loc"].reshape(message[p].shape) for site, p in self.means.items()}
        weight = -2.0 * rho.log() if self.of.confidence else torch.zeros(())
        up: Up = {
            "head": LogShare(head, weight),
            "base": Share(work.base.params, rows),
            "loss": Share(work.loss),
            "rho": Share(rho),
        }
        phi = {**q, SPREAD: work.spread}
        return up, OwnParams({name: phi[name] for name in self.mine}, torch.ones(()))
