"""What is measured of a fit: P and G, of clients that take part and of new ones, on their own rows and on all.

P scores what a client is served: by what its last round left, or after one round of `personalise` on its training
rows where the method tunes for a prediction. G scores what a client is served that has taken no step: the same rows
under a name that the server has never seen. Test rows are used here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hierfl.comparisons.federations import Federation, renamed
from hierfl.comparisons.study_file import Evaluation
from hierfl.data.clients import ClientData
from hierfl.posterior.prediction import Prediction
from hierfl.runs.result import Fit
from hierfl.studies.baseline_methods import Baseline

WEIGHTINGS = ("rows", "clients")
METRICS = ("accuracy", "log_score")


class Score(NamedTuple):
    """One number of a run.

    Args:
        score: "P" or "G".
        clients: "participating" or "new".
        test: "local", a client's own test rows, or "global", rows of all clients.
        weighting: "rows" or "clients" count the same.
        rounds: how many last rounds it is a mean over.
        metric: "accuracy" in %, or "log_score" in nats a row.
        value: the number.
    """

    score: str
    clients: str
    test: str
    weighting: str
    rounds: int
    metric: str
    value: float


def stranger(client: str) -> str:
    """Return a name that the server has not seen."""
    return f"new {client}"


def served(
    how: Baseline, fit: Fit, train: ClientData, rows: ClientData, evaluation: Evaluation, seed: int
) -> Prediction:
    """Predict rows by what clients of these training rows are served."""
    own = fit.personalise(train, rounds=1) if how.tunes else fit
    return own.predict(rows, draws=evaluation.draws if how.draws else 1, seed=seed)


def unserved(
    how: Baseline, fit: Fit, train: ClientData, rows: ClientData, evaluation: Evaluation, seed: int
) -> Prediction:
    """Predict rows by what clients are served that have taken no step."""
    own = fit.personalise(renamed(train, stranger), rounds=0)
    draws = evaluation.draws if how.draws else 1
    return own.predict(renamed(rows, stranger), draws=draws, seed=seed)


def means(prediction: Prediction) -> dict[tuple[str, str], float]:
    """Return (weighting, metric) -> mean over the rows or the clients of a prediction."""
    scores = prediction.scores()
    found = {}
    for metric in METRICS:
        value = scores[metric] * (100.0 if metric == "accuracy" else 1.0)
        found["clients", metric] = float(value.mean())
        found["rows", metric] = float((value * scores["rows"]).sum() / scores["rows"].sum())
    return found


class Watch:
    """Scores of a run while it runs: `look` is its `on_round`.

    Args:
        how: the method.
        federation: the rows.
        evaluation: what is measured.
        rounds: of the run.
        seed: of predictions.
    """

    def __init__(
        self, how: Baseline, federation: Federation, evaluation: Evaluation, rounds: int, seed: int
    ) -> None:
        self.how, self.federation, self.evaluation = how, federation, evaluation
        self.rounds, self.seed = rounds, seed
        self.curve: list[dict[str, float]] = []
        self.last: list[dict[tuple[str, str, str], float]] = []

    def look(self, fit: Fit) -> None:
        """Score a fit after a round, if the round is one of the last or a point of the curve."""
        at, every = fit.progress.round, self.evaluation.every
        late, point = at > self.rounds - self.evaluation.last_rounds, every and at % every == 0
        if not (late or point):
            return
        found = {("G", *key): v for key, v in means(self._by(unserved, fit)).items()}
        if not self.how.tunes:
            found |= {("P", *key): v for key, v in means(self._by(served, fit)).items()}
        if late:
            self.last.append(found)
        if point:
            shown = {
                kind: value
                for (kind, w, metric), value in found.items()
                if (w, metric) == (self.evaluation.weighting, "accuracy")
            }
            self.curve.append({"round": at, **shown})

    def _by(self, what: Callable[..., Prediction], fit: Fit) -> Prediction:
        rows = self.federation
        return what(self.how, fit, rows.train, rows.test, self.evaluation, self.seed)

    def scores(self, fit: Fit) -> list[Score]:
        """Return all scores, once the run has ended."""
        count = len(self.last)
        found = [
            Score(
                kind,
                "participating",
                "local",
                weighting,
                count,
                metric,
                sum(each[kind, weighting, metric] for each in self.last) / count,
            )
            for kind, weighting, metric in self.last[0]
        ]
        if self.how.tunes:
            found += _of("P", "participating", "local", self._by(served, fit))
        if self.federation.joining is not None:
            train, test = self.federation.joining
            given = (train, test, self.evaluation, self.seed)
            own = fit.personalise(train, rounds=1).predict(
                test, draws=self.evaluation.draws if self.how.draws else 1, seed=self.seed
            )
            found += _of("P", "new", "local", own)
            found += _of("G", "new", "local", unserved(self.how, fit, *given))
        if self.evaluation.global_rows:
            train = self.federation.train
            rows = everyones(self.federation.test, self.evaluation.global_rows, self.seed)
            given = (train, rows, self.evaluation, self.seed)
            found += _of("P", "participating", "global", served(self.how, fit, *given))
            found += _of("G", "participating", "global", unserved(self.how, fit, *given))
        return found


def _of(kind: str, clients: str, test: str, prediction: Prediction) -> list[Score]:
    return [Score(kind, clients, test, *key, v) for key, v in _one_round(prediction).items()]


def _one_round(prediction: Prediction) -> dict[tuple[str, int, str], float]:
    return {(weighting, 1, metric): v for (weighting, metric), v in means(prediction).items()}


def everyones(test: ClientData, count: int, seed: int) -> ClientData:
    """Return clients who all have the same test rows, drawn from those of all of them.

    Args:
        test: everyone's test rows.
        count: how many are drawn, at most.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(test.num_rows, generator=generator)[:count]
    names, size = test.names, len(chosen)
    fields: dict[str, Any] = {
        name: value[chosen].repeat(len(names), *[1] * (value.dim() - 1))
        for name, value in test.fields.items()
    }
    ids = torch.arange(len(names)).repeat_interleave(size)
    return ClientData.from_arrays(ids, names=list(names), **fields)
