"""Every warning of the report is raised by a planted problem, and is not raised without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import guides, methods
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.methods import fedsvi
from hierfl.models import bayesian_network, network
from hierfl.report.blocks import Check
from hierfl.report.checks import checks
from hierfl.report.measure import measure
from hierfl.report.measurements import Measured
from hierfl.report.rounds import table_of_rounds
from hierfl.runs.result import Fit
from tests.programs import federation, fit, logistic, regression
from tests.report.test_report import fitted


def warned(found: list[Check]) -> set[str]:
    return {check.question for check in found if check.verdict == "warning"}


def measured(f: Fit, **given: Any) -> Measured:
    options: dict[str, Any] = {
        "held_out": None,
        "foreign": None,
        "alone": None,
        "site": None,
        "draws": 60,
        "seed": 0,
    }
    return measure(f, **{**options, **given})


def test_scoring_training_rows_and_clients_with_few_rows_raise_warnings() -> None:
    f = fit(
        fedsvi(logistic, guides.conditional(newton_steps=2)), federation((30, 4, 25, 3)), rounds=5
    )
    found = checks(measured(f))
    told = {check.question: check.answer for check in found if check.verdict == "warning"}
    assert "training rows" in told["Are predictions scored on rows that the fit has not seen?"]
    assert (
        "2 of 4 clients have fewer than 20 rows (south: 4 and west: 3)"
        in told["Does every client have enough rows?"]
    )


def test_point_estimates_raise_a_warning() -> None:
    f = fit(fedsvi(regression, guides.delta), federation((30, 30, 30)), rounds=3)
    assert "Does every parameter have an uncertainty?" in warned(checks(measured(f)))
    net = torch.nn.Linear(2, 1)
    model = network(net, likelihood=lambda out: dist.Normal(out[..., 0], 1.0))
    learned = fit(methods.fedavg(model), federation((30, 30, 30)), rounds=2)
    told = [
        c.answer
        for c in checks(measured(learned))
        if c.question == "Does every parameter have an uncertainty?"
    ]
    assert told[0].startswith("No: theta.weight and theta.bias are point estimates")
    kept = bayesian_network(
        net, likelihood=lambda out: dist.Normal(out[..., 0], 1.0), prior_loc=dist.Normal(0.0, 1.0)
    )
    whole = fit(fedsvi(kept), federation((30, 30, 30)), rounds=2)
    assert "Does every parameter have an uncertainty?" not in warned(checks(measured(whole)))


def test_a_mean_field_guide_raises_a_warning_only_with_global_scales() -> None:
    question = "Does the guide let the global scales depend on the clients' parameters?"
    data = federation((30, 30, 30))
    for family, bad in ((guides.mean_field, True), (guides.structured, False)):
        assert (
            question in warned(checks(measured(fit(fedsvi(regression, family), data, rounds=2))))
        ) == bad
    asked = {
        c.question
        for c in checks(measured(fit(fedsvi(logistic, guides.mean_field), data, rounds=2)))
    }
    assert question not in asked


def sharpened(found: Measured, by: float) -> Measured:
    """Return the same measurements with log odds `by` times as large."""
    assert found.prediction is not None and found.prediction.label is not None
    p, y = torch.sigmoid(by * torch.logit(found.prediction.mean)), found.prediction.label
    log_score = torch.where(y > 0.5, p, 1 - p).log()
    return replace(found, prediction=replace(found.prediction, mean=p, log_score=log_score))


def test_miscalibrated_probabilities_raise_a_warning() -> None:
    f, test = fitted("binary")
    found, question = measured(f, held_out=test), "Are predicted probabilities calibrated?"
    assert question not in warned(checks(found))
    assert question in warned(checks(sharpened(found, 8.0)))
    served = "Does the model predict at least as well as each client's own event rate?"
    assert served not in warned(checks(found)) and served in warned(checks(sharpened(found, -3.0)))


def test_event_rates_outside_their_intervals_raise_a_warning() -> None:
    f, test = fitted("binary")
    found, question = (
        measured(f, held_out=test),
        "Do enough of the clients' event rates lie in their predictive intervals?",
    )
    assert question not in warned(checks(found))
    off = replace(found, replicates=torch.ones_like(found.replicates))  # type: ignore[arg-type]
    told = [c.answer for c in checks(off) if c.question == question and c.verdict == "warning"]
    assert told and told[0].startswith("0 of 4 clients' event rates")


def test_row_intervals_of_wrong_coverage_raise_a_warning() -> None:
    def narrow(batch: ClientBatch) -> None:
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(a, batch.said), obs=batch.y)

    g = torch.Generator().manual_seed(0)
    n, question = 300, "Do predictive intervals of single rows have the right coverage?"
    for said, bad in ((1.0, False), (0.5, True), (2.5, True)):
        data = ClientData.from_arrays(
            np.arange(n) % 3, y=torch.randn(n, generator=g), said=torch.full((n,), said)
        )
        f = fit(fedsvi(narrow, guides.conditional(newton_steps=1)), data, rounds=1)
        told = [c for c in checks(measured(f, draws=200)) if c.question == question]
        assert (told[0].verdict == "warning") == bad, told
        if bad:
            assert ("too narrow" in told[0].answer) == (said < 1.0)


def test_foreign_rows_that_look_like_own_rows_raise_a_warning() -> None:
    f, data = fitted("numeric")
    question = (
        "Are predictions less certain for foreign rows (foreign=) than for the clients' own rows?"
    )
    assert question in warned(checks(measured(f, foreign=data.without("y"))))
    far = data.with_fields(x=30.0 * data.fields["x"]).without("y")
    assert question not in warned(checks(measured(f, foreign=far)))


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
    found = measured(f, draws=300)
    assert found.told is not None
    precision = 25.0 / np.array([1.0, 900.0, 1.0])
    np.testing.assert_allclose(found.told["narrower"], 1.0 - 1.0 / (1.0 + precision), atol=0.2)
    means = f.draws(300).own["a"].mean(0).numpy()
    exact = 0.5 * (1.0 / (1.0 + precision) - 1.0 + np.log1p(precision) + means**2)
    np.testing.assert_allclose(found.told["nats"], exact, atol=0.25)
    told = [
        c.answer
        for c in checks(found)
        if c.question == "Do the clients' own rows inform their estimates?"
    ]
    assert told[0].startswith("The own rows of 1 of 3 clients (1) add less than 0.1 nats")


def test_a_client_with_a_shifted_mean_is_informed_even_if_its_variance_is_the_priors() -> None:
    """A few steps of a mean-field guide, for example, move the means and leave the variances."""
    data = ClientData.from_arrays(
        np.arange(75) % 3,
        names=["north", "south", "east"],
        y=torch.zeros(75),
        sd=torch.full((75,), 1e3),
    )
    found = measured(
        fit(fedsvi(vague, guides.conditional(newton_steps=1)), data, rounds=1), draws=300
    )
    assert found.told is not None and found.draws is not None
    assert (found.told["nats"] < 0.1).all() and (found.told["narrower"] < 0.2).all()
    own = {"a": found.draws.own["a"] + torch.tensor([0.0, 2.0, 0.0])}
    moved = replace(found, draws=replace(found.draws, own=own))
    told = [
        c.answer
        for c in checks(moved)
        if c.question == "Do the clients' own rows inform their estimates?"
    ]
    assert told[0].startswith("The own rows of 2 of 3 clients (north and east)")


@pytest.mark.parametrize(
    ("column", "values", "question"),
    [
        ("clients", [1, 0, 0, 1, 0, 0], "Did the clients take part in enough rounds?"),
        (
            "validation_log_score",
            [-1.0, -0.5, -0.4, -0.42, -0.5, -0.6],
            "Is the held-out score still near its best?",
        ),
        (
            "effective_clients",
            [3.0, 2.0, 1.4, 1.1, 1.0, 1.0],
            "Do all clients contribute to the result?",
        ),
    ],
)
def test_problems_in_the_history_raise_warnings(
    column: str, values: list[float], question: str
) -> None:
    f, test = fitted("binary")
    base = [
        {"round": r, "clients": 4, "validation_log_score": -1.0 / (r + 1), "effective_clients": 3.5}
        for r in range(6)
    ]
    good = replace(f, progress=replace(f.progress, history=tuple(base)))
    assert question not in warned(checks(measured(good, held_out=test)))
    history = tuple({**record, column: value} for record, value in zip(base, values, strict=True))
    assert question in warned(
        checks(measured(replace(f, progress=replace(f.progress, history=history)), held_out=test))
    )


def weighed(**last: float) -> Fit:
    """Return a fit with the history of a method that weighs its draws, whose last round logs these numbers."""
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


def test_the_weights_and_chains_of_a_method_itself_are_checked() -> None:
    weights = (
        "Is the guide (the approximate posterior) close enough to the posterior for importance "
    )
    chains = "Have the server's chains mixed?"
    found = {c.question: c for c in checks(measured(weighed()))}
    (of_weights,) = [c for q, c in found.items() if q.startswith(weights)]
    assert of_weights.verdict == found[chains].verdict == "good"
    assert "is 0.300" not in of_weights.answer and "is 0.30, and 900 draws" in of_weights.answer
    assert found["Has the run converged?"].verdict == "good"
    bad = warned(checks(measured(weighed(k_hat=0.9))))
    assert of_weights.question in bad and chains not in bad and "Has the run converged?" in bad
    assert chains in warned(checks(measured(weighed(r_hat=1.2))))


def test_rounds_without_an_elbo_are_tabulated() -> None:
    table = table_of_rounds(weighed().history)
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
