"""PVI, hierarchical PVI and BFI against oracles.

The oracles are those of methods_bayesian.md, sections 0 (E1, E2), 4, 4b and 11.
"""

from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import scipy
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, Fit
from hierfl.core import noise
from hierfl.methods import bfi, fedep, fedlaplace, pvi
from hierfl.methods.parts.robust_losses import score
from tests.programs import exact, federation, fit, logistic, means, slopes, three
from tests.sampled import sampled

PRECISION = torch.tensor([[8.0, 2.0], [2.0, 8.0]], dtype=torch.float64)
MEAN = torch.tensor([0.7333333333333333, 0.5666666666666667], dtype=torch.float64)


def e1(*, by_row: bool = False) -> ClientData:
    """Return example E1; `by_row` makes each row of A and C a client."""
    rows: dict[str, Any] = {
        "a": ([[1, 0], [1, 1]], [1, 2]),
        "b": ([[0, 2]], [1]),
        "c": ([[1, -1], [2, 1]], [0, 2]),
    }
    flat = [(n, i, x[i], y[i]) for n, (x, y) in rows.items() for i in range(len(y))]
    names = [f"{n}{i}" if by_row else n for n, i, _, _ in flat]
    x, y = (torch.tensor([row[k] for row in flat], dtype=torch.float64) for k in (2, 3))
    return ClientData.from_arrays(names, x=x, y=y)


def line(batch: ClientBatch) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def gaussian(fitted: Fit) -> tuple[Tensor, Tensor]:
    """Return the mean and precision of the fitted guide's global sites."""
    params = fitted.message["params"]
    scale = torch.nn.functional.softplus(params["_shared.scale"])
    lower = params.get("_shared.lower", torch.zeros(len(scale), len(scale)))
    tril = scale[:, None] * (lower.tril(-1) + torch.eye(len(scale)))
    return params["_shared.loc"], torch.linalg.inv(tril @ tril.T)


def close(a: Tensor, b: Any, atol: float = 1e-8) -> None:
    assert torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), rtol=0.0, atol=atol), (a, b)


def in_turn(clients: int) -> int:
    """Return a seed with which cohorts of one visit the clients in order."""
    return next(
        s
        for s in range(10_000)
        if all(int(noise.cohort(s, r, clients, 1)) == r for r in range(clients))
    )


EXACT: dict[str, Any] = {
    "pvi": partial(pvi, damping=1.0),
    "fedep": partial(fedep, damping=1.0),
    "fedep, one factor": partial(fedep, damping=1.0, shared_factor=True),
    "bfi": partial(bfi, steps=5),
}


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_one_round_of_a_gaussian_model_is_exact_with_any_split(name: str, by_row: bool) -> None:
    fits = [fit(EXACT[name](line), e1(by_row=by_row), rounds=1)]
    if name in ("pvi", "fedep") and not by_row:  # and one client after another
        fits.append(fit(EXACT[name](line), e1(), rounds=3, cohort=1, seed=in_turn(3)))
    for loc, precision in map(gaussian, fits):
        close(loc, MEAN)
        close(precision, PRECISION)


@pytest.mark.parametrize(
    ("name", "model"),
    sampled([("pvi", "means"), ("pvi", "slopes"), ("fedep", "slopes")], [("pvi", "means")]),
)
def test_hierarchies_are_exact_after_one_visit(name: str, model: str) -> None:
    program, data = {"means": (means, three()), "slopes": (slopes, federation())}[model]
    known = exact(data, model)
    loc, precision = gaussian(fit(EXACT[name](program), data, rounds=1))
    close(loc, known.loc)
    close(precision, torch.linalg.inv(known.cov))


@pytest.mark.parametrize(
    ("make", "draws", "damping"), sampled([(pvi, 4, None), (fedep, 16, 0.7)], 2)
)
def test_q_is_the_product_of_its_factors(make: Any, draws: int, damping: float | None) -> None:
    method = make(logistic, damping=damping, draws=draws, steps=1)
    fitted = fit(method, federation(), rounds=2, seed=2)
    state, factors = fitted.progress.server, fitted.progress.table.factor
    for q, prior, factor in zip(state.q, state.prior, factors, strict=True):
        close(q - prior - factor.sum(0), torch.zeros(()), 1e-10)


def test_damped_rounds_converge_geometrically() -> None:
    for rounds, wanted in ((1, (0.6041667, 0.4791667)), (2, (0.6753814, 0.5283224))):
        loc, precision = gaussian(fit(pvi(line), e1(), rounds=rounds))
        close(loc, wanted, 1e-6)
        close(precision, torch.eye(2) + (1 - (2 / 3) ** rounds) * (PRECISION - torch.eye(2)))


def test_diagonal_factors_reach_the_mean_field_answer() -> None:
    method = pvi(line, factors="diagonal", damping=1.0)
    close(gaussian(fit(method, e1(), rounds=1))[0], (0.741176, 0.576471), 1e-6)
    in_order = fit(method, e1(), rounds=3, cohort=1, seed=in_turn(3))
    close(gaussian(in_order)[0], (0.730159, 0.558730), 1e-6)


@pytest.mark.slow("1.0-1-60")
@pytest.mark.parametrize(
    ("damping", "cohort", "rounds"),
    [(1.0, None, 25), (0.5, None, 25), (1 / 3, None, 45), (1.0, 1, 60)],
)
def test_diagonal_factors_have_one_fixed_point_under_every_schedule(
    damping: float, cohort: int | None, rounds: int
) -> None:
    method = pvi(line, factors="diagonal", damping=damping, draws=2, steps=1)
    loc, precision = gaussian(fit(method, e1(), rounds=rounds, cohort=cohort))
    close(loc, MEAN, 1e-5)
    close(precision, 8.0 * torch.eye(2), 1e-5)


@pytest.mark.slow
def test_the_fixed_point_solves_the_pooled_problem() -> None:
    """The gradient of the global ELBO vanishes at the fixed point.

    E_q of the pooled gradient is 0, and q's precision is minus E_q of the pooled Hessian.
    """
    data = federation()
    fitted = fit(pvi(logistic, damping=0.8, steps=1), data, rounds=10)
    q = fit(fedlaplace(logistic, weighting_rounds=0, settle_draws=32), data, rounds=8)
    (loc, precision), (other, its) = gaussian(fitted), gaussian(q)
    sd = torch.linalg.inv(its).diagonal().sqrt()
    close((loc - other) / sd, torch.zeros(2), 0.05)
    close((precision - its) * sd[:, None] * sd, torch.zeros(2, 2), 0.05)
    assert fitted.history["moved"].iloc[-1] < 1e-4


def test_an_improper_product_of_factors_is_refused() -> None:
    state = {"shift": torch.zeros(1), "precision": -torch.ones(1, 1), "improper": torch.zeros(())}
    fitted = fit(pvi(means), three(), rounds=1)
    with pytest.raises(ValueError, match="lower damping"):
        fitted.federation.server.update(fitted.progress.server, state, hierfl.Clock(1, 2, 3))


def contaminated() -> ClientData:
    """Return six clients on the line (1, -2), one row in six far from it; all of the last client's."""
    g = torch.Generator().manual_seed(1)
    clients = {}
    for k in range(6):
        x = torch.randn(30, 2, generator=g, dtype=torch.float64)
        y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64)
        y = y + torch.randn(30, generator=g, dtype=torch.float64)
        bad = torch.arange(30) % 6 == 0 if k < 5 else torch.ones(30, dtype=torch.bool)
        clients[f"c{k}"] = {"x": x, "y": torch.where(bad, 20.0 + 20.0 * x[:, 0], y)}
    return ClientData.from_clients(clients)


@pytest.mark.slow("beta")
@pytest.mark.parametrize("loss", ["beta", "gamma"])
def test_a_robust_loss_leaves_outliers_aside(loss: Any) -> None:
    truth, data = torch.tensor([1.0, -2.0], dtype=torch.float64), contaminated()
    plain, _ = gaussian(fit(pvi(line), data, rounds=6))
    robust, _ = gaussian(fit(pvi(line, loss=loss), data, rounds=9))
    assert (plain - truth).abs().max() > 1.0
    assert (robust - truth).abs().max() < 0.25


@pytest.mark.parametrize("name", ["beta", "gamma", "cross_entropy"])
def test_losses_are_those_of_their_definitions(name: Any) -> None:
    """Integrals are sums over classes, or over a fine grid of labels; densities are scipy's."""
    c = 0.4

    def defined(p: Any, whole: float) -> Any:
        if name == "beta":  # -p^(b-1) / (b-1) + I / b, less its value for p = I = 1
            return (1 - p**c) / c + (whole - 1) / (1 + c)
        if name == "gamma":
            return (1 + c) / c * (1 - p**c * whole ** (-c / (1 + c)))
        return (1 - p**c) / c

    logits = torch.tensor([0.3, -1.0, 0.8])
    p = logits.softmax(-1)
    for k in range(3):
        found = score(dist.Categorical(logits=logits), torch.tensor(k), name, c)
        close(-found, defined(p[k], float((p ** (1 + c)).sum())), 1e-6)
    if name != "cross_entropy":
        normal = scipy.stats.norm(0.5, 1.7)
        grid = np.linspace(-30, 30, 200_001)
        whole = float((normal.pdf(grid) ** (1 + c)).sum() * (grid[1] - grid[0]))
        found = score(dist.Normal(0.5, 1.7), torch.tensor(2.0), name, c)
        close(-found, defined(normal.pdf(2.0), whole), 1e-5)


@pytest.mark.slow("0.3-full")
@pytest.mark.parametrize(("alpha", "factors"), [(0.3, "full"), (0.5, "diagonal")])
def test_renyi_divergence_is_minimized(alpha: float, factors: Any) -> None:
    """One client's q minimizes the expected loss plus the divergence, by scipy on its numbers."""
    full = float(factors == "full")
    x = torch.tensor([[1.0, 0], [1, 1], [0, 2]], dtype=torch.float64)
    y = torch.tensor([4.0, 5.0, 1.0], dtype=torch.float64)
    data = ClientData.from_clients({"a": {"x": x, "y": y}})
    method = pvi(
        line, factors=factors, damping=1.0, divergence="renyi", alpha=alpha, steps=90, draws=2
    )  # fmt: skip
    loc, precision = gaussian(fit(method, data, rounds=1))

    def objective(v: Any) -> float:
        m, tril = v[:2], np.array([[np.exp(v[2]), 0.0], [full * v[4], np.exp(v[3])]])
        s = tril @ tril.T
        rest = y.numpy() - x.numpy() @ m
        nll = 0.5 * (rest @ rest + np.trace(x.numpy() @ s @ x.numpy().T))
        mixed = alpha * np.eye(2) + (1 - alpha) * s  # the prior is N(0, I)
        dets = np.linalg.slogdet(mixed)[1] - (1 - alpha) * np.linalg.slogdet(s)[1]
        renyi = 0.5 * alpha * m @ np.linalg.solve(mixed, m) - 0.5 / (alpha - 1) * dets
        return float(nll + renyi / alpha)

    best = scipy.optimize.minimize(objective, np.zeros(5), tol=1e-12).x
    tril = np.array([[np.exp(best[2]), 0.0], [full * best[4], np.exp(best[3])]])
    close(loc, best[:2], 1e-4)
    close(torch.linalg.inv(precision), tril @ tril.T, 1e-4)


def test_losses_that_are_not_of_this_model_are_refused() -> None:
    with pytest.raises(hierfl.ClientError, match="is of classes, and the likelihood is Normal"):
        fit(pvi(line, loss="cross_entropy"), e1(), rounds=1)
