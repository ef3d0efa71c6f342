"""Expectations of slopes and curvatures against brute force, and the factors that they make."""

from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev

from hierfl import ClientBatch, ClientData, full_batch
from hierfl.core.importance_sampling import normal_points
from hierfl.core.process import double_precision
from hierfl.data.batch import in_double
from hierfl.summaries.factor import factor_of
from hierfl.summaries.packed_rows import packed
from hierfl.summaries.reading import Line, nodes_of, read_likelihood, seen_line
from hierfl.summaries.units import UnitScore
from tests.summaries import programs
from tests.summaries.programs import (
    factor_of_rows,
    packed_rows,
    people,
    program_of,
    rows_of_client,
)


def test_two_nodes_of_a_predictor_are_exact_where_rows_are_gaussian() -> None:
    line = seen_line(read_likelihood(program_of(programs.noisy)))
    assert len(nodes_of(line).row) == 2
    assert len(nodes_of(seen_line(read_likelihood(program_of(programs.tails)))).row) == 13
    rows, size = packed_rows(line, in_double(rows_of_client(people(), 0))), line.reading.size
    mean, precision = torch.full((1, size), 0.2), torch.eye(size)[None]
    with torch.no_grad(), pyro.validation_enabled(False):
        few, many = (
            rows.expected(mean, precision, nodes_of(replace(line, is_quadratic=exact)))
            for exact in (True, False)
        )
    for one, other in zip(few, many, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=0.0)


def absolute(batch: ClientBatch) -> None:
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Laplace(a, 0.7), obs=batch.y)


def test_absolute_errors_curve_by_their_slopes() -> None:
    """The mean of d^2 -|y - a| / s under Normal(a; m, 1) is -2 / s phi(y - m); autograd has 0."""
    data = people((200,))
    line = seen_line(read_likelihood(program_of(absolute, data)))
    assert line.inside.tolist() == [0]
    batch = in_double(rows_of_client(data, 0))
    with torch.no_grad(), pyro.validation_enabled(False):
        rows = packed_rows(line, batch)
        found = rows.expected(torch.full((1, 1), 0.2), torch.ones(1, 1, 1), nodes_of(line))
    normal = torch.distributions.Normal(batch.fields["y"].double(), 1.0)
    expected = (2.0 / 0.7 * normal.log_prob(torch.tensor(0.2)).exp()).sum()
    assert abs(float(found.curvature[0, 0, 0] / expected) - 1.0) < 0.1


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("binary", 2e-3),
        ("counts", 2e-2),
        ("noisy", 2e-2),
        ("tails", 4e-2),
        ("dispersed", 2e-2),
        ("gumbel", 4e-2),
        ("slopes_lkj", 2e-3),
        ("curved", 0.25),  # 0.21; second derivatives at 64 points are 0.17 off
    ],
)
def test_expectations_equal_brute_force(name: str, within: float) -> None:
    """Slope and curvature are those averaged over 1,024 points of the same Normal distribution."""
    line = seen_line(read_likelihood(program_of(getattr(programs, name))))
    batch, size = in_double(rows_of_client(people(), 0)), line.reading.size
    mean = 0.2 * torch.cos(torch.arange(float(size)))
    spread = 0.15 * torch.eye(size) + 0.05 * torch.ones(size, size)
    with torch.no_grad(), pyro.validation_enabled(False):
        rows = packed_rows(line, batch)
        found = rows.expected(mean[None], spread.inverse()[None], nodes_of(line))
    points = mean + normal_points(1024, size) @ torch.linalg.cholesky(spread).mT

    def log_p(v: Tensor) -> Tensor:
        return line.reading.log_likelihood(v, batch)

    slope = torch.vmap(grad(log_p), chunk_size=512)(points).mean(0)
    curvature = -torch.vmap(jacrev(grad(log_p)), chunk_size=512)(points).mean(0)
    scale = curvature.abs().max()
    assert (found.slope[0] - slope).abs().max() <= within * (slope.abs().max() + scale)
    assert (found.curvature[0] - curvature).abs().max() <= within * scale
    value = torch.vmap(log_p, chunk_size=512)(points).mean().detach()
    assert float(found.value[0]) == pytest.approx(float(value), rel=within)


def squares(batch: ClientBatch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(9), 1.0).to_event(1))
        with batch.data():
            pyro.factor("y", -0.5 * (batch.y - w * torch.arange(1.0, 10.0)).sum(-1) ** 2)


def test_slopes_at_frames_give_the_curvature_of_a_quadratic_exactly() -> None:
    data = ClientData.from_arrays([0, 0, 1], names=["a", "b"], y=torch.randn(3, 1))
    line = seen_line(read_likelihood(program_of(squares, data)))
    batch, k = in_double(rows_of_client(data, 0)), torch.arange(1.0, 10.0)
    half = torch.randn(9, 9)
    with torch.no_grad(), pyro.validation_enabled(False):
        rows, nodes = packed_rows(line, batch), nodes_of(line)
        found = rows.expected(torch.randn(1, 9), (half @ half.mT + torch.eye(9))[None], nodes)
    assert nodes.by_slopes
    assert torch.allclose(found.curvature[0], 2.0 * k[:, None] * k, atol=1e-8)


# ------------------------------------------------------------------------------------ factors
def straight(batch: ClientBatch) -> None:
    """Gaussian rows with two coefficients."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, 1.0).expand([2]).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 0.7), obs=batch.y)


@pytest.mark.parametrize("client", [2, 3])  # of 7 rows, and of 1: a singular Lambda
def test_the_factor_of_gaussian_rows_is_exact(client: int) -> None:
    """Lambda = X'X / s2 and eta = X'y / s2, whatever the server believes."""
    line = seen_line(read_likelihood(program_of(straight)))
    batch = rows_of_client(people(), client)
    x, y = batch.x[0], batch.y[0]
    for far in (0.0, 3.0):
        loc, covariance = torch.full((2,), far), torch.tensor([[2.0, 0.5], [0.5, 1.0]])
        with torch.no_grad():
            found = factor_of_rows(packed_rows(line, batch), loc, covariance)
        assert torch.allclose(found.precision[0], x.mT @ x / 0.49, atol=1e-9)
        assert torch.allclose(found.shift[0], x.mT @ y / 0.49, atol=1e-8)
        assert int(found.raised) == 0


def factor(line: Line, data: ClientData, k: int, loc: float = 0.0) -> Any:
    size = line.reading.size
    with torch.no_grad(), pyro.validation_enabled(False):
        rows = packed_rows(line, rows_of_client(data, k))
        return factor_of_rows(rows, torch.full((size,), loc), 4.0 * torch.eye(size))


def test_separable_rows_and_rows_without_any_positive_stay_finite() -> None:
    x = torch.randn(6, 2)
    data = ClientData.from_clients(
        {
            "none": {"x": torch.randn(6, 2), "ill": torch.zeros(6)},
            "apart": {"x": x, "ill": (x[:, 0] > 0).to(x.dtype)},
        }
    )
    line = seen_line(read_likelihood(program_of(programs.slopes_lkj, data)))
    for k, loc in ((0, 8.0), (0, -8.0), (1, 0.0), (1, 8.0)):
        found = factor(line, data, k, loc)
        assert found.precision.isfinite().all() and found.shift.isfinite().all(), (k, loc)
        values = torch.linalg.eigvalsh(found.precision)
        assert values.min() >= -1e-9 and values.max() < 6.0 * x.square().sum(1).max(), (k, loc)


def far_apart(batch: ClientBatch) -> None:
    """Cauchy-like rows: not log-concave."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample("y", dist.StudentT(1.0, a, 0.05), obs=batch.y)


def test_raised_counts_the_directions_that_are_not_log_concave() -> None:
    """Between two far groups of Cauchy rows the curvature is negative: it becomes 0 and is counted."""
    y = torch.tensor([-4.0, 4.0])
    data = ClientData.from_clients({"a": {"y": y}, "b": {"y": y}})
    line = seen_line(read_likelihood(program_of(far_apart, data)))
    with torch.no_grad(), pyro.validation_enabled(False):
        rows = packed_rows(line, rows_of_client(data, 0))
        found = factor_of_rows(rows, torch.zeros(1), torch.full((1, 1), 1e-2))
    assert int(found.raised) == 1
    assert torch.equal(found.precision, torch.zeros(1, 1, 1))
    line = seen_line(read_likelihood(program_of(programs.binary)))
    assert int(factor(line, people(), 0).raised) == 0


def test_clients_together_are_clients_alone() -> None:
    """Expectations, values and factors do not depend on the clients beside, padded or packed."""
    data = people()
    line = seen_line(read_likelihood(program_of(programs.tails)))
    size, count = line.reading.size, data.num_clients
    loc, covariance = 0.2 * torch.cos(torch.arange(float(size))), 2.0 * torch.eye(size)
    with double_precision(), torch.no_grad(), pyro.validation_enabled(False):
        loc, covariance = loc.double(), covariance.double()
        score = UnitScore(line)
        together = packed(score, full_batch(data))
        found = factor_of_rows(together, loc, covariance)
        at = torch.randn(count, 6, size)
        values = together.values(at)
        for k in range(count):
            alone = packed(score, rows_of_client(data, k))
            one = factor_of_rows(alone, loc, covariance)
            assert torch.allclose(one.precision[0], found.precision[k], rtol=1e-9)
            assert torch.allclose(one.shift[0], found.shift[k], rtol=1e-9)
            assert torch.allclose(alone.values(at[k : k + 1])[0], values[k], rtol=1e-12)
            some = together.some(torch.tensor([k])).values(at[k : k + 1])[0]
            assert torch.allclose(some, values[k], rtol=1e-12)


def test_a_factor_that_is_known_is_the_start_of_the_next() -> None:
    """From the factor before, the next one under the same belief is the same."""
    data, line = people(), seen_line(read_likelihood(program_of(programs.binary)))
    loc, covariance = torch.zeros(line.reading.size), 2.0 * torch.eye(line.reading.size)
    with double_precision(), torch.no_grad(), pyro.validation_enabled(False):
        rows, belief = (
            packed(UnitScore(line), full_batch(data)),
            (loc.double(), covariance.double()),
        )
        nodes, known = nodes_of(line), torch.ones(data.num_clients) > 0.0
        first = factor_of_rows(rows, *belief)
        second = factor_of(rows, belief, nodes, first, known)
        third = factor_of(rows, belief, nodes, second, known)
        assert torch.allclose(second.precision, first.precision, rtol=0.05, atol=0.02)
        assert torch.allclose(third.precision, second.precision, rtol=1e-3, atol=1e-3)


def inflated(batch: ClientBatch, impossible: float) -> None:
    """Declare zeros of two kinds, by a branch whose second derivatives are NaN where it is impossible."""
    zero, p = (pyro.sample(name, dist.Beta(1.0, 1.0)) for name in ("zero", "p"))
    none = batch.y <= 0.0
    counted = torch.log1p(-zero) + dist.Bernoulli(p).log_prob((~none).to(p))
    of_kind = torch.log(zero) + torch.where(none, 0.0, impossible)
    with batch.clients(), batch.data():
        pyro.factor("y", torch.where(none, torch.logaddexp(of_kind, counted), counted))


def test_second_derivatives_that_autograd_lacks_are_differences_of_slopes() -> None:
    curvatures = []
    for impossible in (-50.0, -torch.inf):
        line = seen_line(read_likelihood(program_of(partial(inflated, impossible=impossible))))
        batch, size = in_double(rows_of_client(people(), 0)), line.reading.size
        with torch.no_grad(), pyro.validation_enabled(False), double_precision():
            rows = packed_rows(line, batch)
            at = rows.at_mean(torch.full((1, size), 0.3), torch.eye(size)[None])
        curvatures.append(at.curvature)
    assert curvatures[0].abs().max() > 0.1
    torch.testing.assert_close(*curvatures, rtol=1e-6, atol=1e-6)
