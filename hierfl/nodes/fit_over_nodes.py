"""What a run over nodes returns: the global sites here, and what nodes answer of their own clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.tables import Shown, shown_as
from hierfl.core.trees import Tree, nbytes
from hierfl.data.clients import ClientData
from hierfl.diagnostics.summary import Summary
from hierfl.effects import (
    comparisons,
    conditional_effects,
    contrasts,
    hypotheses,
    icc,
    slopes,
    survival_curves,
)
from hierfl.engine.client_store import taken
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress, chosen_of
from hierfl.method import Method
from hierfl.nodes.asking import Answer, Ask, last_counted, mail_of
from hierfl.nodes.global_answers import brief_over, summary_over
from hierfl.nodes.local_fit import table_of_rows, table_of_sites
from hierfl.nodes.messages import Refused, check_numbers, from_bytes, to_bytes
from hierfl.nodes.policy import Kind
from hierfl.posterior.snapshot import global_sites
from hierfl.program.program import Program
from hierfl.runs.result import Fit

if TYPE_CHECKING:
    from arviz import InferenceData


MOST = 1 << 31  # bytes of an answer
Found = TypeVar("Found")


def _shown(found: FromNodes[Any]) -> Shown:
    """Every client, and whether its node gave an answer."""
    rows = [(name, "given") for name in found.given] + list(found.withheld.items())
    return Shown(
        f"Answers of {len(found.given)} of {len(rows)} nodes",
        pd.DataFrame(sorted(rows), columns=["client", "answer"]),
        "What stays at a node is written into its folder.",
    )


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class FromNodes(Generic[Found]):
    """What nodes answered: client -> what was `given`, or why it was `withheld`."""

    given: Mapping[str, Found]
    withheld: Mapping[str, str]

    @property
    def table(self) -> pd.DataFrame:
        """One table of all clients, with the client in front.

        Raises:
            ValueError: no node gave a table.
        """
        frames = {k: v for k, v in self.given.items() if isinstance(v, pd.DataFrame)}
        if not frames:
            why = next(iter(self.withheld.values()), "draws are tensors: see .given")
            raise ValueError(f"no node gave a table ({why})")
        return pd.concat(frames, names=["client"]).reset_index(level=0)


@shown_as(brief_over)
@dataclass(frozen=True, eq=False)
class FitOverNodes:
    """A method, fitted to clients whose rows and states are at nodes.

    Of a formula, `effects` and its like answer as those of `hierfl.Fit`, of the average client and
    of a new one (`client="new"`), for which draws of the global sites and the schema are enough.
    What reads rows, or a client's own coefficients, is at its node.

    Args:
        method: what was fitted.
        federation: the checked program and the clients' names, without rows.
        progress: the server's state and the history; client states in it are nobody's.
        rounds: how many rounds were planned.
        run: name of the run at the nodes.
        ask: hands messages to nodes.
        joined: client -> name of the run at its node, of those that joined later.
    """

    method: Method
    federation: Federation
    progress: Progress
    rounds: int
    run: str
    ask: Ask
    joined: Mapping[str, str] = field(default_factory=dict)

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

    def posterior(self, draws: int = 1000, *, seed: int = 0) -> InferenceData:
        """Draw the global sites, as `hierfl.Fit.posterior` does; those of clients are at the nodes.

        Raises:
            ValueError: the program has no global site.
        """
        sites = sorted(global_sites(self.federation.program))
        if not sites:
            raise ValueError(
                "the program has no global site: what it has of clients is at the nodes"
            )
        return self.here.posterior(draws, seed=seed, var_names=sites, correct=None)

    def summary(self, *, prob: float = 0.9, draws: int = 1000, seed: int = 0) -> Summary:
        """Summarize the global sites as a table, and say what the history tells of trust.

        Arguments and errors are those of `hierfl.Fit.summary`.
        """
        return summary_over(self, prob, draws, seed)

    # What a fit of a formula says: as of `hierfl.Fit`.
    effects = conditional_effects.effects
    comparisons = comparisons.comparisons
    contrasts = contrasts.contrasts
    slopes = slopes.slopes
    survival = survival_curves.survival
    hypotheses = hypotheses.hypotheses
    icc = icc.icc

    def without(self, client: str, *, folder: str | Path | None = None) -> FitOverNodes:
        """Return the fit without one of its clients, as `hierfl.Fit.without` does; no node is asked.

        Its node keeps its own folder. The others are asked about their clients as before.

        Args:
            client: its name.
            folder: the run's checkpoint folder, in which nothing that the client had sent is left,
                nor in that of `by_files`; `withdrawn.json` is the certificates. Backups, and what
                another transport keeps, are not reached. None: it stays.

        Errors are those of `hierfl.Fit.without`.
        """
        from hierfl.nodes.living import without  # few fits need it

        return without(self, client, folder=folder)

    def updated(self, nodes: Any, *, folder: str | Path | None = None) -> FitOverNodes:
        """Return the fit with the clients of other nodes, or new rows of some, as `hierfl.Fit.updated`.

        The new nodes alone are asked: for a factor, and for log ratios. Afterwards they are asked
        about their clients as the others are.

        Args:
            nodes: those of the new or changed clients, as for `hierfl.nodes.fit`; a new node of a
                formula is started with the agreed schema, `fit.method.model`.
            folder: the run's checkpoint folder, in which the fit with the new clients takes the
                place of this one. None: it stays as it is.

        Raises:
            ValueError: as `hierfl.Fit.updated`; or rows of another form.
            AnotherRound: the others have to be asked, by a run over all nodes.
            TooFewNodes: a new node does not answer.
            CheckpointError: the folder does not hold this run.
        """
        from hierfl.nodes.living import updated  # few fits need it

        return updated(self, nodes, folder=folder)

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
        return self._asked("summaries", table_of_sites, draws=draws, seed=seed)

    def local_draws(self, draws: int = 1000, *, seed: int = 0) -> FromNodes[dict[str, Tensor]]:
        """Let each node draw its client's own sites: site -> (S, *shape), as `hierfl.Fit.draws` does.

        A node writes them into its folder, and sends them where its policy has "draws" in
        `may_leave`.

        Args:
            draws: S.
            seed: of the draws.
        """
        return self._asked("draws", dict, draws=draws, seed=seed)

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
        sds where its policy has "predictions" in `may_leave`.

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

        return self._asked("predictions", read, rows, site=site, draws=draws, seed=seed)

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

        return self._asked("scores", read, rows, site=site, draws=draws, seed=seed)

    @property
    def here(self) -> Fit:
        """The fit as the server has it, without the rows and the states of clients."""
        return Fit(self.method, self.federation, self.progress, self.rounds)

    # -------------------------------------------------------------------------------------------- asking
    def _asked(
        self,
        kind: Kind,
        read: Callable[[Tree], Found],
        rows: ClientData | None = None,
        **options: Any,
    ) -> FromNodes[Found]:
        """Ask the nodes of all clients, or of those that some rows belong to."""
        clients = self.clients if rows is None else rows.names
        self.federation.data.index(clients)  # refuses unknown clients
        contents = {name: self._question(kind, name, rows, options) for name in clients}
        given: dict[str, Found] = {}
        withheld: dict[str, str] = {}
        for one in self.ask(contents):
            if one.client not in contents or one.client in given:
                continue
            try:
                given[one.client] = read(self._read(one, kind))
                withheld.pop(one.client, None)
            except Exception as error:  # whatever crafted bytes raise
                withheld.setdefault(one.client, str(error)[:500])
        for name in contents:
            if name not in given:
                withheld.setdefault(name, "it did not answer")
        ordered = {name: given[name] for name in clients if name in given}
        return FromNodes(ordered, dict(sorted(withheld.items())))

    def _question(
        self, kind: Kind, name: str, rows: ClientData | None, options: Mapping[str, Any]
    ) -> bytes:
        place = int(self.federation.data.index([name])[0])
        own = taken(self.progress.table, torch.tensor([place]))
        given = {} if rows is None else dict(rows.select([name]).fields)
        counted = last_counted(self.federation, self.progress.history).get(name, -1)
        run = self.joined.get(name, self.run)
        about = {"run": run, "kind": kind, "rounds": self.progress.round, "counted": counted}
        return to_bytes(
            {"message": self.message, "mail": mail_of(own, 0), "rows": given},
            {**about, "site": None, **options},
        )

    def _read(self, found: Answer, kind: Kind) -> Tree:
        """Return what a node released in answer to this question; refuse any other."""
        if found.content is None:
            raise Refused(found.reason or "it did not answer")
        answered = from_bytes(found.content, most=MOST)
        said = tuple(answered.about.get(name) for name in ("run", "client", "kind"))
        if said != (self.joined.get(found.client, self.run), found.client, kind):
            run, client, kind_ = (str(each)[:40] for each in said)
            raise Refused(f"its answer is of run {run}, client {client}: {kind_}")
        if "stays" in answered.about:
            raise Refused(str(answered.about["stays"])[:500])
        check_numbers(answered.tree)
        if not nbytes(answered.tree):
            raise Refused("its answer is empty")
        return answered.tree
