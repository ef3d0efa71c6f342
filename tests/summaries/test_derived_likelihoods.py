"""Likelihoods that are subclasses of known ones, and those without any linear predictor, have factors."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from benchmarks.family_programs import drawn, family_of, program, response_of
from hierfl import ClientBatch, methods, models
from hierfl.program.read import read_model
from hierfl.summaries.reading import read_likelihood, seen_line
from tests.programs import doubled, federation


@pytest.mark.slow("False")
@pytest.mark.parametrize("centered", [True, False])
def test_the_predictors_of_hierfls_own_logistic_regression_are_found(centered: bool) -> None:
    model = models.regression(
        "bernoulli", "x", "ill", prior_scale=dist.HalfNormal(1.0), centered=centered
    )
    data = federation((30, 20))
    labels = data.fields["ill"] if centered else data.fields["ill"].long()
    reading = read_likelihood(read_model(model, data.with_fields(ill=labels)).program)
    assert seen_line(reading).inside.tolist() == list(range(reading.size))
    assert (reading.effects is None) == centered


def test_a_derived_likelihood_with_another_density_has_no_predictor() -> None:
    reading = read_likelihood(read_model(doubled, federation()).program)
    assert not len(seen_line(reading).inside)


def test_a_likelihood_without_a_predictor_is_fitted() -> None:
    """The predictor bends: expectations are sums over quasi-random points, and the posterior is that of NUTS."""

    def model(batch: ClientBatch) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with batch.clients():
            w = pyro.sample("w", dist.Normal(loc, 0.5))
            with batch.data():
                pyro.sample("y", dist.Normal(2.0 * torch.tanh(w), 0.5), obs=batch.y)

    g = torch.Generator().manual_seed(0)
    data = federation((8, 6, 9, 7))
    shift = torch.tensor([0.2, 0.6, 0.4, -0.1])[data.row_client]
    data = data.with_fields(y=2.0 * torch.tanh(shift) + 0.5 * torch.randn(len(shift), generator=g))
    fit = hierfl.fit(methods.two_stage(model, draws=500), data, seed=0, progress=False)
    assert not len(seen_line(read_likelihood(fit.program)).inside)
    assert fit.history["k_hat"].iloc[-1] < 0.7
    # loc ~ Normal(0, 1), and the marginal of client k given loc, both on a grid
    at = torch.linspace(-3.0, 3.0, 601)
    each = torch.stack(
        [
            (dist.Normal(2.0 * torch.tanh(at)[:, None], 0.5).log_prob(y)).sum(1)
            for y in data.fields["y"].split(data.counts.tolist())
        ]
    )
    prior = dist.Normal(at[:, None], 0.5).log_prob(at)  # (loc, w)
    logs = (prior + each[:, None]).logsumexp(2).sum(0) + dist.Normal(0.0, 1.0).log_prob(at)
    share = logs.softmax(0)
    mean = share @ at
    sd = (share @ (at - mean).square()).sqrt()
    found = fit.draws(500).shared["loc"]
    assert abs(float((found.mean() - mean) / sd)) < 0.15
    assert abs(float(found.std() / sd) - 1.0) < 0.12


@pytest.mark.slow("ordered_beta", "hurdle_poisson")
@pytest.mark.parametrize("name", ["hurdle_poisson", "hurdle_gamma", "ordered_beta"])
def test_first_rows_that_hide_the_predictor_are_read_as_others(name: str) -> None:
    """Zeros at a hurdle have no predictor, and ends of an ordered beta no precision."""
    data = drawn(name, 0)[1]
    hidden = data.fields["y"].clone()
    hidden[:8] = 0.0
    rows = data.with_fields(y=hidden)
    found = read_likelihood(read_model(program(name), rows).program)
    sites = found.program.latents.global_block.sites
    names = [site.name for site in sites for _ in range(site.size)]
    read = {names[j] for j in found.shared.tolist()}
    assert read >= {"slope", *family_of(name).parameters(response_of(name))}
