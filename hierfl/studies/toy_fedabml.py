"""FedABML's toy problem (section 5.1, Fig. 2): how far the global mean of two clients is from the best one.

The two clients have few rows and fit two weights by least squares. Each client sees one of two directions
well and the other hardly at all, so its own optimum is far off along the other. The target is the mean of the
two posteriors under a flat prior, weighted by precision, which is least squares on the pooled rows. The fixed
point of FedAvg's ten local steps is known in closed form (oracle O4 of the tests), and it is not the target.
FedABML's fixed point is that of a random-effects model with the prior's spread. The smaller the spread, the
nearer it is to the target, and the spread is learned. Ditto's global model equals FedAvg's, step for step.
Both methods take ten local steps in a round, FedABML two times K = 5 with a step of the prior after each K. The
size of all steps is chosen for each method and seed from FedABML's grid, by the log density of validation rows.
The paper states no sizes; ours are in `Toy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import t as student
from torch import Tensor, nn

from hierfl import plots
from hierfl.data.clients import ClientData
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin, rounds
from hierfl.method import Method
from hierfl.methods.by_rows import by_rows
from hierfl.methods.fedabml import fedabml
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fine_tuned import fine_tuned
from hierfl.models import bayesian_network, network
from hierfl.models.likelihood import normal
from hierfl.optimisers import SGD
from hierfl.runs.result import Fit
from hierfl.studies.results import Found, Numbers, Say, kept, quiet
from hierfl.studies.tuning import RATES, Choice, tuned

FEDAVG, FEDABML = METHODS = ("FedAvg", "FedABML")
GRID = {"lr": RATES}  # FedABML's eta is its lr


@dataclass(frozen=True)
class Toy:
    """Sizes of the toy problem; our choice, since the paper states none.

    Args:
        rows: rows of the two clients.
        wide: standard deviation of x in the direction that a client sees well.
        narrow: standard deviation of x in the other direction.
        rounds: rounds of both methods.
        inner: K, FedABML's steps on a mini-batch, here all rows of a client.
        repeats: FedABML's steps of the prior in a round, one after each K.
        spread: FedABML's initial prior scale.
        draws: FedABML's posterior draws of a gradient.
    """

    rows: tuple[int, int] = (20, 30)
    wide: float = 3.0
    narrow: float = 0.5
    rounds: int = 25
    inner: int = 5
    repeats: int = 2
    spread: float = 0.05
    draws: int = 50

    @property
    def steps(self) -> int:
        """Local steps in a round, of both methods."""
        return self.inner * self.repeats


def run(out: Path, *, quick: bool = False, say: Say = quiet, seeds: int = 5) -> Found:
    """Measure the distance to the target, and the loss after ten local steps, round by round.

    Args:
        out: folder to write to.
        quick: run a few rounds of two seeds.
        say: called with one line of text for each run that is started.
        seeds: number of runs, shown as mean and 95 % band. A seed fixes the rows, their noise and the draws.

    Returns:
        Distance and loss of every run and round, and the table of means over seeds.
    """
    toy = Toy(rounds=4) if quick else Toy()
    records = []
    for seed in range(2 if quick else seeds):
        for name in METHODS:
            settings = {"study": "toy-fedabml", "method": name, "seed": seed, **asdict(toy)}
            key = f"toy-{name}-{seed}"
            options = tuned(out, key, settings, GRID, partial(trial, name, seed, toy), say)
            found = kept(
                out,
                key,
                {**settings, "options": options},
                partial(trace, name, seed, toy, options),
                say,
            )
            records += [{**row, **options} for row in _by_round(name, seed, found)]
    scores = pd.DataFrame(records)
    files = {
        out / "toy_fedabml.csv": "distance, loss and step size by method, seed and round",
        out / "toy_fedabml.png": "the same numbers as a figure",
    }
    scores.to_csv(out / "toy_fedabml.csv", index=False)
    picture(scores, toy).savefig(out / "toy_fedabml.png", dpi=150)
    return Found(
        "FedABML's toy: distance to the pooled mean, and loss after fine-tuning",
        table(scores),
        scores,
        reading(scores),
        files,
    )


def _by_round(name: str, seed: int, found: Numbers) -> list[dict[str, Any]]:
    """Return one record for each round of a run."""
    columns = zip(found["distance"], found["loss"], found["mean"], strict=True)
    return [
        {
            "method": name,
            "seed": seed,
            "round": r,
            "distance": distance,
            "loss": loss,
            "w0": mean[0],
            "w1": mean[1],
        }
        for r, (distance, loss, mean) in enumerate(columns)
    ]


# ------------------------------------------------------------------------------------------------ two clients
def clients(seed: int, toy: Toy) -> ClientData:
    """Draw x (n, 2), wide in one direction and narrow in the other, and y ~ Normal(x . (1, -1), 1)."""
    g = torch.Generator().manual_seed(1000 + seed)
    parts = {}
    for name, n, scales in zip(
        "ab", toy.rows, ((toy.wide, toy.narrow), (toy.narrow, toy.wide)), strict=True
    ):
        x = torch.randn(n, 2, generator=g, dtype=torch.float64) * torch.tensor(scales)
        x = x @ torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
        parts[name] = {
            "x": x,
            "y": x @ torch.tensor([1.0, -1.0], dtype=torch.float64)
            + torch.randn(n, generator=g, dtype=x.dtype),
        }
    return ClientData.from_clients(parts)


def pooled(data: ClientData) -> Tensor:
    """Return the target (2,): the precision-weighted mean of the clients' posteriors under a flat prior.

    It equals least squares on the pooled rows.
    """
    x, y = data.fields["x"].double(), data.fields["y"].double()
    return torch.linalg.solve(x.T @ x, x.T @ y)


def methods(toy: Toy, options: Choice) -> dict[str, Callable[[], Method]]:
    """Return a builder of FedAvg and FedABML: equally many local steps of size `options["lr"]`, from w = 0."""
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    likelihood = normal(1.0)
    local: dict[str, Any] = {
        "optimiser": SGD(options["lr"]),
        "steps": toy.steps,
        "batch_size": None,
    }
    return {
        FEDAVG: lambda: fine_tuned(
            fedavg(network(net, likelihood=likelihood), **local), unit="step", **local
        ),
        FEDABML: lambda: by_rows(
            fedabml(
                bayesian_network(
                    net, likelihood=likelihood, prior_scale="learned", scale_start=toy.spread
                ),
                lam=1.0,
                lr=options["lr"],
                inner_steps=toy.inner,
                steps=toy.repeats,
                unit="step",
                batch_size=None,
                draws=toy.draws,
            )
        ),
    }


def trial(name: str, seed: int, toy: Toy, options: Choice) -> float:
    """Return the clients' mean log p(y | x) of validation rows after ten local steps, in nats per row."""
    fitting, held_out = clients(seed, toy).split(0.8, seed=seed)
    *_, fitted = each_round(methods(toy, options)[name](), fitting, seed, toy.rounds)
    return -after_tuning(fitted, fitting, held_out, seed)


def trace(name: str, seed: int, toy: Toy, options: Choice) -> Numbers:
    """Run one method; measure it before the first round and after each.

    Returns:
        Distance of the global mean to the target, the clients' mean loss after fine-tuning, and the global
        mean.
    """
    data = clients(seed, toy)
    target = pooled(data)
    found: Numbers = {"distance": [], "loss": [], "mean": []}
    for fitted in each_round(methods(toy, options)[name](), data, seed, toy.rounds):
        at = fitted.message["theta.weight"].flatten().double()
        found["distance"].append(float((at - target).norm()))
        found["mean"].append(at.tolist())
        found["loss"].append(after_tuning(fitted, data, data, seed))
    return found


def each_round(method: Method, data: ClientData, seed: int, count: int) -> Iterator[Fit]:
    """Yield the fit before its first round, and after each round."""
    federation = federate(method, data, seed=seed)
    start = begin(federation)
    yield Fit(method, federation, start, count)
    for where in rounds(federation, start, count):
        yield Fit(method, federation, where, count)


def after_tuning(fitted: Fit, data: ClientData, scored: ClientData, seed: int) -> float:
    """Return the clients' mean -log p(y | x) of some rows after ten local steps on others, in nats per row."""
    scores = fitted.personalise(data, rounds=1).predict(scored, draws=32, seed=seed).scores()
    return -float(scores.log_score.mean())


# ------------------------------------------------------------------------------------------------ results
def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Format mean ± half-width of the 95 % interval over seeds, after round 5 and after the last round."""
    last = int(scores["round"].max())
    rows = {}
    for name in METHODS:
        row: dict[str, Any] = {}
        for r in sorted({min(5, last), last}):
            runs = scores[(scores.method == name) & (scores["round"] == r)]
            for what in ("distance", "loss"):
                middle, half = band(runs[what].to_numpy()[:, None])
                row[f"{what}, round {r}"] = f"{middle[0]:.3f} ± {half[0]:.3f}"
        rows[name] = row
    found = pd.DataFrame.from_dict(rows, orient="index")
    found.index.name = "method"
    return found


def reading(scores: pd.DataFrame) -> list[str]:
    """State from which round on FedABML is nearer than FedAvg, and the distances after the last round."""
    mean = scores.groupby(["round", "method"])["distance"].mean().unstack()
    nearer = mean[FEDABML] < mean[FEDAVG]
    since = next((int(r) for r in nearer.index if bool(nearer.loc[r:].all())), None)
    last = mean.iloc[-1]
    return [
        "In the mean over seeds, FedABML is "
        + (
            f"nearer to the pooled mean than FedAvg in every round from {since} on."
            if since is not None
            else "not nearer to the pooled mean than FedAvg after the last round."
        ),
        f"Distance after the last round: {last[FEDABML]:.3f} against {last[FEDAVG]:.3f}. "
        "Ditto's global model equals FedAvg's.",
        "Step sizes, chosen on validation rows from one grid, by seed: "
        + "; ".join(
            f"{name} {', '.join(f'{v:.3g}' for v in scores[scores.method == name].groupby('seed').lr.first())}"
            for name in METHODS
        )
        + ".",
    ]


def band(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return mean and half-width of the 95 % Student t interval over the first dimension."""
    n = len(values)
    half = (
        student.ppf(0.975, max(n - 1, 1)) * values.std(0, ddof=1) / np.sqrt(n)
        if n > 1
        else np.zeros(values.shape[1:])
    )
    return values.mean(0), half


def picture(scores: pd.DataFrame, toy: Toy) -> Figure:
    """Plot the clients' posteriors and the global mean's paths (seed 0); then distance and loss by round."""
    figure = Figure(figsize=(10.0, 3.3), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1.0, 1.0))
    contours(left, clients(0, toy))
    for k, name in enumerate(METHODS):
        own = scores[scores.method == name]
        path = own[own.seed == 0]
        style: dict[str, Any] = {"color": plots.COLOURS[k], "linewidth": 1.3}
        left.plot(path.w0, path.w1, marker=plots.MARKERS[k], markersize=2.5, label=name, **style)
        for ax, what in ((middle, "distance"), (right, "loss")):
            runs = own.pivot_table(index="seed", columns="round", values=what)
            mean, half = band(runs.to_numpy())
            ax.plot(runs.columns, mean, linestyle=("-", "--")[k], label=name, **style)
            ax.fill_between(
                runs.columns,
                mean - half,
                mean + half,
                color=style["color"],
                alpha=0.18,
                linewidth=0.0,
            )
    middle.set(xlabel="round", ylabel="distance of the global mean to the target", yscale="log")
    right.set(xlabel="round", ylabel="local loss after ten local steps, nats")
    left.set(xlabel="first weight", ylabel="second weight")
    for ax in (left, middle, right):
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in (middle, right):
        ax.yaxis.label.set_size(8.5)
    late = scores[scores["round"] > 1].groupby(["method", "round"])["loss"].agg(["min", "max"])
    # Round 0 says nothing about either method and may be off the scale.
    right.set_ylim(late["min"].min() - 0.05, late["max"].max() + 0.15)
    left.legend(fontsize=7.5, frameon=False, loc="best")
    middle.legend(
        fontsize=7.5, frameon=False, title="mean and 95 % band over seeds", title_fontsize=7.5
    )
    return figure


def contours(ax: Any, data: ClientData) -> None:
    """Draw one and two standard deviations of each client's posterior under a flat prior, and the target."""
    angle = np.linspace(0.0, 2.0 * np.pi, 200)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    for k, name in enumerate(data.names):
        one = data.select([name])
        x, y = one.fields["x"].double(), one.fields["y"].double()
        cov = torch.linalg.inv(x.T @ x)
        root, mle = np.asarray(torch.linalg.cholesky(cov)), np.asarray(cov @ x.T @ y)
        for sd in (1.0, 2.0):
            at = mle[:, None] + sd * root @ circle
            label = f"client {name}, 1 and 2 sd" if sd == 1.0 else None
            ax.plot(
                at[0],
                at[1],
                color=("0.35", "0.65")[k],
                linewidth=0.9,
                linestyle=("-", ":")[k],
                label=label,
            )
    target = pooled(data)
    ax.plot(
        *target.tolist(),
        marker="*",
        markersize=11,
        color=plots.COLOURS[3],
        linestyle="none",
        label="target",
        zorder=5,
    )
