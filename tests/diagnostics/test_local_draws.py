"""Draws of clients' own sites are judged given the global ones, and named where they are off."""

from dataclasses import replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData
from hierfl.core.process import double_precision
from hierfl.diagnostics.local_draws import local_draws

CLIENTS, ROWS = 6, 8


def counts(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(mu, tau))
        slope = pyro.sample("slope", dist.Normal(0.0, 0.5))
        with batch.data():
            pyro.sample("y", dist.Poisson((level + slope * batch.x).exp()), obs=batch.y)


def data() -> ClientData:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * ROWS, generator=g)
    y = torch.poisson((0.5 + 0.3 * x).exp(), generator=g)
    return ClientData.from_arrays([f"c{k // ROWS}" for k in range(len(x))], x=x, y=y)


@pytest.fixture(scope="module")
def fitted() -> hierfl.Fit:
    with double_precision():
        return hierfl.fit(hierfl.methods.two_stage(counts), data(), seed=0)


def with_precision(fit: hierfl.Fit, client: str, times: float) -> hierfl.Fit:
    """Return a fit with the factors of one client so many times as sharp, about the same points."""
    at = fit.clients.index(client)
    scale = torch.ones(CLIENTS, dtype=torch.float64)
    scale[at] = times
    factors = {
        name: value * scale.view(-1, *[1] * (value.dim() - 1))
        for name, value in fit.progress.table._asdict().items()
        if name.removeprefix("wide_") in ("precision", "shift") and len(value)
    }
    table = fit.progress.table._replace(**factors)
    return replace(fit, progress=replace(fit.progress, table=table))


def test_draws_by_good_factors_are_right_by_their_weights(fitted: hierfl.Fit) -> None:
    judged = local_draws(fitted, seed=0)
    assert judged is not None and judged.off() == ""
    assert list(judged.k_hats.index) == list(fitted.clients) and (judged.k_hats < 0.7).all()
    assert set(judged.scalars["site"]) == {"level", "slope"}
    assert fitted.summary().trustworthy is True


def test_a_client_with_a_wrong_factor_is_named(fitted: hierfl.Fit) -> None:
    summary = with_precision(fitted, "c2", 50.0).summary()
    assert summary.trustworthy is None
    check = next(c for c in summary.checks if "every client's own parameters" in c.question)
    assert check.verdict == "warning" and check.answer in summary.verdict
    assert "c2" in check.answer and not any(f"c{k}" in check.answer for k in (0, 1, 3, 4, 5))
    assert "'level' of c2" in check.answer


def test_a_client_whose_draws_are_impossible_is_named(fitted: hierfl.Fit) -> None:
    """All candidates lie where the rows have no density, and a weight is no number."""
    table = fitted.progress.table
    shift = table.shift.clone()
    shift[fitted.clients.index("c2")] = 1e12
    away = {"shift": shift} | ({"wide_shift": shift} if len(table.wide_shift) else {})
    progress = replace(fitted.progress, table=table._replace(**away))
    judged = local_draws(replace(fitted, progress=progress), seed=0)
    assert judged is not None
    assert [name for name, k_hat in judged.k_hats.items() if k_hat == torch.inf] == ["c2"]


def test_a_factor_that_is_too_wide_costs_candidates_alone(fitted: hierfl.Fit) -> None:
    judged = local_draws(with_precision(fitted, "c2", 0.5), seed=0)
    assert judged is not None and judged.off() == ""


@pytest.mark.slow
def test_a_number_that_is_not_normal_and_what_it_multiplies_are_drawn_together() -> None:
    """Their product ties them to each other, and both to a global vector, at each draw of it."""

    def judges(batch: ClientBatch) -> None:
        quality = pyro.sample("quality", dist.Normal(torch.zeros(10), 1.0).to_event(1))
        noise = pyro.sample("noise", dist.Exponential(1.0))
        with batch.clients():
            harsh = pyro.sample("harsh", dist.Normal(0.0, 1.0))
            keen = pyro.sample("keen", dist.Exponential(1.0))
            with batch.data():
                loc = (quality[..., batch.wine] - harsh) * keen
                pyro.sample("y", dist.Normal(loc, noise), obs=batch.y)

    g = torch.Generator().manual_seed(0)
    judge, wine = torch.arange(5).repeat_interleave(10), torch.arange(10).repeat(5)
    quality, harsh = 0.5 * torch.randn(10, generator=g), 0.5 * torch.randn(5, generator=g)
    keen = (0.3 * torch.randn(5, generator=g)).exp()
    y = keen[judge] * (quality[wine] - harsh[judge]) + 0.8 * torch.randn(50, generator=g)
    rows = ClientData.from_arrays(judge, wine=wine, y=y)
    with double_precision():
        judged = local_draws(hierfl.fit(judges, rows, seed=0, progress=False), seed=0)
    assert judged is not None and judged.off() == "" and (judged.k_hats < 0.7).all()


def test_without_rows_local_draws_are_not_judged(fitted: hierfl.Fit, tmp_path: Path) -> None:
    fitted.save(tmp_path / "fit")
    method = hierfl.methods.two_stage(counts)
    assert local_draws(hierfl.load(tmp_path / "fit", method=method), seed=0) is None
