"""FedABML and FedAvg on two clients with few rows: distance of the global mean to least squares on all rows.

Usage: `python examples/fedabml_toy.py [--smoke] [--figure FILE]`, which draws the left panel of the
paper's Figure 2.

`hierfl compare examples/studies/fedabml-figure-2.toml` is the full study, over seeds and beside
other methods.
"""

from __future__ import annotations

import argparse

import torch
from matplotlib.figure import Figure

import hierfl
from hierfl import methods, models
from hierfl.optimizers import SGD
from hierfl.studies.lines import fedabml_lines, least_squares


def main(rounds: int = 20, figure: str | None = None) -> None:
    """Fit both methods with ten local steps a round, and print their distances to least squares."""
    torch.set_default_dtype(torch.float64)
    data, _ = fedabml_lines(0)
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    noise = models.likelihood.normal(1.0)
    local = {"batch_size": None}
    fedavg = methods.fedavg(
        models.network(net, likelihood=noise), optimizer=SGD(0.05), steps=10, **local
    )
    hierarchy = models.bayesian_network(
        net, likelihood=noise, prior_scale="learned", scale_start=0.05
    )
    fedabml = methods.fedabml(
        hierarchy, optimizer=SGD(0.05), inner_steps=5, steps=2, unit="step", draws=50, **local
    )
    target, paths = least_squares(data, bias=False), {}
    for name, method in (("FedAvg", fedavg), ("FedABML", methods.by_rows(fedabml))):
        path = [torch.zeros(2)]
        fit = hierfl.fit(
            method,
            data,
            rounds=rounds,
            seed=0,
            callback=lambda fit, path=path: path.append(weights(fit)),
        )
        paths[name] = torch.stack(path)
        away = float((weights(fit) - target).norm())
        at = weights(fit).numpy().round(3)
        print(f"{name}: {at}, {away:.4f} from least squares on all rows")
    own = fit.personalize(data, rounds=1).posterior(200)["posterior"]["w.weight"]
    print(own.std(("chain", "draw")).values.round(3))
    if figure is not None:
        draw(data, target, paths).savefig(figure)
        print(f"{figure} has the paths.")


def weights(fit: hierfl.Fit) -> torch.Tensor:
    """Return the global mean, (2,)."""
    return fit.message["theta.weight"].flatten().clone()


def draw(data: hierfl.ClientData, target: torch.Tensor, paths: dict[str, torch.Tensor]) -> Figure:
    """Draw one and two sds of each client's posterior under a flat prior, and the paths of the global means."""
    figure = Figure(figsize=(5.0, 4.2), layout="constrained")
    ax = figure.subplots()
    angle = torch.linspace(0.0, 2.0 * torch.pi, 200)
    circle = torch.stack([angle.cos(), angle.sin()])
    for k in range(data.num_clients):
        one = data.select([k])
        x, middle = one.fields["x"], least_squares(one, bias=False)
        root = torch.linalg.cholesky(torch.linalg.inv(x.T @ x))
        for sd in (1.0, 2.0):
            ax.plot(*(middle[:, None] + sd * root @ circle), color=str(0.35 + 0.3 * k), lw=0.9)
    for name, path in paths.items():
        ax.plot(*path.T, marker=".", label=name)
    ax.plot(*target, marker="*", markersize=12, ls="none", color="black", label="least squares")
    ax.set(xlabel="first weight", ylabel="second weight")
    ax.legend(frameon=False)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--figure")
    asked = parser.parse_args()
    main(3 if asked.smoke else 20, asked.figure)
