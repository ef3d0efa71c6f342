"""FedLaplace: second-order derivatives, exactness for Gaussian models, engines and warnings."""

import warnings
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, Clock, ProgramError, full_batch
from hierfl.engine.chunks import one_slot, slots_of
from hierfl.laplace.marginal import Expansion, Marginal
from hierfl.methods import fedlaplace
from hierfl.program.read import read_model
from tests.methods.test_pvi import close, gaussian
from tests.programs import alone, exact, federation, fit, logistic, means, regression, slopes, three
from tests.sampled import sampled

SMALL: dict[str, Any] = {"settle_draws": 4, "draws": 128, "target_ess": 30, "weighting_rounds": 2}


def visits(batch: ClientBatch) -> None:
    """Poisson counts with a rate per client and an unknown spread."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        rate = pyro.sample("rate", dist.Normal(loc, spread))
        with batch.data():
            pyro.sample("visits", dist.Poisson(rate.exp()), obs=batch.visits)


def expansions(marginal: Marginal, data: ClientData, z: Tensor) -> Expansion:
    """Return the expansions of all clients, mapped as the engine maps them, with padded rows.

    Shapes: (C,), (C, K), (C, K, K).
    """
    lanes, common = slots_of(batch := full_batch(data, torch.arange(data.num_clients)))

    def one(lane: Any) -> Expansion:
        own = one_slot(lane, common, batch)
        return marginal.expand(z, marginal.start(z, own), own, 12)[0]

    with torch.no_grad(), pyro.validation_enabled(False):
        return torch.vmap(one)(lanes)


@pytest.mark.slow("regression", "logistic")
@pytest.mark.parametrize("model", [regression, logistic, visits])
def test_derivatives_through_the_mode_are_right_to_second_order(model: Any) -> None:
    data, h = federation(), 1e-4
    marginal = Marginal(read_model(model, data).program)
    size = marginal.shared.size
    z = 0.3 * torch.sin(torch.arange(1.0, size + 1))
    here = expansions(marginal, data, z)
    for k, axis in enumerate(torch.eye(size)):
        up, down = (expansions(marginal, data, z + by * axis) for by in (h, -h))
        close((up.value - down.value) / (2 * h), here.gradient[:, k], 1e-6)
        close((up.gradient - down.gradient) / (2 * h), here.hessian[:, :, k], 1e-4)


def test_the_marginal_is_exact_for_gaussian_rows() -> None:
    data, z = federation(), torch.tensor([0.2, -0.4])
    marginal = Marginal(read_model(slopes, data).program)
    known = exact(data, "slopes")
    total = expansions(marginal, data, z).value.sum() + marginal.log_prior(z)
    posterior = dist.MultivariateNormal(known.loc, known.cov).log_prob(z)
    close(total - posterior, known.log_evidence)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["means", "slopes"], 2))
def test_one_newton_step_is_exact(name: str) -> None:
    model, data = {"means": (means, three()), "slopes": (slopes, federation())}[name]
    method = fedlaplace(model, weighting_rounds=0, radius=10.0, settle_draws=4)
    fitted = fit(method, data, rounds=4)
    known, (loc, precision) = exact(data, name), gaussian(fitted)
    close(loc, known.loc)
    close(precision, torch.linalg.inv(known.cov))
    with pytest.warns(UserWarning, match="rounds ended while climbing"):
        after_one = fit(method, data, rounds=1)
    close(after_one.progress.server.ascent.loc, known.loc)
    close(after_one.progress.server.ascent.precision, torch.linalg.inv(known.cov))


@pytest.mark.slow
def test_everything_that_is_sent() -> None:
    """The update holds sums over clients and averages over points, and with weights one number per
    point.

    It holds no row, no mode and no local effect.
    """
    fitted = fit(fedlaplace(regression, **SMALL), federation(), rounds=12)
    federation_, state, size = fitted.federation, fitted.federation.server.state, 4
    message = federation_.server.down(state, Clock(0, 1))
    batch = full_batch(federation_.data, torch.tensor([0]))

    def up(message: Any) -> dict[str, tuple[int, ...]]:
        client = federation_.client
        with pyro.validation_enabled(False):
            lane = client.phases[0].step(client.start(message, client.own), message, batch)
        answer, kept = client.finish(lane, message, client.own, torch.ones(()))
        assert kept._fields == ("mode", "slope", "loc")
        return {name: tuple(share.value.shape) for name, share in answer.items()}

    expanded = {"log_marginal": (), "gradient": (size,), "hessian": (size, size), "lost": ()}
    assert up(message) == expanded
    about_q = {"loc": torch.zeros(size), "tril": torch.eye(size), "part": torch.tensor(0)}
    assert up(about_q) == {**expanded, "along": (2 * size + 1,)}
    sides = {"right": torch.ones(size), "left": torch.ones(size), "points": torch.zeros(128, 0)}
    assert up({**about_q, **sides}) == {"log_marginals": (128,), "lost": ()}


@pytest.mark.slow
def test_an_empirical_posterior_draws_its_points() -> None:
    fitted = fit(fedlaplace(means, **SMALL), three(), rounds=12)
    points, draws = fitted.message["params"]["_shared.points"], fitted.draws(500).shared["g"]
    assert bool(torch.isin(draws, points[:, 0]).all())
    assert torch.equal(fitted.draws(128).shared["g"].sort().values, points[:, 0].sort().values)
    close(points.mean(0), [1.8461538], 0.05)
    close(points.std(0), [0.46153846**0.5], 0.05)


def weighting_rounds(fitted: hierfl.Fit) -> list[int]:
    """Return the number of points of each weighting round, by the bytes of its update."""
    rows, clients = fitted.progress.history, len(fitted.clients)
    stages = [0.0, *(row["stage"] for row in rows)]
    return [
        row["bytes_up"] // clients // 8 - 3  # `lost`, and the weights of two shares
        for stage, row in zip(stages, rows, strict=False)
        if stage == 2.0
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sizes"),
    sampled(
        [
            ({"draws": 128, "weighting_rounds": 2}, [128, 128]),
            ({}, [512]),
            ({"target_ess": 10**9, "draws": 1024, "weighting_rounds": 3}, [512, 1024, 1024]),
        ],
        3,
    ),
)
def test_points_are_doubled_while_too_few_count(options: Any, sizes: list[int]) -> None:
    """All points of all rounds count, and there are always `weighted` draws."""
    fitted = fit(fedlaplace(means, settle_draws=4, **options), three())
    assert weighting_rounds(fitted) == sizes
    state = fitted.progress.server
    assert 0.75 * sum(sizes) < float(state.effective) <= sum(sizes)
    assert fitted.message["params"]["_shared.points"].shape == (options.get("draws", 4096), 1)
    close(state.draws.mean(0), [1.8461538], 0.05)
    close(state.draws.std(0), [0.46153846**0.5], 0.05)


@pytest.mark.slow
def test_a_high_k_hat_asks_for_more_points() -> None:
    server = fit(fedlaplace(means, settle_draws=4, target_ess=1), three()).federation.server
    ascent = replace(server.state.ascent, precision=torch.eye(1))
    about_q = replace(server.state.at(2), ascent=ascent)
    ups = {"log_marginals": torch.linspace(0.0, 400.0, 512), "lost": torch.zeros(())}
    state = server.update(about_q, ups, Clock(5, 100, 3))
    assert int(state.stage) == 2 and int(state.part) == 1 and float(state.k_hat) > 0.7
    assert len(server.down(state, Clock(6, 100, 3))["points"]) == 1024


def test_few_rounds_weigh_more_points_at_once() -> None:
    """The first weighting round is the one from which a round of 4,096 points is still reached."""
    server = fedlaplace(means).server(read_model(means, three()).program)
    rounds: Any = server.update.__self__  # type: ignore[attr-defined]
    begins = [int(rounds.weighting(server.state, k).part) for k in (99, 4, 3, 2, 1, 0)]
    assert begins == [0, 0, 1, 2, 3, 3]


def flat(batch: ClientBatch) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with batch.clients():
        b = pyro.sample("b", dist.Laplace(loc, 1.0))
        with batch.data():
            pyro.sample("y", dist.Laplace(b, 1.0), obs=batch.y)


def learned(batch: ClientBatch) -> None:
    spread = pyro.param("spread", torch.tensor(1.0), constraint=dist.constraints.positive)
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(loc, spread))
        with batch.data():
            pyro.sample("y", dist.Normal(b, 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (flat, "not curved like that of a Gaussian in 'b'"),
        (learned, "param 'spread' would be learned"),
        (alone, "the program has no global site"),
    ],
)
def test_unsupported_programs_are_refused(model: Any, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        fit(fedlaplace(model), federation(), rounds=2)


def test_many_unknowns_are_said_to_be_slow_before_the_first_round() -> None:
    """Of the demo's hierarchy, 56 x 28, and not of one with few local numbers, 4 x 2."""
    x, ill = torch.zeros(6, 27), torch.tensor([0.0, 1.0] * 3)
    data = ClientData.from_arrays(torch.tensor([0, 0, 0, 1, 1, 1]), x=x, y=ill)
    model = hierfl.models.regression("bernoulli", prior_scale=dist.HalfNormal(0.5), centered=True)
    program = read_model(model, data).program
    with pytest.warns(UserWarning, match=r"28 local parameters twice in 56 .* Use"):
        fedlaplace(model).server(program)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedlaplace(regression).server(read_model(regression, federation()).program)


def test_a_poor_fit_gives_a_warning() -> None:
    server = fit(
        fedlaplace(means, **{**SMALL, "weighting_rounds": 1}), three(), rounds=12
    ).federation.server
    state = server.state.at(2)
    ups = {"log_marginals": torch.linspace(0.0, 400.0, 128), "lost": torch.zeros(())}
    with pytest.warns(UserWarning, match="k-hat is .* Do not trust"):
        server.update(state, ups, Clock(5, 12, 3))
    ups = {"log_marginals": torch.zeros(128), "lost": torch.tensor(0.2)}
    with pytest.warns(UserWarning, match=r"at 20\.0% of the points clients find no mode"):
        server.update(state, ups, Clock(5, 12, 3))
