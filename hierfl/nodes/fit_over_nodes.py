"""A fit whose clients are at nodes: the global sites are here, and nodes answer of their own clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from torch import Tensor

from hierfl.core.arguments import NoSuchName
from hierfl.core.tables import printed, table_of_rows
from hierfl.data.clients import ClientData
from hierfl.diagnostics.summary import Summary
from hierfl.nodes import answers, living
from hierfl.nodes.answers import FromNodes, ask_nodes, brief_over
from hierfl.nodes.local_fit import table_of_sites
from hierfl.nodes.messages import Ask
from hierfl.posterior.arviz_groups import EXPAND
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.snapshot import global_sites
from hierfl.runs.result import Fit

if TYPE_CHECKING:
    from arviz import InferenceData

    from hierfl.report import Report

# methods of `hierfl.Fit` that read rows
AT_NODES = (
    *("predictions", "r2", "personalize", "posterior_predictive", "replicate"),
    *("infer_discrete", "infer_rows"),
)


@printed
@dataclass(frozen=True, eq=False, repr=False)
class FitOverNodes(Fit):
    """A method fitted to clients whose rows and states are at nodes.

    It has the calls of `hierfl.Fit`, with the same arguments. What needs only global sites and the
    schema is computed here. For a formula, `profile`, and `effects`, `comparisons` and `survival`
    of a named client, ask the nodes for draws, which their policies must release ("draws" in
    `may_leave`). Calls that read rows are refused by name.

    Args:
        run: name of the run at the nodes.
        ask: hands messages to nodes.
        joined: client -> name of the run at its node, of those that joined later.
        ended: clients whose nodes have been sent the state that the run has ended with.
    """

    run: str
    ask: Ask
    joined: Mapping[str, str] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    __tables__ = brief_over

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
        correct: Literal["auto", "psis"] | None = "auto",
        log_likelihood: bool = False,
    ) -> InferenceData:
        """Draw the global sites, as `hierfl.Fit.posterior` does; refuse sites of clients, and what reads rows."""
        sites = self._global(var_names)
        if correct not in (None, "auto") or log_likelihood:
            raise ValueError(
                "correct and log_likelihood need rows, which are at the nodes: leave them out"
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
        """Draw the global sites from the prior, as `hierfl.Fit.prior` does; errors are those of `posterior`."""
        if predictive:
            raise ValueError("labels are of rows, which are at the nodes: leave predictive out")
        return self.here.prior(draws, seed=seed, var_names=self._global(var_names), expand=expand)

    def _global(self, var_names: Collection[str] | None) -> list[str]:
        """Return the global sites, or some of them; refuse others."""
        sites = global_sites(self.program)
        if not sites:
            raise ValueError("the program has no global site: ask nodes, fit.local_summary()")
        if own := {*(var_names or ())} - {*sites}:
            raise NoSuchName(
                f"'{min(own)}' is not a global site ({', '.join(sorted(sites))}): clients' own are at "
                "their nodes, fit.local_summary()"
            )
        return sorted(sites if var_names is None else var_names)

    def summary(self, *, prob: float = 0.9, draws: int | None = None, seed: int = 0) -> Summary:
        """Summarize the global sites, and say what the history tells of trust, as `hierfl.Fit.summary`."""
        return answers.summary_over(self, prob, 1000 if draws is None else draws, seed)

    imputed = answers.imputed_at_nodes  # type: ignore[assignment]
    predictions, r2, personalize = map(answers.refused, AT_NODES[:3])
    posterior_predictive, replicate = map(answers.refused, AT_NODES[3:5])
    infer_discrete, infer_rows = map(answers.refused, AT_NODES[5:])

    def report(self, path: str | Path = "report.html", **options: Any) -> Report:
        """Write one HTML page, as `hierfl.Fit.report` does, of the run and the global sites.

        Raises:
            ValueError: rows are given: their scores are asked of nodes, `scores`.
        """
        if rows := sorted(options.keys() & {"held_out", "foreign", "local_only", "site"}):
            raise ValueError(f"{rows[0]} is of rows, which nodes score: fit.scores(rows)")
        return self.here.report(path, **options)

    save, without, updated = living.save, living.without, living.updated  # type: ignore[assignment]

    def local_summary(self, draws: int = 1000, *, seed: int = 0) -> FromNodes[pd.DataFrame]:
        """Let each node summarize its client's own sites: mean, sd, and the quantiles of 5, 50 and 95%.

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
        """Let each node draw its client's own sites: site -> (S, *shape); "draws" in `may_leave` lets them leave.

        Args:
            draws: S.
            seed: of the draws.
            clients: whose nodes are asked. Default None: all.
        """
        return ask_nodes(self, "draws", dict, clients=clients, draws=draws, seed=seed)

    def predict(  # type: ignore[override]
        self,
        rows: ClientData | None = None,
        *,
        site: str | None = None,
        draws: int = 200,
        seed: int = 0,
    ) -> FromNodes[pd.DataFrame]:
        """Let each node predict rows by its client's posterior, as `hierfl.Fit.predict` does, with its arguments.

        A node writes mean, sd and, of labeled rows, log scores into its folder. It sends means and
        sds where its policy has "predictions" in `may_leave`, of its own rows also "rows". `rows` are
        of some of the clients, matched by name, and each client's go to its node; by default every
        node predicts the rows that it has.

        Raises:
            KeyError: rows of a client that was not fitted.
        """
        return ask_nodes(
            self, "predictions", table_of_rows, rows, site=site, draws=draws, seed=seed
        )

    def scores(
        self,
        rows: ClientData | None = None,
        *,
        site: str | None = None,
        draws: int = 200,
        seed: int = 0,
    ) -> FromNodes[pd.DataFrame]:
        """Let each node score its predictions of labeled rows, as `Prediction.scores` does: one line per client.

        A node sends it where its policy has "scores" in `may_leave`; arguments and errors are those of `predict`.
        """
        return ask_nodes(self, "scores", _line_of, rows, site=site, draws=draws, seed=seed)

    @property
    def here(self) -> Fit:
        """The fit as the server has it, without the rows and the states of clients."""
        return Fit(self.method, self.federation, self.progress, self.rounds)


def _line_of(scores: Mapping[str, Tensor]) -> pd.DataFrame:
    return pd.DataFrame({name: [float(value)] for name, value in scores.items()})
