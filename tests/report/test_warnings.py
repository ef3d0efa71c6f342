"""Every warning of the report is raised by a planted problem, and is not raised without it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientBatch, ClientData, Fit, guides, methods
from hierfl.core.trees import tree_map
from hierfl.diagnostics import Check
from hierfl.diagnostics.checks import checks_of_fit
from hierfl.diagnostics.checks_of_predictions import checks_of_predictions
from hierfl.diagnostics.convergence import judged_by_history
from hierfl.diagnostics.verdict import information, run_of, verdict
from hierfl.method import WeightedDraws
from hierfl.methods import fedsvi
from hierfl.models import bayesian_network, network
from hierfl.report.measure import Measured, measure
from hierfl.report.sections import table_of_rounds
from tests.programs import federation, fit, logistic, regression
from tests.report.test_report import fitted


@pytest.fixture(autouse=True)
def without_weighting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge convergence only where the history decides: weighting draws takes most of the time."""

    def judged(f: Fit, seed: int) -> Any:
        return run_of(f, seed) if judged_by_history(f) else "a trend needs more rounds"

    monkeypatch.setattr("hierfl.diagnostics.verdict.run_of", judged)


def checks(result: Measured) -> list[Check]:
    return [*checks_of_fit(result.evidence), *checks_of_predictions(result.scored)]


def warned(result: list[Check]) -> set[str]:
    return {check.question for check in result if check.verdict == "warning"}


def measured(f: Fit, **changes: Any) -> Measured:
    options: dict[str, Any] = {
        "held_out": None,
        "foreign": None,
        "local_only": None,
        "site": None,
        "draws": 60,
        "seed": 0,
    }
    return measure(f, **{**options, **changes})


def answer(question: str, result: Measured) -> str:
    """Return what the one check of a question answers."""
    (check,) = (check for check in checks(result) if check.question == question)
    return check.answer


def test_scoring_training_rows_and_clients_with_few_rows_raise_warnings() -> None:
    f = fit(
        fedsvi(logistic, guides.conditional(newton_steps=2)), federation((30, 4, 25, 3)), rounds=5
    )
    result = checks(measured(f))
    answers = {check.question: check.answer for check in result if check.verdict == "warning"}
    assert "training rows" in answers["Are predictions scored on rows that the fit has not seen?"]
    assert (
        "2 of 4 clients have fewer than 20 rows (south: 4 and west: 3)"
        in answers["Does every client have enough rows?"]
    )


def test_point_estimates_raise_a_warning() -> None:
    f = fit(fedsvi(regression, guides.delta), federation((30, 30, 30)), rounds=3)
    assert "Does every parameter have an uncertainty?" in warned(checks(measured(f)))
    net = torch.nn.Linear(2, 1)
    model = network(net, likelihood=lambda out: dist.Normal(out[..., 0], 1.0))
    learned = fit(methods.fedavg(model, steps=2), federation((30, 30, 30)), rounds=2)
    said = answer("Does every parameter have an uncertainty?", measured(learned))
    assert "of point estimates: theta.weight and theta.bias. For intervals, fit" in said
    bayesian = bayesian_network(
        net, likelihood=lambda out: dist.Normal(out[..., 0], 1.0), prior_loc=dist.Normal(0.0, 1.0)
    )
    whole = fit(fedsvi(bayesian), federation((30, 30, 30)), rounds=2)
    assert "Does every parameter have an uncertainty?" not in warned(checks(measured(whole)))


def test_a_mean_field_guide_raises_a_warning_only_with_global_scales() -> None:
    question = "Does the guide let the global scales depend on the clients' parameters?"
    data = federation((30, 30, 30))
    for family, bad in ((guides.mean_field, True), (guides.structured, False)):
        done = fit(fedsvi(regression, family), data, rounds=2)
        assert (question in warned(checks(measured(done)))) == bad
    without = fit(fedsvi(logistic, guides.mean_field), data, rounds=2)
    assert question not in {check.question for check in checks(measured(without))}


def sharpened(result: Measured, by: float) -> Measured:
    """Return the same measurements with log odds `by` times as large."""
    prediction = result.scored.prediction
    assert prediction is not None and prediction.label is not None
    p, y = torch.sigmoid(by * torch.logit(prediction.mean)), prediction.label
    log_score = torch.where(y > 0.5, p, 1 - p).log()
    sharp = replace(prediction, mean=p, log_score=log_score)
    return replace(result, scored=replace(result.scored, prediction=sharp))


def test_miscalibrated_probabilities_raise_a_warning() -> None:
    f, test = fitted("binary")
    result, question = measured(f, held_out=test), "Are predicted probabilities calibrated?"
    assert question not in warned(checks(result))
    assert question in warned(checks(sharpened(result, 8.0)))
    served = "Does the model predict at least as well as each client's own event rate?"
    assert served not in warned(checks(result))
    assert served in warned(checks(sharpened(result, -3.0)))


def test_event_rates_outside_their_intervals_raise_a_warning() -> None:
    f, test = fitted("binary")
    question = "Do enough of the clients' event rates lie in their predictive intervals?"
    result = measured(f, held_out=test)
    assert question not in warned(checks(result))
    assert result.scored.replicates is not None
    ones = torch.ones_like(result.scored.replicates)
    off = replace(result, scored=replace(result.scored, replicates=ones))
    assert question in warned(checks(off))
    assert answer(question, off).startswith("0 of 4 clients' event rates")


def test_row_intervals_of_wrong_coverage_raise_a_warning() -> None:
    def narrow(batch: ClientBatch) -> None:
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(a, batch.said), obs=batch.y)

    g = torch.Generator().manual_seed(0)
    n, question = 300, "Do predictive intervals of single rows have the right coverage?"
    for scale, bad in ((1.0, False), (0.5, True), (2.5, True)):
        data = ClientData.from_arrays(
            np.arange(n) % 3, y=torch.randn(n, generator=g), said=torch.full((n,), scale)
        )
        f = fit(fedsvi(narrow, guides.conditional(newton_steps=1)), data, rounds=1)
        result = measured(f, draws=200)
        assert (question in warned(checks(result))) == bad, answer(question, result)
        if bad:
            assert ("too narrow" in answer(question, result)) == (scale < 1.0)


def test_foreign_rows_that_look_like_own_rows_raise_a_warning() -> None:
    f, data = fitted("numeric")
    question = (
        "Are predictions less certain for foreign rows (foreign=) than for the clients' own rows?"
    )
    assert question in warned(checks(measured(f, foreign=data.without("y"))))
    far = data.with_fields(x=30.0 * data.fields["x"]).without("y")
    assert question not in warned(checks(measured(f, foreign=far)))


INFORMED = "Do the clients' own rows inform their estimates?"


def vague(batch: ClientBatch) -> None:
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a, batch.sd), obs=batch.y)


def test_clients_with_uninformative_rows_raise_a_warning() -> None:
    g = torch.Generator().manual_seed(0)
    sd = torch.tensor([1.0, 30.0, 1.0]).repeat(25)
    data = ClientData.from_arrays(np.arange(75) % 3, y=torch.randn(75, generator=g), sd=sd)
    f = fit(fedsvi(vague, guides.conditional(newton_steps=1)), data, rounds=1)
    result = measured(f, draws=300)
    assert result.evidence.information is not None
    precision = 25.0 / np.array([1.0, 900.0, 1.0])
    np.testing.assert_allclose(
        result.evidence.information["narrower"], 1.0 - 1.0 / (1.0 + precision), atol=0.2
    )
    means = f.draws(300).own["a"].mean(0).numpy()
    exact = 0.5 * (1.0 / (1.0 + precision) - 1.0 + np.log1p(precision) + means**2)
    np.testing.assert_allclose(result.evidence.information["nats"], exact, atol=0.25)
    assert answer(INFORMED, result).startswith("The rows of 1 of 3 clients (1) add less than")


def test_a_client_with_a_shifted_mean_is_informed_even_if_its_variance_is_the_priors() -> None:
    """A few steps of a mean-field guide, for example, move the means and leave the variances."""
    names, sd = ["north", "south", "east"], torch.full((75,), 1e3)
    data = ClientData.from_arrays(np.arange(75) % 3, names=names, y=torch.zeros(75), sd=sd)
    done = fit(fedsvi(vague, guides.conditional(newton_steps=1)), data, rounds=1)
    result = measured(done, draws=300)
    learned = result.evidence.information
    assert learned is not None and result.draws is not None
    assert (learned["nats"] < 0.1).all() and (learned["narrower"] < 0.2).all()
    own = {"a": result.draws.own["a"] + torch.tensor([0.0, 2.0, 0.0])}
    assert result.expected is not None
    learned = information(result.fit, replace(result.draws, own=own), result.expected)
    moved = replace(result, evidence=replace(result.evidence, information=learned))
    assert answer(INFORMED, moved).startswith("The rows of 2 of 3 clients (north and east)")


SCORE = "validation_log_score"


@pytest.mark.parametrize(
    ("column", "values", "question"),
    [
        ("clients", [1, 0, 0, 1, 0, 0], "Did the clients take part in enough rounds?"),
        (
            SCORE,
            [-1.0, -0.5, -0.4, -0.42, -0.5, -0.6],
            "Is the held-out score still near its best?",
        ),
        ("effective_clients", [3, 2, 1.4, 1.1, 1, 1], "Do all clients contribute to the result?"),
    ],
)
def test_problems_in_the_history_are_warned_of(
    column: str, values: list[float], question: str
) -> None:
    f, test = fitted("binary")
    base = [
        {"round": r, "clients": 4, SCORE: -1.0 / (r + 1), "effective_clients": 3.5}
        for r in range(6)
    ]
    bad = [{**record, column: value} for record, value in zip(base, values, strict=True)]
    for history, is_warned in ((base, False), (bad, True)):
        done = replace(f, progress=replace(f.progress, history=tuple(history)))
        assert (question in warned(checks(measured(done, held_out=test)))) == is_warned


def weighted(**last: float) -> Fit:
    """Return a fit with the history of a method that weights its draws."""
    f, _ = fitted("binary")
    rounds = [
        {"round": 0, "clients": 4, "r_hat": 1.01, "stage": 0.0},
        {"round": 1, "clients": 4, "r_hat": 1.02, "stage": 1.0, "moved": 0.03, "changed": 0.02},
        {
            **{"round": 2, "clients": 4, "r_hat": 1.02, "stage": 2.0, "moved": 0.03},
            **{"changed": 0.02, "k_hat": 0.3, "effective": 900.0, "k_hat_client": 0.4, **last},
        },
    ]
    return replace(f, progress=replace(f.progress, history=tuple(rounds)))


def test_the_chains_of_a_server_are_checked() -> None:
    chains = "Have the server's chains mixed?"
    result = {c.question: c for c in checks(measured(weighted()))}
    assert result[chains].verdict == "good" and "1.02" in result[chains].answer
    assert chains in warned(checks(measured(weighted(r_hat=1.2))))


def test_rounds_without_an_elbo_are_tabulated() -> None:
    table = table_of_rounds(weighted().history)
    assert table is not None
    assert table.head == (
        *("Round", "Means moved, SD", "SDs changed, share", "R-hat", "k-hat", "Effective draws"),
    )
    assert table.rows == (
        ("1", "", "", "1.01", "", ""),
        ("2", "0.0300", "0.0200", "1.02", "", ""),
        ("3", "", "", "", "0.300", "900"),
    )
    assert table_of_rounds(fitted("binary")[0].history) is None


# ---------------------------------------------------------------------------------------- one judge
def planted() -> Fit:
    """Return a fit whose history reports every problem that a history can."""
    f = fit(fedsvi(regression, guides.mean_field), federation((30, 4, 25)), rounds=1)
    history: list[dict[str, Any]] = [
        {"round": r, "clients": 3, "validation_log_score": -0.5} for r in range(6)
    ]
    history[-1] |= {
        "left_out": ({"client": "east", "reason": "it fails"},),
        "far_out": ({"client": "east", "times": 60.0},),
        "r_hat": 1.3,
        "validation_log_score": -1.0,
        "effective_clients": 1.1,
        "compared": 3,
        "conflicts": ({"client": "east", "p": 1e-3, "away": 7.0},),
    }
    return replace(f, progress=replace(f.progress, history=tuple(history)))


def not_finite() -> Fit:
    f = fit(fedsvi(regression, guides.structured), federation((30, 30, 30)), rounds=1)
    nan = tree_map(lambda v: v * torch.nan if v.is_floating_point() else v, f.progress.server)
    return replace(f, progress=replace(f.progress, server=nan))


def few_of_clients() -> Fit:
    """Return a good fit whose clients' draws are few."""
    f = weighted()
    server = replace(f.federation.server, weighted=lambda state: WeightedDraws(0.3, 150.0))
    return replace(f, federation=replace(f.federation, server=server))


FITS: dict[str, Callable[[], Fit]] = {
    "problems of the history": planted,
    "points": lambda: fit(fedsvi(regression, guides.delta), federation((30, 4, 25)), rounds=1),
    "rows that say nothing": lambda: fit(
        fedsvi(vague, guides.conditional(newton_steps=1)),
        ClientData.from_arrays(np.arange(75) % 3, y=torch.zeros(75), sd=torch.full((75,), 1e3)),
        rounds=1,
    ),
    "a client that was never there": lambda: fit(
        fedsvi(regression, guides.structured), federation(), rounds=1, cohort=3
    ),
    "draws that are not finite": not_finite,
    "weights that are bad": lambda: weighted(k_hat=0.9),
    "few draws of clients": few_of_clients,
    "a method that was not done": lambda: fit(
        methods.fedlaplace(regression), federation(), rounds=1
    ),
    "an approximation that weights do not see": lambda: fit(
        methods.fedlaplace(logistic, draws=512, target_ess=200), federation(), rounds=15
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_the_summary_and_the_report_warn_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each warning without further rows is a reason of the verdict, and each reason a warning."""

    k_hats = "hierfl.diagnostics.verdict.k_hats_of"
    monkeypatch.setattr(k_hats, lambda f, *_: pd.Series(0.9, index=f.clients))
    monkeypatch.setattr("hierfl.core.draw_quality.OFF_BY_CHANCE", 0.05)
    of_page, warned_of = set(), set()
    for name, make in FITS.items():
        f = make()
        summary, page = f.summary(draws=60), checks_of_fit(measured(f).evidence)
        assert {c.question: c.verdict for c in page} == {
            c.question: c.verdict for c in summary.checks
        }, name
        reasons = [c for c in summary.checks if c.verdict == "warning"]
        assert reasons and all(c.answer in summary.verdict for c in reasons), name
        assert verdict(page).trustworthy is summary.trustworthy, name
        assert (summary.trustworthy is False) == any(c.severity == "fatal" for c in reasons), name
        of_page |= {c.question for c in page}
        warned_of |= {c.question for c in reasons}
    assert of_page == warned_of, of_page - warned_of
