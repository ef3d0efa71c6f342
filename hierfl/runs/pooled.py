"""fedsvi with all clients in one Pyro plate, as if their rows were in one place: a reference."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hierfl.core.arguments import expect_count, spelled
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.diagnostics.nuts import check_padded
from hierfl.engine.client_store import taken
from hierfl.engine.federation import Federation, federate
from hierfl.engine.rounds import Progress, begin
from hierfl.method import Clock, Method, over_draws, slope
from hierfl.methods.posteriors.fedsvi import FedSVIRounds, FedSVIState
from hierfl.optimizers import step
from hierfl.program.check_dependence import check_apart
from hierfl.program.handlers import unchecked
from hierfl.program.program import stacked
from hierfl.program.sites import recipe_of
from hierfl.runs.result import Fit

JOINT_PHASE = 1  # the number of fedsvi's phase of joint steps, whose noise the pooled step shares


@one_at_a_time
@spelled
def fit_pooled(method: Method, data: ClientData, *, rounds: int, seed: int = 0) -> Fit:
    """Fit fedsvi, each round as one step of the pooled program, to the numbers of `hierfl.fit`.

    Args:
        method: made by `hierfl.methods.fedsvi`, with one joint step a round of all rows.
        data: the clients' rows.
        rounds: steps, 1 or more.
        seed: determines all randomness.

    Raises:
        ValueError: the method is another one or takes other steps, `rounds` is below 1, the guide
            draws one client at a time, or padding to one length would take too much memory.
        ProgramError: a model or guide that cannot be run as it is written, or whose clients depend
            on each other.
    """
    how = _setting(method)
    expect_count(rounds, "rounds")
    federation = federate(method, data, seed=seed)
    program = federation.program
    check_apart(program, data)
    if not program.keyed:
        fix = "use hierfl.fit, or a guide of Normals"
        raise ValueError(f"fit_pooled draws for all clients at once, as the guide cannot: {fix}")
    check_padded(data)
    progress = begin(federation)
    for _ in range(rounds):
        progress = _one_step(federation, how, progress, rounds)
    return Fit(method, federation, progress, rounds)


def _setting(method: Method) -> Mapping[str, Any]:
    """Return the options of a method, which must be fedsvi with one joint step a round."""
    recipe = recipe_of(method)
    if recipe is None or recipe.factory.__name__ != "fedsvi":
        raise ValueError(f"method '{method.name}' has no pooled form: use hierfl.methods.fedsvi")
    how = recipe.options
    joint = {"merge": "gradient", "local_steps": 0, "global_steps": 1, "batch_size": None}
    for name, value in joint.items():
        if how[name] != value:
            what = f"{name} is {how[name]!r}: pooled rows take one joint step a round"
            raise ValueError(f"{what}, along the gradient of all rows: leave it at {value!r}")
    return how


def _one_step(
    federation: Federation, how: Mapping[str, Any], progress: Progress, rounds: int
) -> Progress:
    began = time.perf_counter()
    clock = Clock(progress.round, rounds)
    everyone = torch.arange(federation.data.num_clients)
    at = (clock.round, JOINT_PHASE, 0)
    with unchecked():
        batch = full_batch(federation.rows, everyone, seed=federation.seed, at=at)
        table = taken(progress.table, everyone)
        server, table, elbo = _moved(federation, how, progress.server, table, batch, clock)
    record = {"round": clock.round, "clients": len(everyone), "elbo": elbo}
    record |= {"bytes_down": 0, "bytes_up": 0, "seconds": time.perf_counter() - began}
    return progress.advanced(server, table, [record])


def _moved(
    federation: Federation,
    how: Mapping[str, Any],
    state: FedSVIState,
    table: Tree,
    batch: ClientBatch,
    clock: Clock,
) -> tuple[FedSVIState, Tree, float]:
    rounds = FedSVIRounds(how["schedule"], how["average"])
    program, message = federation.program, rounds.message(state.at.params, clock)

    def loss(at: Tree) -> Tensor:
        def one(b: ClientBatch) -> Tensor:
            terms = program.terms({**at["shared"], **stacked(program, at["mine"])}, b)
            return terms.nll.sum() + terms.local_kl.sum() + terms.global_kl

        return over_draws(one, batch, how["draws"], keyed=program.in_vmap)

    params = {"shared": state.at.params, "mine": table.at.params if table else {}}
    gradient, value = slope(loss, params)

    def keep(own: FedSVIState, of_own: Tree) -> FedSVIState:
        at = step(how["local_optimizer"], of_own, own.at, message["rate"])
        return rounds.moved(own, at, message["late"])

    rows = torch.vmap(keep)(table, gradient["mine"]) if table else table
    new = federation.server.update(state, {"gradient": gradient["shared"]}, clock)
    return new, rows, -float(value)
