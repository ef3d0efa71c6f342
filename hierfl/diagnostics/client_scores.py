"""Scores of predictions by client beyond those of `Prediction.scores()`, and their spread."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core.arguments import shown
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.diagnostics.calibration import calibration_error, confidence, interval_coverage
from hierfl.posterior.prediction import Prediction, expect_prediction

HIGHER_IS_BETTER = {"log_score": True, "accuracy": True}
HIGHER_IS_BETTER |= {"brier": False, "rmse": False, "crps": False, "ece": False}


def client_scores(
    prediction: Prediction, *, replicates: Tensor | None = None, bins: int = 8, prob: float = 0.9
) -> pd.DataFrame:
    """Add calibration and sharpness to `Prediction.scores()`, one row per client.

    Binary and categorical sites get `ece` and `ece_by_chance` (see `calibration_error`; for
    classes, of the predicted class), and `sharpness`, the Brier score that these predictions would
    have if they were calibrated, the mean of sum_c p_c (1 - p_c) / 2. Numeric sites get
    `sharpness`, the mean predictive standard deviation, and with replicates `crps` and `coverage`;
    of rows of vectors these are means over entries, and angles have no `crps`.

    Args:
        prediction: of labeled rows.
        replicates: (S, n, ...) of the same rows, from `Fit.replicate`; used for numeric sites.
        bins: of the calibration error.
        prob: of the intervals that `coverage` is the share of labels in.

    Raises:
        ValueError: the rows have no labels, or `replicates` are of other rows.
    """
    expect_prediction(prediction, "prediction")
    if replicates is not None:
        replicates = prediction.of_counted(replicates)
    table, prediction = prediction.scores(), prediction.by_client()
    label = prediction.known()[0]
    if prediction.kind in ("numeric", "angle", "other"):
        assert prediction.sd is not None
        table["sharpness"] = _means(prediction, prediction.sd)
        if replicates is not None:
            if prediction.kind != "angle":  # whose distance is not a difference
                each = crps(replicates.flatten(1), label.flatten()).view(label.shape)
                table["crps"] = _means(prediction, each)
            covered = torch.from_numpy(interval_coverage(replicates, label, prob=prob))
            table["coverage"] = _means(prediction, covered)
        return table
    ends = prediction.data.offsets[1:-1].numpy()
    p, came_true = (np.split(values, ends) for values in confidence(prediction))
    errors = [calibration_error(*own, bins=bins) for own in zip(p, came_true, strict=True)]
    table["ece"], table["ece_by_chance"] = [e.ece for e in errors], [e.by_chance for e in errors]
    mean = prediction.mean
    spread = mean * (1.0 - mean)
    spread = spread if prediction.kind == "binary" else spread.sum(-1) / 2
    table["sharpness"] = _means(prediction, spread)
    return table


def crps(replicates: Tensor, label: Tensor) -> Tensor:
    """Return the continuous ranked probability score of an ensemble, (n,); lower is better.

        E|X - y| - E|X - X'| / 2

    The second mean is over pairs of distinct draws, which makes the score unbiased for few draws
    ("fair"; Ferro 2014).

    Args:
        replicates: (S, n), S > 1, from `Fit.replicate`; another shape is a ValueError.
        label: (n,).

    >>> crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0])).item()
    0.0
    """
    if replicates.dim() != 2 or len(replicates) < 2 or replicates.shape[1:] != label.shape:
        raise ValueError(
            f"replicates have shape {tuple(replicates.shape)}: it must be (S, {len(label)}), S > 1"
        )
    x, y = replicates.double().sort(0).values, label.double()
    draws = len(x)
    rank = 2.0 * torch.arange(draws, dtype=torch.float64)[:, None] - (draws - 1)
    apart = 2.0 * (rank * x).sum(0) / (draws * (draws - 1))
    return (x - y).abs().mean(0) - apart / 2.0


def across_clients(table: pd.DataFrame) -> pd.DataFrame:
    """Summarize the scores of clients, one row per score.

    Args:
        table: from `client_scores` or `Prediction.scores`.

    Returns:
        `weighted`, the mean over clients weighted by rows (for rmse, of its square); `mean`,
        unweighted; `variance` over clients, 0 where all are served equally well (q-FFL, Li et al. 2020);
        `worst_decile`, the mean over the worst tenth of the clients, at least one; `worst`, the
        name of the worst client.

    Raises:
        TypeError: it is not a frame.
        ValueError: the table has none of these scores.
    """
    if not isinstance(table, pd.DataFrame):
        raise TypeError(f"table is {shown(table)}: pass client_scores(prediction)")
    scores = [name for name in table.columns if name in HIGHER_IS_BETTER]
    if not scores:
        raise ValueError(f"the table has none of the scores {', '.join(HIGHER_IS_BETTER)}")
    return pd.DataFrame.from_dict({name: _summary(table, name) for name in scores}, orient="index")


def _summary(table: pd.DataFrame, name: str) -> dict[str, float | str]:
    values = table[name].to_numpy(dtype=float)
    order = np.argsort(values if HIGHER_IS_BETTER[name] else -values, kind="stable")
    worst = order[: max(1, len(values) // 10)]
    weights = table["rows"].to_numpy(dtype=float)
    power = 2 if name == "rmse" else 1
    return {
        "weighted": float(np.average(values**power, weights=weights) ** (1 / power)),
        "mean": float(values.mean()),
        "variance": float(values.var()),
        "worst_decile": float(values[worst].mean()),
        "worst": str(table.index[order[0]]),
    }


def _means(prediction: Prediction, values: Tensor) -> list[float]:
    return [float(v.double().mean()) for v in values.split(prediction.data.counts.tolist())]


@printed
@dataclass(frozen=True, eq=False)
class Gap:
    """How much worse held-out rows and new clients are predicted; positive means worse.

    Args:
        scores: one row per score, each a mean over clients weighted by rows. Columns `train`,
            `held_out` and `out_of_sample`, the loss from the first to the second; with new clients
            also `new_clients` and `participation`, the loss from participating clients to new ones
            (Yuan, Morningstar, Ning and Singhal 2022; FedVI, Fig. 5).
        clients: one row per fitted client: its scores on training rows minus those on held-out rows.
    """

    scores: pd.DataFrame
    clients: pd.DataFrame

    def __tables__(self) -> Shown:
        words = f"{len(self.clients)} clients; gaps by client are in .clients."
        return Shown("Generalization gaps: positive is worse", self.scores, words)


@one_at_a_time
def generalization_gap(
    train: Prediction, held_out: Prediction, *, new_clients: Prediction | None = None
) -> Gap:
    """Compare predictions of training rows, held-out rows and new clients.

    Args:
        train: of labeled training rows.
        held_out: of other labeled rows of the same clients.
        new_clients: of labeled rows of other clients.

    Raises:
        TypeError: an argument is not a prediction.
        ValueError: rows have no labels, or the predictions are of different kinds.
        KeyError: a client has held-out rows but no training rows.
    """
    asked = {"train": train, "held_out": held_out}
    if new_clients is not None:
        asked["new_clients"] = new_clients
    for name, value in asked.items():
        expect_prediction(value, name)
    if len({p.kind for p in asked.values()}) != 1:
        raise ValueError(
            "predictions are of different kinds: "
            f"{', '.join(f'{n} {p.kind}' for n, p in asked.items())}"
        )
    train.data.index(held_out.data.names)
    tables = {name: p.scores() for name, p in asked.items()}
    names = [name for name in tables["train"].columns if name in HIGHER_IS_BETTER]
    sign = pd.Series({name: 1.0 if HIGHER_IS_BETTER[name] else -1.0 for name in names})
    scores = pd.DataFrame(
        {name: across_clients(table)["weighted"].astype(float) for name, table in tables.items()}
    )
    scores.insert(2, "out_of_sample", sign * (scores["train"] - scores["held_out"]))
    if new_clients is not None:
        scores["participation"] = sign * (scores["held_out"] - scores["new_clients"])
    own = tables["train"].loc[tables["held_out"].index, names]
    return Gap(scores, (own - tables["held_out"][names]) * sign)
