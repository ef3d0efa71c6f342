"""Clients that no training has seen (the form of FedABML's Table 2, on its Fashion-MNIST clients).

Of 200 clients of 2 classes, 40 train multinomial logistic regression; the other 160 start from what the server has and take up to
10 passes over their own training rows. Scored is the mean over those clients of the accuracy on their own test rows, after each
number of passes: at 0 none of them has looked at a row. The paper's table is of CIFAR-10 with a CNN; the form is what is kept.
FedABML takes three steps for each mini-batch (its paper studies 1 to 7, and settles on 5), FedAvg and FedProx one: as many passes
are not as many steps.

Of seeds 0 to 2, accuracy in %, mean and standard deviation over seeds, after 0, 1, 5 and 10 passes: FedAvg 73.3 ± 6.4, 94.7 ± 0.5,
96.4 ± 0.6 and 96.7 ± 0.5; FedProx the same to 0.3; pFedBayes 9.2 ± 3.4, 94.1 ± 0.7, 95.9 ± 0.7 and 96.1 ± 0.7; FedABML 72.2 ± 7.6,
95.9 ± 0.4, 96.7 ± 0.5 and 96.8 ± 0.5: it is the best after one pass and after ten, as in the paper's table.

Without the image set: scikit-learn's digits, 4 of 16 clients to train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import hierfl
from hierfl import plots
from hierfl.data.clients import ClientData
from hierfl.method import Method
from hierfl.methods.fedabml import fedabml
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fine_tuned import fine_tuned
from hierfl.methods.pfedbayes import pfedbayes
from hierfl.models import bayesian_network, network
from hierfl.optimisers import SGD
from hierfl.studies import image_splits as images
from hierfl.studies.ood_entropy import digits
from hierfl.studies.results import Found, Numbers, Say, kept, quiet, spread

METHODS = ("FedAvg", "FedProx", "pFedBayes", "FedABML")


@dataclass(frozen=True)
class Setting:
    """Of all runs; a tenth of the clients a round is the paper's."""

    clients: int = 200
    trained: int = 40
    rounds: int = 100
    cohort: int = 4
    passes: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 8, 10)
    draws: int = 20
    scaling: Literal["pixel", "one"] = "one"
    images: Literal["fashion", "digits"] = "fashion"


def run(out: Path, *, quick: bool = False, say: Say = quiet, seeds: int = 3) -> Found:
    """Accuracy of new clients after 0 to 10 passes over their own rows, by method.

    Args:
        out: folder to write to.
        quick: a few rounds on digits.
        say: told what is being done.
        seeds: of the split, the start, the order of rows and the draws: as many runs.
    """
    setting = Setting()
    small = Setting(clients=16, trained=4, cohort=2, rounds=60, images="digits")
    if quick:
        seeds, setting = 1, Setting(**{**asdict(small), "rounds": 5, "passes": (0, 1, 5)})
    else:
        try:
            images.merged("fashion_mnist")
        except FileNotFoundError as error:
            say(f"on scikit-learn's digits, since {error}")
            setting = small
    records = []
    for seed in range(seeds):
        for name in METHODS:
            settings = {
                "study": "new-clients-fashion",
                "method": name,
                "seed": seed,
                **asdict(setting),
            }
            key = f"new-{setting.images}-{name}-{seed}"
            found = kept(out, key, settings, lambda n=name, s=seed: curve(n, s, setting), say)  # type: ignore[misc]
            records += [
                {"method": name, "seed": seed, "passes": e, "accuracy": a}
                for e, a in zip(setting.passes, found["accuracy"], strict=True)
            ]
    scores = pd.DataFrame(records)
    files = {
        out / "new_clients_fashion.csv": "accuracy by method, seed and passes",
        out / "new_clients_fashion.png": "the same as curves",
    }
    scores.to_csv(out / "new_clients_fashion.csv", index=False)
    picture(scores).savefig(out / "new_clients_fashion.png", dpi=150)
    title = (
        f"Accuracy of {setting.clients - setting.trained} new clients, %, by passes over their rows"
    )
    return Found(title, table(scores), scores, reading(scores), files)


def federation(setting: Setting, seed: int) -> tuple[ClientData, ClientData]:
    """Training and test rows of all clients; pixels are scaled by those that train."""
    if setting.images == "fashion":
        source, sizes = images.merged("fashion_mnist"), {"train": 150, "test": 25}
    else:
        source, sizes = digits(), {"train": 30, "test": 13}
    rows = images.equal_classes(source.y, clients=setting.clients, classes=2, seed=seed, **sizes)
    train, test, _ = images.deal(source, *rows, scaling=setting.scaling, scaled_by=setting.trained)
    return train, test


def methods(seed: int, features: int) -> dict[str, Callable[[], Method]]:
    """Each on one start; a round that a new client takes is one pass over its rows, of batches of 50."""
    net = images.started(partial(images.mclr, features), seed)
    hierarchy = bayesian_network(net, prior_scale="learned", scale_start=0.0067)  # exp(-5)

    def averaging(prox: float) -> Method:
        method = fedavg(
            network(net), optimiser=SGD(0.01), steps=5, unit="epoch", batch_size=50, prox=prox
        )
        return fine_tuned(method, optimiser=SGD(0.01), batch_size=50)

    return {
        "FedAvg": lambda: averaging(0.0),
        "FedProx": lambda: averaging(0.5),  # FedABML's value for sets like this
        "pFedBayes": lambda: pfedbayes(hierarchy, zeta=0.05, steps=6, batch_size=50),
        "FedABML": lambda: fedabml(hierarchy, lam=0.003, lr=0.01, eta=1.0, inner_steps=3, draws=1),
    }


def curve(name: str, seed: int, setting: Setting) -> Numbers:
    """One run: accuracy in % after each number of passes."""
    train, test = federation(setting, seed)
    known, new = train.names[: setting.trained], train.names[setting.trained :]
    options: dict[str, Any] = {
        "cohort": setting.cohort,
        "progress": False,
        "compile": setting.images == "fashion",
    }
    method = methods(seed, train.fields["x"].shape[-1])[name]()
    fitted = hierfl.fit(method, train.select(known), rounds=setting.rounds, seed=seed, **options)
    theirs, asked = train.select(new), test.select(new)
    draws = 1 if name in ("FedAvg", "FedProx") else setting.draws
    found = []
    for passes in setting.passes:
        scores = (
            fitted.personalise(theirs, rounds=passes)
            .predict(asked, draws=draws, seed=seed)
            .scores()
        )
        found.append(100.0 * float(scores.accuracy.mean()))
    return {"accuracy": found}


# ------------------------------------------------------------------------------------------------ what is shown
def table(scores: pd.DataFrame) -> pd.DataFrame:
    """A row a method, a column a number of passes: mean and standard deviation over seeds."""
    found = spread(scores, ["method", "passes"], "accuracy")
    shown = found["mean"].map("{:.2f}".format)
    if found["count"].max() > 1:
        shown = shown + found["std"].map(" ± {:.2f}".format)
    frame = shown.unstack("passes").reindex(METHODS)
    frame.columns = [str(c) for c in frame.columns]
    return frame


def reading(scores: pd.DataFrame) -> list[str]:
    """Who is ahead early and late."""
    mean = scores.groupby(["passes", "method"])["accuracy"].mean().unstack()
    first, last = int(mean.index[1]), int(mean.index[-1])
    return [
        f"After {e} pass{'es' if e > 1 else ''} the best is {mean.loc[e].idxmax()}: {mean.loc[e].max():.2f} %; "
        f"FedABML has {mean.loc[e, 'FedABML']:.2f} %, FedAvg fine-tuned {mean.loc[e, 'FedAvg']:.2f} %."
        for e in dict.fromkeys([first, last])
    ]


def picture(scores: pd.DataFrame) -> Figure:
    """Accuracy by passes from the first on: mean, and a band of one standard deviation over seeds."""
    figure = Figure(figsize=(5.2, 3.5), layout="constrained")
    ax = figure.subplots()
    for k, name in enumerate(METHODS):
        own = scores[(scores.method == name) & (scores.passes > 0)].pivot_table(
            index="seed", columns="passes", values="accuracy"
        )
        mean, sd = own.mean().to_numpy(), np.nan_to_num(own.std().to_numpy())
        at = own.columns.to_numpy()
        ax.plot(
            at,
            mean,
            color=plots.COLOURS[k],
            marker=plots.MARKERS[k],
            markersize=4.5,
            linewidth=1.3,
            label=name,
        )
        ax.fill_between(at, mean - sd, mean + sd, color=plots.COLOURS[k], alpha=0.15, linewidth=0.0)
    ax.set_xticks(sorted(set(scores.passes) - {0}))
    ax.set_xlabel("passes over a new client's own rows", fontsize=9)
    ax.set_ylabel("accuracy on its test rows, %", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    return figure
