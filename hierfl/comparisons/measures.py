"""What is measured of a fit: P and G, of participating and new clients, on own rows and on all."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hierfl.comparisons.federations import StudyFederation, renamed
from hierfl.comparisons.score_means import WEIGHTINGS, Score, by_client, means, means_of
from hierfl.comparisons.study_data import LINES
from hierfl.comparisons.study_file import Study, StudyEntry
from hierfl.core.trees import tree_map
from hierfl.data.clients import ClientData
from hierfl.diagnostics import (
    calibration_error,
    client_gradients,
    coherence,
    confidence,
    loss_deviations,
    out_of_distribution,
)
from hierfl.engine.rounds import one_round
from hierfl.posterior.prediction import Prediction
from hierfl.runs.result import Fit
from hierfl.studies.baseline_methods import baseline
from hierfl.studies.drawn_clients import exact_posterior, least_squares, probes_of, served_weights

NOTED = 10  # clients whose entropies are kept, for figures
DRAWN = 40  # draws of each client's line that are kept, for figures


def stranger(client: str) -> str:
    """Return a name that the server has not seen."""
    return f"new {client}"


class ScoreWatch:
    """Scores of a run of so many rounds while it runs."""

    def __init__(
        self, study: Study, entry: StudyEntry, federation: StudyFederation, rounds: int, seed: int
    ) -> None:
        self.how, self.federation, self.seed = baseline(entry.name), federation, seed
        self.evaluation, self.fine_tune = study.evaluation, entry.fine_tune
        self.on_lines, self.bias = study.data.name in LINES, study.net.bias
        # the same share of the run for a method that takes fewer rounds
        last = round(self.evaluation.last_rounds * rounds / study.run.rounds)
        self.late = rounds - max(1, last)
        self.draws = self.evaluation.draws if self.how.draws else 1
        self.kind = "P+FT" if self.fine_tune else "P"  # of clients that adapt
        self.curve: list[dict[str, float]] = []
        self.last: list[dict[tuple[str, str, str], float]] = []
        self.clients: list[dict[str, Any]] = []
        self.classes: list[dict[str, Any]] = []
        self.entropies: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []

    def look(self, fit: Fit) -> None:
        """Score a fit after a round, if the round is one of the last or a point of the curve."""
        at, every = fit.progress.round, self.evaluation.every
        late, point = at > self.late, every and at % every == 0
        if not (late or point):
            return
        rows = self.federation
        predicted = {"G": self._unserved(fit, rows.train, rows.test)}
        if not (self.how.tunes or self.evaluation.round_of_all):
            predicted["P"] = self._predicted(fit, rows.test)
        tables = {kind: by_client(p, rows.variance) for kind, p in predicted.items()}
        scores = {
            (kind, *key): value
            for kind, table in tables.items()
            for key, value in means_of(table, rows.test).items()
        }
        if late:
            self.last.append(scores)
        if point:
            shown = {
                kind: value
                for (kind, *which), value in scores.items()
                if which == [self.evaluation.weighting, self.evaluation.metric]
            }
            self.curve.append({"round": at, **shown, **self._along(fit)})
            if "clients" in self.evaluation.along:
                self.clients += [
                    {"round": at, "client": client, "score": kind, "value": value}
                    for kind, table in tables.items()
                    for client, value in table[self.evaluation.metric].items()
                ]

    def _along(self, fit: Fit) -> dict[str, float]:
        along, measured = self.evaluation.along, {}
        if "new_clients" in along and self.federation.joining is not None:
            train, test = self.federation.joining
            own = fit.personalize(train, rounds=self.evaluation.join_rounds[0])
            scores = means(self._predicted(own, test), self.federation.variance)
            measured["P, new"] = scores[self.evaluation.weighting, self.evaluation.metric]
        if "coherence" in along:
            slopes = client_gradients(fit, draws=self.draws, seed=self.seed)
            trained = slopes[slopes.norm(dim=1) > 0.0]  # one that has taken no step may have none
            if len(trained) > 1:
                measured["coherence"] = coherence(trained).minus_log_det
        if self.on_lines:
            line = self._common_line(fit)
            measured["distance"] = self._distance(line)
            self._note_lines("G", fit.progress.round, 0, line.mean(0, keepdim=True))
        return measured

    def _common_line(self, fit: Fit) -> Tensor:
        """Return the lines of clients that have taken no step, (clients, weights)."""
        train = self.federation.train
        return served_weights(self._unserved(fit, train, probes_of(train)), bias=self.bias)

    def _distance(self, line: Tensor) -> float:
        """Return the clients' mean distance of lines from least squares on all training rows."""
        target = least_squares(self.federation.train, bias=self.bias)
        return float((line - target).norm(dim=-1).mean())

    def _note_lines(self, score: str, at: int, draw: int, lines: Tensor) -> None:
        """Note lines (clients, weights); those of G are of no client."""
        names = self.federation.train.names if score == "P" else ("",)
        self.lines += [
            {"score": score, "round": at, "client": client, "draw": draw}
            | {f"w{k}": round(float(w), 5) for k, w in enumerate(line)}
            for client, line in zip(names, lines, strict=True)
        ]

    def _of_lines(self, fit: Fit, served: Fit) -> list[Score]:
        """Note draws of what each client is served, one without draws; return distance and width."""
        train, drawn = self.federation.train, []
        for draw in range(DRAWN if self.how.draws else 1):
            own = served.predict(probes_of(train), draws=1, seed=DRAWN * self.seed + draw)
            drawn.append(served_weights(own, bias=self.bias))
            self._note_lines("P", served.progress.round, draw, drawn[-1])
        scores = self._of_all("G", "distance", self._distance(self._common_line(fit)))
        if self.how.draws and not self.bias:
            exact = exact_posterior(train, bias=False)[1].diagonal().sqrt()
            scores += self._of_all("P", "width", float((torch.stack(drawn).std(0) / exact).mean()))
        return scores

    def scores(self, fit: Fit) -> list[Score]:
        """Return all scores, once the run has ended."""
        count, rows = len(self.last), self.federation
        scores = [
            Score(kind, "participating", 0, "local", weighting, count, metric,
                  sum(round_means[kind, weighting, metric] for round_means in self.last) / count)
            for kind, weighting, metric in self.last[0]
        ]  # fmt: skip
        whole, adapted = fit, None
        if self.how.tunes:
            adapted = fit.personalize(rows.train, rounds=1)
        elif self.evaluation.round_of_all:
            whole = with_everyone(fit)
            scores += self._of("P", 0, "local", self._predicted(whole, rows.test))
        if self.fine_tune:
            adapted = whole.personalize(rows.train, rounds=1, from_scratch=False)
        if adapted is not None:
            scores += self._of(self.kind, 1, "local", self._predicted(adapted, rows.test))
        if rows.joining is not None:
            scores += self._joined(fit, *rows.joining)
        everyone = None
        if self.evaluation.global_rows:
            everyone = everyones(rows.test, self.evaluation.global_rows, self.seed)
            scores += self._on_all_rows(everyone, fit, whole, adapted)
        served = whole if adapted is None or self.fine_tune else adapted
        scores += self._against_foreign(served)
        if self.evaluation.by_class:
            tests = {"local": rows.test, "global": everyone}
            self._note_classes(served, {n: test for n, test in tests.items() if test is not None})
        if self.evaluation.calibration:
            error = calibration_error(*confidence(self._predicted(served, rows.test)), draws=99)
            scores += self._of_all("P", "calibration_error", 100.0 * error.ece)
            scores += self._of_all("P", "calibration_by_chance", 100.0 * error.by_chance)
        return scores + (self._of_lines(fit, served) if self.on_lines else [])

    def _on_all_rows(
        self, everyone: ClientData, fit: Fit, whole: Fit, adapted: Fit | None
    ) -> list[Score]:
        scores = []
        if not self.how.tunes:
            scores += self._of("P", 0, "global", self._predicted(whole, everyone))
        if adapted is not None:
            scores += self._of(self.kind, 1, "global", self._predicted(adapted, everyone))
        unserved = self._unserved(fit, self.federation.train, everyone)
        return [*scores, *self._of("G", 0, "global", unserved)]

    def _of_all(self, kind: str, metric: str, value: float) -> list[Score]:
        return [
            Score(kind, "participating", 0, "local", weighting, 1, metric, value)
            for weighting in WEIGHTINGS
        ]

    def _against_foreign(self, served: Fit) -> list[Score]:
        """Return the AUROC of P's entropy by foreign set; note the first clients' entropies."""
        if not self.federation.foreign:
            return []
        own, scores = self._predicted(served, self.federation.test), []
        for name, rows in self.federation.foreign.items():
            against = out_of_distribution(own, self._predicted(served, rows))
            every = {"rows": against.overall["auroc"], "clients": against.clients["auroc"].mean()}
            scores += [
                Score("P", "participating", 0, name, weighting, 1, "auroc", float(value))
                for weighting, value in every.items()
            ]
            owners = rows.row_client.tolist()
            by_set = dict(zip(("own", name), against.entropies, strict=True))
            if self.entropies:  # those of own rows are noted
                del by_set["own"]
            self.entropies += [
                {"rows": part, "client": client, "entropy": round(float(value), 4)}
                for part, values in by_set.items()
                for client, value in zip(map(rows.names.__getitem__, owners), values, strict=True)
                if client in rows.names[:NOTED]
            ]
        return scores

    def _note_classes(self, served: Fit, tests: dict[str, ClientData]) -> None:
        """Note the first client's loss by class minus the clients' mean, by kind of test rows."""
        for name, rows in tests.items():
            first = loss_deviations(self._predicted(served, rows)).iloc[0]
            self.classes += [
                {"test": name, "class": int(label), "deviation": float(value)}
                for label, value in first.items()
            ]

    def _joined(self, fit: Fit, train: ClientData, test: ClientData) -> list[Score]:
        """Return the scores of clients that join, after each number of rounds on their own rows."""
        scores = []
        for rounds in self.evaluation.join_rounds:
            own = fit.personalize(train, rounds=rounds)
            served = self._predicted(own, test)
            scores += self._of(self.kind, rounds, "local", served, clients="new")
        unserved = self._unserved(fit, train, test)
        return [*scores, *self._of("G", 0, "local", unserved, clients="new")]

    def _of(
        self,
        kind: str,
        adapted: int,
        test: str,
        prediction: Prediction,
        *,
        clients: str = "participating",
    ) -> list[Score]:
        return [
            Score(kind, clients, adapted, test, weighting, 1, metric, value)
            for (weighting, metric), value in means(prediction, self.federation.variance).items()
        ]

    def _predicted(self, fit: Fit, rows: ClientData) -> Prediction:
        return fit.predict(rows, draws=self.draws, seed=self.seed)

    def _unserved(self, fit: Fit, train: ClientData, rows: ClientData) -> Prediction:
        """Predict rows by what clients are served that have taken no step."""
        own = fit.personalize(renamed(train, stranger), rounds=0)
        return self._predicted(own, renamed(rows, stranger))


def with_everyone(fit: Fit) -> Fit:
    """Return a fit after one more round, in which every client takes part; `fit` stays as it is."""
    federation = fit.federation
    # as many clients at once as before: compiled steps are of one shape
    chunks = federation.parts(torch.arange(federation.cohort), fit.message)
    settings = replace(federation.settings, chunk=max(map(len, chunks)))
    whole = replace(federation, cohort=len(fit.clients), settings=settings)
    # a round writes into the table of its clients
    own = replace(fit.progress, table=tree_map(torch.clone, fit.progress.table))
    after = one_round(whole, own, fit.rounds + 1)
    return replace(fit, progress=after, rounds=fit.rounds + 1)


def everyones(test: ClientData, count: int, seed: int) -> ClientData:
    """Return clients who all have the same test rows: at most `count`, drawn from all clients'."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(test.num_rows, generator=generator)[:count]
    names, size = test.names, len(chosen)
    fields: dict[str, Any] = {
        name: value[chosen].repeat(len(names), *[1] * (value.dim() - 1))
        for name, value in test.fields.items()
    }
    ids = torch.arange(len(names)).repeat_interleave(size)
    return ClientData.from_arrays(ids, names=list(names), **fields)
