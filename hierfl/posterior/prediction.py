"""Posterior predictive distributions of rows, averaged over draws, and their scores."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core.arguments import expect_count, shown
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.posterior.client_loop import MOST_NUMBERS, Chunk, each_draw
from hierfl.posterior.draws import Draws, at_draws, mapped_or_in_turn
from hierfl.posterior.moments import averaged, joined, kind_of, known_of, moments, with_nan
from hierfl.posterior.snapshot import Snapshot, by_state_alone, restricted
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.traces import counts_of

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames

ARRAYS = ("label", "mean", "sd", "log_score", "noise", "counts")  # of a prediction, by row
MOST_COLUMNS = 8  # classes, or scalars of an event, that are printed


@printed
@dataclass(frozen=True, eq=False)
class Prediction:
    """The posterior predictive distribution of every row.

    Rows are in the order of the frame that you passed, and otherwise client after client as in
    `data`. A label counts as it does in the fit: a row that the model masks, or that has no label,
    has NaN as `label` and `log_score` and is not scored; a row that it scales, as a formula's
    `weights(w)` does, counts w times.

    Args:
        data: the rows, labeled or not.
        site: the observed site that is predicted.
        label: (n,) the true labels; None where they are unknown.
        mean: (n,) E[y | x], the probability of 1 for a Bernoulli site; (n, classes) probabilities
            for a categorical one; the mean direction of an angle, whose sd is that of the angle
            between both.
        sd: (n,) standard deviation of y, from the draws and the likelihood; None of classes.
        log_score: (n,) log of the mean, over draws, of the true label's density raised to how often
            it counts; nats, higher is better. None if labels are unknown.
        noise: (n,) entropy of y given a draw, nats, averaged over draws: the aleatoric part; None
            for a numeric site.
        kind: "binary", "categorical", "numeric", "angle", or "other" for vectors.
        counts: (n,) how often each row's label counts; None: once each.
        place: (rows of `data`,) where each row of `data` stands among these; None: in its place.
    """

    data: ClientData
    site: str
    label: Tensor | None
    mean: Tensor
    sd: Tensor | None
    log_score: Tensor | None
    noise: Tensor | None
    kind: str
    counts: Tensor | None = None
    place: Tensor | None = None

    def __tables__(self) -> Shown:
        data = self.data
        size = f"{data.num_rows} rows of {len(data.names)} clients"
        title = f"Prediction of '{self.site}' ({self.kind}): {size}"
        if self.label is not None and self.log_score is not None:
            score = float(self.log_score.double().nanmean())
            words = f"Mean log score of a row: {score:.3f} nats; higher is better."
            return Shown(title, self.scores(), words)
        client = np.asarray(data.names)[data.row_client.numpy()]
        mean = self.mean if self.place is None else self.mean[self.place]
        flat = mean.reshape(len(mean), -1).double().numpy()
        columns = ["mean"] if flat.shape[1] == 1 else [f"mean {i}" for i in range(flat.shape[1])]
        frame = pd.DataFrame(flat, columns=columns).groupby(client, sort=False).mean()
        frame = frame.iloc[:, :MOST_COLUMNS].rename_axis("client")
        frame.insert(0, "rows", data.counts.numpy())
        return Shown(
            title, frame, "The rows have no labels; means are those of each client's rows."
        )

    def frame(self) -> pd.DataFrame:
        """Return one line per row: client, mean (of each class), sd, label and log score.

        Its index is that of the frame that you passed.
        """
        at = slice(None) if self.place is None else self.place.numpy()
        rows = self.data.frame_rows
        index = range(len(self.mean)) if rows is None or self.place is None else rows.index
        names = np.full(len(self.mean), None, dtype=object)
        names[at] = np.asarray(self.data.names, dtype=object)[self.data.row_client.numpy()]
        columns: dict[str, Any] = {"client": names}
        for name in ("mean", "sd", "label", "log_score"):
            value = getattr(self, name)
            if value is None:
                continue
            flat = value.reshape(len(value), -1).double().numpy()
            several = {f"{name} {j}": flat[:, j] for j in range(flat.shape[1])}
            columns |= {name: flat[:, 0]} if flat.shape[1] == 1 else several
        return pd.DataFrame(columns, index=pd.Index(index, tupleize_cols=False))

    @property
    def counted(self) -> Tensor:
        """Positions of the rows whose labels count, client after client."""
        place = torch.arange(len(self.mean)) if self.place is None else self.place
        return place if self.counts is None else place[self.counts[place] > 0.0]

    def ordered(self) -> "Prediction":
        """Return the rows client after client, as in `data`, without those left out."""
        place = self.place
        return self if place is None else self._changed(lambda v: v[place], place=None)

    def by_client(self) -> "Prediction":
        """Return the rows whose labels count, client after client as in its `data`.

        Raises:
            ValueError: none counts.
        """
        own = self.ordered()
        if own.counts is None or bool((own.counts > 0.0).all()):
            return own
        keep = own.counts > 0.0
        if not bool(keep.any()):
            raise ValueError(f"the rows have no labels for site '{self.site}': nothing to score")
        return own._changed(lambda v: v[keep], data=own.data.where(keep))

    def of_counted(self, replicates: Tensor) -> Tensor:
        """Return replicates (S, n) of these rows, as (S, rows of `by_client`)."""
        if replicates.dim() < 2 or replicates.shape[1] != len(self.mean):
            return replicates  # which is refused where they are used
        return replicates[:, self.counted]

    def _changed(self, change: Callable[[Tensor], Tensor], **others: Any) -> "Prediction":
        """Return the prediction with each array changed."""
        for name in ARRAYS:
            value = getattr(self, name)
            others[name] = None if value is None else change(value)
        return replace(self, **others)

    def scores(self) -> pd.DataFrame:
        """Score each client: log score, and accuracy and Brier score or root mean squared error.

        The Brier score is the mean of sum_c (p_c - 1[y = c])^2 / 2 over the classes: (p - y)^2 for
        two.

        Raises:
            ValueError: the rows have no labels.
        """
        own = self.by_client()
        label, log_score = own.known()
        row = {"log_score": log_score, **own._losses(label)}
        frame = pd.DataFrame({name: v.double().numpy() for name, v in row.items()})
        client = np.asarray(own.data.names)[own.data.row_client.numpy()]
        if own.counts is not None:
            losses = list(frame.columns[1:])
            counts = own.counts.double().numpy()
            mean = pd.Series(counts).groupby(client, sort=False).transform("mean").to_numpy()
            frame[losses] = frame[losses].mul(counts / mean, axis=0)
        table = frame.groupby(client, sort=False).mean()
        if "rmse" in table:
            table["rmse"] = np.sqrt(table["rmse"])
        table.insert(0, "rows", own.data.counts.numpy())
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
        distance = self.mean - y
        if self.kind == "angle":  # the shorter way round
            distance = torch.remainder(distance + torch.pi, 2.0 * torch.pi) - torch.pi
        squares = distance.square()
        return {"rmse": squares.flatten(1).mean(1) if squares.dim() > 1 else squares}


def expect_prediction(value: Any, what: str) -> None:
    """Refuse what is no prediction, where one is expected as the argument `what`."""
    if not isinstance(value, Prediction):
        raise TypeError(f"{what} is {shown(value)}, not a Prediction: pass fit.predict(rows)")


@one_at_a_time
def predict(
    fit: Snapshot,
    rows: "ClientData | Frames",
    *,
    site: str | None = None,
    draws: int = 200,
    seed: int = 0,
) -> Prediction:
    """Predict each row from its own client's posterior; labels may be absent.

    Args:
        fit: whose clients the rows are of.
        rows: rows of fitted clients, matched by name.
        site: the observed site to predict; None: the model's only one.
        draws: S, of the posterior to average over; 1 is enough for point estimates.
        seed: of the draws.

    Raises:
        KeyError: a client was not fitted (`personalize` it first), or the site is not observed.
        ValueError: a field is missing or holds NaN; or `site` is None, and there are several.
    """
    given, rows = rows, fit._rows(rows)
    site, program = fit.program.observed_site(site), fit.program
    # a guide that needs all rows may get to read them only after the program was read
    needed = None if program.reads_all_rows else program.reads.guide
    of_rows = restricted(by_state_alone(fit), rows, fields=needed)

    def run(at_latents: AtLatents, first: int, count: int) -> Iterator[Chunk]:
        def at_draw(params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
            return at_latents(params, of_rows.program.draw(params, own), batch)

        def each(snapshot: Snapshot) -> Iterator[Chunk]:
            return each_draw(snapshot, at_draw, draws=count, seed=seed, rows=rows, first=first)

        return mapped_or_in_turn(of_rows, each)

    prediction = predicted(program, rows, site, run, draws)
    return prediction if rows is given else in_frame_order(prediction)


def predict_at(fit: Snapshot, draws: Draws, rows: ClientData, *, site: str) -> Prediction:
    """Predict rows at given draws of every latent site, of the fit's clients in the same order."""

    def run(at_latents: AtLatents, first: int, count: int) -> Iterator[Chunk]:
        return at_draws(fit, draws.some(slice(first, first + count)), at_latents, rows=rows)

    return predicted(fit.program, rows, site, run, draws.count)


AtLatents = Callable[[Params, Values, ClientBatch], Tree]


def predicted(
    program: Program,
    rows: ClientData,
    site: str,
    run: Callable[[AtLatents, int, int], Iterable[Chunk]],
    draws: int,
) -> Prediction:
    """Average a site's distribution over latent sites from `run`, few draws at a time to bound memory."""
    known, draws = program.labels[site] in rows.fields, expect_count(draws, "draws")
    kinds: set[str] = set()

    def score(params: Params, values: Values, batch: ClientBatch) -> Tree:
        node = program.conditioned(values, params, batch)[site]
        fn, counts = counts_of(node)
        kinds.add(kind_of(fn))
        return moments(site, fn, node["value"] if known else None, counts)

    total: dict[str, Tensor] = {}
    some = min(draws, max(1, MOST_NUMBERS // int(rows.counts.max())))
    for first in range(0, draws, max(1, some)):
        count = min(some, draws - first)
        flat = _averaged(run(score, first, count))
        total = flat if count == draws else joined(total, flat, first, count)
    return _prediction(rows, site, total, kinds.pop())


def _averaged(chunks: Iterable[Chunk]) -> dict[str, Tensor]:
    flat: dict[str, list[Tensor]] = {}
    for chunk in chunks:
        present = chunk.asked.mask()
        own = {name: averaged(name, v)[present] for name, v in chunk.found.items()}
        if "log_prob" in own:  # where no row of a chunk is padded or masked, none is counted
            own.setdefault("counts", torch.ones_like(own["log_prob"]))
        for name, value in own.items():
            flat.setdefault(name, []).append(value)
    return {name: torch.cat(v) for name, v in flat.items()}


def _prediction(rows: ClientData, site: str, flat: Mapping[str, Tensor], kind: str) -> Prediction:
    sd = (flat["square"] - flat["mean"] ** 2).clamp(min=0.0).sqrt() if "square" in flat else None
    label, log_score, counts = (flat.get(name) for name in ("label", "log_prob", "counts"))
    is_known = known_of(rows)
    if label is not None and is_known is not None and not bool(is_known.all()):
        counts = (torch.ones(len(is_known)) if counts is None else counts) * is_known
    if label is not None and counts is not None and not bool((counts > 0.0).all()):
        none = counts == 0.0
        assert log_score is not None
        label, log_score = with_nan(label, none), log_score.masked_fill(none, torch.nan)
    return Prediction(
        data=rows,
        site=site,
        label=label,
        mean=flat["mean"],
        sd=sd,
        log_score=log_score,
        noise=flat.get("noise"),
        kind=kind,
        counts=counts,
    )


def in_frame_order(prediction: Prediction) -> Prediction:
    """Return a prediction in the order of the frame that its rows were read from."""
    rows = prediction.data.frame_rows
    return prediction if rows is None else prediction._changed(rows.arranged, place=rows.place)
