"""Measurement error in a covariate: how much does blood pressure, read once, understate its part in heart disease?

Usage: `python examples/recipes/measurement_error.py [--smoke]`. The data ship with hierfl (UCI
heart disease, Detrano et al. 1989). One reading of systolic pressure varies about a patient's usual
pressure with an sd of some 10 mm Hg.
"""

from __future__ import annotations

import sys

import pyro
import pyro.distributions as dist
import torch

import hierfl

READING = (
    0.5  # sd of a reading about the usual pressure, in units of 20 mm Hg; it is taken as known
)


def model(batch: hierfl.ClientBatch) -> None:
    """Probit regression on the usual pressure, of which `reading` is one noisy look.

    usual ~ Normal(m, s), reading ~ Normal(usual, READING), ill = (intercept + slope usual + ... +
    Normal(0, 1) > 0). The usual pressure is integrated out: given the reading it is Normal(m + r
    (reading - m), s sqrt(1 - r)) with the reliability r = s^2 / (s^2 + READING^2), and a Normal
    number inside a probit leaves a probit.
    """
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    age = pyro.sample("age", dist.Normal(0.0, 1.0))
    sex = pyro.sample("sex", dist.Normal(0.0, 1.0))
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    reliability = s**2 / (s**2 + READING**2)
    with batch.clients():
        shift = pyro.sample("shift", dist.Normal(mu, tau))  # of the hospital
        with batch.data():
            pyro.sample("reading", dist.Normal(m, (s**2 + READING**2).sqrt()), obs=batch.reading)
            usual = m + reliability * (batch.reading - m)
            score = shift + slope * usual + age * batch.age + sex * batch.sex
            score = score / (1.0 + slope**2 * s**2 * (1.0 - reliability)).sqrt()
            ill = 0.5 + 0.5 * (score / 2.0**0.5).erf()
            pyro.sample("ill", dist.Bernoulli(probs=ill), obs=batch.ill)


def data() -> hierfl.ClientData:
    """Return the patients whose pressure was read.

    Fields: `reading` in 20 mm Hg from 130, `age` in decades from 50, `sex` (1 = male) and `ill`,
    each 0/1.
    """
    everybody = hierfl.datasets.heart_disease()
    x, names = everybody.fields["x"], everybody.features["x"]
    read = x[:, names.index("trestbps_missing")] == 0.0
    hospital = torch.repeat_interleave(torch.arange(everybody.num_clients), everybody.counts)
    return hierfl.ClientData.from_arrays(
        hospital[read],
        names=everybody.names,
        reading=x[read, names.index("trestbps")],
        age=x[read, names.index("age")],
        sex=x[read, names.index("sex")],
        ill=everybody.fields["y"][read],
    )


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print the slope on the usual pressure, and what it would be on the reading itself."""
    fit = hierfl.fit(model, data(), rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    reliability = drawn["s"] ** 2 / (drawn["s"] ** 2 + READING**2)
    inflated = 1.0 + drawn["slope"] ** 2 * drawn["s"] ** 2 * (1.0 - reliability)
    shown = {
        "reliability of one reading": reliability,
        "probit slope per 20 mm Hg, usual pressure": drawn["slope"],
        "probit slope per 20 mm Hg, one reading": reliability * drawn["slope"] / inflated**0.5,
    }
    for words, values in shown.items():
        low, middle, high = values.quantile([0.05, 0.5, 0.95]).values
        print(f"{words}: {middle:.3f} (90% interval {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
