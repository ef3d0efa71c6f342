"""A model of your own, from prior to posterior: patients of four hospitals, each with its own coefficients.

Usage: `python examples/own_model.py [--smoke]`.
"""

from __future__ import annotations

import sys

import arviz as az
import pyro
import pyro.distributions as dist
import torch

import hierfl


def model(batch: hierfl.ClientBatch) -> None:
    """Model heart disease by logistic regression with coefficients that vary by hospital."""
    features = batch.x.shape[-1]
    mu = pyro.sample("mu", dist.Normal(torch.zeros(features), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(0.5 * torch.ones(features)).to_event(1))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, tau).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.y)


def main(rounds: int | None = None) -> None:
    """Infer the posterior, say whether to trust it, and score predictions of held-out patients.

    No method is named: hierfl chooses one for the model, here `two_stage`, which stops by itself.
    """
    train, test = hierfl.datasets.heart_disease().split(0.7, seed=0)
    fit = hierfl.fit(model, train, rounds=rounds, seed=0)
    print(f"{fit.summary()}\n\nHeld-out patients:\n{fit.predict(test).scores().round(3)}\n")
    posterior = fit.posterior(draws=500)
    print(az.summary(posterior, var_names=["w"], coords={"x": ["thalach"]}, kind="stats").round(2))


if __name__ == "__main__":
    main(rounds=1 if "--smoke" in sys.argv else None)
