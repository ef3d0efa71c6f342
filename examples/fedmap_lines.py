"""FedMAP's toy problem: a prior learned from five clients on parallel lines, three of them with 1 to 3 rows.

Usage: `python examples/fedmap_lines.py [--smoke] [--figure FILE]`, which draws the paper's Figures
2 and 3.

`hierfl compare examples/studies/fedmap-figures-2-3.toml` compares methods on these clients.
"""

from __future__ import annotations

import argparse
import math

import torch
from matplotlib.figure import Figure
from torch import nn

import hierfl
from hierfl.methods import ditto, fedmap
from hierfl.models.learned_priors import LearnedVariance
from hierfl.optimizers import SGD
from hierfl.studies.lines import fedmap_lines, least_squares

Line = tuple[float, float]  # slope and intercept


def main(rounds: int = 30, figure: str | None = None) -> None:
    """Learn the prior's mean and precision of slope and intercept, and print every client's line."""
    torch.set_default_dtype(torch.float64)
    train, test = fedmap_lines(0)
    prior = LearnedVariance()
    # The negative log density is (y - f)^2 plus a constant: the paper's loss.
    squared = hierfl.models.likelihood.normal(math.sqrt(0.5))
    model = hierfl.models.learned_prior_network(nn.Linear(1, 1), prior=prior, likelihood=squared)
    methods = {
        "10 gradient steps": fedmap(model, newton_steps=1, server="gradient"),
        "exact": fedmap(model, newton_steps=1, server=prior.best),
    }
    for name, method in methods.items():
        fit = hierfl.fit(method, train, rounds=rounds if name == "exact" else 10)
        gamma = fit.message["gamma"]
        print(
            f"\n{name}: the prior's mean has slope {float(gamma['theta.weight']):.2f} "
            f"and intercept {float(gamma['theta.bias']):.2f},"
        )
        slope, intercept = (float(prior.alpha(gamma[f"s.{p}"])) for p in ("weight", "bias"))
        print(f"with precision {slope:.3f} and {intercept:.4f}")
        lines = lines_of(fit)
        for client, rows, line in zip(train.names, train.counts.tolist(), lines, strict=True):
            print(f"  {client}, {rows:2d} rows: {line[0]:5.2f} x + {line[1]:5.2f}")
    if figure is not None:
        common = hierfl.models.network(nn.Linear(1, 1), likelihood=squared)
        # one step a round is gradient descent on all rows, whose end is least squares
        step = {"optimizer": SGD(0.02), "steps": 1, "unit": "step", "batch_size": None}
        pulled = hierfl.fit(ditto(common, prox=0.1, **step), train, rounds=40 * rounds)
        mean = (float(gamma["theta.weight"]), float(gamma["theta.bias"]))
        draw(train, test, mean, {"Ditto": lines_of(pulled), "FedMAP": lines}).savefig(figure)
        print(f"\n{figure} has the lines.")


def lines_of(fit: hierfl.Fit) -> list[Line]:
    """Return every client's line, read off its predictions at 0 and at 1."""
    rows = {name: {"x": torch.tensor([[0.0], [1.0]])} for name in fit.clients}
    at = fit.predict(hierfl.ClientData.from_clients(rows)).mean.unflatten(0, (-1, 2))
    return [(float(one - zero), float(zero)) for zero, one in at]


def draw(
    train: hierfl.ClientData, test: hierfl.ClientData, mean: Line, own: dict[str, list[Line]]
) -> Figure:
    """Draw training rows with the two common lines, and test rows with the clients' own."""
    slope, intercept = least_squares(train, bias=True).tolist()
    figure = Figure(figsize=(10.0, 6.4), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    for row, part in zip(axes, (train, test), strict=True):
        for ax in row:
            for k in range(part.num_clients):
                rows = part.select([k]).fields
                ax.scatter(rows["x"][:, 0], rows["y"], s=8, color=f"C{k}", alpha=0.4)
            ax.set(xlabel="x", ylabel="y", ylim=(-6.0, 20.0))
    for ax, (a, b), name in (
        (axes[0, 1], (slope, intercept), "least squares on all rows"),
        (axes[0, 2], mean, "FedMAP's mean line"),
    ):
        ax.axline((0.0, b), slope=a, color="black")
        ax.set_title(f"{name}: y = {a:.2f} x {b:+.2f}", fontsize=10)
    for ax, (name, lines) in zip(axes[1, 1:], own.items(), strict=True):
        for k, (a, b) in enumerate(lines):
            ax.plot([k - 2.5, k + 2.5], [a * (k - 2.5) + b, a * (k + 2.5) + b], color=f"C{k}")
        ax.set_title(f"clients' lines, {name}", fontsize=10)
    axes[0, 0].set_title("training rows", fontsize=10)
    axes[1, 0].set_title("test rows", fontsize=10)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--figure")
    asked = parser.parse_args()
    main(3 if asked.smoke else 30, asked.figure)
