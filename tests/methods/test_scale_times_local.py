"""A global site that scales a local one, as in item responses with slopes: by chains, beside a grid."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import hierfl
from hierfl import ClientBatch
from hierfl.engine.federation import federate
from hierfl.runs.ended import Fallback

PERSONS, ITEMS, TIMES = 10, 2, 4


def responses() -> hierfl.ClientData:
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(PERSONS), ITEMS * TIMES)
    item = np.tile(np.arange(ITEMS), PERSONS * TIMES)
    theta = rng.standard_normal(PERSONS)[person]
    y = rng.random(len(item)) < 1 / (1 + np.exp(-np.array([0.6, 1.8])[item] * theta))
    return hierfl.ClientData.from_arrays(
        person, item=torch.tensor(item), y=torch.tensor(y, dtype=torch.float32)
    )


def slopes(batch: ClientBatch) -> None:
    a = pyro.sample("a", dist.LogNormal(torch.zeros(ITEMS), 0.5).to_event(1))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=a[batch.item] * theta), obs=batch.y)


def log_density(data: hierfl.ClientData, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the log posterior density of the logs of both slopes, up to a constant."""
    theta, weights = np.polynomial.hermite_e.hermegauss(161)
    signs = (2 * data.fields["y"].numpy() - 1).reshape(PERSONS, -1, ITEMS).sum(1)
    log = -0.5 * (first**2 + second**2) / 0.25
    for person in range(PERSONS):
        at = np.zeros((*first.shape, len(theta)))
        for item, a in enumerate((np.exp(first), np.exp(second))):
            ups = (signs[person, item] + TIMES) / 2
            eta = a[..., None] * theta
            at += ups * eta - TIMES * np.logaddexp(0, eta)
        log += np.log((np.exp(at) * weights).sum(-1))
    return log


def test_the_chains_density_is_summed_over_each_persons_scalar() -> None:
    data = responses()
    federation = federate(hierfl.methods.two_stage(slopes), data, seed=0)
    chains = Fallback(federation, None).chains
    chains._sum_over(7)
    # some persons gave equal answers, and are computed once
    assert chains.joint.size == ITEMS and chains.rows.clients < PERSONS
    z = torch.tensor([[0.0, 0.0], [0.4, -0.5], [-0.8, 1.0]], dtype=torch.float64)
    expected = log_density(data, z[:, 0].numpy(), z[:, 1].numpy())
    for order, atol in ((7, 0.05), (31, 1e-5)):
        values = chains._joint(order).values(z, chains._starts.alone(z)).numpy()
        np.testing.assert_allclose(values - values[0], expected - expected[0], rtol=0, atol=atol)
