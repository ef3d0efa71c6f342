"""`Fit`, what `fit` returns: posterior, predictions, new clients, a report, and saving to disk."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pandas as pd

from hierfl.core.process import unpickled
from hierfl.core.tables import printed
from hierfl.core.trees import Tree
from hierfl.diagnostics.summary import brief, summary
from hierfl.effects import METHODS
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress
from hierfl.method import Clock, Method
from hierfl.posterior import arviz_groups, labels, prediction
from hierfl.posterior.corrected import corrected
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.snapshot import Snapshot
from hierfl.runs import joining, saved

if TYPE_CHECKING:
    from hierfl.effects import (
        comparisons,
        conditional_effects,
        hypotheses,
        imputed,
        profile,
        variance,
    )
    from hierfl.posterior import eliminated
    from hierfl.posterior.draws import get_samples as samples_of_fit
    from hierfl.report.page import report as report_of_fit
    from hierfl.runs import living

# Methods that few fits need -> the module of the function.
OF_FEW = {
    **dict.fromkeys(("infer_discrete", "infer_rows"), "hierfl.posterior.eliminated"),
    "get_samples": "hierfl.posterior.draws",
    "without": "hierfl.runs.living",
    "updated": "hierfl.runs.joining",
    "report": "hierfl.report.page",
}


class LateMethod:
    """The function of a module that is imported when it is first used, as a method."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __get__(self, value: object, kind: type) -> Any:
        """Return the function, bound to the object."""
        function = getattr(import_module(self.module), self.name)
        return function if value is None else function.__get__(value, kind)


@unpickled("write it with fit.save(folder), and read it with hierfl.load(folder)")
@printed
@dataclass(frozen=True, eq=False)
class Fit(Snapshot):
    """A method fitted to a federation.

    Args:
        method: the method that was fitted.
        federation: the clients, their rows and the checked program.
        progress: the server's state, the client states, the history and the rounds done.
        rounds: how many rounds were planned; a method that stops automatically may have taken
            fewer.
    """

    method: Method
    federation: Federation
    progress: Progress
    rounds: int

    __tables__ = brief

    @property
    def chosen(self) -> str | None:
        """The method that `hierfl.fit(model, data)` chose, and why; None: it was named."""
        return self.progress.chosen

    @property
    def message(self) -> Tree:
        """The server's last message: all that draws and predictions know of other clients."""
        clock = Clock(self.progress.round, max(self.rounds, 1))
        return self.federation.server.last(self.progress.server, clock)

    def draws(self, draws: int = 1000, *, seed: int = 0) -> Draws:
        """Draw the latent sites, as `posterior`: `shared` site -> (S, *shape), `own` -> (S, N, *shape)."""
        if self.progress.corrected:
            return corrected(self, draws, seed=seed).draws
        return posterior_draws(self, draws=draws, seed=seed)

    @property
    def certificates(self) -> pd.DataFrame:
        """What was removed when clients left, with hashes before and after: one row per client."""
        from hierfl.runs.living import certificates

        return certificates(self.progress.history)

    posterior, prior = arviz_groups.posterior, arviz_groups.prior
    posterior_predictive = arviz_groups.posterior_predictive
    predict, replicate = prediction.predict, labels.replicate
    personalize, save = joining.personalize, saved.save
    summary = summary

    if TYPE_CHECKING:  # by `LateMethod`
        infer_discrete = eliminated.infer_discrete
        infer_rows = eliminated.infer_rows
        get_samples = samples_of_fit
        without = living.without
        updated = joining.updated
        report = report_of_fit
        effects = conditional_effects.effects
        predictions = comparisons.predictions
        comparisons = comparisons.comparisons
        hypotheses = hypotheses.hypotheses
        profile = profile.profile
        survival = conditional_effects.survival
        r2 = variance.r2
        icc = variance.icc
        imputed = imputed.imputed


for _name, _module in {**METHODS, **OF_FEW}.items():
    setattr(Fit, _name, LateMethod(_module, _name))
