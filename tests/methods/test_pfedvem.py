"""pFedVEM, FedHB and pFedHB against closed forms, and FedABML's EM, which they are without their priors."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.functional import softplus

from hierfl import ClientData, Clock, methods, models
from hierfl.engine.federation import federate
from hierfl.methods import fedhb, pfedvem
from hierfl.methods.parts.averaging import OwnParams
from hierfl.methods.personalized.hyper_priors import most_likely
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.methods.cases import CASES, personal
from tests.methods.test_pvi import close
from tests.programs import federation, fit


def scalar(**options: Any) -> Any:
    """Return one weight for each client, of which y is a noisy view."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    return models.bayesian_network(module, likelihood=normal(1.0), prior_loc="learned", **options)


def views(*ys: float, rows: int = 4) -> ClientData:
    """Return clients whose rows are all x = 1 and one y."""
    one = torch.ones(rows, 1, dtype=torch.float64)
    return ClientData.from_clients(
        {f"c{k}": {"x": one, "y": y * one[:, 0]} for k, y in enumerate(ys)}
    )


def test_the_spread_is_the_most_likely_one() -> None:
    """d = 2, sum s^2 = 0.6, |m - w|^2 = 1.7: rho^2 = 1.15."""
    module = torch.nn.Linear(2, 1, bias=False)
    model = models.bayesian_network(module, likelihood=normal(1.0), prior_scale="client")
    run = federate(pfedvem(model), federation())
    phi = dict(run.program.start()[1])
    inverse = torch.tensor([0.2, 0.4]).sqrt().expm1().log()
    phi["w.weight.scale"] = inverse.reshape(phi["w.weight.scale"].shape)
    phi["w.weight.loc"] = torch.tensor([1.0, 0.0]).reshape(phi["w.weight.loc"].shape)
    message = {"theta.weight": torch.tensor([[0.0, 0.7**0.5]])}
    work = run.client.start(message, OwnParams(phi, torch.ones(())))
    close(softplus(work.beside).flatten() ** 2, [1.15], 1e-5)


@pytest.mark.slow
def test_the_fixed_point_of_variational_em() -> None:
    """Clients that see each of 8 weights 4 times: q, rho^2 and w are each other's optima."""
    generator, rows, d = torch.Generator().manual_seed(0), 4, 8
    ys = 2.0 * torch.randn(3, d, generator=generator, dtype=torch.float64)
    x = torch.eye(d, dtype=torch.float64).repeat(rows, 1)
    data = ClientData.from_clients(
        {f"c{k}": {"x": x, "y": y.repeat(rows)} for k, y in enumerate(ys)}
    )
    module = torch.nn.Linear(d, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    model = models.bayesian_network(
        module, likelihood=normal(1.0), prior_scale="client", scale_start=1.0
    )
    method = pfedvem(model, optimizer=SGD(0.4), head_steps=40, draws=6)
    fitted = fit(method, data, rounds=10)
    w, phi = fitted.message["theta.weight"].flatten(), fitted.progress.table.params
    rho2 = softplus(phi["spread"]).reshape(3, 1) ** 2
    means = phi["w.weight.loc"].reshape(3, d)
    variances = softplus(phi["w.weight.scale"]).reshape(3, d) ** 2
    close(means, (rows * ys + w / rho2) / (rows + 1 / rho2), 0.2)
    close(variances, (1 / (rows + 1 / rho2)).expand(3, d), 0.06)
    close(rho2[:, 0] / (variances + (means - w) ** 2).mean(1), torch.ones(3), 0.15)
    close(w, (means / rho2).sum(0) / (1 / rho2).sum(), 1e-6)


def test_with_one_known_spread_it_is_fedabml() -> None:
    """All weights local, confidence off: FedABML with its exact server and a known prior scale."""
    how: dict[str, Any] = {"optimizer": SGD(0.02), "draws": 2}
    one = pfedvem(
        personal(prior_scale="client", scale_start=0.5), **how, head_steps=3, confidence=False
    )
    two = methods.fedabml(
        personal(prior_scale=0.5), **how, server="exact", steps=3, unit="step", batch_size=None
    )
    a, b = (fit(m, federation(), rounds=1, seed=3) for m in (one, two))
    for name, value in b.message.items():
        # fedabml's q starts at the prior's scale, pfedvem's at the guide's own
        assert a.message[name].shape == value.shape
    moments = {n: v for n, v in a.progress.table.params.items() if n.endswith(".loc")}
    for name, value in moments.items():
        param = name.replace("w.", "theta.", 1).removesuffix(".loc")
        close(a.message[param].flatten(), value.mean(0).flatten(), 1e-10)


def test_effective_clients_are_logged() -> None:
    history = fit(CASES["pfedvem"].make(), federation(), rounds=2).history
    assert {"effective_head", "rho", "loss"} <= set(history)
    assert 1.0 <= history["effective_head"].iloc[-1] <= 4.0


def test_the_server_of_fedhb_by_hand() -> None:
    """m = (1, 3) and s^2 = 0.1: m0 4/3, V 5.866667, n 5, so that V / n = 1.173333."""
    method = fedhb(scalar(prior_scale="learned"))
    federation_ = federate(method, views(1.0, 3.0))
    theta = federation_.program.start()[0]
    means = {
        "moments": {
            "away": {"theta.weight": torch.full((1, 1), 2.0)},
            "square": {"theta.weight": torch.full((1, 1), (1 + 9) / 2 + 0.1)},
        }
    }
    new = federation_.server.update(theta, means, Clock(0, 1, 2))
    close(new["theta.weight"].flatten(), [4 / 3], 1e-6)
    close(softplus(new["scale.weight"]).flatten() ** 2, [5.866667 / 5], 1e-5)


M, S2, C = np.array([0.5, 1.5, -0.2]), np.array([0.1, 0.2, 0.3]), np.array([0.5, 0.3, 0.2])


def found(a: float, b: float) -> tuple[float, float]:
    """Return the server's mu and v for three clients."""
    mean = float(C @ M)
    around = torch.tensor([float(C @ (S2 + (M - mean) ** 2))])
    mu, v = most_likely(torch.tensor([mean]), around, a, b)
    return float(mu), float(v)


@pytest.mark.parametrize(("a", "b"), [(0.7, 0.4), (5.0, 5.0), (0.0, 2.0), (3.0, 0.0), (0.0, 0.0)])
def test_the_server_minimizes_its_objective(a: float, b: float) -> None:
    """A minimizer over (mu, log v), of the sum of the clients' KLs and the two penalties."""

    def objective(at: Any) -> Any:
        mu, v = at[0], np.exp(at[1])
        kl = 0.5 * (np.log(v / S2) + (S2 + (M - mu) ** 2) / v - 1.0)
        return C @ kl + a * mu**2 + b * v

    best = minimize(objective, [0.0, 0.0], method="BFGS", options={"gtol": 1e-9}).x
    assert found(a, b) == pytest.approx((best[0], np.exp(best[1])), abs=1e-6)


def test_points_that_agree_leave_a_finite_prior() -> None:
    mu, v = most_likely(torch.tensor([1.0]), torch.tensor([0.0]), 0.0, 5.0)
    assert float(mu) == 1.0 and 0.0 < float(v) < 1e-6
