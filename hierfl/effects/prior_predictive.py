"""Draws of a model's prior, and of the data that it implies, before any fit."""

from dataclasses import replace
from typing import Any

from hierfl.core.arguments import shown, spelled
from hierfl.core.process import one_at_a_time
from hierfl.data.batch import expect_client_data
from hierfl.data.clients import ClientData
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.formulas.formula import Frames, of_frames
from hierfl.guides import delta
from hierfl.method import Clock, Method
from hierfl.methods.posteriors.fedsvi import fedsvi
from hierfl.posterior.arviz_groups import prior
from hierfl.posterior.snapshot import Restricted, learned_params
from hierfl.program.program import ProgramError
from hierfl.program.sites import Model


@spelled
@one_at_a_time
def prior_predictive(
    model: Model, data: ClientData | Frames, draws: int = 500, *, seed: int = 0
) -> Any:
    """Draw parameters from a model's prior, and a response for each row, as an ArviZ object.

    The ArviZ groups are `prior`, `prior_predictive` and `observed_data`, as in
    `Fit.prior(predictive=True)`. Each client draws for its own rows. Only the kind of the responses
    is read, not their values.

    Args:
        model: any program in which every unknown has a prior; or a `hierfl.formula`.
        data: the clients' rows; for a formula, one frame with the column of clients, or {client:
            frame}.
        draws: S.
        seed: of the draws.

    Raises:
        TypeError: `model` is a method; or `data` has the wrong type.
        ProgramError: the model cannot be run as it is written, or has a param, which no prior
            covers.
        ValueError: `draws` is below 1; or the data do not fit the model.
    """
    if isinstance(model, Method):
        raise TypeError(f"model is {shown(model)}: pass the model that the method was made of")
    ready, rows, _ = of_frames(model, data, None)
    expect_client_data(rows, "data")
    federation = federate(replace(fedsvi(ready, delta), name="prior"), rows)
    progress = begin(federation)  # no round is taken, and the guide is never run
    message = federation.server.last(progress.server, Clock(0, 1))
    before = Restricted(federation.method, federation, progress, message)
    for param in learned_params(before):
        what = f"param '{param.name}' of the model has no prior to be drawn from"
        raise ProgramError(f"{what}: give it one, pyro.sample, or fit the model first")
    return prior(before, draws, seed=seed, predictive=True)
