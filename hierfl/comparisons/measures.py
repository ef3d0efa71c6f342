"""What is measured of a fit: P and G, of clients that take part and of new ones, on their own rows and on all.

P scores what a client is served: by what its last round left, or after one round of `personalise` on its training
rows where the method tunes for a prediction. G scores what a client is served that has taken no step: the same rows
under a name that the server has never seen. Test rows are used here, and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import torch

from hierfl.comparisons.federations import Federation, renamed
from hierfl.comparisons.study_file import Evaluation
from hierfl.data.clients import ClientData
from hierfl.engine.rounds import one_round
from hierfl.posterior.prediction import Prediction
from hierfl.runs.result import Fit
from hierfl.studies.baseline_methods import Baseline

WEIGHTINGS = ("rows", "clients")


class Score(NamedTuple):
    """One number of a run.

    Args:
        score: "P", "P+FT", which is P after fine-tuning, or "G".
        clients: "participating" or "new".
        adapted: rounds of `personalise` on its own rows that a client has had before.
        test: "local", a client's own test rows, or "global", rows of all clients.
        weighting: "rows" or "clients" count the same.
        rounds: how many last rounds it is a mean over.
        metric: "accuracy", "balanced_accuracy" or "explained" in %, or "log_score" in nats a row.
        value: the number.
    """

    score: str
    clients: str
    adapted: int
    test: str
    weighting: str
    rounds: int
    metric: str
    value: float


def stranger(client: str) -> str:
    """Return a name that the server has not seen."""
    return f"new {client}"


def means(prediction: Prediction) -> dict[tuple[str, str], float]:
    """Return (weighting, metric) -> mean over the rows or the clients of a prediction."""
    scores = prediction.scores()
    by_client = {"log_score": scores["log_score"]}
    if "rmse" in scores:  # of labels of variance 1
        by_client["explained"] = 100.0 * (1.0 - scores["rmse"] ** 2)
    else:
        by_client["accuracy"] = 100.0 * scores["accuracy"]
        by_client["balanced_accuracy"] = 100.0 * balanced(prediction)
    found = {}
    for metric, value in by_client.items():
        found["clients", metric] = float(value.mean())
        found["rows", metric] = float((value * scores["rows"]).sum() / scores["rows"].sum())
    return found


def balanced(prediction: Prediction) -> pd.Series:
    """Return each client's balanced accuracy: the mean over the classes of its rows of the accuracy in each."""
    label = prediction.known()[0].long()
    right = prediction.mean.argmax(-1) == label
    frame = pd.DataFrame(
        {"client": prediction.data.row_client, "label": label, "right": right.double()}
    )
    by_client = frame.groupby(["client", "label"])["right"].mean().groupby("client").mean()
    return by_client.set_axis([prediction.data.names[k] for k in by_client.index])


class Watch:
    """Scores of a run while it runs: `look` is its `on_round`.

    Args:
        how: the method.
        federation: the rows.
        evaluation: what is measured.
        rounds: of the run.
        seed: of predictions.
        fine_tune: the method is fine-tuned where its clients adapt, and scored so as well.
    """

    def __init__(
        self,
        how: Baseline,
        federation: Federation,
        evaluation: Evaluation,
        rounds: int,
        seed: int,
        *,
        fine_tune: bool = False,
    ) -> None:
        self.how, self.federation, self.evaluation = how, federation, evaluation
        self.rounds, self.seed, self.fine_tune = rounds, seed, fine_tune
        self.draws = evaluation.draws if how.draws else 1
        self.curve: list[dict[str, float]] = []
        self.last: list[dict[tuple[str, str, str], float]] = []

    def look(self, fit: Fit) -> None:
        """Score a fit after a round, if the round is one of the last or a point of the curve."""
        at, every = fit.progress.round, self.evaluation.every
        late, point = at > self.rounds - self.evaluation.last_rounds, every and at % every == 0
        if not (late or point):
            return
        rows = self.federation
        found = {
            ("G", *key): v for key, v in means(self._unserved(fit, rows.train, rows.test)).items()
        }
        if not (self.how.tunes or self.evaluation.round_of_all):
            found |= {("P", *key): v for key, v in means(self._predicted(fit, rows.test)).items()}
        if late:
            self.last.append(found)
        if point:
            shown = {
                kind: value
                for (kind, *which), value in found.items()
                if which == [self.evaluation.weighting, self.evaluation.metric]
            }
            self.curve.append({"round": at, **shown})

    def scores(self, fit: Fit) -> list[Score]:
        """Return all scores, once the run has ended."""
        count, rows = len(self.last), self.federation
        found = [
            Score(kind, "participating", 0, "local", weighting, count, metric,
                  sum(each[kind, weighting, metric] for each in self.last) / count)
            for kind, weighting, metric in self.last[0]
        ]  # fmt: skip
        whole, adapted = fit, None
        if self.how.tunes:
            adapted = fit.personalise(rows.train, rounds=1)
        elif self.evaluation.round_of_all:
            whole = with_everyone(fit)
            found += _of("P", "participating", 0, "local", self._predicted(whole, rows.test))
        if self.fine_tune:
            adapted = whole.personalise(rows.train, rounds=1, anew=False)
        if adapted is not None:
            found += _of(
                self._kind, "participating", 1, "local", self._predicted(adapted, rows.test)
            )
        if rows.joining is not None:
            found += self._joined(fit, *rows.joining)
        if self.evaluation.global_rows:
            everyone = everyones(rows.test, self.evaluation.global_rows, self.seed)
            if not self.how.tunes:
                found += _of("P", "participating", 0, "global", self._predicted(whole, everyone))
            if adapted is not None:
                found += _of(
                    self._kind, "participating", 1, "global", self._predicted(adapted, everyone)
                )
            unserved = self._unserved(fit, rows.train, everyone)
            found += _of("G", "participating", 0, "global", unserved)
        return found

    @property
    def _kind(self) -> str:
        return "P+FT" if self.fine_tune else "P"

    def _joined(self, fit: Fit, train: ClientData, test: ClientData) -> list[Score]:
        """Return the scores of clients that join, after some rounds on their own rows and after none."""
        found = []
        for rounds in self.evaluation.join_rounds:
            own = fit.personalise(train, rounds=rounds)
            found += _of(self._kind, "new", rounds, "local", self._predicted(own, test))
        return [*found, *_of("G", "new", 0, "local", self._unserved(fit, train, test))]

    def _predicted(self, fit: Fit, rows: ClientData) -> Prediction:
        """Predict rows by what their clients are served."""
        return fit.predict(rows, draws=self.draws, seed=self.seed)

    def _unserved(self, fit: Fit, train: ClientData, rows: ClientData) -> Prediction:
        """Predict rows by what clients are served that have taken no step."""
        own = fit.personalise(renamed(train, stranger), rounds=0)
        return self._predicted(own, renamed(rows, stranger))


def with_everyone(fit: Fit) -> Fit:
    """Continue a fit by one round in which every client takes part."""
    federation = fit.federation
    # as many clients at once as before: compiled steps are of one shape
    parts = federation.parts(torch.arange(federation.cohort), fit.message)
    whole = replace(federation, cohort=len(fit.clients), chunk=max(map(len, parts)))
    after = one_round(whole, fit.progress, fit.rounds + 1)
    return replace(fit, progress=after, rounds=fit.rounds + 1)


def _of(kind: str, clients: str, adapted: int, test: str, prediction: Prediction) -> list[Score]:
    return [
        Score(kind, clients, adapted, test, weighting, 1, metric, value)
        for (weighting, metric), value in means(prediction).items()
    ]


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
