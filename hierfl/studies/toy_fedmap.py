"""FedMAP's toy problem (A.4, Fig. 2 and 3): five clients on parallel lines, two of them with many rows.

    y = -x + 4 (k - 1) + e,  x ~ Normal(k - 1, 1),  e ~ Normal(0, 0.8),  k = 1..5,  rows (60, 1, 2, 3, 50)

Least squares on all rows has a positive slope. The paper calls that line FedAvg's, which it is with one local
step a round. Ditto's line of a client is the exact minimiser about it. FedMAP learns that the clients' slopes
agree and their intercepts do not, so that clients with one row borrow the slope. Its objective M (Eq. 22) is
minimised here by exact alternation. The numbers printed in the paper, after ten gradient steps, are an
intermediate point: the step size is not stated, and no minimiser of M can have an s_b that large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
from hierfl.studies.tuning import Choice, tuned

ROWS = (60, 1, 2, 3, 50)
# The negative log density of a row is then (y - f)^2 plus a constant: A.4's loss.
SQUARED = normal(math.sqrt(0.5))
LEAST_SQUARES, DITTO = "Least squares on all rows", "Ditto's step about it"
METHODS = ("Alone", LEAST_SQUARES, DITTO, "FedMAP, 10 gradient steps", "FedMAP, exact")
GRID = (
    0.03,
    0.1,
    0.3,
    1.0,
    3.0,
)  # of Ditto's weight, and of the step size of FedMAP's gradient server
TUNED_ON = range(100, 105)  # seeds of the draws that both are chosen on; they are in no table
PRINTED = (-1.0735, 9.4882, 1.9431, 97.7605)  # mu_a, mu_b, s_a, s_b


def run(out: Path, *, quick: bool = False, say: Say = quiet, seeds: int = 5) -> Found:
    """Measure the squared error of each client's line on unseen rows, and what FedMAP learns.

    Args:
        out: folder to write to.
        quick: run two seeds.
        say: called with one line of text for each run that is started.
        seeds: number of seeds. A seed fixes the rows and the starting point; the figure shows the first seed.

    Returns:
        The mean squared error of every client and the table of means over seeds.
    """
    described = {"study": "toy-fedmap", **({"quick": True} if quick else {})}
    draws = TUNED_ON[:1] if quick else TUNED_ON
    options: Choice = {}
    for name, option in ((DITTO, "pull"), ("FedMAP, 10 gradient steps", "rate")):
        grid, score = {option: GRID}, partial(trial, name, draws)
        options |= tuned(out, f"toy-fedmap-{option}", described, grid, score, say)
    found = []
    for seed in range(2 if quick else seeds):
        settings = {**described, "seed": seed, "options": options}
        found.append(kept(out, f"toy-fedmap-{seed}", settings, partial(one, seed, options), say))
    records = [
        {"method": name, "seed": seed, "client": k + 1, "mse": value}
        for seed, numbers in enumerate(found)
        for name in METHODS
        for k, value in enumerate(numbers["mse"][name])
    ]
    scores = pd.DataFrame(records)
    files = {
        out / "toy_fedmap.csv": "squared error by method, seed and client",
        out / "toy_fedmap.png": "rows, common lines and the clients' own lines, as in Fig. 2 and 3",
    }
    scores.to_csv(out / "toy_fedmap.csv", index=False)
    picture(found[0]).savefig(out / "toy_fedmap.png", dpi=150)
    return Found(
        "FedMAP's toy: mean squared error on new rows, by client (number of training rows)",
        table(scores),
        scores,
        reading(found, options),
        files,
    )


def clients(seed: int, rows: tuple[int, ...] = ROWS) -> ClientData:
    """Draw the rows of the five clients, x (n, 1) and y (n,)."""
    g = torch.Generator().manual_seed(seed)
    parts = {}
    for k, n in enumerate(rows):
        x = k + torch.randn(n, generator=g, dtype=torch.float64)
        y = -x + 4.0 * k + math.sqrt(0.8) * torch.randn(n, generator=g, dtype=torch.float64)
        parts[f"client {k + 1}"] = {"x": x[:, None], "y": y}
    return ClientData.from_clients(parts)


def line(slope: float, intercept: float) -> nn.Module:
    """Return a linear module that starts at the given line."""
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, slope)
    nn.init.constant_(module.bias, intercept)
    return module


def lines(fitted: Fit) -> list[list[float]]:
    """Return slope and intercept of every client's own line, 5 pairs."""
    own = fitted.progress.table["w"]
    return torch.stack([own["w.weight.at"].flatten(), own["w.bias.at"].flatten()], 1).tolist()


def learned(fitted: Fit) -> list[float]:
    """Return the learned mu_a, mu_b, s_a and s_b.

    The prior of slope a and intercept b has mean mu and precision 1 / (1 + s).
    """
    gamma = fitted.message["gamma"]
    return [
        float(gamma[f"{part}.{name}"]) for part in ("theta", "s") for name in ("weight", "bias")
    ]


def pooled(data: ClientData) -> list[float]:
    """Return slope and intercept of least squares on all rows, Eq. (20)."""
    x, y = data.fields["x"].double(), data.fields["y"].double()
    design = torch.cat([x, torch.ones_like(x)], 1)
    return torch.linalg.lstsq(design, y[:, None]).solution.flatten().tolist()


def trial(name: str, draws: Sequence[int], options: Choice) -> float:
    """Return minus the mean squared error of one method on new rows, over some draws of the rows."""
    errors = []
    with double_precision():
        for seed in draws:
            data, test = rows_of(seed)
            if name == DITTO:
                own = about(pooled(data), options["pull"], data)
            else:
                own = lines(by_gradient(seed, data, options["rate"]))
            errors.append(np.mean(_errors(test, torch.tensor(own))))
    return -float(np.mean(errors))


def one(seed: int, options: Choice) -> Numbers:
    """Run all methods on one draw of the rows.

    Args:
        seed: fixes the rows and the starting point.
        options: "pull", the weight of Ditto's penalty, and "rate", the step size of the gradient server.
    """
    with double_precision():
        data, test = rows_of(seed)
        common, steps = pooled(data), by_gradient(seed, data, options["rate"])
        prior = LearnedVariance()
        learning = map_network(started(seed), prior=prior, likelihood=SQUARED)
        exact = fit(
            fedmap(learning, newton_steps=1, server=prior.best), data, rounds=30, progress=False
        )
        own = {
            "Alone": about([0.0, 0.0], 1e-6, data),
            LEAST_SQUARES: [common] * 5,
            DITTO: about(common, options["pull"], data),
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


@contextmanager
def double_precision() -> Iterator[None]:
    """Use double precision, in which Newton's steps are exact."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def rows_of(seed: int) -> tuple[ClientData, ClientData]:
    """Return training rows, and 200 new rows of each client."""
    return clients(seed), clients(seed + 1000, (200,) * 5)


def started(seed: int) -> nn.Module:
    """Return the line that FedMAP starts at."""
    generator = torch.Generator().manual_seed(seed)
    return line(*torch.randn(2, generator=generator, dtype=torch.float64).tolist())


def about(at: list[float], pull: float, data: ClientData) -> list[list[float]]:
    """Return every client's exact minimiser about a fixed line: Ditto's personal step."""
    model = map_network(line(*at), prior=Isotropic(1.0 / pull), likelihood=SQUARED)
    still = fedmap(model, newton_steps=1, server="gradient", server_optimiser=SGD(0.0))
    return lines(fit(still, data, rounds=1, progress=False))


def by_gradient(seed: int, data: ClientData, rate: float) -> Fit:
    """Return FedMAP after ten gradient steps of the server."""
    model = map_network(started(seed), prior=LearnedVariance(), likelihood=SQUARED)
    method = fedmap(model, newton_steps=1, server="gradient", server_optimiser=SGD(rate))
    return fit(method, data, rounds=10, progress=False)


def _points(data: ClientData) -> list[list[list[float]]]:
    both = torch.cat([data.fields["x"], data.fields["y"][:, None]], 1)
    return [part.tolist() for part in both.split(data.counts.tolist())]


def _errors(test: ClientData, each: Tensor) -> list[float]:
    at = each[test.row_client]
    squared = (at[:, 0] * test.fields["x"][:, 0] + at[:, 1] - test.fields["y"]).square()
    return [float(part.mean()) for part in squared.split(test.counts.tolist())]


# ------------------------------------------------------------------------------------------------ results
def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Average over seeds: one row for each method, one column for each client."""
    wide = (
        scores.groupby(["method", "client"], sort=False)["mse"]
        .mean()
        .unstack("client")
        .reindex(list(METHODS))
    )
    wide.columns = pd.Index([f"{k} ({n})" for k, n in zip(wide.columns, ROWS, strict=True)])
    return wide


def reading(found: list[Numbers], options: Choice) -> list[str]:
    """State what FedMAP learns, beside the numbers printed in the paper."""
    exact, steps = (
        np.array([numbers[kind] for numbers in found]) for kind in ("exact", "gradient")
    )
    slopes = np.array([numbers["pooled"][0] for numbers in found])
    alpha = 1.0 / (1.0 + exact[:, 2:])

    def named(values: NDArray[np.float64]) -> str:
        return ", ".join(
            f"{name} {v:.3g}"
            for name, v in zip(("mu_a", "mu_b", "s_a", "s_b"), values, strict=True)
        )

    return [
        f"The minimiser of M, mean over {len(found)} seeds: {named(exact.mean(0))}; "
        f"the paper prints {named(np.array(PRINTED))}.",
        f"After 10 gradient steps of size {options['rate']:g}: {named(steps.mean(0))}. "
        "This is an intermediate point, as the paper's numbers are.",
        f"The learned prior is {float((alpha[:, 0] / alpha[:, 1]).mean()):.0f} times as precise "
        f"for slopes as "
        f"for intercepts. Least squares on all rows has slope {slopes.mean():.2f}; "
        "every client's own slope is -1.",
        f"Chosen from one grid on {len(TUNED_ON)} other draws: Ditto's weight {options['pull']:g} (0.1 in the "
        f"paper), and the size of the gradient steps.",
    ]


def picture(numbers: Numbers) -> Figure:
    """Plot the paper's Fig. 2 in the upper row and its Fig. 3 in the lower row."""
    figure = Figure(figsize=(10.0, 6.4), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    mu = numbers["exact"][:2]
    titles = (
        (
            "Training rows",
            f"Least squares on all rows: {_equation(numbers['pooled'])}",
            f"FedMAP's mean line: {_equation(mu)}",
        ),
        ("New rows", "Clients' lines, Ditto's step", "Clients' lines, FedMAP"),
    )
    for row, part in enumerate(("train", "test")):
        for column in range(3):
            ax: Axes = axes[row, column]
            _scatter(ax, numbers["rows"][part], faint=column > 0)
            ax.set_title(titles[row][column], fontsize=10, loc="left")
            ax.spines[["top", "right"]].set_visible(False)
    for ax, each in ((axes[0, 1], numbers["pooled"]), (axes[0, 2], mu)):
        _draw(ax, each, (-3.0, 7.0), {"color": "black", "linewidth": 1.6})
    for ax, name in ((axes[1, 1], DITTO), (axes[1, 2], "FedMAP, exact")):
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
