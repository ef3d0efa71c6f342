"""Scores of predictions: of each client, and their means over rows and over clients."""

from typing import NamedTuple

import pandas as pd

from hierfl.data.clients import ClientData
from hierfl.posterior.prediction import Prediction

WEIGHTINGS = ("rows", "clients")


class Score(NamedTuple):
    """One number of a run.

    `score` is "P", "P+FT" (fine-tuned) or "G", `clients` "participating" or "new", after `adapted`
    rounds of `personalize`; `test` "local", "global" (rows of all clients) or the foreign images;
    `weighting` "rows" or "clients"; a mean over `rounds` last rounds. `metric`: accuracies,
    "explained" and calibration errors are in %, "log_score" in nats a row, "auroc" of entropies
    from 0 to 1, "distance" is that of a line's weights from least squares on all training rows, and
    "width" the sd of clients' weights over that of their exact posterior.
    """

    score: str
    clients: str
    adapted: int
    test: str
    weighting: str
    rounds: int
    metric: str
    value: float


def by_client(prediction: Prediction, variance: float = 1.0) -> pd.DataFrame:
    """Return each client's scores, a column a metric; `variance` is that of real labels."""
    scores = prediction.scores()
    scored = {"log_score": scores["log_score"]}
    if "rmse" in scores:
        scored["explained"] = 100.0 * (1.0 - scores["rmse"] ** 2 / variance)
    else:
        scored["accuracy"] = 100.0 * scores["accuracy"]
        scored["balanced_accuracy"] = 100.0 * balanced(prediction)
    return pd.DataFrame(scored)


def means(prediction: Prediction, variance: float = 1.0) -> dict[tuple[str, str], float]:
    """Return (weighting, metric) -> mean over rows or clients; `variance` as in `by_client`."""
    return means_of(by_client(prediction, variance), prediction.data)


def means_of(table: pd.DataFrame, rows: ClientData) -> dict[tuple[str, str], float]:
    """Return (weighting, metric) -> mean of the scores of `by_client` for clients of these rows."""
    counts = rows.counts.numpy()
    averages = {}
    for metric, value in table.items():
        averages["clients", str(metric)] = float(value.mean())
        averages["rows", str(metric)] = float((value * counts).sum() / counts.sum())
    return averages


def balanced(prediction: Prediction) -> pd.Series:
    """Return each client's balanced accuracy: the mean accuracy over the classes of its rows."""
    prediction = prediction.by_client()
    label = prediction.known()[0].long()
    binary = prediction.kind == "binary"
    chosen = (prediction.mean > 0.5).long() if binary else prediction.mean.argmax(-1)
    right = chosen == label
    frame = pd.DataFrame(
        {"client": prediction.data.row_client, "label": label, "right": right.double()}
    )
    by_client = frame.groupby(["client", "label"])["right"].mean().groupby("client").mean()
    return by_client.set_axis([prediction.data.names[k] for k in by_client.index])
