"""Row noise on the sums of a Gaussian likelihood: what one row moves, what it costs, and whether intervals cover."""

import math
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from hierfl import ClientData, ProgramError
from hierfl.methods import two_stage
from hierfl.summaries.noisy_sums import log_of_sum
from hierfl.summaries.row_noise import RowNoise
from tests.methods.test_messages import exchange
from tests.programs import federation, fit

pytestmark = pytest.mark.filterwarnings("ignore:the noise hides")
BOUNDS: Any = {"delta": 1e-4, "max_row_norm": 4.0, "max_response": 4.0}


def model(batch: Any) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 0.5).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(-0.3, 0.4))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(loc, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(level + (batch.x * b).sum(-1), sigma), obs=batch.y)


def simulated(seed: int, clients: int = 8, rows: int = 60) -> tuple[ClientData, dict[str, Any]]:
    """Return rows whose parameters are drawn from the prior, and the parameters."""
    g = np.random.default_rng(seed)
    truth: dict[str, Any] = {"loc": g.normal(), "tau": abs(0.5 * g.normal())}
    truth |= {"b": 0.5 * g.normal(size=2), "sigma": np.exp(-0.3 + 0.4 * g.normal())}
    truth["level"] = truth["loc"] + truth["tau"] * g.normal(size=clients)
    of_each = {}
    for k, level in enumerate(truth["level"]):
        x = g.normal(size=(rows, 2))
        y = level + x @ truth["b"] + truth["sigma"] * g.normal(size=rows)
        of_each[f"c{k}"] = {"x": torch.tensor(x), "y": torch.tensor(y)}
    return ClientData.from_clients(of_each), truth


def method(epsilon: float, *, draws: int = 400, **options: Any) -> Any:
    how = RowNoise(epsilon=epsilon, **{**BOUNDS, "secret": 1, **options})
    return two_stage(model, draws=draws, row_noise=how)


def sums(data: ClientData, **options: Any) -> dict[str, Tensor]:
    """Return what clients send."""
    return dict(exchange(method(**options), data)[1]["factor"].value)


def drawn(fitted: Any) -> dict[str, np.ndarray]:
    found = fitted.draws(400)
    each = {**found.shared, **found.own}
    return {name: v.reshape(len(v), -1).double().numpy() for name, v in each.items()}


@pytest.mark.parametrize(
    ("degrees", "value", "sd"),
    [(3.0, 2.0, 1.0), (40.0, 50.0, 5.0), (20.0, -9.0, 12.0), (50.0, 60.0, 0.01)],
)
def test_the_density_of_a_noisy_sum_of_squares(degrees: float, value: float, sd: float) -> None:
    scale = 1.1

    def integrand(r: float) -> float:
        chi = stats.chi2.pdf(r / scale**2, degrees) / scale**2
        return float(chi * stats.norm.pdf(value, r, sd))

    low, high = max(0.0, value - 12.0 * sd), max(value, 0.0) + 12.0 * sd
    exact = integrate.quad(integrand, low, high, limit=500)[0]
    given = [torch.tensor(v).double() for v in ([value], [degrees], scale, [sd**2])]
    assert float(log_of_sum(*given)) == pytest.approx(math.log(exact), abs=0.01)


@pytest.mark.slow
def test_hardly_any_noise_gives_the_posterior_of_exact_sums() -> None:
    data, _ = simulated(11)
    exact, found = drawn(fit(two_stage(model, draws=400), data)), None
    fitted = fit(method(1e6, max_row_norm=6.0, max_response=8.0), data)
    found = drawn(fitted)
    assert len(fitted.history) == 1
    for name, value in exact.items():
        sd = value.std(0)
        assert np.all(np.abs(found[name].mean(0) - value.mean(0)) < 0.25 * sd), name
        assert np.allclose(found[name].std(0) / sd, 1.0, atol=0.2), name


@pytest.mark.slow
def test_noise_of_the_sums_is_as_large_as_the_budget_asks() -> None:
    """The sd is z sqrt(8) in units of the bounds, z that of one Gaussian mechanism."""
    data, _ = simulated(0, clients=40, rows=5)
    how = RowNoise(epsilon=2.0, **BOUNDS)
    mu, at = 1.0 / how.noise, stats.norm.cdf
    delta = at(mu / 2 - 2.0 / mu) - math.exp(2.0) * at(-mu / 2 - 2.0 / mu)
    assert delta == pytest.approx(1e-4, rel=1e-3)  # Balle and Wang 2018, Theorem 8
    assert how.num_rounds == 1 and how.spent_by_round == pytest.approx(how.noise**-2)
    few, many = (sums(data, epsilon=e) for e in (2.0, 1e7))
    first = float(np.exp(-0.3)) ** -2  # sums are at the starting scale
    noise = math.sqrt(8.0) * how.noise
    apart = (few["noisy_square"] - many["noisy_square"]) / (16.0 * first * noise)
    assert stats.kstest(apart.numpy(), "norm").pvalue > 1e-3
    off = (few["shift"] - many["shift"])[:, :3].flatten() / (16.0 * first * noise / math.sqrt(2.0))
    assert stats.kstest(off.numpy(), "norm").pvalue > 1e-3
    on = (few["precision"] - many["precision"]).diagonal(dim1=1, dim2=2)[:, :3] / (16.0 * first)
    assert stats.kstest((on / noise).flatten().numpy(), "norm").pvalue > 1e-3


@pytest.mark.slow("y-1000000.0", "y--1e+30")
@pytest.mark.filterwarnings("ignore:field|column|client")
@pytest.mark.parametrize(("field", "at"), [("y", 1e6), ("x", 1e3), ("y", -1e30)])
def test_one_row_moves_the_sums_by_sqrt_8_at_most(field: str, at: float) -> None:
    data, _ = simulated(1, clients=2)
    moved = data.fields[field].clone()
    moved[0] = at
    before, after = sums(data, epsilon=1e7), sums(data.with_fields(**{field: moved}), epsilon=1e7)
    unit = 16.0 * float(np.exp(0.6))  # R^2, R B and B^2 at the starting scale
    square = sum(
        times * float(((after[n] - before[n])[0] / unit).square().sum())
        for n, times in (("precision", 1.0), ("shift", 2.0), ("noisy_square", 1.0))
    )
    assert 0.01 < square < 8.0 + 0.2  # the noise that is left
    assert torch.equal(before["num_rows"], after["num_rows"])


@pytest.mark.slow
def test_noise_is_of_the_secret_alone_and_another_client_has_other_noise() -> None:
    data, _ = simulated(2, clients=3)
    one, again, other = (sums(data, epsilon=1.0, secret=s) for s in (1, 1, 2))
    assert torch.equal(one["shift"], again["shift"])
    assert not torch.allclose(one["shift"], other["shift"])
    alike = ClientData.from_clients(
        {n: {f: data.select(["c0"]).fields[f] for f in ("x", "y")} for n in "ab"}
    )
    of_both = sums(alike, epsilon=1.0)["shift"]
    assert not torch.allclose(of_both[0], of_both[1])


def test_what_leaves_is_noisy_sums_and_the_number_of_rows() -> None:
    data, _ = simulated(2, clients=3)
    fitted = fit(method(1.0, draws=100), data)
    assert set(fitted.history["epsilon"]) == {1.0} and len(fitted.history) == 1
    factors = vars(fitted.progress.server.factors)
    assert {name for name, value in factors.items() if value is not None} == {
        "precision",
        "shift",
        "fields",
        "num_rows",
        "noisy_square",
        "belief",
    }
    assert fitted.progress.server.factors.num_rows.tolist() == [60.0] * 3


@pytest.mark.slow
def test_sums_below_zero_and_no_eigenvalue_above_are_no_error() -> None:
    data, _ = simulated(5, clients=3, rows=6)
    found = fit(method(0.2), data)
    assert bool((found.progress.server.factors.noisy_square < 0.0).any())
    assert all(np.isfinite(v).all() for v in drawn(found).values())


def test_covariates_that_the_noise_hides_are_said() -> None:
    data, _ = simulated(5, clients=3, rows=6)
    with pytest.warns(UserWarning, match="noise hides the clients' covariates"):
        fit(method(0.5, draws=100), data)


def test_a_bound_of_responses_is_asked_for_and_refused_elsewhere() -> None:
    data, _ = simulated(0, clients=2)
    how = RowNoise(epsilon=1.0, delta=1e-4, max_row_norm=2.0)
    with pytest.raises(ProgramError, match="max_response="):
        fit(two_stage(model, draws=100, row_noise=how), data)

    def yes_or_no(batch: Any) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with batch.clients():
            level = pyro.sample("level", dist.Normal(loc, 1.0))
            with batch.data():
                pyro.sample("y", dist.Bernoulli(logits=level), obs=batch.y)

    with pytest.raises(ProgramError, match="leave it out"):
        labels = federation().with_fields(y=(federation().fields["y"] > 0).float())
        fit(two_stage(yes_or_no, draws=100, row_noise=RowNoise(epsilon=1.0, **BOUNDS)), labels)
    with pytest.raises(ValueError, match=r"max_response is 0\.0"):
        RowNoise(epsilon=1.0, delta=1e-4, max_row_norm=2.0, max_response=0.0)


@pytest.mark.slow
def test_a_client_leaves_for_good_and_none_joins_without_a_new_budget() -> None:
    """What is left is the posterior of the others' noisy sums."""
    data, _ = simulated(1)
    others = [0, 1, 3, 4, 5, 6, 7]
    left = fit(method(8.0), data).without(data.names[2])
    scratch = fit(method(8.0), data.select(others))
    one, other = (f.draws(400).shared for f in (left, scratch))
    for name, value in other.items():
        off = (one[name].double().mean(0) - value.double().mean(0)).abs()
        assert bool((off < 0.2 * value.double().std(0)).all()), name
    with pytest.raises(ValueError, match="fit again with all clients"):
        scratch.updated(data.select([2]))


def covered(epsilon: float, rows: int, federations: int) -> dict[str, float]:
    """Return how often intervals of 90% hold the parameters, drawn from the prior."""
    held: dict[str, list[Any]] = {}
    for seed in range(federations):
        data, truth = simulated(seed, rows=rows)
        for name, value in drawn(fit(method(epsilon, secret=seed), data)).items():
            low, high = np.quantile(value, [0.05, 0.95], axis=0)
            held.setdefault(name, []).append((low < truth[name]) & (truth[name] < high))
    return {
        name: float(np.mean(np.concatenate([np.atleast_1d(v) for v in each])))
        for name, each in held.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "rows"), [(8.0, 60), (1.0, 300)])
def test_intervals_cover(epsilon: float, rows: int) -> None:
    """Of 50 federations 90% intervals hold 90%, up to 3 standard errors."""
    for name, share in covered(epsilon, rows, 50).items():
        assert 0.78 <= share <= 1.0, (name, share)
