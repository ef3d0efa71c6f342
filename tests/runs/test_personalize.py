"""New clients: local params from their own steps, with global params fixed.

Methods without local params take no steps.
"""

import math
from typing import Any

import pytest
import torch

import hierfl
from hierfl import ClientData, full_batch, guides, models
from hierfl.core.trees import named_leaves, tree_map
from hierfl.methods import fedsvi, pfedme
from hierfl.optimizers import SGD, Adam
from tests.programs import FAMILIES, assert_close, federation, fit, means, regression, slopes, three
from tests.sampled import sampled


def newcomers() -> ClientData:
    data = federation((6, 2), seed=5)
    return ClientData(data.fields, data.offsets, ("new", "newer"), data.client_fields)


@pytest.mark.parametrize("family", ["mean_field", "structured"])
def test_local_steps_equal_torchs_adam(family: str) -> None:
    """The steps equal torch's Adam on each new client's part of the loss.

    The noise is keyed by the client's name, and the step size follows a cosine.
    """
    method = fedsvi(regression, FAMILIES[family], local_optimizer=Adam(0.05), average=0.0)
    fitted = fit(method, federation(), rounds=3, seed=2)
    rounds = 6
    new = fitted.personalize(newcomers(), rounds=rounds)
    for k in range(2):
        own = {
            name: v.clone().requires_grad_()
            for name, v in fitted.federation.client.own.at.params.items()
        }
        optimizer = torch.optim.Adam(list(own.values()), 0.05)
        for r in range(rounds):
            optimizer.param_groups[0]["lr"] = 0.05 * 0.5 * (1.0 + math.cos(math.pi * r / rounds))
            batch = full_batch(newcomers(), torch.tensor([k]), seed=2, at=(r, 0, 0))
            optimizer.zero_grad()
            terms = fitted.program.terms({**fitted.message["params"], **own}, batch)
            terms.loss(fitted.program.share).sum().backward()
            optimizer.step()
        for name, value in own.items():
            assert torch.allclose(new.progress.table.at.params[name][k], value, atol=1e-10), name


@pytest.mark.parametrize("family", sampled(FAMILIES, 3))
def test_global_params_and_fitted_clients_do_not_change(family: str) -> None:
    fitted = fit(fedsvi(regression, FAMILIES[family]), federation(), rounds=2)
    before = {**named_leaves(fitted.progress.server), **named_leaves(fitted.progress.table)}
    kept = {name: leaf.clone() for name, leaf in before.items()}
    new = fitted.personalize(newcomers(), rounds=3)
    assert all(torch.equal(leaf, kept[name]) for name, leaf in before.items())
    sent = named_leaves(new.message)
    assert all(torch.equal(a, sent[n]) for n, a in named_leaves(fitted.message).items())
    assert new.clients == ("new", "newer")
    draws = new.draws(4)
    assert draws.own["slope"].shape == (4, 2, 2)
    assert torch.equal(draws.shared["loc"], fitted.draws(4).shared["loc"])
    assert new.predict(newcomers(), draws=4).mean.shape == (8,)


def test_clients_of_the_fit_go_on_from_their_states() -> None:
    fitted = fit(fedsvi(regression, FAMILIES["mean_field"]), federation(), rounds=3)
    rows = federation()
    turned = rows.select(list(reversed(rows.names)))
    kept = fitted.personalize(turned, rounds=0, from_scratch=False)
    assert_close(tree_map(lambda v: v.flip(0), kept.progress.table), fitted.progress.table, 0.0)
    before = {name: leaf.clone() for name, leaf in named_leaves(fitted.progress.table).items()}
    fitted.personalize(rows, rounds=2, from_scratch=False)
    assert all(torch.equal(v, before[n]) for n, v in named_leaves(fitted.progress.table).items())
    with pytest.raises(
        ValueError, match=r"client 'new' is new, and has no state.*from_scratch=True"
    ):
        fitted.personalize(newcomers(), rounds=1, from_scratch=False)


def test_new_clients_do_not_depend_on_each_other() -> None:
    fitted = fit(fedsvi(regression), federation(), rounds=2)
    both = fitted.personalize(newcomers(), rounds=4)
    turned = fitted.personalize(newcomers().select([1, 0]), rounds=4)
    one = fitted.personalize(newcomers().select([1]), rounds=4)
    table = both.progress.table
    assert_close(tree_map(lambda v: v.flip(0), table), turned.progress.table, 1e-12)
    assert_close(tree_map(lambda v: v[1:], table), one.progress.table, 1e-12)


@pytest.mark.slow("slopes")
@pytest.mark.parametrize("case", ["means", "slopes"])
def test_the_conditional_guide_is_exact_without_steps(case: str) -> None:
    """For any q(g) = Normal(m, C): b | y = Normal(V (x'y / v + L^-1 m), V + V L^-1 C L^-1 V)."""
    model, data = (means, three()) if case == "means" else (slopes, federation())
    fitted = fit(fedsvi(model, guides.conditional, optimizer=Adam(0.2)), data, rounds=5)
    if case == "means":
        new = ClientData.from_clients({"new": {"y": [2.0, -1.0, 0.5]}})
        x, y, spread, v = torch.ones(3, 1), new.fields["y"], torch.eye(1), 1.0
    else:
        new = newcomers().select(["new"])
        from tests.programs import NOISE, SPREAD_TRIL

        x, y, spread, v = new.fields["x"], new.fields["y"], SPREAD_TRIL @ SPREAD_TRIL.T, NOISE**2
    inferred = fitted.personalize(new)
    assert named_leaves(inferred.progress.table) == {}
    params = fitted.message["params"]
    scale = torch.nn.functional.softplus(params["_shared.scale"])
    tril = scale[:, None] * (params["_shared.lower"].tril(-1) + torch.eye(len(scale)))
    given = (x.T @ x / v + spread.inverse()).inverse()
    slope = given @ spread.inverse()
    mean = given @ (x.T @ y / v) + slope @ params["_shared.loc"]
    cov = given + slope @ tril @ tril.T @ slope.T
    draws = inferred.draws(40_000).own["b"].reshape(40_000, -1)
    error = cov.diagonal().sqrt() / 200.0
    assert bool(((draws.mean(0) - mean).abs() < 4.5 * error).all())
    assert torch.allclose(
        torch.atleast_2d(torch.cov(draws.T)), cov, atol=0.03 * float(cov.diagonal().max())
    )


def test_the_amortized_guide_takes_no_steps_and_needs_no_labels() -> None:
    guide = guides.amortized(fields=("x",), hidden=8)
    fitted = fit(
        fedsvi(regression, guide, optimizer=Adam(0.02)), federation((8, 9, 10, 4)), rounds=20
    )
    nothing = torch.zeros(8)
    unlabeled = newcomers().without("y", "ill", "visits").with_fields(ill=nothing, visits=nothing)
    there = fitted.personalize(newcomers(), rounds=50)
    blind = fitted.personalize(unlabeled, rounds=50)
    assert named_leaves(blind.progress.table) == {}
    assert torch.equal(blind.draws(10).own["slope"], there.draws(10).own["slope"])
    mean = blind.predict(unlabeled, draws=10).mean
    assert torch.equal(mean, there.predict(newcomers(), draws=10).mean)
    assert blind.predict(unlabeled, draws=10).log_score is None


def test_pfedme_personalizes_by_its_prox() -> None:
    net = torch.nn.Linear(2, 1)
    model: Any = models.bayesian_network(
        net, likelihood=models.likelihood.normal(1.0), prior_loc="learned", prior_scale=1.0
    )
    pace: dict[str, Any] = {"optimizer": SGD(0.05), "global_optimizer": SGD(0.0), "prox": 1.0}
    method = pfedme(model, inner_steps=60, steps=1, batch_size=None, **pace)
    fitted = fit(method, federation(), rounds=2)
    new = fitted.personalize(newcomers(), rounds=1)
    theta = {name: value for name, value in fitted.message.items()}
    x = torch.cat([newcomers().fields["x"][:6], torch.ones(6, 1)], 1)
    middle = torch.cat([theta["theta.weight"].flatten(), theta["theta.bias"]])
    prox = torch.linalg.solve(
        x.T @ x / 6 + torch.eye(3), x.T @ newcomers().fields["y"][:6] / 6 + middle
    )
    draws = new.draws(1).own
    served = torch.cat([draws["w.weight"][0, 0].flatten(), draws["w.bias"][0, 0].flatten()])
    assert torch.allclose(served, prox, atol=1e-2)


def test_rounds_of_sgd_keep_their_own_schedule() -> None:
    """A personalized fit is a `Fit`: it predicts, saves and personalizes again from the same start."""
    fitted = fit(fedsvi(regression, local_optimizer=SGD(0.01)), federation(), rounds=2)
    once, twice = (fitted.personalize(newcomers(), rounds=3) for _ in range(2))
    again = once.personalize(newcomers(), rounds=3)
    for other in (twice, again):
        assert_close(once.progress.table, other.progress.table, 0.0)
    assert isinstance(again, hierfl.Fit)
