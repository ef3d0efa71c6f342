"""Clients whose own likelihoods have no maximum, and what the verdict says of the draws themselves."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from benchmarks.zoo.reading import data_of, program_of
from hierfl import ClientBatch, ClientData
from hierfl.core.draw_quality import DrawQuality
from hierfl.core.process import double_precision
from hierfl.core.trees import tree_map
from hierfl.diagnostics.entries import OF_CLIENTS, Entries, checks_of_draws, entries_of_clients
from hierfl.diagnostics.evidence import kept_densities
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.methods.stages.checks import NOWHERE
from hierfl.methods.stages.client import RowWork
from hierfl.methods.stages.state import TwoStageWork
from hierfl.methods.stages.two_stage import seen_in
from hierfl.posterior.draws import Draws
from hierfl.posterior.hidden_modes import is_mixture, may_hide_modes

# BUGS's Jaws: 20 boys, the height of the ramus at four ages
JAWS = torch.tensor(
    [
        [47.8, 48.8, 49.0, 49.7], [46.4, 47.3, 47.7, 48.4], [46.3, 46.8, 47.8, 48.5],
        [45.1, 45.3, 46.1, 47.2], [47.6, 48.5, 48.9, 49.3], [52.5, 53.2, 53.3, 53.7],
        [51.2, 53.0, 54.3, 54.5], [49.8, 50.0, 50.3, 52.7], [48.1, 50.8, 52.3, 54.4],
        [45.0, 47.0, 47.3, 48.3], [51.2, 51.4, 51.6, 51.9], [48.5, 49.2, 53.0, 55.5],
        [52.1, 52.8, 53.7, 55.0], [48.2, 48.9, 49.3, 49.8], [49.6, 50.4, 51.2, 51.8],
        [50.7, 51.7, 52.7, 53.3], [47.2, 47.7, 48.4, 49.5], [53.3, 54.6, 55.1, 55.3],
        [46.2, 47.5, 48.1, 48.4], [46.3, 47.6, 51.3, 51.8],
    ]
)  # fmt: skip
AGES = torch.tensor([-0.75, -0.25, 0.25, 0.75])
# BUGS's Eyes: peak sensitivity of 48 photoreceptors, in nm
EYES = torch.tensor(
    [
        529.0, 530.0, 532.0, 533.1, 533.4, 533.6, 533.7, 534.1, 534.8, 535.3, 535.4, 535.9,
        536.1, 536.3, 536.4, 536.6, 537.0, 537.4, 537.5, 538.3, 538.5, 538.6, 539.4, 539.6,
        540.4, 540.8, 542.0, 542.8, 543.0, 543.5, 543.8, 543.9, 545.3, 546.2, 548.8, 548.7,
        548.9, 549.0, 549.4, 549.9, 550.6, 551.2, 551.4, 551.5, 551.6, 552.8, 552.9, 553.2,
    ]
)  # fmt: skip
Program = Callable[[ClientBatch], None]
# mean and sd of pooled NUTS of NumPyro, four chains of 5,000 draws, R-hat below 1.001
Moments = dict[str, tuple[list[float], list[float]]]
COVARIANCE: Moments = {
    "mu": ([48.661, 49.632], [0.562, 0.566]),
    "sd": ([2.497, 2.520], [0.400, 0.402]),
}
LKJ_1: Moments = {
    "b0": ([50.062], [0.458]),
    "b1": ([1.863], [0.249]),
    "sd": ([2.247, 2.208, 2.276, 2.447], [0.314, 0.296, 0.301, 0.338]),
}
# two chains of 40,000 draws, which leave the second mode rarely
OF_EYES: Moments = {
    "first": ([536.89], [1.16]),
    "apart": ([11.78], [2.03]),
    "sd": ([3.92], [0.87]),
    "share": ([0.60], [0.11]),
}
LOCAL_1: Moments = {
    "b0": ([50.068], [0.427]),
    "b1": ([1.863], [0.247]),
    "sd": ([1.863, 1.815, 1.891, 2.085], [0.336, 0.319, 0.318, 0.351]),
}


def grouped(y: Tensor, rows: int) -> ClientData:
    return ClientData.from_arrays([f"c{i // rows:02d}" for i in range(len(y))], y=y)


def covariance(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(50.0 * torch.ones(2), 10.0).to_event(1))
    sd = pyro.sample("sd", dist.HalfCauchy(2.5 * torch.ones(2)).to_event(1))
    tril = pyro.sample("L", dist.LKJCholesky(2, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.MultivariateNormal(mu, scale_tril=sd[..., None] * tril), obs=batch.y)


def jaws(*, local: bool) -> Program:
    def model(batch: ClientBatch) -> None:
        b0 = pyro.sample("b0", dist.Normal(48.0, 32.0))
        b1 = pyro.sample("b1", dist.Normal(0.0, 32.0))
        sd = pyro.sample("sd", dist.HalfCauchy(2.5 * torch.ones(4)).to_event(1))
        tril = sd[..., None] * pyro.sample("L", dist.LKJCholesky(4, 1.0))
        with batch.clients():
            own = pyro.sample("a", dist.Normal(0.0, 1.0)) if local else None
            with batch.data():
                mean = b0 + b1 * AGES if own is None else (b0 + own)[..., None] + b1 * AGES
                pyro.sample("y", dist.MultivariateNormal(mean, scale_tril=tril), obs=batch.y)

    return model


def eyes(batch: ClientBatch) -> None:
    first = pyro.sample("first", dist.Normal(540.0, 10.0))
    apart = pyro.sample("apart", dist.HalfNormal(15.0))
    sd = pyro.sample("sd", dist.HalfCauchy(5.0))
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    with batch.clients(), batch.data():
        parts = dist.Normal(torch.stack([first, first + apart], -1), sd[..., None])
        shares = dist.Categorical(torch.stack([share, 1.0 - share], -1))
        pyro.sample("y", dist.MixtureSameFamily(shares, parts), obs=batch.y)


def labeled_eyes(batch: ClientBatch) -> None:
    """The same by a label of each row, with vaguer priors."""
    first = pyro.sample("first", dist.Normal(530.0, 50.0))
    apart = pyro.sample("apart", dist.HalfNormal(30.0))
    sd = pyro.sample("sd", dist.HalfCauchy(5.0))
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    with batch.clients(), batch.data():
        second = pyro.sample("second", dist.Bernoulli(share), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(first + apart * second, sd), obs=batch.y)


def fixed_eyes(batch: ClientBatch) -> None:
    """The same by a factor, with the priors of the BUGS book and the label of the first and last row."""
    first = pyro.sample("first", dist.Normal(0.0, 1000.0))
    apart = pyro.sample("apart", dist.HalfNormal(1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    with batch.clients(), batch.data():
        one, other = (dist.Normal(at, tau**-0.5).log_prob(batch.y) for at in (first, first + apart))
        either = torch.logaddexp((1.0 - share).log() + one, share.log() + other)
        by_label = torch.where(batch.label == 0.0, one, other)
        pyro.factor("y", torch.where(batch.label < 0.0, either, by_label))


def own_scales(prior: Callable[[Tensor], Any]) -> Program:
    """One row a client, and a scale of each client."""

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with batch.clients():
            scale = pyro.sample("s", prior(m))
            with batch.data():
                pyro.sample("y", dist.Normal(mu, scale), obs=batch.y)

    return model


def check_moments(fitted: Any, moments: Moments) -> None:
    """Means within 0.1 sd and sds within 15% of NUTS."""
    posterior = fitted.posterior(draws=4000, seed=0)["posterior"]
    for site, (means, sds) in moments.items():
        values = posterior[site].to_numpy().reshape(4000, -1)
        for at, (mean, sd) in enumerate(zip(means, sds, strict=True)):
            assert abs(values[:, at].mean() - mean) < 0.1 * sd, (site, at)
            assert abs(values[:, at].std() / sd - 1.0) < 0.15, (site, at)


@cache
def of_pairs(rows: int) -> hierfl.Fit:
    """A covariance from pairs of measures, so many a client, in the tests' double precision."""
    with double_precision():
        method = hierfl.methods.two_stage(covariance)
        fit = hierfl.fit(method, grouped(JAWS[:, :2], rows), seed=0)
    # modes may hide behind k-hats of 0.6, those of its rounds
    history = tuple(r | {"k_hat": 0.1} if "k_hat" in r else r for r in fit.progress.history)
    light = replace(fit, progress=replace(fit.progress, history=history))
    return with_server(light, k_hat=torch.tensor(0.1).double())


@pytest.fixture
def anchored() -> hierfl.Fit:
    return of_pairs(1)


@pytest.fixture
def done() -> hierfl.Fit:
    return of_pairs(3)


def with_server(fitted: hierfl.Fit, **state: Any) -> hierfl.Fit:
    """Return a fit with another state of the server."""
    server = replace(fitted.progress.server, **state)
    return replace(fitted, progress=replace(fitted.progress, server=server))


@pytest.mark.slow
def test_a_covariance_from_one_row_a_client_is_that_of_nuts(anchored: hierfl.Fit) -> None:
    assert anchored.progress.server.was_anchored
    check_moments(anchored, COVARIANCE)
    assert anchored.summary().trustworthy is True


@pytest.mark.slow
def test_three_rows_a_client_need_no_small_steps() -> None:
    fitted = hierfl.fit(covariance, grouped(JAWS[:, :2], 3), seed=0)
    assert not fitted.progress.server.was_anchored
    check_moments(fitted, COVARIANCE)


@pytest.mark.slow
def test_clients_that_leave_are_not_approached_again(anchored: hierfl.Fit) -> None:
    without = anchored.without("c00", rounds=6)
    posterior = without.posterior(draws=2000, seed=0)["posterior"]
    other = float(posterior["mu"].mean(("chain", "draw"))[0])
    assert abs(other - float(JAWS[1:, 0].mean())) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "local", "moments"), [(1, False, LKJ_1), (3, False, LKJ_1), (1, True, LOCAL_1)]
)
def test_jaws_is_nuts(rows: int, local: bool, moments: Moments) -> None:
    """It had collapsed: sds of 2e-5 in place of 2.2, and 26 distinct values in 2,000 draws."""
    fitted = hierfl.fit(jaws(local=local), grouped(JAWS, rows), seed=0)
    check_moments(fitted, moments)
    assert fitted.summary().trustworthy is True


def one_scale_a_row(batch: ClientBatch) -> None:
    mu, m = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("m", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with batch.clients():
        scale = pyro.sample("scale", dist.LogNormal(m, s))
        with batch.data():
            pyro.sample("y", dist.Normal(mu, scale), obs=batch.y)


@pytest.mark.slow
def test_lognormal_scales_of_single_rows_are_those_of_quadrature() -> None:
    """Chains sat on rounding where the scales hardly differ: mu was -0.69, with an sd of 2.61."""
    rng = np.random.default_rng(0)
    scales = np.exp(rng.normal(0.0, 0.5, 12))
    fitted = hierfl.fit(one_scale_a_row, grouped(torch.tensor(rng.normal(1.0, scales)), 1), seed=0)
    check_moments(
        fitted, {"mu": ([0.764], [0.296]), "m": ([-0.020], [0.329]), "s": ([0.551], [0.389])}
    )
    judged = fitted.summary()  # a scale's own tail is long: so many draws may not tell its sd
    assert judged.trustworthy or "the Monte Carlo error of the sd of 'scale'" in judged.verdict


@pytest.mark.slow("labeled_eyes-12")
@pytest.mark.parametrize(("program", "rows"), [(eyes, 48), (labeled_eyes, 48), (labeled_eyes, 12)])
def test_eyes_by_rounds_is_to_be_checked_and_an_entry_is_named(program: Program, rows: int) -> None:
    """A second mode, of one component for all, is missed: sds are 0.46 to 0.78 of NUTS's."""
    fitted = hierfl.fit(hierfl.methods.two_stage(program), grouped(EYES, rows), seed=0)
    judged = fitted.summary()
    assert judged.trustworthy is None
    assert "Check the tails: k-hat is 0." in judged.verdict
    assert any(
        f"the sd of '{site}'" in judged.verdict for site in ("first", "apart", "sd", "share")
    )
    high = with_server(fitted, k_hat=torch.tensor(0.86)).summary()
    assert high.trustworthy is False
    assert "k-hat is 0.86" in high.verdict and "the sd of '" in high.verdict


@pytest.mark.slow
def test_chains_see_the_mode_of_eyes_that_rounds_miss() -> None:
    fitted = hierfl.fit(eyes, grouped(EYES, 48), seed=0)
    assert "modes of little mass may be missed" in str(fitted.progress.ended)
    check_moments(fitted, OF_EYES)


@pytest.mark.slow
def test_sds_that_may_be_off_by_chance_are_to_be_checked() -> None:
    """By quadrature; sds of 'first' and 'apart' were 0.77 and 0.75 of these, and trusted.

    0.3% of the mass, where all rows have one label, has half of the variance of 'first': the sds
    are those without it and with it.
    """
    fitted = hierfl.fit(labeled_eyes, grouped(EYES, 48), seed=0)
    posterior, is_off = fitted.posterior(draws=4000, seed=0)["posterior"], False
    moments = {
        "first": (536.79, 1.106, 1.638),
        "apart": (11.97, 1.922, 2.395),
        "sd": (3.893, 0.837, 0.837),
    }
    for site, (mean, near, sd) in moments.items():
        assert abs(float(posterior[site].mean()) - mean) < 0.1 * sd
        is_off |= not 0.9 * near < float(posterior[site].std()) < 1.1 * sd
    judged = fitted.summary()
    assert not (is_off and judged.trustworthy)
    assert judged.trustworthy or any(f"the sd of '{site}'" in judged.verdict for site in moments)


@pytest.mark.slow
def test_a_mixture_by_a_factor_with_vague_priors_is_that_of_quadrature() -> None:
    """Draws of one mode had sds of 0.5 to 0.8 of these, and were trusted."""
    label = torch.full((48,), -1.0)
    label[0], label[-1] = 0.0, 1.0
    data = ClientData.from_arrays(["c"] * 48, y=EYES, label=label)
    fitted = hierfl.fit(fixed_eyes, data, seed=0)
    check_moments(
        fitted,
        {"first": ([536.78], [1.116]), "apart": ([12.08], [1.597]), "tau": ([0.0741], [0.0211])},
    )


def kinds(batch: ClientBatch) -> None:
    """A client is of one of two kinds."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor([530.0, 550.0]), 10.0).to_event(1))
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        with batch.data():
            loc = torch.where(kind > 0.0, mu[1], mu[0])
            pyro.sample("y", dist.Normal(loc, 9.0), obs=batch.y)


def test_a_mixture_is_one_however_it_is_written() -> None:
    data = ClientData.from_arrays(["c"] * 48, y=EYES, label=torch.full((48,), -1.0))
    for program in (eyes, labeled_eyes, fixed_eyes, kinds):
        federation = federate(hierfl.methods.two_stage(program), data, seed=0)
        assert is_mixture(federation.program)


def test_a_mixture_with_one_mode_and_light_weights_is_not_to_be_checked() -> None:
    data = ClientData.from_arrays(["c"] * 48, y=EYES)
    federation = federate(hierfl.methods.two_stage(kinds), data, seed=0)
    begun = replace(begin(federation), server=replace(federation.server.state, anchor=None))
    ends = [(0.2, False), (0.2, True), (0.4, True)]
    wheres = [replace(begun, history=({"k_hat": k},), one_mode=one) for k, one in ends]
    assert [may_hide_modes(federation.program, where) for where in wheres] == [True, False, True]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_climbs_look_for_modes_of_a_mixture_where_chains_take_too_long(
    is_ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two components that may be exchanged have two modes; in a known order they have one."""
    monkeypatch.setattr("hierfl.runs.ended.LOOKING", 1e-9)
    monkeypatch.setattr("hierfl.runs.ended.A_SEARCH", 1e-12)

    def components(batch: ClientBatch) -> None:
        first = pyro.sample("first", dist.Normal(0.0, 3.0))
        prior: Any = dist.HalfNormal(3.0) if is_ordered else dist.Normal(0.0, 3.0)
        apart = pyro.sample("apart", prior)
        with batch.clients(), batch.data():
            one, other = (dist.Normal(at, 1.0).log_prob(batch.y) for at in (first, first + apart))
            pyro.factor("y", torch.logaddexp(one, other))

    g = torch.Generator().manual_seed(0)
    y = torch.randn(80, generator=g) + 4.0 * (torch.arange(80) % 2)
    fitted = hierfl.fit(components, ClientData.from_arrays(torch.arange(80) // 20, y=y), seed=0)
    assert fitted.progress.ended is None
    assert fitted.progress.one_mode is is_ordered


def rounded(batch: ClientBatch) -> None:
    """Measures to the next number, with the error of each row as a site of its own."""
    mu = pyro.sample("mu", dist.Normal(540.0, 10.0))
    with batch.clients(), batch.data():
        error = pyro.sample("error", dist.Uniform(-0.5, 0.5))
        pyro.factor("y", dist.Normal(mu, 9.0).log_prob(batch.y + error))


def test_an_integral_over_a_site_of_a_row_is_no_mixture() -> None:
    eye = ClientData.from_arrays(["c"] * 48, y=EYES)
    jaws = grouped(JAWS[:, :2], 1)
    for program, data in ((covariance, jaws), (rounded, eye)):
        assert not is_mixture(federate(hierfl.methods.two_stage(program), data, seed=0).program)


def ranked(batch: ClientBatch) -> None:
    """The first of three is chosen, and then one of two: logs of sums are subtracted."""
    worth = pyro.sample("worth", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with batch.clients(), batch.data():
        score = batch.y[..., None] * worth
        left = torch.logaddexp(score[..., 1], score[..., 2])
        chosen = score[..., :2].sum(-1)
        pyro.factor("order", chosen - score.logsumexp(-1) - left)


def test_a_normalizing_sum_is_no_mixture() -> None:
    data = ClientData.from_arrays(["c"] * 48, y=EYES)
    assert not is_mixture(federate(hierfl.methods.two_stage(ranked), data, seed=0).program)


def test_a_heavy_tail_of_any_round_counts_where_rows_are_curved() -> None:
    """The second draws of Orange trees are about the first, whose tails had ended: their k-hat is 0."""
    trees = program_of("orange")
    of_trees, of_jaws = (
        (trees.model, data_of(trees), 0.6),
        (covariance, grouped(JAWS[:, :2], 1), 2.0),
    )
    for program, rows, heavy in (of_trees, of_jaws):
        federation = federate(hierfl.methods.two_stage(program), rows, seed=0)
        where = replace(begin(federation), server=replace(federation.server.state, anchor=None))
        history: Any = ({"round": 1, "k_hat": heavy}, {"round": 2, "k_hat": 0.0})
        hides = may_hide_modes(federation.program, replace(where, history=history))
        assert hides is (program is trees.model)
        assert not may_hide_modes(federation.program, replace(where, history=history[1:]))


def test_a_program_whose_priors_cannot_be_drawn_from_has_a_verdict() -> None:
    """Improper priors without a local site: whether rows are a mixture is read at the centers of the sites."""

    def improper(batch: ClientBatch) -> None:
        level = pyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(level, 1.0), obs=batch.y)

    y = torch.arange(12.0) / 4
    fitted = hierfl.fit(improper, ClientData.from_arrays(list("aabb") * 3, y=y), seed=0)
    check_moments(fitted, {"level": ([float(y.mean())], [12.0**-0.5])})


@pytest.mark.slow
def test_scales_of_clients_with_one_row_are_those_of_quadrature() -> None:
    """Gamma scales took more than 300 s in rounds."""
    g = torch.Generator().manual_seed(3)
    y = 2.0 + torch.randn(20, generator=g) * torch.exp(0.5 * torch.randn(20, generator=g))
    program = own_scales(lambda m: dist.Gamma(2.0, 2.0 / m.exp()))
    fitted = hierfl.fit(program, grouped(y, 1), seed=0)
    assert "local sites are not Normal" in str(fitted.progress.ended)
    check_moments(fitted, {"mu": ([2.1478], [0.1645]), "m": ([-0.1833], [0.2525])})
    own = fitted.posterior(draws=4000, seed=0)["posterior"]["s"].to_numpy()[0]
    for client, mean, sd in ((0, 0.6948, 0.4970), (4, 1.2872, 0.5721), (19, 1.2291, 0.5641)):
        assert abs(own[:, client].mean() - mean) < 0.1 * sd
        assert abs(own[:, client].std() / sd - 1.0) < 0.15


def test_draws_that_have_collapsed_are_not_trusted(done: hierfl.Fit) -> None:
    """Equal weights have a k-hat of 0 and are all effective, however few values the draws have."""
    final = done.progress.server.final
    draws = final.draws.mean(0) + 1e-7 * final.draws
    count = len(draws)
    final = replace(final, draws=draws, log_weights=torch.full((count,), 1.0 / count).log())
    numbers = {"k_hat": torch.tensor(0.0), "effective": torch.tensor(float(count))}
    collapsed = with_server(done, final=final, **numbers)
    history = (*collapsed.progress.history[:-1], {**collapsed.progress.history[-1], "r_hat": 1.0})
    by_chains = replace(collapsed.progress, ended="64 chains", history=history)
    for fit in (collapsed, replace(collapsed, progress=by_chains)):
        verdict = fit.summary()
        assert verdict.trustworthy is False and "they have collapsed" in verdict.verdict


def test_another_start_with_another_posterior_is_not_trusted(done: hierfl.Fit) -> None:
    verdict = with_server(done, apart=torch.tensor(0.7)).summary()
    assert verdict.trustworthy is False
    assert "a second, wider start" in verdict.verdict and "0.70 posterior sds" in verdict.verdict


def test_weights_with_a_large_error_of_their_own_are_not_trusted(done: hierfl.Fit) -> None:
    """Sums over few points of a client's own sites err, which k-hat of the weights does not show."""
    verdict = with_server(done, inner_error=torch.tensor(1.3)).summary()
    assert verdict.trustworthy is False
    assert "the weights are uncertain by a factor of 3.7" in verdict.verdict
    assert with_server(done, inner_error=torch.tensor(0.1)).summary().trustworthy is True


def test_an_entry_with_few_effective_draws_is_named(done: hierfl.Fit) -> None:
    """Half of the weight at one end of one entry, whatever k-hat says."""
    final = done.progress.server.final
    log_weights = final.log_weights.clone()
    highest = final.draws[:, 0].topk(20).indices
    log_weights[highest] = log_weights.max() + 4.0
    final = replace(final, log_weights=log_weights.log_softmax(0))
    verdict = with_server(done, final=final, k_hat=torch.tensor(0.1)).summary()
    assert verdict.trustworthy is False
    assert "draws are effective for '" in verdict.verdict


def test_a_k_hat_of_draws_with_one_far_out_names_its_entry(done: hierfl.Fit) -> None:
    final = done.progress.server.final
    draws = final.draws.clone()
    draws[int(final.log_weights.argmax()), 1] += 300.0
    verdict = with_server(done, final=replace(final, draws=draws)).summary()
    assert verdict.trustworthy is None
    assert "Check the tails: the Monte Carlo error of the sd of 'mu[1]' is" in verdict.verdict


def test_both_answers_name_the_same_error_of_a_long_tail() -> None:
    quality = DrawQuality(*torch.tensor([[900.0], [0.27], [0.24]]))
    entries = Entries(("'lam[0]'",), quality, 900, long_tailed=(0,))
    assert "of the sd of 'lam[0]' is 27%" in entries.tails().answer
    assert "'lam[0]' (27%)" in entries.without_moments().answer


def test_a_long_tail_is_said_and_is_no_fault_of_the_draws(done: hierfl.Fit) -> None:
    """The sd of exp(z) rests on a few of the draws where that of z is 2 and rests on all."""
    final, block = done.progress.server.final, done.program.latents.global_block
    (place,) = (i for i, site in enumerate(block.sites) if site.name == "sd")
    begin = sum(block.sizes[:place])
    draws = final.draws.clone()
    away = draws[:, begin] - draws[:, begin].mean()
    draws[:, begin] = 2.0 * away / away.std()
    equal = torch.full_like(final.log_weights, 1.0 / len(draws)).log()
    heavy = with_server(done, final=replace(final, draws=draws, log_weights=equal))
    tails, moments = checks_of_draws(heavy)
    assert (tails.verdict, moments.verdict, moments.severity) == ("good", "warning", "note")
    assert "A long tail: means and sds of 'sd[0]' (" in moments.answer
    draws[0, begin] += 300.0  # in z, too
    tails, moments = checks_of_draws(heavy)
    assert (tails.verdict, tails.severity) == ("warning", "doubt")
    assert "sd[0]" not in moments.answer


def test_sds_of_clients_that_rest_on_few_draws_are_named(done: hierfl.Fit) -> None:
    """A mode that 2 of 400 draws are in, 15 sds away, of one client: its sd is known to 11%."""
    own = torch.randn(400, len(done.clients), 2, generator=torch.Generator().manual_seed(0))
    fit = with_server(done, effective=torch.tensor(700.0))
    entries = entries_of_clients(fit, Draws({}, {"theta": own}))
    assert entries is not None and entries.tails(question=OF_CLIENTS).verdict == "good"
    own[:2, 3, 1] += 15.0
    entries = entries_of_clients(fit, Draws({}, {"theta": own}))
    assert entries is not None
    check = entries.tails(question=OF_CLIENTS)
    assert (check.verdict, check.severity) == ("warning", "doubt")
    assert f"the sd of 'theta', 1, of {done.clients[3]} is 1" in check.answer


def test_rows_that_are_impossible_at_every_draw_are_not_equal_weights(done: hierfl.Fit) -> None:
    """Their log ratios are the same at all draws, which looked like weights without any error.

    Draws of chains have equal weights also where a client's ratio is NaN: `summary()` ended in an error of torch.
    """
    from hierfl.method import Clock, Reports
    from hierfl.methods.stages.kept import rounds_of

    work = rounds_of(done.method, done.program, "a test").work
    state = replace(done.progress.server.asking(), proposed=torch.tensor(False))
    asked = len(state.asked)
    clients = torch.arange(len(done.clients))
    ratios = torch.zeros(len(clients), asked, dtype=torch.float64)
    reports = Reports(ratios.index_fill(0, torch.tensor([3]), NOWHERE), clients)
    after = work.after_weighting(state, reports, Clock(59, 60))
    assert float(after.k_hat) == float("inf") and float(after.effective) == 0.0
    chained = replace(state, chained=torch.tensor(True))
    after = work.after_weighting(chained, reports, Clock(59, 60))
    assert float(after.k_hat) == float("inf")
    unknown = Reports(ratios.index_fill(0, torch.tensor([3]), torch.nan), clients)
    after = work.after_weighting(chained, unknown, Clock(59, 60))
    assert float(after.k_hat) == 0.0 and bool(after.final.log_weights.isfinite().all())
    with pytest.raises(hierfl.RowsNotSaved, match="client 'c03', as the server has it, is not"):
        kept_densities(replace(done, progress=replace(done.progress, server=after)))


def test_a_client_without_finite_expectations_sends_no_factor(done: hierfl.Fit) -> None:
    """The belief's own curvature in its place made the belief confirm itself, client by client."""
    seen = seen_in(done.program)
    work, batch = RowWork(*seen, None), hierfl.full_batch(done.federation.data)
    size, count = seen.hierarchy.reading.size, batch.num_clients
    own = tree_map(lambda v: v.expand(count, *v.shape), work.nothing)._replace(
        seen=torch.ones(count)
    )
    far = torch.zeros(size, dtype=torch.float64).index_fill(0, torch.tensor([2, 3]), -500.0)
    belief = {"loc": far, "covariance": 1e-6 * torch.eye(size, dtype=torch.float64)}
    sent = work.step(TwoStageWork(own, {}, {}), belief, batch).sent
    assert not bool(sent["factor"]["precision"].any()) and not bool(sent["factor"]["shift"].any())
    assert sent["raised"].tolist() == [size] * count


def test_a_factor_of_the_round_before_far_from_the_belief_is_left(done: hierfl.Fit) -> None:
    """Steps from a client's own mode, far out, do not come back; those from the belief arrive."""
    seen = seen_in(done.program)
    work, batch = RowWork(*seen, None), hierfl.full_batch(done.federation.data)
    count, server = batch.num_clients, done.progress.server
    belief = dict(vars(server.belief))
    own = tree_map(lambda v: v.expand(count, *v.shape), work.nothing)._replace(
        seen=torch.ones(count)
    )
    near = work.step(TwoStageWork(own, {}, {}), belief, batch).own
    eye = torch.eye(len(belief["loc"]), dtype=torch.float64).expand(count, -1, -1)
    spike = {"precision": 1e12 * eye, "shift": 1e12 * (belief["loc"] - 30.0).expand(count, -1)}
    back = work.step(TwoStageWork(own._replace(**spike), {}, {}), belief, batch).own
    assert torch.allclose(back.precision, near.precision, rtol=0.05, atol=0.05)
