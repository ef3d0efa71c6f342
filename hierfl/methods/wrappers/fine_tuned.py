"""Fine-tuning of any method, "+FT": clients predict by params tuned on their rows' likelihood.

    w <- the method's own params;  for every mini-batch:  w <- w - lr grad nll(w)

Training does not depend on it: what clients send stays as it is. In a program with local sites the
params of those sites are tuned, in one without latent sites a copy of all global params. "+FT" is
the name in Shi et al. 2023, arXiv:2310.09183.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, chosen, tree_leaves
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Method, Phase, Step, Up, slope
from hierfl.methods.about import Wrapper
from hierfl.methods.parts.mirror import domains_of_sites, kept_inside, mirror_gradient
from hierfl.methods.wrappers.wrapping import beside, inside
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError


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
            "params of their own; take a method with the guide delta"
        )
    return above


def tuning(program: Program, plain: Client, optimizer: Optimizer, *, mirror: bool = False) -> Step:
    """Return a step of the tuned params; all other params are those of the wrapped client."""

    def tune(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        fixed, at = _after(plain, work, message, batch), work["tuned"]

        def nll(w: Params) -> Tensor:
            return program.mean_loss({**fixed, **w}, batch)

        if mirror:
            gradient, value = mirror_gradient(program, nll, at), work["loss"]
        else:
            gradient, value = slope(nll, at)
        tuned, state = step(optimizer, gradient, Stepped(at, work["state"]))
        if mirror:
            tuned = kept_inside(domains_of_sites(program), tuned, at)
        # the loss is an output, so that a compiled step rounds as a step of fedavg does
        return {**work, "tuned": tuned, "state": state, "begun": torch.ones(()), "loss": value}

    return tune


def _after(plain: Client, work: Tree, message: Tree, batch: ClientBatch) -> Params:
    """Return the params of the wrapped client as they would be if its round ended now."""
    rows = batch.counts.sum().to(torch.get_default_dtype())
    _, own = plain.finish(work["method"], message, work["own"], rows)
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
    tuned, flag = _unused(plain.own, "served" if each_round else "w"), _unused(plain.own, "seen")
    flagged = not each_round or plain.seen is None  # else the wrapped client's state says so

    def kept(params: Params, begun: Tensor) -> Tree:
        return {tuned: params, flag: begun} if flagged else {tuned: params}

    def begun(own: Tree) -> Tensor:
        return own[flag] if flagged or plain.seen is None else plain.seen(own)

    whole = beside(plain, kept(first, torch.zeros(())))

    def params(message: Tree, own: Tree) -> Params:
        own_params = whole.params(message, own)
        return {
            **own_params,
            **chosen(begun(own), own[tuned], {name: own_params[name] for name in first}),
        }

    def start(message: Tree, own: Tree) -> Tree:
        served, mine = params(message, own), {name: own[name] for name in plain.own}
        at = {name: served[name] for name in first}
        work = {"method": plain.start(message, mine), "own": mine, "tuned": at}
        return {**work, "state": optimizer.init(at), "begun": begun(own), "loss": torch.zeros(())}

    def follow(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        params = _after(plain, work, message, batch)
        now = {name: params[name] for name in first}
        return {**work, "tuned": now if each_round else chosen(work["begun"], work["tuned"], now)}

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up, mine = whole.finish(work["method"], message, own, rows)
        return up, {**mine, **kept(work["tuned"], work["begun"])}

    phases = inside(plain.phases, "method", follow if each_round else None)
    adapt = plain.phases if plain.adapt is None else plain.adapt
    adapting = inside(adapt, "method", follow) if own_steps and tree_leaves(plain.own) else ()
    return replace(
        whole,
        start=start,
        phases=(*phases, phase) if each_round else phases,
        finish=finish,
        params=params,
        adapt=(*adapting, phase),
        most_adapting=None,
    )


def _unused(own: Tree, name: str) -> str:
    while name in own:
        name = f"tuned_{name}"
    return name
