"""Plots show the intervals, bins and names they are given, in colors that all can tell apart."""

import re

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.stats import beta, norm

from hierfl import plots
from hierfl.diagnostics import equal_mass

CLIENTS, NAMES = ["north", "south"], ["age", "sex", "dose"]


def axes() -> Axes:
    return Figure().subplots()


def draws(size: int = 4000) -> tuple[xr.DataArray, xr.DataArray]:
    noise = np.random.default_rng(1).standard_normal((1, size, 2, 3))
    means = np.array([[0.0, 1.0, 2.0], [-1.0, 0.0, 5.0]])
    local = xr.DataArray(
        means + noise, dims=["chain", "draw", "client", "x"], coords={"client": CLIENTS, "x": NAMES}
    )
    return local, (2.0 * local.isel(client=0, drop=True))


def test_forest_shows_medians_and_intervals_of_every_client_and_the_prior() -> None:
    local, prior = draws()
    ax = plots.forest(axes(), local, prior, prob=0.8, labels={"dose": "dose (mg)"})
    assert [label.get_text() for label in ax.get_yticklabels()] == ["age", "sex", "dose (mg)"]
    handles, names = ax.get_legend_handles_labels()
    assert sorted(names) == ["global prior", "north", "south"]
    points = dict(zip(names, handles, strict=True))["south"][0]
    np.testing.assert_allclose(points.get_xdata(), [-1.0, 0.0, 5.0], atol=0.06)
    bars = dict(zip(names, handles, strict=True))["south"][2][0].get_segments()
    half = norm.ppf(0.9)
    np.testing.assert_allclose(
        [b[:, 0] for b in bars], [[m - half, m + half] for m in (-1.0, 0.0, 5.0)], atol=0.12
    )
    bands = [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches if isinstance(p, Rectangle)]
    np.testing.assert_allclose(
        bands, [[2 * m - 2 * half, 2 * m + 2 * half] for m in (0.0, 1.0, 2.0)], atol=0.24
    )
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first coefficient is at the top"


def test_clients_of_one_coefficient_do_not_overlap() -> None:
    local, prior = draws(50)
    ax = plots.forest(axes(), local, prior)
    heights = {
        float(y)
        for line in ax.lines
        for y in np.atleast_1d(line.get_ydata())
        if np.size(line.get_xdata()) == 3
    }
    assert len(heights) == 6
    assert min(np.diff(sorted(heights))) > 0.2


def test_reliability_of_calibrated_predictions_lies_on_the_diagonal() -> None:
    source = np.random.default_rng(2)
    p = source.uniform(size=20_000)
    mean, share, low, high = equal_mass(p, source.uniform(size=20_000) < p, bins=10)
    np.testing.assert_allclose(mean, np.arange(0.05, 1.0, 0.1), atol=0.01)
    assert np.abs(mean - share).max() < 0.03
    inside = (low < mean) & (mean < high)
    assert inside.mean() >= 0.7


def test_bins_have_equal_sizes_and_jeffreys_intervals() -> None:
    p, y = np.linspace(0, 1, 11), np.array([0, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1])
    mean, share, low, high = equal_mass(p, y, bins=3, prob=0.95)
    np.testing.assert_allclose(mean, [0.15, 0.55, 0.9])
    np.testing.assert_allclose(share, [0.25, 0.5, 1.0])
    np.testing.assert_allclose([low[1], high[1]], beta.ppf([0.025, 0.975], 2.5, 2.5))
    assert high[2] == 1.0
    assert len(equal_mass([0.2, 0.4, 0.6], [0, 1, 1], bins=8)[0]) == 1


@pytest.mark.parametrize(("p", "y"), [([0.1, 0.2], [1]), ([], []), ([[0.1]], [[1]])])
def test_probabilities_of_other_labels_are_refused(p: list[float], y: list[int]) -> None:
    with pytest.raises(ValueError, match=r"both must be \(n,\), n > 0"):
        equal_mass(p, y)


def test_reliability_has_a_legend_entry_per_name() -> None:
    source = np.random.default_rng(3)
    rows = {
        name: (source.uniform(size=40), source.integers(0, 2, size=40)) for name in ("one", "two")
    }
    ax = plots.reliability(axes(), rows, bins=4)
    assert ax.get_legend_handles_labels()[1] == ["one", "two"]
    assert ax.get_aspect() == 1.0


def test_colors_differ_in_lightness_or_hue_for_the_color_blind() -> None:
    """No two of the first four colors are close under a simulated deficiency.

    Reference: Viénot, Brettel and Mollon 1999.
    """
    linear = np.array([to_rgb(c) for c in plots.COLORS[:4]]) ** 2.2
    protan = np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]])
    deutan = np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]])
    for matrix in (np.eye(3), protan, deutan):
        seen = np.clip(linear @ matrix.T, 0.0, 1.0) ** (1 / 2.2)
        gaps = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[i + 1 :]]
        assert min(gaps) > 0.3
    assert len(set(plots.MARKERS[:6])) == 6


def test_a_forest_of_a_scalar_has_one_row_and_others_are_refused() -> None:
    local, prior = (v.isel(x=0, drop=True).rename("level") for v in draws(50))
    ax = plots.forest(axes(), local, prior)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["level"]
    with pytest.raises(ValueError, match=r"must have 'client' \(a global site is drawn by arviz"):
        plots.forest(axes(), prior, prior)
    with pytest.raises(ValueError, match=r"local has the dimensions \(\), prior .*: give arrays"):
        plots.forest(axes(), local.values, prior)  # type: ignore[arg-type]


def test_pit_counts_the_share_of_replicates_below_and_half_of_those_equal() -> None:
    ax = plots.pit(axes(), [[0.0, 0.0], [1.0, 2.0]], [1.0, 3.0], bins=4)
    bars = [bar for bar in ax.patches[:4] if isinstance(bar, Rectangle)]
    assert [bar.get_height() for bar in bars] == [0.0, 0.0, 0.0, 2.0]  # 0.75 and 1
    with pytest.raises(ValueError, match=re.escape("it must be (n,), where S = 1, n = 2")):
        plots.pit(axes(), [[0.0, 0.0]], [1.0, 3.0, 2.0])


def test_messages_are_summed_by_node_and_step_in_their_order() -> None:
    log = {"what": ["schema", "schema", "update"], "round": [None, None, 0], "bytes": [100, 20, 9]}
    logs = {"va": pd.DataFrame(log), "north": pd.DataFrame(log).iloc[:2]}
    ax = plots.messages(axes(), logs)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["schema", "round 0"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["va", "north"]
    cells = {text.get_position(): text.get_text() for text in ax.texts}
    assert cells == {(0.5, 0.5): "120", (1.5, 0.5): "9", (0.5, 1.5): "120"}
    for none in ({}, {"va": pd.DataFrame(log).iloc[:0]}):
        with pytest.raises(ValueError, match=r"give each node's left\.jsonl, as a frame"):
            plots.messages(axes(), none)
    many = {"va": pd.DataFrame({"what": "update", "round": range(100), "bytes": 9})}
    ax = plots.messages(axes(), many)
    assert not ax.texts and len(ax.get_xticklabels()) < 50


def test_k_hats_are_sorted_and_those_not_below_the_limit_are_marked() -> None:
    ax = plots.k_hats(axes(), pd.Series({"va": 0.2, "north": 0.9, "east": 0.7, "west": 0.5}))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["north", "east", "west", "va"]
    limit, good, bad = ax.lines
    np.testing.assert_allclose(np.asarray(limit.get_xdata()), 0.7)
    np.testing.assert_allclose(np.asarray(good.get_xydata()), [[0.5, 2.0], [0.2, 3.0]])
    np.testing.assert_allclose(np.asarray(bad.get_xydata()), [[0.9, 0.0], [0.7, 1.0]])
    many = plots.k_hats(axes(), pd.Series(np.linspace(0.0, 1.0, 50), [f"c{k}" for k in range(50)]))
    assert not any(label.get_text().startswith("c") for label in many.get_yticklabels())
