"""What is lost between rows that were fitted, rows that were not, and clients that were not; and how many clients count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
import torch
from numpy.typing import ArrayLike

from hierfl.diagnostics.pac_bayes import PacBayes
from hierfl.diagnostics.scores import HIGHER_IS_BETTER, across_clients
from hierfl.engine.aggregate import means_of, summed
from hierfl.method import LogShare
from hierfl.posterior.prediction import Prediction


@dataclass(frozen=True, eq=False)
class Gap:
    """How much worse held-out rows, and clients never seen, are served; positive: worse.

    Args:
        scores: a row a score; columns `train`, `held_out`, `out_of_sample` (the loss from the one to the other), and with new clients
            `new_clients` and `participation`, the loss from the clients that took part to those that did not (Yuan, Morningstar,
            Ning and Singhal 2022; FedVI's Fig. 5 shows it). Every one a mean over clients weighted by rows.
        clients: a row a client that was fitted: each score on its training rows less that on its held-out ones.
        pac_bayes: the bound's terms, if they were given.
    """

    scores: pd.DataFrame
    clients: pd.DataFrame
    pac_bayes: PacBayes | None = None


def generalisation_gap(
    train: Prediction,
    held_out: Prediction,
    *,
    new_clients: Prediction | None = None,
    terms: PacBayes | None = None,
) -> Gap:
    """Compare predictions of rows that were fitted, of held-out rows of the same clients, and of clients never seen.

    Args:
        train: of training rows.
        held_out: of other rows of the same clients.
        new_clients: of labelled rows of others.
        terms: of `hierfl.diagnostics.pac_bayes(fit)`, to be kept beside them.

    Raises:
        ValueError: rows without labels, or predictions of different kinds.
        KeyError: a client with held-out rows that has no training rows.
    """
    asked = {"train": train, "held_out": held_out} | (
        {} if new_clients is None else {"new_clients": new_clients}
    )
    if len({p.kind for p in asked.values()}) != 1:
        raise ValueError(
            f"predictions are of different kinds: {', '.join(f'{n} {p.kind}' for n, p in asked.items())}"
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
    """How many clients weights omega stand for, (sum omega)^2 / sum omega^2, in 1..N (FedMAP): 1 where one has it all.

    A fit whose method weights by likelihoods logs it each round, as `effective_clients` of its history.

    Args:
        log_weights: (N,) log omega; weights need not sum to 1.

    Raises:
        ValueError: none, or one that is not a number.

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
            f"log weights have shape {tuple(logs.shape)}: (N,) numbers are needed, N > 0, none NaN or infinite"
        )
    found = means_of({"omega": summed(LogShare({}, logs))})
    return round(float(found["effective_omega"]), 12)
