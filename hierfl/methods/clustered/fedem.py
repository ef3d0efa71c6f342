"""FedEM: a mixture of M models with client-specific shares, by expectation maximization.

    client:  q_jm <- pi_km p(y_j | x_j; theta_m) / sum over m      of each of its rows j, at the models received
             pi_k <- mean over j of q_j
             for every mini-batch and m:  w_m <- w_m - lr grad mean_j[ -q_jm log p(y_j | x_j; w_m) ]
    server:  theta_m <- sum_k (n_k / n) w_m

Source: Marfoq et al. 2021, arXiv:2108.10252, Algorithm 1. A client predicts by the mixture of
probabilities. One that joins later keeps the theta_m, and fits its shares alone. It is a mixture
with one label per row, whose posterior (the q_j) is exact; all else are points.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Server
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, DescentState, averaging_server, copies
from hierfl.methods.parts.stacked import starts_of
from hierfl.models.mixture import SHARES, mixture
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model

LEAST = 1e-12  # of a share: its logarithm stays finite


class FedEMLogits(NamedTuple):
    """Logits of a client's shares, (1, M): those that the round began with, and the last ones."""

    before: Tensor
    now: Tensor


@About(
    infers="a mixture of models, with each client's own shares",
    source="Marfoq et al. 2021, arXiv:2108.10252",
    common="M models",
    own="shares of them",
    guide="points; labels of rows exact",
    kept="its shares of the M",
    new="fits its shares",
    down="the weights of M models",
    up="`theta`*: its copies of all M after training; `loss`*",
)
def fedem(
    model: Model,
    *,
    components: int = 3,
    optimizer: Optimizer = SGD(0.03),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 128,
    personalize_steps: int = 10,
    starts: Sequence[Params] | None = None,
) -> Method:
    """Return FedEM of a model whose params are all global, such as `hierfl.models.network`.

    Args:
        model: of global params alone, with one observed site; `hierfl.models.mixture` makes it a
            mixture.
        components: M. Defaults: the authors' for CIFAR-10 and FEMNIST, without their schedule of
            step sizes.
        optimizer: of the client, restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.
        personalize_steps: updates of the shares of a client that joins later, in each round of
            `personalize`.
        starts: M sets of the model's params to start from. Default None: those of the model, each
            tensor's entries in M orders, drawn from the run's seed.

    Raises:
        ValueError: `components` or `personalize_steps` is below 1. (At fit) the model has latent
            sites, or observes another number of sites than one.
        ProgramError: (at fit) two components start equal.
    """
    expect(personalize_steps=(personalize_steps, "[1, inf)"))
    descent = Descent(optimizer, steps, unit, batch_size, components)

    def client(program: Program) -> Client:
        site = program.observed_site(None)
        even = torch.zeros(1, components)

        def log_parts(theta: Params, batch: ClientBatch) -> Tensor:
            params = {**theta, SHARES: even[None]}
            fn, value = program.observed({}, batch, params)[site]
            return fn.log_parts(value)[0]  # (B, M)

        def posterior(logits: Tensor, message: Params, batch: ClientBatch) -> Tensor:
            return (logits.log_softmax(-1) + log_parts(message, batch)).softmax(-1)

        def mean(value: Tensor, batch: ClientBatch) -> Tensor:
            if batch.rows is None:
                return value.mean(0)
            rows = batch.rows[0].view(-1, *[1] * (value.dim() - 1))
            return torch.where(rows, value, 0.0).sum(0) / rows.sum()

        def share(work: DescentState, message: Params, batch: ClientBatch) -> DescentState:
            before, now = work.beside
            pi = mean(posterior(now, message, batch), batch)
            return work._replace(beside=FedEMLogits(before, pi.clamp(min=LEAST).log()[None]))

        def loss(w: Params, work: DescentState, message: Params, batch: ClientBatch) -> Tensor:
            q = posterior(work.beside.before, message, batch)
            return mean(-(q * log_parts(w, batch)).sum(-1), batch)

        return Client(
            own=even,
            start=lambda message, own: descent.begin(message, FedEMLogits(own, own)),
            phases=(Phase(share, turns=components), descent.phase(loss)),
            finish=lambda work, message, own, rows: (copies(work, rows), work.beside.now),
            params=lambda message, own: {**message, SHARES: own[None]},
            adapt=(Phase(share, personalize_steps, turns=components),),
        )

    def server(program: Program) -> Server:
        component = {k: v for k, v in program.start()[0].items() if k.startswith("0.")}
        first = {name.removeprefix("0."): value for name, value in component.items()}
        stacked = starts_of(first, components, program.seed, starts)
        begin = {f"{m}.{name}": v[m] for m in range(components) for name, v in stacked.items()}
        return averaging_server(begin)

    return Method("fedem", mixture(model, components=components), delta, client, server)
