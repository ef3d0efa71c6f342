"""Batch norm for any method: layers predict by statistics of the client's own rows; and FedBN.

    learning:    y = weight (x - mean) / sqrt(var + eps) + bias,    mean and var over the mini-batch
    predicting:  the same,    mean and var over all rows of the client, at its prediction weights

Scale and shift of a layer are weights as the method has them: common, personal or with a posterior.
A client finds the statistics of its own rows when the run ends (and before a score or a checkpoint),
keeps them, and sends them to nobody. They are exact, at the weights that the client is served, and
no running mean. Under a posterior they are those at its mean, for all draws and for importance
weights (`fit.posterior(correct="psis")`, `diagnostics.convergence`).

FedBN is FedPer inside `batch_normed`, with the layers of batch norm as heads:

    client:  w <- (theta, its own b_k);  for every mini-batch:  w <- w - lr grad nll(w), normalized by the mini-batch
    server:  theta <- sum_k (n_k / n) theta_k

Sources: Ioffe and Szegedy 2015, arXiv:1502.03167; statistics that stay with the client: Andreux et
al. 2020, arXiv:2008.07424 (SiloBN), whose statistics are running means. FedBN: Li et al. 2021,
arXiv:2102.07623, Algorithm 1; its code weights clients equally, and finds layers by "bn" in their names.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, TypeVar

import torch
from pyro import poutine

from hierfl.core.trees import Tree, tree_leaves
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Method, Phase, Server
from hierfl.methods.about import About, Wrapper
from hierfl.methods.personalized.fedrep import fedrep
from hierfl.methods.wrappers.wrapping import WrappedState, beside
from hierfl.models.client_norm import STATISTICS, Looked, normalized, normalizing
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.handlers import Substitute
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Family, Guide, Latents, Model, family

Found = TypeVar("Found")
BY_LIKELIHOOD = ("conditional", "from_factor")  # guides that evaluate it


@Wrapper(adds='"+BN": networks with batch normalization, by statistics of each client\'s own rows')
def batch_normed(method: Method) -> Method:
    """Return the method for a network with batch normalization (nn.BatchNorm1d, 2d, 3d).

    Without such layers it is the method itself. Statistics that the module holds are not read, nor
    is its training mode. A client that joins later finds its statistics in `fit.personalize`, in 0
    rounds too.

    Where layers are dense, a mini-batch of one row is normalized to the shift alone: choose larger
    ones. A client with one row has no variance there, and its predictions are NaN: leave it out,
    `Settings(min_rows=2)`. A bias before such a layer has no effect and no gradient, whose rounding
    Adam takes for a direction: leave it out, `bias=False`.

    Args:
        method: of a model from `hierfl.models` that takes a module. Other wrappers may be inside or
            around it; `fine_tuned` only inside.

    Raises:
        ProgramError: (at fit) the method needs a likelihood that is a product over rows (two_stage,
            fedlaplace, pvi, fedep, bfi, fedpop); or its guide evaluates the likelihood
            (conditional).
    """

    def client(program: Program) -> Client:
        own = _statistics(program)
        if not own:
            return method.client(program)
        _check(method, program)
        learning = _learning(program)
        return _keeping(_built(method.client, learning), learning, own)

    def server(program: Program) -> Server:
        return _built(method.server, _learning(program) if _statistics(program) else program)

    return replace(
        method,
        name=f"{method.name}+BN",
        traits=method.traits | {"own statistics"},
        model=normalizing(method.model, "client"),
        guide=_guide(method.guide),
        client=client,
        server=server,
    )


def _statistics(program: Program) -> Params:
    return {name: v for name, v in program.start()[1].items() if STATISTICS in name}


def params_of_norms(program: Program) -> tuple[str, ...]:
    """Return the global params that are scale or shift of a layer of batch norm."""
    layers = {name.removeprefix(STATISTICS).rpartition(".")[0] for name in _statistics(program)}
    above = program.start()[0]
    return tuple(n for n in above if n.removeprefix("theta.").rpartition(".")[0] in layers)


def _check(method: Method, program: Program) -> None:
    if "by rows" in method.traits:  # which it is not among rows of one mini-batch
        raise ProgramError(
            f"{method.name} needs a likelihood that is a product over rows, and batch norm makes "
            "rows of a mini-batch depend on each other: use nn.GroupNorm or nn.LayerNorm, or use fedsvi"
        )
    guide = getattr(method.guide, "__name__", "")
    if guide in BY_LIKELIHOOD:
        raise ProgramError(
            f"guides.{guide} evaluates the likelihood, which batch norm changes from learning to "
            "predicting: use guides.mean_field, or nn.GroupNorm"
        )


def _learning(program: Program) -> Program:
    """Return the program without statistics; its layers normalize by the rows at hand."""
    return replace(
        program,
        model=normalizing(program.model, "mini-batch"),
        guide=normalizing(program.guide, "mini-batch"),
        params=tuple(p for p in program.params if not (p.is_local and STATISTICS in p.name)),
    )


def _built(build: Callable[[Program], Found], program: Program) -> Found:
    """Return the method's client or server, which may run the model when it is built."""
    with normalized("mini-batch"):
        return build(program)


def _guide(guide: Guide | Family) -> Guide | Family:
    """Return a guide whose layers predict by the client's statistics."""
    if not isinstance(guide, Family):
        return normalizing(guide, "client")
    build = guide.build

    @wraps(build)
    def built(model: Model, latents: Latents, **options: Any) -> Guide:
        return normalizing(build(model, latents, **options), "client")

    return family(built, **guide.options)


def _keeping(plain: Client, program: Program, start: Params) -> Client:
    """Return the client that keeps statistics, first `start`, beside the method's state."""
    none = {name: torch.full_like(v, torch.nan) for name, v in start.items()}
    whole = beside(plain, none)

    def params(message: Tree, own: WrappedState) -> Params:
        return {**whole.params(message, own), **own.extra}

    def settle(message: Tree, own: WrappedState, batch: ClientBatch) -> WrappedState:
        if whole.settle is not None:
            own = whole.settle(message, own, batch)
        statistics = _looked(program, whole.params(message, own), batch)
        return WrappedState(own.method, {name: statistics[name] for name in none})

    adapt = None if plain.adapt is None else _by_mini_batch(plain.adapt)
    if plain.adapt is None and not tree_leaves(plain.own):
        adapt = ()  # there is no state to adapt
    phases = _by_mini_batch(plain.phases)
    return replace(whole, phases=phases, params=params, adapt=adapt, settle=settle)


def _by_mini_batch(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    return tuple(replace(phase, step=normalizing(phase.step, "mini-batch")) for phase in phases)


def _looked(program: Program, params: Params, batch: ClientBatch) -> Params:
    """Return the statistics of a client's rows, at its params and posterior mean."""
    looked = Looked()
    with normalized("looking"), looked:
        values = program.middle(params, batch)
        with Substitute(params, batch):
            poutine.condition(program.model, data=values)(batch)
    return looked.found


@About(
    infers="FedAvg with each client's own batch normalization",
    source="Li et al. 2021, arXiv:2102.07623",
    common="weights except batch norm",
    own="batch norm",
    kept="its batch normalization: weights and statistics",
    new="statistics of its rows",
    down="the weights, except batch normalization",
    up="`theta`*: the same weights after training; `loss`*",
)
def fedbn(
    model: Model,
    *,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 32,
) -> Method:
    """Return FedBN of a network with batch normalization, such as `hierfl.models.network(module)`.

    Without batch norm this is FedAvg; no warning is given. A client that was in no round predicts
    by the statistics of its rows at the common weights, with the scale and shift that the module
    has. `fine_tuned` cannot be around it, as around no method inside `batch_normed`.

    Args:
        model: a program with global params and no latent sites.
        optimizer: of the client, restarted in each round. Defaults: the authors' for digits.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has latent sites or local params.
    """

    def with_heads(program: Program) -> Method:
        plain = fedrep(
            model,
            head=params_of_norms(program) or "none",
            optimizer=optimizer,
            head_steps=0,
            body_steps=steps,
            unit=unit,
            batch_size=batch_size,
            joint=True,
        )
        return batch_normed(plain)

    return replace(
        batch_normed(fedrep(model)),
        name="fedbn",
        client=lambda program: with_heads(program).client(program),
        server=lambda program: with_heads(program).server(program),
    )
