"""Wrappers of a method: what they change, equal in two engines, refused by name where they mean
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import models
from hierfl.core.trees import named_leaves, tree_leaves
from hierfl.data.batch import ClientBatch
from hierfl.method import Method
from hierfl.methods import (
    averaging_some,
    bfi,
    by_rows,
    ditto,
    fedabml,
    fedavg,
    fedbn,
    fedlaplace,
    fedmap,
    fedsvi,
    fedvi,
    fine_tuned,
    local_only,
    over_relaxed,
    pfedbayes,
    pfedbred,
    pfedme,
    pvi,
    server_optimized,
)
from hierfl.optimizers import SGD, Adam
from hierfl.program.program import ProgramError
from hierfl.program.recipes import describe, remake
from tests.methods.quadratics import START, at, clients
from tests.programs import federation, fit, regression

SMALL: dict[str, Any] = {"steps": 2, "batch_size": 2}
FEW: dict[str, Any] = {"unit": "step", "batch_size": 2}


def net() -> torch.nn.Module:
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.3, -0.2]])), module.bias.fill_(0.1)
    return module


def common() -> Any:
    return models.network(net(), likelihood=models.likelihood.normal(1.0))


def personal(scale: Any = 1.0) -> Any:
    return models.bayesian_network(
        net(), likelihood=models.likelihood.normal(1.0), prior_scale=scale
    )


def mapped() -> Any:
    return models.learned_prior_network(net(), likelihood=models.likelihood.normal(1.0))


def normed() -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    last = torch.nn.Linear(3, 1)
    return models.batch_norm_network(
        torch.nn.Sequential(*module, last), likelihood=models.likelihood.normal(1.0)
    )


def embedded() -> Any:
    likelihood = models.likelihood.normal(1.0)
    return models.PersonalHeads(
        torch.nn.Linear(2, 7), outputs=1, features=7, local_features=2, likelihood=likelihood
    )


def assert_same(one: hierfl.Fit, two: hierfl.Fit) -> None:
    """Assert bit-for-bit equality of server, clients, history, predictions and new clients."""
    data, new = federation((5, 3, 7)), federation((4, 2), seed=8)
    pairs: list[tuple[Any, ...]] = [
        (one.progress.server, two.progress.server),
        (one.progress.table, two.progress.table),
    ]
    joined = [f.personalize(new, rounds=2) for f in (one, two)]
    pairs += [tuple(f.progress.table for f in joined)]
    pairs += [tuple(f.predict(data, draws=2).mean for f in (one, two))]
    pairs += [tuple(f.predict(new, draws=2).mean for f in joined)]
    for a, b in pairs:
        assert named_leaves(a).keys() == named_leaves(b).keys()
        for path, value in named_leaves(a).items():
            assert torch.equal(value, named_leaves(b)[path]), path
    kept = [column for column in one.history if column != "seconds"]
    np.testing.assert_array_equal(one.history[kept].to_numpy(), two.history[kept].to_numpy())


TUNING = {"optimizer": SGD(0.01), "when": "every round", "mirror": True, **FEW}


# ------------------------------------------------------------ two engines
WRAPPED: dict[str, Callable[[], Method]] = {
    "+FT fedavg": lambda: fine_tuned(fedavg(common(), **SMALL), **FEW),
    "+FT fedbn": lambda: fine_tuned(fedbn(normed(), **SMALL), **FEW),
    "+FT ditto": lambda: fine_tuned(ditto(common(), **SMALL), when="every round", **FEW),
    "+FT pfedme": lambda: fine_tuned(pfedme(personal(), **SMALL), **FEW),
    "+FT fedabml": lambda: fine_tuned(
        fedabml(personal("learned"), **SMALL), when="every round", **FEW
    ),
    "+FT fedmap": lambda: fine_tuned(fedmap(mapped(), **SMALL), when="every round", **FEW),
    "+FT pfedbred": lambda: fine_tuned(pfedbred(personal(), **SMALL), steps=2, **TUNING),
    "+FT twice": lambda: fine_tuned(fine_tuned(pfedbred(personal(), **SMALL), **TUNING), **FEW),
    "+AM fedavg": lambda: over_relaxed(fedavg(common(), **SMALL)),
    "+AM fedbn": lambda: over_relaxed(fedbn(normed(), **SMALL), 1.5),
    "+AM ditto": lambda: over_relaxed(ditto(common(), **SMALL)),
    "+AM pfedbayes": lambda: over_relaxed(pfedbayes(personal("learned"), **SMALL)),
    "some fedavg": lambda: averaging_some(fedavg(common(), **SMALL), share=0.5),
    "some fedbn": lambda: averaging_some(fedbn(normed(), **SMALL), share=0.5),
    "some pfedme": lambda: averaging_some(pfedme(personal(), **SMALL), share=0.5),
    "some fine_tuned": lambda: averaging_some(
        fine_tuned(pfedbred(personal(), **SMALL), **TUNING), share=0.5
    ),
    "opt fedbn": lambda: server_optimized(fedbn(normed(), **SMALL), SGD(0.5, 0.9)),
    "opt ditto": lambda: server_optimized(ditto(common(), **SMALL), Adam(0.1)),
    "rows pfedme": lambda: by_rows(pfedme(personal(), **SMALL)),
    "rows pfedbred": lambda: by_rows(averaging_some(pfedbred(personal(), **SMALL), share=0.5)),
    "rows fedabml": lambda: by_rows(fedabml(personal("learned"), server="exact", **SMALL)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_engines_agree(name: str) -> None:
    data, run = federation((5, 3, 7)), dict[str, Any](rounds=2, seed=3)
    method = WRAPPED[name]()
    one, two = fit(method, data, **run), fit(method, data, engine="sequential", **run)
    for a, b in zip(
        tree_leaves(one.progress.server), tree_leaves(two.progress.server), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-10, rtol=0.0)
    for a, b in zip(tree_leaves(one.progress.table), tree_leaves(two.progress.table), strict=True):
        assert torch.allclose(a, b, atol=1e-10, rtol=0.0)


@hierfl.model
def shared_slope(batch: ClientBatch) -> None:
    """A line through the origin whose slopes are global params: a model that a recipe can name."""
    theta = pyro.param("theta", torch.zeros(2))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal((batch.x * theta).sum(-1), 1.0), obs=batch.y)


@pytest.mark.parametrize("make", [fedavg, ditto, local_only])
def test_a_wrapped_method_is_rebuilt_from_its_description(make: Any, tmp_path: Path) -> None:
    data, method = federation((5, 3, 7)), make(shared_slope, **SMALL)
    method = over_relaxed(averaging_some(by_rows(method), share=0.5), beta=1.5)
    method = fine_tuned(method, optimizer=SGD(0.2), **FEW)
    assert describe(remake(describe(method))) == describe(method)
    assert describe(method)["with"]["method"]["with"]["beta"] == 1.5
    assert_same(fit(method, data, rounds=2), fit(remake(describe(method)), data, rounds=2))
    half = fit(method, data, rounds=1, seed=3, checkpoint=tmp_path)
    again = hierfl.load(tmp_path, data=data)
    assert_same(half, again)


# ------------------------------------------------------------ effects
def theta(fitted: hierfl.Fit) -> Tensor:
    value: Tensor = fitted.message["theta"]
    return value


@pytest.mark.parametrize("make", [fedavg, ditto, pfedme])
def test_over_relaxation_multiplies_the_step_by_beta_and_factors_multiply(make: Any) -> None:
    method = make(at(START, personal=make is pfedme), steps=3, batch_size=None)
    moves = {
        beta: theta(fit(over_relaxed(method, beta), clients(), rounds=1)) - START
        for beta in (0.0, 1.0, 3.0)
    }
    twice = over_relaxed(over_relaxed(method, 2.0), 1.5)
    assert torch.equal(moves[0.0], torch.zeros(2))
    assert torch.allclose(theta(fit(method, clients(), rounds=1)) - START, moves[1.0], atol=1e-14)
    assert torch.allclose(moves[3.0], 3.0 * moves[1.0], atol=1e-12)
    assert torch.allclose(theta(fit(twice, clients(), rounds=1)) - START, moves[3.0], atol=1e-12)


def test_a_server_optimizer_takes_the_methods_change_for_a_gradient() -> None:
    """Two rounds of heavy-ball momentum by hand; a step of size 1 is the method itself."""
    method = fedavg(at(START), steps=3, batch_size=None)

    def after(start: Tensor) -> Tensor:
        return theta(fit(fedavg(at(start), steps=3, batch_size=None), clients(), rounds=1))

    one = START + 0.7 * (after(START) - START)
    velocity = 0.9 * (START - after(START)) + (one - after(one))
    fitted = fit(server_optimized(method, SGD(0.7, 0.9)), clients(), rounds=2)
    assert torch.allclose(theta(fitted), one - 0.7 * velocity, atol=1e-12)
    same = fit(server_optimized(method, SGD(1.0)), clients(), rounds=2)
    assert torch.allclose(theta(same), theta(fit(method, clients(), rounds=2)), atol=1e-14)
    assert fitted.method.name == "fedavg+opt"


@pytest.mark.parametrize("make", [pfedme, pfedbred, fedabml])
def test_by_rows_weights_the_clients_copies_by_rows(make: Any) -> None:
    scale = {"guide": hierfl.guides.delta, "draws": 1} if make is fedabml else {}
    method = make(at(START, personal=True), steps=2, batch_size=None, **scale)
    alone = torch.stack(
        [theta(fit(method, clients().select([k]), rounds=1)) for k in clients().names]
    )
    uniform, weighted = (fit(m, clients(), rounds=1) for m in (method, by_rows(method)))
    rows = clients().counts.double()
    assert torch.allclose(theta(uniform), alone.mean(0), atol=1e-12)
    assert torch.allclose(theta(weighted), (rows / rows.sum()) @ alone, atol=1e-12)
    twice = fit(by_rows(by_rows(method)), clients(), rounds=1)
    assert torch.equal(theta(twice), theta(weighted))


def test_by_rows_does_not_change_a_method_already_weighted_by_rows() -> None:
    method, data = fedavg(common(), **SMALL), federation((5, 3, 7))
    assert_same(fit(method, data, rounds=2), fit(by_rows(method), data, rounds=2))


@pytest.mark.parametrize("make", [fedavg, pfedme, ditto])
def test_all_clients_train_some_are_averaged_and_the_loss_is_over_all(make: Any) -> None:
    data, model = federation((5, 3, 7, 2, 4)), personal() if make is pfedme else common()
    method = make(model, steps=2, batch_size=None)
    whole = fit(method, data, rounds=1, seed=5)
    some, none = (fit(averaging_some(method, share=s), data, rounds=1, seed=5) for s in (0.5, 1e-9))
    for a, b in zip(
        tree_leaves(whole.progress.table), tree_leaves(some.progress.table), strict=True
    ):
        assert torch.equal(a, b)
    assert whole.history["loss"][0] == some.history["loss"][0]
    for name, value in whole.message.items():
        assert torch.allclose(none.message[name], value, atol=1e-10), (
            "where no client is drawn, all are averaged"
        )
        assert not torch.allclose(some.message[name], value, atol=1e-6)


@pytest.mark.parametrize("when", ["adapting", "every round"])
@pytest.mark.parametrize("make", [fedavg, ditto, pfedme])
def test_training_does_not_depend_on_fine_tuning(make: Any, when: Any) -> None:
    data, model = federation((5, 3, 7)), personal() if make is pfedme else common()
    method = make(model, **SMALL)
    tuned_method = fine_tuned(method, steps=3, when=when, optimizer=SGD(0.05), **FEW)
    plain, tuned = (fit(m, data, rounds=2, seed=1) for m in (method, tuned_method))
    for name, value in plain.message.items():
        assert torch.equal(tuned.message[name], value)
    same = torch.equal(tuned.predict(data, draws=1).mean, plain.predict(data, draws=1).mean)
    assert same == (when == "adapting")
    for rounds in (1, 2):
        scores = [
            f.personalize(data, rounds=rounds).predict(data, draws=1).scores().log_score.mean()
            for f in (plain, tuned)
        ]
        assert scores[1] > scores[0]


@pytest.mark.parametrize("make", [ditto, pfedme, local_only])
def test_what_the_last_round_left_is_tuned_as_at_the_end_of_that_round(make: Any) -> None:
    data, model = federation((5, 3, 7)), personal() if make is pfedme else common()
    how: dict[str, Any] = {"steps": 3, "unit": "step", "batch_size": None, "optimizer": SGD(0.05)}
    after = fit(fine_tuned(make(model, **SMALL), own_steps=False, **how), data, rounds=2, seed=1)
    within = fit(
        fine_tuned(make(model, **SMALL), when="every round", **how), data, rounds=2, seed=1
    )
    tuned = after.personalize(data, rounds=1, from_scratch=False).predict(data, draws=1).mean
    assert torch.allclose(tuned, within.predict(data, draws=1).mean, atol=1e-10)
    assert not torch.allclose(tuned, after.predict(data, draws=1).mean, atol=1e-6)
    assert not torch.allclose(
        tuned, after.personalize(data, rounds=1).predict(data, draws=1).mean, atol=1e-6
    )


def test_a_client_not_yet_trained_gets_the_methods_own_params() -> None:
    data, new = federation((5, 3, 7, 2)), federation((4, 2), seed=8)
    for method in (fedavg(common(), **SMALL), pfedbred(personal(), **SMALL), pfedme(personal())):
        tuned = fine_tuned(method, when="every round", **FEW)
        fits = [fit(m, data, rounds=1, cohort=1, seed=2) for m in (method, tuned)]
        one, two = (f.personalize(new, rounds=0).predict(new, draws=1).mean for f in fits)
        assert torch.equal(one, two)


# ------------------------------------------------------------ refusals
WRAPPERS: list[tuple[Callable[[Method], Method], str]] = [
    (over_relaxed, "give the optimizer of its server"),
    (by_rows, "its weights are part of the method"),
    (lambda m: server_optimized(m, SGD(1.0)), "set the options of its own server"),
    (lambda m: averaging_some(m, share=0.5), r"sample clients with fit\(\.\.\., cohort"),
]


@pytest.mark.parametrize(
    ("make", "wrappers"),
    [
        (lambda: fedsvi(personal()), WRAPPERS),
        (lambda: fedmap(mapped()), WRAPPERS),
        (lambda: fedvi(embedded(), hidden=4), WRAPPERS),
        # reading a program for these takes a second each time
        (lambda: pvi(regression, draws=2), WRAPPERS[:1]),
        (lambda: bfi(regression), WRAPPERS[1:2]),
        (lambda: fedlaplace(regression), WRAPPERS[2:3]),
    ],
)
def test_methods_whose_server_does_more_than_average_are_refused_by_name(
    make: Callable[[], Method], wrappers: list[tuple[Callable[[Method], Method], str]]
) -> None:
    name = make().name
    for wrapper, fix in wrappers:
        with pytest.raises(ProgramError, match=f"'{name}' does not: {fix}"):
            fit(wrapper(make()), federation(), rounds=1)


def test_refusals() -> None:
    with pytest.raises(ProgramError, match="mirror=True needs local sites and the guide delta"):
        fit(fine_tuned(fedavg(common()), mirror=True), federation(), rounds=1)
    with pytest.raises(
        ProgramError, match="nothing to tune: the clients of 'fedvi' have latent sites"
    ):
        fit(fine_tuned(fedvi(embedded(), hidden=4)), federation(), rounds=1)
