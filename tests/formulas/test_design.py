"""Columns of a design, the same on each client as on all rows together, and coefficients by threshold, cs(x)."""

import itertools

import numpy as np
import pandas as pd
import pytest
from formulae import design_matrices
from scipy.special import expit

import hierfl
from hierfl import Formula
from hierfl.effects.conditional_effects import effects as conditional_effects
from hierfl.formulas.columns import by_client, prepared
from tests.effects.made import drawn
from tests.formulas.frames import patients
from tests.formulas.test_program import traced, value


def on_all(made: Formula, frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the common columns and offsets, evaluated client by client and put together."""
    parts = by_client(frame, made.clients)
    columns = {k: c for k, c in made.agreed.columns.items() if k in made.declared.columns}
    each = [
        made.layout.common.evaluate(prepared(own, columns, client), client)
        for client, own in parts.items()
    ]
    return np.concatenate([x for x, _ in each]), np.concatenate([o for _, o in each])


def agreed(text: str, frame: pd.DataFrame) -> Formula:
    return hierfl.formula(text, clients="site").on(frame)


@pytest.mark.parametrize(
    "terms",
    [
        "age",
        "sex",
        "0 + sex",
        "age * sex",
        "C(year)",
        "age + C(year):sex",
        "S(sex)",
        "I(age ** 2) + {dose + 1}",
        "log(dose) + sqrt(dose)",
        "np.log(dose)",
        "scale(age)",
        "center(age) + scale(log(dose))",
        "scale(age) * sex",
        "scale(age):center(dose)",
        "log(dose) + scale(dose + age)",
    ],
)
def test_columns_are_those_of_formulae_on_all_rows_together(terms: str) -> None:
    frame = patients()
    made = agreed(f"y ~ {terms}", frame)
    found, _ = on_all(made, frame)
    space = {"log": np.log, "sqrt": np.sqrt, "np": np}
    whole = design_matrices(f"y ~ {terms}", frame, extra_namespace=space).common
    names = [name for name in whole.slices if name != "Intercept"]
    wanted = np.concatenate([whole.design_matrix[:, whole.slices[n]] for n in names], 1)
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    labels = [label for n in names for label in whole.terms[n].labels]
    assert list(made.layout.common.columns) == labels


def test_the_order_of_clients_does_not_matter() -> None:
    frame = patients()
    other = pd.concat([part for _, part in reversed(list(frame.groupby("site")))])
    one, two = (agreed("y ~ scale(age) * sex + bs(dose, df=4)", f).agreed for f in (frame, other))
    assert one.columns["sex"] == two.columns["sex"]
    for name, margin in one.design.items():
        assert margin.mean == pytest.approx(two.design[name].mean, abs=1e-10)


def test_offsets_are_added_up_and_are_no_columns() -> None:
    frame = patients()
    made = agreed("y ~ age + offset(log(n)) + offset(dose)", frame)
    columns, offset = on_all(made, frame)
    assert columns.shape[1] == 1
    np.testing.assert_allclose(offset, np.log(frame["n"]) + frame["dose"])


def test_polynomials_are_uncorrelated_with_sd_one_and_span_the_powers() -> None:
    frame = patients()
    made = agreed("y ~ poly(age, 3)", frame)
    found, _ = on_all(made, frame)
    np.testing.assert_allclose(found.mean(0), 0.0, atol=1e-8)
    np.testing.assert_allclose(found.T @ found / len(found), np.eye(3), atol=1e-8)
    powers = np.vander(frame["age"], 4)
    ones = np.ones((len(found), 1))
    fitted = np.linalg.lstsq(np.hstack([ones, found]), powers, rcond=None)[0]
    np.testing.assert_allclose(np.hstack([ones, found]) @ fitted, powers, rtol=1e-8)


def test_knots_of_a_spline_are_the_quantiles_of_all_rows() -> None:
    frame = patients(rows=200)
    made = agreed("y ~ bs(age, df=6)", frame)
    knots = np.array(made.agreed.transforms["bs(age, df=6)"].knots)
    inner = knots[4:-4]
    wanted = np.quantile(frame["age"], [0.25, 0.5, 0.75])
    np.testing.assert_allclose(inner, wanted, atol=0.08 * frame["age"].std())
    assert knots[0] <= frame["age"].quantile(0.02) and knots[-1] >= frame["age"].quantile(0.98)
    found, _ = on_all(made, frame)
    assert found.shape[1] == 6
    # With the column that is dropped the basis sums to one, so that a constant is in its span with
    # the intercept.
    assert np.linalg.matrix_rank(np.hstack([np.ones((len(found), 1)), found])) == 7


def test_bounds_of_a_spline_can_be_given() -> None:
    made = agreed("y ~ bs(age, df=4, lower_bound=0, upper_bound=120)", patients())
    (constants,) = made.agreed.transforms.values()
    assert (constants.knots[0], constants.knots[-1]) == (0.0, 120.0)


def test_new_rows_are_evaluated_with_the_agreed_constants() -> None:
    frame = patients()
    made = agreed("y ~ scale(age)", frame)
    few = frame.head(3).assign(age=[0.0, 50.0, 100.0])
    x = made.data(few).fields["x"][:, 0].numpy()
    np.testing.assert_allclose(
        x, (few["age"] - frame["age"].mean()) / frame["age"].std(ddof=0), rtol=1e-5
    )


def test_splines_and_polynomials_of_scaled_columns_know_each_others_constants() -> None:
    frame = patients()
    made = agreed("y ~ poly(scale(age), 2)", frame)
    plain = agreed("y ~ poly(age, 2)", frame)
    np.testing.assert_allclose(on_all(made, frame)[0], on_all(plain, frame)[0], atol=1e-7)


# Terms -> the products whose whole spaces they span together, with an intercept and without.
SPANS = {
    "u:g + u": "u:g",
    "u/g": "u:g",
    "u/x": "u u:x",
    "x/u": "x:u",
    "u/(g + k)": "u:g u:k",
    "(u + g)/k": "u g u:g:k",
    "u:g:k": "u:g:k",
    "u*g*k": "u:g:k",
    "g:k + u": "u g:k",
    "u:g + g:k": "u:g g:k",
    "(u + x):g": "u:g x:g",
    "g:(u + x)": "u:g x:g",
    "(u + g + k) ** 2": "u:g u:k g:k",
    "(u + g + x) ** 2": "u:g u:x g:x",
    "(u + g) ** 2 - u": "u:g",
    "x*u*g": "x:u:g u:g",
    "x:u + x:g": "x:u x:g",
    "z:x + x:u:z": "x:z:u",
    "k:u + u:k": "u:k",
    "S(u)*g": "u:g",
    "S(u):S(g)": "u:g",
    "T(u, 's'):x + x": "u:x",
}


@pytest.mark.parametrize("terms", SPANS)
def test_products_span_all_that_they_say_and_nothing_twice(terms: str) -> None:
    """formulae alone loses columns of a:b:c, of (a + b) ** 2 without an intercept, of (a + b):c."""
    cells = itertools.product("ab", "rst", "pq", "ijk", range(2))
    frame = pd.DataFrame(list(cells), columns=["site", "u", "g", "k", "row"])
    frame[["x", "z", "y"]] = np.random.default_rng(1).normal(size=(len(frame), 3))
    full = {n: pd.get_dummies(frame[n]).to_numpy(float) for n in "ugk"}
    full |= {n: frame[[n]].to_numpy() for n in "xz"}
    for start in ("", "0 + "):
        made = agreed(f"y ~ {start}{terms}", frame)
        found, _ = on_all(made, frame)
        wanted = [np.ones((len(frame), 1))] if not start else []
        for product in SPANS[terms].split():
            space = np.ones((len(frame), 1))
            for name in product.split(":"):
                space = np.einsum("np,nq->npq", space, full[name]).reshape(len(frame), -1)
            wanted.append(space)
        if not start:
            found = np.hstack([np.ones((len(frame), 1)), found])
        ranks = map(np.linalg.matrix_rank, (found, np.hstack(wanted), np.hstack([found, *wanted])))
        assert {*ranks} == {found.shape[1]}


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
