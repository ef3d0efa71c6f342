"""Everything that is measured on a fit before the report is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from torch import Tensor

from hierfl.diagnostics import client_scores
from hierfl.diagnostics.checks import Evidence
from hierfl.diagnostics.checks_of_predictions import Floats, Scored
from hierfl.diagnostics.information import named_own
from hierfl.posterior.draws import Draws
from hierfl.posterior.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class Entry:
    """One scalar of a site, with its label.

    `draws` are (S, N) of a local site or (S,) of a global one; `expected`, (S, N), what the global
    level alone predicts for each client, None if unknown; `local_only`, (N,), local-only estimates,
    None if not given.
    """

    label: str
    draws: Floats
    expected: Floats | None = None
    local_only: Floats | None = None

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
        """How far clients differ: variance of means / mean variance."""
        return float(self.draws.mean(0).var() / max(float(self.draws.var(0).mean()), 1e-300))


@dataclass(frozen=True, eq=False)
class Measured:
    """Everything that the report is based on.

    `draws` are None if fewer than 50 were requested or can be held; `expected`, site -> (S, N,
    *shape), draws of the global prior, None where it cannot be drawn from; `local_only`, site ->
    (N, *shape), local-only estimates.
    """

    evidence: Evidence
    scored: Scored
    draws: Draws | None
    expected: Mapping[str, Tensor] | None
    local_only: Mapping[str, Tensor]

    @property
    def fit(self) -> Snapshot:
        """The fit that is reported."""
        return self.evidence.fit

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
        """Every scalar of the local sites, without `x_offset` where `x` is made of it."""
        if self.draws is None:
            return []
        found = []
        for name in named_own(self.draws):
            columns = self._columns(name, self.draws.own[name], 2)
            prior: list[Floats | None] = [None] * len(columns)
            lone: list[Floats | None] = [None] * len(columns)
            if self.expected is not None:
                prior = [v for _, v in self._columns(name, self.expected[name], 2)]
            local_only = self.local_only.get(name)
            if local_only is not None and local_only.shape == self.draws.own[name].shape[1:]:
                lone = [v[0] for _, v in self._columns(name, local_only[None], 2)]
            found += [
                Entry(*column, p, a) for column, p, a in zip(columns, prior, lone, strict=True)
            ]
        return found

    @cached_property
    def scores(self) -> pd.DataFrame | None:
        """Scores of each client; None without predictions."""
        prediction = self.scored.prediction
        if prediction is None:
            return None
        numeric = prediction.kind == "numeric"
        return client_scores(prediction, replicates=self.scored.replicates if numeric else None)

    def _columns(self, name: str, value: Tensor, lead: int) -> list[tuple[str, Floats]]:
        """Return label and draws of each scalar of a site, keeping its first `lead` dimensions."""
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
        """Return `size` labels: feature names if exactly one field fits, else 0, 1, ..."""
        features = [
            list(labels)
            for labels in self.fit.federation.data.features.values()
            if len(labels) == size
        ]
        return features[0] if len(features) == 1 else [str(i) for i in range(size)]
