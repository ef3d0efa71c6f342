"""Programs under handlers: maps of Normals as Normals, masked values filled, numbers of groups held fixed."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.distributions.transforms as T
import pytest
import torch
from pyro import poutine
from pyro.distributions.transforms import DiscreteCosineTransform, HaarTransform
from torch import Tensor
from torch.distributions import biject_to

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, full_batch, guides, read
from hierfl.data.batch import in_double
from hierfl.program.handlers import log_joint
from hierfl.program.wrapped import plain_of

MOVE = T.AffineTransform(torch.tensor(1.0), torch.tensor(-2.0))
THREE = dist.Normal(torch.zeros(3), 1.0)
MAPS: dict[str, Any] = {
    "moved": dist.TransformedDistribution(THREE.to_event(1), [MOVE]),
    "log": dist.TransformedDistribution(
        THREE, [MOVE, T.AffineTransform(0.5, 3.0), T.ExpTransform()]
    )
    .expand([2, 3])
    .to_event(1),
    "turned": dist.TransformedDistribution(
        dist.Normal(torch.arange(3.0), torch.tensor(2.0)).to_event(1),
        [T.ComposeTransform([]).inv, DiscreteCosineTransform(), HaarTransform()],
    ),
    "expanded": dist.TransformedDistribution(dist.Normal(0.0, 1.0), [MOVE]).expand([4, 1]),
}
OTHERS = (
    dist.LogNormal(0.0, 1.0),
    dist.Normal(0.0, 1.0),
    dist.TransformedDistribution(THREE.to_event(1), [T.OrderedTransform()]),
    dist.TransformedDistribution(
        dist.Normal(0.0, torch.tensor([1.0, 2.0])).to_event(1), [DiscreteCosineTransform()]
    ),
    dist.TransformedDistribution(dist.Dirichlet(torch.ones(3)), [T.OrderedTransform()]),
)
BETA = dist.Beta(2.0, 3.0)
STRETCHED = dist.TransformedDistribution(BETA, [T.AffineTransform(-1.0, 4.0)])
# a map of a distribution, and the least and the largest value
IMAGES: tuple[tuple[Any, float, float], ...] = (
    (STRETCHED, -1.0, 3.0),
    (STRETCHED.expand([2, 3]).to_event(1), -1.0, 3.0),
    (dist.TransformedDistribution(STRETCHED, [T.ExpTransform()]), math.exp(-1.0), math.exp(3.0)),
    (dist.TransformedDistribution(dist.Gamma(1.0, 1.0), [MOVE]), -math.inf, 1.0),
    (
        dist.TransformedDistribution(
            dist.Normal(0.0, 1.0), [T.ExpTransform(), T.AffineTransform(2.0, 1.0)]
        ),
        2.0,
        math.inf,
    ),
    (dist.TransformedDistribution(BETA.expand([3]).to_event(1), [MOVE]), -1.0, 1.0),
    (dist.TransformedDistribution(BETA, [T.SigmoidTransform().inv]), -math.inf, math.inf),
)


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_normals_are_normals(name: str) -> None:
    plain, value = plain_of(MAPS[name]), MAPS[name].sample()
    torch.testing.assert_close(plain.log_prob(value), MAPS[name].log_prob(value))
    assert (plain.batch_shape, plain.event_shape) == (
        MAPS[name].batch_shape,
        MAPS[name].event_shape,
    )


@pytest.mark.parametrize("fn, low, high", IMAGES)
def test_the_support_of_a_map_is_the_image(fn: Any, low: float, high: float) -> None:
    plain, value = plain_of(fn), fn.sample()
    torch.testing.assert_close(plain.log_prob(value), fn.log_prob(value))
    assert plain.shape() == fn.shape()
    away = torch.tensor([-60.0, 60.0])
    ends = torch.stack([biject_to(plain.support)(torch.full(fn.shape(), v)) for v in away])
    expected = torch.tensor([low, high]).clamp(-60.0, 60.0).view(2, *[1] * len(fn.shape()))
    torch.testing.assert_close(ends.sort(0).values.clamp(-60.0, 60.0), expected.expand_as(ends))


def test_other_distributions_stay() -> None:
    assert [plain_of(fn) for fn in OTHERS] == [None] * len(OTHERS)


def data() -> ClientData:
    """Return three clients, of which the second has fewer groups; some numbers are missing."""
    g = torch.Generator().manual_seed(0)
    y = torch.randn(12, generator=g)
    group = torch.tensor([0, 1, 2, 3, 0, 1, 1, 0, 0, 1, 2, 3])
    holed = torch.where(torch.arange(12) % 3 == 1, torch.nan, y.exp())
    seen = holed.isfinite()
    return ClientData.from_arrays(list("aaaabbbbcccc"), y=y, group=group, holed=holed, seen=seen)


def centered(batch: ClientBatch, fn: Callable[[Tensor, Tensor], Any]) -> None:
    """A local site of its own distribution, and Normal rows."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients():
        own = pyro.sample("own", fn(mu, torch.tensor(0.5)))
        with batch.data():
            pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)


def test_a_program_with_a_mapped_site_is_fitted_as_one_with_a_normal() -> None:
    def mapped(loc: Tensor, scale: Tensor) -> Any:
        return dist.TransformedDistribution(
            dist.Normal(torch.zeros(()), 1.0), [T.AffineTransform(loc, scale)]
        )

    here, there = (
        hierfl.fit(partial(centered, fn=fn), data(), seed=0).summary().frame
        for fn in (mapped, dist.Normal)
    )
    torch.testing.assert_close(torch.tensor(here["mean"]), torch.tensor(there["mean"]))


@contextmanager
def in_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SINGLE = torch.tensor([0.5, -0.3], dtype=torch.float32)
ROOT = torch.tensor([[1.0, 0.0], [0.5, 2.0]], dtype=torch.float32)


def typed(batch: ClientBatch, constant: Callable[[], Tensor]) -> None:
    """Products that torch refuses where the constant's type is not that of the rows."""
    prior = dist.MultivariateNormal(constant(), scale_tril=ROOT)
    beta = pyro.sample("beta", prior)
    x = torch.stack([batch.y, batch.y.sin()], -1)
    with batch.clients():
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        with batch.data():
            mean = own + x @ beta + x @ constant()
            pyro.sample("y", dist.Normal(mean, 1.0), obs=batch.y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "constant",
    [
        pytest.param(lambda: SINGLE, id="made before"),
        pytest.param(SINGLE.double, id="double"),
        pytest.param(lambda: torch.tensor([0.5, -0.3]), id="made in the model"),
    ],
)
def test_constants_of_another_type_are_computed_in_that_of_the_rows(
    constant: Callable[[], Tensor], dtype: torch.dtype
) -> None:
    beta, own = torch.tensor([0.2, 0.7]), torch.tensor([[0.1], [0.4], [-0.2]])
    with in_default(dtype):
        rows = data()
        batch, values = full_batch(rows), {"beta": beta.to(dtype), "own": own.to(dtype)}
        model = read(partial(typed, constant=constant), guides.delta, rows).model
        density = log_joint(model, values, batch, {})[0]
        doubled = {name: value.double() for name, value in values.items()}
        precise = log_joint(model, doubled, in_double(batch), {})[0]
    y = torch.where(batch.mask(), batch.y, 0.0).double()
    mean = own + torch.stack([y, y.sin()], -1) @ (beta + SINGLE.double())
    rows_of = torch.where(batch.mask(), dist.Normal(mean, 1.0).log_prob(y), 0.0).sum(-1)
    expected = rows_of + dist.Normal(0.0, 1.0).log_prob(own)[:, 0]
    assert density.dtype == dtype
    torch.testing.assert_close(density.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(precise, expected, rtol=1e-6, atol=1e-6)


def test_constants_of_another_type_are_carried_by_two_stage() -> None:
    with in_default(torch.float32):
        fit = hierfl.fit(partial(typed, constant=lambda: SINGLE), data(), seed=0, progress=False)
    assert str(fit.chosen).startswith("two_stage, since every unknown has a prior")


def masked(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients(), batch.data(), poutine.mask(mask=batch.holed.isfinite()):
        pyro.sample("holed", dist.LogNormal(mu, 1.0), obs=batch.holed)


def imputed(batch: ClientBatch) -> None:
    mu, seen = pyro.sample("mu", dist.Normal(0.0, 1.0)), batch.holed.isfinite()
    with batch.clients(), batch.data():
        pyro.sample("holed", dist.LogNormal(mu, 1.0), obs=batch.holed, obs_mask=seen)


def imputed_by_field(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("holed", dist.LogNormal(mu, 1.0), obs=batch.holed, obs_mask=batch.seen)


@pytest.mark.parametrize("model", [masked, imputed, imputed_by_field])
def test_masked_values_may_be_missing(model: Callable[[ClientBatch], None]) -> None:
    rows = data()
    program, batch = read(model, guides.delta, rows), full_batch(rows)
    assert set(program.labels.values()) == {"holed"}
    mu = torch.tensor(0.3, requires_grad=True)
    density = log_joint(program.model, {"mu": mu}, batch, {})[0].sum()
    seen = batch.holed[batch.holed.isfinite()]
    expected = dist.LogNormal(torch.tensor(0.3), 1.0).log_prob(seen).sum()
    torch.testing.assert_close(density, expected)
    (slope,) = torch.autograd.grad(density, mu)
    torch.testing.assert_close(slope, (seen.log() - 0.3).sum())


def looped(batch: ClientBatch) -> None:
    count = int(batch.group.max()) + 1
    sites = [pyro.sample(f"site_{k}", dist.Normal(0.0, 1.0)) for k in range(count)]
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(torch.stack(sites)[batch.group], 1.0), obs=batch.y)


def sized(batch: ClientBatch) -> None:
    with pyro.plate("groups", len(batch.group.unique())):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(a[batch.group.clamp(max=1)], 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("model", "how"), [(looped, "for some rows only"), (sized, r"as \(4,\) and")]
)
def test_sites_that_some_rows_lack_are_refused_by_name(
    model: Callable[[ClientBatch], None], how: str
) -> None:
    with pytest.raises(ProgramError, match=rf"site '\w+' is sampled {how}.*outside the model"):
        read(model, guides.delta, data())
