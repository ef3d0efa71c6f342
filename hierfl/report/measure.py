"""Take the measurements that a report is based on: draw, predict, compare."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.diagnostics import (
    Convergence,
    Corrected,
    convergence,
    corrected,
    out_of_distribution,
)
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.new_clients import expected_of_clients
from hierfl.posterior.prediction import Prediction, predict, predict_at
from hierfl.posterior.rows import replicate, sampled
from hierfl.posterior.snapshot import Snapshot, expect_fit, restricted
from hierfl.program.program import ProgramError
from hierfl.report.measurements import Measured

NUMBERS = 20_000_000  # most scalars that the draws may hold together: 160 MB


LEAST_DRAWS = 50  # with fewer draws, the report does not describe the posterior


def measure(
    fit: Snapshot,
    *,
    held_out: ClientData | None,
    foreign: ClientData | None,
    alone: Snapshot | None,
    site: str | None,
    draws: int,
    seed: int,
) -> Measured:
    """Draw, predict and compare. The arguments are those of `Fit.report`.

    Returns:
        All measurements.

    Raises:
        KeyError: rows belong to a client that was not fitted, or `alone` lacks a client.
        ValueError: a field is missing; there are several observed sites and `site` is None; the held-out rows
            have no labels; or `alone` has none of the fit's local sites.
    """
    latents, clients = fit.program.latents, fit.federation.data.num_clients
    size = latents.global_block.size + clients * latents.local_block.size
    few = min(draws, NUMBERS // max(size, 1))
    drawn = posterior_draws(fit, draws=few, seed=seed) if few >= LEAST_DRAWS else None
    asked = _Asked(fit, drawn if size else None, site, draws, seed)
    rows = fit.federation.data if held_out is None else held_out
    prediction = asked.predicted(rows) if fit.program.sites_of_rows else None
    if prediction is not None and prediction.label is None and held_out is not None:
        raise ValueError(
            f"the held-out rows have no labels for site '{prediction.site}': pass labeled "
            "rows, or omit held_out"
        )
    strange = None
    if foreign is not None and prediction is not None:
        strange = out_of_distribution(prediction, asked.predicted(foreign))
    if prediction is not None and prediction.label is None:
        prediction = None
    counted = prediction is not None and prediction.kind != "categorical"
    can_weigh = drawn is not None and size
    return Measured(
        fit=fit,
        draws=drawn,
        expected=_expected(fit, few, seed) if drawn is not None and drawn.own else None,
        alone={} if alone is None else _alone(fit, alone, seed),
        prediction=prediction,
        replicates=asked.replicates(rows) if counted else None,
        held_out=held_out is not None,
        foreign=strange,
        weighed=_weigh(fit, draws, seed) if can_weigh else "there are no posterior draws to weight",
        run=_judge(fit, seed),
    )


@dataclass(frozen=True, eq=False)
class _Asked:
    """Predictions of rows, at draws that are held already where there are any."""

    fit: Snapshot
    drawn: Draws | None
    site: str | None
    draws: int
    seed: int

    def predicted(self, rows: ClientData) -> Prediction:
        """Predict rows."""
        if self.drawn is None:
            return predict(self.fit, rows, site=self.site, draws=self.draws, seed=self.seed)
        few = restricted(self.fit, rows)
        name = self.fit.program.observed_site(self.site)
        return predict_at(few, _of(self.drawn, few, self.fit), rows, site=name)

    def replicates(self, rows: ClientData) -> Tensor:
        """Draw labels of rows, (S, n)."""
        if self.drawn is None:
            return replicate(self.fit, rows, site=self.site, draws=self.draws, seed=self.seed)
        few = restricted(self.fit, rows)
        name = self.fit.program.observed_site(self.site)
        return sampled(few, _of(self.drawn, few, self.fit), rows, self.seed)[name]


def _of(draws: Draws, few: Snapshot, fit: Snapshot) -> Draws:
    """Return the draws of the clients of `few`."""
    ids = fit.federation.data.index(few.clients)
    return Draws(draws.shared, {name: value[:, ids] for name, value in draws.own.items()})


def _expected(fit: Snapshot, draws: int, seed: int) -> Mapping[str, Tensor] | None:
    """Return draws of the global prior; None if the clients' prior cannot be drawn from."""
    try:
        return expected_of_clients(fit, draws=draws, seed=seed)
    except (NotImplementedError, ProgramError):
        return None  # FedMAP's prior is a penalty, not a distribution


def _weigh(fit: Snapshot, draws: int, seed: int) -> Corrected | str:
    """Return the importance weights of the guide's draws, or the reason why there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the page has its own warning for a high k-hat
        try:
            return corrected(fit, draws, proposals=max(draws, 200), inner=4, rounds=1, seed=seed)
        except ValueError as error:
            return str(error)


def _judge(fit: Snapshot, seed: int) -> Convergence | str:
    """Return the verdict on convergence, or the reason why there is none."""
    try:
        return convergence(fit, draws=16, seed=seed)
    except ValueError as error:
        return str(error)


def _alone(fit: Snapshot, alone: Snapshot, seed: int) -> dict[str, Tensor]:
    """Return the posterior means of the local sites in a local-only fit, site -> (N, *shape).

    Raises:
        KeyError: it lacks one of the clients.
        ValueError: it has none of the local sites of `fit`.
    """
    expect_fit(alone, "alone")
    place = alone.federation.data.index(fit.clients)
    found = {
        name: value.mean(0)[place]
        for name, value in posterior_draws(alone, draws=200, seed=seed).own.items()
    }
    known = {site.name for site in fit.program.latents.local_block.sites} | set(fit.program.derived)
    if not known & set(found):
        raise ValueError(
            f"the local-only fit has the local sites {sorted(found)}, this fit has "
            f"{sorted(known)}: at least one must be in both"
        )
    return found
