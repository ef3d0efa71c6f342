"""FedAMP and HeurFedAMP: each client is pulled to a mix of models weighted by similarity.

    server:    xi_ij = alpha exp(-|w_i - w_j|^2 / sigma) / sigma for j not i,    xi_ii = 1 - sum_j xi_ij
               u_i = sum_j xi_ij w_j, and client i gets u_i
    client i:  for every mini-batch:  w_i <- w_i - lr grad[ nll(w_i) + prox / (2 alpha) |w_i - u_i|^2 ]

HeurFedAMP fixes xi_ii, and shares what remains by softmax_j(sigma cos(w_i, w_j)).

Source: Huang et al. 2021, arXiv:2007.03797, Algorithm 1. The weights as printed lack a factor 2:
fixed points are stationary for sum_i f_i + (prox / 2) sum_{i<j} A(|w_i - w_j|^2), A(d) = 1 - exp(-d
/ sigma), where the paper has lambda, our prox. The paper does not say where a client starts its
steps: here at its own last model. A client that joins later starts at the mean of all models, and
is pulled to it.

As a Bayesian model it is a pairwise random field exp(-prox/2 sum_{i<j} A(|w_i - w_j|^2)), of which
the w_i are a mode; the field is bounded, so that it is no proper prior.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, tree_map, with_rows
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Each, Method, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    Descent,
    DescentState,
    OwnAndMail,
    common_params,
    personal_client,
    proximal_loss,
)
from hierfl.methods.parts.stacked import at_each, distances, flat, mean_of, mixed
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Model

Attention = Callable[[Tensor], Tensor]


ABOUT = partial(
    About,
    source="Huang et al. 2021, arXiv:2007.03797",
    common="none",
    own="weights near a mix of others'",
    kept="its weights, and the mix",
    discloses="summaries",
    new="fits its weights near the mean",
    down="to each client a mix of all clients' weights",
    up="`w`, seen individually: its weights; `loss`*",
)


@ABOUT(infers="personal models, each pulled to a mix of similar clients'")
def fedamp(
    model: Model,
    *,
    prox: float = 1.0,
    alpha: float = 1.0,
    sigma: float = 1.0,
    optimizer: Optimizer = SGD(0.005),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 10,
) -> Method:
    """Return FedAMP of a program whose params are all global, such as `hierfl.models.network`.

    `self_weight` in the history is the mean of xi_ii. Where it stays near 1, clients train alone:
    the squared distances of two networks are often far above `sigma`.

    Args:
        model: a program with global params and no latent sites.
        prox: weight of the pull to the mix, times alpha, 0 or more; lambda in the paper; 0: each
            client alone. Defaults: those of PFLlib.
        alpha: step size of the mix, > 0. Fixed points do not depend on it.
        sigma: scale of squared distances, > 0.
        optimizer: of the client, restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ValueError: `prox` is negative, or `alpha` or `sigma` is not above 0.
        ProgramError: (at fit) the model has latent sites or local params. (After a round) some
            xi_ii is negative.
    """
    expect(prox=(prox, "[0, inf)"), alpha=(alpha, "(0, inf)"), sigma=(sigma, "(0, inf)"))

    def attention(w: Tensor) -> Tensor:
        weight = alpha / sigma * torch.exp(-distances(w) / sigma)
        weight = weight.fill_diagonal_(0.0)
        own = 1.0 - weight.sum(1)
        if bool((own < 0.0).any()):
            raise ProgramError(
                f"the weights of other clients' models add up to {float(1.0 - own.min()):.3g}, "
                f"above 1: lower alpha ({alpha:g}), or raise sigma ({sigma:g}); alpha / sigma of "
                f"at most 1 / {len(w)} is safe"
            )
        return weight + torch.diag(own)

    descent = Descent(optimizer, steps, unit, batch_size)
    return _attentive("fedamp", model, attention, prox / alpha, descent)


@ABOUT(infers="fedamp with weights by cosine similarity")
def heur_fedamp(
    model: Model,
    *,
    prox: float = 1.0,
    sigma: float = 1.0,
    self_weight: float = 0.1,
    optimizer: Optimizer = SGD(0.005),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 10,
) -> Method:
    """Return HeurFedAMP, whose weights are a softmax of cosines between the clients' params.

    Args:
        model: as in `fedamp`.
        prox: weight of the pull to the mix, prox / alpha of `fedamp`, 0 or more.
        sigma: factor of the cosines, 0 or more; 0: all others weigh the same.
        self_weight: xi_ii, in [0, 1]. Default: that of PFLlib's older scripts.
        optimizer: of the client, restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ValueError: `prox` or `sigma` is negative, or `self_weight` outside [0, 1].
        ProgramError: (at fit) the model has latent sites or local params.
    """
    expect(prox=(prox, "[0, inf)"), sigma=(sigma, "[0, inf)"), self_weight=(self_weight, "[0, 1]"))

    def attention(w: Tensor) -> Tensor:
        if len(w) < 2:
            return torch.ones(len(w), len(w), dtype=w.dtype)
        ways = torch.nn.functional.normalize(w, dim=1)
        others = (sigma * ways @ ways.T).fill_diagonal_(-torch.inf).softmax(1)
        return (1.0 - self_weight) * others + self_weight * torch.eye(len(w), dtype=w.dtype)

    descent = Descent(optimizer, steps, unit, batch_size)
    return _attentive("heur_fedamp", model, attention, prox, descent)


class FedAMPServerState(NamedTuple):
    """Models and mixes of N clients, (N, ...), who has trained, (N,) bool, and the mean of xi_ii, ()."""

    w: Params
    mix: Params
    seen: Tensor
    self_weight: Tensor


def _attentive(
    name: str, model: Model, attention: Attention, pull: float, descent: Descent
) -> Method:
    """Return the method of weights `attention`, (N, P) -> (N, N), and a pull toward the mixes."""

    def client(program: Program) -> Client:
        first = common_params(program, name)

        def loss(w: Params, work: DescentState, message: Tree, batch: ClientBatch) -> Tensor:
            return proximal_loss(program, w, work.beside, pull, batch)

        def finish(
            work: DescentState, message: Tree, own: OwnAndMail, rows: Tensor
        ) -> tuple[Up, OwnAndMail]:
            up: Up = {"w": Each(work.w), "loss": Share(work.loss, rows)}
            return up, OwnAndMail(work.w, own.mail, torch.ones(()))

        return personal_client(
            OwnAndMail(first, first, torch.zeros(())),
            lambda message, own: own._replace(params=own.mail),
            start=lambda message, own: descent.begin(own.params, own.mail),
            phases=(descent.phase(loss),),
            finish=finish,
            params=lambda message, own: own.params,
            new=lambda message: OwnAndMail(message, message, torch.zeros(())),
            mail=("mail",),
        )

    def server(program: Program) -> Server:
        first = common_params(program, name)

        def update(
            state: FedAMPServerState, means: dict[str, Tree], clock: Clock
        ) -> FedAMPServerState:
            w = with_rows(state.w, means["w"].ids, means["w"].value)
            seen = state.seen.index_fill(0, means["w"].ids, True)
            trained = tree_map(lambda v: v[seen], w)
            weight = attention(flat(trained))

            def of_all(mean: Tensor, v: Tensor) -> Tensor:
                # a client that has not trained yet gets the mean, and is in no mix
                all_mean = mean.expand(len(seen), *mean.shape).clone()
                all_mean[seen] = v
                return all_mean

            mix = tree_map(of_all, mean_of(w, seen), mixed(weight, trained))
            return FedAMPServerState(w, mix, seen, weight.diagonal().mean())

        count = program.num_clients
        w, none = at_each(first, count), torch.zeros(count, dtype=torch.bool)
        return Server(
            FedAMPServerState(w, w, none, torch.ones(())),
            update,
            down=lambda state, clock: {},
            final=lambda state, clock: mean_of(state.w, state.seen),
            logged=lambda state: {"self_weight": float(state.self_weight)},
            mail=lambda state: state.mix,
        )

    return Method(name, model, delta, client, server, discloses="summaries")
