"""The main job: heart disease at four hospitals that keep their patients' rows to themselves, `hierfl demo --out DIR`.

Four ways to predict who is ill, all of them logistic regressions on the same 27 columns (missing values are 0 and have an
indicator; no patient is dropped; units are fixed, so nothing is computed from held-out rows):

* local-only: a hospital alone. Coefficients ~ Normal(0, 2.5^2); posterior by Laplace's method.
* pooled: the same model and prior for all rows brought together, as if the hospitals were one.
* hierarchical MAP: a hospital's coefficients ~ Normal(mean, scale^2) with a mean and a scale for each, priors Normal(0, 2.5^2)
  and HalfNormal(0.5) (intercept: HalfNormal(1)); a point for all of them, in non-centred coordinates. No row leaves its hospital.
* hierarchical posterior: the same model; low-rank Gaussian of means and log scales, conditional Laplace of each hospital's
  coefficients; predictions average over draws. The 0.5 was chosen among 1, 0.5 and 0.25 by the ELBO of training rows alone.

Each is scored in three settings:

* "trained": patients held out of the hospitals that were fitted.
* "unseen": each hospital left out in turn, and nothing of it known. A hierarchical method draws its coefficients from
  p(own | global); local-only lends the model of another hospital, its scores averaged over which.
* "joined": the same hospital after it inferred its own coefficients from its own training rows, the global level fixed. For
  local-only that is the hospital's own model; pooled has nothing to infer, and stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import pandas as pd
import pyro.distributions as dist
import torch
from rich.table import Table

from hierfl.data.clients import ClientData
from hierfl.datasets import heart_disease
from hierfl.demo import scores as report
from hierfl.demo.scores import JOINED, LOCAL, MAP, POOLED, POSTERIOR, TRAINED, UNSEEN
from hierfl.guides import conditional, delta
from hierfl.guides.global_sites import low_rank_normal
from hierfl.method import Method
from hierfl.methods.fedsvi import fedsvi
from hierfl.models import logistic
from hierfl.optimisers import Adam
from hierfl.posterior.new_clients import predict_from_prior
from hierfl.posterior.prediction import Prediction
from hierfl.runs.fit import fit
from hierfl.runs.result import Fit

Say = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much work: rounds of the posterior, of the MAP, of a joining hospital's MAP; draws to predict with and to save."""

    rounds: int = 60
    map_rounds: int = 100
    joining: int = 100
    draws: int = 200
    saved: int = 300


QUICK = Effort(rounds=2, map_rounds=3, joining=2, draws=20, saved=50)


@dataclass(frozen=True, eq=False)
class Result:
    """What the demo found: a row a held-out patient, the long table, the printed one, its reading, and the files written."""

    patients: pd.DataFrame
    scores: pd.DataFrame
    table: Table
    reading: list[str]
    files: dict[Path, str]


def run(
    out: str | Path,
    *,
    seed: int = 0,
    quick: bool = False,
    workers: int = 1,
    say: Say = lambda line: None,
) -> Result:
    """Fit, score, write.

    Args:
        out: folder to write to, made if it is not there.
        seed: of the split into training and held-out patients, and of every fit and draw.
        quick: hardly any rounds: to see that it runs. The numbers then mean nothing.
        workers: processes that fit without one hospital, beside this one; 1: this one does it all. No number depends on it.
        say: told what is being done.

    Raises:
        OSError: the folder cannot be written to; found out before any work.
    """
    folder = writable(Path(out))
    effort = QUICK if quick else Effort()
    train, test = heart_disease().split(0.7, seed=seed)
    say(
        f"{train.num_clients} hospitals, {train.num_rows} patients to train on, {test.num_rows} held out"
    )
    with beside(workers) as spread:
        others = spread(
            partial(left_out, rows=(train, test), effort=effort, seed=seed), train.names
        )
        say("fitting the four methods")
        fits = fit_all(train, effort, seed)
        found = predictions(fits, test, effort, seed)
        parts = [
            report.patients(prediction, TRAINED, method) for method, prediction in found.items()
        ]
        parts.append(report.patients(found[LOCAL], JOINED, LOCAL))
        for name in train.names:
            say(f"leaving out {name}")
            parts += next(others)
    patients = pd.concat(parts, ignore_index=True)
    scores = report.summary(patients)
    files = write(folder, fits[POSTERIOR].posterior(effort.saved, seed=seed), patients, scores)
    say("writing the report")
    title = "Heart disease at four hospitals: the hierarchical posterior"
    told = fits[POSTERIOR].report(
        folder / "report.html",
        held_out=test,
        alone=fits[LOCAL],
        title=title,
        draws=effort.draws,
        seed=seed,
    )
    files[told.path] = (
        f"a page on the hierarchical posterior, {len(told.warnings)} of its {len(told.checks)} questions with a warning"
    )
    return Result(patients, scores, report.table(scores), report.reading(patients), files)


@contextmanager
def beside(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A `map` whose work is done by other processes, or by this one when its results are asked for."""
    if workers <= 1:
        yield map
        return
    here = (torch.get_default_dtype(),)
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_as_here, initargs=here
    ) as pool:
        yield pool.map


def _as_here(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def writable(folder: Path) -> Path:
    """Make the folder, and write to it.

    Raises:
        OSError: neither can be done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".hierfl"
    probe.touch()
    probe.unlink()
    return folder


def write(
    folder: Path, posterior: Any, patients: pd.DataFrame, scores: pd.DataFrame
) -> dict[Path, str]:
    """Posterior, scores and figures: each file with what it holds."""
    posterior.to_netcdf(str(folder / "posterior.nc"))
    scores.to_csv(
        folder / "scores.csv", index=False, float_format="%.10g"
    )  # the last bits depend on the machine
    forest, curve = report.pictures(posterior["posterior"], patients, folder)
    return {
        folder
        / "posterior.nc": "draws of all coefficients, by hospital and global, for arviz.from_netcdf",
        folder / "scores.csv": "every score by setting, method, hospital and metric",
        forest: "the coefficients by hospital, over the band where the global level expects a hospital's",
        curve: "whether predicted probabilities come true, local-only and hierarchical",
    }


# ------------------------------------------------------------------------------------------------ the four methods
def alone() -> Method:
    """Logistic regression with a fixed prior: nothing global to learn, so one round of nothing fits it."""
    model = logistic(prior_loc=0.0, prior_scale=2.5, intercept_scale=2.5, centred=True)
    return fedsvi(model, conditional)


def hierarchical_map() -> Method:
    """The hierarchy by a point: non-centred, since a centred joint density has no maximum where scales go to 0."""
    steps = Adam(0.1)
    return fedsvi(
        hierarchy(centred=False), delta, optimiser=steps, local_optimiser=steps, average=0.0
    )


def hierarchical_posterior() -> Method:
    """The hierarchy by conditional Laplace; centred or not is all one to it, and so the coefficients are sites themselves."""
    guide = conditional(newton_steps=2, shared=partial(low_rank_normal, init_scale=0.3))
    return fedsvi(hierarchy(centred=True), guide, optimiser=Adam(0.1), num_particles=4)


def hierarchy(*, centred: bool) -> Any:
    """Varying intercept and slopes, a mean and a scale for each."""
    return logistic(
        prior_scale=dist.HalfNormal(0.5), intercept_scale=dist.HalfNormal(1.0), centred=centred
    )


def as_one(data: ClientData) -> ClientData:
    """All rows as those of a single client."""
    return replace(data, offsets=torch.tensor([0, data.num_rows]), names=("all hospitals",))


def fit_all(train: ClientData, effort: Effort, seed: int) -> dict[str, Fit]:
    """The four methods on the same rows; eagerly, since a minute does not repay compiling."""
    go = partial(fit, seed=seed, compile=False, progress=False)
    return {
        LOCAL: go(alone(), train, rounds=1),
        POOLED: go(alone(), as_one(train), rounds=1),
        MAP: go(hierarchical_map(), train, rounds=effort.map_rounds),
        POSTERIOR: go(hierarchical_posterior(), train, rounds=effort.rounds),
    }


# ------------------------------------------------------------------------------------------------ the three settings
def predictions(
    fits: dict[str, Fit], test: ClientData, effort: Effort, seed: int
) -> dict[str, Prediction]:
    """Of held-out patients of the hospitals that were fitted."""
    found = {
        m: fits[m].predict(test, draws=1 if m == MAP else effort.draws, seed=seed)
        for m in fits
        if m != POOLED
    }
    return found | {POOLED: pooled(fits[POOLED], test, effort, seed)}


def pooled(fitted: Fit, test: ClientData, effort: Effort, seed: int) -> Prediction:
    """Of anybody's patients, by the one model of all rows."""
    return replace(fitted.predict(as_one(test), draws=effort.draws, seed=seed), data=test)


def left_out(
    name: str, *, rows: tuple[ClientData, ClientData], effort: Effort, seed: int
) -> list[pd.DataFrame]:
    """One hospital's held-out patients, unseen and (but for local-only) joined, by fits of the other three's training rows.

    Args:
        name: of the hospital.
        rows: training and held-out rows of all hospitals.
        effort: how much work.
        seed: of fits and draws.
    """
    train, test = rows
    own, new = train.select([name]), test.select([name])
    lenders = [other for other in train.names if other != name]
    fits = fit_all(train.select(lenders), effort, seed)
    found = []
    for lender in lenders:
        lent = fits[LOCAL].predict(replace(new, names=(lender,)), draws=effort.draws, seed=seed)
        found.append(report.patients(replace(lent, data=new), UNSEEN, LOCAL))
    for setting in (UNSEEN, JOINED):
        found.append(report.patients(pooled(fits[POOLED], new, effort, seed), setting, POOLED))
    for method in (MAP, POSTERIOR):
        unseen = predict_from_prior(fits[method], new, draws=effort.draws, seed=seed)
        joined = (
            fits[method]
            .personalise(own, rounds=effort.joining)
            .predict(new, draws=1 if method == MAP else effort.draws, seed=seed)
        )
        found += [report.patients(unseen, UNSEEN, method), report.patients(joined, JOINED, method)]
    return found
