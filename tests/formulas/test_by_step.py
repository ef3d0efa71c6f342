"""cs(x): a coefficient for each threshold, in the program, in effects, and what is refused."""

import numpy as np
import pytest
from scipy.special import expit

import hierfl
from hierfl.effects.conditional_effects import effects as conditional_effects
from tests.effects.made import drawn
from tests.formulas.frames import patients
from tests.formulas.test_program import traced, value


@pytest.mark.parametrize("family", ["sratio", "acat"])
def test_the_density_is_that_of_brms(family: str) -> None:
    """Thresholds are at 0 of all columns, and eta_k = x b_k + a; Buerkner and Vuorre 2019."""
    rows = patients()
    text = "grade ~ cs(dose) + cs(sex) + age + (1 | site)"
    trace = traced(hierfl.formula(text, family, clients="site").on(rows), rows)
    site = rows["site"].str[1:].astype(int).to_numpy()
    sex = (rows["sex"].to_numpy()[:, None] == ["m", "x"]).astype(float)
    columns = np.concatenate([rows[["dose"]].to_numpy(), sex], 1)
    moves = np.concatenate([value(trace, "cs(dose)")[None], value(trace, "cs(sex)")])
    shared = rows["age"] * value(trace, "age")  # a site has its own total intercept
    eta = columns @ moves + shared.to_numpy()[:, None]
    eta = eta + value(trace, "site").reshape(-1)[site][:, None]
    steps = value(trace, "thresholds") - eta
    if family == "sratio":
        stop = expit(steps)
        p = np.stack([stop[:, 0], (1 - stop[:, 0]) * stop[:, 1], (1 - stop).prod(1)], 1)
    else:
        p = np.exp(np.stack([0 * eta[:, 0], -steps[:, 0], -steps.sum(1)], 1))
        p = p / p.sum(1, keepdims=True)
    wanted = np.log(p[np.arange(len(rows)), rows["grade"].cat.codes]).sum()
    found = trace.nodes["grade"]["log_prob"].sum().item()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_names_priors_and_effects() -> None:
    found = drawn("grade ~ cs(sex) + cs(dose) + (1 | site)", "sratio")
    dims, priors = found.formula.dims, found.formula.all_priors
    assert dims["cs(sex)"] == (("cs(sex)_dim", ("m",)), ("cs(sex)_threshold", ("1", "2")))
    assert dims["cs(dose)"] == (("cs(dose)_threshold", ("1", "2")),)
    tight = drawn("grade ~ cs(dose)", "sratio", priors={"b": "normal(0, 1)"}).formula
    assert tight.all_priors["cs(dose)"].scale == 1.0 and "cs(sex)[m]" in priors  # type: ignore[union-attr]
    table = conditional_effects(found, "dose", grid=[1.0], at={"sex": "m"}).frame
    design = found.formula.agreed.design
    moved = (
        found.shared["thresholds_centered"]
        - (1.0 - design["cs(dose)"].mean) * found.shared["cs(dose)"]
    )
    moved = moved - (1.0 - design["cs(sex)[m]"].mean) * found.shared["cs(sex)"][:, 0]
    stop = expit(moved.numpy())
    wanted = [stop[:, 0], (1 - stop[:, 0]) * stop[:, 1], (1 - stop).prod(1)]
    np.testing.assert_allclose(table["mean"], np.mean(wanted, 1), rtol=1e-6)
    with pytest.raises(ValueError, match="scale='response'"):
        conditional_effects(found, "dose", scale="link")
