"""Responses in several columns, and between two bounds: their programs against scipy, and what is refused."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import softmax

import hierfl
from hierfl.effects.comparisons import predictions
from hierfl.effects.conditional_effects import effects
from hierfl.effects.variance import r2
from tests.effects.made import drawn
from tests.formulas.frames import patients
from tests.formulas.test_program import traced, value


def rows() -> pd.DataFrame:
    """Patients, with counts and shares in three columns each."""
    found = patients()
    found["lost"], found["all"] = found["n"] - found["wins"], found["n"] + found["visits"]
    share = 1.0 / (1.0 + np.exp(-found["y"]))
    found["most"], found["part"], found["rest"] = 0.7 * share, 0.3 * share, 1.0 - share
    return found.assign(some=found["visits"] + 1)


def made(text: str, family: str) -> hierfl.Formula:
    return hierfl.formula(text, family, clients="site").on(rows())


def eta_of(trace: Any, frame: pd.DataFrame) -> np.ndarray:
    """The predictor of each row, x b + a of its client, (n,) or (n, O)."""
    site = frame["site"].str[1:].astype(int).to_numpy()
    own = value(trace, "site")
    b = value(trace, "age")
    x = frame["age"].to_numpy()
    found: np.ndarray = (
        own.reshape(-1)[site] + b * x
        if b.ndim == 0
        else own.reshape(len(own), -1)[site] + x[:, None] * b
    )
    return found


def of_rows(trace: Any, name: str, frame: pd.DataFrame) -> np.ndarray:
    """The log density of each row, client after client as in the frame."""
    counts = frame.groupby("site", sort=False).size()
    found = trace.nodes[name]["log_prob"].detach().numpy()
    return np.concatenate([row[:n] for row, n in zip(found, counts, strict=True)])


def test_columns_of_counts_are_multinomial() -> None:
    frame, name = rows(), "cbind(wins, lost, visits)"
    trace = traced(made(f"{name} | trials(all) ~ age + (1 | site)", "multinomial"), frame)
    p = softmax(np.pad(eta_of(trace, frame), ((0, 0), (1, 0))), -1)
    wanted = [
        stats.multinomial.logpmf(y, y.sum(), q)
        for y, q in zip(frame[["wins", "lost", "visits"]].to_numpy(), p, strict=True)
    ]
    np.testing.assert_allclose(of_rows(trace, name, frame), wanted, rtol=1e-6)


def test_columns_of_shares_are_dirichlet() -> None:
    frame, name = rows(), "cbind(most, part, rest)"
    trace = traced(made(f"{name} ~ age + (1 | site)", "dirichlet"), frame)
    p = softmax(np.pad(eta_of(trace, frame), ((0, 0), (1, 0))), -1)
    phi = value(trace, "phi")
    each = zip(frame[["most", "part", "rest"]].to_numpy(), p, strict=True)
    wanted = [stats.dirichlet.logpdf(y / y.sum(), phi * q) for y, q in each]
    np.testing.assert_allclose(of_rows(trace, name, frame), wanted, rtol=1e-5)


def test_rows_between_bounds() -> None:
    frame = rows()
    frame = frame[frame["y"].between(-1.0, 3.0)]
    formula = hierfl.formula("y | trunc(-1, 3) ~ age + (1 | site)", clients="site").on(frame)
    trace = traced(formula, frame)
    fn = stats.norm(eta_of(trace, frame), value(trace, "sigma"))
    wanted = fn.logpdf(frame["y"]) - np.log(fn.cdf(3.0) - fn.cdf(-1.0))
    np.testing.assert_allclose(of_rows(trace, "y", frame), wanted, rtol=1e-6)


def test_answers_are_of_responses_between_the_bounds() -> None:
    found = drawn("some | trunc(lb=1) ~ dose", "poisson", draws=6)
    table = effects(found, "dose", grid=[0.5]).frame
    rate = (found.base[:, 0] + 0.5 * found.shared["dose"]).exp().numpy()
    np.testing.assert_allclose(table["mean"], np.mean(rate / -np.expm1(-rate)), rtol=1e-6)


def test_answers_that_mean_nothing_are_refused() -> None:
    angles = drawn("angle ~ dose + (1 | site)", "von_mises", draws=40)
    with pytest.raises(ValueError, match="von_mises is angles"):
        r2(angles)
    with pytest.raises(ValueError, match="angles have no average"):
        predictions(angles, "dose")
    assert len(effects(angles, "dose", grid=[0.0]).frame) == 1
    parts = drawn("cbind(most, left, rest) ~ dose + (1 | site)", "dirichlet", draws=40)
    with pytest.raises(ValueError, match="dirichlet is in several columns"):
        r2(parts)
    shares = predictions(parts, "dose", values=[0.0]).frame
    assert list(shares["level"]) == ["most", "left", "rest"]
    assert shares["mean"].sum() == pytest.approx(1.0)


def test_several_columns_are_kept_and_updated() -> None:
    text = "cbind(wins, lost, visits) | trials(all) ~ age + (1 | site)"
    formula = made(text, "multinomial")
    assert hierfl.Schema.of_json(formula.agreed.json()) == formula.agreed
    changed = formula.update("~ . + sex")
    assert changed.text == f"{text} + sex"
