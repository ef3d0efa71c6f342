"""Continuous latent sites of rows are integrated out: closed forms, quadrature by SciPy, and every method."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, full_batch, guides, methods, read
from hierfl.core.trees import named_leaves
from hierfl.methods.stages import server
from hierfl.program import row_orders
from hierfl.program.handlers import log_joint, unchecked
from hierfl.program.quadrature import fitted
from hierfl.program.row_orders import without_row_sites
from tests import programs

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*torch.jit.script.*:DeprecationWarning"
    ),  # torch.func's own
    pytest.mark.filterwarnings("ignore:do not trust the posterior:UserWarning"),
]
NOISE = 0.4
SETTINGS = hierfl.Settings(compile=False)


def data(seed: int = 0) -> ClientData:
    """Return three clients of 5, 9 and 7 rows: two numbers, a count, a yes or no, three numbers, a flag."""
    g = torch.Generator().manual_seed(seed)
    clients = torch.arange(3).repeat_interleave(torch.tensor([5, 9, 7]))
    count = len(clients)
    x = torch.randn(count, generator=g)
    fields: dict[str, Any] = {
        "x": x,
        "seen": x + NOISE * torch.randn(count, generator=g),
        "y": 0.5 * x + torch.randn(count, generator=g),
        "n": torch.poisson(4.0 * torch.rand(count, generator=g), generator=g),
        "w": (torch.rand(count, generator=g) < 0.4).float(),
        "three": torch.randn(count, 3, generator=g),
        "present": torch.rand(count, generator=g) < 0.7,
    }
    return ClientData.from_arrays(clients, **fields)


def shared() -> tuple[Tensor, Tensor]:
    """Sample what all models here have: a location and a scale."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    return mu, pyro.sample("scale", dist.LogNormal(-0.5, 0.5))


Program = Callable[[ClientBatch], None]


of_rows = programs.of_rows(shared)


# ------------------------------------------------------------ Normal given Normal
@of_rows
def normal(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    e = pyro.sample("e", dist.Normal(own, scale))
    pyro.sample("y", dist.Normal(e, 0.7), obs=batch.y)


@of_rows
def normal_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    pyro.sample("y", dist.Normal(own, (scale**2 + 0.49).sqrt()), obs=batch.y)


# ------------------------------------------------------------ a covariate measured with error
@of_rows
def measured(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    x = pyro.sample("truth", dist.Normal(0.2, scale))
    pyro.sample("seen", dist.Normal(x, NOISE), obs=batch.seen)
    shift = pyro.deterministic("shift", 0.5 * x)
    pyro.sample("y", dist.Normal(own + shift, 0.7), obs=batch.y)


@of_rows
def measured_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    whole = scale**2 + NOISE**2
    pyro.sample("seen", dist.Normal(0.2, whole.sqrt()), obs=batch.seen)
    center = 0.2 + scale**2 / whole * (batch.seen - 0.2)
    unsure = scale**2 * NOISE**2 / whole
    fn = dist.Normal(own + 0.5 * center, (0.49 + 0.25 * unsure).sqrt())
    pyro.sample("y", fn, obs=batch.y)


# ------------------------------------------------------------ two numbers a row, one given the other
@of_rows
def nested(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    first = pyro.sample("first", dist.Normal(own, scale))
    second = pyro.sample("second", dist.Normal(first, 0.6))
    pyro.sample("y", dist.Normal(second + batch.x * first, 0.7), obs=batch.y)


@of_rows
def nested_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    times = 1.0 + batch.x
    sd = (times**2 * scale**2 + 0.36 + 0.49).sqrt()
    pyro.sample("y", dist.Normal(times * own, sd), obs=batch.y)


# ------------------------------------------------------------ three numbers a row: Laplace is exact
@of_rows
def vector(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    prior = dist.Normal(own[..., None].expand(*own.shape, 3), scale).to_event(1)
    e = pyro.sample("e", prior)
    pyro.sample("three", dist.Normal(e, 0.5).to_event(1), obs=batch.three)


@of_rows
def vector_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    sd = (scale**2 + 0.25).sqrt()
    fn = dist.Normal(own[..., None].expand(*own.shape, 3), sd).to_event(1)
    pyro.sample("three", fn, obs=batch.three)


# ------------------------------------------------------------ a label of a row and a number of a row
@of_rows
def labeled(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    label = pyro.sample("label", dist.Bernoulli(0.3))
    e = pyro.sample("e", dist.Normal(own + label, scale))
    pyro.sample("y", dist.Normal(e, 0.7), obs=batch.y)


@of_rows
def labeled_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    sd = (scale**2 + 0.49).sqrt()
    terms = [dist.Normal(own + k, sd).log_prob(batch.y) for k in (0.0, 1.0)]
    weights = torch.tensor([0.7, 0.3]).log()[:, None, None]
    pyro.factor("y", (torch.stack(terms) + weights).logsumexp(0))


# ------------------------------------------------------------ a missing response
@of_rows
def masked(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    pyro.sample("y", dist.Normal(own, scale), obs=batch.y, obs_mask=batch.present)


@of_rows
def masked_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    pyro.sample("y", dist.Normal(own, scale).mask(batch.present), obs=batch.y)


# ------------------------------------------------------------ a missing covariate
@of_rows
def lacking(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    prior = dist.Normal(0.2, scale)
    x = pyro.sample("x", prior, obs=batch.x, obs_mask=batch.present)
    pyro.sample("y", dist.Normal(own + 0.5 * x, 0.7), obs=batch.y)


@of_rows
def lacking_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    pyro.sample("x", dist.Normal(0.2, scale).mask(batch.present), obs=batch.x)
    x = torch.where(batch.present, batch.x, 0.2)
    variance = 0.49 + torch.where(batch.present, 0.0, 0.25 * scale**2)
    pyro.sample("y", dist.Normal(own + 0.5 * x, variance.sqrt()), obs=batch.y)


# ------------------------------------------------------------ probit augmentation, and cuts
@of_rows
def probit(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    utility = pyro.sample("utility", dist.Normal(own + scale * batch.x, 1.0))
    pyro.sample("w", dist.Bernoulli((utility > 0.0).to(own.dtype)), obs=batch.w)


@of_rows
def probit_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    up = dist.Normal(0.0, 1.0).cdf(own + scale * batch.x)
    pyro.sample("w", dist.Bernoulli(up), obs=batch.w)


@of_rows
def cuts(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    utility = pyro.sample("utility", dist.Normal(own, 1.0))
    at = torch.stack([-scale, scale])
    level = (utility[..., None] > at).sum(-1)
    probs = 0.1 + 0.7 * torch.eye(3)[level]
    pyro.sample("level", dist.Categorical(probs), obs=batch.n.clamp(max=2.0))


@of_rows
def cuts_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    low, high = dist.Normal(own, 1.0).cdf(-scale), dist.Normal(own, 1.0).cdf(scale)
    shares = torch.stack([low, high - low, 1.0 - high], -1)
    fn = dist.Categorical(0.1 + 0.7 * shares)
    pyro.sample("level", fn, obs=batch.n.clamp(max=2.0))


# ------------------------------------------------------------ a walk of each row over columns
def loop(batch: ClientBatch, own: Tensor, scale: Tensor, steps: int = 3) -> None:
    at = own
    for t in range(steps):
        at = pyro.sample(f"at_{t}", dist.Normal(at, scale))
        pyro.sample(f"three_{t}", dist.Normal(at, 0.7), obs=batch.three[..., t % 3])


def loop_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor, steps: int = 3) -> None:
    times = torch.arange(1.0, steps + 1.0, dtype=scale.dtype)
    shared_steps = torch.minimum(times[:, None], times)
    covariance = scale**2 * shared_steps + 0.49 * torch.eye(steps, dtype=scale.dtype)
    loc = own[..., None].expand(*own.shape, steps)
    y = batch.three[..., torch.arange(steps) % 3]
    pyro.sample("three", dist.MultivariateNormal(loc, covariance), obs=y)


# ------------------------------------------------------------ a label that depends on a number of its row
@of_rows
def labels_below(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    e = pyro.sample("e", dist.Normal(own, scale))
    label = pyro.sample("label", dist.Bernoulli(torch.special.ndtr(e)))
    pyro.sample("y", dist.Normal(2.0 * label, 0.7), obs=batch.y)


@of_rows
def labels_below_by_hand(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    up = torch.special.ndtr(own / (1.0 + scale**2).sqrt())
    high, low = (dist.Normal(k, 0.7).log_prob(batch.y) for k in (2.0, 0.0))
    pyro.factor("y", torch.logaddexp(up.log() + high, torch.log1p(-up) + low))


PAIRS: dict[str, tuple[Program, Program]] = {
    "normal": (normal, normal_by_hand),
    "measured": (measured, measured_by_hand),
    "nested": (nested, nested_by_hand),
    "vector": (vector, vector_by_hand),
    "labeled": (labeled, labeled_by_hand),
    "masked": (masked, masked_by_hand),
    "lacking": (lacking, lacking_by_hand),
    "probit": (probit, probit_by_hand),
    "cuts": (cuts, cuts_by_hand),
    "loop": (of_rows(loop), of_rows(loop_by_hand)),
    # so many sites that they are one term
    "long loop": (of_rows(partial(loop, steps=6)), of_rows(partial(loop_by_hand, steps=6))),
    "labels below": (labels_below, labels_below_by_hand),
}


def density(model: Program, rows: ClientData) -> Callable[[Tensor], Tensor]:
    """Return the log joint density of rows and local sites, (C,), at mu, log scale and a shift of a."""
    program, batch = read(model, guides.delta, rows), full_batch(rows, torch.arange(3))
    own = torch.randn(3, 1, generator=torch.Generator().manual_seed(1))

    def log_density(point: Tensor) -> Tensor:
        values = {"mu": point[0], "scale": point[1].exp(), "a": own + point[2]}
        with unchecked():
            return log_joint(program.model, values, batch, {})[0]

    return log_density


POINT = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)


@pytest.fixture
def many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let integrals have as many nodes as change nothing in double precision."""
    monkeypatch.setattr(row_orders, "UNCHANGED", 1e-8)


@pytest.mark.slow("long loop", "loop")
@pytest.mark.usefixtures("many_nodes")
@pytest.mark.parametrize("name", PAIRS)
def test_log_densities_and_derivatives_are_those_in_closed_form(name: str) -> None:
    integrated, by_hand = (density(model, data()) for model in PAIRS[name])
    torch.testing.assert_close(integrated(POINT), by_hand(POINT), rtol=0.0, atol=1e-9)
    for derivative in (torch.func.jacrev, torch.func.hessian):
        here, there = (derivative(of)(POINT) for of in (integrated, by_hand))
        torch.testing.assert_close(here, there, rtol=1e-7, atol=1e-7)
    points = POINT + 0.1 * torch.arange(6.0, dtype=torch.float64).view(2, 3)
    expected = torch.stack([by_hand(p) for p in points])
    atol = 1e-7 if name == "labels below" else 1e-9  # integrals without a closed form
    torch.testing.assert_close(torch.vmap(integrated)(points), expected, rtol=0, atol=atol)


# ------------------------------------------------------------ no closed form
@of_rows
def counts(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    e = pyro.sample("e", dist.Normal(0.0, scale))
    pyro.sample("n", dist.Poisson((own + e).exp()), obs=batch.n)


@of_rows
def rates(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0 / scale, 2.0 / (scale * own.exp())))
    pyro.sample("n", dist.Poisson(rate), obs=batch.n)


@of_rows
def present(batch: ClientBatch, own: Tensor, scale: Tensor) -> None:
    e = pyro.sample("e", dist.Normal(own, scale))
    z = pyro.sample("z", dist.Bernoulli(0.5))  # at 0 the rows tell nothing of e
    pyro.sample("n", dist.Poisson(0.1 + z * e.exp()), obs=batch.n)


NORMAL = ("normal", "measured", "nested", "vector", "labeled", "lacking", "loop")
QUADRATIC = [(PAIRS[name][0], True) for name in NORMAL]


@pytest.mark.parametrize(
    ("model", "quadratic"), [*QUADRATIC, *((of, False) for of in (probit, counts, rates, present))]
)
def test_integrals_of_quadratic_log_densities_take_no_nodes(
    model: Program, quadratic: bool
) -> None:
    structure = without_row_sites(model, data())[1]
    assert structure is not None
    assert {term.quadratic for term in structure.terms.values()} == {quadratic}


@pytest.mark.slow("1e-08-1e-07")
@pytest.mark.parametrize(("unchanged", "atol"), [(1e-8, 1e-7), (row_orders.UNCHANGED, 1e-3)])
def test_counts_with_a_shift_of_each_row_are_those_of_scipy(
    unchanged: float, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_orders, "UNCHANGED", unchanged)
    rows = data()
    at = density(counts, rows)(POINT)
    own = torch.randn(3, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    scale, n = float(np.exp(-0.4)), rows.fields["n"]

    def row(count: float, a: float) -> float:
        def integrand(e: float) -> float:
            return float(stats.poisson.pmf(count, np.exp(a + e)) * stats.norm.pdf(e, 0.0, scale))

        return float(np.log(integrate.quad(integrand, -8.0, 8.0, epsabs=1e-14)[0]))

    for k in range(3):
        a = float(own[k, 0])
        inside = (rows.row_client == k).tolist()
        total = sum(row(float(c), a) for c, here in zip(n, inside, strict=True) if here)
        total += float(stats.norm.logpdf(a, 0.3, 1.0))
        assert abs(float(at[k]) - total) < atol


@pytest.mark.usefixtures("many_nodes")
def test_gamma_rates_make_negative_binomial_counts() -> None:
    def by_hand(batch: ClientBatch) -> None:
        mu, scale = shared()
        with batch.clients():
            own = pyro.sample("a", dist.Normal(mu, 1.0))
            with batch.data():
                size, rate = 2.0 / scale, 2.0 / (scale * own.exp())
                pyro.sample("n", dist.GammaPoisson(size, rate), obs=batch.n)

    here, there = density(rates, data()), density(by_hand, data())
    torch.testing.assert_close(here(POINT), there(POINT), rtol=0.0, atol=1e-6)


# ------------------------------------------------------------ methods, predictions, over draws
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the rounds ended while gathering:UserWarning")
def test_clients_weight_fewer_draws_where_each_takes_integrals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "FAR_MANY", 100)
    plain, integrated = (
        hierfl.fit(methods.two_stage(model), data(), rounds=1, progress=False)
        for model in reversed(PAIRS["measured"])
    )
    asked = [len(fit.federation.server.state.asked) for fit in (plain, integrated)]
    assert asked == [2000, 100]


@cache
def quick(model: Program) -> hierfl.Fit:
    """Return a quick fit: what is inferred of rows holds at whatever draws it has."""
    method = methods.fedsvi(model)
    return hierfl.fit(method, data(), rounds=1, seed=0, progress=False, settings=SETTINGS)


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        (partial(methods.fedsvi, guide=guides.structured), 3),
        pytest.param(methods.fedlaplace, 6, marks=pytest.mark.slow),
        (partial(methods.fedsvi, guide=guides.delta), 3),  # MAP
    ],
)
def test_methods_take_them_as_the_closed_form(method: Any, rounds: int | None) -> None:
    fits = [hierfl.fit(method(model), data(), rounds=rounds, seed=0) for model in PAIRS["measured"]]
    drawn = [fit.draws(100, seed=0) for fit in fits]
    for site, value in drawn[0].shared.items():
        torch.testing.assert_close(value, drawn[1].shared[site], rtol=1e-4, atol=1e-4)


def learned(batch: ClientBatch) -> None:
    mu = pyro.param("mu", torch.zeros(()))
    scale = pyro.param("scale", torch.ones(()), constraint=dist.constraints.positive)
    with batch.clients(), batch.data():
        e = pyro.sample("e", dist.Normal(mu, scale))
        pyro.sample("y", dist.Normal(e, 0.7), obs=batch.y)


def learned_by_hand(batch: ClientBatch) -> None:
    mu = pyro.param("mu", torch.zeros(()))
    scale = pyro.param("scale", torch.ones(()), constraint=dist.constraints.positive)
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(mu, (scale**2 + 0.49).sqrt()), obs=batch.y)


def test_params_are_averaged_as_in_the_closed_form() -> None:
    fits = [
        hierfl.fit(methods.fedavg(model, steps=4), data(), rounds=2, seed=0, settings=SETTINGS)
        for model in (learned, learned_by_hand)
    ]
    theirs = named_leaves(fits[1].message)
    for name, value in named_leaves(fits[0].message).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_rows_that_the_first_ones_do_not_show_are_read_too() -> None:
    """The first five rows of each client have a measurement, so that its integral was not seen."""
    data = rows_with_gaps()

    def program(batch: ClientBatch) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with batch.clients():
            own = pyro.sample("own", dist.Normal(0.0, 1.0))
            with batch.data():
                prior = dist.Normal(own, 1.0)
                x = pyro.sample("x", prior, obs=batch.x, obs_mask=batch.present)
                pyro.sample("y", dist.Bernoulli(logits=own + slope * x), obs=batch.y)

    fit = hierfl.fit(methods.two_stage(program), data, rounds=1, seed=0)
    assert fit.history["misread"].tolist() == [0.0]


def rows_with_gaps() -> ClientData:
    """Return two clients of eight rows, of which the first five have a measurement."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, generator=g), (torch.rand(16, generator=g) < 0.5).float()
    present = (torch.arange(8) < 5).repeat(2)
    clients = torch.arange(2).repeat_interleave(8)
    return ClientData.from_arrays(clients, x=torch.where(present, x, 0.0), y=y, present=present)


@pytest.mark.parametrize(("name", "site"), [("measured", "y"), ("probit", None)])
def test_predictions_average_over_the_sites_of_rows(name: str, site: str | None) -> None:
    # after few rounds both have the same draws, which predictions average over
    fits = [quick(model) for model in PAIRS[name]]
    here, there = (fit.predict(data(), site=site) for fit in fits)
    assert here.kind == there.kind
    torch.testing.assert_close(here.mean, there.mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(here.scores(), there.scores(), rtol=1e-3)


def test_rows_are_drawn_from_their_conditional() -> None:
    fit = quick(normal)
    inferred = fit.infer_rows(draws=2000, seed=0)
    draws = fit.draws(2000, seed=0)
    own = draws.own["a"].repeat_interleave(fit.federation.data.counts.long(), 1)
    scale = draws.shared["scale"][:, None]
    y = fit.federation.data.fields["y"]
    share = scale**2 / (scale**2 + 0.49)
    by_hand = (own + share * (y - own)).mean(0)
    sd = ((own + share * (y - own)).var(0) + (0.49 * share).mean(0)).sqrt()
    torch.testing.assert_close(
        torch.tensor(inferred.frame["mean"]), by_hand.double(), rtol=0, atol=0.06
    )
    torch.testing.assert_close(torch.tensor(inferred.frame["sd"]), sd.double(), rtol=0.08, atol=0)
    assert inferred.draws["e"].shape == (2000, 21)
    with pytest.raises(ValueError, match=r"no continuous latent site in batch.data\(\)"):
        quick(normal_by_hand).infer_rows()


def test_over_nodes_the_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    method = methods.fedsvi(counts)
    over = hierfl.nodes.fit(method, hierfl.nodes.in_process(data(), tmp_path), rounds=2, seed=3)
    here = hierfl.fit(method, data(), rounds=2, seed=3, progress=False, settings=SETTINGS)
    theirs = named_leaves(over.message)
    for name, value in named_leaves(here.message).items():
        assert float((theirs[name] - value).abs().max()) < 1e-6, name
    with pytest.raises(Exception, match="infer_rows reads rows, which are at the nodes"):
        over.infer_rows()


def test_messages_are_those_of_the_closed_form() -> None:
    tables = [
        hierfl.diagnostics.audit(methods.fedsvi(model), data(), rounds=1).table
        for model in PAIRS["normal"]
    ]
    columns = ["direction", "name", "shape"]
    assert tables[0][columns].equals(tables[1][columns])


# ------------------------------------------------------------ what is refused
def walk(batch: ClientBatch) -> None:
    with batch.clients(), batch.data():
        step = pyro.sample("step", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(step.cumsum(-1), 1.0), obs=batch.y)


def total(batch: ClientBatch) -> None:
    with batch.clients():
        with batch.data():
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(e, 1.0), obs=batch.y)
        pyro.factor("pull", -batch.sum(e).square())


def unread(batch: ClientBatch) -> None:
    with batch.clients():
        own = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("other", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (walk, r"'y' depends on the site 'step' of other rows.*one_hot\(batch\.time, T\)"),
        (total, r"'pull' depends on the site 'e' of other rows"),
        (unread, r"'other' is latent in the data plate, and no observed site depends on it"),
    ],
)
def test_what_is_no_integral_of_a_row_is_refused_by_name(model: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        read(model, guides.delta, data())


def test_newtons_method_ends_at_the_modes_of_rows() -> None:
    """A Normal's is there after one step, which a second one confirms; also at many points under vmap."""
    calls = 0
    scale = torch.tensor([0.3, 2.0], dtype=torch.float64)

    def place(center: Tensor) -> tuple[Tensor, Tensor]:
        def log(u: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return -0.5 * ((u - center) / scale).square().sum(-1)

        normals = fitted(log, lambda u: -0.5 * u.square().sum(-1), torch.zeros(5, 2).double())
        return normals.loc, normals.root

    centers = torch.randn(7, 5, 2, dtype=torch.float64)
    loc, root = torch.vmap(place)(centers)
    assert calls == 2
    assert torch.allclose(loc, centers)
    assert torch.allclose(root, scale.diag().expand(7, 5, 2, 2))
