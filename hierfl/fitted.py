"""What `fit` returns: posterior, predictions, new clients, and all of it on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch

from hierfl import saved
from hierfl.batch import full_batch
from hierfl.data import ClientData
from hierfl.engine import Federation, Progress, adapt
from hierfl.federation import about
from hierfl.fields import check_finite, check_labels
from hierfl.inference import Draws, posterior_draws, predict
from hierfl.method import Clock, Method
from hierfl.posterior import to_arviz
from hierfl.prediction import Prediction
from hierfl.program import Program
from hierfl.table import subset
from hierfl.trees import Tree, nbytes, tree_leaves

if TYPE_CHECKING:
    from arviz import InferenceData


@dataclass(frozen=True, eq=False)
class Fit:
    """A method, fitted to a federation.

    Args:
        method: what was fitted.
        federation: the clients, their data and the checked program.
        progress: the server's state, a row of own state a client, and the history.
        rounds: how many were planned.
    """

    method: Method
    federation: Federation
    progress: Progress
    rounds: int

    @property
    def program(self) -> Program:
        """The checked program."""
        return self.federation.program

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names."""
        return self.federation.data.names

    @property
    def history(self) -> pd.DataFrame:
        """One row a round: clients, what the method logs (elbo, loss), bytes down and up, seconds, held-out score."""
        return pd.DataFrame(list(self.progress.history))

    @property
    def message(self) -> Tree:
        """What the server would send last: all that posterior and predictions know of other clients."""
        return self.federation.server.last(self.progress.server, Clock(self.progress.round, max(self.rounds, 1)))

    def draws(self, draws: int = 1000, *, seed: int = 0) -> Draws:
        """Draws of the latent sites as tensors: shared (S, *shape), own (S, N, *shape)."""
        return posterior_draws(self.federation, self.message, self.progress.table, draws=draws, seed=seed)

    def posterior(self, draws: int = 1000, *, seed: int = 0) -> InferenceData:
        """Draws of the latent sites as ArviZ's InferenceData, local ones with a `client` dimension and the clients' names.

        Args:
            draws: S.
            seed: of the draws.
        """
        return to_arviz(self, self.draws(draws, seed=seed))

    def predict(self, rows: ClientData, *, site: str | None = None, draws: int = 200, seed: int = 0) -> Prediction:
        """The posterior predictive distribution of each row, by its own client's posterior; labels may be absent.

        Args:
            rows: of clients that were fitted, matched by name.
            site: the observed site to predict; None: the model's, if it has one alone.
            draws: of the posterior to average over; 1 for point estimates.
            seed: of the draws.

        Raises:
            KeyError: a client that was not fitted (`personalise` it first), or no such site.
            ValueError: a field is missing, or holds NaN; or the model observes several sites, and none is chosen.
        """
        site = self.program.observed_site(site)
        unknown = [name for name in rows.names if name not in set(self.clients)]
        if unknown:
            raise KeyError(f"client '{unknown[0]}' was not fitted: infer it first, fit.personalise(its data).predict(...)")
        self.check_rows(rows, self.program.reads.model)
        ids = self.federation.data.index(rows.names)
        few = replace(self.federation, data=self.federation.data.select(ids))
        table = subset(self.progress.table, ids)
        return predict(few, self.message, table, rows, site=site, draws=draws, seed=seed)

    def personalise(self, data: ClientData, *, rounds: int = 200) -> Fit:
        """Infer the local sites of clients never seen, global params fixed: a Fit of those clients.

        Args:
            data: the new clients' rows; without labels where the guide needs none.
            rounds: rounds of the client's own steps; none are taken where the guide keeps nothing local.

        Raises:
            ValueError: a field is missing, or holds NaN, or labels that the guide reads are missing.
        """
        self.check_rows(data, self.program.reads.model | self.program.reads.guide)
        federation = replace(self.federation, data=data)
        self._check_labels_given(federation)
        table = adapt(federation, self.progress.server, rounds)
        return replace(self, federation=federation, progress=replace(self.progress, table=table))

    def save(self, folder: str | Path, *, with_data: bool = True) -> None:
        """Write everything to a folder: what is global, and apart from it, under `local`, what is the clients' own.

        Args:
            folder: made if it is not there.
            with_data: the clients' rows too, so that `hierfl.load(folder)` alone makes the fit anew.
        """
        saved.write(folder, self.progress, about(self.method, self.federation, self.rounds), self.federation, with_data=with_data)

    def _check_labels_given(self, federation: Federation) -> None:
        """Refuse new clients without labels where what they keep, or their guide, is made of labels."""
        missing = [
            name
            for name in self.program.labels.values()
            if name not in {**federation.data.fields, **federation.data.client_fields}
        ]
        if not missing:
            return
        own = federation.client.own
        try:
            if not tree_leaves(own):
                self.program.draw(federation.client.params(self.message, own), full_batch(federation.data, torch.tensor([0])))
                return
        except (AttributeError, RuntimeError, ValueError) as error:
            raise self._needs(missing[0]) from error
        raise self._needs(missing[0])

    def _needs(self, label: str) -> ValueError:
        return ValueError(
            f"new clients are inferred from their labels, and the rows have no field '{label}': give it, or fit with a guide that "
            f"does without, guides.amortised(fields=...); before any label, predict_from_prior(fit, rows)"
        )

    def check_rows(self, rows: ClientData, reads: frozenset[str]) -> None:
        """Refuse rows that lack a field that is read, labels apart, or that hold what model and guide cannot take."""
        missing = reads - {*self.program.labels.values(), *rows.fields, *rows.client_fields}
        if missing:
            raise ValueError(f"the rows have no field '{min(missing)}', which the model or its guide reads")
        for name, values in rows.fields.items():
            like = self.federation.data.fields.get(name)
            if like is not None and values.shape[1:] != like.shape[1:]:
                raise ValueError(
                    f"a row of '{name}' has shape {tuple(values.shape[1:])}; it was {tuple(like.shape[1:])} when fitted"
                )
        check_finite(rows)
        check_labels(self.program.supports, rows)

    def __repr__(self) -> str:
        """Method, clients, rounds and size."""
        kept = nbytes(self.federation.client.own)
        return (
            f"Fit({self.method.name}, {len(self.clients)} clients, {self.progress.round} rounds, "
            f"{nbytes(self.message)} bytes sent to a client, {kept} bytes kept by one)"
        )
