"""Fits whose rounds do not end, and what they go over to."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, ClientError, Clock, full_batch, methods
from hierfl.core.chains import Sampled
from hierfl.core.process import OutOfTime, Watch, double_precision, watched, working
from hierfl.data.batch import in_double
from hierfl.engine.chunks import NotFinite
from hierfl.engine.federation import federate
from hierfl.engine.rounds import Progress
from hierfl.methods.stages.joint import Joint
from hierfl.methods.stages.mixing_chains import ChainCoordinates
from hierfl.methods.stages.state import GATHER
from hierfl.methods.stages.two_stage import seen_in, server_rounds
from hierfl.posterior.draws import posterior_draws
from hierfl.program.handlers import unchecked
from hierfl.program.sites import Model
from hierfl.runs import ended
from hierfl.runs.ended import (
    LONGEST,
    MANY_TIMES,
    STEPS,
    TIRED,
    WITH_WEIGHTS,
    Fallback,
    why_tired,
)
from hierfl.runs.one_run import _next, fallback_of
from hierfl.summaries.packed_rows import packed

N = torch.tensor([47.0, 148, 119, 810, 211, 196, 148, 215, 207, 97, 256, 360])
DEATHS = torch.tensor([0.0, 18, 8, 46, 8, 13, 9, 31, 14, 8, 29, 24])
NAMES = [f"c{i:02d}" for i in range(12)]


def hospitals() -> ClientData:
    """Return the counts of BUGS's Surgical."""
    return ClientData.from_arrays(NAMES, n=N, r=DEATHS)


def surgical(batch: ClientBatch) -> None:
    """Declare BUGS's Surgical."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    s = pyro.sample("sigma", dist.HalfCauchy(1.0))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(mu, s))
        with batch.data():
            pyro.sample("r", dist.Binomial(batch.n, logits=b), obs=batch.r)


@cache
def by_chains() -> hierfl.Fit:
    return hierfl.fit(surgical, hospitals(), seed=0, time_limit=1e-3, progress=False)


@pytest.mark.slow
def test_chains_have_the_posterior_of_the_rounds() -> None:
    assert by_chains().method.name == "two_stage"
    by_rounds = hierfl.fit(surgical, hospitals(), seed=0)
    drawn = [posterior_draws(fit, draws=4000) for fit in (by_rounds, by_chains())]
    for site in ("mu", "sigma", "b"):
        one, other = ({**of.shared, **of.own}[site].double() for of in drawn)
        assert ((one.mean(0) - other.mean(0)).abs() < 0.12 * one.std(0)).all(), site
        assert ((one.std(0) / other.std(0)).log().abs() < 0.12).all(), site
    words = str(by_chains().summary())
    assert "64 chains on all clients' rows, since the rounds took" in " ".join(words.split())
    assert "Trustworthy" in words


def test_chains_that_have_not_mixed_ask_for_no_draws() -> None:
    fit = by_chains()
    *_, last = fit.progress.history
    apart = replace(fit.progress, history=({**last, "r_hat": 1.4, "effective": 60.0},))
    words = " ".join(str(replace(fit, progress=apart).summary(draws=50).verdict).split())
    assert words.count("have not mixed") == 1 and "more draws" not in words
    assert words.startswith("Not trustworthy.")


def vague(batch: ClientBatch) -> None:
    """Declare Surgical with the priors of the BUGS book."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    s = pyro.sample("sigmasq", dist.InverseGamma(0.001, 0.001)).sqrt()
    with batch.clients():
        b = pyro.sample("b", dist.Normal(mu, s))
        with batch.data():
            pyro.sample("r", dist.Binomial(batch.n, logits=b), obs=batch.r)


def test_vague_priors_of_bugs_end() -> None:
    fit = hierfl.fit(vague, hospitals(), seed=0, progress=False, time_limit=1e-3)
    mu = posterior_draws(fit, draws=4000).shared["mu"]
    assert abs(float(mu.mean()) + 2.55) < 0.03  # NumPyro's NUTS: -2.55, sd 0.15
    assert abs(float(mu.std()) - 0.15) < 0.03


HITS = torch.tensor([18.0, 14, 12, 10, 10, 7])


def batters(batch: ClientBatch) -> None:
    """Declare Pyro's baseball, partially pooled: rates that are not Normal."""
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with batch.clients():
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1.0 - m) * kappa))
        with batch.data():
            pyro.sample("hits", dist.Binomial(45, phi), obs=batch.hits)


@pytest.mark.slow
def test_rates_of_a_beta_prior_have_the_moments_of_a_grid() -> None:
    fit = hierfl.fit(batters, ClientData.from_arrays(NAMES[:6], hits=HITS), seed=0)
    drawn = posterior_draws(fit, draws=4000)
    m = torch.linspace(0.005, 0.995, 200, dtype=torch.float64)[:, None, None]
    log_kappa = torch.linspace(0.01, 12.0, 250, dtype=torch.float64)[:, None]
    kappa = log_kappa.exp()
    rows = dist.BetaBinomial(m * kappa, (1.0 - m) * kappa, 45).log_prob(HITS.double()).sum(-1)
    weights = (rows - 1.5 * log_kappa[:, 0]).flatten().softmax(0).view(200, 250)
    of_phi = (HITS[0] + m[..., 0] * kappa[:, 0]) / (45.0 + kappa[:, 0])
    for value, at in ((drawn.shared["m"], m[..., 0]), (drawn.shared["kappa"].log(), log_kappa.mT)):
        mean = (weights * at).sum()
        sd = (weights * (at - mean).square()).sum().sqrt()
        assert abs(float(value.mean() - mean)) < 0.1 * sd
        assert abs(float(value.std() / sd) - 1.0) < 0.1
    first = drawn.own["phi"][:, 0].double()
    assert abs(float(first.mean() - (weights * of_phi).sum())) < 0.1 * float(first.std())


T = torch.tensor([11.0, 11, 17, 22, 9, 6, 5, 14, 9, 7, 22, 51])
Y = torch.tensor([5.0, 2, 0, 0, 2, 0, 0, 0, 0, 1, 0, 0])


def hearts(batch: ClientBatch) -> None:
    """Declare BUGS's Hearts, whose second derivatives are NaN."""
    th = pyro.sample("theta", dist.Beta(1.0, 1.0))
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with batch.clients(), batch.data():
        l1 = torch.log1p(-th) + dist.Binomial(batch.t, p).log_prob(batch.y)
        l0 = torch.log(th) + torch.where(batch.y == 0, 0.0, -torch.inf)
        pyro.factor("y", torch.where(batch.y == 0, torch.logaddexp(l0, l1), l1))


def test_a_program_without_second_derivatives_is_right() -> None:
    data = ClientData.from_arrays(NAMES, y=Y, t=T)
    fit = hierfl.fit(hearts, data, seed=0, progress=False)
    drawn = posterior_draws(fit, draws=4000).shared
    grid = torch.linspace(0.0025, 0.9975, 400, dtype=torch.float64)
    th, p = grid[:, None], grid[None]
    log_p = torch.zeros(400, 400, dtype=torch.float64)
    for y, t in zip(Y, T, strict=True):
        row = torch.log1p(-th) + dist.Binomial(t.double(), p).log_prob(y.double())
        log_p += torch.logaddexp(th.log(), row) if y == 0 else row
    weights = log_p.flatten().softmax(0).view(400, 400)
    for site, of in (("theta", weights.sum(1)), ("p", weights.sum(0))):
        mean = (of * grid).sum()
        sd = (of * (grid - mean).square()).sum().sqrt()
        assert abs(float(drawn[site].mean() - mean)) < 0.1 * sd
        assert abs(float(drawn[site].std() / sd) - 1.0) < 0.1
    assert "not finite" not in (verdict := fit.summary().verdict) and verdict.startswith("Trust")


def test_rounds_in_a_cycle_do_not_gain() -> None:
    cycle = [{"stage": 0.0, "moved": moved, "changed": 0.3} for moved in (0.46, 0.28, 0.46) * 4]
    assert why_tired(cycle) == TIRED
    falling = [{"stage": 0.0, "moved": 0.6**i, "changed": 0.1} for i in range(12)]
    falling = [{**record, "changed": 0.0} for record in falling]
    assert why_tired(falling) is None
    assert "k-hat 0.93" in str(why_tired([{"stage": 2.0, "k_hat": 0.93, "effective": 500.0}]))
    assert why_tired([{"stage": 2.0, "k_hat": 0.3, "effective": 500.0}]) is None


def test_a_watch_says_how_far_a_loop_is_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 4))
    monkeypatch.setattr("hierfl.core.process.time.perf_counter", lambda: float(next(now)))
    said: list[str] = []
    watch = Watch(said.append, 80.0)
    with watched(watch), pytest.raises(OutOfTime):
        for i in range(1000):
            working(f"step {i}")
    assert said and all("s so far" in line for line in said)
    working("no watch")


def test_a_small_step_that_loses_the_posterior_ends_where_chains_can() -> None:
    """Over nodes, without chains, it goes on."""
    program = federate(methods.two_stage(surgical), hospitals()).program
    rounds = server_rounds(program, 100, None)
    state, work = rounds.begin(), rounds.work
    lost = replace(state, factors=replace(state.factors, shift=state.factors.shift * torch.nan))
    with watched(Watch(has_faster=math.isinf)), torch.no_grad():
        assert work.with_scouts(state, Clock(0, 9), rough=True).sampled
        with pytest.raises(OutOfTime, match="small steps have lost the posterior"):
            work.with_scouts(lost, Clock(0, 9), rough=True)


def test_a_time_limit_has_to_be_positive() -> None:
    with pytest.raises(ValueError, match="time_limit is 0"):
        hierfl.fit(surgical, hospitals(), time_limit=0.0)


@pytest.mark.slow
def test_a_fit_that_chains_ended_is_saved_loaded_and_goes_on(tmp_path: Path) -> None:
    fit = by_chains()
    fit.save(tmp_path / "fit")
    loaded = hierfl.load(tmp_path / "fit", model=surgical, data=hospitals())
    one, other = (posterior_draws(of, draws=200).own["b"] for of in (fit, loaded))
    assert torch.equal(one, other)
    without = fit.without("c11")
    refit = hierfl.fit(surgical, hospitals().select(NAMES[:11]), seed=0)
    one, other = (posterior_draws(of, draws=4000).shared["mu"] for of in (without, refit))
    assert abs(float(one.mean() - other.mean())) < 0.15 * float(other.std())
    new = ClientData.from_arrays(["new"], n=N[:1], r=DEATHS[1:2])
    assert fit.personalize(new).clients == ("new",)


def about(shift_of: Callable[..., Any], batch: ClientBatch) -> None:
    """Declare Gaussian rows, whose sums suffice, about shifts of clients."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with batch.clients():
        shift = pyro.sample("shift", shift_of(mu, spread))
        with batch.data():
            pyro.sample("y", dist.Normal(shift, noise), obs=batch.y)


heavy, light = partial(about, partial(dist.StudentT, 4.0)), partial(about, dist.Normal)


def test_chains_may_end_rounds_that_the_server_plays_by_itself() -> None:
    """Its own chains of clients' many mixing numbers may be slower. Exact integrals need none."""
    data = ClientData.from_arrays([name for name in NAMES for _ in range(4)], y=torch.randn(48))
    for model, goes_over in ((heavy, True), (light, False)):
        method = methods.two_stage(model)
        made = federate(method, data)
        for limit in (None, 5.0):
            call: Any = SimpleNamespace(rounds=None, time_limit=limit, line=None)
            fallback = fallback_of(method, made, call, chosen=True)
            assert (fallback is not None) == goes_over


@pytest.mark.slow
def test_chains_by_sums_are_those_by_rows() -> None:
    """Where local sites are not Normal, Gaussian rows are read once, and chains take their sums."""
    g = torch.Generator().manual_seed(0)
    shift = 2.0 * torch.randn(12, generator=g).repeat_interleave(4)
    data = ClientData.from_arrays(
        [name for name in NAMES for _ in range(4)], y=shift + torch.randn(48, generator=g)
    )
    fit = hierfl.fit(heavy, data, seed=0, progress=False)
    assert "local sites are not Normal" in str(fit.progress.ended)
    seen, chains = seen_in(fit.program), Fallback(fit.federation, None).chains
    rows = packed(seen.score, in_double(full_batch(data, data.by_name, seed=0)))
    v = torch.randn(12, 5, len(seen.score.start), generator=g, dtype=torch.float64)
    by_sums, by_rows = chains.whole.values(v), rows.values(v)
    apart = by_sums - by_rows  # but for a constant of each client
    torch.testing.assert_close(apart, apart[:, :1].expand_as(apart), rtol=0.0, atol=1e-9)


def test_rounds_whose_tails_rest_on_few_draws_go_over() -> None:
    """The verdict would ask for more draws; chains have them where they take little."""
    fit = hierfl.fit(methods.two_stage(surgical), hospitals(), seed=0, progress=False)
    fallback, where = Fallback(fit.federation, None), fit.progress
    final = where.server.final
    equal = torch.zeros_like(final.log_weights).log_softmax(0)
    few = torch.where(torch.arange(len(equal)) < 50, 0.0, -30.0).to(equal).log_softmax(0)
    for weights, ends in ((equal, False), (few, True)):
        weighted = replace(final, log_weights=weights)
        server = replace(where.server, final=weighted, k_hat=torch.tensor(0.0))
        why = fallback.why_over(replace(where, server=server))
        assert ("tails rest on few draws" in str(why)) == ends, why


def rates(batch: ClientBatch) -> None:
    """Declare a rate of each hospital, which is not Normal."""
    shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
    with batch.clients():
        rate = pyro.sample("rate", dist.Gamma(shape, 10.0))
        with batch.data():
            pyro.sample("r", dist.Poisson(batch.n * rate), obs=batch.r)


def test_chains_are_first_where_rounds_would_read_rows_as_often() -> None:
    fallback: Any = Fallback(federate(methods.two_stage(rates), hospitals(), seed=0), None)
    fallback.chains = SimpleNamespace(seconds=100.0)
    assert fallback.why_at_once() == "local sites are not Normal, so rounds need chains too"
    fallback.chains.seconds = 2.0 * LONGEST
    assert fallback.why_at_once() is None


def test_rounds_that_took_the_work_of_chains_often_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "MANY_OTHERS", 0)
    fallback, where = Fallback(by_chains().federation, None), by_chains().progress
    record: dict[str, Any] = {"stage": GATHER, "moved": 9.0}
    work = fallback.chains.seconds / (3 * STEPS)
    for factor, ends in ((1.0, False), (MANY_TIMES + 1.0, True)):
        fallback.chains.factor_seconds = factor * work
        # three rounds are taken at least, so that the first says what they will take
        for count, words in ((1, "1 round was not enough"), (3, "3 rounds were not enough")):
            why = fallback.why_over(replace(where, round=count, history=(record,) * count))
            assert (words in str(why)) == ends, why


@pytest.mark.parametrize(
    ("moved", "k_hat", "share", "goes_on"),
    [
        ((0.5, 0.2), 0.0, 0.9, True),  # final in a round
        ((0.5, 0.2), 0.0, 1.1, False),  # rounds left take more than chains
        ((0.5, 0.45), 0.0, 0.9, False),  # nor soon, at this rate
        ((0.5, 0.2), 1.2, 0.9, False),  # draws were weighted in vain
        ((None, 0.2), 0.0, 0.9, False),
    ],
)
def test_rounds_that_are_about_to_end_go_on(
    moved: tuple[float, ...], k_hat: float, share: float, goes_on: bool
) -> None:
    fallback, where = Fallback(by_chains().federation, None), by_chains().progress
    fallback.chains.factor_seconds = share * fallback.chains.seconds / (WITH_WEIGHTS * STEPS)
    record: dict[str, Any] = {"stage": GATHER, "changed": 0.0, "k_hat": k_hat}
    history = tuple({**record, "moved": of} if of else {"stage": GATHER} for of in moved)
    why = fallback.why_over(replace(where, round=1000, history=history))
    assert (why is None) == goes_on, why


def non_centered(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        e = pyro.sample("e", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("r", dist.Binomial(batch.n, logits=mu + tau * e), obs=batch.r)


@pytest.mark.parametrize(("model", "has_plain"), [(surgical, False), (non_centered, True)])
def test_chains_have_the_coordinates_of_a_non_centered_program(
    model: Model, has_plain: bool
) -> None:
    method = hierfl.methods.two_stage(model)
    chains = Fallback(federate(method, hospitals(), seed=0), None).chains
    chains._sum_over(0)
    size = chains.joint.size
    x = torch.randn(8, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with double_precision(), torch.no_grad(), unchecked():
        standard = chains._starts.alone(x[:, : chains.joint.shared])
        here = ChainCoordinates(chains.joint, standard, 0, 8, lambda usual, most: None)
        drawn = cast(Sampled, SimpleNamespace(draws=x))
        assert (chains._plain(here, drawn) is not None) == has_plain


@pytest.mark.parametrize(("columns", "count"), [(1, 64), (1000, 32)])
def test_fewer_chains_run_where_each_takes_its_time(columns: int, count: int) -> None:
    def decays(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(torch.stack([mu, mu]), 1.0).to_event(1))
            with batch.data():
                total = torch.exp(-a.exp()[..., :1] * batch.x).mean(-1) + a[..., 1]
                pyro.sample("y", dist.Normal(total, 1.0), obs=batch.y)

    x = torch.linspace(0.0, 1.0, columns).expand(len(NAMES), -1)
    data = ClientData.from_arrays(NAMES, x=x, y=torch.zeros(len(NAMES)))
    chains = Fallback(federate(methods.two_stage(decays), data, seed=0), None).chains
    assert chains.seconds > 0.0
    assert chains.count == count


def test_the_work_of_a_factor_is_counted() -> None:
    first, second = (Fallback(by_chains().federation, None).chains for _ in range(2))
    assert first.factor_seconds == second.factor_seconds > 0.0


def test_a_density_that_is_nowhere_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Joint, "_value", lambda self, x, *by: x.sum(1) * torch.nan)
    with pytest.raises(ValueError, match="not finite at any draw of the priors"):
        hierfl.fit(surgical, hospitals(), seed=0, time_limit=1e-3, progress=False)


def test_a_programs_mistake_is_raised_and_numbers_without_digits_are_not() -> None:
    """Chains would meet the mistake, too; a factor that is not finite they do without."""
    fallback, where = Fallback(by_chains().federation, None), by_chains().progress

    def failing(error: Exception) -> Iterator[Progress]:
        raise error
        yield where

    with pytest.raises(ClientError, match="no key"):
        _next(failing(ClientError("no key")), Watch(), where, fallback)
    with pytest.raises(NotFinite):
        _next(failing(NotFinite("NaN")), Watch(), where, None)
    assert _next(failing(NotFinite("NaN")), Watch(), where, fallback) == (where, "NaN")
