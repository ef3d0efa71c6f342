"""FedMAP: Theorem 1, example A.4 against scipy, weights in logs, and equalities with other methods."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import hierfl
from hierfl import ClientData, LogShare
from hierfl.core.trees import tree_leaves
from hierfl.engine.aggregate import added, means_of, summed
from hierfl.methods import fedmap
from hierfl.models import learned_prior_network
from hierfl.models.learned_priors import InputConvex, Isotropic, LearnedNormal, LearnedVariance
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.methods.cases import net
from tests.methods.quadratics import I2, START, H, clients, observed, stationary
from tests.methods.test_messages import exchange
from tests.programs import federation, fit

# the negative log density of a row is (y - f)^2 plus a constant: A.4's loss
SQUARED = normal(math.sqrt(0.5))


def personal(prior: Any = Isotropic(0.5)) -> Any:  # noqa: B008 (frozen)
    return learned_prior_network(net(), prior=prior, likelihood=normal(1.0))


SIZES = (60, 1, 2, 3, 50)
SHARES = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)


def toy(seed: int = 0) -> ClientData:
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for k, n in enumerate(SIZES):
        x = k + torch.randn(n, generator=generator)
        rows[f"client {k + 1}"] = {
            "x": x[:, None],
            "y": -x + 4.0 * k + math.sqrt(0.8) * torch.randn(n, generator=generator),
        }
    return ClientData.from_clients(rows)


def prox(data: ClientData, mu: Tensor, alpha: Tensor) -> Tensor:
    """Return every client's exact minimizer, (5, 2), computed without hierfl.

    Minimizes the mean of (a x + b - y)^2 plus alpha / 2 times the square of (a, b) - mu.
    """
    found = []
    for x, y in zip(data.fields["x"].split(SIZES), data.fields["y"].split(SIZES), strict=True):
        design = torch.cat([x, torch.ones_like(x)], 1)
        normal_matrix = 2.0 * design.mT @ design / len(x) + torch.diag(alpha)
        found.append(torch.linalg.solve(normal_matrix, 2.0 * design.mT @ y / len(x) + alpha * mu))
    return torch.stack(found)


def envelope(data: ClientData, gamma: Tensor, shares: Tensor = SHARES) -> Tensor:
    """Return the envelope M of Eq. (22) at gamma = (mu_a, mu_b, s_a, s_b)."""
    mu, s = gamma.split(2)
    alpha = 1.0 / (s + 1.0)
    best = prox(data, mu, alpha)
    total = 1e-4 * gamma.square().sum()
    xs, ys = data.fields["x"].split(SIZES), data.fields["y"].split(SIZES)
    for share, w, x, y in zip(shares, best, xs, ys, strict=True):
        total = total + share * (
            (w[0] * x[:, 0] + w[1] - y).square().mean() + (alpha * (w - mu).square()).sum() / 2.0
        )
    return total


def slope_of_envelope(data: ClientData, gamma: Tensor, shares: Tensor = SHARES) -> Tensor:
    return torch.func.grad(lambda g: envelope(data, g, shares))(gamma)


def gamma_of(fitted: hierfl.Fit) -> Tensor:
    gamma = fitted.message["gamma"]
    return torch.cat(
        [
            gamma[f"{part}.{name}"].flatten()
            for part in ("theta", "s")
            for name in ("weight", "bias")
        ]
    )


def toy_method(**options: Any) -> hierfl.Method:
    line = nn.Linear(1, 1)
    with torch.no_grad():
        line.weight.fill_(0.3), line.bias.fill_(-0.2)
    return fedmap(
        learned_prior_network(line, prior=LearnedVariance(), likelihood=SQUARED),
        newton_steps=1,
        **options,
    )


@pytest.mark.parametrize("seed", [0])
def test_a4_the_exact_server_reaches_scipys_minimizer(seed: int) -> None:
    data = toy(seed)

    def value_and_slope(at: Any) -> tuple[float, Any]:
        gamma = torch.as_tensor(at)
        gamma = torch.cat([gamma[:2], gamma[2:].exp()])  # s > 0 at the minimum
        slope = slope_of_envelope(data, gamma)
        return float(envelope(data, gamma)), torch.cat([slope[:2], slope[2:] * gamma[2:]]).numpy()

    best = minimize(
        value_and_slope, [0.0, 0.0, 0.0, 0.0], jac=True, method="BFGS", options={"gtol": 1e-10}
    )
    wanted = torch.as_tensor(best.x)
    wanted = torch.cat([wanted[:2], wanted[2:].exp()])
    found = gamma_of(fit(toy_method(server=LearnedVariance().best), data, rounds=15))
    assert torch.allclose(found, wanted, atol=1e-3, rtol=0.0)
    alpha = 1.0 / (wanted[2:] + 1.0)
    assert -1.2 < float(wanted[0]) < -0.6 and float(alpha[0]) > 5.0 * float(alpha[1])


@pytest.mark.parametrize("omega", ["rows", "uniform"])
def test_theorem_1_the_gradient_server_descends_the_envelope(omega: Any) -> None:
    data, lr = toy(), 1.5
    shares = SHARES if omega == "rows" else torch.full((5,), 0.2)
    method = toy_method(server="gradient", weights=omega, server_optimizer=SGD(lr))
    fitted = fit(method, data, rounds=10)
    gamma = torch.tensor([0.3, -0.2, 0.0, 0.0])
    values = [float(envelope(data, gamma, shares))]
    for _ in range(10):
        gamma = gamma - lr * slope_of_envelope(data, gamma, shares)
        values.append(float(envelope(data, gamma, shares)))
    assert torch.allclose(gamma_of(fitted), gamma, atol=1e-9)
    assert values == sorted(values, reverse=True)


def of_quadratics(prior: dict[str, Tensor]) -> Any:
    """Return a model of Q3's rows under w_k ~ Normal(theta, scale^2), with names that FedMAP accepts."""

    def model(batch: hierfl.ClientBatch) -> None:
        theta = pyro.param("theta.v", prior["loc"].clone())
        with batch.clients():
            prior_of_w = dist.Normal(theta, prior["scale"]).to_event(1)
            observed(batch, pyro.sample("w.v", prior_of_w))

    return model


def test_o2_the_fixed_point_under_uniform_weights_is_the_posterior_mean() -> None:
    """The fixed point is the GLS mean with both variances known.

    It solves sum_k (H_k^-1 + sigma^2)^-1 (gamma - b_k) = 0, with H_k of the summed loss.
    """
    rows = torch.tensor([5.0, 3.0, 2.0])[:, None, None]
    fixed = stationary(torch.linalg.inv(torch.linalg.inv(rows * H) + 0.3 * I2))
    ends = []
    for start in (fixed, START):
        model = of_quadratics({"loc": start, "scale": torch.tensor(0.3).sqrt()})
        fitted = fit(
            fedmap(model, newton_steps=1, loss="sum", weights="uniform"), clients(), rounds=8
        )
        ends.append(fitted.message["gamma"]["theta.v"])
    assert torch.allclose(ends[0], fixed, atol=1e-12)
    assert (ends[1] - fixed).norm() < 0.2 * (START - fixed).norm()


def test_the_learned_normal_is_the_mode_over_all_clients() -> None:
    """`best` equals numerical descent of the same objective.

    The objective is the weighted mean of the negative log density plus the hyper-prior.
    """
    prior, w = LearnedNormal(strength=0.5, typical=0.1), torch.tensor([[1.0], [1.3], [0.4]])
    weights = torch.tensor([0.2, 0.5, 0.3])
    mean = (weights[:, None] * w).sum(0)
    best = prior.best({}, mean, (weights[:, None] * (w - mean).square()).sum(0))

    def total(theta: Tensor, log_v: Tensor) -> Tensor:
        above = {"theta": theta, "log_v": log_v}
        return -(
            weights * torch.stack([prior.given(above).log_prob(v) for v in w])
        ).sum() + prior.hyper(above)

    slopes = torch.func.grad(total, (0, 1))(best["theta"], best["log_v"])
    assert all(float(slope.abs().max()) < 1e-12 for slope in slopes)


@pytest.mark.parametrize("hidden", [8, (6, 4), (4, 4, 4)])
def test_the_learned_penalty_is_convex(hidden: int | tuple[int, ...]) -> None:
    prior, generator = InputConvex(hidden, eps=1e-6, pull=1e-6), torch.Generator().manual_seed(0)
    program = fit(fedmap(personal(prior), steps=1), federation(), rounds=1).message["gamma"]
    above = {
        name.partition(".")[0].removeprefix("convex_"): 2.0
        * torch.randn(v.shape, generator=generator)
        for name, v in program.items()
        if name.partition(".")[2] == "0.weight"
    }  # as of a server that has learned for long

    def of_both(v: Tensor) -> Tensor:
        w, theta = v.reshape(2, 3, 2)
        found: Tensor = prior.given({**above, "theta": theta}).penalty(w)
        return found

    for _ in range(5):
        at = torch.randn(12, generator=generator)
        hessian = torch.func.jacrev(torch.func.grad(of_both))(at)
        assert float(torch.linalg.eigvalsh(hessian)[0]) > 0.0
    with pytest.raises(ValueError, match="one width or more"):
        InputConvex(())


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fedmap: nearly all weight lies on one client")
        yield


@pytest.mark.parametrize("omega", ["rows", "uniform", "likelihood", "mean-likelihood"])
def test_omega_is_never_nan(omega: Any, quiet: None) -> None:
    """One client has a million rows and the other 10, in float32."""
    torch.set_default_dtype(torch.float32)
    many = torch.arange(1_000_000).remainder(97).float() / 50.0 - 1.0
    large = {"x": many[:, None], "y": 3.0 * many + 20.0}
    small = {"x": many[:10, None], "y": many[:10]}
    model = learned_prior_network(nn.Linear(1, 1), likelihood=normal(0.5))
    method = fedmap(model, optimizer=SGD(0.01), steps=1, batch_size=None, weights=omega)
    fitted = fit(method, ClientData.from_clients({"large": large, "small": small}), rounds=2)
    effective = fitted.history["effective_clients"]
    assert effective.between(1.0, 2.0 + 1e-5).all()
    assert all(bool(leaf.isfinite().all()) for leaf in tree_leaves(fitted.progress.server))
    if omega == "likelihood":  # all weight is on the client with the fewest rows
        assert effective.iloc[-1] == pytest.approx(1.0)


def test_a_warning_when_one_client_has_all_weight(recwarn: pytest.WarningsRecorder) -> None:
    model = learned_prior_network(nn.Linear(2, 1), likelihood=normal(0.05))
    method = fedmap(model, optimizer=SGD(1e-4), steps=1, weights="likelihood")
    with pytest.warns(UserWarning, match="the others hardly count: use weights='rows'"):
        fit(method, federation((50, 3)), rounds=1)


@pytest.mark.parametrize("omega", ["likelihood", "mean-likelihood"])
def test_omega_is_likelihood_times_prior(omega: Any, quiet: None) -> None:
    data, model, module = federation((5, 3, 4)), personal(Isotropic(0.5)), net()
    method = fedmap(model, optimizer=SGD(0.05), steps=1, batch_size=2, weights=omega)
    message, up, own, _ = exchange(method, data)
    for k, name in enumerate(data.names):
        rows = data.select([name]).fields
        shapes = {name: p.shape for name, p in module.named_parameters()}
        w = {name: own.params[f"w.{name}.at"][k].reshape(shape) for name, shape in shapes.items()}
        f = torch.func.functional_call(module, w, (rows["x"],))[:, 0]
        log = torch.distributions.Normal(f, 1.0).log_prob(rows["y"]).sum()
        away = sum((w[n] - message["gamma"][f"theta.{n}"]).square().sum() for n in w)
        root = len(rows["y"]) if omega == "mean-likelihood" else 1.0
        log_omega = float(log - away / (2 * 0.5)) / root
        assert float(up["clients"].log_weight[k]) == pytest.approx(log_omega, rel=1e-9)


def test_log_weights_add_and_a_common_constant_cancels() -> None:
    generator = torch.Generator().manual_seed(0)
    value, log = torch.randn(7, 2, generator=generator), 300.0 * torch.randn(7, generator=generator)
    parts = added(summed(LogShare(value[:3], log[:3])), summed(LogShare(value[3:], log[3:])))
    whole, moved = summed(LogShare(value, log)), summed(LogShare(value, log - 1e5))
    wanted = (log.softmax(0)[:, None] * value).sum(0)
    for total in (parts, whole, moved):
        means = means_of({"v": total})
        assert torch.allclose(means["v"], wanted, atol=1e-9)
        effective = float(1.0 / log.softmax(0).square().sum())
        assert float(means["effective_v"]) == pytest.approx(effective, rel=1e-9)
    apart = summed(LogShare(value, torch.tensor([1400 * -0.3, 350 * -0.3] + [-1e6] * 5)))
    assert float(means_of({"v": apart})["effective_v"]) == 1.0


def test_init_client_starts_from_one_client_fitted_alone() -> None:
    data = federation((5, 3, 7))
    options: dict[str, Any] = {"optimizer": SGD(0.05), "steps": 3, "batch_size": 2}
    first, free = {}, fedmap(personal(Isotropic(math.inf)), **options)
    for seed in (0, 5):
        fitted = fit(fedmap(personal(), init="client", **options), data, rounds=1, seed=seed)
        alone = fit(free, data, rounds=1, seed=seed).progress.table.params
        gamma = torch.cat([v.flatten() for v in fitted.message["gamma"].values()])
        own = torch.cat([v.flatten(1) for v in alone.values()], 1)
        near = (own - gamma).abs().amax(1)
        assert float(near.min()) < 1e-12 and float(near.max()) > 1e-3
        first[int(near.argmin())] = True
    after = fit(fedmap(personal(), init="client", **options), data, rounds=2, seed=0)
    assert after.progress.table.seen.tolist() == [1.0, 1.0, 1.0]
    assert len(first) > 1, "the seed chooses the client"


def test_a_prior_for_each_layer() -> None:
    prior = {"0.": Isotropic(math.inf), "": LearnedVariance(c=0.7)}
    options: dict[str, Any] = {"optimizer": SGD(0.05), "steps": 2, "batch_size": 3}

    def gamma(prior: Any) -> dict[str, Tensor]:
        method = fedmap(personal(prior), server_optimizer=SGD(0.0), **options)
        return fit(method, federation(), rounds=1).message["gamma"]

    mixed = gamma(prior)
    params = {layer: {n.partition(".")[0] for n in mixed if layer in n} for layer in (".0.", ".2.")}
    assert params == {".0.": {"theta"}, ".2.": {"theta", "s"}}
    for alone in map(gamma, prior.values()):
        assert not torch.equal(mixed["theta.0.bias"], alone["theta.0.bias"])
    with pytest.raises(ValueError, match=r"prior: none of the prefixes '1\.' fits '0\.weight'"):
        personal({"1.": Isotropic()})
