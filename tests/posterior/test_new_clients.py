"""Predictions for new clients come from the global level alone."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientBatch, ClientData, Fit, Settings, fit, guides, methods, predict_from_prior
from hierfl.optimizers import Adam
from hierfl.posterior.new_clients import expected_of_clients


def gaussian(batch: ClientBatch) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(loc, scale))
        with batch.data():
            pyro.sample("y", dist.Normal(w + batch.x, 0.5), obs=batch.y)


def rows(names: list[str], n: int = 4, *, shift: float = 0.0) -> ClientData:
    x = torch.linspace(-1.0, 1.0, n)
    return ClientData.from_clients(
        {name: {"x": x, "y": x + i + shift} for i, name in enumerate(names)}
    )


@pytest.fixture(scope="module")
def fitted() -> Fit:
    method = methods.fedsvi(gaussian, guides.conditional(newton_steps=0), optimizer=Adam(0.3))
    return fit(method, rows(["a", "b", "c"]), rounds=12, settings=Settings(compile=False))


def test_moments_are_those_of_the_prior_given_the_global_draws(fitted: Fit) -> None:
    """E y = E loc + x and Var y = Var loc + E scale^2 + 0.5^2, over the draws of loc and scale."""
    draws = 4000
    shared = fitted.draws(draws).shared
    new = rows(["new"], shift=50.0)
    found = predict_from_prior(fitted, new, draws=draws)
    spread = (shared["loc"].var() + shared["scale"].square().mean() + 0.25).sqrt()
    torch.testing.assert_close(
        found.mean,
        shared["loc"].mean() + new.fields["x"],
        atol=4 * float(spread) / draws**0.5,
        rtol=0.0,
    )
    assert found.sd is not None
    torch.testing.assert_close(found.sd, spread.expand(4), atol=0.0, rtol=0.06)


def test_expected_of_clients_has_the_moments_of_the_prior_and_uses_no_own_rows(fitted: Fit) -> None:
    draws = 4000
    found, shared = expected_of_clients(fitted, draws=draws)["w"], fitted.draws(draws).shared
    assert found.shape == (draws, 3)
    spread = (shared["loc"].var() + shared["scale"].square().mean()).sqrt()
    torch.testing.assert_close(
        found.mean(0), shared["loc"].mean().expand(3), atol=4 * float(spread) / draws**0.5, rtol=0.0
    )
    torch.testing.assert_close(found.std(0), spread.expand(3), atol=0.0, rtol=0.08)
    assert (
        float(found[:, :2].T.corrcoef()[0, 1].abs()) < 0.9
    )  # clients are independent given the globals


def test_log_score_is_of_the_mean_density(fitted: Fit) -> None:
    """A row's density is Normal(loc + x, scale^2 + 0.5^2), averaged over draws."""
    new, shared = rows(["new"]), fitted.draws(20_000).shared
    found = predict_from_prior(fitted, new, draws=20_000).log_score
    exact = dist.Normal(shared["loc"], (shared["scale"] ** 2 + 0.25).sqrt())
    known = torch.stack(
        [
            exact.log_prob(y - x).exp().mean().log()
            for x, y in zip(new.fields["x"], new.fields["y"], strict=True)
        ]
    )
    assert found is not None
    torch.testing.assert_close(found, known, atol=0.05, rtol=0.0)


def test_predictions_ignore_labels_names_and_other_new_clients(
    fitted: Fit, global_generator_untouched: None
) -> None:
    new = rows(["new", "b", "other"])
    all_three = predict_from_prior(fitted, new, draws=30)
    unlabeled = predict_from_prior(fitted, new.without("y"), draws=30)
    assert unlabeled.log_score is None
    torch.testing.assert_close(unlabeled.mean, all_three.mean)
    turned = predict_from_prior(fitted, new.select(["other", "b", "new"]), draws=30)
    torch.testing.assert_close(turned.mean.reshape(3, 4).flip(0).flatten(), all_three.mean)
    # "b" was fitted near 1; as a new client it is as uncertain as any other
    assert all_three.sd is not None
    assert float(all_three.sd[4:8].min()) > 2 * float(fitted.predict(rows(["b"])).sd.max())  # type: ignore[union-attr]
    again, moved = (predict_from_prior(fitted, new, draws=30, seed=seed) for seed in (0, 1))
    assert torch.equal(again.mean, all_three.mean)
    assert not torch.equal(moved.mean, all_three.mean)


def test_new_clients_with_different_numbers_of_rows(fitted: Fit) -> None:
    x = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([5.0])]
    new = ClientData.from_clients({name: {"x": v, "y": v} for name, v in zip("pq", x, strict=True)})
    found = predict_from_prior(fitted, new, draws=30)
    assert found.mean.shape == (4,)
    alone = predict_from_prior(fitted, new.select(["q"]), draws=30)
    torch.testing.assert_close(found.mean[3:], alone.mean)
    sequential = replace(
        fitted, federation=replace(fitted.federation, settings=Settings(engine="sequential"))
    )
    torch.testing.assert_close(predict_from_prior(sequential, new, draws=30).mean, found.mean)


def test_missing_fields_are_refused(fitted: Fit) -> None:
    with pytest.raises(
        ValueError, match="the rows have no field 'x', which the model or its guide reads"
    ):
        predict_from_prior(fitted, rows(["new"]).without("x"))


def test_a_prior_that_torch_draws_itself_is_drawn_one_client_at_a_time(
    global_generator_untouched: None,
) -> None:
    def model(batch: ClientBatch) -> None:
        rate = pyro.sample("rate", dist.LogNormal(0.0, 0.1))
        with batch.clients():
            w = pyro.sample("w", dist.Gamma(4.0, rate))
            with batch.data():
                pyro.sample("y", dist.Normal(w + batch.x, 0.5), obs=batch.y)

    found = fit(
        methods.fedsvi(model, guides.mean_field),
        rows(["a", "b"]),
        rounds=2,
        settings=Settings(compile=False),
    )
    new = rows(["new", "other"], n=2)
    predicted = predict_from_prior(found, new, draws=400)
    expected = 4.0 / found.draws(400).shared["rate"].mean()
    torch.testing.assert_close(
        predicted.mean - new.fields["x"], expected.expand(4), atol=0.4, rtol=0.0
    )
    assert not torch.equal(predicted.mean[:2], predicted.mean[2:])
    assert torch.equal(predict_from_prior(found, new, draws=400).mean, predicted.mean)
