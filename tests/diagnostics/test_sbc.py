"""Simulation-based calibration: an exact guide passes, one that is too narrow fails."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, full_batch, guides, read
from hierfl.diagnostics import Sbc, ecdf_band, sbc
from hierfl.diagnostics.sbc import _fitted
from hierfl.diagnostics.simulated_data import drawn, with_labels
from hierfl.optimizers import SGD, Adam
from hierfl.plots import rank_ecdf
from hierfl.program.program import stacked
from tests.program.test_refusals import gamma_guide, gamma_model
from tests.programs import federation, learned, logistic, means

SHORT = pytest.mark.filterwarnings("ignore:The fits had not converged")  # few steps suffice here


def rows_of(*counts: int) -> ClientData:
    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ClientData.from_arrays(
        ids, x=torch.randn(len(ids), 2, generator=generator), y=torch.zeros(len(ids))
    )


def varying_slopes(batch: ClientBatch) -> None:
    """A linear-Gaussian hierarchy of known variances, for which the structured guide is exact."""
    g = pyro.sample("g", dist.Normal(torch.zeros(2), 1.5).to_event(1))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(g, 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * b).sum(-1), 1.0), obs=batch.y)


# ----------------------------------------------------------------------------------------- verdicts
def test_an_exact_guide_is_calibrated_and_a_narrow_one_is_not() -> None:
    """E2's model with ten clients of one row: mean field's sd is known."""
    data = rows_of(*[1] * 10)
    options: dict[str, Any] = {
        "replications": 120,
        "steps": 150,
        "num_particles": 1,
        "optimizer": Adam(0.1),
    }
    exact, narrow = (
        sbc(means, family, data, **options) for family in (guides.structured, guides.mean_field)
    )
    assert exact.table().p.min() > 0.001
    assert exact.coverage().loc["g", "cover 90%"] == pytest.approx(0.9, abs=0.08)
    assert exact.coverage().loc["b", "cover 90%"] == pytest.approx(0.9, abs=0.03)
    # ratio of mean field's sd of g to the posterior's
    ratio = ((0.25 + 10.0 / 2.0) / (0.25 + 10.0)) ** 0.5
    inside = 2.0 * float(dist.Normal(0.0, 1.0).cdf(torch.tensor(1.6449 * ratio))) - 1.0
    assert inside < 0.77
    assert narrow.coverage().loc["g", "cover 90%"] == pytest.approx(inside, abs=0.1)
    frame = narrow.ecdf("g")
    assert bool(((frame[""] < frame.low) | (frame[""] > frame.high)).any()), (
        "the curve leaves the band"
    )
    frame = exact.ecdf("g")
    assert bool(((frame[""] >= frame.low) & (frame[""] <= frame.high)).all())


@pytest.mark.slow
def test_fits_that_have_not_converged_are_said_to_be_so() -> None:
    """After 20 steps the ranks say little of the guide; in 150 the ELBO no longer rises."""
    data, options = (
        rows_of(*[1] * 10),
        {"replications": 40, "num_particles": 1, "optimizer": Adam(0.1)},
    )
    how: dict[str, Any] = options
    with pytest.warns(UserWarning, match="not converged: .*still rose by [0-9.]+ .*more steps"):
        found = sbc(means, guides.structured, data, steps=20, **how)
    assert not found.converged and "had not converged" in str(found)
    done = sbc(means, guides.structured, data, steps=150, **how)
    assert done.converged and "had not converged" not in str(done) and done.gain.shape == (40,)


# ------------------------------------------------------------------------------------- replications
@SHORT
def test_a_replication_depends_only_on_the_seed_and_its_number() -> None:
    options: dict[str, Any] = {"steps": 3, "draws": 19, "num_particles": 2, "seed": 4}
    five, three = (
        sbc(varying_slopes, guides.structured, rows_of(2, 1), replications=n, **options)
        for n in (5, 3)
    )
    for site in ("g",):
        assert np.array_equal(five.shared[site][:3], three.shared[site])
    assert np.array_equal(five.own["b"][:3], three.own["b"])
    assert np.allclose(five.elbo[:3], three.elbo, atol=1e-10)
    other = sbc(
        varying_slopes, guides.structured, rows_of(2, 1), replications=5, **{**options, "seed": 5}
    )
    assert not np.array_equal(five.own["b"], other.own["b"])
    assert five.own["b"].shape == (5, 2, 2) and five.shared["g"].shape == (5, 2)


@pytest.mark.parametrize(
    "family", [guides.structured, guides.conditional, guides.amortized(hidden=3)]
)
def test_a_vectorized_step_equals_one_step_per_replication(family: Any) -> None:
    """One SGD step under vmap equals autograd of the pooled program, data set by data set."""
    data = rows_of(2, 1, 3)
    program = read(varying_slopes, family, data)
    batch, ids = full_batch(data, torch.arange(3)), torch.arange(2, dtype=torch.int32)
    _, labels = drawn(program, batch, count=2, seed=0)
    with torch.random.fork_rng():
        params, loss, _ = _fitted(program, batch, labels, ids, 1, SGD(0.01), 1)
    shared, own = program.start()
    start = {**shared, **stacked(program, {k: v.expand(3, *v.shape) for k, v in own.items()})}
    for one in (0, 1):
        free = {k: v.clone().requires_grad_() for k, v in start.items()}
        rows = with_labels(batch, {"y": labels["y"][one]}).redrawn(one).redrawn(0)
        terms = program.terms(free, rows)
        total = terms.nll.sum() + terms.local_kl.sum() + terms.global_kl
        assert float(total.detach()) == pytest.approx(float(loss[one]), abs=1e-9)
        for (name, value), slope in zip(
            free.items(), torch.autograd.grad(total, list(free.values())), strict=True
        ):
            assert torch.allclose(
                params[name][one], value.detach() - 0.01 * slope, atol=1e-10, rtol=0.0
            ), name


def test_simulated_data_have_the_moments_of_the_model() -> None:
    program = read(varying_slopes, guides.delta, rows_of(3, 5))
    batch = full_batch(rows_of(3, 5), torch.arange(2))
    before = torch.get_rng_state()
    values, labels = drawn(program, batch, count=600, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert values["g"].std(0).tolist() == pytest.approx([1.5, 1.5], rel=0.06)
    apart = (values["b"][:, :, 0] - values["g"][:, None]).flatten()
    assert float(apart.std()) == pytest.approx(1.0, rel=0.04)
    noise = labels["y"] - (batch.x * values["b"]).sum(-1)
    assert float(noise[:, batch.mask()].std()) == pytest.approx(1.0, rel=0.04)


def visits(batch: ClientBatch) -> None:
    # a Gamma is not a transformed normal: torch itself draws it
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(0.0, 0.3))
        each = pyro.deterministic("each", rate * own.exp())
        with batch.data():
            pyro.sample("visits", dist.Poisson(each), obs=batch.visits)


@SHORT
def test_counts_binary_labels_and_deterministic_sites() -> None:
    options: dict[str, Any] = {"replications": 4, "steps": 2, "draws": 9}
    counts = sbc(visits, guides.mean_field, federation((3, 4)), **options)
    program = read(visits, guides.mean_field, federation((3, 4)))
    values, labels = drawn(
        program, full_batch(federation((3, 4)), torch.arange(2)), count=3, seed=0
    )
    assert torch.equal(values["each"], values["rate"][:, None, None] * values["own"].exp())
    assert bool((labels["visits"] >= 0).all()) and torch.equal(
        labels["visits"], labels["visits"].round()
    )
    assert counts.own["each"].shape == counts.own["own"].shape == (4, 2)
    assert set(sbc(logistic, guides.mean_field, federation((3, 4)), **options).own) == {"slope"}
    assert counts.table().columns.tolist() == [
        "site",
        "number",
        "client",
        "rows",
        "p",
        "cover 50%",
        "cover 90%",
    ]


# ----------------------------------------------------------------------------- tables, bands, plots
def uniform(replications: int = 200, draws: int = 99) -> Sbc:
    """Return uniform ranks, except for one client whose ranks are all 0."""
    ranks: NDArray[np.int64] = np.arange(replications) % (draws + 1)
    own = np.stack([ranks, ranks[::-1], np.full(replications, 0)], 1)
    return Sbc(
        {"g": ranks},
        {"b": own[..., None]},
        draws,
        ("a", "c", "d"),
        (2, 2, 5),
        np.zeros(replications),
    )


def test_tables_against_values_by_hand() -> None:
    found = uniform()
    table = found.table().set_index(["site", "client"])
    assert table.loc[("g", None)].p.item() == 1.0
    assert table.loc[("b", "d")].p.item() < 1e-100
    assert found.coverage().loc["g"].tolist() == [0.5, 0.9]
    by_rows = found.coverage_by_rows().set_index("rows")["cover 90%"]
    assert by_rows.to_dict() == {2: 0.9, 5: 0.0}
    assert found.ecdf("b").columns.tolist() == ["low", "high", "a [0]", "c [0]", "d [0]"]
    assert np.allclose(found.ecdf("g")[""], found.ecdf("g").index, atol=1e-12)
    with pytest.raises(KeyError, match="there is no site 'h': the sites are g, b"):
        found.ecdf("h")


@pytest.mark.parametrize("count", [60, 500])
def test_the_band_covers_the_whole_curve_with_its_nominal_probability(count: int) -> None:
    at = np.arange(1, 100) / 100.0
    low, high = ecdf_band(count, at, prob=0.9)
    generator = np.random.default_rng(7)
    inside = 0
    for _ in range(1000):
        curve = (generator.integers(0, 100, count)[:, None] < np.arange(1, 100)).mean(0)
        inside += bool(((curve >= low) & (curve <= high)).all())
    assert inside / 1000 == pytest.approx(0.9, abs=0.03)


def test_plots_take_and_return_axes() -> None:
    figure = Figure()
    axes = figure.subplots(1, 2)
    for ax, site in zip(axes, "gb", strict=True):
        assert rank_ecdf(ax, uniform(), site) is ax
        assert ax.get_xlabel() and ax.get_ylabel() and ax.get_legend() is not None
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == [
        "95% band",
        "a [0]",
        "c [0]",
        "d [0]",
    ]
    with pytest.raises(KeyError, match="there is no site 'h'"):
        rank_ecdf(axes[0], uniform(), "h")


# ----------------------------------------------------------------------------------------- refusals


def with_factor(batch: ClientBatch) -> None:
    g = pyro.sample("g", dist.Normal(0.0, 1.0))
    pyro.factor("pull", -g.square())
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(g, 1.0), obs=batch.y)


def of_twice(batch: ClientBatch) -> None:
    g = pyro.sample("g", dist.Normal(0.0, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(g, 1.0), obs=2.0 * batch.y)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (learned, "the model's param 'm' has no prior to draw from"),
        (with_factor, "factor 'pull' cannot be drawn"),
        (of_twice, "site 'y' observes something computed from the field 'y'"),
    ],
)
def test_models_from_which_no_data_can_be_drawn_are_refused(model: Any, match: str) -> None:
    with pytest.raises(ProgramError, match=match):
        sbc(model, guides.delta, rows_of(3, 2), replications=2, steps=1)


@pytest.mark.filterwarnings("ignore:site 'w' is drawn from Gamma")
def test_unsupported_guides_and_arguments_are_refused() -> None:
    with pytest.raises(ProgramError, match="this program runs one client at a time"):
        sbc(gamma_model, gamma_guide, rows_of(3, 2), replications=2)
    with pytest.raises(ValueError, match="must be 1 or more"):
        sbc(varying_slopes, guides.delta, rows_of(3, 2), replications=0)
    assert replace(uniform(), draws=9).replications == 200
    assert hierfl.diagnostics.sbc is sbc
