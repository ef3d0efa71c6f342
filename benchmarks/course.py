"""The course of a fit: rounds, bytes and seconds until its posterior is accurate, and its errors in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from benchmarks.reference import Errors, compare
from benchmarks.reference_models import Problem, all_sites
from benchmarks.rounds_table import WITHIN, Record
from hierfl.core.trees import tree_map
from hierfl.datasets import ReferenceSummary
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.method import Method
from hierfl.runs.result import Fit

LOOKS = 2000  # posterior draws by which the global means are checked during a fit


@dataclass(frozen=True)
class Way:
    """A method, and how its course is measured.

    Args:
        method: the method.
        rounds: most rounds that it may take.
        every: rounds between two checks of the global means.
        draws: posterior draws after the last round.
        cut: whether checks may cut the fit to one row, because draws of the global sites depend on
            none.
    """

    method: Method
    rounds: int
    every: int = 1
    draws: int = 2000
    cut: bool = True


@dataclass(frozen=True)
class Course:
    """Measured course of a fit.

    Args:
        reached: rounds until every global mean was within `WITHIN` and stayed so; None: never.
        sent: bytes to and from all clients until then, or until the last round.
        errors: errors of the posterior after the last round.
        local: the sites that each client has its own of.
        rounds: rounds in all.
        seconds: wall-clock time of clients and server, in seconds.
        k_hat: Pareto shape of the method's own weights; None if it has none.
        effective: effective draws that they leave; None if it has none.
    """

    reached: int | None
    sent: int
    errors: Errors
    local: tuple[str, ...]
    rounds: int
    seconds: float
    k_hat: float | None = None
    effective: float | None = None

    def record(self) -> Record:
        """Return the course as JSON-compatible values."""
        shared = [site for site in self.errors.mean if site not in self.local]
        own = self.errors.of("mean", self.local) if self.local else np.zeros(0)
        return {
            "rounds": self.reached,
            "bytes": self.sent,
            "rounds_in_all": self.rounds,
            **accuracy(self.errors),
            "max_global_error_sd": round(float(self.errors.of("mean", shared).max()), 4),
            "max_local_error_sd": round(float(own.max()), 4) if own.size else None,
            "k_hat": None if self.k_hat is None else round(self.k_hat, 3),
            "effective": None if self.effective is None else round(self.effective),
            "seconds": round(self.seconds, 1),
        }


def accuracy(errors: Errors) -> Record:
    """Return the errors of all sites together as JSON-compatible values."""
    mean, sd, (_, spread) = errors.of("mean"), errors.of("sd"), errors.worst_sd()
    return {
        "max_mean_error_sd": round(float(mean.max()), 4),
        "median_mean_error_sd": round(float(np.median(mean)), 4),
        "worst_sd_ratio": round(spread, 4),
        "sd_ratio_min": round(float(sd.min()), 4),
        "sd_ratio_max": round(float(sd.max()), 4),
    }


def course(
    way: Way, problem: Problem, truth: Mapping[str, ReferenceSummary], *, seed: int
) -> Course:
    """Fit a problem, checking the posterior of the global sites every `way.every` rounds."""
    reached: int | None = None
    seconds: list[float] = []
    for fit, spent in fits(way, problem, seed):
        seconds.append(spent)
        near = global_error(fit, problem, truth, cut=way.cut) < WITHIN
        reached = (reached or fit.progress.round) if near else None
    history = fit.history.head(reached or len(fit.history))
    errors, local = errors_of(fit, problem, truth, draws=way.draws, seed=seed)
    sent = int(history["bytes_up"].sum() + history["bytes_down"].sum())
    k_hat, effective = (last_of(fit.history, name) for name in ("k_hat", "effective"))
    return Course(reached, sent, errors, local, len(fit.history), seconds[-1], k_hat, effective)


def errors_of(
    fit: Fit, problem: Problem, truth: Mapping[str, ReferenceSummary], *, draws: int, seed: int = 0
) -> tuple[Errors, tuple[str, ...]]:
    """Return the errors of a fit's posterior, and which sites each client has its own of."""
    drawn = fit.draws(draws, seed=seed)
    found = problem.effects(all_sites(drawn.shared, drawn.own))
    clients = (len(fit.clients),)
    local = tuple(s for s in truth if s not in drawn.shared and found[s].shape[1:2] == clients)
    return compare(found, truth), local


def last_of(history: pd.DataFrame, name: str) -> float | None:
    """Return the last number that a method logged under a name; None if it logged none."""
    if name not in history or history[name].isna().all():
        return None
    return float(history[name].dropna().iloc[-1])


def fits(way: Way, problem: Problem, seed: int) -> Iterator[tuple[Fit, float]]:
    """Yield the fit after every `way.every` rounds and after the last, and the seconds it took so far.

    What is done with a fit before the next one is asked for does not count.
    """
    began = time.perf_counter()
    federation = federate(way.method, problem.data(), seed=seed)
    fit, spent = None, 0.0
    for where in run_rounds(federation, begin(federation), way.rounds):
        spent += time.perf_counter() - began
        fit = Fit(way.method, federation, where, way.rounds)
        if (
            where.round % way.every == 0
            and where.round < way.rounds
            and not federation.server.finished(where.server)
        ):
            yield fit, spent
        began = time.perf_counter()
    if fit is not None:
        yield fit, spent


def global_error(
    fit: Fit, problem: Problem, truth: Mapping[str, ReferenceSummary], *, cut: bool
) -> float:
    """Return the largest error of a global site's mean, in reference standard deviations.

    Args:
        fit: after some round.
        problem: the problem.
        truth: the reference.
        cut: cut the fit to one row of one client, on which draws of the global sites do not depend,
            to save time.
    """
    shared = (cut_to_one(fit) if cut else fit).draws(LOOKS).shared
    return float(
        compare(shared, {site: truth[site] for site in shared if site in truth}).of("mean").max()
    )


def cut_to_one(fit: Fit) -> Fit:
    """Return the fit of one row of one client."""
    data = fit.federation.data.select([0])
    row = replace(
        data,
        offsets=torch.tensor([0, 1]),
        fields={name: values[:1] for name, values in data.fields.items()},
    )
    one = replace(fit, federation=replace(fit.federation, data=row))
    table = tree_map(lambda v: v[:1], fit.progress.table)
    return replace(one, progress=replace(fit.progress, table=table))


def errors_of_summary(
    found: Mapping[str, ReferenceSummary], truth: Mapping[str, ReferenceSummary]
) -> Errors:
    """Return the errors of the summary of a posterior."""
    sites = [site for site in truth if site in found]
    return Errors(
        {s: np.asarray(np.abs(found[s].mean - truth[s].mean) / truth[s].sd) for s in sites},
        {s: np.asarray(found[s].sd / truth[s].sd) for s in sites},
    )
