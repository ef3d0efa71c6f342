"""Chains in the program's own coordinates, and draws that later iterations are added to."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, full_batch
from hierfl.core.chains import Mode, Sampled, Whitening, sampled
from hierfl.core.gaussians import LOG_2_PI, Factor
from hierfl.core.process import OutOfTime, Watch, double_precision, watched
from hierfl.data.batch import in_double
from hierfl.engine.federation import federate
from hierfl.methods.stages.centering import Centering, Together
from hierfl.methods.stages.chain_starts import _plausible
from hierfl.methods.stages.joint import Joint, PlainJoint, Standard, flat, standard_of
from hierfl.methods.stages.mixing_chains import (
    ChainCoordinates,
    NewCoordinates,
    Renewal,
    until_mixed,
)
from hierfl.methods.stages.modes import bends, climbed_at_once, normal_about
from hierfl.methods.stages.two_stage import seen_in
from hierfl.program.handlers import log_joint, unchecked
from hierfl.program.read import read_model
from hierfl.runs.ended import Fallback
from hierfl.summaries.growth import Growth
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.moving import MixingLine
from hierfl.summaries.packed_rows import packed
from hierfl.summaries.sampling import Start, bounds_of, sample
from hierfl.summaries.surrogate import Surrogate, prior_draws


def horseshoe(batch: ClientBatch) -> None:
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with batch.clients():
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(z * scale * tau, 1.0), obs=batch.y)


def test_the_density_in_the_programs_own_coordinates_is_the_programs() -> None:
    rng, names = np.random.default_rng(0), ["a", "b", "c"]
    rows = torch.tensor(rng.normal(size=12))
    data = ClientData.from_arrays(np.repeat(np.arange(3), 4), names=names, y=rows)
    program = read_model(horseshoe, data).program
    seen, batch = seen_in(program), full_batch(data, data.by_name)
    x = torch.randn(4, 1 + 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with double_precision(), unchecked(), torch.no_grad():
        none = Factors(torch.zeros(3, 3, 3), torch.zeros(3, 3), {})
        joint = PlainJoint(Surrogate(seen.hierarchy), packed(seen.score, batch), none, 4)
        line = MixingLine(torch.zeros(3, 1), torch.zeros(3, 1, 1), torch.zeros(1))
        standard = standard_of(none.precision, none.shift, line, own=2)
        values = joint.gradient.eager(x, *flat(standard))[0]
        latents, double = program.latents, in_double(batch)
        for point, value in zip(x, values, strict=True):
            shared, jacobians = latents.global_block.unflatten(point[:1])
            own, more = latents.local_block.unflatten(point[1:].view(3, 1, 2))
            of_clients, of_global = log_joint(program.model, {**shared, **own}, double, {})
            terms = [*jacobians.values(), *more.values(), of_clients, of_global]
            torch.testing.assert_close(value, torch.stack([v.sum() for v in terms]).sum())


def intercepts(batch: ClientBatch) -> None:
    tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, tau))
    slope = pyro.sample("slope", dist.Normal(mu, tau))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            mean = mu + b[..., 0] + (slope * b[..., 1]).tanh()
            pyro.sample("y", dist.Normal(mean, 1.0), obs=batch.y)


@pytest.mark.slow("False")
@pytest.mark.parametrize("together", [False, True])
def test_what_standardizes_changes_the_density_by_its_volume_alone(together: bool) -> None:
    g, names = torch.Generator().manual_seed(0), ["a", "b", "c"]
    data = ClientData.from_arrays(
        np.repeat(np.arange(3), 4), names=names, y=torch.randn(12, generator=g)
    )
    program = read_model(intercepts, data).program
    seen, batch = seen_in(program), full_batch(data, data.by_name)
    size = seen.hierarchy.reading.size
    x = torch.randn(2, 3 + 6, generator=g, dtype=torch.float64)
    with double_precision(), unchecked(), torch.no_grad():
        none = Factors(torch.zeros(3, size, size), torch.zeros(3, size), {})
        rows, surrogate = packed(seen.score, in_double(batch)), Surrogate(seen.hierarchy)
        joint, plain = Joint(surrogate, rows, none, 2), PlainJoint(surrogate, rows, none, 2)
        half = torch.randn(3, size, size, generator=g, dtype=torch.float64)
        shift = torch.randn(3, size, generator=g, dtype=torch.float64)
        line = MixingLine(torch.zeros(3, 0), torch.zeros(3, 0, 0), torch.zeros(0))
        drifts, rates = torch.randn(2, 3, 2, size - 2, generator=g, dtype=torch.float64)
        about = torch.randn(size - 2, generator=g, dtype=torch.float64).expand(3, -1)
        curved = Growth(shift[:, :2], -shift[:, :2], drifts, rates, about)
        plainly = standard_of(half @ half.mT, shift, line, own=2, growth=curved)
        growth, bend, drift = torch.zeros(3, 3, 3, dtype=torch.float64)
        growth[:2, 2] = torch.tensor([0.7, -0.3])
        bend[0, 2], drift[0, 2], ones = -0.4, -0.4, torch.ones(3, dtype=torch.float64)
        places = torch.arange(2) if together else torch.arange(0)
        matrix = torch.tensor([[2.0, 0.8], [0.8, 1.0]], dtype=torch.float64)[places][:, places]
        some = ones[places]
        centering = Centering(
            0.3 * ones,
            0.0 * ones if together else 0.6 * ones,
            growth,
            bend,
            0.0 * ones if together else ones,
            drift,
            2.0 * ones,
            Together(places, 0.3 * some, 0.5 * some, matrix, 0.7 * some),
        )
        standard = plainly._replace(centering=centering)
        values = joint.at(x, standard)[0]

        def whole(x: Tensor) -> Tensor:
            return plain.from_own(
                joint.z_of(x[None], standard), joint.own_scalars(x[None], standard)
            )[0]

        at = torch.stack([whole(point) for point in x])
        slopes = torch.stack([torch.func.jacrev(whole)(point) for point in x])
        densities = plain.at(at, plainly)[0] + slopes.slogdet()[1]
        torch.testing.assert_close(joint.x_of(joint.z_of(x, standard), standard), x[:, :3])
    # but for the constant of 6 standard normal scalars
    torch.testing.assert_close(values - 3.0 * LOG_2_PI, densities)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    return -0.5 * x.square().sum(1), -x


def test_iterations_are_added_to_those_before() -> None:
    start = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    unit = Whitening(torch.zeros(2), torch.eye(2), torch.ones(0))
    told: list[float] = []
    how: dict[str, Any] = {"draws": 400, "least": 30, "seed": 0, "jumps": False}
    first = sampled(normal, start, unit, warmup=30, warmed=told.append, **how)
    second = sampled(normal, first.steps[-1], unit, warmup=0, before=first, **how)
    assert torch.equal(second.steps[:30], first.steps)
    assert len(second.steps) == len(second.numbers) == 60
    assert second.size == first.size
    assert second.effective > first.effective
    assert told == [first.leaps]


def many_scales(batch: ClientBatch) -> None:
    rates = pyro.sample("rates", dist.Gamma(torch.ones(13), 1.0).to_event(1))
    with batch.clients():
        u = pyro.sample("u", dist.Normal(0.0, rates[0]))
        with batch.data():
            pyro.sample("y", dist.Normal(u, rates.sum()), obs=batch.y)


def test_many_global_scalars_ask_for_a_faster_way_first() -> None:
    rows = torch.zeros(2)
    program = read_model(many_scales, ClientData.from_arrays([0, 1], names=["a", "b"], y=rows))
    hierarchy = seen_in(program.program).hierarchy
    size = hierarchy.reading.size
    asked: list[float] = []

    def is_faster(seconds: float) -> bool:
        asked.append(seconds)
        return True

    with double_precision(), unchecked(), torch.no_grad():
        surrogate, draws = Surrogate(hierarchy), prior_draws(hierarchy, 0)
        equal = torch.full((len(draws),), 1.0 / len(draws)).log()
        start = Start(draws, equal, bounds_of(surrogate, draws), True)
        none = Factors(torch.zeros(2, size, size), torch.zeros(2, size), {})
        with (
            watched(Watch(has_faster=is_faster)),
            pytest.raises(OutOfTime, match="13 global scalars"),
        ):
            sample(surrogate, none, 100, start, final=False, seed=0)
    assert asked[0] > 0.0


class _Chains(ChainCoordinates):
    """Chains whose R-hat is that of a list, of one call after another."""

    def __init__(self, *r_hats: float) -> None:
        self.r_hats, self.asked, self.seconds = list(r_hats), list[float](), 1.0
        joint = SimpleNamespace(count=2, has_own=True, values_of=lambda x, standard: x)
        self.joint = cast(Joint, joint)
        self.standard = cast(Standard, None)

    def sampled(self, *args: Any, needed: float = 0.0, **more: Any) -> Sampled:
        _, _, _, least, *before = args
        self.asked.append(before[1] if before else needed)
        steps = torch.zeros(least + (len(before[0].steps) if before and before[0] else 0), 2, 1)
        whitening = Whitening(torch.zeros(1), torch.eye(1), torch.ones(0))
        known = (self.r_hats[len(self.asked) - 1], 9.0, (1.0, 0.0), whitening, 0.5)
        return Sampled(steps[0], *known, steps, steps, 4.0)


def test_chains_say_what_they_need_and_end_where_no_more_would_do() -> None:
    nothing = (torch.zeros(2, 1), Whitening(torch.zeros(1), torch.eye(1), torch.ones(0)))
    mixes, hopeless = _Chains(1.2, 1.1, 1.01), _Chains(3.0, 1.9)
    assert len(until_mixed(mixes, (), *nothing)[1].steps) == 240
    # four times the iterations at an excess of four times what is allowed, and then twice
    assert mixes.asked == pytest.approx([0.0, 4 * 60, 2 * 120])
    until_mixed(hopeless, (), *nothing)
    assert hopeless.asked == pytest.approx([0.0, 40 * 60])


def test_chains_need_to_know_the_ends_of_values() -> None:
    """With a quarter of the effective draws, four times the iterations."""
    x = torch.randn(2000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whitening = Whitening(torch.zeros(1), torch.eye(1), torch.ones(0))
    rests = (whitening, 0.5, torch.zeros(60, 2, 1), torch.zeros(60, 2, 1), 4.0)
    asked = [_Chains().needed(Sampled(x, 1.0, n, (1.0, 0.0), *rests)) for n in (400.0, 100.0)]
    # sqrt(p (1 - p) / n) over the density at the 5% point, in what it may be
    assert asked[0] == pytest.approx(60 * (0.2179 / 400**0.5 / 0.1031 / 0.2) ** 2, rel=0.3)
    assert asked[1] == pytest.approx(4.0 * asked[0], rel=0.3)


def test_coordinates_in_which_chains_mix_sooner_are_kept() -> None:
    nothing = (torch.zeros(2, 1), Whitening(torch.zeros(1), torch.eye(1), torch.ones(0)))
    first, faster, slower = _Chains(1.2), _Chains(1.16, 1.01), _Chains(1.2)
    faster.seconds, slower.seconds = 0.5, 2.0
    tried: list[_Chains] = []

    def to(other: _Chains) -> Renewal:
        def start(here: ChainCoordinates, drawn: Sampled) -> NewCoordinates:
            tried.append(cast(_Chains, here))
            return other, *nothing

        return start

    where, drawn = until_mixed(first, (lambda *of: None, to(faster), to(slower)), *nothing)
    assert where is faster and tried == [first, faster]
    assert len(drawn.steps) == 120  # those of the trial count
    # chains that have nearly mixed run on as they are
    nearly = _Chains(1.08, 1.01)
    where, drawn = until_mixed(nearly, (to(slower),), *nothing)
    assert where is nearly and len(tried) == 2 and len(drawn.steps) == 60 + 44  # 1.2 * 0.6 * 60


def items(batch: ClientBatch) -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(60), 1.0).to_event(1))
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), torch.tensor([1.0, 5.0])).to_event(1))
    tau = pyro.sample("tau", dist.Exponential(0.1 * torch.ones(2)).to_event(1))
    with batch.clients():
        xi = pyro.sample("xi", dist.Normal(mu, tau).to_event(1))
        with batch.data():
            eta = xi[..., 0].exp() * (theta[batch.person] - xi[..., 1])
            pyro.sample("y", dist.Bernoulli(logits=eta), obs=batch.y)


@pytest.mark.slow
def test_factors_of_clients_whose_scalars_run_away_are_left() -> None:
    rng = np.random.default_rng(25)
    person, hardness = np.tile(np.arange(60), 20), np.repeat(rng.normal(size=20), 60)
    y = rng.random(1200) < 1 / (1 + np.exp(hardness - rng.normal(size=60)[person]))
    names = [f"item {i}" for i in range(20)]
    who, answers = np.repeat(np.arange(20), 60), torch.tensor(y).float()
    data = ClientData.from_arrays(who, names=names, person=torch.tensor(person), y=answers)
    chains = Fallback(federate(hierfl.methods.two_stage(items), data, seed=0), None).chains
    with double_precision(), torch.no_grad(), unchecked():
        z = torch.randn(256, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        z[:, 62:] += 2.0  # scales as their prior has them
        start = chains._starts.heaviest(z)
        values = chains.joint.at(start.points, start.standard)[0]
    assert float(values.median()) > -1e4


def heavy_rows(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.zeros(4), 20.0).to_event(1))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.StudentT(3.0, mu, 0.5).to_event(1), obs=batch.y)


def test_chains_start_about_the_heaviest_mode_whatever_mode_the_rounds_kept_to() -> None:
    rows = torch.tensor([*[-30.0] * 4, *[30.0] * 8]).repeat(2)[:, None].expand(-1, 4)
    data = ClientData.from_arrays(np.repeat([0, 1], 12), names=["a", "b"], y=rows)
    chains = Fallback(federate(hierfl.methods.two_stage(heavy_rows), data, seed=0), None).chains
    with double_precision(), torch.no_grad(), unchecked():
        (mu,) = chains.joint.hierarchy.program.latents.global_block.sites
        assert mu.unit is not None
        lesser = torch.linspace(-30.1, -29.9, 1000)[:, None].expand(-1, 4)
        start = chains._starts.heaviest(lesser / mu.unit)
    assert 29.0 < float((start.points * mu.unit).median()) < 31.0


def crossed(batch: ClientBatch) -> None:
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    theta = pyro.sample("theta", dist.Normal(0.0, tau).expand([8]).to_event(1))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.StudentT(4.0, theta[batch.school], 1.0), obs=batch.y)


def test_chains_do_not_start_where_a_scale_is_0_and_its_sites_are_equal() -> None:
    schools, g = torch.arange(8).repeat(2), torch.Generator().manual_seed(0)
    y = torch.linspace(-2.0, 2.0, 8).repeat(2) + 0.1 * torch.randn(16, generator=g)
    data = ClientData.from_arrays(np.repeat([0, 1], 8), names=["a", "b"], school=schools, y=y)
    chains = Fallback(federate(hierfl.methods.two_stage(crossed), data, seed=0), None).chains
    with double_precision(), torch.no_grad(), unchecked():
        z = torch.randn(64, 9, generator=g, dtype=torch.float64)
        start = chains._starts.heaviest(z)
        log_tau = chains.joint.z_of(start.points, start.standard)[:, 0]
    assert -1.0 < float(log_tau.median()) < 2.0


def test_factors_that_outgrow_their_digits_are_left() -> None:
    """Those of censored pairs of eyes did, and a density of 1e67 looked like the heaviest mode."""
    some, line = torch.tensor([2.0, 1e80, 3.0]), torch.tensor([1.0, 1.0, torch.inf])
    factor = Factor(some[:, None, None], some[:, None], torch.zeros(3))
    one, square = torch.ones(3, 1), torch.ones(3, 1, 1)
    growth = Growth(line[:, None], one, square, square, one)
    kept, moves = _plausible(factor, growth)
    assert kept.precision.flatten().tolist() == [2.0, 0.0, 0.0]
    assert moves.center.flatten().tolist() == [1.0, 0.0, 0.0]
    assert moves.moves.tolist() == [True, False, False]


def signs(batch: ClientBatch) -> None:
    """A number of which rows see the square, beside levels of clients."""
    rows_of_square(batch, pyro.sample("root", dist.Normal(0.0, 2.0)))


def no_sign(batch: ClientBatch) -> None:
    rows_of_square(batch, pyro.sample("root", dist.HalfNormal(2.0)))


def rows_of_square(batch: ClientBatch, root: Tensor) -> None:
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(0.0, 0.5))
        with batch.data():
            pyro.sample("y", dist.StudentT(4.0, root**2 + level, noise), obs=batch.y)


def of_squares() -> ClientData:
    rng, client = np.random.default_rng(0), np.repeat(np.arange(6), 10)
    y = 2.0 + 0.5 * rng.normal(size=6)[client] + 0.5 * rng.normal(size=60)
    return ClientData.from_arrays(client, names=list("abcdef"), y=torch.tensor(y))


@pytest.mark.slow("signs-True")  # the chains of the next test begin about them
@pytest.mark.parametrize(("model", "several"), [(signs, True), (no_sign, False)])
def test_other_modes_of_as_much_mass_are_seen(
    model: Callable[[ClientBatch], None], several: bool
) -> None:
    federation = federate(hierfl.methods.two_stage(model), of_squares(), seed=0)
    assert Fallback(federation, None).chains.has_modes(federation.server.state) is several


class _Begun(Exception):
    """Chains begin."""


def test_chains_begin_about_both_modes_and_jump_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begun(density: Any, start: Tensor, whitening: Whitening, **how: Any) -> Sampled:
        raise _Begun(start, how)

    monkeypatch.setattr("hierfl.methods.stages.mixing_chains.sampled", begun)
    federation = federate(hierfl.methods.two_stage(signs), of_squares(), seed=0)
    with pytest.raises(_Begun) as held:
        Fallback(federation, None).chains.run(federation.server.state, 100)
    start, how = held.value.args
    assert how["jumps"] and len(how["modes"]) == 2
    left, right = sorted(float(of.loc[0]) for of in how["modes"])
    assert left < -0.5 and right > 0.5
    for mode in (left, right):
        assert int((abs(start[:, 0] - mode) < 0.5).sum()) == len(start) / 2


@pytest.mark.slow
def test_chains_visit_both_modes() -> None:
    fit = hierfl.fit(signs, of_squares(), seed=0, progress=False)
    root = fit.get_samples(draws=2000)["root"]
    assert abs(float(root.mean())) < 0.25
    assert 1.2 < float(root.std()) < 1.6
    assert fit.summary().trustworthy


def tides(batch: ClientBatch) -> None:
    """At whole months a frequency w is seen as 2 pi - w, with one of each client's amplitudes turned."""
    w = pyro.sample("w", dist.Uniform(0.5, 6.0))
    tau, noise = (pyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "noise"))
    with batch.clients():
        a, b = (pyro.sample(name, dist.Normal(0.0, tau)) for name in "ab")
        with batch.data():
            wave = a * torch.sin(w * batch.t) + b * torch.cos(w * batch.t)
            pyro.sample("y", dist.Normal(wave, noise), obs=batch.y)


@pytest.mark.slow
def test_modes_at_which_clients_differ_are_visited() -> None:
    g, client = np.random.default_rng(81), np.repeat(np.arange(7), 15)
    t, a = np.tile(np.arange(15.0), 7), g.normal(size=(7, 2))[client]
    y = a[:, 0] * np.sin(2.1 * t) + a[:, 1] * np.cos(2.1 * t) + 0.8 * g.normal(size=105)
    data = ClientData.from_arrays(
        client, names=list("abcdefg"), t=torch.tensor(t), y=torch.tensor(y)
    )
    fit = hierfl.fit(tides, data, seed=0)
    w = fit.get_samples(draws=2000)["w"]
    assert abs(float(w.mean()) - np.pi) < 0.2
    assert abs(float(w.std()) - (np.pi - 2.1)) < 0.05
    assert fit.summary().trustworthy


def of_two_normals() -> tuple[torch.distributions.MixtureSameFamily, list[Mode]]:
    """Two Normal distributions of a number and two clients' two, of which rows see other signs."""
    g = torch.Generator().manual_seed(0)
    slopes = torch.randn(2, 2, 1, generator=g, dtype=torch.float64)
    own = torch.randn(2, 2, 2, generator=g, dtype=torch.float64).tril() + 2.0 * torch.eye(2)
    modes = [
        Mode(30.0 * sign * torch.ones(5), sd * torch.ones(1, 1), sign * slopes, own)
        for sign, sd in ((1.0, 1.0), (-1.0, 0.2))
    ]
    loc, tril = (
        torch.stack([of.loc for of in modes]),
        torch.stack([of.at(torch.eye(5)) for of in modes]),
    )
    normals = torch.distributions.MultivariateNormal(loc, scale_tril=(tril - loc[:, None]).mT)
    share = torch.distributions.Categorical(torch.tensor([0.3, 0.7]))
    return torch.distributions.MixtureSameFamily(share, normals), modes


def test_jumps_between_modes_leave_the_density() -> None:
    """Their masses, widths and correlations are not equal, and trajectories do not pass between."""
    with double_precision():
        mixture, modes = of_two_normals()

        def density(x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                value = mixture.log_prob(x)
            return value.detach(), torch.autograd.grad(value.sum(), x)[0]

        start = torch.stack([of.loc for of in modes])[torch.arange(32) % 2]
        whitening = Whitening(torch.zeros(5), torch.full((1, 1), 20.0), torch.ones(4))
        how: dict[str, Any] = {
            "draws": 5_000,
            "warmup": 60,
            "least": 250,
            "seed": 0,
            "jumps": True,
        }
        drawn = sampled(density, start, whitening, **how, modes=modes)
    assert drawn.r_hat < 1.05
    low = drawn.draws[drawn.draws[:, 0] < 0.0, 0]
    assert abs(len(low) / len(drawn.draws) - 0.7) < 0.04
    assert abs(float(low.std()) - 0.2) < 0.02


def test_curvature_is_right_where_a_slope_is_known_to_the_sixth_digit() -> None:
    x = torch.stack([torch.ones(20), torch.arange(1990.0, 2010.0)], 1).double()
    at = torch.tensor([-80.0, 0.0415], dtype=torch.float64)
    with double_precision():
        falls = bends(lambda v: (5.0 - (v @ x.mT).exp()) @ x, at, 2, 0).matrix()
    exact = x.mT @ (x * (x @ at).exp()[:, None])
    torch.testing.assert_close(falls, exact, rtol=1e-6, atol=0.0)


def test_a_mode_is_the_normal_distribution_that_its_curvature_tells() -> None:
    with double_precision():
        modes = of_two_normals()[1]
        x = torch.randn(9, 5)
        for mode in modes:
            precision = torch.linalg.inv(
                (mode.at(torch.eye(5)) - mode.loc).mT @ (mode.at(torch.eye(5)) - mode.loc)
            )

            def slopes(z: Tensor, loc: Tensor = mode.loc, precision: Tensor = precision) -> Tensor:
                return (loc - z) @ precision

            falls = bends(slopes, mode.loc, 1, 2)
            torch.testing.assert_close(falls.matrix(), precision, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(falls.diagonal(), falls.matrix().diagonal())
            again = normal_about(mode.loc, falls)
            torch.testing.assert_close(mode.back(mode.at(x)), x)
            own = normal_about(mode.loc, falls.of_all()).tril
            torch.testing.assert_close(own @ own.mT, precision.inverse(), rtol=1e-5, atol=1e-5)
            rise = 0.5 * (x[0] @ precision @ x[0])  # to the mode, from a point beside it
            assert mode.gain(slopes(mode.loc + x[0])) == pytest.approx(float(rise), rel=1e-5)
            torch.testing.assert_close(again.at(x), mode.at(x), rtol=1e-5, atol=1e-5)


def test_points_climb_at_once_to_the_modes_that_are_nearest() -> None:
    x = torch.tensor([[-1.0, -3.0], [0.5, 4.0], [9.0, 1.0]], dtype=torch.float64)

    def density(x: Tensor) -> tuple[Tensor, Tensor]:
        """Modes at -2 and 2 of the first, of which 0 has no slope; the second is narrow and follows it."""
        first, other = x.unbind(1)
        away = other - first
        slope = -4.0 * first * (first.square() - 4.0) + 1e4 * away
        return -(first.square() - 4.0).square() - 0.5e4 * away.square(), torch.stack(
            [slope, -1e4 * away], 1
        )

    at, value = climbed_at_once(density, x, 80, 1.0)
    torch.testing.assert_close(at.abs(), torch.full_like(at, 2.0), rtol=0.0, atol=1e-2)
    assert at[0, 0] < 0.0 < at[1:, 0].min()
    assert value.abs().max() < 1e-2
