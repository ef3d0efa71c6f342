"""Take the measurements that a report is based on: draw, predict, compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.diagnostics import out_of_distribution
from hierfl.diagnostics.checks import Evidence
from hierfl.diagnostics.checks_of_predictions import Scored
from hierfl.diagnostics.information import information
from hierfl.diagnostics.verdict import (
    LEAST_DRAWS,
    NOT_FINITE,
    NUMBERS,
    expected_of,
    k_hats_of,
    run_of,
)
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.labels import replicate, sampled
from hierfl.posterior.learned import learned_params
from hierfl.posterior.prediction import Prediction, predict, predict_at
from hierfl.posterior.snapshot import Snapshot, expect_fit, restricted
from hierfl.report.measurements import Measured


def measure(
    fit: Snapshot,
    *,
    held_out: ClientData | None,
    foreign: ClientData | None,
    local_only: Snapshot | None,
    site: str | None,
    draws: int,
    seed: int,
) -> Measured:
    """Draw, predict and compare. The arguments are those of `Fit.report`."""
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
    scored = Scored(
        fit=fit,
        prediction=prediction,
        replicates=asked.replicates(rows) if counted else None,
        held_out=held_out is not None,
        foreign=strange,
    )
    expected = None if drawn is None else expected_of(fit, drawn, seed)
    return Measured(
        evidence=_evidence(fit, drawn, expected, seed),
        scored=scored,
        draws=drawn,
        expected=expected,
        local_only={} if local_only is None else _local_means(fit, local_only, seed),
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


def _evidence(
    fit: Snapshot, drawn: Draws | None, expected: Mapping[str, Tensor] | None, seed: int
) -> Evidence:
    """Measure what the checks of the fit rest on, at draws that are held already."""
    latents = [site.name for site in fit.program.latents.sites]
    sites = {} if drawn is None else {**drawn.shared, **drawn.own}
    not_finite = tuple(n for n, v in sites.items() if not bool(v.isfinite().all()))
    points = [n for n in latents if n in sites and bool((sites[n] == sites[n][:1]).all())]
    learned = [spec.name for spec in learned_params(fit)]
    run = NOT_FINITE if not_finite else run_of(fit, seed)
    return Evidence(
        fit=fit,
        run=run,
        points=None if drawn is None else (*points, *learned),
        spread=len(points) < len(latents),
        not_finite=not_finite,
        information=information(fit, drawn, expected) if drawn and expected else None,
        k_hats=k_hats_of(fit, run, seed),
    )


def _local_means(fit: Snapshot, local_only: Snapshot, seed: int) -> dict[str, Tensor]:
    """Return the posterior means of the local sites in a local-only fit, site -> (N, *shape)."""
    expect_fit(local_only, "local_only")
    place = local_only.federation.data.index(fit.clients)
    found = {
        name: value.mean(0)[place]
        for name, value in posterior_draws(local_only, draws=200, seed=seed).own.items()
    }
    known = {site.name for site in fit.program.latents.local_block.sites} | set(fit.program.derived)
    if not known & set(found):
        raise ValueError(
            f"the local-only fit has the local sites {sorted(found)}, this fit has "
            f"{sorted(known)}: at least one must be in both"
        )
    return found
