"""What a run over nodes returns: the global sites here, and what nodes answer of their own clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd
from torch import Tensor

from hierfl.core.tables import shown_as
from hierfl.core.trees import Tree
from hierfl.data.clients import ClientData
from hierfl.diagnostics.summary import Summary
from hierfl.effects import (
    comparisons,
    conditional_effects,
    contrasts,
    hypotheses,
    icc,
    profile,
    slopes,
    survival_curves,
)
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress, chosen_of
from hierfl.method import Method
from hierfl.nodes import living, saved_over
from hierfl.nodes.after_rounds import ask_nodes, imputed_at_nodes
from hierfl.nodes.answers import FromNodes, over_nodes, refused
from hierfl.nodes.asking import Ask
from hierfl.nodes.global_answers import brief_over, summary_over
from hierfl.nodes.local_fit import table_of_rows, table_of_sites
from hierfl.posterior.arviz_groups import EXPAND
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.snapshot import global_sites
from hierfl.program.program import Program
from hierfl.runs.result import Fit

if TYPE_CHECKING:
    from arviz import InferenceData

    from hierfl.report import Report


@shown_as(brief_over)
@dataclass(frozen=True, eq=False)
class FitOverNodes:
    """A method, fitted to clients whose rows and states are at nodes.

    It has the methods of `hierfl.Fit`, with the same answers. What global sites and the schema are
    enough for is computed here. Of a formula, `effects` and its like of a named client, and `profile`,
    ask nodes for draws, which their policies may keep ("draws" in `may_leave`). What reads rows is
    refused by name.

    Args:
        method: what was fitted.
        federation: the checked program and the clients' names, without rows.
        progress: the server's state and the history; client states in it are nobody's.
        rounds: how many rounds were planned.
        run: name of the run at the nodes.
        ask: hands messages to nodes.
        joined: client -> name of the run at its node, of those that joined later.
        ended: clients whose nodes have been sent the state that the run has ended with.
    """

    method: Method
    federation: Federation
    progress: Progress
    rounds: int
    run: str
    ask: Ask
    joined: Mapping[str, str] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    @property
    def program(self) -> Program:
        """The checked program."""
        return self.federation.program

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, sorted."""
        return self.federation.data.names

    @property
    def history(self) -> pd.DataFrame:
        """One row a round, as in `hierfl.Fit.history`; `left_out` says who was missing, and why."""
        return self.here.history

    @property
    def chosen(self) -> str | None:
        """Which method was chosen for a model, and why; None where the method was named."""
        return chosen_of(self.progress.history)

    @property
    def message(self) -> Tree:
        """The server's last message."""
        return self.here.message

    def draws(self, draws: int = 1000, *, seed: int = 0) -> Draws:
        """Draw the global sites: `shared` site -> (S, *shape), as `hierfl.Fit.draws`; `own` is empty."""
        sites = global_sites(self.program)
        return posterior_draws(self.here, draws=draws, seed=seed, keep=sites)

    def posterior(
        self,
        draws: int = 1000,
        *,
        seed: int = 0,
        var_names: Collection[str] | None = None,
        expand: int = EXPAND,
        correct: Literal["auto"] | None = "auto",
        log_likelihood: bool = False,
    ) -> InferenceData:
        """Draw the global sites, as `hierfl.Fit.posterior` does; those of clients are at the nodes.

        Raises:
            ValueError: the program has no global site; or draws are to be corrected, or weighted by
                rows.
            KeyError: a site in `var_names` does not exist, or is a client's own.
        """
        sites = self._global(var_names)
        if correct not in (None, "auto") or log_likelihood:
            raise ValueError(
                "correct and log_likelihood need the clients' rows, which are at the nodes: leave them "
                "out; two_stage has weighted its draws"
            )
        return self.here.posterior(draws, seed=seed, var_names=sites, expand=expand, correct=None)

    def prior(
        self,
        draws: int = 500,
        *,
        seed: int = 0,
        var_names: Collection[str] | None = None,
        expand: int = EXPAND,
        predictive: bool = False,
    ) -> InferenceData:
        """Draw the global sites from the prior, as `hierfl.Fit.prior` does.

        Errors are those of `posterior`; ValueError too with `predictive=True`, of rows.
        """
        if predictive:
            raise ValueError("labels are of rows, which are at the nodes: leave predictive out")
        return self.here.prior(draws, seed=seed, var_names=self._global(var_names), expand=expand)

    def _global(self, var_names: Collection[str] | None) -> list[str]:
        """Return the global sites, or some of them; refuse others."""
        sites = global_sites(self.program)
        if not sites:
            raise ValueError(
                "the program has no global site: what it has of clients is at the nodes"
            )
        for name in var_names or ():
            if name not in sites:
                raise KeyError(
                    f"'{name}' is no global site ({', '.join(sorted(sites))}): clients' own are at their "
                    "nodes, fit.local_summary()"
                )
        return sorted(sites if var_names is None else var_names)

    def summary(self, *, prob: float = 0.9, draws: int = 1000, seed: int = 0) -> Summary:
        """Summarize the global sites as a table, and say what the history tells of trust.

        Arguments and errors are those of `hierfl.Fit.summary`.
        """
        return summary_over(self, prob, draws, seed)

    # What a fit of a formula says: as of `hierfl.Fit`.
    effects = over_nodes(conditional_effects.effects)
    comparisons = over_nodes(comparisons.comparisons)
    contrasts = over_nodes(contrasts.contrasts)
    slopes = over_nodes(slopes.slopes)
    survival = over_nodes(survival_curves.survival)
    profile = over_nodes(profile.profile, every=True)
    hypotheses = hypotheses.hypotheses
    icc = icc.icc
    imputed = imputed_at_nodes
    predictions, marginal_means, r2 = map(refused, ("predictions", "marginal_means", "r2"))
    posterior_predictive, replicate = map(refused, ("posterior_predictive", "replicate"))
    personalize, update = map(refused, ("personalize", "update"))
    infer_discrete, infer_rows = map(refused, ("infer_discrete", "infer_rows"))

    def report(
        self,
        path: str | Path = "report.html",
        *,
        title: str | None = None,
        draws: int = 400,
        seed: int = 0,
    ) -> Report:
        """Write one HTML page, as `hierfl.Fit.report` does, of the run and the global sites.

        Arguments are those of `hierfl.Fit.report`; scores of rows are asked of nodes, `scores`.
        """
        return self.here.report(path, title=title, draws=draws, seed=seed)

    save, without, updated = saved_over.save, living.without, living.updated

    @property
    def certificates(self) -> pd.DataFrame:
        """What was removed when clients left, as `hierfl.Fit.certificates`."""
        return self.here.certificates

    def local_summary(self, draws: int = 1000, *, seed: int = 0) -> FromNodes[pd.DataFrame]:
        """Let each node summarize its client's own sites: mean, sd, and the quantiles of 5, 50 and 95 %.

        A node writes the answer into its folder, and sends it where its policy has "summaries" in
        `may_leave`.

        Args:
            draws: S, the same as in `hierfl.Fit.draws`.
            seed: of the draws.
        """
        return ask_nodes(self, "summaries", table_of_sites, draws=draws, seed=seed)

    def local_draws(
        self, draws: int = 1000, *, seed: int = 0, clients: Collection[str] | None = None
    ) -> FromNodes[dict[str, Tensor]]:
        """Let each node draw its client's own sites: site -> (S, *shape), as `hierfl.Fit.draws` does.

        A node writes them into its folder, and sends them where its policy has "draws" in
        `may_leave`.

        Args:
            draws: S.
            seed: of the draws.
            clients: whose nodes are asked. Default None: all.
        """
        return ask_nodes(self, "draws", dict, clients=clients, draws=draws, seed=seed)

    def predict(
        self,
        rows: ClientData | None = None,
        *,
        site: str | None = None,
        draws: int = 200,
        seed: int = 0,
    ) -> FromNodes[pd.DataFrame]:
        """Let each node predict rows by its client's posterior, as `hierfl.Fit.predict` does.

        A node writes mean, sd and, of labeled rows, log scores into its folder. It sends means and
        sds where its policy has "predictions" in `may_leave`, of its own rows also "rows".

        Args:
            rows: of some of the clients, matched by name; each client's go to its node. Default
                None: every node predicts the rows that it has.
            site: the observed site to predict; None: the model's only one.
            draws: S.
            seed: of the draws.

        Raises:
            KeyError: rows of a client that was not fitted.
        """

        def read(found: Tree) -> pd.DataFrame:
            return table_of_rows({name: found.get(name) for name in ("mean", "sd")})

        return ask_nodes(self, "predictions", read, rows, site=site, draws=draws, seed=seed)

    def scores(
        self,
        rows: ClientData | None = None,
        *,
        site: str | None = None,
        draws: int = 200,
        seed: int = 0,
    ) -> FromNodes[pd.DataFrame]:
        """Let each node score its predictions of labeled rows, as `Prediction.scores` does: one line a client.

        A node sends it where its policy has "scores" in `may_leave`.

        Args:
            rows: as in `predict`.
            site: as in `predict`.
            draws: S.
            seed: of the draws.

        Raises:
            KeyError: rows of a client that was not fitted.
        """

        def read(found: Tree) -> pd.DataFrame:
            return pd.DataFrame({name: [float(value)] for name, value in found.items()})

        return ask_nodes(self, "scores", read, rows, site=site, draws=draws, seed=seed)

    @property
    def here(self) -> Fit:
        """The fit as the server has it, without the rows and the states of clients."""
        return Fit(self.method, self.federation, self.progress, self.rounds)
