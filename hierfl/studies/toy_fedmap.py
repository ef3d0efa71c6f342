"""FedMAP's toy (A.4, Fig. 2 and 3): five clients on parallel lines, two of them with many rows, and what their common line is.

    y = -x + 4 (k - 1) + e,  x ~ Normal(k - 1, 1),  e ~ Normal(0, 0.8),  k = 1..5,  rows (60, 1, 2, 3, 50)

Least squares on all rows has a positive slope. FedMAP learns that slopes are alike and intercepts are not, so that clients with one
row borrow the slope. Its objective M (Eq. 22) is solved here by exact alternation; the paper's printed numbers after ten gradient
steps are a point on the way (its rate is not stated, and its s_b is beyond what any minimiser of M can have).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from hierfl import plots
from hierfl.data.clients import ClientData
from hierfl.methods.fedmap import fedmap
from hierfl.models import map_network
from hierfl.models.likelihood import normal
from hierfl.models.map_priors import Isotropic, LearnedVariance
from hierfl.optimisers import SGD
from hierfl.runs.fit import fit
from hierfl.runs.result import Fit
from hierfl.studies.results import Found, Numbers, Say, kept, quiet

ROWS = (60, 1, 2, 3, 50)
SQUARED = normal(
    math.sqrt(0.5)
)  # minus the log density of a row is (y - f)^2 and a constant: A.4's loss
METHODS = ("Alone", "FedAvg", "Ditto", "FedMAP, 10 gradient steps", "FedMAP, exact")
PRINTED = (-1.0735, 9.4882, 1.9431, 97.7605)  # mu_a, mu_b, s_a, s_b
DITTO = 0.1  # its pull, as in Fig. 3b
RATE = 1.0  # of the gradient server; not stated


def run(out: Path, *, quick: bool = False, say: Say = quiet, seeds: int = 5) -> Found:
    """Squared error of each client's line on rows it has not seen, and what FedMAP learns.

    Args:
        out: folder to write to.
        quick: two seeds.
        say: told what is being done.
        seeds: of rows and starting points; the figure is of the first.
    """
    found = []
    for seed in range(2 if quick else seeds):
        settings = {"study": "toy-fedmap", "seed": seed, "rate": RATE, "ditto": DITTO}
        found.append(kept(out, f"toy-fedmap-{seed}", settings, lambda s=seed: one(s), say))  # type: ignore[misc]
    records = [
        {"method": name, "seed": seed, "client": k + 1, "mse": value}
        for seed, numbers in enumerate(found)
        for name in METHODS
        for k, value in enumerate(numbers["mse"][name])
    ]
    scores = pd.DataFrame(records)
    files = {
        out / "toy_fedmap.csv": "squared error by method, seed and client",
        out / "toy_fedmap.png": "rows, common lines and the clients' own, as in Fig. 2 and 3",
    }
    scores.to_csv(out / "toy_fedmap.csv", index=False)
    picture(found[0]).savefig(out / "toy_fedmap.png", dpi=150)
    return Found(
        "FedMAP's toy: squared error on new rows, a column a client (rows it has)",
        table(scores),
        scores,
        reading(found),
        files,
    )


def clients(seed: int, rows: tuple[int, ...] = ROWS) -> ClientData:
    """Rows of the five clients."""
    g = torch.Generator().manual_seed(seed)
    parts = {}
    for k, n in enumerate(rows):
        x = k + torch.randn(n, generator=g, dtype=torch.float64)
        y = -x + 4.0 * k + math.sqrt(0.8) * torch.randn(n, generator=g, dtype=torch.float64)
        parts[f"client {k + 1}"] = {"x": x[:, None], "y": y}
    return ClientData.from_clients(parts)


def line(slope: float, intercept: float) -> nn.Module:
    """A module that starts at a line."""
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, slope)
    nn.init.constant_(module.bias, intercept)
    return module


def lines(fitted: Fit) -> list[list[float]]:
    """Slope and intercept of every client's own line."""
    own = fitted.progress.table["w"]
    return torch.stack([own["w.weight.at"].flatten(), own["w.bias.at"].flatten()], 1).tolist()


def learned(fitted: Fit) -> list[float]:
    """Mu_a, mu_b, s_a, s_b."""
    gamma = fitted.message["gamma"]
    return [
        float(gamma[f"{part}.{name}"]) for part in ("theta", "s") for name in ("weight", "bias")
    ]


def pooled(data: ClientData) -> list[float]:
    """The line of least squares on all rows, Eq. (20): where FedAvg's gradient steps lead."""
    x, y = data.fields["x"].double(), data.fields["y"].double()
    design = torch.cat([x, torch.ones_like(x)], 1)
    return torch.linalg.lstsq(design, y[:, None]).solution.flatten().tolist()


def one(seed: int) -> Numbers:
    """All of one draw of the rows, as JSON holds it. In double precision: Newton's steps are exact there."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _one(seed)
    finally:
        torch.set_default_dtype(dtype)


def _one(seed: int) -> Numbers:
    data, test = clients(seed), clients(seed + 1000, (200,) * 5)
    begin = torch.randn(
        2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).tolist()
    prior, common = LearnedVariance(), pooled(data)
    learning = map_network(line(*begin), prior=prior, likelihood=SQUARED)

    def held(at: list[float], pull: float) -> list[list[float]]:
        """Every client's exact minimiser about a line that stays where it is: Ditto's personal step."""
        model = map_network(line(*at), prior=Isotropic(1.0 / pull), likelihood=SQUARED)
        return lines(
            fit(
                fedmap(model, newton_steps=1, server="gradient", server_optimiser=SGD(0.0)),
                data,
                rounds=1,
            )
        )

    steps = fit(
        fedmap(learning, newton_steps=1, server="gradient", server_optimiser=SGD(RATE)),
        data,
        rounds=10,
    )
    exact = fit(fedmap(learning, newton_steps=1, server=prior.best), data, rounds=30)
    own = {
        "Alone": held([0.0, 0.0], 1e-6),
        "FedAvg": [common] * 5,
        "Ditto": held(common, DITTO),
        "FedMAP, 10 gradient steps": lines(steps),
        "FedMAP, exact": lines(exact),
    }
    return {
        "rows": {name: _points(rows) for name, rows in (("train", data), ("test", test))},
        "pooled": common,
        "gradient": learned(steps),
        "exact": learned(exact),
        "lines": own,
        "mse": {name: _errors(test, torch.tensor(each)) for name, each in own.items()},
    }


def _points(data: ClientData) -> list[list[list[float]]]:
    both = torch.cat([data.fields["x"], data.fields["y"][:, None]], 1)
    return [part.tolist() for part in both.split(data.counts.tolist())]


def _errors(test: ClientData, each: Tensor) -> list[float]:
    at = each[test.row_client]
    squared = (at[:, 0] * test.fields["x"][:, 0] + at[:, 1] - test.fields["y"]).square()
    return [float(part.mean()) for part in squared.split(test.counts.tolist())]


# ------------------------------------------------------------------------------------------------ what is shown
def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds, a column a client."""
    wide = (
        scores.groupby(["method", "client"], sort=False)["mse"]
        .mean()
        .unstack("client")
        .reindex(list(METHODS))
    )
    wide.columns = pd.Index([f"{k} ({n})" for k, n in zip(wide.columns, ROWS, strict=True)])
    return wide


def reading(found: list[Numbers]) -> list[str]:
    """What is learned, beside what the paper prints."""
    exact, steps = (
        np.array([numbers[kind] for numbers in found]) for kind in ("exact", "gradient")
    )
    slopes = np.array([numbers["pooled"][0] for numbers in found])
    alpha = 1.0 / (1.0 + exact[:, 2:])

    def told(values: NDArray[np.float64]) -> str:
        return ", ".join(
            f"{name} {v:.3g}"
            for name, v in zip(("mu_a", "mu_b", "s_a", "s_b"), values, strict=True)
        )

    return [
        f"The minimiser of M, mean over {len(found)} seeds: {told(exact.mean(0))}; the paper prints {told(np.array(PRINTED))}.",
        f"After 10 gradient steps of rate {RATE:g}: {told(steps.mean(0))}: on the way, as the paper's numbers are.",
        f"Slopes are held {float((alpha[:, 0] / alpha[:, 1]).mean()):.0f} times as tightly as intercepts; the line of all rows rises "
        f"({slopes.mean():.2f}) where every client's falls (-1).",
    ]


def picture(numbers: Numbers) -> Figure:
    """Fig. 2 above, Fig. 3 below."""
    figure = Figure(figsize=(10.0, 6.4), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    mu = numbers["exact"][:2]
    titles = (
        (
            "Training rows",
            f"Least squares on all: {_equation(numbers['pooled'])}",
            f"FedMAP's mean: {_equation(mu)}",
        ),
        ("New rows", "Clients' lines, Ditto", "Clients' lines, FedMAP"),
    )
    for row, part in enumerate(("train", "test")):
        for column in range(3):
            ax: Axes = axes[row, column]
            _scatter(ax, numbers["rows"][part], faint=column > 0)
            ax.set_title(titles[row][column], fontsize=10, loc="left")
            ax.spines[["top", "right"]].set_visible(False)
    for ax, each in ((axes[0, 1], numbers["pooled"]), (axes[0, 2], mu)):
        _draw(ax, each, (-3.0, 7.0), {"color": "black", "linewidth": 1.6})
    for ax, name in ((axes[1, 1], "Ditto"), (axes[1, 2], "FedMAP, exact")):
        for k, each in enumerate(numbers["lines"][name]):
            _draw(ax, each, (k - 2.5, k + 2.5), {"color": plots.COLOURS[k], "linewidth": 1.8})
    axes[0, 0].legend(
        title="client (rows)", fontsize=8, title_fontsize=8, frameon=False, loc="upper left"
    )
    axes[0, 0].set_ylim(-6.0, 20.0)
    for ax in axes[1]:
        ax.set_xlabel("x")
    for ax in axes[:, 0]:
        ax.set_ylabel("y")
    return figure


def _equation(at: list[float]) -> str:
    return f"y = {at[0]:.2f} x {'+' if at[1] >= 0 else '-'} {abs(at[1]):.2f}"


def _scatter(ax: Axes, clients_: list[list[list[float]]], *, faint: bool) -> None:
    for k, points in enumerate(clients_):
        x, y = np.array(points).T
        style: dict[str, Any] = {
            "color": plots.COLOURS[k],
            "marker": plots.MARKERS[k],
            "alpha": 0.25 if faint else 0.8,
        }
        ax.scatter(x, y, s=14, linewidths=0, label=f"{k + 1} ({ROWS[k]})", **style)


def _draw(ax: Axes, at: list[float], between: tuple[float, float], style: dict[str, Any]) -> None:
    x = np.array(between)
    ax.plot(x, at[0] * x + at[1], **style)
