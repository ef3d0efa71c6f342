"""A formula prints in brms's form, changes by `~ . + x`, and lists its priors; brms's and PreliZ's are read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import hierfl
from hierfl import methods
from hierfl.formulas.shown import updated
from tests.effects.made import frame
from tests.programs import fit

TEXT = "y ~ age + sex + (1 + age | site)"


def made(**options: Any) -> hierfl.Formula:
    return hierfl.formula(TEXT, clients="site", **options)


def test_priors_are_listed_with_their_source() -> None:
    ready = made(priors={"b": "normal(0, 1)", "sex": "cauchy(0, 2)"}).on(frame())
    table = ready.prior_summary().set_index("site")
    assert list(table.index) == [*ready.all_priors]
    assert list(table.loc["age"]) == ["Normal(0.0, 1.0)", "user"]
    assert list(table.loc["sex[m]"]) == ["Cauchy(0.0, 2.0)", "user"]
    assert list(table.loc["cor_site"]) == ["LKJ(1)", "default"]
    assert table["source"]["sigma"] == table["source"]["Intercept"] == "default"
    with pytest.raises(ValueError, match="have not agreed on a schema"):
        made().prior_summary()


@pytest.mark.parametrize("family", ["cumulative", "sratio"])
def test_one_prior_is_that_of_each_threshold(family: str) -> None:
    """In order where those of the family are: the density of two draws is twice that of both."""
    own = {"thresholds": "normal(0, 3)"}
    formula = hierfl.formula("grade ~ age", family, clients="site", priors=own).on(frame())
    prior: Any = formula.all_priors["thresholds"]
    each = stats.norm(0, 3).logpdf([-1.0, 2.0]).sum()
    wanted = each + (np.log(2.0) if family == "cumulative" else 0.0)
    assert float(prior.log_prob(torch.tensor([-1.0, 2.0]))) == pytest.approx(wanted, rel=1e-5)
    assert "dist.Normal(0.0, 3.0)" in formula.program()


# brms's words -> scipy's distribution
WORDS: dict[str, Any] = {
    "normal(1, 2)": stats.norm(1, 2),
    "student_t(3, 1, 2)": stats.t(3, 1, 2),
    "cauchy(1, 2)": stats.cauchy(1, 2),
    "double_exponential(1, 2)": stats.laplace(1, 2),
    "logistic(1, 2)": stats.logistic(1, 2),
}
SCALES: dict[str, Any] = {
    "normal(0, 2)": stats.halfnorm(scale=2),
    "cauchy(0, 2)": stats.halfcauchy(scale=2),
    "logistic(0, 2)": stats.halflogistic(scale=2),
    "exponential(2)": stats.expon(scale=1 / 2),
    "gamma(2, 3)": stats.gamma(2, scale=1 / 3),
    "inv_gamma(2, 3)": stats.invgamma(2, scale=3),
    "lognormal(1, 2)": stats.lognorm(2, scale=np.e),
    "weibull(2, 3)": stats.weibull_min(2, scale=3),
}


@pytest.mark.parametrize("text", [*WORDS, *SCALES])
def test_words_are_the_densities_of_stan(text: str) -> None:
    site, wanted = ("age", WORDS[text]) if text in WORDS else ("sigma", SCALES[text])
    prior: Any = made(priors={site: text}).on(frame()).all_priors[site]
    at = np.array([0.3, 1.0, 4.0])
    np.testing.assert_allclose(prior.log_prob(torch.tensor(at)), wanted.logpdf(at), rtol=1e-5)


def test_priors_run_in_the_program_and_in_a_saved_record(tmp_path: Any) -> None:
    own = {"cor": "lkj(2)", "sd": "student_t(3, 0, 1)", "age": dist.Normal(0.0, 0.1)}
    formula = made(priors=own).on(frame())
    assert "dist.Normal(0.0, 0.1)" in formula.program()
    assert "dist.LKJCholesky(2, 2.0)" in formula.program()
    text = "dist.FoldedDistribution(dist.StudentT(3.0, 0.0, 1.0)).expand([2]).to_event(1)"
    assert f"pyro.sample('sd_site_centered', {text})" in formula.program()
    found = fit(methods.fedsvi(formula), formula.data(frame()), rounds=1)
    found.save(tmp_path)
    model: Any = hierfl.load(tmp_path).method.model
    assert model.program() == formula.program()


class _OfPreliz:
    __module__ = "preliz.distributions.normal"


def _preliz(kind: str, **values: Any) -> Any:
    return type(kind, (_OfPreliz,), {"__module__": "preliz.distributions"} | values)()


def test_objects_of_preliz_are_distributions() -> None:
    priors = {
        "b": _preliz("Normal", mu=1.0, sigma=2.0),
        "sd": _preliz("HalfStudentT", nu=3.0, sigma=2.0),
        "sigma": _preliz("Gamma", alpha=2.0, beta=3.0),
    }
    ready: dict[str, Any] = dict(made(priors=priors).on(frame()).all_priors)
    at = torch.tensor(0.7)
    np.testing.assert_allclose(ready["age"].log_prob(at), stats.norm(1, 2).logpdf(0.7), rtol=1e-6)
    np.testing.assert_allclose(
        ready["sd_site[age]"].log_prob(at), np.log(2) + stats.t(3, 0, 2).logpdf(0.7), rtol=1e-6
    )
    np.testing.assert_allclose(
        ready["sigma"].log_prob(at), stats.gamma(2, scale=1 / 3).logpdf(0.7), rtol=1e-6
    )


WRONG: dict[str, Any] = {
    "and 'norml' is not one of the words: write it as in brms": {"b": "norml(0, 1)"},
    "and normal takes 2 numbers": {"b": "normal(0)"},
    "write it as in brms": {"b": "normal(0, 1) + 1"},
    "normal.0, x.', and normal takes 2 numbers": {"b": "normal(0, x)"},
    "'normal.0, -1.', which is not a distribution": {"b": "normal(0, -1)"},
    "brms uses the part above 0": {"sd": "normal(1, 1)"},
    "concentration of an LKJ": {"cor": "normal(0, 1)"},
    "give a distribution of Pyro": {"b": "lkj(2)"},
    "PreliZ's Wald, which hierfl cannot read": {"b": _preliz("Wald")},
    "PreliZ's Normal, without mu, sigma": {"b": _preliz("Normal", mu=None, sigma=None)},
}


@pytest.mark.parametrize("message", WRONG)
def test_other_priors_are_refused(message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        made(priors=WRONG[message]).on(frame()).program()


# ------------------------------------------------------------ other terms
UPDATES = {
    "~ . + dose": "y ~ age + sex + (1 + age | site) + dose",
    ". ~ . - sex": "y ~ age + (1 + age | site)",
    "~ . - (1 + age | site) + (1 | site)": "y ~ age + sex + (1 | site)",
    "count ~ dose": "count ~ dose",
    "~ . + age - 1": "y ~ age + sex + (1 + age | site) - 1",
    "time | event(seen) ~ .": "time | event(seen) ~ age + sex + (1 + age | site)",
    "~ log(dose.1) + . + `a . b`": "y ~ log(dose.1) + age + sex + (1 + age | site) + `a . b`",
}


@pytest.mark.parametrize("text", UPDATES)
def test_a_dot_is_what_was_there(text: str) -> None:
    assert updated(TEXT, text) == UPDATES[text]


REFUSED: dict[str, Callable[[], Any]] = {
    "a dot inside a term": lambda: made().update("~ . * dose"),
    "the formula has no '~'": lambda: made().update("dose"),
    "has no term '.1 . site.' to remove": lambda: made().update("~ . - (1 | site)"),
    "removes 'dose', which it does not have": lambda: (
        made().update("~ . - dose").declared.described
    ),
    "update.. has no argument 'prior': did you mean 'priors'": lambda: made().update(
        "~ .", prior={}
    ),
    "the update is 3": lambda: made().update(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_update_that_cannot_be_read_is_refused(message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        REFUSED[message]()


def test_an_update_keeps_family_priors_and_agreed_columns() -> None:
    ready = hierfl.formula(
        "died ~ age + arm + (1 | site)", "bernoulli", clients="site", priors={"b": "normal(0, 1)"}
    ).on(frame(), levels={"arm": ["c", "b", "a"]})
    fewer = ready.update("~ . - age")
    assert (fewer.family.name, fewer.priors) == ("bernoulli", ready.priors)
    assert fewer.on(frame()).agreed.columns["arm"].levels == ("c", "b", "a")
