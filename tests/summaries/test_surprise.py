"""Clients whose factors conflict with all others': closed forms, calibration, and wrong ones that are found."""

import math
import warnings
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor

import hierfl
from hierfl import ClientBatch, models
from hierfl.diagnostics.checks_of_rounds import clients_of_rounds
from hierfl.diagnostics.verdict import of_history
from hierfl.engine.aggregate import said_of_conflicts
from hierfl.engine.federation import federate
from hierfl.method import Surprise
from hierfl.methods import two_stage
from hierfl.program.handlers import unchecked
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.reading import read_likelihood
from hierfl.summaries.sampling import Start, bounds_of, sample
from hierfl.summaries.seen_hierarchy import seen_hierarchy
from hierfl.summaries.surprise import Known, _mixture_tail, surprises
from hierfl.summaries.surrogate import Surrogate, prior_draws
from tests.programs import fit

CLIENTS, ROWS = 8, 6


def lines(batch: ClientBatch) -> None:
    """Varying slopes, with a known noise: a client's factor is exact."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, tau).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def schools(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    with batch.clients():
        effect = pyro.sample("effect", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(effect, batch.sigma), obs=batch.y)


def simulated(surrogate: Surrogate, seed: int) -> Factors:
    """Return the exact factors of clients that the model itself made."""
    g = torch.Generator().manual_seed(seed)
    mu, tau = torch.randn(2, generator=g), torch.randn((), generator=g).abs()
    w = mu + tau * torch.randn(CLIENTS, 2, generator=g)
    x = torch.randn(CLIENTS, ROWS, 2, generator=g)
    y = (x * w[:, None]).sum(-1) + torch.randn(CLIENTS, ROWS, generator=g)
    return Factors(x.mT @ x, (x.mT @ y[..., None])[..., 0], {})


def known(surrogate: Surrogate, factors: Factors, seed: int) -> Known:
    prior = prior_draws(surrogate.hierarchy, 0)
    bounds = bounds_of(surrogate, prior)
    start = Start(prior, torch.full((len(prior),), -math.log(len(prior))), bounds, True)
    found = sample(surrogate, factors, 600, start, final=True, seed=seed)
    return Known(surrogate, factors, found.draws, bounds, seed)


def surrogate_of_lines() -> Surrogate:
    who = torch.arange(CLIENTS).repeat_interleave(ROWS)
    x, y = torch.randn(len(who), 2), torch.randn(len(who))
    data = hierfl.ClientData.from_arrays(who, x=x, y=y)
    program = federate(two_stage(lines), data).program
    return Surrogate(seen_hierarchy(read_likelihood(program)))


# ------------------------------------------------------------------------------------- closed forms
def test_of_one_normal_it_is_the_chi_square_tail() -> None:
    g = torch.Generator().manual_seed(0)
    tril = torch.randn(4, 3, 3, generator=g)
    covariance = (tril @ tril.mT)[:1].expand(4, 3, 3)
    mean, share = torch.randn(1, 3, generator=g).expand(4, 3), torch.tensor([0.1, 0.2, 0.3, 0.4])
    e = 2.0 * torch.randn(3, generator=g)
    p, away = _mixture_tail(e, mean, covariance, share)
    off = e - mean[0]
    square = float(off @ torch.linalg.solve(covariance[0], off))
    assert p == pytest.approx(stats.chi2.sf(square, 3), rel=1e-9)
    assert away == pytest.approx(math.sqrt(square / 3))


def test_draws_with_wide_spreads_give_the_tail_its_weight() -> None:
    """A scale mixture of one number, where the tail is a sum of Normal tails."""
    sd, share = torch.tensor([0.5, 1.0, 4.0]), torch.tensor([0.6, 0.3, 0.1])
    p, _ = _mixture_tail(torch.tensor([5.0]), torch.zeros(3, 1), sd.square()[:, None, None], share)
    exact = sum(w * 2.0 * stats.norm.sf(5.0 / s) for w, s in zip(share, sd, strict=True))
    assert p == pytest.approx(float(exact), rel=1e-9)
    total = float((share * sd.square()).sum())
    assert p > 5.0 * stats.chi2.sf(25.0 / total, 1)  # what one Normal would say


# -------------------------------------------------------------------------------------- calibration
@pytest.mark.parametrize("sets", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_without_conflict_p_values_are_uniform(sets: int) -> None:
    """Data sets from the model itself; of some, one client is then moved to slopes of 30."""
    surrogate = surrogate_of_lines()
    found, alarms, smaller = [], 0, []
    with unchecked(), torch.no_grad():
        for seed in range(sets):
            factors = simulated(surrogate, seed)
            given = surprises(known(surrogate, factors, seed))
            found += given.p.tolist()
            alarms += bool((given.p * CLIENTS < 0.01).any())
            if seed % 10:
                continue
            wrong = Factors(factors.precision, factors.shift.clone(), {})
            wrong.shift[0] = 30.0 * factors.precision[0] @ torch.ones(2)
            smaller.append(float(surprises(known(surrogate, wrong, seed)).p[0]))
    assert stats.kstest(found, "uniform").pvalue > 0.01
    assert stats.binom.sf(sum(p < 0.1 for p in found) - 1, len(found), 0.1) > 0.001
    assert alarms <= 1 + sets // 30
    assert max(smaller) < 1e-6


def test_a_direction_of_which_rows_say_nothing_is_no_conflict() -> None:
    """Where a likelihood is not concave, its slope may be large where its curvature is nearly 0."""
    surrogate = surrogate_of_lines()
    with unchecked(), torch.no_grad():
        factors = simulated(surrogate, 0)
        factors.precision[0] = torch.diag(torch.tensor([4.0, 1e-4]))
        factors.shift[0] = torch.tensor([0.0, 0.3])  # 30 sds, by that curvature
        assert float(surprises(known(surrogate, factors, 0)).p[0]) > 0.05


# --------------------------------------------------------------------------------------- whole fits
def test_a_school_in_other_units_is_named_and_counted() -> None:
    data = hierfl.datasets.eight_schools()
    y = data.fields["y"].clone()
    y[0] *= 10.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        honest = fit(two_stage(schools, draws=500), data).history.iloc[-1]
    assert honest["compared"] == 8 and honest["conflicts"] == [] and honest["surprise"] > 0.2
    wrong = replace(data, fields={**data.fields, "y": y})
    with pytest.warns(
        UserWarning, match=r"client 'school A' conflicts with all others: .* 8 clients"
    ):
        fitted = fit(two_stage(schools, draws=500), wrong)
    (one,) = fitted.history["conflicts"].iloc[-1]
    assert one["client"] == "school A" and one["p"] < 1e-6 and one["away"] > 5.0
    assert fitted.history["clients"].iloc[-1] == 8  # it is counted
    verdict = of_history(fitted)
    assert (
        verdict is not None and "conflict with what all others predict: school A (" in verdict.words
    )
    (check,) = [one for one in clients_of_rounds(fitted) if "agree with the others" in one.question]
    assert check.verdict == "warning" and "1 of 8 clients" in check.answer


def test_three_clients_are_not_judged() -> None:
    names = ("a", "b", "c")
    far = Surprise(torch.tensor([0.0, 0.5, 0.5]), torch.tensor([9.0, 1.0, 1.0]))
    assert said_of_conflicts(far, names, torch.ones(3)) == {"compared": 0}
    silent = Surprise(torch.tensor([0.0, 0.5, torch.nan, 0.5]), torch.ones(4))
    assert said_of_conflicts(silent, (*names, "d"), torch.ones(4)) == {"compared": 0}
    few = Surprise(torch.zeros(4), torch.ones(4), least_rows=20)
    counts = torch.tensor([20, 19, 40, 40])
    assert said_of_conflicts(few, (*names, "d"), counts) == {"compared": 0}


def test_two_rare_events_are_no_conflict() -> None:
    """Where 0.2 are expected, two lie 4 sds out by a Normal, and happen to one of 60 clients."""

    def rare(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.clients():
            w = pyro.sample("w", dist.Normal(mu, 0.3))
            with batch.data():
                pyro.sample("y", dist.Poisson(w.exp()), obs=batch.y)

    y = torch.zeros(60)
    y[:2] = 1.0
    y[4:30:5] = 1.0
    data = hierfl.ClientData.from_arrays(torch.arange(60) // 2, y=y)
    assert fit(two_stage(rare, draws=100), data, rounds=None).history["compared"].iloc[-1] == 0


def test_kinds_of_clients_are_not_judged() -> None:
    """Which kind a client is of is one sum over all its rows, whose curvature is not the variance of eta."""

    def kinds(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.clients():
            w = pyro.sample("w", dist.Normal(mu, 0.3))
            late = pyro.sample("late", dist.Bernoulli(0.5))
            with batch.data():
                pyro.sample("y", dist.Poisson((w + late).exp()), obs=batch.y)

    y = torch.arange(24.0) % 3.0
    data = hierfl.ClientData.from_arrays(torch.arange(24) // 4, y=y)
    assert fit(two_stage(kinds, draws=100), data, rounds=None).history["compared"].iloc[-1] == 0


def test_many_clients_make_single_small_p_values_no_alarm() -> None:
    p = torch.linspace(0.0005, 1.0, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = said_of_conflicts(
            Surprise(p, torch.ones(100)), [str(k) for k in range(100)], torch.ones(100)
        )
    assert said["conflicts"] == [] and said["surprise"] == pytest.approx(0.05)


def flipped(data: hierfl.ClientData, names: list[str], by: Any) -> hierfl.ClientData:
    who = torch.repeat_interleave(torch.arange(data.num_clients), data.counts)
    these = torch.isin(who, data.index(names))
    y: Tensor = data.fields["y"]
    return replace(data, fields={**data.fields, "y": torch.where(these, by(y), y)})


@pytest.mark.slow
def test_real_data() -> None:
    """Radon in 85 counties and heart disease in four hospitals: honest ones raise no alarm, wrong ones are named."""
    from benchmarks.reference_models import radon_centered

    hospitals = models.regression("bernoulli", prior_scale=dist.HalfNormal(0.5), centered=True)
    radon, heart = hierfl.datasets.radon(), hierfl.datasets.heart_disease()
    cases: list[tuple[Any, hierfl.ClientData, list[str]]] = [
        (radon_centered, radon, []),
        (radon_centered, flipped(radon, ["ANOKA"], lambda y: -y), ["ANOKA"]),
        (hospitals, heart, []),
        (hospitals, flipped(heart, ["cleveland"], lambda y: 1 - y), ["cleveland"]),
    ]
    for model, data, wrong in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = hierfl.fit(
                two_stage(model), data, settings=hierfl.Settings(compile=False)
            ).history.iloc[-1]
        # of four hospitals the other large one conflicts with a wrong one too, a little less
        assert [one["client"] for one in history["conflicts"]][:1] == wrong
        assert history["compared"] == data.num_clients
