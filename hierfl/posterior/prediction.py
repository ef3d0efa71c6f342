"""Posterior predictive distributions of rows, averaged over draws, and their scores."""

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

from hierfl.core.arguments import expect_count, shown
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.posterior.client_loop import MOST_NUMBERS, Chunk, each_draw
from hierfl.posterior.draws import Draws, at_draws, mapped_or_in_turn
from hierfl.posterior.snapshot import Snapshot, by_state_alone, restricted
from hierfl.program.check_data import kind_of as kind_of_distribution
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values

MOST_COLUMNS = 8  # classes, or scalars of an event, that are printed


def _shown(found: Prediction) -> Shown:
    data = found.data
    size = f"{data.num_rows} rows of {len(data.names)} clients"
    title = f"Prediction of '{found.site}' ({found.kind}): {size}"
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


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class Prediction:
    """The posterior predictive distribution of every row, client after client as in `data`.

    Args:
        data: the rows, labeled or not.
        site: the observed site that is predicted.
        label: (n,) the true labels; None where they are unknown.
        mean: (n,) E[y | x], the probability of 1 for a Bernoulli site; (n, classes) probabilities
            for a categorical one.
        sd: (n,) standard deviation of y, from the draws and the likelihood; None for a categorical
            site.
        log_score: (n,) log of the mean density of the true label, nats, higher is better; None
            where labels are unknown.
        noise: (n,) entropy of y given a draw, nats, averaged over draws: the aleatoric part; None
            for a numeric site.
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
        """Score each client: log score, and accuracy and Brier score or root mean squared error.

        The Brier score is the mean of sum_c (p_c - 1[y = c])^2 / 2 over the classes: (p - y)^2 for
        two.

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
        squares = (self.mean - y).square()
        return {"rmse": squares.flatten(1).mean(1) if squares.dim() > 1 else squares}


def expect_prediction(value: Any, what: str) -> None:
    """Refuse what is no prediction, where one is expected as the argument `what`."""
    if not isinstance(value, Prediction):
        raise TypeError(f"{what} is {shown(value)}, not a Prediction: hand over fit.predict(rows)")


def kind_of(fn: Any) -> str:
    """Return "binary", "categorical", "numeric", or "other" for vectors."""
    if fn.event_shape:
        return "other"
    base = getattr(fn, "base_dist", fn)
    if isinstance(base, dist.Bernoulli):
        return "binary"
    return "categorical" if isinstance(base, dist.Categorical) else "numeric"


def moments(site: str, fn: Any, label: Tensor | None) -> Tree:
    """Return what is averaged over draws: moments or class probabilities, entropy, log density."""
    base = getattr(fn, "base_dist", fn)
    probabilities = isinstance(base, dist.Categorical)
    mean, variance = (fn.probs, None) if probabilities else mean_and_variance(site, fn)
    out = {"mean": mean}
    if kind_of(fn) in ("binary", "categorical"):
        p = out["mean"]
        each = torch.special.entr(p)
        out["noise"] = each.sum(-1) if probabilities else each + torch.special.entr(1.0 - p)
    if variance is not None:
        out["square"] = variance + mean**2
    if label is not None:
        out["log_prob"], out["label"] = fn.log_prob(label), label
    return out


def mean_and_variance(site: str, fn: Any) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of a site's distribution, where they have a closed form."""
    base = getattr(fn, "base_dist", fn)
    if isinstance(
        base, dist.StudentT
    ):  # torch sets its entries by a mask, which torch.vmap does not allow
        df = base.df.expand(fn.shape())
        spread = base.scale.expand(fn.shape()) ** 2 * df / (df - 2.0)
        mean = torch.where(df > 1.0, base.loc.expand(fn.shape()), torch.nan)
        return mean, torch.where(df > 2.0, spread, torch.where(df > 1.0, torch.inf, torch.nan))
    try:
        return fn.mean, fn.variance
    except (NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"site '{site}' ({kind_of_distribution(fn)}) has no mean and variance in closed form, "
            "which a prediction averages: draw its labels instead, fit.posterior_predictive()"
        ) from error


def averaged(name: str, value: Tensor) -> Tensor:
    """Average over draws, (C, S, 1, B, ...) -> (C, B, ...); log densities by logsumexp."""
    value = value.squeeze(2)
    if name == "label":
        return value[:, 0]
    return value.logsumexp(1) - math.log(value.shape[1]) if name == "log_prob" else value.mean(1)


@one_at_a_time
def predict(
    fit: Snapshot, rows: ClientData, *, site: str | None = None, draws: int = 200, seed: int = 0
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
        ValueError: a field is missing or holds NaN; or the model observes several sites and `site`
            is None.
    """
    site, program = fit.program.observed_site(site), fit.program
    # a guide that needs all rows may get to read them only after the program was read
    needed = None if program.reads_all_rows else program.reads.guide
    few = by_state_alone(restricted(fit, rows, fields=needed))

    def run(one: AtLatents, first: int, count: int) -> Iterator[Chunk]:
        def at_draw(params: Params, own: ClientBatch, asked: ClientBatch) -> Tree:
            return one(params, program.draw(params, own), asked)

        def each(snapshot: Snapshot) -> Iterator[Chunk]:
            return each_draw(snapshot, at_draw, draws=count, seed=seed, rows=rows, first=first)

        return mapped_or_in_turn(few, each)

    return predicted(program, rows, site, run, draws)


def predict_at(fit: Snapshot, draws: Draws, rows: ClientData, *, site: str) -> Prediction:
    """Predict rows at given draws of every latent site, of the fit's clients in the same order."""

    def run(one: AtLatents, first: int, count: int) -> Iterator[Chunk]:
        return at_draws(fit, draws.some(first, count), one, rows=rows)

    return predicted(fit.program, rows, site, run, draws.count)


AtLatents = Callable[[Params, Values, ClientBatch], Tree]


def predicted(
    program: Program,
    rows: ClientData,
    site: str,
    run: Callable[[AtLatents, int, int], Iterable[Chunk]],
    draws: int,
) -> Prediction:
    """Average what a site's distribution says of each row, over latent sites that `run` supplies.

    `run` evaluates `(params, latent sites, rows) -> tree` for every client, at so many draws from
    the first number on. A few draws are averaged at a time where all would not fit in memory.
    """
    known, draws = program.labels[site] in rows.fields, expect_count(draws, "draws")
    kinds: set[str] = set()

    def score(params: Params, values: Values, asked: ClientBatch) -> Tree:
        fn, value = program.observed(values, asked, params)[site]
        kinds.add(kind_of(fn))
        return moments(site, fn, value if known else None)

    total: dict[str, Tensor] = {}
    some = min(draws, max(1, MOST_NUMBERS // int(rows.counts.max())))
    for first in range(0, draws, max(1, some)):
        count = min(some, draws - first)
        flat = _averaged(run(score, first, count))
        total = flat if count == draws else _joined(total, flat, first, count)
    return _prediction(rows, site, total, kinds.pop())


def _averaged(chunks: Iterable[Chunk]) -> dict[str, Tensor]:
    flat: dict[str, list[Tensor]] = {}
    for chunk in chunks:
        for name, value in chunk.found.items():
            flat.setdefault(name, []).append(averaged(name, value)[chunk.asked.mask()])
    return {name: torch.cat(v) for name, v in flat.items()}


def _joined(
    total: Mapping[str, Tensor], more: dict[str, Tensor], before: int, count: int
) -> dict[str, Tensor]:
    """Join averages over `before` draws and averages over `count` further ones."""
    if not before:
        return more
    share = count / (before + count)
    joined = {
        name: torch.lerp(value, more[name], share)
        for name, value in total.items()
        if value.is_floating_point()
    }
    if "label" in more:
        joined["label"] = more["label"]
    if "log_prob" in more:
        joined["log_prob"] = torch.logaddexp(
            total["log_prob"] + math.log1p(-share), more["log_prob"] + math.log(share)
        )
    return joined


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
