"""Choices of twelve people between two arms over 40 trials."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "hBayesDM, bandit2arm_delta"
IDIOM = "a recursion over columns, local Beta-like sites"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(63)
    rate, beta = 1 / (1 + np.exp(-rng.normal(-0.5, 0.6, 12))), np.exp(rng.normal(0.9, 0.3, 12))
    q, choice, reward = np.zeros((12, 2)), [], []
    for _ in range(40):
        right = rng.random(12) < 1 / (1 + np.exp(-beta * (q[:, 1] - q[:, 0])))
        won = np.where(rng.random(12) < np.where(right, 0.7, 0.3), 1.0, -1.0)
        q[np.arange(12), right.astype(int)] += rate * (won - q[np.arange(12), right.astype(int)])
        choice.append(right.astype(float))
        reward.append(won)
    return {"client": np.arange(12), "choice": np.stack(choice, -1), "reward": np.stack(reward, -1)}


def model(batch: Any) -> None:
    """Expected values move to rewards by each person's rate."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(0.5 * torch.ones(2)).to_event(1))
    with batch.clients():
        z = pyro.sample("z", dist.Normal(mu, s).to_event(1))
        rate, beta = torch.sigmoid(z[..., 0]), torch.exp(z[..., 1])
        with batch.data():
            low, high = torch.zeros(()), torch.zeros(())
            for t in range(40):
                c, r = batch.choice[..., t], batch.reward[..., t]
                pyro.sample(f"c_{t}", dist.Bernoulli(logits=beta * (high - low)), obs=c)
                high = high + c * rate * (r - high)
                low = low + (1.0 - c) * rate * (r - low)
