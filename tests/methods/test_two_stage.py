"""two_stage: exact where it can be, right against grids, the same on every engine, and what it refuses."""

import warnings
from functools import cache
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, Fit
from tests.programs import exact, fit, three
from tests.programs import means as exact_means
from tests.summaries import programs
from tests.summaries.programs import binary_rows, gaussian_rows, grid, moments, people, posterior_on

pytestmark = pytest.mark.filterwarnings("ignore:the rounds ended")

two_stage = hierfl.methods.two_stage
EIGHT = (1, 2, 3, 4, 5, 6, 7, 8)


@cache
def fitted(name: str) -> Fit:
    """Return a fit of one of the programs to eight clients of 1 to 8 rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return fit(two_stage(getattr(programs, name), draws=2000), people(EIGHT))


def test_known_scales_give_the_closed_form() -> None:
    """Gaussian rows under known scales: one round, equal weights, k-hat 0, the moments of E2."""
    data = three()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit(two_stage(exact_means, draws=4000), data)
    known = exact(data, "means")
    history, state = found.history, found.progress.server
    assert len(history) == 1
    assert history["k_hat"].iloc[-1] == 0.0
    assert state.final.log_weights.unique().numel() == 1
    draws = found.draws(4000)
    g, sd = draws.shared["g"].flatten(), known.cov.sqrt().item()
    assert abs(g.mean() - known.loc) < 0.06 * sd
    assert 0.95 < g.std() / sd < 1.05
    b = draws.own["b"].view(4000, 3)
    assert ((b.mean(0) - known.own_loc.flatten()).abs() < 0.06 * b.std(0)).all()
    assert torch.allclose(b.var(0), known.own_cov.flatten(), rtol=0.1)


@pytest.mark.slow("binary", "spread_raw")
@pytest.mark.parametrize("name", ["spread", "binary", "spread_raw"])
def test_the_posterior_is_that_of_a_grid(name: str) -> None:
    """mu, tau and every client's level, of eight clients of 1 to 8 rows."""
    found, data = fitted(name), people(EIGHT)
    mu, tau = grid()
    rows = binary_rows(data) if name == "binary" else gaussian_rows(data)
    sd_mu = 1.5 if name == "binary" else 2.0
    p, levels = posterior_on(mu, tau, -0.5 * (mu / sd_mu) ** 2 - 0.5 * tau**2, rows)
    draws = found.draws(4000)
    for site, x in (("mu", mu), ("tau", tau)):
        mean, sd = moments(p, x)
        drawn = draws.shared[site].flatten()
        assert abs(drawn.mean() - mean) < 0.1 * sd, site
        assert 0.9 < drawn.std() / sd < 1.1, site
    own = draws.own["e" if name == "spread_raw" else "a"].view(4000, 8)
    if name == "spread_raw":
        own = draws.shared["mu"].view(-1, 1) + draws.shared["tau"].view(-1, 1) * own
    for k, (mean, sd) in enumerate(levels):
        assert abs(own[:, k].mean() - mean) < 0.1 * sd, k
        assert 0.9 < own[:, k].std() / sd < 1.1, k


SHORT: dict[str, Any] = {"draws": 200}


@cache
def one_round() -> Fit:
    return fit(two_stage(programs.binary, **SHORT), people((3, 1, 5, 4)), rounds=1)


@pytest.mark.parametrize("options", [{"engine": "sequential"}, {"chunk": 1}, {"chunk": 3}], ids=str)
def test_engines_and_chunks_agree(options: dict[str, Any]) -> None:
    found = fit(two_stage(programs.binary, **SHORT), people((3, 1, 5, 4)), rounds=1, **options)
    one, other = found.progress.server, one_round().progress.server
    for name in ("precision", "shift"):
        assert torch.allclose(
            getattr(one.factors, name), getattr(other.factors, name), rtol=1e-6, atol=1e-9
        )
    # the server rounds what it is sent, as its chains would amplify differences of 1e-16
    for name in ("loc", "covariance"):
        assert torch.allclose(getattr(one.belief, name), getattr(other.belief, name), rtol=1e-9)


@pytest.mark.slow
def test_a_cohort_of_half_the_clients_arrives_where_all_do() -> None:
    """Old factors stand until a client answers again; all are weighted in the end."""
    found = fit(two_stage(programs.binary, draws=1000), people(EIGHT), cohort=0.5)
    state = found.progress.server
    assert int(state.stage) == 2 and bool(state.weighted.all()) and bool(state.seen.all())
    one, other = (f.draws(1000).shared for f in (found, fitted("binary")))
    for site, drawn in one.items():
        assert abs(drawn.mean() - other[site].mean()) < 0.15 * drawn.std()


def test_clients_that_never_answered_are_said() -> None:
    with pytest.warns(UserWarning, match=r"rounds ended while gathering.*3 clients have not"):
        fit(two_stage(programs.binary, **SHORT), people((3, 1, 5, 4)), cohort=1, rounds=1)


def logs_of_size(batch: ClientBatch) -> None:
    """A prior that has no value where a client field is 0."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu + batch.size.log(), tau * batch.size))
        with batch.data():
            pyro.sample("y", dist.StudentT(5.0, a, 0.7), obs=batch.y)


def test_fields_of_clients_that_have_not_answered_do_no_harm() -> None:
    data = ClientData.from_arrays(
        torch.tensor([0, 1, 1, 2]),
        client_fields={"size": torch.tensor([0.5, 1.0, 2.0])},
        y=torch.randn(4),
    )
    found = fit(two_stage(logs_of_size, **SHORT), data, cohort=1, rounds=2)
    state = found.progress.server
    assert state.belief.loc.isfinite().all() and state.scouts.draws.isfinite().all()


def looking(batch: ClientBatch) -> None:
    """It reads a value of its rows, which `torch.vmap` forbids."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    scale = 0.7 if float(batch.y.detach().abs().max()) < 1e9 else 1.0
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample("y", dist.StudentT(5.0, a, scale), obs=batch.y)


def test_a_program_that_looks_at_its_rows_runs_without_a_graph() -> None:
    with pytest.warns(UserWarning, match="clients run one at a time"):
        found = fit(two_stage(looking, **SHORT), people((3, 4)))
    assert int(found.progress.server.stage) == 2


@pytest.mark.slow
def test_a_new_client_gets_its_own_posterior() -> None:
    """Its level, given the others: against the grid with the new client's rows weighing in on nothing else."""
    found, data = fitted("binary"), people(EIGHT)
    new = ClientData.from_clients({"new": {"ill": torch.ones(5)}})
    drawn = found.personalize(new).draws(4000).own["a"].flatten()
    mu, tau = grid()
    log_prior = -0.5 * (mu / 1.5) ** 2 - 0.5 * tau**2
    p, _ = posterior_on(mu, tau, log_prior, binary_rows(data))
    a = np.linspace(-6.0, 9.0, 601)
    density = np.array([(p / tau * np.exp(-0.5 * ((x - mu) / tau) ** 2)).sum() for x in a])
    joint = density * np.exp(-5.0 * np.logaddexp(0.0, -a))
    mean, sd = moments(joint / joint.sum(), a)
    # personalize keeps the others' posterior of mu and tau, so draws lean toward it a little
    assert abs(drawn.mean() - mean) < 0.35 * sd
    assert 0.75 < drawn.std() / sd < 1.25
