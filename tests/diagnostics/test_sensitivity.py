"""Power scaling beside closed forms: priors and clients that count more, and clients left out."""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

import hierfl
from hierfl import Fit, diagnostics, plots
from hierfl.diagnostics.sensitivity import ALPHAS, PRIOR, Sensitivity
from hierfl.nodes import in_process
from tests.programs import NOISE, PRIOR_LOC, PRIOR_TRIL, SPREAD_TRIL, federation, fit, slopes
from tests.summaries import programs
from tests.summaries.programs import people
from tests.summaries.test_not_normal import student

COUNTS = (5, 3, 7, 2)


@cache
def fitted() -> Fit:
    return fit(hierfl.methods.two_stage(slopes, draws=8000), federation(COUNTS))


@cache
def found() -> Sensitivity:
    return diagnostics.sensitivity(fitted())


def closed_form(prior: float = 1.0, client: str = "", by: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of g, where the prior or a client counts so many times."""
    data = federation(COUNTS)
    inverse = (PRIOR_TRIL @ PRIOR_TRIL.T).inverse() * prior
    precision, shift = inverse.clone(), inverse @ PRIOR_LOC
    for name in data.names:
        own = data.select([name])
        x, y = own.fields["x"].double(), own.fields["y"].double()
        c = (
            NOISE**2 * torch.eye(len(y), dtype=torch.float64)
            + x @ SPREAD_TRIL @ SPREAD_TRIL.T @ x.T
        )
        times = by if name == client else 1.0
        precision = precision + times * x.T @ c.inverse() @ x
        shift = shift + times * x.T @ c.inverse() @ y
    return precision.inverse() @ shift, precision.inverse()


@pytest.mark.parametrize("part", [PRIOR, "north", "south", "east", "west"])
def test_scaled_means_and_sds_are_those_of_the_closed_form(part: str) -> None:
    mean, cov = closed_form()
    sd = cov.diagonal().sqrt()
    table = found().table.xs(part, level="part")
    for alpha in (*ALPHAS, 1.01):
        moved, new = closed_form(alpha) if part == PRIOR else closed_form(1.0, part, alpha)
        expected = ((moved - mean) / sd).numpy()
        if alpha == 1.01:
            error = table["error"].to_numpy()
            assert (np.abs(table["per_percent"].to_numpy() - expected) < 4 * error + 1e-4).all()
            continue
        np.testing.assert_allclose(table[f"at_{alpha}"], expected, atol=0.03)
        ratio = (new.diagonal().sqrt() / sd).numpy()
        np.testing.assert_allclose(table[f"sd_{alpha}"], ratio, rtol=0.04)
    assert (table["k_hat"] < 0.7).all()


def test_a_client_left_out_is_the_closed_form_where_k_hat_is_low() -> None:
    mean, cov = closed_form()
    told = 0
    for client in fitted().clients:
        table = found().table.xs(client, level="part")
        expected = ((closed_form(client=client, by=0.0)[0] - mean) / cov.diagonal().sqrt()).numpy()
        low = (table["k_hat_out"] < 0.7).to_numpy()
        assert (table["left_out"].notna().to_numpy() == low).all()
        np.testing.assert_allclose(table["left_out"][low], expected[low], atol=0.15)
        told += int(low.all())
    assert told >= 1


@pytest.mark.slow
def test_factors_and_log_ratios_give_what_a_grid_gives() -> None:
    """A likelihood that is not Gaussian: the prior of `binary`, at powers of it."""
    from tests.summaries.programs import binary_rows, grid, moments, posterior_on

    data = people((9, 4, 12, 6, 8, 15))
    table = diagnostics.sensitivity(fit(hierfl.methods.two_stage(programs.binary), data)).table
    mu, tau = grid()
    log_prior = -0.5 * (mu / 1.5) ** 2 - 0.5 * tau**2
    rows = binary_rows(data)
    before = [moments(posterior_on(mu, tau, log_prior, rows)[0], x) for x in (mu, tau)]
    for alpha, (name, x, (mean, sd)) in product(
        ALPHAS, [("mu", mu, before[0]), ("tau", tau, before[1])]
    ):
        moved = moments(posterior_on(mu, tau, alpha * log_prior, rows)[0], x)
        row = table.loc[(name, PRIOR)]
        assert row[f"at_{alpha}"] == pytest.approx((moved[0] - mean) / sd, abs=0.02)
        assert row[f"sd_{alpha}"] == pytest.approx(moved[1] / sd, rel=0.03)


def test_a_fit_over_nodes_says_the_same(tmp_path: Path) -> None:
    method = hierfl.methods.two_stage(slopes, draws=8000)
    over = hierfl.nodes.fit(method, in_process(federation(COUNTS), tmp_path))
    there = diagnostics.sensitivity(over).table
    here = found().table
    np.testing.assert_allclose(there.loc[here.index, "per_percent"], here["per_percent"], atol=1e-3)


@pytest.mark.slow
def test_local_sites_that_are_not_normal_leave_the_prior_alone() -> None:
    made = fit(hierfl.methods.two_stage(student, draws=100), people((3, 2)))
    assert set(diagnostics.sensitivity(made).table.index.unique("part")) == {PRIOR}


def test_the_figure_has_a_cell_for_each_parameter_and_client() -> None:
    ax = plots.sensitivity(Figure().subplots(), found())
    assert [t.get_text() for t in ax.get_xticklabels()] == list(fitted().clients)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["g[0]", "g[1]"]
    cells: Any = ax.images[0].get_array()
    shown = np.ma.filled(cells, np.nan)
    expected = found().table["left_out"].xs("east", level="part")
    np.testing.assert_allclose(shown[:, fitted().clients.index("east")], expected)
    with_prior = plots.sensitivity(Figure().subplots(), found(), what="per_percent")
    assert with_prior.get_xticklabels()[0].get_text() == PRIOR


def test_fits_of_other_methods_are_refused() -> None:
    averaged = fit(hierfl.methods.fedsvi(slopes), federation((5, 3)), rounds=2)
    with pytest.raises(ValueError, match="sensitivity is computed from the clients' factors"):
        diagnostics.sensitivity(averaged)
