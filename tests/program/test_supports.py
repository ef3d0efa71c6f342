"""The map of real numbers onto covariance matrices, and a program with a Wishart prior."""

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.autograd.functional import jacobian
from torch.distributions import constraints

import hierfl
from hierfl.data.batch import ClientBatch
from hierfl.program.program import ProgramError
from hierfl.program.supports import LogCholesky


def test_the_log_jacobian_is_that_of_autograd() -> None:
    transform = LogCholesky()
    x = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    row, column = torch.tril_indices(3, 3)
    matrix = jacobian(lambda at: transform(at)[row, column], x)
    whole = transform.log_abs_det_jacobian(x, transform(x))
    assert torch.allclose(whole, torch.linalg.slogdet(matrix)[1])
    assert torch.allclose(transform.inv(transform(x.expand(2, 6))), x)
    assert transform.inverse_shape((2, 3, 3)) == (2, 6)
    assert transform.forward_shape((2, 6)) == (2, 3, 3)
    assert constraints.positive_definite.check(transform(x))


def test_a_wishart_prior_of_a_precision_is_conjugate() -> None:
    """Rows with known means: the precision has a Wishart posterior."""
    g = torch.Generator().manual_seed(1)
    y = torch.randn(60, 2, generator=g) * torch.tensor([1.0, 0.5])
    data = hierfl.ClientData.from_arrays([f"c{k % 3}" for k in range(60)], y=y)

    def model(batch: ClientBatch) -> None:
        prior = dist.Wishart(torch.tensor(4.0), torch.eye(2))
        precision = pyro.sample("precision", prior)
        with batch.clients(), batch.data():
            rows = dist.MultivariateNormal(torch.zeros(2), precision_matrix=precision)
            pyro.sample("y", rows, obs=batch.y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's Wishart draws again what is singular
        fit = hierfl.fit(model, data, seed=0)
    scale = torch.linalg.inv(torch.eye(2) + y.mT @ y)
    assert fit.summary().trustworthy
    draws = fit.draws(4000).shared["precision"]
    assert torch.allclose(draws.mean(0), 64.0 * scale, rtol=0.05, atol=0.05)


def test_distributions_of_torch_are_named() -> None:
    def model(batch: ClientBatch) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with batch.clients(), batch.data():
            fn: Any = torch.distributions.Normal(0.0, scale)
            pyro.sample("y", fn, obs=batch.y)

    data = hierfl.ClientData.from_arrays(["a", "a", "b"], y=torch.ones(3))
    with pytest.raises(ProgramError, match=r"'y' \(Normal\) is not a Pyro distribution"):
        hierfl.fit(model, data)
