"""The loop over clients gives the same on every engine, store and chunk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl import ClientBatch, ClientData, Fit, Settings, full_batch, predict_from_prior
from hierfl.diagnostics.coherence import client_gradients
from hierfl.diagnostics.convergence import convergence
from hierfl.diagnostics.pac_bayes import pac_bayes
from hierfl.engine import client_store
from hierfl.engine.client_store import Stored
from hierfl.engine.federation import federate
from hierfl.guides import amortized, mean_field
from hierfl.methods import fedsvi, two_stage
from hierfl.posterior import client_loop, prediction
from hierfl.posterior.client_loop import each_client, each_draw
from hierfl.posterior.corrected import own_k_hat
from hierfl.posterior.labels import log_likelihoods
from hierfl.posterior.new_clients import expected_of_clients
from hierfl.posterior.snapshot import Restricted, Snapshot, restricted
from tests.programs import federation, fit, regression

ROUNDS = 40  # the fewest that `convergence` judges
ASKED: dict[str, Callable[[Fit], Tensor]] = {
    "draws": lambda f: f.draws(5).own["slope"],
    "predict": lambda f: f.predict(federation(), draws=5).mean,
    "replicate": lambda f: f.replicate(federation(), draws=3),
    "log_likelihoods": lambda f: log_likelihoods(f, f.draws(5))["y"],
    "predict_from_prior": lambda f: predict_from_prior(f, federation(), draws=5).mean,
    "expected_of_clients": lambda f: expected_of_clients(f, draws=5)["slope"],
    "pac_bayes": lambda f: torch.tensor(
        [pac_bayes(f, clip=(0.0, 9.0), draws=3).empirical_risk, pac_bayes(f, clip=(0.0, 9.0)).kl]
    ),
    "client_gradients": lambda f: client_gradients(f, draws=3),
    "convergence": lambda f: torch.from_numpy(
        convergence(f, draws=4, proposals=100).gradient["size"].to_numpy(copy=True)
    ),
    "own_k_hat": lambda f: torch.from_numpy(own_k_hat(f, points=2).to_numpy(copy=True)),
}


@pytest.fixture(scope="module")
def inside() -> Fit:
    return fit(fedsvi(regression, guide=mean_field), federation(), rounds=ROUNDS)


@pytest.fixture(params=[ROUNDS])
def outside(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """The same fit with its client states in a file."""
    monkeypatch.setattr(client_store, "IN_MEMORY", 0)
    method = fedsvi(regression, guide=mean_field)
    fitted = fit(method, federation(), rounds=request.param, checkpoint=tmp_path)
    assert isinstance(fitted.progress.table, Stored)
    return fitted


@pytest.mark.slow
def test_client_states_in_a_file_change_no_answer(inside: Fit, outside: Fit) -> None:
    for name, ask in ASKED.items():
        assert torch.equal(ask(inside), ask(outside)), name


@pytest.mark.slow
def test_engines_and_chunks_change_no_answer(inside: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = replace(
        inside, federation=replace(inside.federation, settings=Settings(engine="sequential"))
    )
    wanted = {name: ask(inside) for name, ask in ASKED.items()}
    for name, ask in ASKED.items():
        assert torch.allclose(ask(one_by_one), wanted[name], atol=1e-10), name
    monkeypatch.setattr(client_loop, "CLIENTS_AT_ONCE", 3)
    monkeypatch.setattr(client_loop, "CLIENT_DRAWS_AT_ONCE", 6)
    monkeypatch.setattr(client_loop, "MOST_CLIENT_DRAWS", 6)
    for name, ask in ASKED.items():
        assert torch.allclose(ask(inside), wanted[name], atol=1e-10), name


def curved(batch: ClientBatch) -> None:
    """Two scalars of a client, which no linear predictor combines."""
    with batch.clients():
        own = pyro.sample("own", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            loc = own[..., 0] * (batch.x * own[..., 1]).exp()
            pyro.sample("y", dist.Normal(loc, 1.0), obs=batch.y)


def test_candidates_that_read_rows_count_among_the_draws_carried_at_once() -> None:
    """4,000 draws of 30 clients of six rows took 3.5 GB; an exact factor has no candidates."""
    rows = ClientData.from_arrays(list("aabb"), x=torch.arange(4.0), y=torch.ones(4))
    loose = federate(two_stage(curved), rows).program
    count = client_loop.candidates_of(loose)
    wide = client_loop.wide_draws_at_once(100, loose)
    assert count > 1 and wide == client_loop.CLIENT_DRAW_ROWS_AT_ONCE // (100 * count)
    exact = federate(two_stage(regression), federation()).program
    assert client_loop.wide_draws_at_once(100, exact) is None


def test_a_restriction_is_a_snapshot_of_its_clients(inside: Fit) -> None:
    few = restricted(inside, federation().select([2, 0]))
    assert few.clients == ("east", "north")
    assert few.history.equals(inside.history)
    kept: list[Snapshot] = [inside, few]  # both satisfy the protocol: mypy checks this line
    assert all(s.program is inside.program for s in kept)
    own = client_gradients(few, draws=3)
    assert torch.allclose(own, client_gradients(inside, draws=3)[[2, 0]], atol=1e-12)


def test_each_client_gets_its_own_part_of_what_is_given(inside: Fit) -> None:
    number = {"at": torch.arange(4.0)}
    chunks = each_client(
        inside, lambda params, own, asked, given: given["at"] + own.counts[0], given=number
    )
    found = torch.cat([chunk.found for chunk in chunks])
    assert torch.equal(found, torch.arange(4.0) + torch.tensor([5.0, 3.0, 7.0, 1.0]))


def test_new_clients_start_from_the_state_of_a_new_client(inside: Fit) -> None:
    rows = federation((2, 6), seed=9)
    chunks = list(
        each_draw(
            inside,
            lambda params, own, asked: {"loc": params["slope.loc"], "x": own.x.sum()},
            draws=2,
            seed=0,
            rows=rows,
            new=True,
        )
    )
    start = inside.program.start()[1]["slope.loc"]
    for chunk in chunks:
        assert torch.equal(chunk.found["loc"], start.expand(2, 2, *start.shape))
        padded = chunk.asked.x.sum((1, 2))
        assert torch.allclose(chunk.found["x"], padded[:, None].expand(2, 2))


@pytest.mark.parametrize("outside", [2], indirect=True)
def test_the_states_of_a_restriction_are_read_where_they_are(outside: Fit) -> None:
    few: Restricted = restricted(outside, federation().select([1]))
    assert torch.isfinite(torch.tensor(pac_bayes(few, clip=(0.0, 9.0)).kl))


def test_predictions_copy_no_training_row_that_the_guide_does_not_read(
    inside: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, read = federation(), list[set[str]]()
    every = prediction.predict(inside, rows, draws=5)

    def watched(data: ClientData, *more: Any, **options: Any) -> ClientBatch:
        read.append(set(data.fields))
        return full_batch(data, *more, **options)

    monkeypatch.setattr(client_loop, "full_batch", watched)
    assert torch.equal(prediction.predict(inside, rows, draws=5).mean, every.mean)
    assert read == [set(rows.fields), {"visits"}]  # the last field, without its values
    # with all of them it is the same
    monkeypatch.setattr(prediction, "restricted", lambda fit, rows, **_: restricted(fit, rows))
    assert torch.equal(prediction.predict(inside, rows, draws=5).mean, every.mean)
    assert read[-1] == set(rows.fields)


def test_rows_that_an_amortized_guide_reads_are_copied() -> None:
    fitted = fit(fedsvi(regression, guide=amortized), federation(), rounds=2)
    assert fitted.program.reads.guide
    few = restricted(fitted, federation(), fields=fitted.program.reads.guide)
    assert set(few.federation.data.fields) == set(fitted.program.reads.guide)
    first, second = (fitted.predict(federation(), draws=3).mean for _ in range(2))
    assert torch.equal(first, second)


def test_a_guide_that_chooses_by_all_rows_has_them() -> None:
    """Of `two_stage` it gets to know what it reads after the program was read."""
    fitted = fit(two_stage(regression), federation(), rounds=12)
    assert fitted.program.reads_all_rows and not fitted.program.reads.guide
    drawn, site = fitted.draws(20, seed=1), fitted.program.observed_site(None)
    every = prediction.predict_at(fitted, drawn, federation(), site=site)
    assert torch.allclose(fitted.predict(federation(), draws=20, seed=1).mean, every.mean)
