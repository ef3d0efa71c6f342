"""Posterior predictive distributions of rows: probabilities or means averaged over draws, and their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.posterior.client_loop import Chunk, each_draw
from hierfl.posterior.draws import Draws, at_draws
from hierfl.posterior.snapshot import Snapshot, restricted
from hierfl.posterior.without_rows import by_state_alone
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values


@dataclass(frozen=True, eq=False)
class Prediction:
    """The posterior predictive distribution of every row of some clients, flat, client after client as in `data`.

    Args:
        data: the rows, labelled or not.
        site: the observed site that is predicted.
        label: (n,) the true labels; None where they are unknown.
        mean: (n,) E[y | x], the probability of 1 for a Bernoulli site; (n, classes) probabilities for a
            categorical one.
        sd: (n,) standard deviation of y, from the draws and the likelihood; None for a categorical site.
        log_score: (n,) log of the mean density of the true label, nats, higher is better; None where labels
            are unknown.
        noise: (n,) entropy of y given a draw, nats, averaged over draws: the aleatoric part; None for a
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
        """Score each client: its rows, mean log score, and accuracy and Brier score, or root mean squared error.

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
        """Return the labels (n,) and their log scores (n,).

        Raises:
            ValueError: the rows have no labels.
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
    """Return what a site observes: "binary", "categorical", "numeric", or "other" for events of several numbers."""
    if fn.event_shape:
        return "other"
    base = getattr(fn, "base_dist", fn)
    if isinstance(base, dist.Bernoulli):
        return "binary"
    return "categorical" if isinstance(base, dist.Categorical) else "numeric"


def moments(fn: Any, label: Tensor | None) -> Tree:
    """Return what is averaged over draws: moments of y or class probabilities, entropy, and the label's log density."""
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
    """Average over draws, (C, S, 1, B, ...) -> (C, B, ...); of log densities, return the log of the mean density."""
    value = value.squeeze(2)
    if name == "label":
        return value[:, 0]
    return value.logsumexp(1) - math.log(value.shape[1]) if name == "log_prob" else value.mean(1)


@one_at_a_time
def predict(
    fit: Snapshot,
    rows: ClientData,
    *,
    site: str | None = None,
    draws: int = 200,
    seed: int = 0,
) -> Prediction:
    """Predict each row by its own client's posterior; labels may be absent.

    Args:
        fit: a run at some round.
        rows: of clients that were fitted, matched by name.
        site: the observed site to predict; None: the model's only one.
        draws: S, of the posterior to average over; 1 is enough for point estimates.
        seed: of the draws.

    Raises:
        KeyError: a client that was not fitted, or a site that is not observed.
        ValueError: a field is missing or holds NaN; or the model observes several sites and `site` is None.
    """
    site, program = fit.program.observed_site(site), fit.program
    few = by_state_alone(restricted(fit, rows))

    def run(one: AtLatents) -> Iterator[Chunk]:
        def at_draw(params: Params, own: ClientBatch, asked: ClientBatch) -> Tree:
            return one(params, program.draw(params, own), asked)

        return each_draw(few, at_draw, draws=draws, seed=seed, rows=rows)

    return predicted(program, rows, site, run)


def predict_at(fit: Snapshot, draws: Draws, rows: ClientData, *, site: str) -> Prediction:
    """Predict rows at draws of every latent site that are given: the guide is not run.

    Args:
        fit: of the clients of the draws, and of no others.
        draws: S.
        rows: of the same clients in the same order.
        site: the observed site.
    """
    return predicted(fit.program, rows, site, lambda one: at_draws(fit, draws, one, rows=rows))


AtLatents = Callable[[Params, Values, ClientBatch], Tree]


def predicted(
    program: Program,
    rows: ClientData,
    site: str,
    run: Callable[[AtLatents], Iterable[Chunk]],
) -> Prediction:
    """Average what a site's distribution says of each row, over latent sites that `run` supplies.

    Args:
        program: the checked program.
        rows: to be predicted.
        site: the observed site.
        run: evaluates `(params, latent sites, rows) -> tree` for every client and draw.
    """
    known = program.labels[site] in rows.fields
    kinds: set[str] = set()

    def score(params: Params, values: Values, asked: ClientBatch) -> Tree:
        fn, value = program.observed(values, asked, params)[site]
        kinds.add(kind_of(fn))
        return moments(fn, value if known else None)

    flat: dict[str, list[Tensor]] = {}
    for chunk in run(score):
        for name, value in chunk.found.items():
            flat.setdefault(name, []).append(averaged(name, value)[chunk.asked.mask()])
    return _prediction(rows, site, {name: torch.cat(v) for name, v in flat.items()}, kinds.pop())


def _prediction(rows: ClientData, site: str, flat: Mapping[str, Tensor], kind: str) -> Prediction:
    sd = (flat["square"] - flat["mean"] ** 2).clamp(min=0.0).sqrt() if "square" in flat else None
    return Prediction(
        data=rows,
        site=site,
        label=flat.get("label"),
        mean=flat["mean"],
        sd=sd,
        log_score=flat.get("log_prob"),
        noise=flat.get("noise"),
        kind=kind,
    )
