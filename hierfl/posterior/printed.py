"""What is printed of draws, predictions and weights: tables of their sites and clients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hierfl.core.importance_sampling import K_HAT
from hierfl.core.tables import Shown

if TYPE_CHECKING:
    from hierfl.posterior.corrected import Corrected
    from hierfl.posterior.draws import Draws
    from hierfl.posterior.nuts import Reference
    from hierfl.posterior.prediction import Prediction

MOST_COLUMNS = 8  # classes, or numbers of an event


def draws(found: Draws) -> Shown:
    """Return the sites of draws with their shapes."""
    clients = next((f" of {value.shape[1]} clients" for value in found.own.values()), "")
    count = found.count if found.shared or found.own else 0
    return Shown(
        f"{count} draws{clients}",
        pd.DataFrame(_sites(found), columns=["site", "level", "shape"]),
        "fit.summary() shows means, sds and intervals; .shared[site] and .own[site] are the tensors.",
    )


def reference(found: Reference) -> Shown:
    """Return the sites of NUTS draws with their shapes and R-hat."""
    rows = [(*site, found.r_hat.get(site[0], math.nan)) for site in _sites(found)]
    count = next((len(v) for v in {**found.shared, **found.own}.values()), 0)
    return Shown(
        f"{count} draws of pooled NUTS, {found.seconds:.0f} s",
        pd.DataFrame(rows, columns=["site", "level", "shape", "r_hat"]),
        "fit.check(reference=...) compares a fit with them.",
    )


def _sites(found: Draws | Reference) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for name, value in found.shared.items():
        yield name, "global", tuple(value.shape[1:])
    for name, value in found.own.items():
        yield name, "local", tuple(value.shape[2:])


def corrected(found: Corrected) -> Shown:
    """Return k-hats, effective draws and the evidence."""
    values: dict[str, Any] = {
        "k-hat of the weights": found.k_hat,
        "k-hat of the guide": found.k_hat_guide,
        "effective draws": found.effective,
        "weighted draws": found.proposals,
        "rounds": found.rounds,
        "log evidence, nats": found.log_evidence,
    }
    worst = found.k_hat_clients.dropna()
    if len(worst):
        values[f"k-hat of client '{worst.idxmax()}', the worst"] = float(worst.max())
    bad = found.k_hat >= K_HAT
    return Shown(
        f"{found.draws.count} resampled draws",
        pd.DataFrame({"value": values}, dtype=object),
        f"The weights' k-hat is {'not ' if bad else ''}below {K_HAT}: "
        f"{'do not trust the draws' if bad else 'the draws can be trusted'}.",
    )


def prediction(found: Prediction) -> Shown:
    """Return the scores of each client; where rows have no labels, the mean prediction of each client's rows."""
    data = found.data
    title = f"Prediction of '{found.site}' ({found.kind}): {data.num_rows} rows of {len(data.names)} clients"
    if found.label is not None and found.log_score is not None:
        score = float(found.log_score.double().mean())
        words = f"Mean log score of a row: {score:.3f} nats; higher is better."
        return Shown(title, found.scores(), words)
    client = np.asarray(data.names)[data.row_client.numpy()]
    flat = found.mean.reshape(len(found.mean), -1).double().numpy()
    columns = ["mean"] if flat.shape[1] == 1 else [f"mean {i}" for i in range(flat.shape[1])]
    frame = pd.DataFrame(flat, columns=columns).groupby(client, sort=False).mean()
    frame = frame.iloc[:, :MOST_COLUMNS].rename_axis("client")
    frame.insert(0, "rows", data.counts.numpy())
    return Shown(title, frame, "The rows have no labels; means are those of each client's rows.")
