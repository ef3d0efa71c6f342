"""Plots of effects show the numbers of their frames."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot, rc_context
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from hierfl.plots.effects import client_panels, client_ranks, conditional_effect


def axes() -> Axes:
    return Figure().subplots()


def table(clients: list[str], values: list[float] | list[str]) -> pd.DataFrame:
    frames = []
    for k, client in enumerate(clients):
        mean = k + np.arange(len(values), dtype=float)
        part = {"x": values, "client": client, "mean": mean, "low": mean - 1.0, "high": mean + 1.0}
        frames.append(pd.DataFrame(part))
    return pd.concat(frames, ignore_index=True)


def test_numbers_are_lines_with_bands() -> None:
    ax = conditional_effect(axes(), table(["a", "new"], [0.0, 1.0, 2.0]), "x", label="y")
    line, new = ax.get_lines()
    np.testing.assert_allclose(np.asarray(line.get_ydata()), [0.0, 1.0, 2.0])
    np.testing.assert_allclose(np.asarray(new.get_ydata()), [1.0, 2.0, 3.0])
    assert [str(curve.get_label()) for curve in (line, new)] == ["a", "new client"]
    band = ax.collections[1].get_paths()[0].vertices
    assert (np.asarray(band)[:, 1].min(), np.asarray(band)[:, 1].max()) == (0.0, 4.0)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "y")


def test_levels_are_points_side_by_side() -> None:
    ax = conditional_effect(axes(), table(["a", "b"], ["f", "m"]), "x")
    assert [text.get_text() for text in ax.get_xticklabels()] == ["f", "m"]
    first, second = (np.asarray(line.get_xdata(), dtype=float) for line in ax.get_lines())
    np.testing.assert_allclose(first, [-0.25, 0.75])
    np.testing.assert_allclose(second, [0.25, 1.25])


def test_each_client_has_a_panel_with_a_color_and_a_band_for_each_level() -> None:
    names = ["a", "b", "c", "d", "new"]
    of_arm = [table(names, [0.0, 1.0]).assign(arm=arm) for arm in ("early", "usual")]
    with rc_context({"backend": "agg"}):
        first = client_panels(pd.concat(of_arm, ignore_index=True), "x", "arm", "y")
        panels = first.figure.axes
        pyplot.close("all")
    assert [ax.get_title() for ax in panels] == ["a", "b", "c", "d", "new client"]
    assert all(len(ax.get_lines()) == len(ax.collections) == 2 for ax in panels)
    np.testing.assert_allclose(np.asarray(panels[1].get_lines()[0].get_ydata()), [1.0, 2.0])
    assert [ax.get_legend() is None for ax in panels] == [True, True, False, True, True]
    assert [ax.get_xlabel() for ax in panels] == ["", "", "x", "x", "x"]
    shown = [ax.xaxis.get_tick_params()["labelbottom"] for ax in panels]
    assert shown == [False, False, True, True, True]


def test_many_clients_are_thin_lines_without_bands() -> None:
    names = [f"c{k}" for k in range(20)]
    ax = conditional_effect(axes(), table([*names, "new"], [0.0, 1.0]), "x")
    assert len(ax.get_lines()) == 21 and len(ax.collections) == 1
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["a client", "new client"]


@pytest.mark.parametrize("values", [[0.0, 1.0], ["f", "m"]])
def test_up_to_twelve_lines_are_told_apart(values: list[Any]) -> None:
    ax = conditional_effect(axes(), table([*(f"c{k}" for k in range(11)), "new"], values), "x")
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.get_lines()}
    assert len(looks) == len(ax.get_lines()) == 12


@pytest.mark.parametrize(("count", "labels"), [(5, True), (60, False)])
def test_ranks_name_clients_while_there_is_room(count: int, labels: bool) -> None:
    at = np.arange(count, dtype=float)
    frame = pd.DataFrame(
        {
            "client": [f"c{k}" for k in range(count)],
            "effect": at,
            "effect_low": at - 1.0,
            "effect_high": at + 1.0,
            "rank": at[::-1] + 1.0,
            "rank_low": 1,
            "rank_high": count,
        }
    )
    ax = client_ranks(axes(), frame, "90%")
    (bars,) = [c for c in ax.collections if isinstance(c, LineCollection)][:1]
    np.testing.assert_allclose(bars.get_segments()[0][:, 0], [count - 2.0, float(count)])
    assert (
        f"c{count - 1}  (1 to {count})" in [t.get_text() for t in ax.get_yticklabels()]
    ) is labels
