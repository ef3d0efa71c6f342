"""The options of a method, chosen on rows or clients kept from the fit, never on test rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from hierfl.comparisons.cells import described, file_of, keep, kept, plan_of, trained
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.measures import with_everyone
from hierfl.comparisons.score_means import means
from hierfl.comparisons.study_file import Study, StudyEntry
from hierfl.core.extras import extras_for
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import ClientError
from hierfl.runs.result import Fit
from hierfl.studies.baseline_methods import baseline

with extras_for("a search of options"):
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution
    from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
    from optuna.trial import Trial, TrialState, create_trial

Options = dict[str, float]
RUNGS = 3  # times at which a trial is compared with those before it


def points(study: Study, entry: StudyEntry) -> list[Options]:
    """Return the points of a method's grid."""
    grid = study.grid_of(entry)
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def chosen(out: Path, study: Study, entry: StudyEntry) -> dict[str, Any]:
    """Return a method's options, all trials and how many are new; the first seed fixes the clients."""
    if not study.tuning.rounds:
        return {"options": {}, "trials": [], "computed": 0}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = optuna.create_study(direction="maximize", pruner=pruner(study))
    grid: dict[str, BaseDistribution] = {
        k: CategoricalDistribution(v) for k, v in study.grid_of(entry).items()
    }
    trials, computed = [], 0
    for options in points(study, entry):
        key = {**described(study, entry), "trial": options}
        file = file_of(out, "trials", f"{entry.label}-{in_words(options)}", key)
        trial = kept(file)
        if trial is None:
            search.enqueue_trial(dict(options))
            trial = tried(study, entry, options, search.ask(grid))
            keep(file, key, trial)
            computed += 1
        else:
            search.add_trial(_remade(trial, options, grid))
        trials.append({"options": options, **trial})
        last = search.trials[-1]
        if last.state == TrialState.RUNNING:
            state = _state(trial)
            search.tell(
                last.number, trial["score"] if state == TrialState.COMPLETE else None, state
            )
    whole = [t for t in trials if t["score"] is not None and not t["pruned"]]
    if not whole:
        raise ValueError(
            f"{entry.label}: every trial diverges "
            f"({', '.join(in_words(t['options']) for t in trials)}): add smaller step sizes to the "
            "grid"
        )
    best = max(whole, key=lambda t: t["score"])  # the first of equals
    return {"options": best["options"], "trials": trials, "computed": computed}


def in_words(options: Mapping[str, float]) -> str:
    """Return options as words, such as "lr 0.01"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in options.items())


def pruner(study: Study) -> BasePruner:
    """Return what ends trials early."""
    if not study.tuning.halving:
        return NopPruner()
    least = max(1, study.tuning.rounds // 2**RUNGS)
    return SuccessiveHalvingPruner(min_resource=least, reduction_factor=2)


def tried(study: Study, entry: StudyEntry, options: Options, trial: Trial) -> dict[str, Any]:
    """Run one trial; return its score, its scores by round, and whether it was ended early."""
    how, seed = baseline(entry.name), study.run.seeds[0]
    federation = of_study(study, seed)
    fitting, score = split(study, federation.train, seed, how.tunes, how.draws, federation.variance)
    rounds, _ = plan_of(study, entry, fitting.num_clients, study.tuning.rounds)
    rungs = {max(1, rounds // 2**k) for k in range(RUNGS + 1)}
    by_round: dict[int, float] = {}

    def look(fit: Fit) -> None:
        at = fit.progress.round
        if at not in rungs:
            return
        by_round[at] = score(fit)
        # the same steps for a method that takes fewer rounds
        trial.report(by_round[at], round(at * study.tuning.rounds / rounds))
        if at < rounds and trial.should_prune():
            raise optuna.TrialPruned

    pruned, value = False, None
    try:
        trained(study, entry, options, fitting, federation.classes, study.tuning.rounds, seed, look)
        value = by_round[rounds]
    except optuna.TrialPruned:
        pruned, value = True, by_round[max(by_round)]
    except ClientError:  # an update that is not finite
        value = None
    if value is not None and not math.isfinite(value):
        value = None
    frozen = trial.study.trials[trial.number]
    return {
        "score": value,
        "pruned": pruned,
        "reported": {str(k): v for k, v in frozen.intermediate_values.items()},
        "noted": {k: v for k, v in frozen.system_attrs.items() if k.startswith("completed_rung")},
    }


def split(
    study: Study, train: ClientData, seed: int, tunes: bool, draws: bool, variance: float = 1.0
) -> tuple[ClientData, Callable[[Fit], float]]:
    """Return the rows to fit, and the score on the rows kept; `variance` is of real labels."""
    weighting, share = study.evaluation.weighting, study.tuning.share
    by_log_score = study.tuning.metric == "log_score"
    metric = "log_score" if by_log_score else study.evaluation.metric
    count = study.evaluation.draws if draws else 1
    if study.tuning.on == "rows":
        fitting, held = train.split(1.0 - share, seed=seed)
        joins, tuned_on = tunes, fitting
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
        scores = means(own.predict(held, draws=count, seed=seed), variance)
        return scores[weighting, metric]

    return fitting, score


def _state(trial: Mapping[str, Any]) -> TrialState:
    if trial["pruned"]:
        return TrialState.PRUNED
    return TrialState.FAIL if trial["score"] is None else TrialState.COMPLETE


def _remade(trial: Mapping[str, Any], options: Options, grid: Any) -> Any:
    state = _state(trial)
    return create_trial(
        state=state,
        value=trial["score"] if state == TrialState.COMPLETE else None,
        params=dict(options),
        distributions=grid,
        intermediate_values={int(k): v for k, v in trial["reported"].items()},
        system_attrs=dict(trial["noted"]),
    )
