"""The prior predictive distribution has the moments of the prior, before any fit."""

import numpy as np
import pyro.distributions as dist
import pytest

import hierfl
from hierfl import prior_predictive
from tests.effects.made import frame
from tests.programs import federation, learned, means


def test_a_formula_has_the_moments_of_its_prior() -> None:
    """Var y = 1 (Intercept) + 4 (sites) + dose^2 (slope) + 0.25 (rows)."""
    priors = {
        "Intercept": dist.Normal(5.0, 1.0),
        "dose": dist.Normal(0.0, 1.0),
        "sd_site": dist.LogNormal(float(np.log(2.0)), 1e-3),
        "sigma": dist.LogNormal(float(np.log(0.5)), 1e-3),
    }
    rows = frame()
    made = hierfl.formula("y ~ dose + (1 | site)", clients="site", priors=priors)
    found = prior_predictive(made, rows, draws=3000)
    drawn = np.concatenate(found["prior_predictive"]["y"].values)
    dose = (rows["dose"] - rows["dose"].mean()).to_numpy()
    np.testing.assert_allclose(drawn.mean(0), 5.0, atol=0.25)
    np.testing.assert_allclose(drawn.var(0), 5.25 + dose**2, rtol=0.15)
    np.testing.assert_allclose(found["prior"]["Intercept"].values.std(), 1.0, rtol=0.06)
    assert found["prior"]["site"].dims == ("chain", "draw", "client")
    np.testing.assert_allclose(found["observed_data"]["y"], rows["y"], rtol=1e-6)
    assert found["prior"].attrs["method"] == "prior"


def test_a_program_with_client_data_is_drawn_from_alike() -> None:
    found = prior_predictive(means, federation(), draws=50, seed=3)
    again = prior_predictive(means, federation(), draws=50, seed=3)
    for group in ("prior", "prior_predictive"):
        assert found[group].equals(again[group])


def test_what_has_no_prior_is_refused_by_name() -> None:
    with pytest.raises(hierfl.ProgramError, match="param 'm' of the model has no prior"):
        prior_predictive(learned, federation(), draws=5)
    with pytest.raises(TypeError, match="model is a Method"):
        prior_predictive(hierfl.methods.two_stage(means), federation(), draws=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="data is a DataFrame"):
        prior_predictive(means, frame(), draws=5)


def test_levels_have_a_dimension_of_their_own() -> None:
    for text, family in (
        ("grade ~ dose + (1 | site)", "categorical"),
        ("cbind(most, left, rest) ~ dose + (1 | site)", "dirichlet"),
    ):
        made = hierfl.formula(text, family, clients="site")
        found = prior_predictive(made, frame(), draws=20)
        name = text.split(" ~")[0]
        assert found["prior"]["dose"].dims == ("chain", "draw", f"{name}_level")
        assert name in found["prior_predictive"]
