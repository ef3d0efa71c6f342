"""Importance weights: equal for an exact guide, correct an inexact one, and warn of a bad one."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import transform_to

import hierfl
from hierfl import ClientBatch, Fit, guides
from hierfl.diagnostics import corrected
from hierfl.guides.global_sites import normal_params, positive
from hierfl.methods import fedlaplace, fedsvi
from hierfl.posterior.corrected import own_k_hat, posterior_weights
from hierfl.posterior.snapshot import Restricted, restricted
from hierfl.posterior.weights import weigh
from tests.methods.test_pvi import close
from tests.programs import exact, federation, fit, logistic, means, regression, slopes, three


def scale_params(prefix: str, tril: Tensor) -> dict[str, Tensor]:
    """Return the params of a scale and a unit lower triangle for a Cholesky factor (..., d, d)."""
    scale = tril.diagonal(dim1=-2, dim2=-1)
    lower = (tril / scale[..., None]).tril(-1)
    return {f"{prefix}.scale": transform_to(positive).inv(scale), f"{prefix}.lower": lower}


@cache
def begun() -> Fit:
    return fit(fedsvi(slopes, guides.structured), federation(), rounds=1)


def planted(*, shift: float = 0.0, wide: float = 1.0, own: dict[str, float] | None = None) -> Fit:
    """Return a structured guide of `slopes` that is the exact posterior but for planted errors.

    Args:
        shift: error of the global mean, in posterior sd.
        wide: factor of the global scales.
        own: client -> factor of its local scales; 1 if a client is missing.
    """
    data, fitted = federation(), begun()
    known = exact(data, "slopes")
    tril = torch.linalg.cholesky(known.cov)
    factors = torch.tensor([(own or {}).get(name, 1.0) for name in data.names])
    shared = normal_params(
        known.loc + shift * tril.diagonal(), torch.linalg.inv(known.cov * wide**2)
    )
    given = torch.linalg.cholesky(known.given_cov) * factors[:, None, None]
    # the guide's slope multiplies (z - loc) / scale with the guide's own, shifted loc
    slope, scale = known.given_slope, tril.diagonal() * wide
    loc = known.own_loc + (slope @ (shift * tril.diagonal()))
    local = {
        "_local.loc": loc[:, None, None],
        "_local.slope": (slope * scale)[:, None, None],
        **scale_params("_local", given),
    }
    progress = fitted.progress
    means = {name: local[name].reshape(v.shape) for name, v in progress.table.mean.items()}
    server, table = progress.server._replace(mean=shared), progress.table._replace(mean=means)
    return replace(fitted, progress=replace(progress, server=server, table=table))


@pytest.mark.slow("slopes")
@pytest.mark.parametrize("name", ["means", "slopes"])
def test_weights_of_an_exact_guide_are_equal(name: str) -> None:
    model, data = {"means": (means, three()), "slopes": (slopes, federation())}[name]
    fitted = fit(fedlaplace(model, weighting_rounds=0, radius=10.0, settle_draws=4), data, rounds=4)
    found = corrected(fitted, 200, proposals=200)
    assert found.log_evidence == pytest.approx(exact(data, name).log_evidence, abs=1e-8)
    assert found.k_hat == 0.0 and found.effective == pytest.approx(200.0)
    assert (found.k_hat_clients == 0.0).all() and list(found.k_hat_clients.index) == list(
        data.names
    )


@pytest.mark.parametrize("inner", [1, 5])
def test_a_planted_exact_guide_is_exact(inner: int) -> None:
    found = corrected(planted(), 100, proposals=150, inner=inner)
    assert found.log_evidence == pytest.approx(exact(federation(), "slopes").log_evidence, abs=1e-8)
    assert found.k_hat == 0.0


@pytest.mark.slow("8")
@pytest.mark.parametrize("inner", [1, 8])
def test_corrected_draws_of_an_inexact_guide_follow_the_posterior(inner: int) -> None:
    fitted = planted(shift=0.5, wide=1.2, own={"east": 1.3, "west": 1.2})
    known = exact(federation(), "slopes")
    found = corrected(fitted, 4000, proposals=16000, inner=inner)
    plain = fitted.draws(4000)
    off = ((plain.shared["g"].mean(0) - known.loc) / known.cov.diagonal().sqrt()).abs().max()
    assert off > 0.4, "the guide itself has a large error"
    assert found.k_hat < 0.7 and found.log_evidence == pytest.approx(known.log_evidence, abs=0.05)
    for drawn, loc, cov in (
        (found.draws.shared["g"], known.loc, known.cov),
        (found.draws.own["b"], known.own_loc, known.own_cov),
    ):
        sd = cov.diagonal(dim1=-2, dim2=-1).sqrt()
        close((drawn.mean(0) - loc) / sd, torch.zeros_like(loc), 0.08)
        close(drawn.std(0) / sd, torch.ones_like(sd), 0.06)


def test_k_hat_of_a_bad_global_guide_is_high() -> None:
    """A Normal of s times the right standard deviation has weights with tail index 1 - s^2."""
    with pytest.warns(
        UserWarning, match=r"k-hat is \d\.\d\d, above 0.7: the guide misses a part of the posterior"
    ):
        found = corrected(planted(wide=0.1, shift=0.5), 500, proposals=4000, inner=1, rounds=1)
    assert found.k_hat == found.k_hat_guide > 0.7 and found.rounds == 1
    assert (found.k_hat_clients == 0.0).all(), (
        "given the global sites, all clients are exact: only the global guide is bad"
    )


def test_more_rounds_correct_a_bad_global_guide() -> None:
    """A Student t fitted to the weighted draws recovers the posterior from a tenth of its scale."""
    known = exact(federation(), "slopes")
    found = corrected(planted(wide=0.1, shift=0.5), 1000, proposals=4000, inner=2)
    assert (
        found.k_hat < 0.7 < found.k_hat_guide
        and 1 < found.rounds <= 3
        and found.proposals == 4000 * found.rounds
    )
    assert found.effective > 500 and found.log_evidence == pytest.approx(
        known.log_evidence, abs=0.05
    )
    close(
        (found.draws.shared["g"].mean(0) - known.loc) / known.cov.diagonal().sqrt(),
        torch.zeros(2),
        0.1,
    )
    close(found.draws.shared["g"].std(0) / known.cov.diagonal().sqrt(), torch.ones(2), 0.1)


def test_a_guide_that_fails_far_from_its_center_gets_no_further_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hierfl.posterior import corrected as psis

    def only_its_own(fitted: Fit, count: int, **options: Any) -> Any:
        if options.get("points") is not None:
            raise ValueError("not curved")
        return weigh(fitted, count, **options)

    monkeypatch.setattr(psis, "weigh", only_its_own)
    fitted = planted(wide=0.5)
    with pytest.warns(
        UserWarning,
        match=r"the guide fails at points farther out than its own draws \(not curved\)",
    ):
        found = corrected(fitted, 2000, proposals=1000)
    assert found.rounds == 1 and found.k_hat == pytest.approx(found.k_hat_guide)


def test_k_hat_by_client_finds_the_bad_client() -> None:
    k_hat = own_k_hat(planted(own={"east": 0.25, "south": 1.1}))
    assert k_hat["east"] > 0.7
    assert k_hat["north"] == k_hat["west"] == 0.0 and k_hat["south"] < 0.4


@pytest.mark.filterwarnings("ignore:k-hat is .*, above 0.7")
def test_k_hat_of_the_guide_is_that_of_single_draws() -> None:
    """k-hat of the guide does not depend on the number of inner draws."""
    fitted = planted(own={name: 0.5 for name in federation().names})
    one, many = (corrected(fitted, 500, proposals=2000, inner=m, rounds=1) for m in (1, 16))
    assert one.k_hat_guide == pytest.approx(many.k_hat_guide) and one.k_hat_guide > 0.7
    assert one.k_hat == pytest.approx(one.k_hat_guide)
    assert many.k_hat < one.k_hat


def test_inner_draws_improve_inexact_clients() -> None:
    fitted = planted(own={name: 1.6 for name in federation().names})
    few, many = (
        posterior_weights(weigh(fitted, 2000, inner=inner).total).effective for inner in (1, 16)
    )
    assert many > 2.0 * few


def test_log_weights_of_a_client_alone_equal_those_among_all_clients() -> None:
    data = federation()
    fitted = fit(fedsvi(regression), data, rounds=3)
    whole = weigh(fitted, 50, inner=3)
    assert whole.log_own.shape == (50, 4) and whole.log_shared.shape == (50,)
    for k, name in enumerate(data.names):
        alone = fit_of(fitted, name)
        found = weigh(alone, 50, inner=3)
        close(found.log_own[:, 0], whole.log_own[:, k])
        close(found.log_shared, whole.log_shared)


def fit_of(fitted: Fit, name: str) -> Restricted:
    return restricted(fitted, fitted.federation.data.select([name]))


SPREAD: dict[str, Any] = {
    "mean_field": guides.mean_field(init_scale=0.6),
    "low_rank": guides.low_rank(rank=2, init_scale=0.6),
    "flow": guides.conditional(newton_steps=2, shared=partial(guides.spline_flow, init_scale=0.8)),
    "conditional": guides.conditional(newton_steps=2, shared=guides.diagonal_normal),
}


@pytest.mark.slow("conditional", "low_rank", "flow")
@pytest.mark.parametrize("family", SPREAD)
def test_every_guide_with_a_density_gives_the_same_evidence(family: str) -> None:
    data, pace = federation(), hierfl.optimizers.Adam(0.02 if family == "flow" else 0.1)
    fitted = fit(
        fedsvi(logistic, SPREAD[family], optimizer=pace, local_optimizer=pace),
        data,
        rounds=10 if family == "flow" else 45,
    )
    found = weigh(fitted, 2000, inner=4)
    assert float(found.total.logsumexp(0)) - np.log(2000) == pytest.approx(evidence(), abs=0.15)


@cache
def evidence() -> float:
    """Return log p(y) of `logistic` on `federation()`, estimated with draws of the prior."""
    data, g = federation(), torch.Generator().manual_seed(0)
    loc = torch.randn(20_000, 1, 2, generator=g)
    total = torch.zeros(len(loc))
    for x, y in zip(
        *(data.fields[name].split(data.counts.tolist()) for name in ("x", "ill")), strict=True
    ):
        logits = (loc + 0.7 * torch.randn(len(loc), 20, 2, generator=g)) @ x.T
        total += dist.Bernoulli(logits=logits).log_prob(y).sum(-1).logsumexp(1) - np.log(20)
    return float(total.logsumexp(0)) - np.log(len(loc))


def gamma_model(batch: ClientBatch) -> None:
    rate = pyro.sample("rate", dist.Gamma(3.0, 2.0))
    with batch.clients(), batch.data():
        pyro.sample("visits", dist.Poisson(rate), obs=batch.visits)


def gamma_guide(batch: ClientBatch) -> None:
    pyro.sample("rate", dist.Gamma(18.0, 17.0))


@pytest.mark.filterwarnings("ignore:site 'rate' is drawn from Gamma")
def test_a_guide_that_torch_draws_without_local_sites() -> None:
    """Conjugate: Gamma(3 + sum y, 2 + n)."""
    data = federation((4, 3))
    found = corrected(fit(fedsvi(gamma_model, gamma_guide), data, rounds=1), 150, proposals=150)
    total, n = float(data.fields["visits"].sum()), data.num_rows
    assert found.draws.shared["rate"].mean() == pytest.approx((3 + total) / (2 + n), abs=0.08)
    assert found.k_hat_clients.isna().all()


@pytest.mark.slow
def test_single_precision_gives_the_same_evidence() -> None:
    torch.set_default_dtype(torch.float32)
    data = federation()
    guide = guides.conditional(newton_steps=2)
    fitted = fit(fedsvi(logistic, guide, optimizer=hierfl.optimizers.Adam(0.1)), data, rounds=20)
    found = corrected(fitted, 1000, proposals=1000, inner=2)
    assert found.draws.own["slope"].dtype == torch.float32 and found.k_hat < 0.7
    assert found.log_evidence == pytest.approx(evidence(), abs=0.1)


def test_attributes_describe_the_correction() -> None:
    found: Any = planted(shift=0.4).posterior(100, correct="psis", log_likelihood=True)
    attrs = found["posterior"].attrs
    assert (
        "resampled" in attrs["approximation"]
        and attrs["k_hat"] < 0.7
        and attrs["proposals"] == 4000
    )
    assert attrs["k_hat_clients"].shape == (4,) and attrs["bytes_up_psis"] == 8 * 4 * 8000
    assert found["posterior"]["b"].dims[:3] == ("chain", "draw", "client")
    assert found["log_likelihood"]["y"].shape == (4, 25, 16)


def beside_a_point(batch: ClientBatch) -> None:
    pyro.sample("loc", dist.Normal(torch.zeros(2), 0.5).to_event(1))
    pyro.sample("spread", dist.Delta(torch.tensor(0.7)))
    pyro.sample("lift", dist.Normal(0.0, 0.5))
    with batch.clients():
        pyro.sample("slope", dist.Normal(torch.zeros(batch.num_clients, 1, 2), 0.5).to_event(1))


def test_invalid_arguments_are_refused() -> None:
    data = federation()
    point = fit(fedsvi(regression, guides.delta), data, rounds=1)
    with pytest.raises(
        ValueError, match="the guide of 'fedsvi' places site 'loc' at points, which have no density"
    ):
        corrected(point, 100)
    with pytest.raises(ValueError, match="places site 'spread' at points"):
        corrected(fit(fedsvi(regression, beside_a_point), data, rounds=1), 100)
    with pytest.raises(ValueError, match="fedlaplace has weighted its draws already"):
        corrected(fit(fedlaplace(means, draws=64, weighting_rounds=1), three(), rounds=6), 100)
    wide = hierfl.models.bayesian_network(torch.nn.Linear(2, 700))
    classes = data.with_fields(y=data.fields["visits"].long())
    with pytest.raises(
        ValueError,
        match=r"has 2100 unknowns to weight \(1400 of them in site 'w.weight'\), and the limit is 2000",
    ):
        corrected(fit(fedsvi(wide, guides.mean_field), classes, rounds=1), 100)
    fitted = fit(fedsvi(logistic), data, rounds=1)
    with pytest.raises(ValueError, match="proposals is 20: it must be 100 or more"):
        corrected(fitted, 5, proposals=20)
    unlabeled = replace(fitted, federation=replace(fitted.federation, data=data.without("ill")))
    with pytest.raises(ValueError, match="have no field 'ill': without labels"):
        corrected(unlabeled, 100)


@pytest.mark.parametrize("own", [{}, {"east": 0.5, "south": 1.4}], ids=["exact", "planted"])
def test_stretched_draws_estimate_the_same_density_of_the_rows(own: dict[str, float]) -> None:
    """W_k estimates p(y_k | z) whatever the proposal; without error for the exact guide."""
    fitted = planted(own=own)
    right = weigh(planted(), 400, inner=1).log_own
    found = weigh(fitted, 400, inner=64, stretch=True).log_own
    close((found - right).exp().mean(0), torch.ones(4), 0.05)


def test_stretched_draws_show_a_guide_that_is_too_narrow() -> None:
    """Stretched draws bring back most of the spread that the guide lacks."""
    narrow, known = planted(own={"east": 0.4}), exact(federation(), "slopes")
    sd = known.own_cov[2].diagonal().sqrt()
    plain, wide = (
        weigh(narrow, 2000, inner=8, shared=False, stretch=s).draws.own["b"][:, 2].std(0) / sd
        for s in (False, True)
    )
    assert (wide > plain + 0.1).all()
