"""FedVI's special cases V2, V3 and V5 on every engine, its KL by hand, and a linear-Gaussian head.

The posterior of the linear-Gaussian head is known in closed form.
"""

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor
from torch.func import grad

import hierfl
from hierfl import Program, full_batch, guides
from hierfl.core import noise
from hierfl.methods.fedvi import every_other
from hierfl.optimizers import SGD
from hierfl.program.program import Params
from tests.methods.test_fedvi import heads, method
from tests.methods.test_pvi import close
from tests.programs import Given, federation, fit


def test_v2_a_constructor_without_inputs_gives_one_network_for_all() -> None:
    """With tiny deviations, all predictions are G(r_g) + r_l beta + bias with one beta and one bias."""
    data, model = federation((5, 7)), heads(prior_scale=1e-12)
    deaf = guides.constructed(
        features=lambda batch: 0.0 * model.global_features(batch), scale=1e-12, hidden=5
    )
    result = fit(replace(method(model, kl_weight=0.0), guide=deaf), data, rounds=3)
    theta, last = result.message, "constructor.last.bias"
    assert not torch.equal(theta[last], result.program.start()[0][last])

    def dense(rows: Tensor, layer: str) -> Tensor:
        name = f"constructor.{layer}"
        return rows @ theta[f"{name}.weight"] + theta[f"{name}.bias"]

    inside = torch.relu(dense(torch.relu(dense(torch.zeros(4), "1")), "2"))
    beta, _, bias = dense(inside, "last").split((2, 2, 1))
    rows = torch.tanh(data.fields["x"] @ theta["embedding.0.weight"].T + theta["embedding.0.bias"])
    shared = rows[:, :4] @ theta["head.weight"][:, 0] + theta["head.bias"]
    close(result.predict(data, draws=2).mean, shared + rows[:, 4:] @ beta + bias, 1e-9)


def test_v3_at_the_prior_the_kl_and_its_gradient_are_0() -> None:
    """From the prior, a step with any tau equals a step with tau = 0, and the logged KL is 0."""
    model, data = heads(), federation((5, 3, 7))
    how: dict[str, Any] = {"features": model.global_features, "scale": model.prior_scale}
    still = guides.constructed(**how, hidden=5, gain=0.0)
    after = []
    for tau in (0.0, 1e6):
        base = method(model, kl_weight=tau, steps=1, batch_size=None, server_optimizer=SGD(1.0))
        after.append(fit(replace(base, guide=still), data, rounds=1))
    assert abs(after[1].history["kl"][0]) < 1e-12
    for name, value in after[0].message.items():
        assert torch.allclose(value, after[1].message[name], atol=1e-9, rtol=0.0), name
    program, batch = after[0].program, full_batch(data, torch.arange(1))
    slopes = grad(lambda p: program.terms(p, batch).local_kl.sum())(program.start()[0])
    assert max(float(g.abs().max()) for g in slopes.values()) < 1e-12


def posterior(program: Program, theta: Params, support: Any) -> tuple[Tensor, Tensor]:
    """Return the means and standard deviations of the local heads."""
    with pyro.poutine.block(), Given(theta, {}), pyro.poutine.trace() as trace:
        program.guide(support)
    nodes: Any = trace.trace.nodes
    found = nodes["beta"]["fn"].base_dist
    return found.loc, found.scale


def test_o9_the_logged_kl_by_hand() -> None:
    """Its mean over clients, of the support halves: sum_d [(s^2 + m^2) / s0^2 - 1 - log(s^2 / s0^2)] / 2."""
    model, data = heads(prior_scale=0.6), federation((5, 3, 7))
    constructor = guides.constructed(features=model.global_features, scale=0.3, hidden=5, gain=1.0)
    base = replace(method(model, steps=1, batch_size=None), guide=constructor)
    fitted = fit(base, data, rounds=1, seed=2)
    found = []
    for k in range(3):
        support, _ = every_other(full_batch(data, torch.tensor([k]), seed=2, at=(0, 0, 0)))
        loc, sd = posterior(fitted.program, fitted.program.start()[0], support)
        ratio = sd.square() / 0.36
        found.append(0.5 * (ratio + loc.square() / 0.36 - 1.0 - ratio.log()).sum())
    assert fitted.history["kl"][0] == pytest.approx(float(torch.stack(found).mean()), abs=1e-10)


def test_v5_a_round_descends_pyros_negative_elbo() -> None:
    """Value and gradient of summed losses, tau = gamma = 1, are TraceMeanField_ELBO's on the same noise."""
    model, data, lr = heads(global_scale=0.8), federation((4, 4)), 0.01
    options: dict[str, Any] = {"loss": "sum", "kl_weight": 1.0, "prior_weight": 1.0}
    options |= {"steps": 1, "batch_size": None, "optimizer": SGD(lr)}
    fitted = fit(method(model, server_optimizer=SGD(1.0), **options), data, rounds=1, seed=2)
    program, whole = fitted.program, full_batch(data, torch.arange(2), seed=2, at=(0, 0, 0))
    theta = {name: value.clone().requires_grad_() for name, value in program.start()[0].items()}
    support, query = every_other(whole)
    eps = noise.normals(noise.fold(whole.key, noise.word("beta")), (1, 2, 1))

    def guide(b: hierfl.ClientBatch) -> None:
        with pyro.poutine.block(), pyro.poutine.trace() as trace, Given(theta, {}):
            program.guide(support)
        nodes: Any = trace.trace.nodes
        normal_: Any = nodes["beta"]["fn"].base_dist
        value = normal_.loc + normal_.scale * eps
        with replace(b).clients():  # a new batch: Pyro tracks the plates of model and guide
            pyro.sample("beta", _fixed(normal_.loc, normal_.scale, value))
            pyro.sample("bias", nodes["bias"]["fn"])

    def given(b: hierfl.ClientBatch) -> None:
        with Given(theta, {}):
            model(replace(b))

    with pyro.poutine.block():
        theirs: Any = TraceMeanField_ELBO().differentiable_loss(given, guide, query)
    pyro.clear_param_store()
    terms = program.terms(theta, query, support=support)
    ours = (terms.nll.sum() + terms.local_kl.sum() + terms.global_kl).detach()
    assert float(ours) == pytest.approx(float(theirs.detach()), abs=1e-8)
    slopes = torch.autograd.grad(theirs, list(theta.values()))
    for (name, value), slope in zip(theta.items(), slopes, strict=True):
        # both clients have two query rows, so the mean of their updates is half the sum
        close(fitted.message[name], value.detach() - 0.5 * lr * slope, 1e-10)


def _fixed(loc: Tensor, scale: Tensor, value: Tensor) -> Any:
    """Return a Normal whose draw is `value` and whose KL is a Normal's."""

    class Fixed(dist.Normal):
        def rsample(self, sample_shape: Any = ()) -> Tensor:
            return value

        def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
            return self

    return Fixed(loc, scale).to_event(2)  # type: ignore[no-untyped-call]
