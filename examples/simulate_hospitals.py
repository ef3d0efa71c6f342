"""Simulate the patients of `hierfl.datasets.five_hospitals`: messy rows, from a model whose numbers are known.

Usage: `python examples/simulate_hospitals.py > five_hospitals.csv`.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

SEED = 68
SIZES = {"north": 240, "south": 180, "east": 120, "west": 70, "island": 3}
TRUTH = {"Intercept": -0.4, "arm": -0.6, "age, a decade": 0.3, "lactate, mmol/L": 0.5}
SDS = {"Intercept": 0.5, "arm": 0.2}  # of hospitals


def simulated(seed: int = SEED) -> pd.DataFrame:
    """Return the rows as the hospitals would hand them over, faults included."""
    rng = np.random.default_rng(seed)
    frames = []
    for hospital, rows in SIZES.items():
        intercept, effect = rng.normal(list(TRUTH.values())[:2], list(SDS.values()))
        age = rng.normal(67.0, 11.0, rows).round()
        lactate = np.exp(rng.normal(0.6, 0.4, rows)).round(1)
        arm = rng.permutation(np.arange(rows) % 2)
        logit = intercept + effect * arm
        logit += TRUTH["age, a decade"] * (age - 67.0) / 10.0
        logit += TRUTH["lactate, mmol/L"] * (lactate - 2.0)
        days = rng.integers(0, 365, rows)
        frame = pd.DataFrame({"hospital": hospital, "age": age, "lactate": lactate})
        frame["admitted"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(days, unit="D")
        frame["sex"] = rng.choice(["female", "male"], rows)
        frame["ward"] = rng.choice(["medical", "surgical"], rows, p=[0.6, 0.4])
        frame["arm"] = np.where(arm == 1, "early", "usual")
        frame["readmitted"] = rng.binomial(1, 1.0 / (1.0 + np.exp(-logit)))
        frames.append(frame)
    return _with_faults(pd.concat(frames, ignore_index=True), rng)


def _with_faults(frame: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Return the rows with the faults of real tables."""
    frame.insert(0, "patient", [f"P{k:04d}" for k in rng.permutation(9000)[: len(frame)] + 1000])
    north = frame.index[frame["hospital"] == "north"]
    frame.loc[rng.choice(north, 12, replace=False), "sex"] = "male "  # a trailing blank
    frame.loc[rng.choice(north, 2, replace=False), "ward"] = "burns"  # a rare category
    frame.loc[rng.choice(len(frame), 40, replace=False), "lactate"] = np.nan
    frame.loc[north[7], "lactate"] = 54.0  # typed in mg/dL
    return frame


if __name__ == "__main__":
    simulated().to_csv(sys.stdout, index=False)
