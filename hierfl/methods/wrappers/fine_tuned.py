"""Fine-tuning of any method, "+FT": clients predict by params tuned on their rows' likelihood.

    w <- the method's own params;  for every mini-batch:  w <- w - lr grad nll(w)

Training does not depend on it: what clients send stays as it is. In a program with local sites the
params of those sites are tuned, in one without latent sites a copy of all global params. "+FT" is
the name in Shi et al. 2023, arXiv:2310.09183.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, chosen, tree_leaves
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Method, Phase, Step, Up, slope
from hierfl.methods.about import Wrapper
from hierfl.methods.parts.averaging import OwnParams
from hierfl.methods.parts.mirror import domains_of_sites, kept_inside, mirror_gradient
from hierfl.methods.wrappers.wrapping import WrappedState, beside, inside
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError


class TuningWork(NamedTuple):
    """The wrapped client's work and state, the tuned params, whether these are served, (), and the last loss, ()."""

    method: Tree
    own: Tree
    at: Stepped
    begun: Tensor
    loss: Tensor


@Wrapper(
    call="(method, steps=...)",
    adds='"+FT": local steps on the client\'s own likelihood, for the model it is served by',
)
def fine_tuned(
    method: Method,
    *,
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 20,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    when: Literal["adapting", "every round"] = "adapting",
    own_steps: bool = True,
    mirror: bool = False,
) -> Method:
    """Return the method with clients whose predictions come from params tuned on their own rows.

    Args:
        method: any method of point estimates: without latent sites, or with params of local sites.
        steps: passes over the rows, or mini-batches (`unit`).
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        optimizer: restarted in each round.
        when: "adapting": only in `fit.personalize(rows, rounds=e)`, e times `steps`, each round
            continues from the last one; before that predictions come from the method's own params.
            "every round": at the end of each round of training and of `personalize`, from the
            method's params at that time.
        own_steps: clients that adapt take the method's own steps first, where it has client state;
            False: they tune what the last round left.
        mirror: take gradients in the constrained values of the local sites, as `pfedbred` does.

    Raises:
        ValueError: `steps` is below 1, or `when` is neither "adapting" nor "every round".
        ProgramError: (at fit) there are latent sites, but no params of local sites to tune;
            `mirror` without the guide `delta`; or it is around `batch_normed`, not inside.
    """
    expect(when=(when, ("adapting", "every round")), steps=(steps, "[1, inf)"))

    def client(program: Program) -> Client:
        plain, first = method.client(program), _tuned_params(program, method.name, mirror=mirror)
        if "own statistics" in method.traits:
            raise ProgramError(
                f"fine_tuned around '{method.name}' would predict by tuned params with statistics "
                "of others: put it inside, batch_normed(fine_tuned(method))"
            )
        taken = Phase(tuning(program, plain, optimizer, mirror=mirror), steps, unit, batch_size)
        each_round = when == "every round"
        return tuned(plain, first, optimizer, taken, each_round=each_round, own_steps=own_steps)

    return replace(method, name=f"{method.name}+FT", client=client)


def _tuned_params(program: Program, name: str, *, mirror: bool) -> Params:
    above, mine = program.start()
    local = program.latents.local_block.sites
    if mirror and not (local and mine.keys() == {f"{site.name}.at" for site in local}):
        raise ProgramError("mirror=True needs local sites and the guide delta: leave it at False")
    if local and mine:
        return mine
    if program.latents.sites:
        raise ProgramError(
            f"fine_tuned has nothing to tune: the clients of '{name}' have latent sites, but no "
            "params of their own; use a method with the guide delta"
        )
    return above


def tuning(program: Program, plain: Client, optimizer: Optimizer, *, mirror: bool = False) -> Step:
    """Return a step of the tuned params; all other params are those of the wrapped client."""

    def tune(work: TuningWork, message: Tree, batch: ClientBatch) -> TuningWork:
        fixed, at = _after(plain, work, message, batch), work.at.params

        def nll(w: Params) -> Tensor:
            return program.mean_loss({**fixed, **w}, batch)

        if mirror:
            gradient, value = mirror_gradient(program, nll, at), work.loss
        else:
            gradient, value = slope(nll, at)
        tuned, memory = step(optimizer, gradient, work.at)
        if mirror:
            tuned = kept_inside(domains_of_sites(program), tuned, at)
        # the loss is an output, so that a compiled step rounds as a step of fedavg does
        return work._replace(at=Stepped(tuned, memory), begun=torch.ones(()), loss=value)

    return tune


def _after(plain: Client, work: TuningWork, message: Tree, batch: ClientBatch) -> Params:
    """Return the params of the wrapped client as they would be if its round ended now."""
    rows = batch.counts.sum().to(torch.get_default_dtype())
    _, own = plain.finish(work.method, message, work.own, rows)
    return plain.params(message, own)


def tuned(
    plain: Client,
    first: Params,
    optimizer: Optimizer,
    phase: Phase,
    *,
    each_round: bool = False,
    own_steps: bool = True,
) -> Client:
    """Return the client that keeps params beside its state, first `first`, tunes them, and predicts with them."""
    whole = beside(plain, OwnParams(first, torch.zeros(())))

    def begun(own: WrappedState) -> Tensor:
        # in every round what is tuned is served as soon as the wrapped client has been through one
        return plain.seen(own.method) if each_round and plain.seen is not None else own.extra.seen

    def params(message: Tree, own: WrappedState) -> Params:
        own_params = whole.params(message, own)
        now = {name: own_params[name] for name in first}
        return {**own_params, **chosen(begun(own), own.extra.params, now)}

    def start(message: Tree, own: WrappedState) -> TuningWork:
        served = params(message, own)
        at = {name: served[name] for name in first}
        at_first = Stepped(at, optimizer.init(at))
        plain_work = plain.start(message, own.method)
        return TuningWork(plain_work, own.method, at_first, begun(own), torch.zeros(()))

    def follow(work: TuningWork, message: Tree, batch: ClientBatch) -> TuningWork:
        params = _after(plain, work, message, batch)
        now = {name: params[name] for name in first}
        tuned = now if each_round else chosen(work.begun, work.at.params, now)
        return work._replace(at=work.at._replace(params=tuned))

    def finish(work: TuningWork, message: Tree, own: WrappedState, rows: Tensor) -> tuple[Up, Tree]:
        up, after = whole.finish(work.method, message, own, rows)
        return up, after._replace(extra=OwnParams(work.at.params, work.begun))

    phases = inside(plain.phases, follow if each_round else None)
    adapt = plain.phases if plain.adapt is None else plain.adapt
    adapting = inside(adapt, follow) if own_steps and tree_leaves(plain.own) else ()
    return replace(
        whole,
        start=start,
        phases=(*phases, phase) if each_round else phases,
        finish=finish,
        params=params,
        adapt=(*adapting, phase),
        most_adapting=None,
    )
