"""Thousands of clients: few draws are weighted, about a proposal, and the posterior is right."""

import warnings

import numpy as np
import pytest
import torch

from hierfl import ClientData
from hierfl.methods import two_stage
from hierfl.summaries.weights import asked_of, everywhere, k_hats_of, smoothed
from tests.programs import fit
from tests.summaries import programs

CLIENTS, ROWS = 1500, 3


def people(seed: int = 3) -> ClientData:
    """Clients with three answers each, yes or no, so that there are four kinds of clients."""
    g = torch.Generator().manual_seed(seed)
    level = 0.4 + 0.9 * torch.randn(CLIENTS, generator=g)
    ill = torch.rand(CLIENTS, ROWS, generator=g) < level.sigmoid()[:, None]
    which = torch.arange(CLIENTS).repeat_interleave(ROWS)
    return ClientData.from_arrays(which, ill=ill.flatten().to(torch.get_default_dtype()))


def exact(data: ClientData) -> dict[str, tuple[float, float]]:
    """Mean and sd of mu and tau, by sums over a grid and over 60 nodes of each level."""
    yes = data.fields["ill"].view(CLIENTS, ROWS).sum(1).long()
    kinds = torch.bincount(yes, minlength=ROWS + 1).numpy()
    mu, tau = np.meshgrid(np.linspace(0.1, 0.8, 81), np.linspace(0.5, 1.5, 81), indexing="ij")
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    p = 1.0 / (1.0 + np.exp(-(mu[..., None] + tau[..., None] * nodes)))
    log_p = -0.5 * (mu / 1.5) ** 2 - 0.5 * tau**2
    for k, many in enumerate(kinds):
        log_p = log_p + many * np.log((p**k * (1.0 - p) ** (ROWS - k)) @ weights)
    share = np.exp(log_p - log_p.max())
    share /= share.sum()
    found = {}
    for name, x in (("mu", mu), ("tau", tau)):
        mean = (share * x).sum()
        found[name] = (mean, float(np.sqrt((share * (x - mean) ** 2).sum())))
    return found


@pytest.mark.slow
def test_the_posterior_of_1_500_clients_is_that_of_a_grid() -> None:
    data = people()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit(two_stage(programs.binary), data)
    draws, history = found.draws(1000).shared, found.history
    for name, (mean, sd) in exact(data).items():
        assert abs(draws[name].mean() - mean) < 0.12 * sd, name
        assert abs(draws[name].std() / sd - 1.0) < 0.1, name
    last = history.iloc[-1]
    assert last["k_hat"] < 0.7
    assert last["inner_error"] < 0.1, "what the quadratic leaves is said"
    asked = asked_of(2, 1000)
    assert last["bytes_up"] < 8 * CLIENTS * (asked + 4), "clients weight as few draws as that"


def test_a_quadratic_is_found_exactly_and_what_is_none_is_said() -> None:
    draws = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)) * 0.1 + 3.0
    at = torch.arange(0, 500, 5)

    def square(z: torch.Tensor) -> torch.Tensor:
        return 2.0 + z[:, 0] - 30.0 * z[:, 1] ** 2 + 7.0 * z[:, 0] * z[:, 1]

    base = -square(draws)
    found, error = everywhere(square(draws[at]), at, draws, base)
    assert torch.allclose(found, square(draws), atol=1e-8)
    assert error < 1e-8
    bent = square(draws) + 400.0 * (draws[:, 0] - 3.0) ** 3
    assert everywhere(bent[at], at, draws, base)[1] > 0.1
    whole, none = everywhere(bent, torch.arange(500), draws, base)
    assert none == 0.0
    assert torch.equal(whole, bent)


@pytest.mark.parametrize("heavy", [3, 7])
def test_a_client_with_a_tail_is_found_among_those_without(heavy: int) -> None:
    g = torch.Generator().manual_seed(1)
    log_ratios = 0.05 * torch.randn(400, 10, generator=g)
    log_ratios[:, heavy] = 1.5 * torch.empty(400).exponential_(generator=g)
    found = k_hats_of(log_ratios)
    assert found.argmax() == heavy
    assert found[heavy] == pytest.approx(smoothed(log_ratios[:, heavy]).k_hat)
    assert (found[torch.arange(10) != heavy] == 0.0).all()
