"""The prior above the clients' factors: what is read off a program, and what integrates out in closed form."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl import ClientBatch, ProgramError
from hierfl.summaries.hierarchy import Factors, Hierarchy, of_means
from hierfl.summaries.reading import read_likelihood
from hierfl.summaries.seen_hierarchy import seen_hierarchy
from hierfl.summaries.surrogate import Density, Surrogate
from tests.summaries import programs
from tests.summaries.programs import people, program_of


def seen(model: Any) -> Hierarchy:
    return seen_hierarchy(read_likelihood(program_of(model)))


def made_up(hierarchy: Hierarchy, clients: int = 3) -> Factors:
    """Return random factors, the first of them singular."""
    g = torch.Generator().manual_seed(1)
    size = hierarchy.reading.size
    root = torch.randn(clients, size, size, generator=g)
    root[0, :, 1:] = 0.0
    fields = {n: people().client_fields[n][:clients] for n in hierarchy.fields}
    return Factors(root @ root.mT, torch.randn(clients, size, generator=g), fields)


@pytest.mark.slow("slopes_lkj_raw-linear6", "chained-linear2")
@pytest.mark.filterwarnings("ignore:site 'mu' .* cannot be computed for several clients")
@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("spread_raw", ["mu"]),
        ("counts", ["mu", "lift", "slope", "level"]),
        ("chained", ["mu", "grand"]),
        ("nested", ["mu"]),
        ("tails", ["mu", "size"]),
        ("slopes_lkj", ["loc"]),
        ("slopes_lkj_raw", ["loc"]),
    ],
)
def test_means_integrated_out_leave_the_same_density(name: str, linear: list[str]) -> None:
    """At any m, the quadratic in m is log p(z) plus the log marginals of all clients."""
    hierarchy = seen(getattr(programs, name))
    assert set(hierarchy.linear) <= set(linear) and hierarchy.linear
    factors, surrogate = made_up(hierarchy), Surrogate(hierarchy)
    g = torch.Generator().manual_seed(2)
    with torch.no_grad(), pyro.validation_enabled(False):
        for _ in range(2):
            s = 0.3 * torch.randn(len(hierarchy.outside), generator=g)
            m = torch.randn(len(hierarchy.inside), generator=g)
            found = of_means(hierarchy, s, factors)
            quadratic = found.constant + found.shift @ m - 0.5 * m @ found.precision @ m
            log_z, each = surrogate.log_marginals(hierarchy.whole(m, s)[None], factors)
            assert torch.allclose(quadratic, log_z[0] + each.sum(), rtol=1e-9)


def test_the_log_marginal_is_the_integral_over_the_local_site() -> None:
    """A client's log marginal equals a sum over a fine grid of w."""
    hierarchy = seen(programs.spread)
    precision, shift = torch.tensor([[[1.7]], [[0.0]]]), torch.tensor([[0.9], [0.0]])
    factors = Factors(precision, shift, {})
    z = torch.tensor([0.4, -0.3])
    w = torch.linspace(-12.0, 12.0, 20001)
    prior = dist.Normal(z[0], z[1].exp()).log_prob(w).exp()
    known = (prior * (0.9 * w - 0.85 * w.square()).exp()).sum().log() + (w[1] - w[0]).log()
    found = Surrogate(hierarchy).log_marginals(z[None], factors)[1]
    assert torch.allclose(found, torch.stack([known, torch.zeros(())])[None], atol=1e-8)


def test_chained_local_sites_of_each_client_by_hand() -> None:
    """a ~ Normal(grand, tau e^height); log rate ~ Normal(0.6 a + mu - height, 0.5)."""
    hierarchy = seen(programs.chained)
    assert hierarchy.fields == ("height",)
    assert hierarchy.chained == (True, True)  # grand's mean is half of mu
    names = [s.name for s in hierarchy.program.latents.global_block.sites]
    z = torch.tensor([{"mu": 0.3, "grand": -0.4, "tau": -0.2}[n] for n in names])
    height = torch.tensor([0.5, -1.0, 0.0])
    with torch.no_grad(), pyro.validation_enabled(False):
        found = hierarchy.local(z, hierarchy.batch({"height": height}))
    for k in range(3):
        h = height[k]
        var = (torch.tensor(-0.2).exp() * h.exp()) ** 2
        mean = torch.stack([torch.tensor(-0.4), 0.6 * torch.tensor(-0.4) + 0.3 - h])
        covariance = torch.stack(
            [torch.stack([var, 0.6 * var]), torch.stack([0.6 * var, 0.36 * var + 0.25])]
        )
        assert torch.allclose(found.mean[k], mean)
        assert torch.allclose(found.precision[k].inverse(), covariance)
        assert torch.allclose(found.log_det[k], -covariance.logdet())


def test_the_effects_of_a_non_centered_program_have_the_prior_of_the_centered_one() -> None:
    """Measured in units of z0, w = t + T e: undone, the prior is that of the centered program."""
    centered, raw = seen(programs.slopes_lkj), seen(programs.slopes_lkj_raw)
    assert raw.reading.effects is not None
    g = torch.Generator().manual_seed(3)
    z = 0.5 * torch.randn(len(raw.reading.origin), generator=g)
    fn = raw.program.latents.global_block.unflatten(raw.reading.origin)[0]
    loc, unit = _units(fn)
    with torch.no_grad(), pyro.validation_enabled(False):
        one, other = centered.local(z, centered.batch({})), raw.local(z, raw.batch({}))
    covariance = unit @ other.precision[0].inverse() @ unit.mT
    assert torch.allclose(loc + unit @ other.mean[0], one.mean[0], atol=1e-8)
    assert torch.allclose(covariance, one.precision[0].inverse(), atol=1e-8)
    log_det = other.log_det - 2.0 * unit.slogdet()[1]
    assert torch.allclose(log_det, one.log_det, atol=1e-8)


def _units(values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean and the scale of the slopes at the given values of the global sites."""
    shape = (2, 2)
    tril = values["sds"].reshape(2)[:, None] * values["tril"].reshape(shape)
    return values["loc"].reshape(2), tril


# ------------------------------------------------------------------------------------ refusals
def refused(kind: str) -> Any:
    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.clients():
            loc = mu + batch.x[..., :1, 0]
            a = pyro.sample(
                "a", dist.Normal(loc, 1.0) if kind == "rows" else dist.Laplace(loc, 1.0)
            )
            with batch.data():
                pyro.sample("y", dist.Normal(a, 0.7), obs=batch.y)

    return model


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("rows", "'a' cannot be integrated out by two_stage: its prior reads the client's rows"),
        (
            "rows of a Laplace",
            "'a' cannot be integrated out by two_stage: its prior reads the client's rows",
        ),
    ],
)
def test_a_prior_that_reads_rows_is_refused_by_name(kind: str, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        seen(refused(kind))


def turned(batch: ClientBatch) -> None:
    """tau scales the local site in a part of the predictor alone."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        e = pyro.sample("e", dist.Normal(0.0, 1.0))
        with batch.data():
            eta = mu + tau * batch.x[..., 0] * e + e
            pyro.sample("ill", dist.Bernoulli(logits=eta), obs=batch.ill)


def test_a_scale_that_is_no_effect_is_read_beside_the_local_site() -> None:
    """Moving tau turns the columns of the design: no effect stands for it, and v holds both."""
    reading = seen(turned).reading
    assert reading.effects is None
    assert reading.shared.tolist() == [0, 1]


def test_a_redundant_intercept_is_absorbed() -> None:
    """mu + a with a ~ Normal(0, tau): the likelihood reads the sum alone."""

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, tau))
            with batch.data():
                pyro.sample("ill", dist.Bernoulli(logits=mu + a), obs=batch.ill)

    hierarchy = seen(model)
    assert hierarchy.reading.size == 1
    z = torch.tensor([0.7, -0.5])
    with torch.no_grad(), pyro.validation_enabled(False):
        found = hierarchy.local(z, hierarchy.batch({}))
    shift = 0.7 - hierarchy.reading.origin[0]
    assert torch.allclose(found.mean, shift.view(1, 1))
    assert torch.allclose(found.precision, torch.tensor(1.0).exp().view(1, 1, 1))


@pytest.mark.slow("chained")
@pytest.mark.parametrize("name", ["chained", "slopes_lkj_raw"])
def test_the_gradient_of_the_scales_is_that_of_differences(name: str) -> None:
    surrogate = Surrogate(seen(getattr(programs, name)))
    size, step = len(surrogate.hierarchy.outside), 1e-6
    density = Density(
        surrogate, made_up(surrogate.hierarchy), torch.tensor([[-9.0], [9.0]]).expand(2, size)
    )
    s = 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(3))
    value, slope = density.gradient(torch.stack([s, s + 20.0]))
    assert value[0].isfinite() and value[1] == -torch.inf  # beyond the bounds
    up, down = (density.at(s + sign * step * torch.eye(size))[0] for sign in (1.0, -1.0))
    torch.testing.assert_close(slope[0], (up - down) / (2.0 * step), rtol=1e-5, atol=1e-6)
