"""The options of a method, chosen on rows or clients kept from the fit, never on test rows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from hierfl.comparisons.cells import described, file_of, keep, kept, trained
from hierfl.comparisons.federations import StudyFederation, of_study
from hierfl.comparisons.measures import with_everyone
from hierfl.comparisons.score_means import means
from hierfl.comparisons.study_file import Study, StudyEntry
from hierfl.engine.chunks import ClientError
from hierfl.runs.result import Fit
from hierfl.studies.baseline_methods import Baseline, baseline

Options = dict[str, float]


def chosen(out: Path, study: Study, entry: StudyEntry) -> dict[str, Any]:
    """Return a method's options, all trials and how many are new; the first seed fixes the clients."""
    if not study.tuning.rounds:
        return {"options": {}, "trials": [], "computed": 0}
    trials, computed, grid = [], 0, study.grid_of(entry)
    for values in product(*grid.values()):
        options = dict(zip(grid, values, strict=True))
        key = {**described(study, entry), "trial": options}
        file = file_of(out, "trials", f"{entry.label}-{in_words(options)}", key)
        trial = kept(file)
        if trial is None:
            trial = {"score": tried(study, entry, options)}
            keep(file, key, trial)
            computed += 1
        trials.append({"options": options, **trial})
    whole = [t for t in trials if t["score"] is not None]
    if not whole:
        raise ValueError(
            f"{entry.label}: every trial diverges "
            f"({', '.join(in_words(t['options']) for t in trials)}): add smaller step sizes to the grid"
        )
    best = max(whole, key=lambda t: t["score"])  # the first of equals
    return {"options": best["options"], "trials": trials, "computed": computed}


def in_words(options: Mapping[str, float]) -> str:
    """Return options as words, such as "lr 0.01"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in options.items())


def tried(study: Study, entry: StudyEntry, options: Options) -> float | None:
    """Return the score of one trial; None: it diverged."""
    how, seed = baseline(entry.name), study.run.seeds[0]
    federation = of_study(study, seed)
    fitting, score = split(study, federation, how, seed)
    try:
        value = score(trained(study, entry, options, fitting, study.tuning.rounds, seed))
    except ClientError:  # an update that is not finite
        return None
    return value if math.isfinite(value) else None


def split(
    study: Study, federation: StudyFederation, how: Baseline, seed: int
) -> tuple[StudyFederation, Callable[[Fit], float]]:
    """Return the rows to fit, and the score on the training rows that are kept."""
    train, share = federation.train, study.tuning.share
    by_log_score = study.tuning.metric == "log_score"
    metric = "log_score" if by_log_score else study.evaluation.metric
    count = study.evaluation.draws if how.draws else 1
    if study.tuning.on == "rows":
        fitting, held = train.split(1.0 - share, seed=seed)
        joins, tuned_on = how.tunes, fitting
    else:
        kept_out = max(1, round(share * train.num_clients))
        fitting = train.select(train.names[:-kept_out])
        tuned_on, held = train.select(train.names[-kept_out:]).split(0.5, seed=seed)
        joins = True

    def score(fit: Fit) -> float:
        own = fit
        if joins:
            own = fit.personalize(tuned_on, rounds=1)
        elif study.evaluation.round_of_all:
            own = with_everyone(fit)
        scores = means(own.predict(held, draws=count, seed=seed), federation.variance)
        return scores[study.evaluation.weighting, metric]

    return replace(federation, train=fitting), score
