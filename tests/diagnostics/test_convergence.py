"""Verdicts on convergence: for made-up histories, and for runs that have converged or have not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hierfl
from hierfl import guides
from hierfl.diagnostics import convergence
from hierfl.diagnostics.trend import trend
from hierfl.methods import fedsvi
from hierfl.runs.result import Fit
from tests.programs import federation, fit, means, slopes, three

FAST = hierfl.optimisers.Adam(0.1)


def test_the_rise_and_its_error_are_right_for_known_series() -> None:
    """The error is right for independent noise and for noise in which each value is repeated 8 times."""
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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.linspace(-100.0, -50.0, 200), "Not converged: the ELBO still improves"),
        (-50.0 - np.linspace(0.0, 30.0, 200), "Not converged: the ELBO gets worse"),
        (np.where(np.arange(200) % 2, -50.0, -50.1), "Converged: the ELBO has levelled off"),
        (np.r_[np.linspace(-500.0, -50.0, 60), np.full(140, -50.0)], "Converged"),
        (
            -50.0 + 40.0 * np.random.default_rng(1).normal(size=200),
            "Undecided: noise hides the trend",
        ),
        (np.r_[np.full(199, -50.0), np.nan], "Not converged: the ELBO is not finite"),
    ],
)
def test_verdicts_on_a_history(values: np.ndarray, words: str) -> None:
    fitted = with_history(fit(fedsvi(means), three(), rounds=1), "elbo", values)
    found = convergence(fitted, draws=0)
    assert found.verdict.startswith(words)
    assert found.converged == words.startswith("Converged")


def test_a_loss_gets_a_verdict_too() -> None:
    fitted = with_history(fit(fedsvi(means), three(), rounds=1), "loss", np.linspace(3.0, 1.0, 100))
    assert convergence(fitted).verdict.startswith("Not converged: the loss still improves")


def test_a_long_run_has_converged_and_a_short_one_has_not() -> None:
    """From the same start, the short run's gradient is far above its noise, the long run's is not."""
    method = fedsvi(slopes, guides.conditional(newton_steps=0), optimiser=FAST, num_particles=8)
    long = convergence(fit(method, federation(), rounds=400))
    assert (
        long.converged
        and long.verdict.startswith("Converged")
        and long.gradient["ratio"].max() < 3.0
    )
    slow = fedsvi(
        slopes,
        guides.conditional(newton_steps=0),
        optimiser=hierfl.optimisers.Adam(0.001),
        num_particles=8,
    )
    short = convergence(fit(slow, federation(), rounds=40))
    assert not short.converged
    assert short.gradient["ratio"].max() > 10.0 and not short.gradient["still"].all()


def test_engines_agree_on_the_gradient_over_all_clients() -> None:
    runs = [
        fit(fedsvi(slopes), federation(), rounds=40, engine=engine)
        for engine in ("vectorised", "sequential")
    ]
    one, other = (convergence(run, draws=4).gradient for run in runs)
    assert np.allclose(one["size"], other["size"], atol=1e-8)
    assert list(one.index) == [spec.name for spec in runs[0].program.params if not spec.is_local]


def test_invalid_arguments_are_refused() -> None:
    short = fit(fedsvi(means), three(), rounds=5)
    with pytest.raises(ValueError, match="the run has 5 rounds: a trend needs at least 40"):
        convergence(short)
    with pytest.raises(ValueError, match="draws is 1"):
        convergence(short, draws=1)
    with pytest.raises(
        ValueError,
        match="the history of 'fedsvi' has neither an ELBO nor a loss to judge by; it has round, moved",
    ):
        convergence(with_history(short, "moved", np.ones(50)))
