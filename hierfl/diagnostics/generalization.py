"""Generalization gaps, to held-out rows and to new clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
import torch
from numpy.typing import ArrayLike

from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.diagnostics.client_scores import HIGHER_IS_BETTER, across_clients
from hierfl.diagnostics.pac_bayes import PacBayes
from hierfl.engine.aggregate import means_of, summed
from hierfl.method import LogShare
from hierfl.posterior.prediction import Prediction, expect_prediction


def _shown(found: Gap) -> Shown:
    words = f"{len(found.clients)} clients; each one's gaps are in .clients, a row a client."
    return Shown("Generalization gaps: positive is worse", found.scores, words)


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class Gap:
    """How much worse held-out rows and new clients are predicted; positive means worse.

    Args:
        scores: one row a score, each a mean over clients weighted by rows. Columns `train`,
            `held_out` and `out_of_sample`, the loss from the first to the second; with new clients
            also `new_clients` and `participation`, the loss from participating clients to new ones
            (Yuan, Morningstar, Ning and Singhal 2022; FedVI, Fig. 5).
        clients: one row a fitted client: each score on its training rows minus that on its held-out
            rows.
        pac_bayes: the terms of the bound, if they were given.
    """

    scores: pd.DataFrame
    clients: pd.DataFrame
    pac_bayes: PacBayes | None = None


@one_at_a_time
def generalization_gap(
    train: Prediction,
    held_out: Prediction,
    *,
    new_clients: Prediction | None = None,
    terms: PacBayes | None = None,
) -> Gap:
    """Compare predictions of training rows, held-out rows and new clients.

    Args:
        train: of labeled training rows.
        held_out: of other labeled rows of the same clients.
        new_clients: of labeled rows of other clients.
        terms: from `hierfl.diagnostics.pac_bayes`, kept in the result.

    Raises:
        TypeError: an argument is no prediction.
        ValueError: rows have no labels, or the predictions are of different kinds.
        KeyError: a client has held-out rows but no training rows.
    """
    asked = {"train": train, "held_out": held_out} | (
        {} if new_clients is None else {"new_clients": new_clients}
    )
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
    return Gap(scores, (own - tables["held_out"][names]) * sign, terms)


def effective_clients(log_weights: ArrayLike) -> float:
    """Return the effective number of clients, (sum omega)^2 / sum omega^2, from 1 to N (FedMAP).

    Methods that weight clients by likelihoods log it in each round, as `effective_clients` in the
    history.

    Args:
        log_weights: (N,) log omega; the weights need not sum to 1.

    Raises:
        ValueError: there are no weights, or one is NaN or infinite.

    >>> effective_clients([0.0, 0.0, -1e6])
    2.0
    """
    logs = torch.as_tensor(log_weights, dtype=torch.float64)
    if (
        logs.dim() != 1
        or not len(logs)
        or bool(logs.isnan().any())
        or float(logs.max()) == math.inf
    ):
        raise ValueError(
            f"log weights have shape {tuple(logs.shape)}: "
            f"it must be (N,), N > 0, with none NaN or infinite"
        )
    found = means_of({"omega": summed(LogShare({}, logs))})
    return round(float(found["effective_omega"]), 12)
