"""`pyro.factor` as a likelihood: inside the data plate, or of all of a client's rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, full_batch, guides
from hierfl.program.sites import Model
from tests.programs import federation, fit, read


def sampled(batch: ClientBatch) -> None:
    s = pyro.sample("s", dist.Normal(0.0, 1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(s, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(w, 0.7), obs=batch.y)


def factored(batch: ClientBatch) -> None:
    """The same density, written as a factor."""
    s = pyro.sample("s", dist.Normal(0.0, 1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(s, 1.0))
        with batch.data():
            pyro.factor("y", dist.Normal(w, 0.7).log_prob(batch.y))


def pair(size: int | None, engine: Any) -> list[hierfl.Fit]:
    """Fit both models in the same way."""
    return [
        fit(
            hierfl.methods.fedsvi(model, guides.mean_field, batch_size=size),
            federation(),
            rounds=2,
            engine=engine,
        )
        for model in (sampled, factored)
    ]


@pytest.mark.parametrize(
    ("size", "engine"), [(None, "sequential"), (None, "pooled"), (2, "vectorized")]
)
def test_a_factor_of_rows_is_an_observed_site(size: int | None, engine: str) -> None:
    """Padded rows are masked, and mini-batches are scaled up: clients have 5, 3, 7 and 1 rows."""
    by_site, by_factor = pair(size, engine)
    assert by_factor.history["elbo"].tolist() == pytest.approx(
        by_site.history["elbo"].tolist(), rel=1e-9
    )


def test_it_is_a_term_of_the_likelihood_not_of_the_prior() -> None:
    data = federation()
    programs = [read(model, guides.mean_field, data) for model in (sampled, factored)]
    batch = full_batch(data, torch.tensor([0, 2, 3]))
    terms = []
    for program in programs:
        shared, own = program.start()
        own = {k: v.expand(3, *v.shape[1:]) for k, v in own.items()}
        terms.append(program.terms({**shared, **own}, batch))
        assert program.mean_loss({**shared, **own}, batch).abs() > 0.0
    for a, b in zip(*terms, strict=True):
        assert torch.allclose(a, b)


def test_log_likelihoods_of_rows_are_those_of_the_site() -> None:
    groups = [
        f.posterior(20, log_likelihood=True, seed=1)["log_likelihood"]["y"]
        for f in pair(None, "vectorized")
    ]
    assert groups[0].dims == groups[1].dims == ("chain", "draw", "row")
    assert np.allclose(np.asarray(groups[0]), np.asarray(groups[1]))


@pytest.mark.parametrize(
    "ask",
    [
        lambda f: f.predict(federation()),
        lambda f: f.predict(federation(), site="y"),
        lambda f: f.posterior_predictive(5),
        lambda f: f.prior(5, predictive=True),
        lambda f: hierfl.predict_from_prior(f, federation()),
        lambda f: fit(f.method, federation(), rounds=1, validation=federation(), eval_every=1),
    ],
)
def test_predictions_of_a_factor_are_refused_by_name(ask: Callable[[hierfl.Fit], object]) -> None:
    fitted = pair(None, "vectorized")[1]
    with pytest.raises(
        ValueError, match=r"'y' is a pyro\.factor.*pyro\.sample\(name, distribution"
    ):
        ask(fitted)


def test_the_report_of_a_factor_model(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    pair(None, "vectorized")[1].report(page, draws=60)
    text = page.read_text(encoding="utf-8")
    assert len(text) > 10_000 and "Written by hierfl" in text


def test_what_a_model_masks_has_no_log_likelihood() -> None:
    def masked(batch: ClientBatch) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with batch.data(), pyro.poutine.mask(mask=batch.ill > 0.5):
                pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)

    data = federation()
    fitted = fit(hierfl.methods.fedsvi(masked, guides.mean_field), data, rounds=1)
    rows = np.asarray(fitted.posterior(5, log_likelihood=True)["log_likelihood"]["y"])[0]
    counted = data.fields["ill"].numpy() > 0.5
    assert (rows[:, counted] != 0.0).all()
    assert (rows[:, ~counted] == 0.0).all()


# ------------------------------------------------------------------ models that need it
def survival() -> ClientData:
    """Times to an event, and whether it was seen (1) or the time is where the watching ended
    (0).
    """
    g = torch.Generator().manual_seed(0)
    time = 0.1 + torch.rand(12, generator=g)
    seen = (torch.rand(12, generator=g) < 0.6).to(time.dtype)
    return ClientData.from_arrays(torch.tensor([0] * 7 + [1] * 5), time=time, seen=seen)


def censored(batch: ClientBatch) -> None:
    """Weibull times: the density where the event was seen, the survival function where it was
    not.
    """
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    with batch.clients():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with batch.data():
            log_survival = -((batch.time / scale) ** shape)
            log_hazard = shape.log() - scale.log() + (shape - 1.0) * (batch.time / scale).log()
            pyro.factor("event", batch.seen * log_hazard + log_survival)


def mixed(batch: ClientBatch) -> None:
    """Each client is of one of two kinds, summed out: log sum_k p(k) prod_i p(y_i | k)."""
    at = pyro.sample("at", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    with batch.clients():
        rows = dist.Normal(at, 1.0).log_prob(batch.y[..., None])
        of_kind = (rows * batch.mask()[..., None]).sum(-2, keepdim=True)
        pyro.factor("kind", (of_kind + torch.tensor([0.3, 0.7]).log()).logsumexp(-1))


def test_censored_times() -> None:
    data = survival()
    fitted = fit(hierfl.methods.fedsvi(censored, guides.mean_field), data, rounds=3)
    values = {"shape": torch.tensor(1.4), "scale": torch.full((1, 1), 0.8)}
    program = fitted.program
    rows = program.log_likelihoods(values, full_batch(data, torch.tensor([0])), {})["event"][0]
    time, seen = data.fields["time"][:7], data.fields["seen"][:7]
    weibull = dist.Weibull(0.8, 1.4)
    exact = torch.where(seen > 0.5, weibull.log_prob(time), (1.0 - weibull.cdf(time)).log())
    assert torch.allclose(rows, exact)
    assert fitted.history["elbo"].iloc[-1] > fitted.history["elbo"].iloc[0]


def test_a_mixture_of_kinds_of_clients() -> None:
    data = federation()
    program = read(mixed, guides.delta, data)
    assert program.factors == {"kind": False}
    at = torch.tensor([-0.5, 0.8])
    batch = full_batch(data, torch.arange(4))
    log = program.log_likelihoods({"at": at}, batch, {})["kind"][:, 0]
    for k, rows in enumerate(data.fields["y"].split(data.counts.tolist())):
        kinds = [dist.Normal(m, 1.0).log_prob(rows).sum() for m in at]
        exact = torch.logaddexp(kinds[0] + np.log(0.3), kinds[1] + np.log(0.7))
        assert float(log[k]) == pytest.approx(float(exact))
    run = fit(hierfl.methods.fedsvi(mixed), data, rounds=1)
    assert run.posterior(4, log_likelihood=True)["log_likelihood"]["kind"].dims[-1] == "client"


def test_a_factor_of_all_rows_takes_no_mini_batches() -> None:
    with pytest.raises(
        ValueError, match=r"factor .kind. has one value per client.*batch_size=None"
    ):
        fit(hierfl.methods.fedsvi(mixed, batch_size=2), federation(), rounds=1)


def test_a_factor_of_all_rows_takes_no_halves_of_them() -> None:
    def of_params(batch: ClientBatch) -> None:
        at = pyro.param("at", torch.tensor([-1.0, 1.0]))
        with batch.clients():
            rows = dist.Normal(at, 1.0).log_prob(batch.y[..., None])
            of_kind = (rows * batch.mask()[..., None]).sum(-2, keepdim=True)
            pyro.factor("kind", of_kind.logsumexp(-1))

    options: dict[str, Any] = {"head": "none", "batch_size": None}
    fit(hierfl.methods.fedrecon(of_params, split=False, **options), federation(), rounds=1)
    with pytest.raises(ValueError, match=r"half of its rows do not give it: set split=False"):
        fit(hierfl.methods.fedrecon(of_params, **options), federation(), rounds=1)


def prior_factor(batch: ClientBatch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("tails", -0.1 * (w - batch.height) ** 4)
        with batch.data():
            pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("model", "factors"), [(sampled, {}), (prior_factor, {}), (factored, {"y": True})]
)
def test_which_factors_are_of_the_likelihood(model: Model, factors: dict[str, bool]) -> None:
    assert read(model, guides.mean_field, federation()).factors == factors


def test_two_stage_counts_factors_that_read_no_rows() -> None:
    """Normal(w; m, 1) exp(-2 (w - 1)^2) and rows' Normal(y; w, 1) are Gaussian in m and w."""
    y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)) + 2.0

    def model(batch: ClientBatch) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with batch.clients():
            w = pyro.sample("w", dist.Normal(m, 1.0))
            pyro.factor("near", -2.0 * (w - batch.center).square())
            with batch.data():
                pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)

    names = [f"c{k}" for k in range(8)]
    client, of_clients = np.repeat(np.arange(8), 4), {"center": np.ones(8, np.float32)}
    data = ClientData.from_arrays(client, names=names, client_fields=of_clients, y=y.flatten())
    fitted = hierfl.fit(hierfl.methods.two_stage(model), data)
    drawn = fitted.posterior(4000)["posterior"]["m"].to_numpy()
    precision = 1.0 + 8.0 * (1.0 - 1.0 / 9.0)  # of m, without w, whose own is 1 + 4 + 4
    mean = float((4.0 + y.sum(1)).sum()) / 9.0 / precision
    assert drawn.mean() == pytest.approx(mean, abs=0.03)
    assert drawn.std() == pytest.approx(precision**-0.5, rel=0.05)
