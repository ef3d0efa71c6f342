"""Rows at the edge of what a formula means: offsets, no trials, one value, far knots, values far out."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest

import hierfl
from hierfl.effects.predictor_rows import typical
from hierfl.nodes import in_process
from hierfl.runs.choice import choose
from tests.formulas.small import BASE, fields, on, refused


def test_the_prior_of_the_intercept_is_that_of_the_rate_beside_an_offset() -> None:
    frame = BASE.assign(n=1e9, c=np.resize([3, 5, 8], 60), m=np.exp(BASE.z))
    far = on("c ~ x + offset(log(n)) + (1 | h)", "poisson", frame).all_priors["Intercept"]
    assert abs(float(far.loc) - np.log(5.33 / 1e9)) < 0.1  # type: ignore[union-attr]
    made = on("y ~ x + offset(z) + offset(log(m))", frame=frame)
    center = float(made.all_priors["Intercept"].loc)  # type: ignore[union-attr]
    assert center == pytest.approx(frame.y.mean() - 2 * frame.z.mean(), abs=1e-5)
    assert "offset()" not in made.layout.common.columns


def test_numbers_behind_a_bar_are_no_groups() -> None:
    for text in ("y ~ (h | x)", "y ~ (1 | h/x)", "y ~ (1 | g:x)"):
        refused(lambda t=text: on(t), "'x'", "(x | h)")  # type: ignore[misc]
    assert on("y ~ (1 | k)", frame=BASE.assign(k=np.tile([1.0, 2.0], 30))).layout.groups


def test_a_slope_of_a_column_of_the_client_is_warned_of() -> None:
    frame = BASE.assign(beds=BASE.h.map({"a": 10.0, "b": 20.0, "c": 35.0}))
    for text in ("beds | h", "scale(beds) || h", "beds | h:u"):
        with pytest.warns(UserWarning, match="beds.* has one value in all rows of each client"):
            on(f"y ~ x + beds + ({text})", frame=frame)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("beds | u", "x:beds | h", "0 + beds | h"):
            on(f"y ~ x + beds + ({text})", frame=frame)


def test_a_row_without_trials_is_refused_by_its_number() -> None:
    frame = BASE.assign(y=0, n=np.where(np.arange(60) == 23, 0, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(lambda: on("y | trials(n) ~ x", "binomial", frame), "'n'", "'b'", "row 3")


def test_a_response_of_one_value_is_refused_by_name() -> None:
    for family in ("gaussian", "student", "lognormal"):
        made = on("y ~ x + (1 | h)", family, BASE.assign(y=2.0))
        refused(made.program, "'y'", "one value, 2")
    on("y ~ x", "poisson", BASE.assign(y=0)).program()  # which says much of a rate


@pytest.mark.filterwarnings("ignore:column 'x' .* more than 8 sds")
def test_rows_far_beyond_the_knots_are_warned_of() -> None:
    made = on("y ~ bs(x, df=5)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.data(BASE)
    with pytest.warns(UserWarning, match=r"of client 'a' has 2 values far outside its knots"):
        made.data(BASE.iloc[[0, 20, 1]].assign(x=[BASE.x.max() + 5, 0.0, BASE.x.max() + 5]))


def test_yes_and_no_are_two_levels() -> None:
    frame = BASE.assign(t=BASE.x > 0, done=BASE.y > 1)
    frame["o"] = frame.t.astype(object)
    for name in ("t", "o"):
        made = on(f"y ~ {name} + (1 | h)", frame=frame)
        assert made.layout.common.columns == (f"{name}[True]",)
        assert np.array_equal(fields(made, frame)["x"][:, 0], frame.t)
        assert typical(made, None, {name: [False, True]}).common[:, 0].tolist() == [0.0, 1.0]
    assert fields(on("done ~ x", "bernoulli", frame), frame)["y"].sum() == frame.done.sum()
    times = BASE.assign(time=np.exp(BASE.z), late=BASE.x > 0)
    cens = fields(on("time | cens(late) ~ x", "weibull", times), times)["cens"]
    assert np.array_equal(cens, times.late)


def test_two_names_are_a_response_of_0_and_1() -> None:
    frame = BASE.assign(r=np.where(BASE.y > 1, "yes", "no"), t=True, k=BASE.u)
    made = on("r ~ x", "bernoulli", frame)
    assert np.array_equal(fields(made, frame)["y"], frame.r == "yes")
    assert "1 is yes" in made.program()
    assert fields(on("t ~ x", "bernoulli", frame), frame)["y"].all()
    refused(lambda: on("k ~ x", "bernoulli", frame), "'k'", "two")
    refused(lambda: on("b ~ x", "binomial"), "trials(n)", "bernoulli")


def test_formulas_can_be_pickled() -> None:
    for made in (on("y ~ x + (1 | h)"), on("b ~ C(u)", "bernoulli")):
        _ = made.model
        assert pickle.loads(pickle.dumps(made)).program() == made.program()
    breaks = hierfl.models.families.piecewise_exponential((1.0, 2.0))
    assert pickle.loads(pickle.dumps(breaks)).expression() == breaks.expression()


def test_units_change_nothing_but_units() -> None:
    times = {"x": 1e6, "y": 1e-3}
    plain, other = (
        on("y ~ x + z + (1 + x | h)", frame=frame).all_priors
        for frame in (BASE, BASE.assign(**{n: BASE[n] * by for n, by in times.items()}))
    )
    for name, by in {"x": 1e-9, "z": 1e-3, "sd_h[x]": 1e-9, "sd_h[Intercept]": 1e-3}.items():
        priors: list[Any] = [p[name] for p in (plain, other)]
        one, two = (getattr(prior, "base_dist", prior).scale for prior in priors)
        assert float(two / one) == pytest.approx(by, rel=1e-4)
    _, own = (on("y ~ (0 + x | h)", frame=f).all_priors["sd_h[x]"] for f in (BASE, BASE))
    assert own.base_dist.scale == plain["sd_h[x]"].base_dist.scale  # type: ignore[union-attr]
    given = on("y ~ x", frame=BASE, priors={"x": dist.Normal(0.0, 3.0)}).all_priors["x"]
    assert float(given.scale) == 3.0  # type: ignore[union-attr]


@pytest.mark.slow
def test_coefficients_reach_the_center_where_no_intercept_does() -> None:
    """With rstanarm's prior sigma took up the mean: 1000 is 190 sds of Normal(0, 5.3)."""
    frame = BASE.assign(y=BASE.y + 1000.0, one=1.0)
    for text, site in (("0 + u + (1 | h)", "u"), ("0 + one", "one"), ("0 + S(u)", "S(u)")):
        made = on(f"y ~ {text}", frame=frame)
        found = hierfl.fit(made, frame, seed=0).posterior(draws=200)["posterior"]
        means = found[site].mean(("chain", "draw")).values
        wanted = frame.groupby("u").y.mean().values
        wanted = frame.y.mean() if site == "one" else wanted
        wanted = [wanted.mean(), *(wanted - wanted.mean())[:2]] if site == "S(u)" else wanted
        np.testing.assert_allclose(means, wanted, atol=0.4)
        assert float(found["sigma"].mean()) < 2.0
    refused(lambda: on("y ~ one", frame=frame), "one value, 1")


def test_priors_of_a_column_called_as_many_priors_are_refused() -> None:
    frame = BASE.rename(columns={"x": "b", "z": "sd", "b": "q"})
    for name in ("b", "sd"):
        made = on("y ~ b + sd + (1 | h)", frame=frame, priors={name: dist.HalfNormal(1.0)})
        refused(made.program, f"'{name}'", "rename the column")


@pytest.mark.slow
def test_wards_stand_without_a_term_of_their_hospital() -> None:
    rng = np.random.default_rng(42)
    ward, t = np.repeat(np.arange(12), 10), rng.integers(0, 2, 120)
    y = 0.4 * t + rng.normal(0.0, 0.5, 12)[ward] + rng.normal(size=120)
    frame = pd.DataFrame({"h": np.repeat(list("abc"), 40), "ward": ward, "t": t, "y": y})
    frame = frame[frame.ward != 11]  # one hospital has fewer than the others
    means = []
    for clients in ("h", "ward"):  # the same model, its rows at other clients
        made = hierfl.formula("y ~ t + (1 | ward)", clients=clients)
        found = hierfl.fit(made, frame, seed=0).posterior(draws=1000)["posterior"]
        means.append([float(found[s].mean()) for s in ("Intercept", "t", "sd_ward", "sigma")])
    assert means[1] == pytest.approx(means[0], abs=0.06)


def test_wards_of_an_unseen_client_bind_no_later_question() -> None:
    """Each question about a new hospital numbers its wards; a fit of it keeps them."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"h": np.repeat(list("abc"), 20), "ward": np.tile(list("pqr"), 20)})
    frame["y"] = rng.normal(size=60)
    fit = hierfl.fit(hierfl.formula("y ~ 1 + (1 | h/ward)", clients="h"), frame, seed=0)
    new = frame[:6].assign(h="new")
    with pytest.raises(KeyError, match="'new' was not fitted"):
        fit.predict(new)
    for wards in ("uvw", "pqu", "z"):
        other = new.assign(ward=np.resize(list(wards), 6))
        assert len(hierfl.predict_from_prior(fit, other, draws=5).mean) == 6
    own = fit.personalize(new)
    assert len(own.predict(new[::-1]).mean) == 6
    with pytest.raises(ValueError, match="has the group 'z'"):
        own.predict(new.assign(ward="z"))
    many = frame[:8].assign(h="new", ward=list("abcdefgh"))
    with pytest.raises(ValueError, match="predict 3 of them at a time"):
        hierfl.predict_from_prior(fit, many)


def test_wards_of_frames_that_do_not_name_their_hospital() -> None:
    own = pd.DataFrame({"ward": ["p", "p", "q"], "y": [0.1, 0.4, 0.2]})
    made = hierfl.formula("y ~ 1 + (1 | h:ward)", clients="h").on({"a": own, "b": own + own})
    assert made.agreed.groups["h:ward"].most == 2


@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_small_units_leave_a_likelihood_its_curvature() -> None:
    """Moved by 0.1, a column in units of 1e6 made predictors of 1e5, where counts do not curve."""
    rng = np.random.default_rng(0)
    x = 1e-6 * rng.normal(size=40)
    frame = pd.DataFrame({"h": np.repeat(list("abcd"), 10), "x": x, "y": rng.poisson(2.0, 40)})
    made = hierfl.formula("y ~ x + (1 | h)", "negative_binomial", clients="h")
    assert choose(made.on(frame), made.on(frame).data(frame)).method.name == "two_stage"


WORDS = "column 'bmi' of client 'b' has 1 value more than 8 sds"


def rows(n: int = 60, far: float = 270.0) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"h": np.resize(list("abc"), n), "bmi": rng.normal(27.0, 4.0, n)})
    frame["y"] = 0.1 * frame["bmi"] + rng.normal(0.0, 1.0, n)
    frame.loc[4, "bmi"] = far  # of client b
    return frame


def said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return sorted({str(warning.message) for warning in caught})


@pytest.mark.parametrize(
    ("n", "family", "text"),
    [
        (15, "gaussian", "y ~ scale(bmi) + (bmi | h)"),
        (60, "poisson", "y ~ s(bmi, k=4)"),
        (3000, "gaussian", "y ~ bmi + (1 | h)"),
    ],
)
def test_a_value_far_out_is_named_without_its_value(n: int, family: str, text: str) -> None:
    frame = rows(n).assign(y=lambda f: (f["y"].clip(lower=0.0) + 1.0).round())
    formula = hierfl.formula(text, family, clients="h").on(frame)
    messages = said(lambda: formula.data(frame))
    assert messages[-1].startswith(WORDS) and "270" not in str(messages)
    beyond = "'s(bmi, k=4)' of client 'b' has 1 value far outside its knots"
    assert len(messages) == 1 or messages[0].startswith(beyond)
    assert said(lambda: formula.data(frame.assign(bmi=frame["bmi"].clip(15.0, 32.0)))) == []


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_a_response_far_out_is_named_as_a_predictor_is(family: str) -> None:
    frame = rows(far=30.0)
    frame["y"] = (frame["y"].clip(lower=0.0) + 1.0).round()
    frame.loc[7, "y"] = 27000.0  # of client b
    formula = hierfl.formula("y ~ bmi + (1 | h)", family, clients="h").on(frame)
    messages = said(lambda: formula.data(frame))
    assert len(messages) == 1 and messages[0].startswith(WORDS.replace("bmi", "y"))
    assert "27000" not in messages[0]
    assert said(lambda: formula.data(frame, labeled=False)) == []


def test_new_rows_are_judged_by_the_agreed_mean_and_sd() -> None:
    frame = rows(far=30.0)
    formula = hierfl.formula("y ~ bmi + (1 | h)", clients="h").on(frame)
    new = pd.DataFrame({"h": ["a", "b", "new"], "bmi": [27.0, 270.0, 290.0]})
    assert [message[:33] for message in said(lambda: formula.data(new, labeled=False))] == [
        "column 'bmi' of client 'b' has 1 ",
        "column 'bmi' of client 'new' has ",
    ]


def test_rare_levels_of_two_are_not_far_out() -> None:
    n = 3000
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"h": np.resize(list("abc"), n), "y": rng.normal(size=n)})
    frame["x"], frame["k"] = (np.arange(n) < 8) * 1, 1 + (np.arange(n) < 8) * 1
    frame["flag"] = frame["x"] == 1
    formula = hierfl.formula("y ~ x + k + flag + (1 | h)", clients="h").on(
        frame.assign(k=rng.integers(1, 3, n))
    )
    assert said(lambda: formula.data(frame)) == []


def test_a_missing_covariate_is_not_far_out() -> None:
    """It stands as 0 in the program, which no value of this column is near."""
    frame = rows(far=30.0).assign(bmi=lambda f: f["bmi"].clip(25.0, 29.0))
    frame.loc[::7, "bmi"] = np.nan
    text = ["y ~ mi(bmi) + (1 | h)", "bmi | mi() ~ 1"]
    formula = hierfl.formula(text, clients="h").on(frame)
    assert said(lambda: formula.data(frame)) == []
    frame.loc[4, "bmi"] = 270.0
    assert said(lambda: formula.data(frame))[0].startswith(WORDS)


def test_a_long_tail_is_not_far_out() -> None:
    n, rng = 3000, np.random.default_rng(0)
    frame = pd.DataFrame({"h": np.resize(list("abc"), n), "income": rng.lognormal(10.0, 1.3, n)})
    frame["y"] = rng.normal(size=n)
    frame["visits"] = rng.poisson(rng.lognormal(0.0, 1.5, n)) * rng.integers(0, 2, n)  # many zeros
    for far, text, family in (
        ("income", "y ~ income + (1 | h)", "gaussian"),
        ("visits", "visits ~ y + (1 | h)", "negative_binomial"),
    ):
        assert frame[far].max() > frame[far].mean() + 8.0 * frame[far].std()
        formula = hierfl.formula(text, family, clients="h").on(frame)
        assert said(lambda made=formula: made.data(frame)) == []


@pytest.mark.slow
def test_over_nodes_each_node_warns_of_its_own(tmp_path: Path) -> None:
    formula = hierfl.formula("y ~ bmi + (1 | h)", clients="h")
    # of 200 rows the value has less than 99% of the squares, so that its node takes part
    parts = {str(name): part for name, part in rows(600).groupby("h")}
    messages = said(lambda: hierfl.nodes.fit(formula, in_process(parts, tmp_path), seed=0))
    assert [message[: len(WORDS)] for message in messages] == [WORDS]
    assert "270" not in "".join(messages)
    sent = [path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("270.0" in text for text in sent)


# ------------------------------------------------------------ products of a column far from 0
@pytest.mark.parametrize(
    ("text", "priors", "is_far"),
    [
        ("y ~ year * arm + (1 | h)", {}, True),
        ("y ~ arm:year + (1 | h)", {}, True),
        ("y ~ center(year) * arm + (1 | h)", {}, False),
        ("y ~ year + bmi * arm + (1 | h)", {}, False),
        ("y ~ year * arm + (1 | h)", {"year": "normal(0, 1)"}, False),
    ],
)
def test_a_product_of_a_column_far_from_0_is_named(
    text: str, priors: dict[str, Any], is_far: bool
) -> None:
    """After x + 1000 the slopes of g ~ x * k by group went from 0.042 to 0.002: their priors are at 0 of x."""
    rng = np.random.default_rng(0)
    frame = rows(far=27.0).assign(
        year=2000.0 + rng.integers(0, 20, 60), arm=np.resize(["p", "q"], 60)
    )
    formula = hierfl.formula(text, clients="h", priors=priors)
    words = " ".join(said(lambda: formula.on(frame).data(frame)))
    assert ("far from all rows" in words) is is_far
    assert ("write center(year) in the product" in words) is is_far
