"""Joint likelihoods of a client's rows, against a plain loop over clients, each with its own
rows unpadded.
"""

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, full_batch, guides, methods
from hierfl.engine.chunks import one_slot, over_clients, slots_of
from hierfl.program.handlers import log_joint
from hierfl.program.sites import Model
from tests.programs import fit, read

COUNTS = (40, 4, 4, 4)  # those of issue 22
SPREAD = 1.868  # of a client's mean; its sd after 4 rows is 0.483, after 40 rows 0.158
WEIGHTS = torch.tensor([0.4, 0.6], dtype=torch.float64)


@pytest.fixture
def data() -> ClientData:
    g = torch.Generator().manual_seed(0)
    return ClientData.from_clients(
        {
            f"c{k}": {"x": torch.randn(n, generator=g), "y": 1.0 + torch.randn(n, generator=g)}
            for k, n in enumerate(COUNTS)
        }
    )


# ------------------------------------------------------------------ models, and the same in plain
# torch
def kernel(x: Tensor, length: Tensor) -> Tensor:
    distance = (x[..., :, None] - x[..., None, :]) / length[..., None, None]
    return (-0.5 * distance**2).exp() + 0.1 * torch.eye(x.shape[-1])


def gaussian_process(batch: ClientBatch) -> None:
    with batch.clients():
        length = pyro.sample("w", dist.Normal(0.0, 1.0)).exp()
        covariance = kernel(batch.packed(batch.x), length)
        normal = batch.joint_normal(torch.zeros(()), covariance)
        pyro.sample("y", normal, obs=batch.packed(batch.y))


def process_of_one(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    covariance = kernel(x, w.exp())
    away: Tensor = y @ covariance.inverse() @ y
    return -0.5 * (away + covariance.logdet() + len(y) * math.log(2.0 * math.pi))


def autoregression(batch: ClientBatch) -> None:
    with batch.clients():
        phi = pyro.sample("w", dist.Normal(0.0, 1.0))
        before = torch.cat([torch.zeros_like(batch.y[:, :1]), batch.y[:, :-1]], 1)
        with batch.data():
            pyro.sample("y", dist.Normal(phi * before, 0.3), obs=batch.y)


def autoregression_of_one(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    total, before = torch.zeros(()), torch.zeros(())
    for value in y:
        total = total + normal_density(value, w * before, 0.3)
        before = value
    return total


def mixture(batch: ClientBatch) -> None:
    """All rows of a client come from one of two components: summed out by client, not by row."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        loc = torch.stack([w, 1.0 - w], -1)[..., None].expand(*w.shape, 2, batch.num_rows)
        inside = batch.packed(batch.packed(batch.mask()))
        components = dist.Normal(loc, 1.0).mask(inside).to_event(1)
        which = dist.Categorical(WEIGHTS.expand(*w.shape, 2))
        pyro.sample("y", dist.MixtureSameFamily(which, components), obs=batch.packed(batch.y))


def mixture_of_one(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    densities = [normal_density(y, loc, 1.0).sum() for loc in (w, 1.0 - w)]
    return (torch.stack(densities) + WEIGHTS.log()).logsumexp(0)


def one_density(batch: ClientBatch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, SPREAD))
        loc = w[..., None].expand(*w.shape, batch.num_rows)
        fn = dist.Normal(loc, 1.0).mask(batch.packed(batch.mask())).to_event(1)
        pyro.sample("y", fn, obs=batch.packed(batch.y))


def density_of_one(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return normal_density(y, w, 1.0).sum()


def sufficient(batch: ClientBatch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, SPREAD))
        count = batch.sum(torch.ones_like(batch.y))
        pyro.sample("y", dist.Normal(w, count.rsqrt()), obs=batch.mean(batch.y))


def sufficient_of_one(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return normal_density(y.mean(), w, len(y) ** -0.5)


def jointly_normal(batch: ClientBatch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, SPREAD))
        normal = batch.joint_normal(w[..., None], torch.eye(batch.num_rows))
        pyro.sample("y", normal, obs=batch.packed(batch.y))


def normal_density(y: Tensor, loc: Tensor, scale: float) -> Tensor:
    return -0.5 * ((y - loc) / scale) ** 2 - math.log(scale) - 0.5 * math.log(2.0 * math.pi)


OfOne = Callable[[Tensor, Tensor, Tensor], Tensor]
JOINT: dict[str, tuple[Model, OfOne, float]] = {
    "Gaussian process": (gaussian_process, process_of_one, 1.0),
    "autoregression": (autoregression, autoregression_of_one, 1.0),
    "mixture of clients": (mixture, mixture_of_one, 1.0),
    "one density a client": (one_density, density_of_one, SPREAD),
    "sufficient statistic": (sufficient, sufficient_of_one, SPREAD),
    "joint Normal": (jointly_normal, density_of_one, SPREAD),
}


def looped(data: ClientData, of_one: OfOne, w: Tensor, spread: float) -> Tensor:
    """Log joint density of each client's local site and its own rows, (N,)."""
    xs, ys = (data.fields[name].split(data.counts.tolist()) for name in "xy")
    clients = zip(xs, ys, w, strict=True)
    prior = normal_density(w, torch.zeros(()), spread)
    return prior + torch.stack([of_one(x, y, own) for x, y, own in clients])


# ------------------------------------------------------------------ the log density
@pytest.mark.parametrize("how", ["together", "vmap", "one by one"])
@pytest.mark.parametrize("what", JOINT)
def test_the_log_density_is_that_of_a_loop_over_clients(
    what: str, how: str, data: ClientData
) -> None:
    model, of_one, spread = JOINT[what]
    read(model, guides.delta, data)
    w = torch.tensor([0.3, -0.5, 0.8, 0.1])
    batch = full_batch(data, torch.arange(4))

    def density(w: Tensor) -> Tensor:
        if how == "together":
            return log_joint(model, {"w": w[:, None]}, batch, {})[0]
        slots, shared = slots_of(batch)

        def one(slot: Any, w: Tensor) -> Tensor:
            mine = one_slot(slot, shared, batch)
            return log_joint(model, {"w": w.reshape(1, 1)}, mine, {})[0][0]

        log: Tensor = over_clients(one, how == "vmap", slots, w, count=4)
        return log

    with pyro.validation_enabled(False):
        log, slope = torch.func.vjp(density, w)[:2]
        (gradient,) = slope(torch.ones(4))
    expected, pull = torch.func.vjp(lambda w: looped(data, of_one, w, spread), w)[:2]
    torch.testing.assert_close(log, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, pull(torch.ones(4))[0], rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------ what engines make of it
SD = [1.0 / math.sqrt(n + SPREAD**-2) for n in COUNTS]


@pytest.mark.parametrize(
    ("what", "engine"),
    [
        ("one density a client", "vectorized"),
        ("sufficient statistic", "sequential"),
        ("joint Normal", "pooled"),
    ],
)
def test_a_client_of_four_rows_has_the_sd_of_four_rows(
    what: str, engine: Any, data: ClientData
) -> None:
    """0.483 on every engine; with padding counted as data it is 0.158, that of 40 rows."""
    assert pytest.approx([0.1575, 0.483, 0.483, 0.483], abs=5e-4) == SD
    method = methods.fedsvi(JOINT[what][0], guides.conditional)
    sd = fit(method, data, rounds=1, engine=engine).draws(1000).own["w"].std(0)
    assert sd.flatten().tolist() == pytest.approx(SD, rel=0.1)


# ------------------------------------------------------------------ what is asked of a fit
def test_groups_of_a_joint_site(data: ClientData) -> None:
    fitted = fit(methods.fedsvi(gaussian_process, guides.structured), data, rounds=2)
    groups: Any = fitted.posterior(5, log_likelihood=True, correct=None)
    assert groups.log_likelihood["y"].dims == ("chain", "draw", "client")
    assert groups.observed_data["y"].dims == ("row",)
    w = torch.as_tensor(groups.posterior["w"].values)[0]
    expected = torch.stack([looped(data, process_of_one, own, 1.0) for own in w])
    prior = normal_density(w, torch.zeros(()), 1.0)
    torch.testing.assert_close(
        torch.as_tensor(groups.log_likelihood["y"].values)[0], expected - prior
    )
    again: Any = fitted.posterior_predictive(120)
    drawn = again.posterior_predictive["y"]
    assert drawn.dims == ("chain", "draw", "row") and drawn.shape == (4, 30, 52)
    close = abs(data.fields["x"][:40, None] - data.fields["x"][None, :40]).fill_diagonal_(9.0)
    i, j = divmod(int(close.argmin()), 40)  # neighbors on a smooth curve move together
    values = torch.as_tensor(drawn.values)[0]
    assert torch.corrcoef(values[:, [i, j]].T)[0, 1] > 0.7
    of_clients: Any = fit(
        methods.fedsvi(sufficient, guides.structured), data, rounds=1
    ).posterior_predictive(5)
    assert of_clients.posterior_predictive["y"].dims[-1] == "client"


def test_what_needs_a_density_of_each_row_is_refused(data: ClientData) -> None:
    fitted = fit(methods.fedsvi(gaussian_process, guides.structured), data, rounds=1)
    for ask in (
        lambda: fitted.predict(data, draws=2),
        lambda: fitted.predict(data, site="y", draws=2),
        lambda: hierfl.diagnostics.loo(fitted, "row"),
        lambda: fit(fitted.method, data, rounds=1, validation=data, eval_every=1),
    ):
        with pytest.raises(
            ValueError,
            match=r"site 'y' has one density for all rows of a client.*posterior_predictive",
        ):
            ask()


def test_sbc_draws_joint_sites(data: ClientData) -> None:
    """Draws and scores of packed rows agree: the ranks of an exact guide are uniform."""
    ranks = hierfl.diagnostics.sbc(
        one_density, guides.conditional, data, replications=100, draws=19, steps=1
    )
    assert float(ranks.table()["p"].min()) > 1e-4
