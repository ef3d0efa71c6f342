"""FedPop: the law of its chain, Fisher's identity, its fixed point, its reduction to fedsvi, and NUTS on radon."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, Clock, ProgramError, guides
from hierfl.engine.chunks import client_round
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.methods import fedpop, fedsvi
from hierfl.optimizers import SGD
from tests.programs import federation, fit, means, regression, three

MANY = 4000


def similar_clients(count: int = MANY, y: float = 1.5) -> ClientData:
    """Return many clients with the same single row."""
    return ClientData.from_arrays(torch.arange(count), y=torch.full((count,), y))


def mean_known(precision: float) -> Any:
    """Return a model with prior precision 1, whose posterior has the given precision and mean 1.5 (1 - 1 / P)."""

    def model(batch: ClientBatch) -> None:
        with batch.clients():
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(z, (precision - 1.0) ** -0.5), obs=batch.y)

    return model


# an uncorrected chain's variance is (1 / P) / (1 - lr P / 2), a corrected one's 1 / P at any step
@pytest.mark.parametrize(
    ("lr", "temperature", "corrected", "variance"),
    [(0.1, 1.0, False, 0.3125), (0.4, 1.0, True, 0.25), (0.4, 0.5, True, 0.125)],
)
def test_the_variance_of_a_chain(
    lr: float, temperature: float, corrected: bool, variance: float
) -> None:
    how: dict[str, Any] = {"temperature": temperature, "metropolis": corrected, "kept_draws": 1}
    method = fedpop(mean_known(4.0), step_size=lr, steps=40, burn_in=39, **how)
    z = fit(method, similar_clients(), rounds=1).progress.table.z[:, 0]
    assert float(z.var()) == pytest.approx(variance, rel=4.0 * (2.0 / MANY) ** 0.5)
    assert float(z.mean()) == pytest.approx(1.5 * 0.75, abs=4.0 * (variance / MANY) ** 0.5)


def counted(batch: ClientBatch) -> None:
    """One count with a log-normal rate: a skewed posterior, of curvature 1 + exp(z)."""
    with batch.clients():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Poisson(z.exp()), obs=batch.y)


def test_a_corrected_chain_draws_a_skewed_posterior() -> None:
    """Against its density on a grid; the uncorrected chain's variance is 1.8 times as large at this step size."""
    grid = torch.linspace(-6.0, 4.0, 4001)
    weight = torch.softmax(-0.5 * grid.square() + 3.0 * grid - grid.exp(), 0)
    mean = (weight * grid).sum()
    variance = (weight * (grid - mean).square()).sum()
    method = fedpop(counted, step_size=0.25, steps=40, burn_in=39, kept_draws=1, metropolis=True)
    z = fit(method, similar_clients(y=3.0), rounds=1).progress.table.z[:, 0]
    assert float(z.mean()) == pytest.approx(float(mean), abs=4.0 * float(variance / MANY) ** 0.5)
    assert float(z.var()) == pytest.approx(float(variance), rel=6.0 * (2.0 / MANY) ** 0.5)
    skew = float((weight * (grid - mean).pow(3)).sum() / variance**1.5)
    found = float(((z - z.mean()) / z.std()).pow(3).mean())
    assert skew < -0.3 and found == pytest.approx(skew, abs=0.2)


def test_the_history_of_a_corrected_chain() -> None:
    """The proportion accepted, and who accepted nothing; chains go on where they stood."""
    rows = ClientData.from_clients({"many": {"y": [8.0] * 2000}, "few": {"y": [1.0]}})
    method = fedpop(means, step_size=0.2, steps=5, burn_in=2, kept_draws=6, metropolis=True)
    one, two = (fit(method, rows, rounds=rounds) for rounds in (1, 2))
    assert one.history["stuck"][0] == 0.5, "the step is 200 standard deviations of the one of many"
    assert 0.25 <= one.history["accepted"][0] <= 0.5
    assert "stiffness" not in one.history
    before, after = (run.progress.table.z for run in (one, two))
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_a_new_chain_starts_at_a_draw_of_the_prior() -> None:
    method = fedpop(mean_known(1.0 + 1e-12), step_size=1e-9, steps=1, burn_in=0, kept_draws=500)
    z = fit(method, similar_clients(), rounds=1).progress.table.z[:, 0]
    assert float(z.mean()) == pytest.approx(0.0, abs=0.15)
    assert float(z.std()) == pytest.approx(1.0, abs=0.15)
    assert len(z.unique()) > 400


def learned_mean(batch: ClientBatch) -> None:
    m = pyro.param("m", torch.tensor(0.2))
    with batch.clients():
        z = pyro.sample("z", dist.Normal(m, 0.7**0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(z, 0.5**0.5), obs=batch.y)


def learned_spread(batch: ClientBatch) -> None:
    log_sd = pyro.param("log_sd", torch.zeros(()))
    with batch.clients():
        z = pyro.sample("z", dist.Normal(0.0, log_sd.exp()))
        with batch.data():
            pyro.sample("y", dist.Normal(z, 0.5**0.5), obs=batch.y)


def test_fishers_identity_of_a_corrected_chain() -> None:
    """The spread's: 1.5^2 / v^2 - 1 / v = 1 / 3 with v = 1 + 1 / 2; proposals alone spread too far for it."""
    options: dict[str, Any] = {"steps": 80, "burn_in": 40, "server_optimizer": SGD(1.0 / MANY)}
    method = fedpop(learned_spread, step_size=0.3, **options, metropolis=True)
    assert float(fit(method, similar_clients(), rounds=1).message["log_sd"]) == pytest.approx(
        1 / 3, abs=0.02
    )


def test_fishers_identity() -> None:
    """The mean gradient over draws is that of the log evidence: 1.0833333 = (1.5 - 0.2) / (0.7 + 1 / 2)."""
    how: dict[str, Any] = {"steps": 80, "burn_in": 40, "server_optimizer": SGD(1.0 / MANY)}
    method = fedpop(learned_mean, step_size=0.05, **how)
    moved = float(fit(method, similar_clients(), rounds=1).message["m"]) - 0.2
    assert moved == pytest.approx(1.0833333, abs=0.02)


@pytest.mark.slow
def test_the_fixed_point_is_the_mode_of_the_marginal_posterior() -> None:
    """Without noise z is at its conditional mean, whose plug-in gradient is, for Gaussians, that of the evidence."""
    method = fedpop(
        means, step_size=0.2, steps=15, burn_in=14, temperature=0.0, server_optimizer=SGD(0.3)
    )
    fitted = fit(method, three(), rounds=30)
    assert float(fitted.message["g.at"]) == pytest.approx(1.846154, abs=1e-3)
    z = fitted.progress.table.z[:, 0]
    assert z.tolist() == pytest.approx([1.615385, 0.923077, 3.461538], abs=1e-3)


def test_the_kept_draws_are_the_last_ones() -> None:
    options: dict[str, Any] = {"step_size": 0.05, "steps": 5, "burn_in": 2, "kept_draws": 7}
    fits = [fit(fedpop(means, **options), three(), rounds=r) for r in (1, 2)]
    one, two = (fitted.progress.table.points[..., 0] for fitted in fits)
    drawn = fits[1].draws(7).own["b"].flatten(1)
    assert torch.allclose(drawn.sort(0).values, two.T.sort(0).values), "what predictions are of"
    assert torch.equal(one[:, :4], one[:, 3:]), (
        "three draws of the first round fill the seven places"
    )
    assert torch.equal(two[:, :4], one[:, 3:]) and not torch.equal(two[:, 4:], one[:, 4:])


def test_one_step_without_noise_is_fedsvi_with_points() -> None:
    """From the same z: a step on it, and the gradient in what is common, both before the step."""
    data, lr = federation(), 0.01
    one: dict[str, Any] = {"steps": 1, "burn_in": 0, "temperature": 0.0, "kept_draws": 1}
    pop = fedpop(regression, step_size=lr, server_optimizer=SGD(lr), **one)
    pace: dict[str, Any] = {"optimizer": SGD(lr), "local_optimizer": SGD(lr), "average": 0.0}
    svi = fedsvi(regression, guides.delta, schedule="constant", **pace)
    z = torch.linspace(-1.0, 1.0, 8).view(4, 2)
    found = []
    for method in (pop, svi):
        run = federate(method, data)
        state = begin(run)
        down = run.server.down(state.server, Clock(0, 1))
        if method is pop:
            own = state.table._replace(z=z, points=z[:, None], seen=torch.ones(4))
        else:
            mine = {"slope.at": z.view(4, 1, 1, 2)}
            own = state.table._replace(at=state.table.at._replace(params=mine), mean=mine)
        up, kept = client_round(run, run.client.phases, down, own, torch.arange(4), 0)
        moved = kept.z if method is pop else kept.at.params["slope.at"].view(4, 2)
        mean = {n: v.mean(0) for n, v in up["gradient"].value.items()}
        found.append((moved, run.server.update(state.server, {"gradient": mean}, Clock(0, 1, 4))))
    (z_pop, pop_state), (z_svi, svi_state) = found
    assert torch.allclose(z_pop, z_svi, atol=1e-10, rtol=0.0)
    for name, value in svi_state.at.params.items():
        assert torch.allclose(pop_state.params[name], value, atol=1e-10, rtol=0.0), name


def test_a_chain_that_diverges_is_refused() -> None:
    """Of a precision of 21, at a step size above 2 / 21; and below, the history tells how near it is."""
    rows = ClientData.from_clients({"many": {"y": [8.0] * 20}, "few": {"y": [1.0]}})
    with pytest.raises(hierfl.ClientError, match=r"client 'many' is not finite \(\['stiffness'"):
        fit(fedpop(means, step_size=0.1, steps=40), rows, rounds=1)
    fitted = fit(fedpop(means, step_size=0.05, steps=40), rows, rounds=1)
    assert fitted.history["stiffness"][0] == pytest.approx(0.05 * (21 + 2) / 2)
    with pytest.raises(hierfl.ClientError, match="client 'many'"):
        fit(fedpop(means, step_size=0.3), three(), rounds=1).personalize(rows, rounds=1)


def gamma(batch: ClientBatch) -> None:
    with batch.clients():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with batch.data():
            pyro.sample("visits", dist.Poisson(rate), obs=batch.visits)


def test_a_prior_without_a_keyed_draw_is_refused() -> None:
    with pytest.raises(ProgramError, match="Gamma cannot be drawn by a key"):
        fit(fedpop(gamma), federation(), rounds=1)
