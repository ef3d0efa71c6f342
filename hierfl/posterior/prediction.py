"""What a posterior says of rows: probabilities or means, averaged over draws, and how they score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.clients import ClientData


@dataclass(frozen=True, eq=False)
class Prediction:
    """The posterior predictive distribution of every row of some clients, flat, client after client as in `data`.

    Args:
        data: the rows, labelled or not.
        site: the observed site that is predicted.
        label: (n,) what it observes, or None where labels are unknown.
        mean: (n,) E[y | x]: the probability of 1 for a Bernoulli site; (n, K) probabilities for a categorical one.
        sd: (n,) standard deviation of y, over draws and of the likelihood; None for a categorical one.
        log_score: (n,) log of the mean density of the true label, in nats (higher is better); None where labels are unknown.
        noise: (n,) entropy of y once a draw is given, in nats, a mean over draws: what no posterior could know better; None for a
            numeric site.
        kind: "binary", "categorical" or "numeric".
    """

    data: ClientData
    site: str
    label: Tensor | None
    mean: Tensor
    sd: Tensor | None
    log_score: Tensor | None
    noise: Tensor | None
    kind: str

    def scores(self) -> pd.DataFrame:
        """One row a client: rows, mean log score, and accuracy and Brier score, or root mean squared error.

        The Brier score is the mean of sum_c (p_c - 1[y = c])^2 / 2 over the classes: (p - y)^2 for two.

        Raises:
            ValueError: the rows have no labels.
        """
        label, log_score = self.known()
        row = {"log_score": log_score, **self._losses(label)}
        frame = pd.DataFrame({name: v.double().numpy() for name, v in row.items()})
        client = np.asarray(self.data.names)[self.data.row_client.numpy()]
        table = frame.groupby(client, sort=False).mean()
        if "rmse" in table:
            table["rmse"] = np.sqrt(table["rmse"])
        table.insert(0, "rows", self.data.counts.numpy())
        table.index.name = "client"
        return table

    def known(self) -> tuple[Tensor, Tensor]:
        """(n,) the labels, and (n,) their log scores.

        Raises:
            ValueError: the rows have none.
        """
        if self.label is None or self.log_score is None:
            raise ValueError(f"the rows have no labels for site '{self.site}': nothing to score")
        return self.label, self.log_score

    def _losses(self, y: Tensor) -> dict[str, Tensor]:
        if self.kind == "binary":
            return {
                "accuracy": ((self.mean > 0.5) == (y > 0.5)).double(),
                "brier": (self.mean - y).square(),
            }
        if self.kind == "categorical":
            hot = torch.nn.functional.one_hot(y.long(), self.mean.shape[-1])
            return {
                "accuracy": (self.mean.argmax(-1) == y).double(),
                "brier": (self.mean - hot).square().sum(-1) / 2,
            }
        return {"rmse": (self.mean - y).square()}


def kind_of(fn: Any) -> str:
    """What an observed site's distribution is of."""
    if fn.event_shape:
        return "other"
    base = getattr(fn, "base_dist", fn)
    if isinstance(base, dist.Bernoulli):
        return "binary"
    return "categorical" if isinstance(base, dist.Categorical) else "numeric"


def moments(fn: Any, label: Tensor | None) -> Tree:
    """What is averaged over draws: mean and square of y (or class probabilities), entropy, log density of the label; and the label."""
    base = getattr(fn, "base_dist", fn)
    probabilities = isinstance(base, dist.Categorical)
    out = {"mean": fn.probs if probabilities else fn.mean}
    if kind_of(fn) in ("binary", "categorical"):
        p = out["mean"]
        each = torch.special.entr(p)
        out["noise"] = each.sum(-1) if probabilities else each + torch.special.entr(1.0 - p)
    if not probabilities:
        out["square"] = fn.variance + fn.mean**2
    if label is not None:
        out["log_prob"], out["label"] = fn.log_prob(label), label
    return out


def averaged(name: str, value: Tensor) -> Tensor:
    """Over draws: (C, S, 1, B, ...) -> (C, B, ...), a mean, or of log densities the log of the mean density."""
    value = value.squeeze(2)
    if name == "label":
        return value[:, 0]
    return value.logsumexp(1) - math.log(value.shape[1]) if name == "log_prob" else value.mean(1)


def gathered(rows: ClientData, site: str, parts: Sequence[Tree], kind: str) -> Prediction:
    """The averages of chunks of clients, as the prediction of all rows."""
    flat = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    sd = (flat["square"] - flat["mean"] ** 2).clamp(min=0.0).sqrt() if "square" in flat else None
    return Prediction(
        rows,
        site,
        flat.get("label"),
        flat["mean"],
        sd,
        flat.get("log_prob"),
        flat.get("noise"),
        kind,
    )
