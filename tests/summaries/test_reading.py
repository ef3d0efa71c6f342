"""What the likelihood of a client reads, and which of it enters through linear predictors."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData
from hierfl.core.process import double_precision
from hierfl.data.batch import in_double
from hierfl.program.read import read_model
from hierfl.summaries.reading import Reading, read_likelihood, seen_line
from tests.sampled import sampled
from tests.summaries import programs
from tests.summaries.programs import packed_rows, people, program_of, rows_of_client


def read_sites(reading: Reading) -> list[str]:
    """Return the name of the site of each global number that is read."""
    sites = reading.program.latents.global_block.sites
    names = [site.name for site in sites for _ in range(site.size)]
    return [names[j] for j in reading.shared.tolist()]


def vague_rates(batch: ClientBatch) -> None:
    """Rates at one prior sd of a local site are e^250, no number of single precision."""
    rate = pyro.sample("rate", dist.HalfNormal(316.0))
    spread = pyro.sample("spread", dist.HalfNormal(316.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(0.0, spread))
        with batch.data():
            pyro.sample("visits", dist.Poisson((rate.log() + own).exp()), obs=batch.visits)


def test_effects_of_vague_priors_are_finite_in_single_precision() -> None:
    effects = read_likelihood(program_of(vague_rates)).effects
    assert effects is not None
    single, double = (
        effects.at(torch.tensor([0.5, 1.0], dtype=of)) for of in (torch.float32, torch.float64)
    )
    for one, other in zip(single, double, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one.double(), other, rtol=1e-5)


def loading(batch: ClientBatch) -> None:
    """A common factor on the local site."""
    factor = pyro.sample("factor", dist.LogNormal(0.0, 0.3))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data():
            pyro.sample("y", dist.Normal(factor * a, 0.7), obs=batch.y)


@pytest.mark.parametrize(
    ("model", "read"),
    [
        (programs.spread, []),
        (programs.spread_raw, []),  # mu and tau are absorbed by the effect
        (programs.slopes_lkj_raw, []),
        (programs.noisy, ["sigma"]),
        (programs.tails, ["sigma", "df"]),
        (programs.counts, ["slope", *["level"] * 3]),
        (programs.chained, []),
    ],
)
def test_the_global_numbers_that_are_read(model: Any, read: list[str]) -> None:
    reading = read_likelihood(program_of(model))
    assert sorted(read_sites(reading)) == sorted(read)
    assert reading.size == reading.own_size + len(read)


def test_a_factor_on_the_local_site_is_an_effect_in_other_units() -> None:
    """factor * a is one effect; its prior given (factor, mu) is Normal(factor mu, factor 0.8)."""
    reading = read_likelihood(program_of(loading))
    assert reading.effects is not None
    assert read_sites(reading) == []
    z = torch.tensor([0.4, -0.3])
    shift, scale = reading.effects.at(z)
    assert torch.allclose(shift, torch.zeros(1))
    assert torch.allclose(scale[0, 0], (z[0] - reading.origin[0]).exp())


def bent(kind: str) -> Any:
    """Return a model whose predictor is not straight everywhere, or has an offset."""

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with batch.data():
                eta = a + batch.x[..., 0]
                if kind == "clamped":
                    eta = eta.clamp(-5.0, 5.0)
                if kind == "bent":
                    eta = torch.nn.functional.softplus(eta)
                if kind == "two":
                    pyro.sample("visits", dist.Poisson((0.5 * a).exp()), obs=batch.visits)
                pyro.sample("ill", dist.Bernoulli(logits=eta), obs=batch.ill)

    return model


@pytest.mark.parametrize(
    ("kind", "straight"), [("clamped", False), ("bent", False), ("offset", True), ("two", True)]
)
def test_only_straight_predictors_are_taken_for_lines(kind: str, straight: bool) -> None:
    line = seen_line(read_likelihood(program_of(bent(kind))))
    assert len(line.inside) == (1 if straight else 0)
    batch = in_double(rows_of_client(data := people(), 2))
    with double_precision(), torch.no_grad(), pyro.validation_enabled(False):
        rows = packed_rows(line, batch)
        count = rows.design.shape[0] * rows.design.shape[1]
        assert data.counts[2] * (2 if kind == "two" else 1) == count or not straight
        for far in (0.1, 3.0, 9.0):
            v = torch.tensor([far])
            known = line.reading.log_likelihood(v, batch)
            assert torch.allclose(rows.values(v[None, None])[0, 0], known, rtol=1e-9)


def test_a_site_of_which_nothing_is_seen_at_the_start_is_no_line() -> None:
    """BUGS's Dogs: with a rate of hundreds all probabilities are 0, and so are their slopes."""

    def model(batch: ClientBatch) -> None:
        rate = pyro.sample("rate", dist.HalfNormal(316.0))
        with batch.clients(), batch.data():
            odds = torch.exp(-(rate + 1e-5) * (1.0 + batch.x[..., 0].square()))
            pyro.sample("ill", dist.Bernoulli(odds), obs=batch.ill)

    assert len(seen_line(read_likelihood(program_of(model))).inside) == 0
    fitted = hierfl.fit(model, people(), seed=0)
    assert fitted.method.name == "two_stage" and fitted.summary().trustworthy is True


def test_numbers_outside_the_predictor_are_kept_apart() -> None:
    """sigma and the degrees of freedom stay outside; the local site is on the line."""
    line = seen_line(read_likelihood(program_of(programs.tails)))
    assert line.inside.tolist() == [0]
    assert line.rest.tolist() == [1, 2]
    assert seen_line(read_likelihood(program_of(programs.gumbel))).inside.tolist() == []
    assert seen_line(read_likelihood(program_of(programs.counts))).inside.tolist() == [*range(5)]


def by_week(looped: bool) -> Any:
    """Return a model of 20 weekly effects, of which a row picks one by its code, as sites or a vector."""

    def model(batch: ClientBatch) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        if looped:
            weekly = [pyro.sample(f"b_{week}", dist.Normal(0.0, 1.0)) for week in range(20)]
            effects = torch.stack(weekly, -1)
        else:
            effects = pyro.sample("b", dist.Normal(torch.zeros(20), 1.0).to_event(1))
        with batch.clients():
            own = pyro.sample("a", dist.Normal(0.0, tau))
            with batch.data():
                rate = torch.exp(own + effects[batch.week])
                pyro.sample("y", dist.Poisson(rate), obs=batch.y)

    return model


@pytest.mark.slow
@pytest.mark.parametrize("backwards", sampled([False, True], [True]))
def test_sites_that_only_later_rows_pick_are_read(backwards: bool) -> None:
    """The program is read on five rows of a client; the other weeks are read as well."""
    g = torch.Generator().manual_seed(0)
    week = (torch.arange(20).flip(0) if backwards else torch.arange(20)).repeat(6)
    y = torch.poisson(torch.exp(0.5 * torch.randn(120, generator=g)), generator=g)
    data = ClientData.from_arrays(torch.arange(6).repeat_interleave(20), week=week, y=y)
    fits = [hierfl.fit(by_week(looped), data, seed=0) for looped in (True, False)]
    drawn: list[Any] = [fit.posterior(draws=1000, seed=0) for fit in fits]
    scalars, vector = (found.posterior for found in drawn)
    means = torch.tensor([float(scalars[f"b_{w}"].mean()) for w in range(20)])
    sds = torch.from_numpy(vector["b"].std(("chain", "draw")).values)
    apart = (means - torch.from_numpy(vector["b"].mean(("chain", "draw")).values)).abs() / sds
    assert apart.max() < 0.15


def test_a_likelihood_reads_the_site_of_a_branch_that_no_row_of_the_prototype_takes() -> None:
    def model(batch: ClientBatch) -> None:
        zero = pyro.sample("zero", dist.Normal(0.0, 1.0))
        size = pyro.sample("size", dist.Normal(0.0, 1.0))
        unread = pyro.sample("unread", dist.Normal(0.0, 1.0))
        with batch.clients():
            own = pyro.sample("a", dist.Normal(unread, 1.0))
            with batch.data():
                none = torch.nn.functional.logsigmoid(zero + own)
                some = dist.Poisson(torch.exp(size + own)).log_prob(batch.y)
                pyro.factor("y_term", torch.where(batch.y == 0.0, none, some))

    data = ClientData.from_arrays([0] * 9 + [1] * 9, y=torch.arange(18.0) % 9 + 1.0)
    reading = read_likelihood(read_model(model, data).program)
    assert sorted(read_sites(reading)) == ["size", "zero"]


def mixed_counts(*, apart: bool) -> Any:
    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
        with batch.clients():
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
            rate = mu + tau * e
            with batch.data():
                counted = dist.Poisson(rate.exp()).log_prob(batch.visits)
                other = dist.Geometric(logits=tau if apart else rate).log_prob(batch.visits)
                pyro.factor("rows", torch.logaddexp(counted, other - 1.0))

    return model


def test_a_likelihood_of_no_link_has_effects_unless_a_scale_enters_elsewhere() -> None:
    """Rows read mu + tau e alone, in units of its start; with tau apart nothing is absorbed."""
    reading = read_likelihood(program_of(mixed_counts(apart=False)))
    assert reading.effects is not None and not len(reading.shared)
    shift, scale = reading.effects.at(torch.tensor([0.7, -0.4]))
    mu, log_tau = reading.origin
    assert torch.allclose(shift, (0.7 - mu) / log_tau.exp())
    assert torch.allclose(scale, (-0.4 - log_tau).exp())
    elsewhere = read_likelihood(program_of(mixed_counts(apart=True)))
    assert elsewhere.effects is None and elsewhere.shared.tolist() == [0, 1]
