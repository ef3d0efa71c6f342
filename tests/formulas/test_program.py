"""The program of a formula is the mixed model of lme4 and brms, and its printed text is what runs."""

from typing import Any

import numpy as np
import pandas as pd
import pyro
import pytest
import torch
from formulae import design_matrices
from pyro import poutine
from scipy.stats import multivariate_normal

import hierfl
from hierfl import Formula
from tests.formulas.frames import SITES, patients

MIXED = (
    "y ~ age + sex + (1 + age | site)",
    "y ~ age + beds + (1 | site) + (1 | region)",
    "y ~ age + (1 | site/ward) + (1 | year)",
    "y ~ 0 + sex + (0 + sex || site)",
    "y ~ age * sex + beds + (1 + age | site) + (1 + age | region)",
    "y ~ age + (1 | site) + (0 + age | site)",
    "y ~ age + (age | year) + (1 | site)",
    "y ~ (1 + sex | region) + (1 + age | site:ward)",
    "y ~ age + beds",
    "y ~ beds + (0 + age | site) + (1 + dose | region)",
)


def traced(made: Formula, frame: pd.DataFrame, seed: int = 0) -> Any:
    """Return a trace of the program on all rows, at a draw from its prior."""
    batch = hierfl.full_batch(made.data(frame))
    pyro.set_rng_seed(seed)
    trace = poutine.trace(made).get_trace(batch)
    trace.compute_log_prob()
    return trace


def value(trace: Any, site: str) -> np.ndarray:
    found: np.ndarray = trace.nodes[site]["value"].detach().numpy()
    return found


class Reference:
    """The mixed model X b + Z u on all rows together, with matrices from formulae, at the values of a trace."""

    def __init__(self, made: Formula, frame: pd.DataFrame, trace: Any) -> None:
        named = frame.assign(year=frame["year"].astype(str))
        text = made.text.replace("||", "|")
        self.design = design_matrices(text, named)
        self.made, self.trace, self.frame = made, trace, frame
        self.common = {
            column: value(trace, term.name).reshape(-1)[j]
            for term in made.layout.common.terms
            for j, column in enumerate(term.columns)
        }
        margins = made.agreed.design
        start = value(trace, made.layout.sampled_intercept) if made.layout.has_intercept else 0.0
        centered = sum(margins[c].mean * b for c, b in self.common.items())
        self.base = start - (centered if made.layout.common.has_intercept else 0.0)

    def fixed(self) -> np.ndarray:
        """Return X b of every row."""
        matrix = self.design.common.as_dataframe()
        at = {"Intercept": self.base, **self.common}
        return sum((matrix[c].to_numpy() * at[c] for c in matrix), np.zeros(len(matrix)))

    def deviations(self, term: Any) -> np.ndarray:
        """Return u of one term, (groups, columns): for clients their own coefficients less those they vary about."""
        found = value(self.trace, term.site).reshape(-1, len(term.columns))
        if term.place != "clients":
            if term.place == "within":
                found = value(self.trace, term.site).reshape(SITES * term.size, len(term.columns))
            return found
        u = found.copy()
        first = self.frame.groupby("site").first()
        for j, column in enumerate(term.columns):
            if self.made.layout.own.get(column) is not term:
                continue
            u[:, j] -= self.base if column == "Intercept" else self.common.get(column, 0.0)
            for group in self.made.layout.at("above"):
                if column in group.columns:
                    place = [group.levels.index(g) for g in first["region"]]
                    u[:, j] -= self.deviations(group)[place, group.columns.index(column)]
        return u

    def predictor(self) -> np.ndarray:
        """Return X b + Z u of every row."""
        eta = self.fixed()
        for term in self.made.layout.groups:
            rows = self.groups_of(term)
            for j, column in enumerate(term.columns):
                x = np.ones(len(eta)) if column == "Intercept" else self.column(column)
                eta = eta + x * self.deviations(term)[rows, j]
        return eta

    def column(self, name: str) -> np.ndarray:
        if name.startswith("sex["):
            return (self.frame["sex"] == name[4:-1]).to_numpy(dtype=float)
        return self.frame[name].to_numpy(dtype=float)

    def groups_of(self, term: Any) -> np.ndarray:
        """Return the number of each row's group."""
        sites = self.frame["site"].str[1:].astype(int).to_numpy()
        if term.place == "clients":
            return sites
        if term.place == "within":
            return sites * term.size + self.frame["ward"].str[1:].astype(int).to_numpy()
        (name,) = term.group.by
        return np.array([term.levels.index(str(v)) for v in self.frame[name]])


@pytest.mark.parametrize("text", MIXED)
def test_the_predictor_is_that_of_the_mixed_model(text: str) -> None:
    frame = patients(rows=12)
    made = hierfl.formula(text, clients="site").on(frame, min_count=1)
    trace = traced(made, frame)
    reference = Reference(made, frame, trace)
    eta = trace.nodes["y"]["fn"].mean.expand(SITES, 12).reshape(-1)
    np.testing.assert_allclose(eta, reference.predictor(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", MIXED)
def test_deviations_of_groups_have_the_covariance_of_their_sds_and_correlations(text: str) -> None:
    frame = patients(rows=12)
    made = hierfl.formula(text, clients="site").on(frame, min_count=1)
    trace = traced(made, frame, seed=1)
    reference = Reference(made, frame, trace)
    for term in made.layout.groups:
        sd = value(trace, term.sd).reshape(-1)
        cor = value(trace, term.cor) if term.cor else np.eye(len(sd))
        covariance = sd[:, None] * cor * sd
        known = multivariate_normal.logpdf(
            reference.deviations(term), np.zeros(len(sd)), covariance, allow_singular=True
        )
        found = trace.nodes[term.site]["log_prob"].sum().item()
        assert found == pytest.approx(known.sum(), rel=1e-6), term.site


@pytest.mark.parametrize(
    ("text", "family"),
    [
        *((text, "gaussian") for text in MIXED),
        ("ill ~ scale(age) * sex + (1 + scale(age) | site)", "bernoulli"),
        ("wins | trials(n) ~ poly(age, 2) + (1 | site)", "binomial"),
        ("visits ~ bs(age, df=4) + offset(log(n)) + (1 | site) + (1 | year)", "negative_binomial"),
        ("kind ~ age + sex + (1 + age | site) + (1 | site:ward)", "categorical"),
        ("grade ~ age + (1 | site)", "cumulative"),
        ("days | event(died) + weights(w) ~ age + (1 | site)", "weibull"),
        ("kind ~ age + beds + (1 | site) + (age | region)", "categorical"),
    ],
)
def test_the_printed_program_is_the_one_that_runs(text: str, family: str) -> None:
    frame = patients(rows=12)
    made = hierfl.formula(text, family, clients="site").on(frame, min_count=1)
    scope: dict[str, Any] = {}
    exec(made.program().replace("@hierfl.model\n", ""), scope)
    batch = hierfl.full_batch(made.data(frame))
    one = poutine.trace(made).get_trace(batch)
    other = poutine.trace(poutine.replay(scope["model"], one)).get_trace(batch)
    assert one.log_prob_sum() == other.log_prob_sum()
    assert torch.isfinite(torch.as_tensor(one.log_prob_sum())) or family == "negative_binomial"


def test_names_of_levels_cannot_become_code() -> None:
    frame = patients(rows=12)
    evil = "a'\nraise SystemExit"
    frame["sex"] = frame["sex"].replace({"m": evil, "f": 'b"""\nraise SystemExit'})
    frame["region"] = frame["region"].replace({"north": evil})
    made = hierfl.formula("y ~ sex + (1 | region) + (1 | site)", clients="site").on(
        frame, min_count=1
    )
    traced(made, frame)
    assert made.dims["region"][0][1][0] == evil


def test_python_names_of_sites_differ_from_each_other_and_from_those_of_the_program() -> None:
    frame = patients(rows=12).rename(columns={"age": "batch", "dose": "eta", "beds": "lambda"})
    frame["A b"], frame["A_b"] = frame["n"], frame["w"]
    made = hierfl.formula("y ~ batch + eta + `lambda` + `A b` + A_b + (1 | site)", clients="site")
    traced(made.on(frame, min_count=1), frame)
