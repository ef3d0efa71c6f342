"""Formulas against bambi on simulated data.

`HIERFL_BAMBI=PYTHON python -m benchmarks.against_bambi [FAMILY ...]`.

The same formula, `y ~ x + (1 | g)`, the same priors and the same rows: bambi samples all rows
together by PyMC, `hierfl.fit` never pools them. Each data set has eight clients of fifteen rows.
The table has the largest difference of posterior means in posterior sds, and in standard errors of
both runs' Monte Carlo error. Results are kept in the user's cache folder, so that a run that was
stopped goes on. bambi is an optional extra of the benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch
from rich.console import Console
from rich.table import Table

import hierfl
from benchmarks.pooled_nuts import ROOT
from benchmarks.reference import cache
from hierfl.models import families

VARIABLE = "HIERFL_BAMBI"
CLIENTS, ROWS, SETS = 8, 15, 20
WORDS = ("a", "b", "c")
# Family -> bambi's name, its link, and parameter -> (bambi's name, value that is simulated, prior,
# bambi's prior).
Parameter = tuple[str, float, Any, list[Any]]
POSITIVE: tuple[Any, list[Any]] = (dist.Gamma(2.0, 0.5), ["Gamma", {"alpha": 2.0, "beta": 0.5}])
SCALE: tuple[Any, list[Any]] = (dist.HalfNormal(1.0), ["HalfNormal", {"sigma": 1.0}])
SHARE: tuple[Any, list[Any]] = (dist.Beta(2.0, 2.0), ["Beta", {"alpha": 2.0, "beta": 2.0}])
PAIRS: dict[str, tuple[str, str, dict[str, Parameter]]] = {
    "gaussian": ("gaussian", "identity", {"sigma": ("sigma", 0.8, *SCALE)}),
    "student": (
        "t",
        "identity",
        {"sigma": ("sigma", 0.6, *SCALE), "nu": ("nu", 5.0, *POSITIVE)},
    ),
    "bernoulli": ("bernoulli", "logit", {}),
    "binomial": ("binomial", "logit", {}),
    "beta_binomial": ("beta_binomial", "logit", {"phi": ("kappa", 5.0, *POSITIVE)}),
    "poisson": ("poisson", "log", {}),
    "negative_binomial": ("negativebinomial", "log", {"shape": ("alpha", 3.0, *POSITIVE)}),
    "zero_inflated_poisson": ("zero_inflated_poisson", "log", {"zi": ("psi", 0.3, *SHARE)}),
    "gamma": ("gamma", "log", {"shape": ("alpha", 3.0, *POSITIVE)}),
    "beta": ("beta", "logit", {"phi": ("kappa", 6.0, *POSITIVE)}),
    "categorical": ("categorical", "softmax", {}),
    "exponential": ("exponential", "log", {}),
    "weibull": ("weibull", "log", {"shape": ("alpha", 1.5, *POSITIVE)}),
}


def simulated(name: str, seed: int) -> pd.DataFrame:
    """Return the rows of one data set."""
    rng, family = np.random.default_rng(seed), families.named(name)
    torch.manual_seed(seed)
    group = np.repeat(np.arange(CLIENTS), ROWS)
    x, trials = rng.normal(size=group.size), rng.integers(2, 8, group.size)
    eta = torch.as_tensor(0.3 + 0.5 * x + rng.normal(0.0, 0.5, CLIENTS)[group])
    if name == "categorical":
        eta = torch.stack([eta, 0.2 - 0.4 * torch.as_tensor(x)], -1)
    values = {n: torch.tensor(p[1], dtype=torch.float64) for n, p in PAIRS[name][2].items()}
    more = {"trials": torch.as_tensor(trials).double()} if "trials" in family.required else {}
    y = family.of(eta, **values, **more).sample().numpy()
    labels = np.array(WORDS)[y.astype(int)] if name == "categorical" else y
    return pd.DataFrame({"g": [f"g{k}" for k in group], "x": x, "n": trials, "y": labels})


def ours(name: str, frame: pd.DataFrame) -> dict[str, list[float]]:
    """Return mean, sd and standard error of each number by `hierfl.fit`."""
    _, _, parameters = PAIRS[name]
    response = "y | trials(n)" if "trials" in families.named(name).required else "y"
    priors = {
        "Intercept": dist.Normal(0.0, 1.5),
        "x": dist.Normal(0.0, 1.0),
        "sd": dist.HalfNormal(1.0),
    }
    made = hierfl.formula(
        f"{response} ~ x + (1 | g)",
        name,
        clients="g",
        priors={**priors, **{n: p[2] for n, p in parameters.items()}},
    ).on(frame, min_count=1)
    fit = hierfl.fit(made, frame, seed=0, progress=False)
    effective = float(fit.progress.history[-1].get("effective", 1000.0))
    drawn = fit.draws(4000).shared
    slope = drawn["x"].double()
    found = {"x": slope, "sd": drawn["sd_g"].double()}
    found["Intercept"] = drawn["Intercept"].double() - made.agreed.design["x"].mean * slope
    found |= {n: drawn[n].double() for n in parameters}
    return {
        f"{n}[{j}]": [float(v.mean()), float(v.std()), float(v.std()) / effective**0.5]
        for n, value in found.items()
        for j, v in enumerate(value.reshape(len(value), -1).unbind(1))
    }


def by_bambi(name: str, frame: pd.DataFrame) -> dict[str, list[float]]:
    """Return the same numbers by bambi, in a process of its own."""
    theirs, link, parameters = PAIRS[name]
    normal = ["Normal", {"mu": 0.0, "sigma": ["HalfNormal", {"sigma": 1.0}]}]
    asked = {
        "rows": frame.to_dict("list"),
        "formula": "p(y, n) ~ x + (1|g)"
        if "trials" in families.named(name).required
        else "y ~ x + (1|g)",
        "family": theirs,
        "link": link,
        "priors": {
            "Intercept": ["Normal", {"mu": 0.0, "sigma": 1.5}],
            "x": ["Normal", {"mu": 0.0, "sigma": 1.0}],
            "1|g": normal,
            **{p[0]: p[3] for p in parameters.values()},
        },
    }
    python = os.environ.get(VARIABLE) or sys.executable
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "asked.json", Path(folder) / "out.json"]
        files[0].write_text(json.dumps(asked))
        subprocess.run(
            [python, "-m", "benchmarks.bambi_sampler", *map(str, files)],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        table: dict[str, list[float]] = json.loads(files[1].read_text())
    found: dict[str, list[float]] = {}
    names = {"Intercept": "Intercept", "x": "x", "1|g_sigma": "sd"} | {
        p[0]: n for n, p in parameters.items()
    }
    for key, row in table.items():
        base = key.partition("[")[0]
        if base in names:
            ours_of = names[base]
            j = sum(1 for k in found if k.startswith(f"{ours_of}["))
            flipped = (
                [1.0 - row[0], *row[1:]] if base == "psi" else row
            )  # theirs is the share of counts, not of zeros
            found[f"{ours_of}[{j}]"] = flipped
    return found


def compared(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the largest differences of means, in sds and in standard errors, and the ratios of sds."""
    if set(one) != set(other):
        raise ValueError(f"the runs have different numbers: {sorted(set(one) ^ set(other))}")
    sds = [abs(one[n][0] - other[n][0]) / other[n][1] for n in one]
    errors = [abs(one[n][0] - other[n][0]) / np.hypot(one[n][2], other[n][2]) for n in one]
    ratios = [one[n][1] / other[n][1] for n in one]
    return {
        "sds": max(sds),
        "errors": max(errors),
        "low": min(ratios),
        "high": max(ratios),
        "numbers": len(one),
    }


def shown(kept: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of what has been run."""
    table = Table(title="Formulas against bambi: the largest differences over data sets")
    for column in (
        "family",
        "data sets",
        "means, sd",
        "median, sd",
        "means, standard errors",
        "sd ratios",
    ):
        table.add_column(column, justify="left" if column == "family" else "right")
    for name in PAIRS:
        rows = list(kept.get(name, {}).values())
        if rows:
            sds, errors = ([row[key] for row in rows] for key in ("sds", "errors"))
            ratios = f"{min(r['low'] for r in rows):.2f}-{max(r['high'] for r in rows):.2f}"
            table.add_row(
                name,
                str(len(rows)),
                f"{max(sds):.3f}",
                f"{np.median(sds):.3f}",
                f"{max(errors):.1f}",
                ratios,
            )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Run what has not been run yet, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_bambi")
    parser.add_argument("families", nargs="*", default=list(PAIRS), metavar="FAMILY")
    parser.add_argument("--sets", type=int, default=SETS)
    args = parser.parse_args(argv)
    file = cache() / "against_bambi.json"
    kept: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for seed in range(
        args.sets
    ):  # all families of one data set first, so that a run that is stopped has some of each
        for name in args.families:
            if str(seed) in kept.setdefault(name, {}):
                continue
            frame = simulated(name, seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kept[name][str(seed)] = compared(ours(name, frame), by_bambi(name, frame))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(kept))
    Console(width=140).print(shown(kept))


if __name__ == "__main__":
    main()
