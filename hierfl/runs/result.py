"""`Fit`, what `fit` returns: posterior, predictions, new clients, a report, and saving to disk."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from torch import Tensor

from hierfl.core.late_methods import late_methods
from hierfl.core.process import unpickled
from hierfl.core.tables import printed
from hierfl.core.trees import Tree
from hierfl.data.clients import ClientData
from hierfl.data.preprocess import read_frame
from hierfl.diagnostics.summary import brief, summary
from hierfl.effects import METHODS
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress
from hierfl.method import Clock, Method
from hierfl.posterior.arviz_groups import EXPAND, posterior_data, predictive_data, prior_data
from hierfl.posterior.corrected import corrected
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.labels import replicate
from hierfl.posterior.prediction import Prediction, in_frame_order, predict
from hierfl.posterior.snapshot import Snapshot
from hierfl.runs import joining, saved

if TYPE_CHECKING:
    from arviz import InferenceData

    from hierfl.effects import (
        comparisons,
        conditional_effects,
        hypotheses,
        imputed,
        profile,
        variance,
    )
    from hierfl.formulas.formula import Frames
    from hierfl.posterior import eliminated
    from hierfl.posterior.draws import get_samples as samples_of_fit
    from hierfl.report import Report
    from hierfl.runs import living, updating

# Methods that few fits need -> the module of the function.
OF_FEW = {
    **dict.fromkeys(("infer_discrete", "infer_rows"), "hierfl.posterior.eliminated"),
    "get_samples": "hierfl.posterior.draws",
    "without": "hierfl.runs.living",
    "updated": "hierfl.runs.joining",
    "update": "hierfl.runs.updating",
}


@unpickled("write it with fit.save(folder), and read it with hierfl.load(folder)")
@printed
@late_methods({**METHODS, **OF_FEW})
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

    def _rows(self, rows: ClientData | Frames, *, matched: bool = True) -> Any:
        """Return rows as the program reads them; frames are read as those that were fitted."""
        if isinstance(rows, ClientData):
            return rows
        fitted = self.federation.data
        if fitted.client_column:
            return read_frame(rows, fitted.client_column, fitted)
        from hierfl.formulas.formula import rows_of  # with pandas

        return rows_of(self.method.model, rows, self.clients, asked=matched)

    def draws(self, draws: int = 1000, *, seed: int = 0) -> Draws:
        """Draw the latent sites, as `posterior`: `shared` site -> (S, *shape), `own` -> (S, N, *shape)."""
        if self.progress.corrected:
            return corrected(self, draws, seed=seed).draws
        return posterior_draws(self, draws=draws, seed=seed)

    def posterior(
        self,
        draws: int = 1000,
        *,
        seed: int = 0,
        var_names: Collection[str] | None = None,
        expand: int = EXPAND,
        correct: Literal["auto", "psis"] | None = "auto",
        log_likelihood: bool = False,
    ) -> InferenceData:
        """Draw the latent sites as an ArviZ InferenceData, or a DataTree with ArviZ 1.

        Local sites have a dimension `client` with the clients' names, and features have theirs. A
        network of more than `expand` scalars is summarized by layer, as `<network>_mean`, `_sd`,
        `_rms` and `_largest` with a dimension `<network>_layer`. Attributes record what was run.
        Draws are independent; 100 or more, if 4 divides their number, are in four chains, for
        ArviZ's R-hat.

        Args:
            draws: S.
            seed: of the draws.
            var_names: return only these sites, written out however large they are.
            expand: the largest network, in scalars, that is still written out.
            correct: "psis": weight the guide's draws and resample them, in one to three more rounds
                in which each client returns one number per draw (`hierfl.diagnostics.corrected`).
                None: the guide's own draws. "auto": "psis" if `hierfl.fit(model, data)` chose the
                method and found its weights trustworthy.
            log_likelihood: add `log_likelihood`, by row, and `observed_data`: az.loo needs both.

        Raises:
            KeyError: a site in `var_names` does not exist.
            ValueError: `draws` is below 1; the guide has no density to correct; or the rows have no
                labels for `log_likelihood`.
        """
        if correct == "auto":
            correct = "psis" if self.progress.corrected else None
        what: Any = {"var_names": var_names, "expand": expand, "log_likelihood": log_likelihood}
        return posterior_data(self, draws, seed=seed, correct=correct, **what)

    def posterior_predictive(
        self, draws: int = 500, *, rows: ClientData | Frames | None = None, seed: int = 0
    ) -> InferenceData:
        """Draw labels from the posterior predictive distribution.

        The ArviZ groups are `posterior_predictive` and, for labeled rows, `observed_data`.

        Args:
            draws: S; each row gets one label for each draw of the latent sites.
            rows: rows of fitted clients, matched by name. None: the fitted rows.
            seed: of the draws.

        Raises:
            KeyError: a client was not fitted.
            ValueError: a field is missing or holds NaN; `draws` is below 1.
        """
        data = None if rows is None else self._rows(rows)
        return predictive_data(self, draws, rows=data, seed=seed)

    def prior(
        self,
        draws: int = 500,
        *,
        seed: int = 0,
        var_names: Collection[str] | None = None,
        expand: int = EXPAND,
        predictive: bool = False,
    ) -> InferenceData:
        """Draw the latent sites from the prior, learned params at their fitted values.

        Args:
            draws: S.
            seed: of the draws.
            var_names: return only these sites, written out however large they are.
            expand: as in `posterior`.
            predictive: also draw a label for each row: groups `prior_predictive` and
                `observed_data`.

        Raises:
            KeyError: a site in `var_names` does not exist.
            ValueError: `draws` is below 1.
        """
        return prior_data(
            self, draws, seed=seed, var_names=var_names, expand=expand, predictive=predictive
        )

    def predict(
        self, rows: ClientData | Frames, *, site: str | None = None, draws: int = 200, seed: int = 0
    ) -> Prediction:
        """Predict each row from its own client's posterior; labels may be absent.

        Args:
            rows: rows of fitted clients, matched by name.
            site: the observed site to predict; None: the model's only one.
            draws: S, of the posterior to average over; 1 is enough for point estimates.
            seed: of the draws.

        Raises:
            KeyError: a client was not fitted (`personalize` it first), or the site is not observed.
            ValueError: a field is missing or holds NaN; or `site` is None, and there are several.
        """
        data = self._rows(rows)
        prediction = predict(self, data, site=site, draws=draws, seed=seed)
        return prediction if data is rows else in_frame_order(prediction)

    def replicate(
        self, rows: ClientData | Frames, *, site: str | None = None, draws: int = 200, seed: int = 0
    ) -> Tensor:
        """Draw labels of some rows from the posterior predictive distribution, (S, n).

        The labels of one draw share its latent sites, so labels of one client's rows are dependent.
        Arguments and errors are those of `predict`; `draws` is S.
        """
        data = self._rows(rows)
        drawn = replicate(self, data, site=site, draws=draws, seed=seed)
        return drawn if data is rows else data.frame_rows.arranged(drawn, 1)

    @property
    def certificates(self) -> pd.DataFrame:
        """What was removed when clients left, with hashes before and after: one row per client."""
        from hierfl.runs.living import certificates

        return certificates(self.progress.history)

    personalize, save = joining.personalize, saved.save
    summary = summary

    if TYPE_CHECKING:  # by `late_methods`
        infer_discrete = eliminated.infer_discrete
        infer_rows = eliminated.infer_rows
        get_samples = samples_of_fit
        without = living.without
        updated = joining.updated
        update = updating.update
        effects = conditional_effects.effects
        predictions = comparisons.predictions
        comparisons = comparisons.comparisons
        hypotheses = hypotheses.hypotheses
        profile = profile.profile
        survival = conditional_effects.survival
        r2 = variance.r2
        icc = variance.icc
        imputed = imputed.imputed

    def report(
        self,
        path: str | Path = "report.html",
        *,
        held_out: ClientData | Frames | None = None,
        foreign: ClientData | Frames | None = None,
        local_only: Fit | None = None,
        site: str | None = None,
        title: str | None = None,
        draws: int = 400,
        seed: int = 0,
    ) -> Report:
        """Write one self-contained HTML page: what was run, posteriors, calibration and warnings.

        Args:
            path: of the file; an earlier report there is replaced.
            held_out: labeled rows of fitted clients to score; None: training rows, with a warning.
            foreign: out-of-distribution rows of the clients: are predictions less certain?
            local_only: a fit of the same local sites, in which clients share nothing, to compare.
            site: the observed site that is scored, as in `predict`.
            title: of the page.
            draws: S, of the posterior.
            seed: of the draws.

        Returns:
            The path, every question that was asked, and the warnings.

        Raises:
            KeyError: rows of a client that was not fitted.
            ValueError: a field is missing, held-out rows have no labels, or several sites are
                observed and `site` is None.
            FileExistsError: the file already exists, and is not a report of hierfl.
        """
        from hierfl.report import write  # Matplotlib and Jinja are slow to import

        return write(
            self,
            path,
            held_out=None if held_out is None else self._rows(held_out),
            foreign=None if foreign is None else self._rows(foreign),
            local_only=local_only,
            site=site,
            title=title,
            draws=draws,
            seed=seed,
        )
