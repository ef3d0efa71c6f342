"""A fit as ArviZ data, of ArviZ 0 or 1: groups, dimensions, labels, networks summarized by layer."""

import warnings
from importlib.metadata import version
from typing import Any

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import hierfl
from hierfl import ClientBatch, ClientData, Fit, guides
from hierfl.methods import fedsvi
from hierfl.posterior import arviz_io as posterior
from hierfl.posterior.moments import mean_and_variance
from tests.programs import federation, fit, logistic


def named(data: ClientData) -> ClientData:
    """Return the same clients with names for the columns of x."""
    return ClientData(
        data.fields, data.offsets, data.names, data.client_fields, {"x": ("age", "dose")}
    )


@pytest.fixture(scope="module")
def ill() -> Fit:
    return fit(fedsvi(logistic), named(federation()), rounds=3, seed=7)


def test_attributes_describe_the_run(ill: Fit) -> None:
    attrs = ill.posterior(5, seed=3)["posterior"].attrs
    assert (attrs["method"], attrs["seed"], attrs["draws_seed"], attrs["rounds"]) == (
        "fedsvi",
        7,
        3,
        3,
    )
    assert (attrs["clients"], attrs["rows"]) == (4, 16)
    assert attrs["bytes_up"] == ill.history["bytes_up"].sum() > 0
    assert (
        attrs["torch_version"] == version("torch") and attrs["pyro-ppl_version"] == pyro.__version__
    )
    assert (
        attrs["arviz_version"] == az.__version__
        and attrs["inference_library_version"] == hierfl.__version__
    )


def test_arviz_compares_four_chains_of_independent_draws(
    ill: Fit, caplog: pytest.LogCaptureFixture
) -> None:
    whole = ill.draws(200, seed=3).shared["loc"].numpy()
    posterior: Any = ill.posterior(200, seed=3)
    assert np.array_equal(np.concatenate(posterior["posterior"]["loc"].values), whole)
    table = az.summary(posterior, var_names=["loc"])  # a warning is an error here
    assert (table["r_hat"] < 1.1).all() and not caplog.records
    lone: Any = ill.posterior(90, seed=3)
    assert lone["posterior"].sizes["chain"] == 1


def test_log_likelihoods_belong_to_the_draws(ill: Fit) -> None:
    data = ill.federation.data
    found: Any = ill.posterior(100, seed=3, log_likelihood=True)
    slope = np.concatenate(found["posterior"]["slope"].values)
    owner = data.row_client.numpy()
    logits = (slope[:, owner] * data.fields["x"].numpy()).sum(-1)
    y = data.fields["ill"].numpy()
    wanted = np.where(y > 0.5, -np.logaddexp(0, -logits), -np.logaddexp(0, logits))
    given = found["log_likelihood"]["ill"]
    assert given.dims == ("chain", "draw", "row")
    assert np.allclose(np.concatenate(given.values), wanted, atol=1e-12)
    assert given["row_client"].values.tolist() == [data.names[k] for k in owner]
    assert np.array_equal(found["observed_data"]["ill"].values, y)
    loo: Any = az.loo
    with warnings.catch_warnings(action="ignore"):  # so few draws give high k-hats
        assert np.isfinite(getattr(loo(found), "elpd" if posterior.DATA_TREE else "elpd_loo"))


def test_predictive_labels_follow_the_predictive_distribution(ill: Fit) -> None:
    """Shares of ones match `predict`; a client's labels do not depend on the other clients."""
    rows = ill.federation.data.select(["east", "north"])
    found: Any = ill.posterior_predictive(4000, rows=rows, seed=1)
    drawn = found["posterior_predictive"]["ill"]
    assert drawn.dims == ("chain", "draw", "row") and set(np.unique(drawn)) == {0.0, 1.0}
    p = ill.predict(rows, draws=4000, seed=1).mean.numpy()
    assert np.abs(np.concatenate(drawn.values).mean(0) - p).max() < 0.04
    assert found["observed_data"]["ill"].values.tolist() == rows.fields["ill"].tolist()
    alone: Any = ill.posterior_predictive(4000, rows=ill.federation.data.select(["north"]), seed=1)
    there = drawn["row_client"].values == "north"
    assert np.array_equal(
        np.concatenate(alone["posterior_predictive"]["ill"].values),
        np.concatenate(drawn.values)[:, there],
    )
    unlabeled: Any = ill.posterior_predictive(3, rows=rows.without("ill"))
    assert "observed_data" not in unlabeled


@pytest.mark.parametrize("name", ["posterior_predictive", "posterior", "prior", "draws"])
def test_rows_in_place_of_draws_are_refused(ill: Fit, name: str) -> None:
    with pytest.raises(
        TypeError, match="draws is a ClientData: it must be an integer of 1 or more"
    ):
        getattr(ill, name)(ill.federation.data)


@pytest.mark.usefixtures("global_generator_untouched")
def test_prior_draws_have_the_moments_of_the_prior(ill: Fit) -> None:
    found: Any = ill.prior(4000, predictive=True)
    loc, slope = (
        np.concatenate(found["prior"]["loc"].values),
        np.concatenate(found["prior"]["slope"].values),
    )
    assert np.abs(loc.std(0) - 1.0).max() < 0.05
    within = slope - loc[:, None]
    assert np.abs(within.std(0) - 0.7).max() < 0.05, (
        "sd of the local sites around the same draw of the global site"
    )
    assert np.abs(np.corrcoef(within[:, 0, 0], within[:, 1, 0])[0, 1]) < 0.05
    assert found["prior_predictive"]["ill"].values.mean() == pytest.approx(0.5, abs=0.05)


def counts(batch: ClientBatch) -> None:
    """Poisson labels, a Gamma prior, a label per client and a deterministic site."""
    rate = pyro.sample("rate", dist.Gamma(3.0, 2.0))
    pyro.deterministic("log_rate", rate.log())
    with batch.clients():
        own = pyro.sample("own", dist.LogNormal(rate.log(), 0.3))
        pyro.sample("height", dist.Normal(own, 1.0), obs=batch.height)
        with batch.data():
            pyro.sample("visits", dist.Poisson(own), obs=batch.visits)


def test_counts_client_level_labels_and_priors_that_torch_draws() -> None:
    fitted = fit(fedsvi(counts), federation(), rounds=2)
    found: Any = fitted.posterior(6, log_likelihood=True)
    assert found["log_likelihood"]["height"].dims == ("chain", "draw", "client")
    assert found["log_likelihood"]["visits"].dims == ("chain", "draw", "row")
    assert np.allclose(found["posterior"]["log_rate"], np.log(found["posterior"]["rate"]))
    own = np.concatenate(found["posterior"]["own"].values)
    height = found["observed_data"]["height"].values
    assert np.allclose(
        np.concatenate(found["log_likelihood"]["height"].values),
        -0.5 * (height - own) ** 2 - 0.5 * np.log(2 * np.pi),
    )
    assert found["observed_data"]["visits"].shape == (16,)
    drawn: Any = fitted.posterior_predictive(50)
    assert (drawn["posterior_predictive"]["visits"].values % 1 == 0).all()
    prior: Any = fitted.prior(50)
    assert prior["prior"]["rate"].values.mean() == pytest.approx(1.5, abs=0.45)


def heavy(batch: ClientBatch) -> None:
    """A model with Student t labels, which torch can draw one at a time only."""
    with batch.clients():
        own = pyro.sample("own", dist.Normal(torch.zeros(1, 1), 1.0))
        with batch.data():
            pyro.sample("y", dist.StudentT(4.0, own, 0.1), obs=batch.y)


def test_labels_without_a_vectorized_sampler() -> None:
    fitted = fit(fedsvi(heavy), federation(), rounds=2)
    drawn, again = (
        fitted.posterior_predictive(40)["posterior_predictive"]["y"].values for _ in range(2)
    )
    assert np.array_equal(drawn, again) and len(np.unique(drawn)) == drawn.size
    north = fitted.posterior(40)["posterior"]["own"].values[0, :, 0]
    assert np.abs(np.median(drawn[0, :, :5] - north[:, None])) < 0.05


@pytest.fixture(scope="module")
def net() -> Fit:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))
    data = federation()
    data = data.with_fields(y=(data.fields["visits"].long() % 2))
    return fit(fedsvi(hierfl.models.bayesian_network(module), guides.mean_field), data, rounds=2)


def test_a_large_network_is_summarized_by_layer(net: Fit) -> None:
    whole: Any = net.posterior(7, seed=1)["posterior"]
    assert whole["w.0.weight"].shape == (1, 7, 4, 6, 2), "small networks are written in full"
    short: Any = net.posterior(7, seed=1, expand=10)["posterior"]
    assert set(short.data_vars) == {"w_mean", "w_sd", "w_rms", "w_largest"}
    assert short["w_sd"].dims == ("chain", "draw", "client", "w_layer")
    assert short["w_layer"].values.tolist() == ["0", "2"]
    first = np.concatenate(
        [whole[f"w.0.{part}"].values.reshape(1, 7, 4, -1) for part in ("weight", "bias")], -1
    )
    for name, wanted in {
        "mean": first.mean(-1),
        "sd": first.std(-1),
        "rms": np.sqrt((first**2).mean(-1)),
        "largest": np.abs(first).max(-1),
    }.items():
        assert np.allclose(short[f"w_{name}"].values[..., 0], wanted, atol=1e-12)


def test_chosen_sites_are_written_in_full_whatever_their_size(net: Fit) -> None:
    found: Any = net.posterior(7, seed=1, expand=10, var_names=["w.2.bias"])["posterior"]
    assert set(found.data_vars) == {"w.2.bias"}
    assert np.array_equal(found["w.2.bias"], net.posterior(7, seed=1)["posterior"]["w.2.bias"])
    with pytest.raises(KeyError, match=r"there is no site 'w.1.bias': the sites are w.0.weight"):
        net.posterior(3, var_names=["w.1.bias"])
    with pytest.raises(KeyError, match="it must be a list"):
        net.posterior(3, var_names="w.2.bias")


def test_invalid_arguments_are_refused(ill: Fit) -> None:
    with pytest.raises(ValueError, match="draws is 0"):
        ill.posterior(0)
    with pytest.raises(ValueError, match="correct is 'sir'"):
        ill.posterior(3, correct="sir")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="client 'mid' was not fitted"):
        ill.posterior_predictive(3, rows=named(federation((2, 2, 2, 2, 2))))
    with pytest.raises(ValueError, match="site 'client' has the name of a dimension"):
        posterior.arviz_of({"posterior": {"client": np.zeros(3)}}, {}, {"client": ["a"]})
    with pytest.raises(
        ValueError, match=r"'w' of posterior has shape \(1, 3, 2\), and dimensions chain, draw"
    ):
        posterior.arviz_of({"posterior": {"w": np.zeros((3, 2))}}, {}, {})


# ------------------------------------------------------------------------- ArviZ 1.x, without torch


def test_the_moments_of_a_student_t_are_torchs() -> None:
    fn = dist.StudentT(torch.tensor([0.5, 1.5, 4.0]), 0.3, 2.0)
    for found, known in zip(mean_and_variance("y", fn), (fn.mean, fn.variance), strict=True):
        torch.testing.assert_close(found, known, equal_nan=True)
