"""How good predictions are: proper scores, calibration and sharpness of every client, and how even they are over clients.

The log and Brier scores are `Prediction.scores()`; here is what goes beside them. The CRPS is ours in three lines: properscoring,
which has it, has had no release since 2015, and torchmetrics and ArviZ 0.23 have none for ensembles.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.diagnostics.calibration import calibration_error, confidence, interval_coverage
from hierfl.posterior.prediction import Prediction

HIGHER_IS_BETTER = {
    "log_score": True,
    "accuracy": True,
    "brier": False,
    "rmse": False,
    "crps": False,
    "ece": False,
}


def client_scores(
    prediction: Prediction, *, replicates: Tensor | None = None, bins: int = 8, prob: float = 0.9
) -> pd.DataFrame:
    """`Prediction.scores()`, and beside it calibration and sharpness: a row a client.

    Labels 0/1 and classes: `ece` and what chance alone gives for so few rows, `ece_by_chance` (see `calibration_error`; of classes,
    the predicted one's probability counts); `sharpness`, the Brier score that these predictions would have were they calibrated,
    mean of sum_c p_c (1 - p_c) / 2. Numbers: `sharpness`, the mean predictive sd; and with replicates `crps` and `coverage`.

    Args:
        prediction: of labelled rows.
        replicates: (S, n) of the same rows, from `Fit.replicate`; needed for `crps` and `coverage`, of numbers alone.
        bins: of the calibration error.
        prob: of the intervals whose coverage is told.

    Raises:
        ValueError: the rows have no labels, or replicates are of other rows.
    """
    table, label = prediction.scores(), prediction.known()[0]
    if prediction.kind == "numeric":
        assert prediction.sd is not None
        table["sharpness"] = _means(prediction, prediction.sd)
        if replicates is not None:
            table["crps"] = _means(prediction, crps(replicates, label))
            table["coverage"] = _means(
                prediction, torch.from_numpy(interval_coverage(replicates, label, prob=prob))
            )
        return table
    p, came_true = confidence(prediction)
    found = [calibration_error(p[part], came_true[part], bins=bins) for part in _parts(prediction)]
    table["ece"], table["ece_by_chance"] = [e.ece for e in found], [e.by_chance for e in found]
    mean = prediction.mean
    spread = mean * (1.0 - mean)
    table["sharpness"] = _means(
        prediction, spread if prediction.kind == "binary" else spread.sum(-1) / 2
    )
    return table


def crps(replicates: Tensor, label: Tensor) -> Tensor:
    """Continuous ranked probability score (n,) of an ensemble; lower is better, in the label's unit.

        E|X - y| - E|X - X'| / 2

    The second mean is over pairs of different draws, so that the score of a few draws is unbiased ("fair"; Ferro 2014).

    Args:
        replicates: (S, n), S > 1, of `Fit.replicate`.
        label: (n,).

    Raises:
        ValueError: one replicate, or another number of rows.

    >>> crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0])).item()
    0.0
    """
    if replicates.dim() != 2 or len(replicates) < 2 or replicates.shape[1:] != label.shape:
        raise ValueError(
            f"replicates have shape {tuple(replicates.shape)}; (S, {len(label)}) are needed, S > 1"
        )
    x, y = replicates.double().sort(0).values, label.double()
    draws = len(x)
    rank = 2.0 * torch.arange(draws, dtype=torch.float64)[:, None] - (draws - 1)
    apart = 2.0 * (rank * x).sum(0) / (draws * (draws - 1))
    return (x - y).abs().mean(0) - apart / 2.0


def across_clients(table: pd.DataFrame) -> pd.DataFrame:
    """What scores of clients come to, and how fair they are: a row a score.

    Returns:
        `weighted`: mean over clients weighted by rows (that of all rows alike, but for rmse, whose square is averaged);
        `mean`: every client alike; `variance`: over clients (0: all are served alike; Li et al. 2020, q-FFL);
        `worst_decile`: mean over the worst tenth of the clients, one at least; `worst`: the name of the worst client.

    Args:
        table: of `client_scores` or `Prediction.scores`.

    Raises:
        ValueError: it has none of their columns.
    """
    scores = [name for name in table.columns if name in HIGHER_IS_BETTER]
    if not scores:
        raise ValueError(f"the table has none of the scores {', '.join(HIGHER_IS_BETTER)}")
    return pd.DataFrame.from_dict({name: _summary(table, name) for name in scores}, orient="index")


def _summary(table: pd.DataFrame, name: str) -> dict[str, float | str]:
    values = table[name].to_numpy(dtype=float)
    order = np.argsort(values if HIGHER_IS_BETTER[name] else -values, kind="stable")
    worst = order[: max(1, len(values) // 10)]
    weights = table["rows"].to_numpy(dtype=float)
    weighted = (
        np.average(values**2, weights=weights) ** 0.5
        if name == "rmse"
        else np.average(values, weights=weights)
    )
    return {
        "weighted": float(weighted),
        "mean": float(values.mean()),
        "variance": float(values.var()),
        "worst_decile": float(values[worst].mean()),
        "worst": str(table.index[order[0]]),
    }


def _parts(prediction: Prediction) -> Iterator[slice]:
    offsets = prediction.data.offsets.tolist()
    yield from (slice(a, b) for a, b in pairwise(offsets))


def _means(prediction: Prediction, values: Tensor) -> list[float]:
    return [float(values[part].double().mean()) for part in _parts(prediction)]
