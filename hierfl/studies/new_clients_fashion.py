"""Accuracy on clients unseen in training: the form of FedABML's Table 2, on its Fashion-MNIST clients.

Of 200 clients with 2 classes each, 40 train a multinomial logistic regression. The other 160 are new. Each
starts from what the server has and takes up to 10 passes over its own training rows. The score is the mean
accuracy of the new clients on their own test rows, after each number of passes. After 0 passes no new client
has used a row. The paper's table is of CIFAR-10 with a CNN; this study keeps only its form. FedABML takes
three steps on each mini-batch (its paper studies 1 to 7, and settles on 5), FedAvg and FedProx one, so equal
numbers of passes are not equal numbers of steps.

Accuracy in %, mean ± standard deviation over seeds 0 to 2, by number of passes:

                  0            1           5           10
    FedAvg        73.3 ± 6.4   94.7 ± 0.5  96.4 ± 0.6  96.7 ± 0.5
    FedProx       the same as FedAvg to 0.3
    pFedBayes      9.2 ± 3.4   94.1 ± 0.7  95.9 ± 0.7  96.1 ± 0.7
    FedABML       72.2 ± 7.6   95.9 ± 0.4  96.7 ± 0.5  96.8 ± 0.5

FedABML is the best after one pass and after ten, as in the paper's table.

If the image set is missing, the study uses scikit-learn's digits: 16 clients, 4 of which train.
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
    """Settings of every run; a cohort of a tenth of the training clients is the paper's.

    Args:
        clients: clients in all.
        trained: clients that train; the others are new.
        rounds: rounds of training.
        cohort: clients in a round.
        passes: numbers of passes over its rows after which a new client is scored.
        draws: posterior draws of a prediction.
        scaling: how pixels are standardised, as in `image_splits.deal`.
        images: the image set.
    """

    clients: int = 200
    trained: int = 40
    rounds: int = 100
    cohort: int = 4
    passes: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 8, 10)
    draws: int = 20
    scaling: Literal["pixel", "one"] = "one"
    images: Literal["fashion", "digits"] = "fashion"


def run(out: Path, *, quick: bool = False, say: Say = quiet, seeds: int = 3) -> Found:
    """Measure the accuracy of new clients after 0 to 10 passes over their own rows, by method.

    Args:
        out: folder to write to.
        quick: run a few rounds on scikit-learn's digits.
        say: called with one line of text for each run that is started.
        seeds: number of runs of each method. A seed fixes the split, the initial weights, the order of rows
            and the draws.

    Returns:
        The accuracy of every run and the table of means over seeds.
    """
    setting = Setting()
    small = Setting(clients=16, trained=4, cohort=2, rounds=60, images="digits")
    if quick:
        seeds, setting = 1, Setting(**{**asdict(small), "rounds": 5, "passes": (0, 1, 5)})
    else:
        try:
            images.merged("fashion_mnist")
        except FileNotFoundError as error:
            say(f"using scikit-learn's digits instead of Fashion-MNIST: {error}")
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
        out / "new_clients_fashion.png": "the same numbers as curves",
    }
    scores.to_csv(out / "new_clients_fashion.csv", index=False)
    picture(scores).savefig(out / "new_clients_fashion.png", dpi=150)
    title = (
        f"Accuracy of {setting.clients - setting.trained} new clients, %, by passes over their rows"
    )
    return Found(title, table(scores), scores, reading(scores), files)


def federation(setting: Setting, seed: int) -> tuple[ClientData, ClientData]:
    """Return all clients' training and test rows, with pixels scaled by those of the clients that train."""
    if setting.images == "fashion":
        source, sizes = images.merged("fashion_mnist"), {"train": 150, "test": 25}
    else:
        source, sizes = digits(), {"train": 30, "test": 13}
    rows = images.equal_classes(source.y, clients=setting.clients, classes=2, seed=seed, **sizes)
    train, test, _ = images.deal(source, *rows, scaling=setting.scaling, scaled_by=setting.trained)
    return train, test


def methods(seed: int, features: int) -> dict[str, Callable[[], Method]]:
    """Return a builder of each method by name; all methods start from the same weights.

    A round of a new client is one pass over its rows, in mini-batches of 50.
    """
    net = images.started(partial(images.mclr, features), seed)
    hierarchy = bayesian_network(net, prior_scale="learned", scale_start=0.0067)  # exp(-5)

    def averaging(prox: float) -> Method:
        method = fedavg(
            network(net), optimiser=SGD(0.01), steps=5, unit="epoch", batch_size=50, prox=prox
        )
        return fine_tuned(method, optimiser=SGD(0.01), batch_size=50)

    return {
        "FedAvg": lambda: averaging(0.0),
        "FedProx": lambda: averaging(0.5),  # FedABML's value for data sets of this kind
        "pFedBayes": lambda: pfedbayes(hierarchy, zeta=0.05, steps=6, batch_size=50),
        "FedABML": lambda: fedabml(hierarchy, lam=0.003, lr=0.01, eta=1.0, inner_steps=3, draws=1),
    }


def curve(name: str, seed: int, setting: Setting) -> Numbers:
    """Run one method; return the new clients' mean accuracy in % after each number of passes."""
    train, test = federation(setting, seed)
    known, new = train.names[: setting.trained], train.names[setting.trained :]
    options: dict[str, Any] = {
        "cohort": setting.cohort,
        "progress": False,
        "compile": setting.images == "fashion",
    }
    method = methods(seed, train.fields["x"].shape[-1])[name]()
    fitted = hierfl.fit(method, train.select(known), rounds=setting.rounds, seed=seed, **options)
    new_train, new_test = train.select(new), test.select(new)
    draws = 1 if name in ("FedAvg", "FedProx") else setting.draws
    found = []
    for passes in setting.passes:
        scores = (
            fitted.personalise(new_train, rounds=passes)
            .predict(new_test, draws=draws, seed=seed)
            .scores()
        )
        found.append(100.0 * float(scores.accuracy.mean()))
    return {"accuracy": found}


# ------------------------------------------------------------------------------------------------ results
def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Format mean ± sd over seeds: one row for each method, one column for each number of passes."""
    found = spread(scores, ["method", "passes"], "accuracy")
    shown = found["mean"].map("{:.2f}".format)
    if found["count"].max() > 1:
        shown = shown + found["std"].map(" ± {:.2f}".format)
    frame = shown.unstack("passes").reindex(METHODS)
    frame.columns = [str(c) for c in frame.columns]
    return frame


def reading(scores: pd.DataFrame) -> list[str]:
    """State which method is best after the first and after the last number of passes."""
    mean = scores.groupby(["passes", "method"])["accuracy"].mean().unstack()
    first, last = int(mean.index[1]), int(mean.index[-1])
    return [
        f"After {e} pass{'es' if e > 1 else ''} the best method is {mean.loc[e].idxmax()} "
        f"with {mean.loc[e].max():.2f} %; "
        f"FedABML has {mean.loc[e, 'FedABML']:.2f} %, fine-tuned FedAvg {mean.loc[e, 'FedAvg']:.2f} %."
        for e in dict.fromkeys([first, last])
    ]


def picture(scores: pd.DataFrame) -> Figure:
    """Plot accuracy against the number of passes, from 1: the mean, with a band of one sd over seeds."""
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
    ax.set_xlabel("passes over a new client's training rows", fontsize=9)
    ax.set_ylabel("accuracy on the client's test rows, %", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    return figure
