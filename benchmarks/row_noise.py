"""What a budget for each patient costs in posterior sd: `python -m benchmarks.row_noise [--write]`.

Heart disease, 920 patients of four hospitals: a logistic regression on age, sex and six
measurements whose intercept and slopes vary between hospitals, by `two_stage`. With `row_noise`
clients send factors from clipped rows with noise; delta is 1e-4. The table gives, over the means
and the hospitals' own intercepts and slopes: the posterior sd in sds of the posterior without
noise; how far posterior means are from those without noise, as a root mean square in sds of the
posterior with noise; and how far they should be, if the noise is what the posterior takes it for:
the root of 1 minus the squared ratio of the sds. Means over five noises. With --write the table
goes to docs/differential_privacy.md.

A second table is of a Gaussian response: the largest heart rate, given age, sex and ST depression,
with intercepts that vary between hospitals and a known noise scale. `sums` are noisy sums, sent
once; `factors` the same model by steps, which it takes where the scale is a field of the rows.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch
from numpy.typing import NDArray

import hierfl
from benchmarks.page_tables import Titled, put_tables
from hierfl.demo.run import hierarchy, hospitals
from hierfl.methods import two_stage
from hierfl.program.sites import Model
from hierfl.summaries.row_noise import RowNoise

PAGE = Path(__file__).parents[1] / "docs" / "differential_privacy.md"
BUDGETS = (1e5, 32.0, 8.0, 4.0, 2.0, 1.0)
DELTA, LONGEST, NOISES, COLUMNS = 1e-4, 2.5, 5, 8
LARGEST, SCALE = 3.0, 0.85  # of standardized heart rates: the bound, and the noise scale
RATE, GIVEN = "thalach", ["age", "sex", "oldpeak"]


def rows() -> hierfl.ClientData:
    """Return the hospitals' rows with the columns that vary most."""
    data = hospitals()
    x = data.fields["x"]
    kept = x.var(0).topk(COLUMNS).indices.sort().values
    return data.with_fields(x=x[:, kept])


def heart_rates() -> hierfl.ClientData:
    """Return standardized heart rates by age, sex and ST depression, and their known noise scale."""
    frame = hierfl.datasets.heart_disease("nan").frame("hospital")
    frame = frame.dropna(subset=[RATE, *GIVEN])
    table = frame[[RATE, *GIVEN]].to_numpy(dtype=np.float32)
    table = (table - table.mean(0)) / table.std(0)
    names, place = np.unique(frame["hospital"].to_numpy(dtype=str), return_inverse=True)
    x, y = torch.from_numpy(table[:, 1:]), torch.from_numpy(table[:, 0])
    scale = torch.full_like(y, SCALE)
    rows = torch.from_numpy(place)
    return hierfl.ClientData.from_arrays(rows, names=list(names), x=x, y=y, scale=scale)


def gaussian(scale: float | str) -> Model:
    """Return a regression of heart rates with a known noise scale, or one that a field gives."""
    options = {"slopes": "global", "prior_scale": dist.HalfNormal(0.5), "centered": True}
    return hierfl.models.regression("gaussian", priors={"sigma": scale}, **options)


def moments(
    data: hierfl.ClientData,
    how: RowNoise | None,
    model: Model | None = None,
    names: Sequence[str] = ("intercept_loc", "slope_loc", "intercept", "slope"),
) -> tuple[NDArray[np.float64], ...]:
    """Return posterior means and sds of all means, intercepts and slopes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of k-hat: draws with noise are not weighed
        method = two_stage(model or hierarchy(centered=True), draws=2000, row_noise=how)
        fitted = hierfl.fit(method, data, progress=False)
        found = fitted.posterior(2000, seed=0, correct=None)["posterior"]
    each = [found[name].to_numpy().reshape(2000, -1) for name in names]
    together = np.concatenate(each, 1)
    return together.mean(0), together.std(0)


def table() -> Titled:
    """Return what each budget costs."""
    data = rows()
    mean, sd = moments(data, None)
    lines = []
    for epsilon in BUDGETS:
        runs = []
        for secret in range(NOISES):
            how = RowNoise(epsilon=epsilon, delta=DELTA, max_row_norm=LONGEST, secret=secret)
            noisy, wide = moments(data, how)
            wider = wide / sd
            off = np.sqrt((((noisy - mean) / wide) ** 2).mean())
            should = np.sqrt(np.clip(1.0 - wider**-2.0, 0.0, None).mean())
            runs.append((how.noise, wider.mean(), off, should))
        average = np.mean(runs, 0)
        said = "100,000 (clipped rows alone)" if epsilon == BUDGETS[0] else f"{epsilon:g}"
        lines.append((said, *(f"{value:.2f}" for value in average)))
        print(*lines[-1], flush=True)
    columns = ["epsilon", "noise z", "sd, ratio", "means off, sd", "as they should be, sd"]
    frame = pd.DataFrame(lines, columns=columns)
    return Titled("Budgets for each patient", frame.set_index("epsilon"))


def table_of_sums() -> Titled:
    """Return what each budget costs of a Gaussian response, by sums and by factors."""
    data, lines = heart_rates(), []
    names = ("intercept_loc", "slope", "intercept")
    mean, sd = moments(data, None, gaussian(SCALE), names)
    bounds: dict[str, Any] = {"delta": DELTA, "max_row_norm": LONGEST}
    for epsilon in BUDGETS:
        averages = []
        for model, more in (
            (gaussian(SCALE), {"max_response": LARGEST}),
            (gaussian("scale"), {"max_slope": LARGEST / SCALE**2, "max_curvature": SCALE**-2}),
        ):
            runs = []
            for secret in range(NOISES):
                how = RowNoise(epsilon=epsilon, secret=secret, **(bounds | more))
                noisy, wide = moments(data, how, model, names)
                off = np.sqrt((((noisy - mean) / wide) ** 2).mean())
                runs.append(((wide / sd).mean(), off))
            averages += list(np.mean(runs, 0))
        said = "100,000 (clipped rows alone)" if epsilon == BUDGETS[0] else f"{epsilon:g}"
        lines.append((said, *(f"{value:.2f}" for value in averages)))
        print(*lines[-1], flush=True)
    columns = [
        "epsilon",
        "sums: sd, ratio",
        "means off, sd",
        "factors: sd, ratio",
        "means off, sd ",
    ]
    frame = pd.DataFrame(lines, columns=columns)
    return Titled("Budgets for each patient, Gaussian response", frame.set_index("epsilon"))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_noise")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    write = parser.parse_args(argv).write
    found = [table(), table_of_sums()]
    if write:
        put_tables(PAGE, "row noise", *found)


if __name__ == "__main__":
    main()
