"""What `fit` returns: posterior, predictions, new clients, and all of it on disk."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.trees import Tree, nbytes, tree_leaves
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.diagnostics import AgainstNuts, against_nuts, corrected
from hierfl.engine.client_store import subset
from hierfl.engine.federation import Federation, about
from hierfl.engine.rounds import Progress, adapt
from hierfl.method import Clock, Method
from hierfl.posterior import arviz_groups as groups
from hierfl.posterior.arviz_groups import EXPAND, sampled
from hierfl.posterior.draws import Draws, posterior_draws, predict, prior_draws
from hierfl.posterior.prediction import Prediction
from hierfl.program.check_data import check_finite, check_labels
from hierfl.program.program import Program
from hierfl.runs import saved

if TYPE_CHECKING:
    from arviz import InferenceData

    from hierfl.report import Report


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
        return self.federation.server.last(
            self.progress.server, Clock(self.progress.round, max(self.rounds, 1))
        )

    def draws(self, draws: int = 1000, *, seed: int = 0) -> Draws:
        """Draws of the latent sites as tensors: shared (S, *shape), own (S, N, *shape)."""
        return posterior_draws(
            self.federation, self.message, self.progress.table, draws=draws, seed=seed
        )

    def posterior(
        self,
        draws: int = 1000,
        *,
        seed: int = 0,
        sites: Collection[str] | None = None,
        expand: int = EXPAND,
        correct: Literal["psis"] | None = None,
        log_likelihood: bool = False,
    ) -> InferenceData:
        """Draws of the latent sites in ArviZ: InferenceData, or DataTree with ArviZ 1.

        Local sites have a `client` dimension and the clients' names, features theirs. A network of more than `expand` numbers is
        not written out but summarised by layer: `<network>_mean`, `_sd`, `_rms` and `_largest` with a dimension
        `<network>_layer`. Attributes say what was run.

        Args:
            draws: S.
            seed: of the draws.
            sites: only these, written out however large they are.
            expand: numbers that a network may have, a client's or the global one, to be written out.
            correct: "psis": the guide's draws are weighed and resampled until they are the posterior's, by one round more in
                which each client returns a number a draw (`hierfl.diagnostics.corrected`); None: they are the guide's.
            log_likelihood: also the groups `log_likelihood`, at each row, and `observed_data`: what az.loo and az.waic ask for.

        Raises:
            KeyError: a site was asked for that there is not.
            ValueError: draws below 1; weights of a guide without a density; likelihoods of rows without labels.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}: it must be 1 or more")
        if correct not in (None, "psis"):
            raise ValueError(f"correct is {correct!r}: 'psis', or None")
        about_draws: dict[str, Any] = {
            "approximation": "draws of a fitted guide, not of a Markov chain: r_hat and ess do not judge them"
        }
        if correct is None:
            found = groups.drawn_groups(self, draws, seed=seed, sites=sites, expand=expand)
            latents = self.draws(draws, seed=seed) if log_likelihood else None
        else:
            weighed = corrected(self, draws, seed=seed)
            latents = weighed.draws
            found = groups.given_groups(self, "posterior", latents, sites=sites, expand=expand)
            about_draws = {
                "approximation": "draws of a fitted guide, resampled by Pareto-smoothed weights, some several times",
                "k_hat": weighed.k_hat,
                "k_hat_guide": weighed.k_hat_guide,
                "k_hat_clients": weighed.k_hat_clients.to_numpy(),
                "effective_draws": weighed.effective,
                "proposals": weighed.proposals,
                "bytes_up_psis": weighed.proposals
                * len(self.clients)
                * torch.get_default_dtype().itemsize,
                "log_evidence": weighed.log_evidence,
            }
        if log_likelihood and latents is not None:
            found.rows(
                "log_likelihood", groups.log_likelihoods(self, latents), self.federation.data
            )
            found.rows(
                "observed_data", groups.observed(self, self.federation.data), self.federation.data
            )
        return found.arviz({**groups.attributes(self, seed), **about_draws})

    def posterior_predictive(
        self, draws: int = 500, *, rows: ClientData | None = None, seed: int = 0
    ) -> InferenceData:
        """Labels drawn from the posterior predictive distribution, in ArviZ: groups `posterior_predictive` and `observed_data`.

        Args:
            draws: S, one label of each row a draw of the latent sites.
            rows: of clients that were fitted, by name; None: the rows they were fitted to.
            seed: of the draws.

        Raises:
            KeyError: a client that was not fitted.
            ValueError: a field is missing, or holds NaN; draws below 1.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}: it must be 1 or more")
        asked = self.federation.data if rows is None else rows
        few = self._of_rows(asked)
        found = groups.Groups(few)
        found.rows(
            "posterior_predictive",
            groups.sampled(few, few.draws(draws, seed=seed), asked, seed),
            asked,
        )
        known = groups.observed(few, asked)
        if known:
            found.rows("observed_data", known, asked)
        return found.arviz(groups.attributes(self, seed))

    def prior(
        self,
        draws: int = 500,
        *,
        seed: int = 0,
        sites: Collection[str] | None = None,
        expand: int = EXPAND,
        predictive: bool = False,
    ) -> InferenceData:
        """Draws of the latent sites from the model's own prior, params that it learns where they are, in ArviZ: group `prior`.

        Args:
            draws: S.
            seed: of the draws.
            sites: only these, written out however large they are.
            expand: as `posterior`'s.
            predictive: also a label of each row, the groups `prior_predictive` and `observed_data`.

        Raises:
            KeyError: a site was asked for that there is not.
            ValueError: draws below 1.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}: it must be 1 or more")
        drawn = prior_draws(
            self.federation, self.message, self.progress.table, draws=draws, seed=seed
        )
        found = groups.given_groups(self, "prior", drawn, sites=sites, expand=expand)
        if predictive:
            data = self.federation.data
            found.rows("prior_predictive", groups.sampled(self, drawn, data, seed), data)
            found.rows("observed_data", groups.observed(self, data), data)
        return found.arviz(groups.attributes(self, seed))

    def predict(
        self, rows: ClientData, *, site: str | None = None, draws: int = 200, seed: int = 0
    ) -> Prediction:
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
        few = self._of_rows(rows)
        return predict(
            few.federation,
            self.message,
            few.progress.table,
            rows,
            site=site,
            draws=draws,
            seed=seed,
        )

    def replicate(
        self, rows: ClientData, *, site: str | None = None, draws: int = 200, seed: int = 0
    ) -> Tensor:
        """Labels that the posterior would have these rows show, (S, n): a draw's rows go together, as all of one client's do.

        Args:
            rows: of clients that were fitted, matched by name.
            site: as in `predict`.
            draws: S, of the posterior; one label a row of each.
            seed: of the draws.

        Raises:
            KeyError, ValueError: as `predict`.
        """
        site = self.program.observed_site(site)
        few = self._of_rows(rows)
        return sampled(few, few.draws(draws, seed=seed), rows, seed, count=draws)[site]

    def _of_rows(self, rows: ClientData) -> Fit:
        """The fit of those clients that some rows are of, in the order of the rows.

        Raises:
            KeyError: a client that was not fitted.
            ValueError: the rows lack a field, or hold NaN.
        """
        unknown = [name for name in rows.names if name not in set(self.clients)]
        if unknown:
            raise KeyError(
                f"client '{unknown[0]}' was not fitted: infer it first, fit.personalise(its data).predict(...)"
            )
        self.check_rows(rows, self.program.reads.model)
        ids = self.federation.data.index(rows.names)
        few = replace(self.federation, data=self.federation.data.select(ids))
        return replace(
            self,
            federation=few,
            progress=replace(self.progress, table=subset(self.progress.table, ids)),
        )

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

    def check(self, against: Literal["nuts"] = "nuts", **options: Any) -> AgainstNuts:
        """How far the posterior is from NUTS on all rows together, of the same program: `hierfl.diagnostics.against_nuts`.

        Args:
            against: "nuts".
            **options: `draws`, `warmup`, `chains`, `seed`, `correct`, `reference`, as there.

        Raises:
            ValueError: another word for `against`, or as there.
        """
        if against != "nuts":
            raise ValueError(f"against is {against!r}: only 'nuts' there is")
        return against_nuts(self, **options)

    def save(self, folder: str | Path, *, with_data: bool = True) -> None:
        """Write everything to a folder: what is global, and apart from it, under `local`, what is the clients' own.

        Args:
            folder: made if it is not there.
            with_data: the clients' rows too, so that `hierfl.load(folder)` alone makes the fit anew.
        """
        saved.write(
            folder,
            self.progress,
            about(self.method, self.federation, self.rounds),
            self.federation,
            with_data=with_data,
        )

    def report(
        self,
        path: str | Path = "report.html",
        *,
        held_out: ClientData | None = None,
        foreign: ClientData | None = None,
        alone: Fit | None = None,
        site: str | None = None,
        title: str | None = None,
        draws: int = 400,
        seed: int = 0,
    ) -> Report:
        """Write one page of HTML, which needs no network: what was run, posteriors, calibration, and warnings in plain words.

        Args:
            path: of the file.
            held_out: labelled rows of clients that were fitted, kept from the fit, to score; None: the training rows, with a warning.
            foreign: rows that are none of the clients' kind, under their names: are predictions of them less sure?
            alone: a fit of the same own sites in which clients borrow nothing: estimates are shown beside its.
            site: the observed site that is scored, as in `predict`.
            title: of the page.
            draws: of the posterior.
            seed: of the draws.

        Returns:
            The path, every question that was asked, and the warnings.

        Raises:
            KeyError: rows of a client that was not fitted.
            ValueError: a field is missing; held-out rows without labels; several observed sites, and none is chosen.
        """
        from hierfl.report import write

        given = {"held_out": held_out, "foreign": foreign}
        return write(
            self, path, **given, alone=alone, site=site, title=title, draws=draws, seed=seed
        )

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
                self.program.draw(
                    federation.client.params(self.message, own),
                    full_batch(federation.data, torch.tensor([0])),
                )
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
            raise ValueError(
                f"the rows have no field '{min(missing)}', which the model or its guide reads"
            )
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
