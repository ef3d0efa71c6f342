"""Supports of sites: covariance matrices, ends that depend on other sites or on the client, and labels beyond them."""

import warnings
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.autograd.functional import jacobian
from torch.distributions import constraints

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError
from hierfl.program.handlers import log_joint
from hierfl.program.read import read_model
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


# ------------------------------------------------------------ ends that depend on other sites
Y = np.random.default_rng(0).normal(6.0, 1.0, (4, 5))


def limits() -> ClientData:
    names, limits = [f"c{k}" for k in range(4)], torch.tensor([1.0, 7.0, 9.0, 12.0])
    rows = torch.tensor(Y.ravel())
    client = np.repeat(np.arange(4), 5)
    return ClientData.from_arrays(client, names=names, client_fields={"limit": limits}, y=rows)


def below_another(batch: ClientBatch) -> None:
    top = pyro.sample("top", dist.Gamma(5.0, 1.0))
    low = pyro.sample("low", dist.Uniform(0.0, top))
    with batch.clients():
        u = pyro.sample("u", dist.Normal(0.0, 0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(low + u, 1.0), obs=batch.y)


def below_a_limit(batch: ClientBatch) -> None:
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        u = pyro.sample("u", dist.Uniform(0.0, batch.limit))
        with batch.data():
            pyro.sample("y", dist.Normal(u, spread), obs=batch.y)


def test_a_bound_that_is_another_site() -> None:
    program = read_model(below_another, limits()).program
    assert program.derived == {"low": None}
    top, free = torch.tensor(7.0), torch.tensor(0.8)
    values = {"top": top, "low_free": free, "u": torch.zeros(1, 1)}
    _, of_global = log_joint(program.model, values, program.prototype, {})
    share = free.sigmoid()
    expected = dist.Gamma(5.0, 1.0).log_prob(top) + (share * (1.0 - share)).log()
    torch.testing.assert_close(of_global, expected)
    derived = program.derive(values, {}, program.prototype)
    torch.testing.assert_close(derived["low"], top * share)


def test_a_bound_that_is_of_the_client() -> None:
    program = read_model(below_a_limit, limits()).program
    assert [s.name for s in program.latents.local_block.sites] == ["u_free"]
    assert "u" in program.derived


def test_a_fixed_bound_stays() -> None:
    def model(batch: ClientBatch) -> None:
        low = pyro.sample("low", dist.Uniform(torch.tensor(0.0), torch.tensor(9.0)))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(low, 1.0), obs=batch.y)

    program = read_model(model, limits()).program
    assert [s.name for s in program.latents.sites] == ["low"]


# ------------------------------------------------------------ labels beyond the starting values
TIMES = torch.tensor([0.4, 0.5, 0.9, 2.5, 0.6, 0.7])
DATA = hierfl.ClientData.from_arrays(["a", "a", "a", "a", "b", "b"], y=TIMES)


def shifted(prior: Any) -> Any:
    def model(batch: ClientBatch) -> None:
        shift = pyro.sample("shift", prior)
        with batch.clients():
            loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
            with batch.data():
                base = dist.LogNormal(loc, 1.0)
                moved = dist.transforms.AffineTransform(shift, 1.0)
                pyro.sample("y", dist.TransformedDistribution(base, moved), obs=batch.y)

    return model


def limited(batch: ClientBatch) -> None:
    top = pyro.sample("top", dist.Pareto(1.0, 1.0))
    with batch.clients():
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Uniform(0.0, top), obs=batch.y)


def by_row(batch: ClientBatch) -> None:
    top = pyro.sample("top", dist.HalfNormal(1.0))
    with batch.clients():
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Uniform(torch.zeros_like(batch.y), top), obs=batch.y)


@pytest.mark.parametrize("model", [shifted(dist.HalfNormal(1.0)), limited, by_row])
def test_labels_beyond_the_starting_values_are_said_with_the_fix(model: Any) -> None:
    with pytest.raises(
        ProgramError, match=r"ends at the starting values .* Uniform\(0\.0, least\)"
    ):
        hierfl.read(model, hierfl.guides.delta, DATA)


def test_a_shift_whose_prior_ends_at_the_labels_is_read() -> None:
    least = float(TIMES.min())
    hierfl.read(shifted(dist.Uniform(0.0, least)), hierfl.guides.delta, DATA)


def test_labels_are_checked_against_the_bound_of_each_row() -> None:
    def above(batch: ClientBatch) -> None:
        with batch.clients():
            slope = pyro.sample("slope", dist.Gamma(8.0, 4.0))
            with batch.data():
                pyro.sample("y", dist.Pareto(batch.least, slope), obs=batch.y)

    client, least = np.arange(40) % 4, np.linspace(1.0, 3.0, 40)
    rows: dict[str, Any] = {"least": least, "y": 1.5 * least}
    read_model(above, ClientData.from_arrays(client, **rows))
    rows["y"][37] = least[37] - 0.1
    with pytest.raises(
        ValueError, match=r"client '1' has the value .*outside the support of its row"
    ):
        read_model(above, ClientData.from_arrays(client, **rows))
