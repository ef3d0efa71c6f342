"""Programs without global sites: each client's posterior is its own, and exact where it is known."""

from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import betaln

import hierfl
from hierfl.data.batch import ClientBatch
from tests.programs import leveled

TRIALS = [13, 12, 9, 9, 8, 8, 12, 11, 9, 9, 8, 11, 4, 5, 7, 7]
ALIVE = [
    [13, 12, 9, 9, 8, 8, 12, 10, 8, 8, 6, 9, 3, 4, 5, 4],
    [12, 11, 9, 9, 8, 8, 8, 7, 8, 3, 5, 6, 4, 1, 5, 0],
]


def litters() -> hierfl.ClientData:
    arms = np.repeat(["control", "treated"], 16)
    alive, trials = torch.tensor(ALIVE).flatten(), torch.tensor(TRIALS * 2)
    return hierfl.ClientData.from_arrays(arms, r=alive.float(), n=trials.float())


def beta_binomial(batch: ClientBatch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Beta(1.0, 1.0))
        theta = pyro.sample("theta", dist.HalfCauchy(1.0))
        with batch.data():
            pair = mu / theta, (1.0 - mu) / theta
            pyro.sample("r", dist.BetaBinomial(*pair, batch.n), obs=batch.r)


def on_a_grid(alive: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return means and sds of mu and theta of one client, by a sum over a grid."""
    mu, theta = np.meshgrid(
        (np.arange(200) + 0.5) / 200, np.exp(np.linspace(-9, 6, 200)), indexing="ij"
    )
    log = np.log(theta) - np.log1p(theta**2)
    for r, n in zip(alive, TRIALS, strict=True):
        a, b = mu / theta, (1 - mu) / theta
        log += betaln(r + a, n - r + b) - betaln(a, b)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    means = np.array([(weight * v).sum() for v in (mu, theta)])
    squares = np.array([(weight * v**2).sum() for v in (mu, theta)])
    return means, np.sqrt(squares - means**2)


@pytest.mark.slow
def test_litters_are_as_on_a_grid_and_as_loaded(tmp_path: Path) -> None:
    fit = hierfl.fit(beta_binomial, litters(), seed=0)
    summary = fit.summary()
    assert fit.chosen is not None and fit.chosen.startswith("two_stage")
    assert summary.trustworthy
    assert set(summary.frame.site) == {"mu", "theta"}
    draws = fit.draws(2000)
    assert not draws.shared
    for client, alive in enumerate(ALIVE):
        mean, sd = on_a_grid(alive)
        own = torch.stack([draws.own[name][:, client].squeeze() for name in ("mu", "theta")])
        away = (own.mean(1).numpy() - mean) / sd
        assert np.abs(away).max() < 0.12
        assert np.abs(own.std(1).numpy() / sd - 1.0).max() < 0.15
    fit.save(tmp_path / "fit")
    again = hierfl.load(tmp_path / "fit", data=litters(), model=beta_binomial)
    assert torch.equal(again.draws(50).own["mu"], fit.draws(50).own["mu"])


normal = leveled(
    lambda batch, w: pyro.sample("y", dist.Normal(w, 0.5), obs=batch.y),
    lambda batch: dist.Normal(1.0, 2.0),
)


@pytest.mark.parametrize("new", [False, True])
def test_normal_means_are_exact(new: bool) -> None:
    y = torch.tensor([0.3, -0.2, 0.5, 2.0, 1.5])
    data = hierfl.ClientData.from_arrays(["a", "a", "a", "b", "b"], y=y)
    fit: Any = hierfl.fit(normal, data, seed=0)
    if new:
        fit = fit.personalize(hierfl.ClientData.from_arrays(["c", "c", "d"], y=y[:3]))
    counts = fit.federation.data.counts
    by_client = fit.federation.data.fields["y"].split(counts.tolist())
    sums = torch.stack([rows.sum() for rows in by_client])
    precision = 0.25 + 4.0 * counts
    own = fit.draws(4000).own["w"].squeeze()
    assert torch.allclose(own.mean(0), (0.25 + 4.0 * sums) / precision, atol=0.03)
    assert torch.allclose(own.std(0) * precision.sqrt(), torch.ones(len(counts)), atol=0.05)
