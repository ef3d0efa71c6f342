"""Polynomials in the place of rows: their values, expectations and derivatives, and where they serve."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev

import hierfl
from hierfl import ClientBatch, ClientData, full_batch
from hierfl.core.process import double_precision
from hierfl.methods import two_stage
from hierfl.methods.stages import expanded
from hierfl.methods.stages.state import TwoStageClientState
from hierfl.summaries import expansion
from hierfl.summaries.expansion import quartic_of
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.quartic import Quartic, monomials
from hierfl.summaries.reading import read_likelihood, seen_line
from tests.programs import fit
from tests.summaries import programs
from tests.summaries.programs import packed_rows, people, program_of


def slopes(batch: ClientBatch) -> None:
    """A logistic regression with an intercept of each client."""
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, tau))
        with batch.data():
            logits = a + (batch.x * b[..., None, None, :]).sum(-1)
            pyro.sample("ill", dist.Bernoulli(logits=logits), obs=batch.ill)


def shaped(batch: ClientBatch) -> None:
    """Waiting times whose shape is global: it is no linear predictor's."""
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            rate = shape * (-(a + b * batch.x[..., 0])).exp()
            pyro.sample("time", dist.Gamma(shape, rate), obs=batch.time)


PROGRAMS: dict[str, Any] = {
    "slopes": slopes,
    "shaped": shaped,
    "counts": programs.counts,
    "dispersed": programs.dispersed,
    "tails": programs.tails,
}


def rows_and_center(name: str) -> tuple[PackedRows, Tensor]:
    """Return the rows of two clients, some of them equal, and centers."""
    data = people((60, 40))
    line = seen_line(read_likelihood(program_of(PROGRAMS[name], data)))
    rows = packed_rows(line, full_batch(data))
    units = replace(rows.units, times=torch.arange(100) % 3 + 1.0)
    g = torch.Generator().manual_seed(1)
    size = line.reading.size
    return PackedRows(rows.score, units), 0.3 * torch.randn(2, size, generator=g)


@pytest.mark.slow("counts", "tails")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_polynomial_misses_the_fifth_order(name: str) -> None:
    with double_precision(), torch.no_grad():
        rows, center = rows_and_center(name)
        away = torch.randn(2, 6, center.shape[1], generator=torch.Generator().manual_seed(2))
        by = quartic_of(rows, center)
        errors = [
            (rows.values(at := center[:, None] + size * away) - by.values(at)).abs().amax()
            for size in (0.1, 0.05)
        ]
    assert errors[0] < 0.05
    assert errors[1] < errors[0] / 20.0 + 1e-9, "half as far: 1/32 of the error"


def test_expectations_of_a_polynomial_are_those_of_its_values() -> None:
    g = torch.Generator().manual_seed(0)
    with double_precision():
        count = len(monomials(2).tuples)
        by = Quartic(torch.randn(3, 2, generator=g), torch.randn(3, count, generator=g))
        mean, root = by.center + 0.3, torch.tensor([[0.5, 0.0], [0.2, 0.3]])
        precision = torch.linalg.inv(root @ root.mT).expand(3, 2, 2)
        grid = torch.tensor(np.polynomial.hermite_e.hermegauss(5)[0])
        weight = torch.tensor(np.polynomial.hermite_e.hermegauss(5)[1])
        points, weights = torch.cartesian_prod(grid, grid), torch.outer(weight, weight).flatten()
        at = mean[:, None] + points @ root.mT
        found = by.expected(mean, precision)
        assert torch.allclose(found.value, by.values(at) @ weights / weights.sum())
        one = by.some(torch.tensor([1]))

        def value(mean: Tensor) -> Tensor:
            return one.expected(mean[None], precision[:1]).value[0]

        assert torch.allclose(found.slope[1], grad(value)(mean[1]))
        assert torch.allclose(found.curvature[1], -jacrev(grad(value))(mean[1]))
        there = one.at_mean(mean[1:2], precision[:1])
        assert torch.allclose(there.value[0], one.values(mean[1:2, None])[0, 0])


# ------------------------------------------------------------------------------------ in a fit
def hospitals(sizes: tuple[int, ...], seed: int = 0) -> ClientData:
    """Clients of so many rows."""
    g = torch.Generator().manual_seed(seed)
    which = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = torch.randn(len(which), 2, generator=g)
    level = 0.6 * torch.randn(len(sizes), generator=g)
    p = (level[which] + x @ torch.tensor([0.5, -0.3])).sigmoid()
    ill = (torch.rand(len(which), generator=g) < p).to(x.dtype)
    return ClientData.from_arrays(which, x=x, ill=ill)


SIZES = (900, 30, 600, 5)


def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every client go by its rows."""
    monkeypatch.setattr(expanded, "LEAST_ROWS", 10**9)


def moments(found: hierfl.Fit) -> Tensor:
    """Return means and sds of all sites, (2, numbers)."""
    draws = found.draws(4000)
    flat = [v.reshape(len(v), -1) for v in (*draws.shared.values(), *draws.own.values())]
    whole = torch.cat(flat, 1)
    return torch.stack([whole.mean(0), whole.std(0)])


@pytest.mark.slow
def test_the_posterior_is_that_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = hospitals(SIZES)
    found = fit(two_stage(slopes), data)
    assert found.progress.table.fits.tolist() == [1.0, 0.0, 1.0, 0.0]
    by_rows(monkeypatch)
    other = fit(two_stage(slopes), data)
    (mean, sd), (mean_by_rows, sd_by_rows) = moments(found), moments(other)
    assert ((mean - mean_by_rows) / sd_by_rows).abs().max() < 0.08
    assert (sd / sd_by_rows - 1.0).abs().max() < 0.08


def test_a_polynomial_that_misses_rows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    data = hospitals(SIZES)
    monkeypatch.setattr(expansion, "ERROR", 1e-9)
    found = fit(two_stage(slopes, draws=500), data)
    assert not bool(found.progress.table.fits.any())
    assert float(found.history["k_hat"].iloc[-1]) < 0.7


@pytest.mark.slow
def test_rows_far_out_are_read() -> None:
    """Few derivatives do not describe rows whose predictors move by far more than 1."""
    data = hospitals((1500, 50))
    x, ill = data.fields["x"].clone(), data.fields["ill"].clone()
    x[:40] *= 300.0
    ill[:40] = (torch.arange(40) % 2).to(ill.dtype)
    found = fit(two_stage(slopes), data.with_fields(x=x, ill=ill))
    assert found.progress.table.fits.tolist() == [0.0, 0.0]


def test_a_fit_goes_through_all_rows_at_most_20_times_however_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes, rng = [0.0], np.random.default_rng(0)
    x, hospital = rng.standard_normal((20_000, 3)), rng.integers(10, size=20_000)
    p = 1.0 / (1.0 + np.exp(-(x @ [0.5, -0.3, 0.2] + 0.5 * rng.standard_normal(10)[hospital])))
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    frame = frame.assign(y=(rng.random(len(frame)) < p).astype(float), hospital=hospital)

    def counted(name: str, points: Any) -> None:
        inner = getattr(PackedRows, name)

        def call(self: PackedRows, *args: Any, **how: Any) -> Any:
            passes[0] += len(self.client) * points(*args)
            return inner(self, *args, **how)

        monkeypatch.setattr(PackedRows, name, call)

    counted("values", lambda at: at.shape[1])
    counted("expected", lambda mean, precision, nodes: len(nodes.rest) * len(nodes.row))

    def derived(rows: PackedRows, center: Tensor) -> Quartic:
        passes[0] += len(rows.client)
        return quartic_of(rows, center)

    monkeypatch.setattr(expansion, "quartic_of", derived)
    model = hierfl.formula("y ~ a + b + c + (1 | hospital)", "bernoulli", clients="hospital")
    of_sizes = []
    for count in (10_000, 20_000):
        passes[0] = 0.0
        fitted = hierfl.fit(model, frame[:count], seed=0, progress=False)
        assert len(fitted.history) >= 3
        of_sizes.append(passes[0] / count)
    assert 5.0 < of_sizes[1] <= 18.0, "and two more compare the program with what was read of it"
    assert of_sizes[1] <= of_sizes[0]
    before = passes[0]
    fitted.summary()
    assert passes[0] == before


def test_draws_read_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit(two_stage(slopes), hospitals((1000, 1500)))
    client = found.federation.client
    assert client.rowless is TwoStageClientState.without_rows
    whole = replace(
        found, federation=replace(found.federation, client=replace(client, rowless=None))
    )
    by = whole.draws(2000).own["a"]

    def unread(*_: Any) -> Any:
        def density(vector: Tensor) -> Tensor:
            raise AssertionError("rows are read")

        return density

    monkeypatch.setattr("hierfl.guides.from_factor.client_density", unread)
    own = found.draws(2000).own["a"]
    assert ((own.mean(0) - by.mean(0)) / by.std(0)).abs().max() < 0.02
    assert (own.std(0) / by.std(0) - 1.0).abs().max() < 0.02
    with pytest.raises(Exception, match="rows are read"):
        whole.draws(2)
