"""The demo `hierfl demo`: heart disease at four hospitals that do not share rows.

Four logistic regressions on the same 27 columns; nothing is computed from held-out rows.

* local-only: each hospital alone. Coefficients ~ Normal(0, 2.5^2); posterior by Laplace's method.
* pooled: the same model and prior for the rows of all hospitals together.
* hierarchical MAP: a hospital's coefficients ~ Normal(mean, scale^2), one mean and scale for each
  coefficient, ~ Normal(0, 2.5^2) and HalfNormal(0.5), which the ELBO of training rows chose
  (intercept: HalfNormal(1)); a point in non-centered coordinates.
* hierarchical posterior: the same model by two_stage. Predictions average over draws.

Held-out patients are scored at hospitals in the fit ("trained"). The two smallest hospitals are
also left out of the fit, one at a time, and scored as new ones: before any of their rows are seen
("unseen": from p(own | global), or the other hospitals' models) and after inferring their own
parameters ("joined").
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pandas as pd
import pyro.distributions as dist
import torch
from rich.table import Table

from hierfl.core.disk import claim
from hierfl.data.clients import ClientData
from hierfl.datasets import heart_disease
from hierfl.demo import patient_scores as report
from hierfl.demo.patient_scores import JOINED, LOCAL, MAP, POOLED, POSTERIOR, TRAINED, UNSEEN
from hierfl.engine.federation import Settings
from hierfl.guides import conditional, delta
from hierfl.method import Method
from hierfl.methods.posteriors.fedsvi import fedsvi
from hierfl.methods.stages.two_stage import two_stage
from hierfl.models import regression
from hierfl.optimizers import Adam
from hierfl.posterior.new_clients import predict_from_prior
from hierfl.posterior.prediction import Prediction
from hierfl.runs.fit import fit
from hierfl.runs.joining import together
from hierfl.runs.result import Fit

Say = Callable[[str], None]
WHOLE = "all hospitals"
NEW = ("switzerland", "va")  # hospitals that are also left out of the fit, one at a time
FILES = ("posterior.nc", "scores.csv", "coefficients.png", "calibration.png", "report.html")


@dataclass(frozen=True)
class Effort:
    """How much work the demo does; `rounds` None: until done; `joining`: rounds of MAP at a new hospital."""

    rounds: int | None = None
    map_rounds: int = 60
    joining: int = 35
    draws: int = 200
    saved: int = 300
    columns: tuple[str, ...] | None = None


QUICK = Effort(
    rounds=1,
    map_rounds=3,
    joining=2,
    draws=20,
    saved=50,
    columns=("sex", "exang", "oldpeak", "ca_missing"),
)


@dataclass(frozen=True, eq=False)
class Result:
    """Patients (a row each), scores in long form, what to print, and what `files` hold, by path."""

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
    say: Say = lambda line: None,
) -> Result:
    """Fit the four methods, score them and write the results to the folder `out`.

    `seed` is that of the split, fits and draws. `quick` takes few features, rounds and draws; its
    numbers mean nothing. `say` gets a line for each step. An OSError says at once that `out` is not
    writable, or not the demo's.
    """
    folder = Path(out)
    claim(folder, FILES)
    effort = QUICK if quick else Effort()
    train, test = hospitals(effort.columns).split(0.7, seed=seed)
    say(
        f"{train.num_clients} hospitals, {train.num_rows} patients to train on, {test.num_rows} "
        "held out"
    )
    fits, patients = _fits_and_patients(train, test, effort, seed, say)
    scores = report.summary(patients)
    files = write(folder, fits[POSTERIOR].posterior(effort.saved, seed=seed), patients, scores)
    say("writing the report")
    title = "Heart disease at four hospitals: the hierarchical posterior"
    page = fits[POSTERIOR].report(
        folder / "report.html",
        held_out=test,
        local_only=fits[LOCAL],
        title=title,
        draws=effort.draws,
        seed=seed,
    )
    files[page.path] = (
        "report on the hierarchical posterior; "
        f"{len(page.warnings)} of its {len(page.checks)} checks gave a warning"
    )
    return Result(patients, scores, report.table(scores), report.reading(patients), files)


def _fits_and_patients(
    train: ClientData, test: ClientData, effort: Effort, seed: int, say: Say
) -> tuple[dict[str, Fit], pd.DataFrame]:
    say("fitting the four methods")
    fits = fit_all(train, effort, seed)
    predicted = predictions(fits, test, effort, seed)
    frames = [report.patients(predicted[method], TRAINED, method) for method in predicted]
    for name in NEW:
        say(f"leaving out {name}")
        frames += left_out(name, train, test, fits[LOCAL], effort, seed)
    return fits, pd.concat(frames, ignore_index=True)


def hospitals(columns: tuple[str, ...] | None = None) -> ClientData:
    """Return the patients of the four hospitals, with some of the 27 features or with all."""
    data = heart_disease()
    if columns is None:
        return data
    names = data.features["x"]
    x = data.fields["x"][:, [names.index(name) for name in columns]]
    return replace(data, fields={**data.fields, "x": x}, features={**data.features, "x": columns})


def write(
    folder: Path, posterior: Any, patients: pd.DataFrame, scores: pd.DataFrame
) -> dict[Path, str]:
    """Write posterior, scores and figures; return each file's path -> its content in words."""
    posterior.to_netcdf(str(folder / "posterior.nc"))
    # Ten digits: the last bits depend on the machine.
    scores.to_csv(folder / "scores.csv", index=False, float_format="%.10g")
    forest, curve = report.pictures(posterior["posterior"], patients, folder)
    return {
        folder / "posterior.nc": "draws of all coefficients, for arviz.from_netcdf",
        folder / "scores.csv": "scores by setting, method, hospital and metric",
        forest: "coefficients by hospital, over the interval that the global level predicts",
        curve: "calibration of predicted probabilities, local-only and hierarchical",
    }


def alone() -> Method:
    """Return logistic regression with a fixed prior; one round completes the fit."""
    model = regression(
        "bernoulli", prior_loc=0.0, prior_scale=2.5, intercept_scale=2.5, centered=True
    )
    return fedsvi(model, conditional)


def hierarchical_map() -> Method:
    """Return the hierarchy by point estimates; a centered density is unbounded as scales go to 0."""
    # gradients are exact: with a short memory, 60 rounds come nearer to the mode than 100 without
    steps = Adam(0.4, betas=(0.5, 0.9))
    return fedsvi(
        hierarchy(centered=False), delta, optimizer=steps, local_optimizer=steps, average=0.0
    )


def hierarchy(*, centered: bool) -> Any:
    """Return logistic regression with varying intercept and slopes, a mean and a scale for each."""
    return regression(
        "bernoulli",
        prior_scale=dist.HalfNormal(0.5),
        intercept_scale=dist.HalfNormal(1.0),
        centered=centered,
    )


def as_one(data: ClientData, left_out: str | None = None) -> ClientData:
    """Return all rows, or those of all clients but one, as the rows of a single client."""
    name = WHOLE if left_out is None else f"{WHOLE} but {left_out}"
    rows = data.select([client for client in data.names if client != left_out])
    return replace(rows, offsets=torch.tensor([0, rows.num_rows]), names=(name,))


def with_pools(data: ClientData) -> ClientData:
    """Return the hospitals and, as further clients, their pooled rows, with and without each of NEW.

    Clients of a model without global sites do not depend on each other: one fit serves all.
    """
    return reduce(together, (as_one(data, left_out) for left_out in (None, *NEW)), data)


def fit_all(
    train: ClientData, effort: Effort, seed: int, *, weighted: int = 800, local: Fit | None = None
) -> dict[str, Fit]:
    """Fit the methods to the same rows, eagerly; `weighted` draws; `local`: that of each alone if it is there."""
    go = partial(fit, seed=seed, progress=False, settings=Settings(compile=False))
    with warnings.catch_warnings():
        if effort.rounds is not None:  # quick: that too few rounds are taken is known
            warnings.filterwarnings("ignore", message="the rounds ended while")
        # predictions take 200 of them, posterior.nc 300; 800 seldom need a second weighting round
        method = two_stage(hierarchy(centered=True), draws=weighted)
        posterior = go(method, train, rounds=effort.rounds)
    return {
        LOCAL: local or go(alone(), with_pools(train), rounds=1),
        MAP: go(hierarchical_map(), train, rounds=effort.map_rounds),
        POSTERIOR: posterior,
    }


def predictions(
    fits: dict[str, Fit], test: ClientData, effort: Effort, seed: int
) -> dict[str, Prediction]:
    """Predict the held-out patients of the hospitals that were fitted, with each method."""
    predicted = {
        m: fits[m].predict(test, draws=1 if m == MAP else effort.draws, seed=seed) for m in fits
    }
    return predicted | {POOLED: pooled(fits[LOCAL], test, as_one(test), effort.draws, seed)}


def pooled(fitted: Fit, test: ClientData, one: ClientData, draws: int, seed: int) -> Prediction:
    """Predict patients of any hospital by the one model of pooled rows; `one`: `test` as its client's."""
    return replace(fitted.predict(one, draws=draws, seed=seed), data=test)


def left_out(
    name: str, train: ClientData, test: ClientData, local: Fit, effort: Effort, seed: int
) -> list[pd.DataFrame]:
    """Score a hospital's patients by fits to the others and by `local`, all hospitals' own, by method and setting."""
    own, new = train.select([name]), test.select([name])
    others = [other for other in train.names if other != name]
    # own coefficients, not the few global draws, make the error of these scores
    fits = fit_all(train.select(others), effort, seed, weighted=500, local=local)
    frames = []
    for other in others:
        lent = local.predict(replace(new, names=(other,)), draws=effort.draws, seed=seed)
        frames.append(report.patients(replace(lent, data=new), UNSEEN, LOCAL))
    at_home = local.predict(new, draws=effort.draws, seed=seed)
    frames.append(report.patients(at_home, JOINED, LOCAL))
    one = replace(new, names=as_one(train, name).names)
    of_pool = pooled(local, new, one, 10 * effort.draws, seed)
    frames += [report.patients(of_pool, setting, POOLED) for setting in (UNSEEN, JOINED)]
    for method in (MAP, POSTERIOR):
        # every draw has coefficients of its own: 200 would err by 0.012 nats a patient, and by 0.008
        # after the hospital has joined
        unseen = predict_from_prior(fits[method], new, draws=10 * effort.draws, seed=seed)
        joined = (
            fits[method]
            .personalize(own, rounds=effort.joining)
            .predict(new, draws=1 if method == MAP else 4 * effort.draws, seed=seed)
        )
        frames += [report.patients(unseen, UNSEEN, method), report.patients(joined, JOINED, method)]
    return frames
