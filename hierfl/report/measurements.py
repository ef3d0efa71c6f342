"""Everything that is measured on a fit before the report is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from hierfl.diagnostics import (
    Convergence,
    Corrected,
    OutOfDistribution,
    client_rates,
    client_scores,
)
from hierfl.posterior.draws import Draws
from hierfl.posterior.prediction import Prediction
from hierfl.posterior.snapshot import Snapshot

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Entry:
    """One scalar of a site.

    Args:
        label: name of the site, with the index of the scalar.
        draws: posterior draws, (S, N) of a local site or (S,) of a global one.
        expected: (S, N) draws of the global prior, what the global level alone predicts for each client;
            None: unknown.
        alone: (N,) local-only estimates; None: not given.
    """

    label: str
    draws: Floats
    expected: Floats | None = None
    alone: Floats | None = None

    @property
    def middle(self) -> float:
        """Median of the global prior or, without one, mean of the clients' means."""
        return (
            float(np.median(self.expected))
            if self.expected is not None
            else float(self.draws.mean())
        )

    @property
    def apart(self) -> float:
        """How far clients differ, relative to their uncertainty: variance of means / mean variance."""
        return float(self.draws.mean(0).var() / max(float(self.draws.var(0).mean()), 1e-300))


@dataclass(frozen=True, eq=False)
class Measured:
    """Everything that the report is based on.

    Args:
        fit: the fit that is reported.
        draws: posterior draws; None: fewer than 50 were requested or can be held (see
            `hierfl.report.measure.NUMBERS`).
        expected: draws of the global prior, site -> (S, N, *shape); None: there are no draws, no local sites,
            or the clients' prior cannot be drawn from.
        alone: local-only estimates, site -> (N, *shape).
        prediction: predictions of the scored rows; None: no row can be scored.
        replicates: (S, n) draws of the labels of the same rows; None: the labels are classes, or there are no
            predictions.
        held_out: whether the scored rows were held out of the fit.
        foreign: comparison of own and foreign rows; None: no foreign rows.
        weighed: importance weights of the guide's draws; or the reason why there are none.
        run: verdict on convergence; or the reason why there is none.
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
        """Every scalar of the global sites."""
        sites = {} if self.draws is None else self.draws.shared
        return [
            Entry(label, v)
            for name, value in sites.items()
            for label, v in self._columns(name, value, 1)
        ]

    @cached_property
    def own(self) -> list[Entry]:
        """Every scalar of the local sites, without a site `x_offset` from which the site `x` is made."""
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
        """Whether the global prior is the same for every client: the model reads no field of clients."""
        return not self.fit.program.reads.model & set(self.fit.federation.data.client_fields)

    @cached_property
    def told(self) -> pd.DataFrame | None:
        """Information that each client's own rows add to the global prior, a row per client; None without it.

        `nats`: KL(posterior || global prior), both approximated by independent Normals, minus what sampling
        error alone contributes; about 0 if the posterior equals the global prior. `narrower`: 1 - Var
        posterior / Var global prior, mean over the client's scalars.
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
        # sampling error of means and variances of S draws adds about 1 / S per scalar for the posterior,
        # and as much again for the global prior unless its draws are pooled over clients
        nats -= len(entries) / draws * (1.0 if self.alike else 2.0)
        columns = {
            "nats": np.maximum(nats, 0.0),
            "narrower": np.clip(1.0 - np.mean(ratios, axis=0), 0.0, 1.0),
        }
        return pd.DataFrame(columns, index=pd.Index(self.fit.clients, name="client"))

    @cached_property
    def scores(self) -> pd.DataFrame | None:
        """Scores of each client; None without predictions."""
        if self.prediction is None:
            return None
        numeric = self.prediction.kind == "numeric"
        return client_scores(self.prediction, replicates=self.replicates if numeric else None)

    @cached_property
    def rates(self) -> pd.DataFrame | None:
        """Mean label and 90 % predictive interval of each client; None without replicates and for classes."""
        if (
            self.prediction is None
            or self.replicates is None
            or self.prediction.kind == "categorical"
        ):
            return None
        return client_rates(self.prediction, self.replicates, prob=0.9)

    def _columns(self, name: str, value: Tensor, lead: int) -> list[tuple[str, Floats]]:
        """Return the label and the draws of each scalar of a site.

        Args:
            name: of the site.
            value: (S, *shape) or (S, N, *shape).
            lead: number of leading dimensions to keep, 1 or 2.
        """
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
        """Return `size` labels: the feature names of the only field with that many, or else 0, 1, ..."""
        features = [
            list(labels)
            for labels in self.fit.federation.data.features.values()
            if len(labels) == size
        ]
        return features[0] if len(features) == 1 else [str(i) for i in range(size)]
