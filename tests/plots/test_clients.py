"""Plots of clients, runs and predictions show the numbers they are given."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hierfl import plots

NAMES = ["north", "south", "east", "west"]
ROWS = np.array([5, 50, 20, 1])


def axes() -> Axes:
    return Figure().subplots()


def draws(size: int = 4000) -> np.ndarray:
    return np.array([0.0, 1.0, 2.0, 3.0]) + np.random.default_rng(0).standard_normal((size, 4))


def points(ax: Axes, label: str) -> np.ndarray:
    handles, names = ax.get_legend_handles_labels()
    (drawn,) = [h for h, n in zip(handles, names, strict=True) if n == label]
    assert isinstance(drawn, PathCollection)
    return np.asarray(drawn.get_offsets())


def xy(line: Line2D) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)


def test_a_forest_has_the_client_with_most_rows_on_top() -> None:
    alone = np.array([9.0, 8.0, 7.0, 6.0])
    ax = plots.client_forest(axes(), draws(), NAMES, rows=ROWS, local_only=alone, prior=draws() * 2)
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names == ["south (50)", "east (20)", "north (5)", "west (1)"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    middles = np.stack([[1.0, 2.0, 0.0, 3.0], range(4)], 1)
    np.testing.assert_allclose(points(ax, "posterior"), middles, atol=0.06)
    np.testing.assert_allclose(points(ax, "own rows only")[:, 0], [8.0, 7.0, 9.0, 6.0])
    (band,) = [c for c in ax.containers if c.get_label() == "global prior"]
    np.testing.assert_allclose([b.get_width() for b in band], 4 * 1.645, rtol=0.08)
    lines = [c.get_segments() for c in ax.collections if isinstance(c, LineCollection)]
    widths = sorted(float(np.mean([s[1, 0] - s[0, 0] for s in segments])) for segments in lines)
    # the medians of the band, the 50% intervals, the 90% intervals
    np.testing.assert_allclose(widths, [0.0, 2 * 0.674, 2 * 1.645], atol=0.06)


def test_a_forest_of_many_clients_has_no_names() -> None:
    many = np.random.default_rng(0).standard_normal((50, 60))
    ax = plots.client_forest(axes(), many, [f"c{i}" for i in range(60)], rows=np.arange(1, 61))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["60 rows", "1"]
    with pytest.raises(ValueError, match=r"it must be \(S, 3\)"):
        plots.client_forest(axes(), many, ["a", "b", "c"])


def test_shrinkage_lines_join_the_diagonal_to_the_hierarchical_estimate() -> None:
    alone, together = np.array([0.0, 2.0, 10.0]), np.array([1.0, 2.0, 6.0])
    ax = plots.shrinkage(axes(), alone, together, rows=[1, 2, 3], center=3.0)
    pairs = np.stack([alone, together], 1)
    np.testing.assert_allclose(points(ax, "client (area: number of rows)"), pairs)
    (lines,) = [c for c in ax.collections if isinstance(c, LineCollection)]
    np.testing.assert_allclose([s[:, 1] for s in lines.get_segments()], pairs)
    assert ax.get_xlim() == ax.get_ylim() and ax.get_xlim()[0] < 0.0 and ax.get_xlim()[1] > 10.0
    with pytest.raises(ValueError, match=r"together has shape \(2,\): it must be \(N,\)"):
        plots.shrinkage(axes(), alone, together[:2])


def test_few_clients_are_named_and_densities_integrate_to_one() -> None:
    ax = plots.prior_and_clients(axes(), draws().ravel(), draws(), NAMES)
    assert ax.get_legend_handles_labels()[1] == ["global prior", *NAMES]
    for line in ax.lines:
        x, y = xy(line)
        assert np.trapezoid(y, x) == pytest.approx(1.0, abs=0.03)
    peaks = [float(x[np.argmax(y)]) for x, y in map(xy, ax.lines[1:])]
    np.testing.assert_allclose(peaks, [0.0, 1.0, 2.0, 3.0], atol=0.35)
    point = plots.prior_and_clients(axes(), draws().ravel(), np.zeros((9, 1)), ["a point"])
    assert xy(point.lines[1])[1].max() == 0.0
    names = [f"c{i}" for i in range(12)]
    many = plots.prior_and_clients(axes(), draws().ravel(), np.tile(draws(50), (1, 3)), names)
    assert many.get_legend_handles_labels()[1] == ["global prior", "a client"]


def test_a_map_preserves_the_distances_of_planar_data() -> None:
    g = np.random.default_rng(0)
    flat = g.standard_normal((30, 2))
    flat = (flat - flat.mean(0)) / flat.std(0)
    names = [f"c{i}" for i in range(30)]
    ax = plots.client_map(axes(), np.concatenate([flat, np.full((30, 1), 7.0)], 1), names)
    (cloud,) = [c for c in ax.collections if isinstance(c, PathCollection)]
    at = np.asarray(cloud.get_offsets())
    distances = [np.linalg.norm(v[:, None] - v[None], axis=-1) for v in (at, flat)]
    np.testing.assert_allclose(distances[0], distances[1], atol=1e-9)
    assert len(ax.texts) == 8 and "component" in ax.get_xlabel()
    noisy = np.concatenate([flat, 1e-3 * g.standard_normal((30, 1))], 1)
    ax = plots.client_map(axes(), noisy, [f"c{i}" for i in range(30)], unit=np.ones(3))
    (cloud,) = [c for c in ax.collections if isinstance(c, PathCollection)]
    at = np.asarray(cloud.get_offsets())
    noisy_distances = np.linalg.norm(at[:, None] - at[None], axis=-1)
    np.testing.assert_allclose(noisy_distances, distances[1], atol=0.01)
    with pytest.raises(ValueError, match="3 or more clients that differ: there are 5, and they"):
        plots.client_map(axes(), np.ones((5, 2)), list("abcde"))


def history(values: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"round": range(len(values)), "elbo": values})


def test_convergence_draws_the_median_over_seeds_and_a_band_over_all() -> None:
    runs = [history([-1000.0, -10.0, -9.0, -8.0 + s]) for s in (-1.0, 0.0, 3.0)]
    ax = plots.convergence(axes(), {"svi": runs})
    assert xy(ax.lines[0])[1].tolist() == [-1000.0, -10.0, -9.0, -8.0]
    band = np.asarray(ax.collections[0].get_paths()[0].vertices)
    assert {(3.0, -9.0), (3.0, -5.0)} <= {(float(x), float(y)) for x, y in band}
    assert ax.get_ylim()[0] > -1000.0 and [t.get_text() for t in ax.texts] == ["↓ to -1000"]
    whole = plots.convergence(axes(), runs[0], settled=0.0)
    assert whole.get_ylim()[0] < -1000.0 and not whole.texts
    with pytest.raises(ValueError, match="no column 'loss': its columns are round, elbo"):
        plots.convergence(axes(), runs, column="loss")


def test_coverage_of_calibrated_intervals_is_on_the_diagonal() -> None:
    g = np.random.default_rng(0)
    ax = plots.coverage(axes(), g.standard_normal((2000, 3000)), g.standard_normal(3000))
    x, y = xy(ax.lines[1])
    np.testing.assert_allclose(x, y, atol=0.035)
    narrow = plots.coverage(axes(), 0.5 * g.standard_normal((200, 300)), g.standard_normal(300))
    x, y = xy(narrow.lines[1])
    assert (y[5:] < x[5:]).all()


@pytest.mark.parametrize("count", [4, 60])
def test_rates_outside_their_interval_have_their_own_marker(count: int) -> None:
    table = pd.DataFrame(
        {
            "rows": range(1, count + 1),
            "observed": np.linspace(0.1, 0.9, count),
            "expected": 0.5,
            "low": 0.2,
            "high": 0.8,
        },
        index=[f"c{i}" for i in range(count)],
    )
    table["covered"] = (table.low <= table.observed) & (table.observed <= table.high)
    ax = plots.rates(axes(), table)
    axis = 0 if count == 4 else 1
    np.testing.assert_allclose(
        np.sort(points(ax, "observed")[:, axis]), table.observed[table.covered]
    )
    np.testing.assert_allclose(
        np.sort(points(ax, "observed, outside the interval")[:, axis]),
        table.observed[~table.covered],
    )
    if count == 4:
        assert ax.get_yticklabels()[0].get_text() == "c0 (1)"


def test_entropies_draw_one_line_per_client_and_one_for_all() -> None:
    g = np.random.default_rng(0)
    own, foreign = g.uniform(0.0, 0.7, (5, 40)), g.uniform(0.5, 1.5, (5, 40))
    ax = plots.entropies(axes(), own, foreign, labels=("tests", "letters"))
    assert ax.get_legend_handles_labels()[1] == ["tests", "letters"] and len(ax.lines) == 12
    thick = [line for line in ax.lines if line.get_linewidth() == 2.0]
    for line in thick:
        x, y = xy(line)
        assert np.trapezoid(y, x) == pytest.approx(1.0, abs=0.06)
    assert ax.get_yscale() == "linear"
    assert plots.entropies(axes(), np.zeros(50) + 1e-3, foreign.ravel()).get_yscale() == "symlog"
