"""Patients of eight sites in three regions, with columns of every kind that a formula reads."""

import numpy as np
import pandas as pd

SITES = 8


def patients(rows: int = 24, *, seed: int = 0) -> pd.DataFrame:
    """Return rows of `SITES` sites.

    Columns: site, region, ward (three at each site), year, age, dose (positive), sex (three
    levels), beds (one at each site), n and wins (wins of n), y (real), ill (0/1), visits (counts),
    kind (three words), grade (ordered), days and died (times with right-censoring), w (weights).
    """
    rng = np.random.default_rng(seed)
    n = SITES * rows
    site = np.repeat(np.arange(SITES), rows)
    frame = pd.DataFrame(
        {
            "site": [f"s{k}" for k in site],
            "region": np.array(["north", "south", "west"])[np.minimum(site // 3, 2)],
            "ward": [f"w{i % 3}" for i in range(n)],
            "year": 2020 + np.arange(n) % 4,
            "age": rng.normal(50.0, 10.0, n),
            "dose": rng.gamma(2.0, 1.0, n) + 0.1,
            "sex": rng.choice(["f", "m", "x"], n, p=[0.4, 0.3, 0.3]),
            "beds": site * 10.0 + 5.0,
            "n": rng.integers(3, 9, n),
            "w": rng.integers(1, 3, n).astype(float),
        }
    )
    own = rng.normal(0.0, 0.5, SITES)[site]
    eta = 0.5 + own + 0.04 * (frame["age"] - 50.0) + 0.3 * (frame["sex"] == "m")
    frame["y"] = eta + rng.normal(0.0, 0.8, n)
    frame["ill"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-eta))).astype(int)
    frame["visits"] = rng.poisson(np.exp(0.5 * eta))
    frame["wins"] = rng.binomial(frame["n"], 1.0 / (1.0 + np.exp(-eta)))
    frame["kind"] = rng.choice(["cold", "flu", "other"], n)
    words = pd.cut(
        eta + rng.logistic(size=n), [-np.inf, 0.0, 1.0, np.inf], labels=["low", "mid", "high"]
    )
    frame["grade"] = words
    frame["days"] = rng.exponential(np.exp(0.3 * eta))
    frame["died"] = (rng.random(n) < 0.7).astype(int)
    return frame
