"""What is measured of a fit before anything is written about it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.diagnostics import (
    Convergence,
    Corrected,
    OutOfDistribution,
    client_rates,
    client_scores,
    convergence,
    corrected,
    out_of_distribution,
)
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.new_clients import expected_of_clients
from hierfl.posterior.prediction import Prediction, predict, predict_at
from hierfl.posterior.rows import replicate, sampled
from hierfl.posterior.snapshot import Snapshot, restricted

Floats = NDArray[np.float64]
NUMBERS = 20_000_000  # numbers of draws that are held at once: 160 MB
LEAST_DRAWS = 50  # draws: with fewer, nothing is said of the posterior


@dataclass(frozen=True, eq=False)
class Entry:
    """One number of a site, for every client or for all: draws (S, N) or (S,), and what the global level expects of clients."""

    label: str
    draws: Floats
    expected: Floats | None = None
    alone: Floats | None = None

    @property
    def middle(self) -> float:
        """The middle of what is expected of a client, or of the clients' means."""
        return (
            float(np.median(self.expected))
            if self.expected is not None
            else float(self.draws.mean())
        )

    @property
    def apart(self) -> float:
        """How far clients differ, beside how well each is known: variance of means over mean variance."""
        return float(self.draws.mean(0).var() / max(float(self.draws.var(0).mean()), 1e-300))


@dataclass(frozen=True, eq=False)
class Measured:
    """All that the page says is said of this.

    Args:
        fit: that is reported.
        draws: of its posterior; None: it is too large to be held (see `size`).
        expected: of clients by the global level alone, site -> (S, N, *shape); None: there are no own sites, too many, or their
            prior cannot be drawn from.
        alone: site -> (N, *shape) local-only estimates.
        prediction: of the rows that are scored; None: none could be.
        replicates: (S, n) labels of the same rows; None: of classes, or of a distribution that cannot be drawn from.
        held_out: whether the rows that are scored were kept from the fit.
        foreign: own rows beside foreign ones.
        weighed: the guide's draws weighed by the posterior; or why they cannot be.
        run: whether the run has arrived; or why that cannot be told.
    """

    fit: Snapshot
    draws: Draws | None
    expected: Mapping[str, Tensor] | None
    alone: Mapping[str, Tensor]
    prediction: Prediction | None
    replicates: Tensor | None
    held_out: bool
    foreign: OutOfDistribution | None
    weighed: Corrected | str
    run: Convergence | str

    @cached_property
    def shared(self) -> list[Entry]:
        """Every number of the global sites."""
        sites = {} if self.draws is None else self.draws.shared
        return [
            Entry(label, v)
            for name, value in sites.items()
            for label, v in self._columns(name, value, 1)
        ]

    @cached_property
    def own(self) -> list[Entry]:
        """Every number of the clients' own sites; an offset is left out where the site that is made of it is there."""
        if self.draws is None:
            return []
        found = []
        for name, value in self.draws.own.items():
            if name.removesuffix("_offset") in self.draws.own and name.endswith("_offset"):
                continue
            expected = (
                None
                if self.expected is None
                else [v for _, v in self._columns(name, self.expected[name], 2)]
            )
            alone = self.alone.get(name)
            lone = (
                None
                if alone is None or alone.shape != value.shape[1:]
                else [v[0] for _, v in self._columns(name, alone[None], 2)]
            )
            for j, (label, v) in enumerate(self._columns(name, value, 2)):
                found.append(
                    Entry(
                        label,
                        v,
                        None if expected is None else expected[j],
                        None if lone is None else lone[j],
                    )
                )
        return found

    @property
    def alike(self) -> bool:
        """Whether the global level expects the same of every client: the model reads no field of clients."""
        return not self.fit.program.reads.model & set(self.fit.federation.data.client_fields)

    @cached_property
    def told(self) -> pd.DataFrame | None:
        """By client, what its own rows add to what the global level expects of it; None where nothing is expected.

        `nats`: KL(posterior || expected), both taken for independent Normals, less what the number of draws alone makes of it: about 0
        where the posterior is what would be said of any client. `narrower`: 1 - Var posterior / Var expected, a mean over its numbers.
        """
        entries = [
            e for e in self.own if e.expected is not None and float(e.expected.var(0).min()) > 0.0
        ]
        if not entries:
            return None
        over, draws = None if self.alike else 0, len(entries[0].draws)
        nats, ratios = np.zeros(len(self.fit.clients)), []
        for e in entries:
            assert e.expected is not None
            middle, wide = e.expected.mean(over), e.expected.var(over)
            ratio = np.maximum(e.draws.var(0) / wide, 1e-12)
            nats += 0.5 * (ratio - 1.0 - np.log(ratio) + (e.draws.mean(0) - middle) ** 2 / wide)
            ratios.append(ratio)
        nats -= (
            len(entries) / draws * (1.0 if self.alike else 2.0)
        )  # second moments of means and variances of so many draws
        columns = {
            "nats": np.maximum(nats, 0.0),
            "narrower": np.clip(1.0 - np.mean(ratios, axis=0), 0.0, 1.0),
        }
        return pd.DataFrame(columns, index=pd.Index(self.fit.clients, name="client"))

    @cached_property
    def scores(self) -> pd.DataFrame | None:
        """Of each client."""
        if self.prediction is None:
            return None
        numeric = self.prediction.kind == "numeric"
        return client_scores(self.prediction, replicates=self.replicates if numeric else None)

    @cached_property
    def rates(self) -> pd.DataFrame | None:
        """Each client's mean label beside its 90 % predictive interval."""
        if (
            self.prediction is None
            or self.replicates is None
            or self.prediction.kind == "categorical"
        ):
            return None
        return client_rates(self.prediction, self.replicates, prob=0.9)

    def _columns(self, name: str, value: Tensor, lead: int) -> list[tuple[str, Floats]]:
        """Labels and draws of each number of a site: value (S, *shape) or (S, N, *shape), of which `lead` dimensions stay."""
        array = value.double().numpy()
        shape = array.shape[lead:]
        if not shape:
            return [(name, array)]
        names = [self._labels(size) for size in shape]
        return [
            (
                f"{name}[{', '.join(n[i] for n, i in zip(names, at, strict=True))}]",
                array[(..., *at)],
            )
            for at in np.ndindex(*shape)
        ]

    def _labels(self, size: int) -> list[str]:
        features = [
            list(labels)
            for labels in self.fit.federation.data.features.values()
            if len(labels) == size
        ]
        return features[0] if len(features) == 1 else [str(i) for i in range(size)]


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
    """Draw, predict and compare.

    Raises:
        KeyError, ValueError: as `Fit.predict`: rows of clients that were not fitted, a field missing, several observed sites.
    """
    latents, clients = fit.program.latents, fit.federation.data.num_clients
    size = latents.global_block.size + clients * latents.local_block.size
    few = min(draws, NUMBERS // max(size, 1))
    drawn = posterior_draws(fit, draws=few, seed=seed) if few >= LEAST_DRAWS else None
    expected = _expected(fit, few, seed) if drawn is not None and drawn.own else None
    prediction, replicates = None, None
    rows = fit.federation.data if held_out is None else held_out

    def predicted(rows: ClientData) -> Prediction:
        if drawn is None or not size:
            return predict(fit, rows, site=site, draws=draws, seed=seed)
        few = restricted(fit, rows)
        name = fit.program.observed_site(site)
        return predict_at(few, _of(drawn, few, fit), rows, site=name)

    if fit.program.sites_of_rows:
        prediction = predicted(rows)
        if prediction.label is None and held_out is not None:
            raise ValueError(
                f"the held-out rows have no labels for site '{prediction.site}': nothing to score"
            )
        if prediction.label is not None and prediction.kind != "categorical":
            if drawn is None or not size:
                replicates = replicate(fit, rows, site=site, draws=draws, seed=seed)
            else:
                few_clients = restricted(fit, rows)
                replicates = sampled(few_clients, _of(drawn, few_clients, fit), rows, seed)[
                    prediction.site
                ]
    strange = None
    if foreign is not None and prediction is not None:
        strange = out_of_distribution(prediction, predicted(foreign))
    lone = {} if alone is None else _alone(fit, alone, seed)
    prediction = None if prediction is None or prediction.label is None else prediction
    weighed = (
        _weigh(fit, draws, seed)
        if drawn is not None and size
        else "there is nothing to draw, or too much to be held"
    )
    return Measured(
        fit,
        drawn,
        expected,
        lone,
        prediction,
        replicates,
        held_out is not None,
        strange,
        weighed,
        _judge(fit, seed),
    )


def _of(draws: Draws, few: Snapshot, fit: Snapshot) -> Draws:
    """Draws of some of a fit's clients."""
    ids = fit.federation.data.index(few.clients)
    return Draws(draws.shared, {name: value[:, ids] for name, value in draws.own.items()})


def _expected(fit: Snapshot, draws: int, seed: int) -> Mapping[str, Tensor] | None:
    try:
        return expected_of_clients(fit, draws=draws, seed=seed)
    except NotImplementedError:
        return None  # a prior that is a penalty, FedMAP's, is no distribution to draw from


def _weigh(fit: Snapshot, draws: int, seed: int) -> Corrected | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the page warns in its own words
        try:
            return corrected(fit, draws, proposals=max(draws, 200), inner=4, rounds=1, seed=seed)
        except ValueError as error:
            return str(error)


def _judge(fit: Snapshot, seed: int) -> Convergence | str:
    try:
        return convergence(fit, draws=16, seed=seed)
    except ValueError as error:
        return str(error)


def _alone(fit: Snapshot, alone: Snapshot, seed: int) -> dict[str, Tensor]:
    """Means of the clients' own sites in a fit that borrows nothing.

    Raises:
        KeyError: it lacks one of the clients.
        ValueError: it has none of the sites.
    """
    place = alone.federation.data.index(fit.clients)
    found = {
        name: value.mean(0)[place]
        for name, value in posterior_draws(alone, draws=200, seed=seed).own.items()
    }
    known = {site.name for site in fit.program.latents.local_block.sites} | set(fit.program.derived)
    if not known & set(found):
        raise ValueError(
            f"the local-only fit has the own sites {sorted(found)}, this one {sorted(known)}: none is the same"
        )
    return found
