"""Calibration of probabilities and intervals, beside what chance alone gives."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy  # which loads scipy.stats when it is used
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hierfl.posterior.prediction import Prediction, expect_prediction

Floats = NDArray[np.float64]


def equal_mass(
    p: ArrayLike, y: ArrayLike, *, bins: int = 8, prob: float = 0.9
) -> tuple[Floats, ...]:
    """Sort rows by predicted probability into bins of equal size; return each bin's share of ones.

    Args:
        p: (n,) probabilities.
        y: (n,) labels, 0 or 1; another number than of probabilities, or none, is a ValueError.
        bins: how many; fewer where a bin would have less than 2 rows.
        prob: of the interval of each share (Jeffreys').

    Returns:
        Mean probability, share of ones, and lower and upper end of its interval, each (bins,).

    >>> [v.round(2).tolist() for v in equal_mass([0.1, 0.3, 0.7, 0.9], [0, 0, 1, 1], bins=2)[:2]]
    [[0.2, 0.8], [0.0, 1.0]]
    """
    p, y = _matched(p, y)
    parts = _bins(p, bins)
    rows = np.array([len(part) for part in parts])
    ones = np.array([y[part].sum() for part in parts])
    tail, share = (1.0 - prob) / 2.0, ones / rows
    low = np.where(ones > 0, scipy.stats.beta.ppf(tail, ones + 0.5, rows - ones + 0.5), 0.0)
    high = np.where(
        ones < rows, scipy.stats.beta.ppf(1.0 - tail, ones + 0.5, rows - ones + 0.5), 1.0
    )
    # Jeffreys' interval may exclude an extreme share; an error bar may not
    return (
        np.array([p[part].mean() for part in parts]),
        share,
        np.minimum(low, share),
        np.maximum(high, share),
    )


@dataclass(frozen=True)
class CalibrationError:
    """Differences between observed shares and predictions, over equal-mass bins.

    Args:
        ece: expected calibration error, mean |share - prediction| (Naeini, Cooper and Hauskrecht
            2015, in bins of equal mass).
        reliability: mean (share - prediction)^2, the reliability term of the Brier score (Murphy
            1973).
        by_chance: the mean `ece` of labels drawn with exactly these probabilities; it is above 0,
            the more so for few rows.
        p_value: share of such draws whose `ece` is at least as large.
        rows: n.
    """

    ece: float
    reliability: float
    by_chance: float
    p_value: float
    rows: int


def calibration_error(
    p: ArrayLike, y: ArrayLike, *, bins: int = 8, draws: int = 999, seed: int = 0
) -> CalibrationError:
    """Measure the calibration error of probabilities, and how large it would be by chance alone.

    Args:
        p: (n,) probabilities of 1, or of the predicted class.
        y: (n,) 0 or 1: the label, or whether the predicted class is right.
        bins: as in `equal_mass`, as are its errors.
        draws: of labels under perfect calibration.
        seed: of those draws.

    >>> calibration_error([0.2, 0.2, 0.8, 0.8], [0, 0, 1, 1], bins=2).ece.__round__(3)
    0.2
    """
    p, y = _matched(p, y)
    parts = _bins(p, bins)
    order, sizes = np.concatenate(parts), np.array([len(part) for part in parts])
    starts, noise = np.cumsum(sizes) - sizes, np.random.Generator(np.random.Philox(seed))
    expected = np.add.reduceat(p[order], starts)

    def gaps(labels: NDArray[Any]) -> Floats:
        return (np.add.reduceat(labels, starts, axis=-1, dtype=float) - expected) / sizes

    own = gaps(y[order])
    blocks = np.array_split(np.arange(draws), -(-draws // max(1, 1_000_000 // len(p))))
    chance = [gaps(noise.random((len(block), len(p))) < p[order]) for block in blocks]
    weight = sizes / len(p)
    errors = np.abs(np.concatenate([own[None], *chance])) @ weight
    p_value = (1 + int((errors[1:] >= errors[0] - 1e-12).sum())) / (draws + 1)
    return CalibrationError(
        float(errors[0]), float(own**2 @ weight), float(errors[1:].mean()), p_value, len(p)
    )


def confidence(prediction: Prediction) -> tuple[Floats, Floats]:
    """Return probabilities (n,) of 1 or of the predicted class, and whether each came true (n,).

    They are of the rows whose labels count, client after client.

    Raises:
        ValueError: the rows have no labels, or the site is numeric (see `interval_coverage`).
    """
    expect_prediction(prediction, "prediction")
    prediction = prediction.by_client()
    label, _ = prediction.known()
    if prediction.kind == "binary":
        return prediction.mean.double().numpy(), (label > 0.5).double().numpy()
    if prediction.kind == "categorical":
        top, chosen = prediction.mean.max(-1)
        return top.double().numpy(), (chosen == label).double().numpy()
    raise ValueError(
        f"site '{prediction.site}' is numeric and has no class probabilities: "
        f"use interval_coverage, on replicates"
    )


def interval_coverage(replicates: Tensor, label: Tensor, *, prob: float = 0.9) -> NDArray[np.bool_]:
    """Return whether each label lies in the central interval of its replicates, (n,) or (n, ...).

    Args:
        replicates: (S, n) or, of vectors, (S, n, ...), from `Fit.replicate`.
        label: (n,) or (n, ...).
        prob: of the interval; for discrete labels it holds at least this much.
    """
    draws, y = replicates.double().numpy(), label.double().numpy()
    low, high = np.quantile(draws, [0.5 - prob / 2, 0.5 + prob / 2], axis=0, method="inverted_cdf")
    covered: NDArray[np.bool_] = (low <= y) & (y <= high)
    return covered


def client_rates(prediction: Prediction, replicates: Tensor, *, prob: float = 0.9) -> pd.DataFrame:
    """Compare each client's mean label or event rate with its predictive interval.

    All rows of a client share each draw of its parameters. The interval is therefore wider than
    that of as many independent rows, and right only if the posterior is.

    Args:
        prediction: of labeled rows, binary or numeric.
        replicates: (S, n) of the same rows, from `Fit.replicate`.
        prob: of the interval.

    Returns:
        One row per client: rows, observed, expected, low, high, covered.

    Raises:
        ValueError: the rows have no labels, labels are classes (which have no mean), or
            `replicates` are of other rows.
    """
    expect_prediction(prediction, "prediction")
    replicates, prediction = prediction.of_counted(replicates), prediction.by_client()
    label, _ = prediction.known()
    if prediction.kind == "categorical":
        raise ValueError(
            f"site '{prediction.site}' is categorical, and classes have no mean: "
            f"choose a binary or numeric site"
        )
    if replicates.dim() != 2 or replicates.shape[1] != len(label):
        raise ValueError(
            f"replicates have shape {tuple(replicates.shape)}: "
            f"it must be (S, {len(label)}), for the same rows"
        )
    data = prediction.data
    parts = data.counts.tolist()
    drawn = np.stack([v.double().mean(1).numpy() for v in replicates.split(parts, 1)], 1)
    observed = np.array([float(v.double().mean()) for v in label.split(parts)])
    low, high = np.quantile(drawn, [0.5 - prob / 2, 0.5 + prob / 2], axis=0, method="inverted_cdf")
    columns = {
        "rows": data.counts.numpy(),
        "observed": observed,
        "expected": drawn.mean(0),
        "low": low,
        "high": high,
    }
    table = pd.DataFrame(columns, index=pd.Index(data.names, name="client"))
    table["covered"] = (low - 1e-12 <= observed) & (observed <= high + 1e-12)
    return table


def coverage_p_value(covered: ArrayLike, prob: float) -> float:
    """Return the exact one-sided p-value of so few covered intervals of probability `prob`."""
    hits = np.asarray(covered, dtype=bool)
    return float(scipy.stats.binomtest(int(hits.sum()), len(hits), prob, alternative="less").pvalue)


def _bins(p: Floats, bins: int) -> list[NDArray[np.intp]]:
    return np.array_split(np.argsort(p, kind="stable"), max(1, min(bins, len(p) // 2)))


def _matched(p: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    one, other = np.asarray(p, dtype=float), np.asarray(y, dtype=float)
    if one.shape != other.shape or one.ndim != 1 or not len(one):
        raise ValueError(
            f"probabilities and labels have shapes {one.shape} and {other.shape}: "
            f"both must be (n,), n > 0"
        )
    return one, other
