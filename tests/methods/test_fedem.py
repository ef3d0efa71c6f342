"""FedEM: pooled EM on planted mixtures, FedAvg with one component, and the mixture as a distribution."""

from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientData
from hierfl.methods import fedem
from hierfl.models.mixture import Mixed
from hierfl.optimizers import SGD
from tests.methods.quadratics import ONE_STEP
from tests.methods.test_one_of_k import center, sets
from tests.programs import fit

COUNTS, SHARE = (40, 25, 60, 10), (0.9, 0.2, 0.5, 0.7)
CLIENT = np.repeat(np.arange(4), COUNTS)
RNG = np.random.default_rng(0)
MEAN = np.where(RNG.random(CLIENT.size) < np.array(SHARE)[CLIENT], -2.0, 2.0)
Y = MEAN + RNG.normal(size=CLIENT.size)
GRADIENT: dict[str, Any] = {"components": 2, "optimizer": SGD(1.0), **ONE_STEP}


def planted() -> ClientData:
    return ClientData.from_arrays(CLIENT, y=torch.tensor(Y))


def log_likelihood(mu: np.ndarray, pi: np.ndarray) -> np.ndarray:
    """Return log pi + log density of each row and component, (n, 2)."""
    return -0.5 * (Y[:, None] - mu) ** 2 - 0.5 * np.log(2.0 * np.pi) + np.log(pi[CLIENT])


def test_rounds_are_steps_of_pooled_expectation_maximization() -> None:
    """Shares of each client and pooled means equal those of a NumPy loop; the likelihood never falls."""
    mu, pi, before = np.array([-1.0, 0.5]), np.full((4, 2), 0.5), -np.inf
    data, method = planted(), fedem(center, starts=sets(-1.0, 0.5), **GRADIENT)
    for rounds in range(1, 13):
        joint = log_likelihood(mu, pi)
        q = np.exp(joint - np.logaddexp(*joint.T)[:, None])
        pi = np.stack([q[k == CLIENT].mean(0) for k in range(4)])
        mu = mu + (q * (Y[:, None] - mu)).mean(0)
        now = np.logaddexp(*log_likelihood(mu, pi).T).sum()
        assert now >= before
        before = now
        if rounds in (1, 12):
            fitted = fit(method, data, rounds=rounds)
            found = [float(fitted.message[f"{m}.mu"]) for m in (0, 1)]
            assert found == pytest.approx(mu.tolist(), abs=1e-10)
            shares = fitted.progress.table[:, 0].exp().numpy()
            assert np.abs(shares - pi).max() < 1e-10


def test_a_planted_mixture_is_recovered_and_a_new_client_fits_its_shares() -> None:
    data = planted()
    fitted = fit(fedem(center, starts=sets(-1.0, 0.5), **GRADIENT), data, rounds=30)
    means = [float(fitted.message[f"{m}.mu"]) for m in (0, 1)]
    assert means == pytest.approx([-2.0, 2.0], abs=0.25)
    joined = fitted.personalize(data, rounds=20)
    mine, theirs = (f.progress.table.exp() for f in (fitted, joined))
    assert torch.allclose(mine, theirs, atol=1e-3)
    scores = fitted.predict(data)
    joint = log_likelihood(np.array(means), mine[:, 0].numpy())
    assert np.allclose(scores.known()[1].numpy(), np.logaddexp(*joint.T), atol=1e-9)


def test_a_mixture_is_a_distribution() -> None:
    loc = torch.tensor([-1.0, 2.0])
    parts = [dist.Normal(loc[m].expand(3), 1.0 + m) for m in range(2)]
    fn = Mixed(parts, torch.tensor([0.3, -0.4]))
    known = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=torch.tensor([0.3, -0.4])),
        torch.distributions.Normal(loc, torch.tensor([1.0, 2.0])),
    )
    y = torch.linspace(-3.0, 4.0, 3)
    assert torch.allclose(fn.log_prob(y), known.log_prob(y))
    assert torch.allclose(fn.mean, known.mean) and torch.allclose(fn.variance, known.variance)
    torch.manual_seed(0)
    drawn = fn.expand((2, 3)).sample((4000,))
    assert drawn.shape == (4000, 2, 3)
    assert float(drawn.mean()) == pytest.approx(float(known.mean), abs=0.05)
