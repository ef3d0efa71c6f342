"""Comparison with pooled NUTS: exact fits pass, planted errors are measured."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientBatch, ProgramError, guides
from hierfl.diagnostics import AgainstNuts, against_nuts
from hierfl.diagnostics.nuts import Reference
from hierfl.methods import fedlaplace, fedsvi
from hierfl.optimizers import Adam
from tests.methods.test_pvi import close
from tests.posterior.test_corrected import planted
from tests.programs import exact, federation, fit, means, slopes, three


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:NUTS itself has not converged")
def test_an_exact_fit_agrees_with_nuts() -> None:
    fitted = fit(
        fedlaplace(means, weighting_rounds=0, radius=10.0, settle_draws=4), three(), rounds=4
    )
    found = against_nuts(fitted, draws=150, warmup=80, chains=1)
    assert isinstance(found, AgainstNuts) and list(found.table.index) == ["g", "b"]
    assert found.table["scalars"].tolist() == [1, 3]
    assert found.table["shift"].max() < 0.3 and found.table["ratio_min"].min() > 0.75
    assert found.scalars.loc[found.scalars["site"] == "b", "client"].tolist() == list(
        fitted.clients
    )
    again = against_nuts(fitted, reference=found.reference)
    assert again.table["shift"].max() < 0.3, "a given reference is used and NUTS is not run again"


def true_draws(count: int = 4000) -> Reference:
    """Return draws of the exact posterior of `slopes`, in the form of a NUTS reference."""
    known = exact(federation(), "slopes")
    g = dist.MultivariateNormal(known.loc, known.cov).sample((count,))
    given = dist.MultivariateNormal(torch.zeros(2), known.given_cov).sample((count,))
    b = known.own_loc + ((g - known.loc)[:, None, None] * known.given_slope).sum(-1) + given
    return Reference({"g": g}, {"b": b}, {"g": 1.0, "b": 1.0}, 0.0)


def test_planted_errors_are_found_with_their_size() -> None:
    found = against_nuts(
        planted(shift=0.5, wide=0.6, own={"east": 1.5}), draws=1000, reference=true_draws()
    )
    of_g = found.scalars[found.scalars["site"] == "g"]
    close(torch.tensor(of_g["ratio"].to_numpy()), torch.full((2,), 0.6), 0.05)
    assert of_g["shift"].iloc[0] == pytest.approx(0.5, abs=0.08)
    assert found.table.loc["g", "shift"] == of_g["shift"].abs().max()
    assert (
        "Means are within 0." in found.verdict
        and "NUTS standard deviations (worst: '" in found.verdict
    )
    fixed = against_nuts(
        planted(shift=0.5, wide=1.2), draws=1000, reference=true_draws(), correct="psis"
    )
    assert fixed.table["shift"].max() < 0.15


def own_param(batch: ClientBatch) -> None:
    with batch.clients():
        shift = pyro.param("shift", torch.zeros(batch.num_clients, 1))
        b = pyro.sample("b", dist.Normal(shift, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(b, 1.0), obs=batch.y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:NUTS itself has not converged")
def test_learned_params_and_modules_are_held_at_their_fitted_values() -> None:
    """Conjugate: b_k ~ Normal(0, s^2), y ~ Normal(b_k + m, 1), with s and m held fixed."""
    module = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(module.bias, 3.0)

    def learned(batch: ClientBatch) -> None:
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        m = pyro.module("net", module)(torch.zeros(1))
        with batch.clients():
            b = pyro.sample("b", dist.Normal(torch.zeros(batch.num_clients, 1), scale))
            with batch.data():
                pyro.sample("y", dist.Normal(b + m, 1.0), obs=batch.y)

    data = federation()
    apart = torch.tensor([4.0, 6.0, 7.0, 9.0]).repeat_interleave(data.counts)
    data = data.with_fields(y=data.fields["y"] + apart)
    fitted = fit(fedsvi(learned, guides.mean_field, optimizer=Adam(0.1)), data, rounds=60)
    params = fitted.message["params"]
    bias = next(value for name, value in params.items() if "bias" in name)
    assert abs(float(bias) - 3.0) > 1.0
    found = against_nuts(fitted, draws=150, warmup=80, chains=1)
    precision = data.counts + params["scale"].exp() ** -2
    rows = (data.fields["y"] - bias).split(data.counts.tolist())
    close(found.reference.own["b"].mean(0), torch.stack([y.sum() for y in rows]) / precision, 0.15)
    assert not pyro.get_param_store().keys()


def test_invalid_arguments_are_refused() -> None:
    fitted = planted()
    with pytest.raises(ValueError, match="draws is 5 and chains 2"):
        against_nuts(fitted, draws=5)
    with pytest.raises(ValueError, match="the reference has no site 'g'"):
        against_nuts(fitted, reference=Reference({}, {}, {}, 0.0))
    other = fit(fedsvi(own_param, guides.mean_field), federation(), rounds=1)
    with pytest.raises(ProgramError, match="param 'shift' of the model is local, and NUTS"):
        against_nuts(other, draws=60)
    with pytest.warns(UserWarning, match="NUTS itself has not converged: R-hat of site"):
        against_nuts(fit(fedsvi(slopes), federation(), rounds=1), draws=60, warmup=1, chains=2)
