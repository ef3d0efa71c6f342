"""Take the measurements that a report is based on: draw, predict, compare."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from torch import Tensor

from hierfl.core.process import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.diagnostics import client_scores, out_of_distribution
from hierfl.diagnostics.calibration import Floats
from hierfl.diagnostics.checks import Evidence
from hierfl.diagnostics.checks_of_predictions import Scored
from hierfl.diagnostics.verdict import (
    LEAST_DRAWS,
    NUMBERS,
    evidence_of,
    expected_of,
    information,
    named_own,
)
from hierfl.formulas.formula import Formula
from hierfl.formulas.layout import GroupTerm
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.labels import replicate, sampled
from hierfl.posterior.prediction import Prediction, predict, predict_at
from hierfl.posterior.site_table import entries_of
from hierfl.posterior.snapshot import (
    Snapshot,
    expect_fit,
    global_sites,
    lacks_rows,
    learned_params,
    restricted,
)


@one_at_a_time
def measure(
    fit: Snapshot,
    *,
    held_out: ClientData | None,
    foreign: ClientData | None,
    local_only: Snapshot | None,
    site: str | None,
    draws: int,
    seed: int,
) -> "Measured":
    """Draw, predict and compare. The arguments are those of `Fit.report`."""
    latents, clients = fit.program.latents, fit.federation.data.num_clients
    size = latents.global_block.size + clients * latents.local_block.size
    affordable = min(draws, NUMBERS // max(size, 1))
    keep, drawn = global_sites(fit.program) if lacks_rows(fit) else None, None
    if affordable >= LEAST_DRAWS:
        drawn = posterior_draws(fit, draws=affordable, seed=seed, keep=keep)
    predictor = _Predictor(fit, drawn if size else None, site, draws, seed)
    rows = fit.federation.data if held_out is None else held_out
    has_rows = bool(fit.program.sites_of_rows) and not (
        rows is fit.federation.data and lacks_rows(fit)
    )
    prediction = predictor.predicted(rows) if has_rows else None
    if prediction is not None and prediction.label is None and held_out is not None:
        raise ValueError(
            f"the held-out rows have no labels for site '{prediction.site}': pass labeled rows, or omit held_out"
        )
    strange = None
    if foreign is not None and prediction is not None:
        strange = out_of_distribution(prediction, predictor.predicted(foreign))
    if prediction is not None and (prediction.label is None or not len(prediction.counted)):
        prediction = None
    replicates = None
    if prediction is not None:
        if prediction.kind != "categorical":
            replicates = prediction.of_counted(predictor.replicates(rows))
        prediction = prediction.by_client()
    scored = Scored(
        fit=fit,
        prediction=prediction,
        replicates=replicates,
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
class _Predictor:
    """Predictions of rows, at draws that are held already where there are any."""

    fit: Snapshot
    drawn: Draws | None
    site: str | None
    draws: int
    seed: int

    def predicted(self, rows: ClientData) -> Prediction:
        if self.drawn is None:
            return predict(self.fit, rows, site=self.site, draws=self.draws, seed=self.seed)
        name = self.fit.program.observed_site(self.site)
        return predict_at(*self._restricted(self.drawn, rows), rows, site=name)

    def replicates(self, rows: ClientData) -> Tensor:
        if self.drawn is None:
            return replicate(self.fit, rows, site=self.site, draws=self.draws, seed=self.seed)
        name = self.fit.program.observed_site(self.site)
        return sampled(*self._restricted(self.drawn, rows), rows, self.seed)[name]

    def _restricted(self, drawn: Draws, rows: ClientData) -> tuple[Snapshot, Draws]:
        fit = restricted(self.fit, rows)
        ids = self.fit.federation.data.index(fit.clients)
        return fit, Draws(drawn.shared, {n: value[:, ids] for n, value in drawn.own.items()})


def _evidence(
    fit: Snapshot, drawn: Draws | None, expected: Mapping[str, Tensor] | None, seed: int
) -> Evidence:
    """Measure what the checks of the fit rest on, at draws that are held already."""
    latents = [site.name for site in fit.program.latents.sites]
    sites = {} if drawn is None else {**drawn.shared, **drawn.own}
    not_finite = tuple(n for n, v in sites.items() if not bool(v.isfinite().all()))
    points = [n for n in latents if n in sites and bool((sites[n] == sites[n][:1]).all())]
    learned = [spec.name for spec in learned_params(fit)]
    rows_say = information(fit, drawn, expected) if drawn and expected else None
    at_points = None if drawn is None else (*points, *learned)
    spread = len(points) < len(latents)
    return evidence_of(fit, drawn, at_points, rows_say, spread=spread, bad=not_finite, seed=seed)


def _local_means(fit: Snapshot, local_only: Snapshot, seed: int) -> dict[str, Tensor]:
    """Return the posterior means of the local sites in a local-only fit, site -> (N, *shape)."""
    expect_fit(local_only, "local_only")
    place = local_only.federation.data.index(fit.clients)
    means = {
        name: value.mean(0)[place]
        for name, value in posterior_draws(local_only, draws=200, seed=seed).own.items()
    }
    local = {site.name for site in fit.program.latents.local_block.sites} | set(fit.program.derived)
    if not local & set(means):
        raise ValueError(
            f"the local-only fit has the local sites {sorted(means)}, this fit has "
            f"{sorted(local)}: at least one must be in both"
        )
    return means


@dataclass(frozen=True, eq=False)
class SiteEntry:
    """One scalar of a site: `draws` (S, N) or (S,), `expected` (S, N) of the global level, or None."""

    label: str
    draws: Floats
    expected: Floats | None = None
    local_only: Floats | None = None

    @property
    def middle(self) -> float:
        """Median of the global prior or, without one, mean of the clients' means."""
        whole = self.draws.mean() if self.expected is None else np.median(self.expected)
        return float(whole)

    @property
    def apart(self) -> float:
        """How far clients differ: variance of means / mean variance."""
        return float(self.draws.mean(0).var() / max(float(self.draws.var(0).mean()), 1e-300))


@dataclass(frozen=True, eq=False)
class Measured:
    """Everything that the report is based on; `draws` and `expected` may be None, (S, N, *shape) by site."""

    evidence: Evidence
    scored: Scored
    draws: Draws | None
    expected: Mapping[str, Tensor] | None
    local_only: Mapping[str, Tensor]

    @property
    def fit(self) -> Snapshot:
        """The fit that is reported."""
        return self.evidence.fit

    @property
    def _groups(self) -> tuple[GroupTerm, ...]:
        model = self.fit.method.model
        return model.layout.groups if isinstance(model, Formula) else ()

    @cached_property
    def shared(self) -> list[SiteEntry]:
        """Every scalar of the global sites; of a formula's correlations, each once."""
        sites = {} if self.draws is None else self.draws.shared
        factors, cors = ({getattr(t, of) for t in self._groups} for of in ("cholesky", "cor"))
        factors |= {f"z_{t.site}" for t in self._groups if t.group.kind}
        return [
            SiteEntry(label, v)
            for name, value in sites.items()
            if name not in factors
            for k, (label, v) in enumerate(self._columns(name, value, 1))
            if name not in cors or k // value.shape[1] < k % value.shape[1]
        ]

    @cached_property
    def own(self) -> list[SiteEntry]:
        """Every scalar that clients share of the local sites, without `x_offset` where there is `x`."""
        if self.draws is None:
            return []
        entries, inside = [], {term.site for term in self._groups if term.place == "within"}
        for name in named_own(self.draws):
            if name in inside:
                continue
            columns = self._columns(name, self.draws.own[name], 2)
            prior: list[Floats | None] = [None] * len(columns)
            lone: list[Floats | None] = [None] * len(columns)
            if self.expected is not None:
                prior = [v for _, v in self._columns(name, self.expected[name], 2)]
            local_only = self.local_only.get(name)
            if local_only is not None and local_only.shape == self.draws.own[name].shape[1:]:
                lone = [v[0] for _, v in self._columns(name, local_only[None], 2)]
            entries += [
                SiteEntry(*column, p, a) for column, p, a in zip(columns, prior, lone, strict=True)
            ]
        return entries

    @cached_property
    def scores(self) -> pd.DataFrame | None:
        """Scores of each client; None without predictions."""
        prediction = self.scored.prediction
        if prediction is None:
            return None
        numeric = prediction.kind in ("numeric", "angle", "other")
        return client_scores(prediction, replicates=self.scored.replicates if numeric else None)

    def _columns(self, name: str, value: Tensor, lead: int) -> list[tuple[str, Floats]]:
        """Return label and draws of each scalar of a site, keeping its first `lead` dimensions."""
        array = value.double().numpy()
        flat = array.reshape(*array.shape[:lead], -1)
        entries = entries_of(self.fit, name, array.shape[lead:])
        labels = [f"{name}[{entry}]" if entry else name for entry in entries]
        return [(label, flat[..., i]) for i, label in enumerate(labels)]
