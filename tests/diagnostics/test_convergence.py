"""Convergence of made-up histories, planted guides, and methods of every kind."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

import hierfl
from hierfl import Fit, guides, methods
from hierfl.diagnostics import convergence
from hierfl.diagnostics.trend import trend
from hierfl.methods import fedlaplace, fedsvi
from hierfl.models import network
from hierfl.models.likelihood import normal
from tests.posterior.test_corrected import planted
from tests.programs import alone, federation, fit, learned, logistic, means, slopes, three

FAST = hierfl.optimizers.Adam(0.1)
LEVEL = np.where(np.arange(200) % 2, -50.0, -50.1)


def test_the_rise_and_its_error_are_right_for_known_series() -> None:
    """The error is right for independent and for correlated noise."""
    g = np.random.default_rng(0)
    rises, errors = [], []
    for _ in range(300):
        rise, error, noise = trend(g.normal(size=400) + 0.01 * np.arange(400))
        rises.append(rise)
        errors.append(error)
    assert np.mean(rises) == pytest.approx(1.0, abs=0.02), "0.01 a round, 100 rounds apart"
    assert np.mean(errors) == pytest.approx(np.std(rises), rel=0.15)
    assert noise == pytest.approx(1.0, abs=0.2)
    rises, errors = [], []
    for _ in range(300):
        rise, error, _ = trend(np.repeat(g.normal(size=200), 8))
        rises.append(rise)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(rises), rel=0.2)


def with_history(fitted: Fit, name: str, values: np.ndarray) -> Fit:
    history = tuple({"round": r, name: float(v)} for r, v in enumerate(values))
    return replace(fitted, progress=replace(fitted.progress, history=history))


# ------------------------------------------------------------------------------------------- points
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.linspace(-100.0, -50.0, 200), "Not converged: the ELBO still improves"),
        (-50.0 - np.linspace(0.0, 30.0, 200), "Not converged: the ELBO gets worse"),
        (LEVEL, "Converged: the ELBO has leveled off"),
        (np.r_[np.linspace(-500.0, -50.0, 60), np.full(140, -50.0)], "Converged"),
        (
            -50.0 + 40.0 * np.random.default_rng(1).normal(size=200),
            "Undecided: noise hides the trend",
        ),
        (np.r_[np.full(199, -50.0), np.nan], "Not converged: the ELBO is not finite"),
        (np.full(5, -50.0), "Cannot be judged: the run has 5 rounds"),
    ],
)
def test_the_trend_judges_points_which_have_no_posterior(values: np.ndarray, words: str) -> None:
    found = convergence(
        with_history(fit(fedsvi(means, guides.delta), three(), rounds=1), "elbo", values), draws=0
    )
    assert found.verdict.startswith(words)
    assert found.converged == words.startswith("Converged") == (found.answer == "good")
    assert "places 'g', 'b' at points: there is no spread, and no posterior" in found.verdict
    assert found.sites.empty and np.isnan(found.k_hat)


def test_a_loss_gets_a_verdict_too() -> None:
    short = fit(fedsvi(means, guides.delta), three(), rounds=1)
    found = convergence(with_history(short, "loss", np.linspace(3.0, 1.0, 100)))
    assert found.verdict.startswith("Not converged: the loss still improves")


# ------------------------------------------------------------------------------------------- guides
@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ({}, "Good: means are within"),
        ({"wide": 1.08, "shift": 0.05}, "Good: means are within"),
        ({"wide": 2.7}, "Not good: the sd of 'g["),
        ({"wide": 0.6}, "Not good: the sd of 'g["),
        ({"shift": 0.5}, "Not good: the mean of 'g["),
        ({"own": {"east": 2.0}}, "of client 'east' is"),
        ({"own": {"east": 0.5}}, "of client 'east' is"),
    ],
    ids=str,
)
def test_weights_find_what_is_planted(errors: dict[str, Any], words: str) -> None:
    found = convergence(with_history(planted(**errors), "elbo", LEVEL), draws=0)
    assert words in found.verdict
    assert found.converged == words.startswith("Good")
    wide, narrow = found.sites.loc["g", "ratio_max"], found.sites.loc["g", "ratio_min"]
    assert wide == pytest.approx(errors.get("wide", 1.0), rel=0.15)
    assert narrow == pytest.approx(errors.get("wide", 1.0), rel=0.15)
    assert found.sites.loc["g", "shift"] == pytest.approx(errors.get("shift", 0.0), abs=0.15)


def test_a_history_only_advises() -> None:
    """An exact guide is good however the history looks, and a bad one is bad."""
    falling, rising = -50.0 - np.linspace(0.0, 30.0, 200), np.linspace(-100.0, -50.0, 200)
    good = convergence(with_history(planted(), "elbo", falling), draws=0)
    assert good.converged and "close enough, although the ELBO gets worse" in good.verdict
    bad = convergence(with_history(planted(wide=2.7), "elbo", rising), draws=0)
    assert not bad.converged and "the ELBO still improves" in bad.verdict
    assert "Run more rounds" in bad.verdict and "correct='psis'" in bad.verdict
    level = convergence(with_history(planted(wide=2.7), "elbo", LEVEL), draws=0)
    assert not level.converged and "A closer guide" in level.verdict


@pytest.mark.slow
def test_a_long_run_has_converged_and_a_short_one_has_not() -> None:
    """From the same start, the short run's gradient is far above its noise, the long run's is not.

    Pooled rounds, the quickest: engines give the same numbers.
    """
    method = fedsvi(slopes, guides.conditional(newton_steps=0), optimizer=FAST, draws=8)
    long = convergence(fit(method, federation(), rounds=150, engine="pooled"))
    assert long.converged and long.verdict.startswith("Good: means are within")
    assert long.gradient["ratio"].max() < 3.0 and long.k_hat < 0.5 and long.effective > 1000
    slow = fedsvi(
        slopes,
        guides.conditional(newton_steps=0),
        optimizer=hierfl.optimizers.Adam(0.001),
        draws=8,
    )
    short = convergence(fit(slow, federation(), rounds=40, engine="pooled"))
    assert not short.converged and short.verdict.startswith("Not good")
    assert short.gradient["ratio"].max() > 10.0 and not short.gradient["still"].all()


def test_without_global_sites_every_client_is_weighted_alone() -> None:
    exact = convergence(fit(fedsvi(alone, guides.conditional), three(), rounds=1))
    assert exact.converged and exact.effective > 500.0
    start = convergence(fit(fedsvi(alone, guides.mean_field), three(), rounds=1))
    assert not start.converged and start.sites.loc["b", "shift"] > 1.0


def test_params_without_a_prior_are_judged_by_the_trend() -> None:
    fitted = fit(fedsvi(learned, guides.conditional), three(), rounds=1)
    rising = with_history(fitted, "elbo", np.linspace(-100.0, -50.0, 200))
    found = convergence(rising, draws=0)
    assert found.answer == "not good" and "given the learned 'm', but the ELBO" in found.verdict
    level = convergence(with_history(fitted, "elbo", LEVEL), draws=0)
    assert level.converged and "the posterior given the learned 'm'" in level.verdict


# ------------------------------------------------------------------------------------------ methods
def test_a_method_that_weights_its_draws_is_judged_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done = fit(fedlaplace(logistic, draws=256, target_ess=100), federation(), rounds=40)
    module = import_module("hierfl.diagnostics.convergence")
    monkeypatch.setattr(module, "moments_of", None)  # there is no further round
    found = convergence(done)
    assert found.converged and found.verdict.startswith(
        "Good: by the weights of 'fedlaplace' itself"
    )
    assert found.k_hat == done.history["k_hat"].iloc[-1] and found.effective > 100.0
    server = replace(done.progress.server, k_hat=torch.tensor(0.9))
    high = replace(done, progress=replace(done.progress, server=server))
    assert convergence(high).answer == "not good" and "k-hat is 0.90" in convergence(high).verdict
    server = replace(server, k_hat=torch.tensor(0.1), effective=torch.tensor(30.0))
    few = replace(done, progress=replace(done.progress, server=server))
    assert (
        convergence(few).answer == "not good"
        and "30 draws are effective" in convergence(few).verdict
    )


def test_a_method_that_was_cut_short_is_not_good() -> None:
    with pytest.warns(UserWarning, match="the rounds ended while"):
        cut = fit(fedlaplace(logistic, weighting_rounds=0), federation(), rounds=1)
    found = convergence(cut)
    assert found.answer == "not good" and "ended before 'fedlaplace' had finished" in found.verdict


KINDS: dict[str, Any] = {
    "fedsvi": lambda d: fit(fedsvi(means), d, rounds=5),
    "bfi": lambda d: fit(methods.bfi(means, steps=3), d.select([0, 1]), rounds=1),
    "pvi": lambda d: fit(methods.pvi(means), d.select([0, 1]), rounds=2),
    "fedlaplace": lambda d: fit(fedlaplace(means, weighting_rounds=0), d, rounds=10),
    "delta": lambda d: fit(fedsvi(means, guides.delta), d, rounds=5),
    "no latent site": lambda d: fit(
        methods.ditto(network(torch.nn.Linear(2, 1), likelihood=normal(1.0)), steps=2), d, rounds=1
    ),
    "clients that joined": lambda d: fit(fedsvi(means), d.select([0, 1]), rounds=5).personalize(
        d, rounds=5
    ),
}


@pytest.mark.slow("bfi", "pvi", "fedlaplace")
@pytest.mark.parametrize("kind", KINDS)
def test_no_method_is_refused_for_its_few_rounds(kind: str) -> None:
    found = convergence(KINDS[kind](federation((5, 3, 7))), draws=16, proposals=400)
    answer = {"bfi": "good", "pvi": "good", "fedlaplace": "good", "fedsvi": "not good"}
    assert found.answer == answer.get(kind, "cannot be judged")
    assert found.verdict.startswith(found.answer.capitalize()) and found.converged == (
        found.answer == "good"
    )


def test_a_guide_with_too_many_unknowns_cannot_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hierfl.posterior.weights.LIMIT", 1)
    fitted = with_history(fit(fedsvi(slopes), federation(), rounds=1), "elbo", LEVEL)
    found = convergence(fitted, draws=0)
    assert found.answer == "cannot be judged" and not found.converged
    assert "judge such a fit by its predictions" in found.verdict
    assert "The ELBO has leveled off" in found.verdict
