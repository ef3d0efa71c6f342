"""Out-of-distribution detection by predictive entropies of own and foreign rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy  # which loads scipy.stats when it is used
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, special

from hierfl.core.tables import Shown, cell, printed
from hierfl.posterior.prediction import Prediction, expect_prediction

Floats = NDArray[np.float64]


def predictive_entropy(prediction: Prediction) -> Tensor:
    """Return H[E p] = -sum_c p_c log p_c, (n,), nats, with p averaged over draws.

    For a numeric site it is the entropy of a Normal with the predictive standard deviation.

    Raises:
        ValueError: the site has angles or vectors.
    """
    expect_prediction(prediction, "prediction")
    if prediction.kind in ("angle", "other"):
        raise ValueError(
            f"site '{prediction.site}' has angles or vectors, whose entropy is not that of a mean: "
            "use the log scores"
        )
    if prediction.kind == "numeric":
        assert prediction.sd is not None
        return prediction.sd.log() + 0.5 * math.log(2.0 * math.pi * math.e)
    p = prediction.mean
    if prediction.kind == "binary":
        return special.entr(p) + special.entr(1.0 - p)
    return special.entr(p).sum(-1)


def mutual_information(prediction: Prediction) -> Tensor:
    """Return H[E p] - E H[p], (n,), nats: the epistemic entropy (Houlsby et al. 2011).

    Raises:
        ValueError: the site is numeric.
    """
    expect_prediction(prediction, "prediction")
    if prediction.noise is None:
        raise ValueError(
            f"site '{prediction.site}' is numeric: "
            f"mutual information needs a binary or categorical site"
        )
    return (predictive_entropy(prediction) - prediction.noise).clamp(min=0.0)


def auroc(higher: ArrayLike, lower: ArrayLike) -> float:
    """Return the probability that a value of the first exceeds one of the second; ties count half.

    >>> auroc([1.0, 3.0], [0.0, 1.0])
    0.875
    """
    one, other = np.asarray(higher, dtype=float), np.asarray(lower, dtype=float)
    return float(
        scipy.stats.mannwhitneyu(one, other, method="asymptotic").statistic
        / (len(one) * len(other))
    )


def fpr95(foreign: ArrayLike, own: ArrayLike) -> float:
    """Return the share of foreign rows accepted where 95% of own rows are; lower is better.

    A row is accepted if its score is at most the threshold, the smallest one that accepts 95% of
    own rows (Liang, Li and Srikant 2018, with own rows as the positives).

    >>> fpr95([0.5, 2.0], [0.0, 1.0])
    0.5
    """
    threshold = np.quantile(np.asarray(own, dtype=float), 0.95, method="inverted_cdf")
    return float((np.asarray(foreign, dtype=float) <= threshold).mean())


@printed
@dataclass(frozen=True, eq=False)
class OutOfDistribution:
    """How well own rows are separated from foreign rows.

    Args:
        clients: one row per client: rows, foreign_rows, entropy and foreign_entropy (means, nats),
            auroc and fpr95 of the entropy, and where there are classes of the mutual information
            (mi_auroc, mi_fpr95).
        overall: the same for all rows together.
        entropies: of own rows and of foreign rows, nats, ordered by client.
    """

    clients: pd.DataFrame
    overall: pd.Series
    entropies: tuple[Floats, Floats]

    def __tables__(self) -> Shown:
        overall = ", ".join(f"{name} {cell(value)}" for name, value in self.overall.items())
        return Shown(
            "Own rows against foreign ones, by client",
            self.clients,
            f"All rows together: {overall}.",
        )


def out_of_distribution(own: Prediction, foreign: Prediction) -> OutOfDistribution:
    """Compare each client's predictions of own held-out rows and of foreign rows.

    Args:
        own: of the clients' own rows, held out from the fit.
        foreign: of rows from another distribution, under the same client names.

    Raises:
        KeyError: a client has foreign rows but no own rows.
        ValueError: the predictions are of different sites.
    """
    expect_prediction(own, "own")
    expect_prediction(foreign, "foreign")
    own, foreign = own.ordered(), foreign.ordered()
    if own.site != foreign.site:
        raise ValueError(
            f"own rows are predicted at site '{own.site}', foreign rows at '{foreign.site}': "
            f"it must be the same site"
        )
    own.data.index(foreign.data.names)
    measures = {"": predictive_entropy}
    if own.noise is not None and foreign.noise is not None:
        measures["mi_"] = mutual_information
    names = foreign.data.names
    of_client = {name: _by_client(of, own, foreign) for name, of in measures.items()}
    rows = {n: _row({m: (a[n], b[n]) for m, (a, b) in of_client.items()}) for n in names}
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis("client")
    every = {
        m: (np.concatenate([a[n] for n in names]), np.concatenate([b[n] for n in names]))
        for m, (a, b) in of_client.items()
    }
    counts = {"rows": int, "foreign_rows": int}
    return OutOfDistribution(frame.astype(counts), pd.Series(_row(every)), every[""])


def _row(values: dict[str, tuple[Floats, Floats]]) -> dict[str, float]:
    own, foreign = values[""]
    row: dict[str, float] = {"rows": len(own), "foreign_rows": len(foreign)}
    row |= {"entropy": float(own.mean()), "foreign_entropy": float(foreign.mean())}
    for name, (a, b) in values.items():
        row |= {f"{name}auroc": auroc(b, a), f"{name}fpr95": fpr95(b, a)}
    return row


def _by_client(of: Callable[..., Tensor], *predictions: Prediction) -> list[dict[str, Floats]]:
    return [
        dict(zip(p.data.names, np.split(of(p).double().numpy(), p.data.offsets[1:-1]), strict=True))
        for p in predictions
    ]


def entropy_density(values: ArrayLike, grid: ArrayLike, *, width: float = 0.05) -> Floats:
    """Estimate the density of entropies (n,), nats, on a grid (m,) (FedABML, Figs. 5 and 6).

    `width` is the standard deviation of the kernel, nats.
    """
    flat = np.asarray(values, dtype=float).ravel()
    both, at = np.concatenate([flat, -flat]), np.asarray(grid, dtype=float)
    # a client without a doubt: the kernel alone, which has no scale to set the width by
    if not both.any():
        found: Floats = 2.0 * scipy.stats.norm.pdf(at, scale=width)
        return found
    share = width / max(float(both.std(ddof=1)), 1e-9)
    found = 2.0 * scipy.stats.gaussian_kde(both, bw_method=share)(at)
    return found
