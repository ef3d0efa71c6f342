"""Names, links, expressions and default priors of the families."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import lognorm

from hierfl.models import families
from hierfl.models.families import Response
from hierfl.models.families.names import ALIASES, FAMILIES
from hierfl.program.sites import recipe_of


@pytest.mark.parametrize("name", FAMILIES)
def test_names(name: str) -> None:
    made = families.named(name)
    assert made.name == name and made == getattr(families, name)()
    recipe = recipe_of(made)
    assert recipe is not None and recipe.factory(**recipe.options) == made


@pytest.mark.parametrize(
    ("page", "head"),
    [
        ("cheatsheet", "| a formula's response | family |"),
        ("families", "| family | response | links |"),
    ],
)
def test_pages_list_all_families_and_no_others(page: str, head: str) -> None:
    """The page's table of families has every one, each once or under two kinds."""
    text = (Path(__file__).parents[3] / "docs" / f"{page}.md").read_text()
    (table,) = (part for part in text.split("\n\n") if part.startswith(head))
    found = {*re.findall(r"`(?:families\.)?([a-z_]+)(?:\(breaks\))?`", table)}
    assert {*FAMILIES, "piecewise_exponential"} <= found
    parameters = {"sigma", "nu", "alpha", "shape", "phi", "hu", "zi", "kappa", "thresholds"}
    assert found <= {*FAMILIES, "piecewise_exponential", "log_hazard", *parameters}


def test_other_words_for_families() -> None:
    assert all(families.named(word).name == name for word, name in ALIASES.items())
    assert families.named("Negative Binomial").name == "negative_binomial"
    assert families.named("ordinal").name == "cumulative"


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("binom", "'binomial'"),
        ("poison", "'poisson'"),
        ("nomral", "'gaussian'"),
        ("wibull", "'weibull'"),
        ("ordinl", "'cumulative'"),
        ("piecewise", r"piecewise_exponential\(breaks=\(1.0, 2.0\)\)"),
        ("zzz", "'weibull'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"use .*{near}"):
        families.named(word)


@pytest.mark.parametrize(
    "make", [families.gaussian, families.bernoulli, families.binomial, families.cumulative]
)
def test_unknown_links_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"link is 'cauchit': family '.*' has '"):
        make("cauchit")


@pytest.mark.parametrize("breaks", [(), (0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, float("inf"))])
def test_breaks_that_do_not_increase_are_refused(breaks: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="breaks are"):
        families.piecewise_exponential(breaks)


def test_expressions_hold_the_additions_that_rows_have() -> None:
    family = families.exponential()
    base = "dist.Exponential((-eta).exp())"
    assert family.expression() == base
    assert family.expression(["cens"]) == f"families.Censored({base}, cens=batch.cens)"
    assert family.expression(["entry"]) == f"families.Censored({base}, entry=batch.entry)"
    assert family.expression(["cens", "upper", "entry"]) == family.likelihood
    assert family.likelihood.endswith("cens=batch.cens, upper=batch.upper, entry=batch.entry)")
    with pytest.raises(ValueError, match="'exponential' takes cens and upper and entry"):
        family.expression(["trials"])


def test_scales_of_the_intercept() -> None:
    response = Response(4.0, 3.0)
    assert families.gaussian().scale(response) == (4.0, 3.0)
    assert families.gaussian("inverse").scale(response) == (0.25, 3.0 / 16.0)
    assert families.bernoulli().scale(Response(0.1, 0.3)) == (0.0, 2.5)
    center, spread = families.poisson().scale(response)
    assert center == pytest.approx(np.log(4.0))
    # the log-normal of this location and spread has the response's mean and sd
    location, same = families.lognormal().scale(response)
    assert same == pytest.approx(spread)
    fn = lognorm(spread, scale=np.exp(location))
    assert (fn.mean(), fn.std()) == pytest.approx((4.0, 3.0))
    assert np.isfinite(families.poisson().scale(Response(0.0, 0.0))).all()


def test_default_priors() -> None:
    sigma: Any = families.gaussian().parameters(Response(4.0, 3.0))["sigma"]
    assert sigma.base_dist.scale.item() == pytest.approx(7.5)
    assert families.half_student(0.1).base_dist.scale.item() == pytest.approx(2.5)
    assert families.half_student(0.1, 0.01).base_dist.scale.item() == pytest.approx(0.1)
    prior = families.intercept_prior(-1.0, 0.3)
    assert (prior.df.item(), prior.loc.item(), prior.scale.item()) == pytest.approx((3, -1, 2.5))
    levels = Response(float("nan"), float("nan"), ("a", "b", "c", "d"))
    thresholds: Any = families.cumulative().parameters(levels)["thresholds"]
    assert thresholds.event_shape == (3,)
    assert families.categorical().outputs(levels) == 3
    for make in (families.categorical().outputs, families.cumulative().parameters):
        with pytest.raises(ValueError, match="has 1 levels: it needs 2 or more"):
            make(Response(float("nan"), float("nan"), ("a",)))
