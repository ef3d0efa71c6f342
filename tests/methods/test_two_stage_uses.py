"""What is done with a two_stage fit: compiling it, skipping clients, leaving rows out, personalizing, comparing."""

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, Clock, Fit
from hierfl.diagnostics import loo
from hierfl.engine.chunks import client_round
from hierfl.engine.client_store import taken
from hierfl.method import Reports
from hierfl.methods.stages.checks import warn_of
from hierfl.program.sites import Model
from tests.programs import exact, federation, fit, same, slopes, three
from tests.programs import means as exact_means
from tests.summaries import programs
from tests.summaries.programs import people

two_stage = hierfl.methods.two_stage
COUNTS = (5, 3, 7, 2)


@cache
def gaussian() -> Fit:
    """Return a fit whose factors are exact: all variances are known."""
    return fit(two_stage(slopes, draws=4000), federation(COUNTS))


def test_compiling_is_left_out_and_changes_nothing() -> None:
    """The graph of a client's factor takes minutes to trace, and inductor does not lower it."""
    method, data = two_stage(exact_means, draws=200), three()
    with pytest.warns(UserWarning, match="compile is True, and local steps of 'two_stage' cannot"):
        compiled = hierfl.fit(method, data, settings=hierfl.Settings(compile=True))
    same(compiled, hierfl.fit(method, data, settings=hierfl.Settings(compile=False)))


def test_draws_do_not_depend_on_the_order_of_clients() -> None:
    """Bit for bit: noise is of names, and the server goes through them sorted."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 2, generator=g), (torch.rand(60, generator=g) > 0.5).double()
    data = ClientData.from_arrays(list("abc") * 20, x=x, y=y)
    model = hierfl.models.regression("bernoulli", centered=True)
    one, other = (
        fit(two_stage(model, draws=200), of) for of in (data, data.select(["c", "a", "b"]))
    )
    there, here = one.draws(200), other.draws(200)
    assert all(torch.equal(value, here.shared[name]) for name, value in there.shared.items())
    order = [other.clients.index(name) for name in one.clients]
    assert all(torch.equal(v, here.own[name][:, order]) for name, v in there.own.items())


def of_fields(batch: ClientBatch) -> None:
    """A prior of the clients' own sites that reads a client field; the sites are not Normal."""
    mu, b = (pyro.sample(name, dist.Normal(0.0, 2.0)) for name in ("mu", "b"))
    with batch.clients():
        a = pyro.sample("a", dist.StudentT(5.0, mu + b * batch.z, 1.0))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=a), obs=batch.y)


def of_fields_normal(batch: ClientBatch) -> None:
    """As `of_fields`, with Normal sites."""
    mu, b = (pyro.sample(name, dist.Normal(0.0, 2.0)) for name in ("mu", "b"))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu + b * batch.z, 1.0))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=a), obs=batch.y)


@pytest.mark.parametrize(
    "model", [pytest.param(of_fields, marks=pytest.mark.slow), of_fields_normal]
)
def test_what_a_run_begins_with_does_not_depend_on_the_first_client(model: Model) -> None:
    """The first belief was at the fields of the client that was given first."""
    y, z = (torch.arange(60) % 7 < 3).double(), torch.tensor([0.3, -2.0, 1.1])
    data = ClientData.from_arrays(list("abc") * 20, y=y, client_fields={"z": z})
    one, other = (
        fit(two_stage(model, draws=200), of) for of in (data, data.select(["c", "a", "b"]))
    )
    for name, value in one.draws(200).shared.items():
        torch.testing.assert_close(other.draws(200).shared[name], value, rtol=1e-9, atol=1e-9)


def precise(batch: ClientBatch) -> None:
    """Rows whose precision overflows where `noise` is 1e-170."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a, batch.noise), obs=batch.y)


def noises(*, bad: bool) -> ClientData:
    noise = torch.full((13,), 0.7)
    noise[9:] = 1e-170 if bad else 0.7  # of the last client: the program is read on the first ones
    return people((3, 1, 5, 4)).with_fields(noise=noise)


def test_a_client_that_always_fails_is_left_out_and_the_rest_is_the_fit_of_the_others() -> None:
    method = two_stage(precise, draws=2000)
    with pytest.warns(UserWarning, match=r"1 clients failed.*the rows of 1 do not count"):
        found = fit(method, noises(bad=True), on_client_error="skip")
    others = fit(method, noises(bad=True).select([0, 1, 2]))
    assert len(found.history) == len(others.history) < 6
    one, other = (f.draws(2000).shared["mu"] for f in (found, others))
    assert abs(one.mean() - other.mean()) < 0.08 * other.std()
    assert 0.94 < one.std() / other.std() < 1.06
    assert "were left out: c3 (" in found.summary().verdict
    assert found.summary().trustworthy is False


@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_a_client_that_fails_when_draws_are_weighted_is_not_waited_for() -> None:
    found = fit(two_stage(programs.binary, draws=2000), people((5, 3, 7)), rounds=2)
    run, state = found.federation, found.progress.server
    message, ids = run.server.down(state, Clock(2, 60)), torch.tensor([0, 2])
    own = taken(found.progress.table, ids)
    up, _ = client_round(run, run.client.phases, message, own, ids, 2)
    means = {"log_ratios": Reports(up["log_ratios"].value, ids)}
    assert not run.server.finished(run.server.update(state, means, Clock(2, 60, 2))), "it waits"
    said = (
        "1 clients failed when the draws were weighted.*rows of 0 do not count, and those of 1 only"
    )
    with pytest.warns(UserWarning, match=said):
        done = run.server.update(state, means, Clock(2, 60, 2, left_out=(1,)))
    assert run.server.finished(done)
    later = {"log_ratios": Reports(up["log_ratios"].value[:1], torch.tensor([1]))}
    waiting = run.server.update(state, means, Clock(2, 60, 2))
    assert run.server.finished(run.server.update(waiting, later, Clock(3, 60, 1))), "all answered"


@pytest.mark.slow
def test_a_run_that_ends_while_weighing_is_not_done() -> None:
    """Draws that only some clients have weighted are no posterior, and are said to be none."""
    method, data = two_stage(programs.binary, draws=200), people((5, 3, 7))
    rounds = len(fit(method, data, cohort=2, seed=1).history)
    with pytest.warns(UserWarning, match=r"ended while weighting \(1 clients have not"):
        found = fit(method, data, cohort=2, seed=1, rounds=rounds - 1)
    assert found.summary().trustworthy is False


def test_the_history_has_the_error_of_points_that_are_samples() -> None:
    found = fit(two_stage(programs.three_effects, draws=200), people((3, 4)))
    last = found.history.iloc[-1]
    assert 0.0 < last["inner_error"] < 0.1
    assert last["inner_error"] == pytest.approx((2 * last["inner_variance"]) ** 0.5)
    assert "inner_error" not in gaussian().history, "of Gauss-Hermite nodes there is none"


def test_weights_that_are_unsure_are_said() -> None:
    state = replace(gaussian().progress.server, inner_error=torch.tensor(2.0))
    with pytest.warns(UserWarning, match="uncertain by a factor of 7.4"):
        warn_of(state, Clock(3, 60))


def test_a_candidate_whose_rate_overflows_is_never_drawn() -> None:
    """Its density is NaN: of two clients the draws were those of the factor, 1.6 times too wide."""
    fit = hierfl.fit(hierfl.methods.two_stage(programs.counts, draws=400), people(), progress=False)
    table: Any = fit.progress.table
    size = table.wide_shift.shape[1]
    spike = 1e20 * torch.eye(size, dtype=torch.float64).expand_as(table.wide_precision)
    far = table._replace(wide_precision=spike, wide_shift=1e23 * torch.ones_like(table.wide_shift))
    spoiled = replace(fit, progress=replace(fit.progress, table=far))
    sds = [of.posterior(400)["posterior"]["a"].std(("chain", "draw")) for of in (fit, spoiled)]
    assert bool((abs(sds[1] / sds[0] - 1.0) < 0.25).all())


@pytest.mark.parametrize("by", ["row", "client"])
def test_leave_one_out_is_the_ratio_of_evidences(by: Any) -> None:
    data = federation(COUNTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        psis, plain = (loo(gaussian(), by, draws=8000, correct=how).table for how in ("psis", None))
    whole = exact(data, "slopes").log_evidence
    if by == "client":
        rest = [data.select([n for n in data.names if n != name]) for name in data.names]
    else:
        rest = [without(data, i) for i in range(data.num_rows)]
    elpd = np.array([whole - exact(d, "slopes").log_evidence for d in rest])
    for table in (psis, plain):
        good = (table["k_hat"] < 0.6).to_numpy()
        off, error = np.abs(table["elpd"].to_numpy() - elpd)[good], table["mc_se"].to_numpy()[good]
        assert good.sum() >= 0.5 * len(elpd)
        assert np.median(off) < 0.03 and (off < 0.03 + 4.0 * error).all()


def without(data: ClientData, row: int) -> ClientData:
    kept = torch.arange(data.num_rows) != row
    x, y = (data.fields[name][kept] for name in ("x", "y"))
    return ClientData.from_arrays(data.row_client[kept], names=data.names, x=x, y=y)


def test_weights_are_not_taken_twice() -> None:
    with pytest.raises(ValueError, match="two_stage has weighted its draws already"):
        gaussian().posterior(100, correct="psis")
    with pytest.raises(ValueError, match="two_stage has resampled its draws"):
        hierfl.diagnostics.pac_bayes(gaussian())


@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_a_run_without_weights_is_refused() -> None:
    cut = fit(two_stage(programs.binary, draws=200), people((5, 3, 7)), rounds=1)
    with pytest.raises(ValueError, match="the rounds ended before two_stage had weighted its"):
        loo(cut, "client")


def test_a_fitted_client_personalized_from_its_own_rows_has_the_same_posterior() -> None:
    found, data = gaussian(), federation(COUNTS)
    one = found.draws(4000).own["b"]
    other = found.personalize(data, rounds=1).draws(4000, seed=1).own["b"]
    assert ((one.mean(0) - other.mean(0)).abs() < 0.08 * one.std(0)).all()
    assert torch.allclose(one.std(0), other.std(0), rtol=0.06)
    known = exact(data, "slopes")
    sd = known.own_cov.diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((other.mean(0).view_as(sd) - known.own_loc).abs() < 0.08 * sd).all()


def test_the_report_and_the_draws_say_how_they_were_made(tmp_path: Path) -> None:
    page = Path(gaussian().report(tmp_path / "r.html", draws=60).path).read_text()
    assert "none is fitted: draws of the global parameters are weighted" in page
    assert "from_factor" not in page and "conditional" not in page
    draws = gaussian().posterior(50)
    about = getattr(draws, "posterior", draws).attrs or draws.attrs
    assert "weighted and resampled by the method itself" in about["approximation"]
    assert about["k_hat"] == gaussian().history["k_hat"].iloc[-1]
