"""The result of `fit`: history, scores, early stopping, schedules, averages, predictions, posterior."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, Fit, guides, models
from hierfl.core import noise
from hierfl.core.trees import named_leaves
from hierfl.methods import fedsvi
from hierfl.optimizers import SGD, Adam
from tests.programs import federation, fit, regression
from tests.runs.fits import of_binary, two_rounds, with_features


def test_history_has_one_row_per_round() -> None:
    fitted = fit(fedsvi(regression), federation(), rounds=5, cohort=3)
    table = fitted.history
    assert table["round"].tolist() == [0, 1, 2, 3, 4]
    assert set(table["clients"]) == {3}
    assert table["elbo"].notna().all()
    message = sum(leaf.nbytes for leaf in named_leaves(fitted.message).values())
    assert set(table["bytes_down"]) == {3 * message}
    up = sum(leaf.nbytes for leaf in named_leaves(fitted.message["params"]).values())
    assert set(table["bytes_up"]) == {3 * (up + 8 + 2 * 8)}, (
        "the gradient, the ELBO, and a weight for each"
    )
    assert (table["seconds"] > 0).all()
    assert "validation_log_score" not in table


@pytest.mark.parametrize("cohort", [None, 2])
def test_the_logged_elbo_is_that_of_the_pooled_program(cohort: int | None) -> None:
    """The ELBO of a cohort is an unbiased estimate: its mean over all cohorts is the ELBO of all clients."""
    data = federation()
    if cohort is None:
        seeds = [0, 1]
    else:  # a seed for each cohort
        drawn = {tuple(sorted(noise.cohort(s, 0, 4, cohort).tolist())): s for s in range(60)}
        seeds = list(drawn.values())
    runs = [
        fit(fedsvi(regression, guides.delta), data, rounds=1, cohort=cohort, seed=s) for s in seeds
    ]
    found = {round(run.history["elbo"][0], 9) for run in runs}
    whole = fit(fedsvi(regression, guides.delta), data, rounds=1, engine="pooled").history["elbo"][
        0
    ]
    assert len(found) == (1 if cohort is None else 6)
    assert np.mean(list(found)) == pytest.approx(whole, rel=1e-8)


@pytest.mark.parametrize("eval_every", [1, 3])
def test_held_out_scores_are_of_the_current_params(eval_every: int) -> None:
    """This also holds in the first half of a run, before params are averaged."""
    train, test = federation((12, 9, 10)).split(0.6, seed=0)
    method = fedsvi(regression, optimizer=Adam(0.1), local_optimizer=Adam(0.1))
    fitted = fit(method, train, rounds=12, validation=test, eval_every=eval_every)
    scores = fitted.history["validation_log_score"]
    assert scores.notna().tolist() == [(r + 1) % eval_every == 0 for r in range(12)]
    assert len(set(scores.dropna())) == 12 // eval_every, "no score is repeated"
    first = scores.dropna().iloc[: 6 // eval_every]
    assert first.iloc[-1] > first.iloc[0] or eval_every > 1
    last = fitted.predict(test, draws=50).log_score
    assert last is not None
    assert scores.iloc[-1] == pytest.approx(float(last.mean()), abs=1e-12)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_callback_sees_the_fit_after_each_round(engine: str) -> None:
    data = federation((12, 9, 10))
    seen: list[tuple[int, Tensor]] = []

    def look(fitted: Fit) -> None:
        seen.append((fitted.progress.round, fitted.predict(data, draws=5, seed=1).mean))

    method = fedsvi(regression)
    fitted = fit(method, data, rounds=3, engine=engine, callback=look)
    assert [number for number, _ in seen] == [1, 2, 3]
    short = fit(method, data, rounds=3, engine=engine, callback=None)
    for found, expected in (
        (seen[2][1], fitted.predict(data, draws=5, seed=1).mean),
        (fitted.history["elbo"], short.history["elbo"]),
    ):
        np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(seen[0][1], seen[2][1])


def test_an_error_of_callback_ends_the_run_after_its_checkpoint(tmp_path: Path) -> None:
    def stop(fitted: Fit) -> None:
        if fitted.progress.round == 2:
            raise KeyboardInterrupt

    data, method = federation(), fedsvi(regression)
    with pytest.raises(KeyboardInterrupt):
        fit(method, data, rounds=4, checkpoint=tmp_path / "run", checkpoint_every=1, callback=stop)
    seen: list[int] = []
    after: Any = {"resume": True, "callback": lambda fitted: seen.append(fitted.progress.round)}
    fit(method, data, rounds=4, checkpoint=tmp_path / "run", **after)
    assert seen == [3, 4]
    with pytest.raises(TypeError, match="callback is 3"):
        fit(method, data, rounds=1, callback=3)


def test_early_stopping_waits_for_patience_and_keeps_the_last_params() -> None:
    train, test = federation((12, 9, 10)).split(0.6, seed=0)
    wild = fedsvi(
        regression, optimizer=Adam(0.8), local_optimizer=Adam(0.8), schedule="constant", average=0.0
    )
    stopped = fit(wild, train, rounds=40, validation=test, eval_every=2, patience=3)
    scores = stopped.history["validation_log_score"].dropna().tolist()
    assert stopped.progress.round < 40
    assert len(scores) >= 4
    assert max(scores) == scores[-4] and all(s <= scores[-4] for s in scores[-3:])
    patient = fit(wild, train, rounds=40, validation=test, eval_every=2, patience=50)
    assert patient.progress.round == 40
    of_both = (patient.history["elbo"][: stopped.progress.round], stopped.history["elbo"])
    assert of_both[0].tolist() == of_both[1].tolist()


def test_a_progress_bar_is_drawn_only_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    fit(fedsvi(regression), federation(), rounds=2)
    assert capfd.readouterr() == ("", ""), "standard error is not a terminal in this test"
    fit(fedsvi(regression), federation(), rounds=2, progress=True)
    assert "fedsvi" in "".join(capfd.readouterr())


def path(method: Any, rounds: int) -> list[Tensor]:
    """Return the server's param after each round, and last the param that predictions read."""
    from hierfl.engine.federation import federate
    from hierfl.engine.rounds import begin
    from hierfl.engine.rounds import rounds as run

    made = federate(method, federation())
    steps = [p.server.at.params["loc.at"].clone() for p in run(made, begin(made), rounds)]
    return [*steps, fit(method, federation(), rounds=rounds).message["params"]["loc.at"]]


@pytest.mark.parametrize("average", [0.0, 0.25, 0.5, 0.9])
def test_predictions_read_the_mean_of_the_last_rounds(average: float) -> None:
    *steps, read = path(fedsvi(regression, guides.delta, optimizer=SGD(0.02), average=average), 8)
    last = max(1, 8 - math.floor((1.0 - average) * 8)) if average else 1
    assert torch.allclose(read, torch.stack(steps[8 - last :]).mean(0), atol=1e-12)


def tilted(batch: ClientBatch) -> None:
    """A model whose loss is linear in its one param: every step is 4 times the step size."""
    slope = pyro.param("loc.at", torch.zeros(()))
    pyro.factor("tilt", 4.0 * slope)
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=batch.y)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_step_sizes_over_the_rounds(schedule: Any) -> None:
    method = fedsvi(tilted, lambda batch: None, optimizer=SGD(0.01), schedule=schedule)
    steps = torch.stack([torch.zeros(()), *path(method, 6)[:-1]]).diff()
    rates = [
        0.5 * (1 + math.cos(math.pi * r / 6)) if schedule == "cosine" else 1.0 for r in range(6)
    ]
    assert torch.allclose(steps, 0.04 * torch.tensor(rates), atol=1e-14)


def kinds(batch: ClientBatch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        with batch.data():
            pyro.sample(
                "kind",
                dist.Categorical(logits=torch.einsum("...d,...kd->...k", batch.x, w)),
                obs=batch.kind,
            )


def of_kinds() -> hierfl.Fit:
    data = federation()
    return fit(fedsvi(kinds), data.with_fields(kind=data.fields["visits"].long() % 3), rounds=2)


# The fit, its own sites, and the distribution of the labels of rows with features x.
OF_LABELS: dict[str, tuple[Any, str, Any]] = {
    "binary": (of_binary, "slope", lambda w, x: dist.Bernoulli(logits=(w * x).sum(-1))),
    "categorical": (of_kinds, "w", lambda w, x: dist.Categorical(logits=(w * x[:, None]).sum(-1))),
    "numeric": (two_rounds, "slope", lambda w, x: dist.Normal((w * x).sum(-1), 1.0)),
}


@pytest.mark.parametrize("kind", OF_LABELS)
def test_predictions_are_means_over_draws(kind: str) -> None:
    make, site, law = OF_LABELS[kind]
    fitted: hierfl.Fit = make()
    rows = fitted.federation.data.select(["east", "north"])
    own = fitted.draws(30, seed=4).own[site][:, torch.tensor([2, 0])[rows.row_client]]
    of_rows = law(own, rows.fields["x"])
    label = {"binary": "ill", "categorical": "kind", "numeric": "y"}[kind]
    found = fitted.predict(rows, draws=30, seed=4)
    assert found.kind == kind and found.log_score is not None
    density = of_rows.log_prob(rows.fields[label]).logsumexp(0) - math.log(30)
    torch.testing.assert_close(found.log_score, density, rtol=0.0, atol=1e-12)
    mean = (of_rows.probs if kind == "categorical" else of_rows.mean).mean(0)
    torch.testing.assert_close(found.mean, mean, rtol=0.0, atol=1e-12)
    if kind == "categorical":
        assert found.sd is None
    else:
        variance = of_rows.variance.mean(0) + of_rows.mean.var(0, correction=0)
        torch.testing.assert_close(found.sd, variance.sqrt(), rtol=0.0, atol=1e-9)
    unlabeled = fitted.predict(rows.without(label), draws=30, seed=4)
    assert unlabeled.log_score is None
    assert torch.equal(unlabeled.mean, found.mean)


def test_scores_by_client() -> None:
    rows = federation().select(["west", "south"])
    found = of_binary().predict(rows, draws=20)
    table = found.scores()
    assert table.index.tolist() == ["west", "south"]
    assert table["rows"].tolist() == [1, 3]
    y, p = rows.fields["ill"], found.mean
    assert table["brier"]["south"] == pytest.approx(float((p[1:] - y[1:]).square().mean()))
    assert table["accuracy"]["west"] == float((p[0] > 0.5) == (y[0] > 0.5))
    assert table["log_score"]["south"] == pytest.approx(float(found.log_score[1:].mean()))  # type: ignore[index]


def test_a_clients_prediction_does_not_depend_on_other_clients_or_rows() -> None:
    fitted = two_rounds()
    whole = fitted.predict(federation(), draws=20, seed=1)
    alone = fitted.predict(federation().select(["east"]), draws=20, seed=1)
    assert torch.allclose(alone.mean, whole.mean[8:15], atol=1e-12)
    few = fitted.predict(federation().where(torch.arange(16) == 9), draws=20, seed=1)
    assert torch.allclose(few.mean, whole.mean[9:10], atol=1e-12)


def test_draws_depend_only_on_the_seed_and_more_draws_keep_the_first() -> None:
    first, again, other, longer = (
        two_rounds().draws(n, seed=s).own["slope"] for n, s in ((20, 1), (20, 1), (20, 2), (50, 1))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.allclose(longer[:20], first, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_dims_and_coords_of_the_posterior() -> None:
    fitted = fit(fedsvi(models.regression()), with_features(), rounds=2)
    posterior: Any = fitted.posterior(draws=5, seed=3)["posterior"]
    assert posterior["slope_loc"].dims == ("chain", "draw", "x")
    assert posterior["slope_offset"].dims == ("chain", "draw", "client", "x")
    assert posterior["slope"].sel(client="south", x="dose").shape == (1, 5)
    assert posterior["client"].values.tolist() == list(fitted.clients)
    assert posterior["x"].values.tolist() == ["age", "dose"]
    assert "not of a Markov chain" in posterior.attrs["approximation"]


def squares(batch: ClientBatch) -> None:
    lower = pyro.sample("lower", dist.LKJCholesky(2, 1.0))
    with batch.clients():
        w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(2), scale_tril=lower))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_matrix_of_features_by_features_has_two_dims() -> None:
    """Correlations of varying slopes have shape (D, D), and xarray allows no two dimensions of one name."""
    posterior: Any = fit(fedsvi(squares), with_features(), rounds=1).posterior(3)["posterior"]
    assert posterior["lower"].shape == (1, 3, 2, 2)
    assert len(set(posterior["lower"].dims)) == 4


def changed_label(batch: ClientBatch) -> None:
    """A model that observes a transformed label, and does not read every field."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(loc, 1.0))
        with batch.data():
            pyro.sample("twice", dist.Normal(w + batch.x[..., 0], 1.0), obs=2.0 * batch.y)


def test_a_label_transformed_in_the_model_is_scored_as_observed() -> None:
    data = federation()
    fitted = fit(fedsvi(changed_label, guides.conditional), data, rounds=1)
    found = fitted.predict(data.without("ill", "visits"), draws=1)
    assert found.label is not None and found.log_score is not None
    torch.testing.assert_close(found.label, 2.0 * data.fields["y"])
    torch.testing.assert_close(found.log_score, dist.Normal(found.mean, 1.0).log_prob(found.label))
    unknown = fitted.predict(data.without("y"), draws=1)
    torch.testing.assert_close(unknown.mean, found.mean)
    assert unknown.log_score is None
    again = fitted.predict(data.with_fields(twice=2.0 * data.fields["y"]), draws=1).scores()
    assert again["rmse"].iloc[0] == pytest.approx(
        float((found.mean - found.label)[:5].square().mean().sqrt())
    )


def two_labels(batch: ClientBatch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)
            pyro.sample("ill", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.ill)


def test_with_two_observed_sites_predict_needs_a_name_and_held_out_scores_use_both() -> None:
    data = federation()
    fitted = fit(fedsvi(two_labels, guides.delta), data, rounds=1, validation=data, eval_every=1)
    with pytest.raises(ValueError, match="observes per row are 'y', 'ill': say which to predict,"):
        fitted.predict(data)
    with pytest.raises(KeyError, match="no site 'z' per row; it observes 'y', 'ill'"):
        fitted.predict(data, site="z")
    both = sum(fitted.predict(data, site=site, draws=50).known()[1].mean() for site in ("y", "ill"))
    assert fitted.history["validation_log_score"].iloc[-1] == pytest.approx(float(both))
    assert fitted.predict(data.without("y"), site="ill").kind == "binary"


def test_a_value_made_of_two_fields_counts_as_a_factor_and_has_no_label() -> None:
    def model(batch: ClientBatch, as_factor: bool = False) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with batch.data():
                density, rest = dist.Normal(w, 1.0), batch.y - batch.x[..., 0]
                if as_factor:
                    pyro.factor("rest", density.log_prob(rest))
                else:
                    pyro.sample("rest", density, obs=rest)

    data = federation()
    both = (model, partial(model, as_factor=True))
    fits = [fit(fedsvi(program), data, rounds=2, eval_every=2) for program in both]
    first, second = (fitted.posterior(draws=50)["posterior"]["w"].values for fitted in fits)
    np.testing.assert_array_equal(first, second)
    with pytest.raises(
        ValueError, match=r"'rest' .* observes a value computed from several fields"
    ):
        fits[0].predict(data)
