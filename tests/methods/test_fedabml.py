"""FedABML: fixed points in closed form, special cases, and rounds that do not depend on client state."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import guides, models
from hierfl.core.trees import tree_map
from hierfl.engine.rounds import one_round
from hierfl.methods import by_rows, fedabml
from hierfl.optimizers import SGD
from tests.methods.quadratics import I2, ONE_STEP, START, B, H, P, at, clients, stationary
from tests.programs import federation, fit

ROWS = torch.tensor([5.0, 3.0, 2.0], dtype=torch.float64)[:, None, None]


def net(**options: Any) -> Any:
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.3, -0.2]])), module.bias.fill_(0.1)
    return models.bayesian_network(
        module, likelihood=models.likelihood.normal(1.0), **{"prior_scale": "learned", **options}
    )


def own(fitted: hierfl.Fit) -> dict[str, Tensor]:
    params: dict[str, Tensor] = fitted.progress.table.params
    return params


def test_with_a_fixed_prior_and_exact_local_solves_the_fixed_point_is_gls() -> None:
    """Oracle O3: sum_k ((n_k H_k)^-1 + sd^2)^-1 (theta - b_k) = 0 with sd = 1.

    The local loss is the sum over rows, not their mean.
    """
    gls = stationary(torch.linalg.inv(torch.linalg.inv(ROWS * H) + I2))
    options: dict[str, Any] = {**ONE_STEP, "kl_weight": 1.0, "optimizer": SGD(0.4), "draws": 1}
    options |= {"global_optimizer": SGD(1.5), "inner_steps": 70}
    method = by_rows(fedabml(at(gls, personal=True), guides.delta, **options))
    assert torch.allclose(
        fit(method, clients(), rounds=1).message["theta"], gls, atol=1e-6, rtol=0.0
    )
    slower = {**options, "global_optimizer": SGD(4.0), "inner_steps": 20}
    method = by_rows(fedabml(at(START, personal=True), guides.delta, **slower))
    assert torch.allclose(
        fit(method, clients(), rounds=12).message["theta"], gls, atol=1e-2, rtol=0.0
    ), "rounds converge to it"
    plain = fit(
        fedabml(at(gls, personal=True), guides.delta, **options), clients(), rounds=1
    ).message["theta"]
    assert not torch.allclose(plain, gls, atol=1e-2), (
        "a uniform mean of clients of unequal size has another fixed point"
    )


def test_a2_under_equal_variances_the_kl_is_a_square_plus_a_constant() -> None:
    program = hierfl.read(
        net(prior_scale=0.5), guides.mean_field(init_scale=0.2), federation((5, 3))
    )
    g = torch.Generator().manual_seed(0)
    above, mine = program.start()
    loc = {
        k: v + 0.3 * torch.randn(v.shape, generator=g) if k.endswith(".loc") else v
        for k, v in mine.items()
    }
    kl = program.terms({**above, **loc}, program.prototype).local_kl
    lam, rho, d = 1.0 / 0.5**2, 1.0 / 0.2**2, 3
    square = sum(
        (loc[f"w.{n}.loc"] - above[f"theta.{n}"]).square().sum() for n in ("weight", "bias")
    )
    constant = d / 2 * (lam / rho - 1.0 - torch.log(torch.tensor(lam / rho)))
    assert torch.allclose(kl, lam / 2 * square + constant, atol=1e-10, rtol=0.0)


@pytest.mark.parametrize(
    ("meta", "published"), [("full", (0.475296, 0.620012)), ("first", (0.493107, 0.602512))]
)
def test_a3_through_one_step_it_equals_per_fedavg(
    meta: Any, published: tuple[float, float]
) -> None:
    """With J = I - lr H, MAML's fixed point is S(p J H J), or S(p H J) without second derivatives."""
    lr, eta = 0.1, 0.2
    j = I2 - lr * H
    outer = j @ H @ j if meta == "full" else H @ j
    fixed = stationary(P[:, None, None] * outer)
    assert fixed.tolist() == pytest.approx(published, abs=1e-6)
    steps: dict[str, Any] = {"optimizer": SGD(lr), "global_optimizer": SGD(eta), "meta": meta}

    def after(start: Tensor) -> Tensor:
        model = at(start, personal=True)
        method = fedabml(model, guides.delta, kl_weight=0.0, draws=1, **steps, **ONE_STEP)
        return fit(by_rows(method), clients(), rounds=1).message["theta"]

    assert torch.allclose(after(fixed), fixed, atol=1e-10, rtol=0.0)
    step = (P[:, None] * (outer @ (START - B)[..., None])[..., 0]).sum(0)
    assert torch.allclose(after(START), START - eta * step, atol=1e-10, rtol=0.0)


def test_rounds_do_not_depend_on_client_state() -> None:
    method, data = (
        fedabml(net(), optimizer=SGD(0.05), steps=2, batch_size=2, draws=2),
        federation((5, 3, 7, 2)),
    )
    two = fit(method, data, rounds=2, seed=3, cohort=3)
    spoilt = replace(two.progress, table=tree_map(lambda v: v + 1.0, two.progress.table))
    after = [one_round(two.federation, where, 3).server for where in (two.progress, spoilt)]
    for name in after[0]:
        assert torch.equal(after[0][name], after[1][name])


@pytest.mark.slow
def test_scale_link_exp_as_in_the_paper(not_lowered: None) -> None:
    """One step of m and log s, averaged over clients, is the printed one: it needs no random draw."""
    lam, eta = 0.7, 0.05
    options: dict[str, Any] = {**ONE_STEP, "inner_steps": 2, "draws": 2, "kl_weight": lam}
    options |= {"optimizer": SGD(0.1), "global_optimizer": SGD(eta)}
    method = fedabml(
        net(scale_link="exp", scale_start=0.3), guides.mean_field(scale_link="exp"), **options
    )
    data = federation((5, 5))
    fitted = fit(method, data, rounds=1, seed=2)
    start = fitted.program.start()[0]
    torch.testing.assert_close(start["scale.weight"], torch.full((1, 2), 0.3).log())
    mine = own(fitted)
    for name in ("weight", "bias"):
        loc, nu = mine[f"w.{name}.loc"].view(2, -1), mine[f"w.{name}.scale"].view(2, -1)
        m, below = start[f"theta.{name}"].view(-1), start[f"scale.{name}"].view(-1)
        assert float((nu - below).abs().max()) > 1e-3
        # derivatives of the KL in m and nu of the prior, per row, at the client's fitted posterior
        variance = (2.0 * below).exp()
        by_m = lam * (m - loc) / variance / 5.0
        by_nu = lam * (1.0 - ((2.0 * nu).exp() + (loc - m).square()) / variance) / 5.0
        after = (fitted.message[f"{part}.{name}"].view(-1) for part in ("theta", "scale"))
        torch.testing.assert_close(next(after), m - eta * by_m.mean(0))
        torch.testing.assert_close(next(after), below - eta * by_nu.mean(0))
    with pytest.raises(ValueError, match="scale_link is 'log'; it must be 'softplus' or 'exp'"):
        net(scale_link="log")
    short = {**options, "draws": 1, "inner_steps": 1}
    method = fedabml(net(scale_link="exp"), guides.mean_field(scale_link="exp"), **short)
    compiled = fit(method, data, rounds=2, seed=2, compile=True)
    for name, value in fit(method, data, rounds=2, seed=2).message.items():
        torch.testing.assert_close(compiled.message[name], value, rtol=1e-10, atol=1e-10)
