"""Noise scales of clients' own: sums are the rows, one round suffices, and local draws are exact."""

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, Fit, full_batch, methods
from hierfl.core.process import double_precision
from hierfl.laplace.mode import client_density
from hierfl.laplace.trials import first_row
from hierfl.methods import two_stage
from hierfl.methods.stages.two_stage import seen_in
from hierfl.program.handlers import unchecked
from hierfl.summaries.exact import SummedRows, sums_of
from hierfl.summaries.own_scale import drawn
from hierfl.summaries.packed_rows import packed
from hierfl.summaries.reading import nodes_of
from tests.programs import fit
from tests.sampled import sampled
from tests.summaries.programs import people, program_of

COUNTS = (9, 3, 7, 5, 2, 6)


def alone(batch: ClientBatch) -> None:
    """A level and a noise scale of each client."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        sigma = pyro.sample("sigma", dist.LogNormal(-0.5, spread))
        with batch.data():
            pyro.sample("y", dist.Normal(a, sigma), obs=batch.y)


def together(batch: ClientBatch) -> None:
    """Slopes and a log scale that are correlated, and a global scale and slope beside them."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    common = pyro.sample("common", dist.Normal(0.0, 0.5))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    tril = torch.tensor([[0.8, 0.0, 0.0], [0.3, 0.5, 0.0], [-0.2, 0.2, 0.4]])
    with batch.clients():
        w = pyro.sample("w", dist.MultivariateNormal(mu, scale_tril=tril))
        with batch.data():
            eta = w[..., 0] + slope * batch.x[..., 0] + w[..., 2] * batch.x[..., 1]
            pyro.sample("y", dist.Normal(eta, (w[..., 1] + common).exp()), obs=batch.y)


def lone(batch: ClientBatch) -> None:
    """A noise scale of each client's own, and nothing else."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(mu, sigma), obs=batch.y)


def half(batch: ClientBatch) -> None:
    """A noise scale that is not Normal on the log scale."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a, sigma), obs=batch.y)


def tailed(batch: ClientBatch) -> None:
    """Levels that are not Normal, above a global noise scale."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.StudentT(3.0, mu, 0.8))
        with batch.data():
            pyro.sample("y", dist.Normal(a, sigma), obs=batch.y)


ALL = (alone, together, lone, half, tailed)


def fitted(model: Any, data: ClientData, **options: Any) -> Fit:
    return fit(two_stage(model, draws=2000), data, **options)


@pytest.mark.slow("tailed", "together", "half")
@pytest.mark.parametrize("model", ALL, ids=lambda model: str(model.__name__))
def test_sums_are_rows_of_the_same_likelihood(model: Any) -> None:
    """Its values up to a constant of each client, and the expectations of its derivatives."""
    seen = seen_in(program_of(model))
    assert seen.spread is not None and seen.hierarchy.spread is None
    with double_precision(), torch.no_grad(), unchecked():
        rows = packed(seen.score, full_batch(people(COUNTS), torch.arange(6)))
        summed = SummedRows(seen.score, seen.spread, sums_of(rows, seen.spread))
        size = len(seen.score.start)
        v = seen.score.start + 0.5 * torch.randn(6, 5, size)
        off = rows.values(v) - summed.values(v)
        assert (off - off[:, :1]).abs().max() < 1e-7 * rows.values(v).abs().max()
        some = torch.tensor([4, 1])
        assert torch.allclose(summed.some(some).values(v[some]), summed.values(v)[some])
        nodes, precision = nodes_of(seen.score.line), 9.0 * torch.eye(size).expand(6, -1, -1)
        one, other = (of.expected(v[:, 0], precision, nodes) for of in (rows, summed))
    assert torch.allclose(one.slope, other.slope, rtol=1e-6, atol=1e-6)
    assert torch.allclose(one.curvature, other.curvature, rtol=1e-6, atol=1e-6)


def nearly_equal_columns() -> ClientData:
    """Rows whose second column is the first one but for a trifle."""
    data = people(COUNTS)
    x = data.fields["x"].double()
    x = torch.stack([100.0 * x[:, 0], 100.0 * x[:, 0] + 2e-3 * x[:, 1]], 1)
    fields = {**data.fields, "x": x, "y": 30.0 * data.fields["y"].double()}
    return ClientData(fields, data.offsets, data.names, data.client_fields)


def test_directions_that_sums_do_not_solve_for_keep_their_slopes() -> None:
    seen = seen_in(program_of(together))
    assert seen.spread is not None
    with double_precision(), torch.no_grad(), unchecked():
        rows = packed(seen.score, full_batch(nearly_equal_columns(), torch.arange(6)))
        sums = sums_of(rows, seen.spread)
        summed = SummedRows(seen.score, seen.spread, sums)
        v = seen.score.start + 0.5 * torch.randn(6, 5, len(seen.score.start))
        off = rows.values(v) - summed.values(v)
    assert not bool(sums.wrong.any())
    assert (off - off[:, :1]).abs().max() < 1e-7 * rows.values(v).abs().max()


@pytest.mark.parametrize(
    "rows", [people(COUNTS), nearly_equal_columns()], ids=["rows", "collinear"]
)
@pytest.mark.parametrize("model", [alone, together, lone], ids=lambda model: str(model.__name__))
def test_local_draws_have_the_density_that_they_say(model: Any, rows: ClientData) -> None:
    """Log joint minus log density is log p(y | z), the same for all draws of a client."""
    program, data = program_of(model), rows
    seen, batch = seen_in(program), full_batch(data, torch.arange(6))
    assert seen.spread is not None
    g = torch.Generator().manual_seed(3)
    with double_precision(), torch.no_grad(), unchecked():
        sums = sums_of(packed(seen.score, batch), seen.spread)._asdict()
        z = 0.3 + 0.3 * torch.randn(len(seen.hierarchy.reading.origin), generator=g)
        block = program.latents.local_block
        e = torch.randn(400, 6, block.size, generator=g).double()
        own = partial(drawn, seen.hierarchy, seen.spread, z, sums, first_row(batch))
        w, log_q = torch.vmap(own)(e)
        values = program.latents.global_block.unflatten(z)[0]
        density = client_density(program.model, block, values, batch)
        joint = torch.stack([density(v[:, None]) for v in w])
    left = joint - log_q
    # the grid's density is linear between its points
    assert (left - left.median(0).values).abs().quantile(0.95) < 0.03
    assert left.exp().std(0).div(left.exp().mean(0)).max() < 0.05


def test_the_posterior_is_that_of_a_grid() -> None:
    """Of a client's level and scale too: levels integrate out, and scales on a grid."""
    data = people(COUNTS)
    drawn = fitted(alone, data).draws(4000)
    mu, spread, e = (
        torch.linspace(low, high, count).double()
        for low, high, count in ((-2.5, 3.0, 56), (0.005, 3.5, 100), (-6.0, 6.0, 121))
    )
    t = -0.5 + spread[:, None] * e  # log sigma of a client
    whole = -0.5 * (mu[:, None] / 2.0) ** 2 - 0.5 * spread**2
    each = []
    for k in range(6):
        y = data.select([k]).fields["y"].double()
        n, rest = len(y), (y - y.mean()).square().sum()
        wide = (2 * t).exp() + n * 0.64
        log_y = -(n - 1) * t - 0.5 * wide.log() - 0.5 * rest * (-2 * t).exp()
        log_y = log_y - 0.5 * n * (y.mean() - mu[:, None, None]) ** 2 / wide
        each.append(log_y - 0.5 * e.square())
        whole = whole + each[-1].logsumexp(-1)
    p = (whole - whole.max()).exp()
    p = p / p.sum()
    shares = [p[..., None] * one.softmax(-1) for one in each]
    wanted = {"mu": (mu, p.sum(1)), "spread": (spread, p.sum(0))}
    for name, (x, share) in wanted.items():
        mean, found = (share * x).sum(), drawn.shared[name].double().flatten()
        sd = (share * (x - mean) ** 2).sum().sqrt()
        assert abs(found.mean() - mean) < 0.08 * sd, name
        assert abs(found.std() / sd - 1.0) < 0.06, name
    for k, share in enumerate(shares):
        mean, found = (share * t).sum(), drawn.own["sigma"].double()[:, k].log().flatten()
        sd = (share * (t - mean) ** 2).sum().sqrt()
        assert abs(found.mean() - mean) < 0.08 * sd, k
        assert abs(found.std() / sd - 1.0) < 0.06, k


def test_single_precision_draws_no_scale_along_columns_that_depend_on_each_other() -> None:
    """A slope of a client's own number is no direction beside its level: sds of rows are found."""

    def levels(batch: ClientBatch) -> None:
        slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, 0.8))
            sigma = pyro.sample("sigma", dist.LogNormal(-0.5, 0.7))
            with batch.data():
                eta = a + slope[0] * batch.u + slope[1] * batch.x
                pyro.sample("y", dist.Normal(eta, sigma), obs=batch.y)

    torch.set_default_dtype(torch.float32)  # as users have it
    client = torch.arange(8).repeat_interleave(12)
    u, x, e = torch.randn(8)[client], torch.randn(96), torch.randn(8, 12)
    e = (e - e.mean(1, keepdim=True)) / e.std(1, keepdim=True)
    data = ClientData.from_arrays(client, u=u, x=x, y=1.0 + u + 0.5 * x + 0.6 * e.flatten())
    sigma = fitted(levels, data).draws(500).own["sigma"]
    assert (sigma.mean(0) - 0.6).abs().max() < 0.15


@pytest.mark.slow("tailed", "lone")
@pytest.mark.parametrize("model", sampled(ALL, 2), ids=lambda model: str(model.__name__))
def test_it_takes_one_round_of_sums(model: Any) -> None:
    data = people((5, 3, 7, 4))
    found = hierfl.fit(model, data, seed=0)
    assert len(found.history) == 1
    assert found.history["k_hat"].iloc[0] < 0.7
    size = len(seen_in(program_of(model)).score.start)
    assert found.history["bytes_up"].iloc[0] == 8 * 4 * (size * size + size + 2 + 4)
    assert "is Gaussian in" in str(found.chosen)


@pytest.mark.slow
def test_order_of_clients_and_partial_cohorts_do_not_matter() -> None:
    data = people(COUNTS)
    whole, by_two = fitted(alone, data), fitted(alone, data, cohort=2, seed=3)
    turned = fitted(alone, data.select([4, 2, 0, 5, 1, 3]))
    one, two, three = (f.draws(2000).shared["mu"] for f in (whole, by_two, turned))
    assert torch.allclose(one, three, atol=1e-5)
    assert abs(one.mean() - two.mean()) < 0.08 * one.std()


@pytest.mark.slow
def test_a_client_leaves_and_joins_by_its_sums_alone() -> None:
    data = people(COUNTS)
    everybody = fitted(alone, data)
    others = everybody.without("c2")
    assert "c2" not in others.federation.data.names
    scratch = fitted(alone, data.select([0, 1, 3, 4, 5]))
    back = scratch.updated(data.select([2]))
    for found, wanted in ((others, scratch), (back, everybody)):
        one, other = (f.draws(2000) for f in (found, wanted))
        for name, value in one.shared.items():
            like = other.shared[name]
            assert abs(value.mean() - like.mean()) < 0.1 * like.std(), name
            assert abs(value.std() / like.std() - 1.0) < 0.08, name
    assert back.history["clients"].iloc[-1] == 1


def test_a_client_that_is_asked_for_log_ratios_refuses() -> None:
    """Its sums say all that a server may know of it."""
    program = program_of(alone)
    method = two_stage(alone, draws=2000)
    client, server = method.client(program), method.server(program)
    clock = hierfl.method.Clock(0, 1)
    first = server.down(server.state, clock)
    draws = torch.zeros(10, len(seen_in(program).hierarchy.reading.origin), dtype=torch.float64)
    assert client.refuses is not None
    assert client.refuses(first, first) is None
    assert "its names are" in str(client.refuses({**first, "draws": draws}, first))
    assert methods.two_stage is two_stage


def one_row_each(batch: ClientBatch) -> None:
    """A scale of each client's own that a single row has to tell."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    with batch.clients():
        s = pyro.sample("s", dist.LogNormal(m, 0.7))
        with batch.data():
            pyro.sample("y", dist.Normal(mu, s), obs=batch.y)


def by_quadrature(y: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return means and sds of mu, m and each client's log s, by sums over grids."""
    mu, m = torch.linspace(-2.0, 6.0, 161), torch.linspace(-3.5, 3.5, 81)
    log_s = torch.linspace(-6.5, 6.5, 201)
    of_row = dist.Normal(mu[:, None, None], log_s.exp()).log_prob(y[:, None])  # (mu, N, s)
    prior = dist.Normal(m[:, None], 0.7).log_prob(log_s)
    terms = of_row[:, None] + prior[None, :, None]  # (mu, m, N, s)
    each = terms.logsumexp(-1)
    log_p = each.sum(-1) + dist.Normal(0.0, 10.0).log_prob(mu)[:, None]
    share = (log_p + dist.Normal(0.0, 1.0).log_prob(m)).flatten().softmax(0).view(len(mu), len(m))
    of_s = torch.einsum("ab,abns->ns", share, (terms - each[..., None]).exp())
    moments = {}
    for name, grid, weights in (
        ("mu", mu, share.sum(1)),
        ("m", m, share.sum(0)),
        ("s", log_s, of_s),
    ):
        mean = weights @ grid
        moments[name] = mean, (weights @ grid.square() - mean.square()).sqrt()
    return moments


@pytest.mark.filterwarnings("ignore:k-hat is")
@pytest.mark.parametrize("clients", sampled([8, 20], []))
def test_a_scale_by_one_row_each_is_that_of_quadrature_or_not_trusted(clients: int) -> None:
    g = torch.Generator().manual_seed(3)
    with double_precision():
        y = torch.randn(clients, generator=g)
        y = 2.0 + y * torch.exp(0.5 * torch.randn(clients, generator=g))
        data = ClientData.from_arrays([f"c{k:02d}" for k in range(clients)], y=y)
        fitted = hierfl.fit(one_row_each, data, seed=0)
        judged = fitted.summary()
        if judged.trustworthy is False:
            assert (
                clients == 8 and "k-hat is 0." in judged.verdict and "the sd of '" in judged.verdict
            )
            return
        posterior = fitted.posterior(draws=4000, seed=0)["posterior"]
        draws = {name: torch.from_numpy(posterior[name].to_numpy())[0] for name in ("mu", "m", "s")}
        draws["s"] = draws["s"].log()
        for name, (mean, sd) in by_quadrature(y).items():
            assert ((draws[name].mean(0) - mean).abs() < 0.1 * sd).all(), name
            assert ((draws[name].std(0) / sd - 1.0).abs() < 0.1).all(), name
