"""Accuracy on clients unseen in training: the form of FedABML's Table 2, on its Fashion-MNIST clients.

Of 200 clients with 2 classes each, 40 train a multinomial logistic regression. The other 160 are new. Each
starts from what the server has and takes up to 10 rounds of 30 steps on its own training rows. The score is
the mean accuracy of the new clients on their own test rows, after each number of steps. After 0 steps no new
client has used a row. The paper's table is of CIFAR-10 with a CNN, by passes over the rows; this study keeps
only its form. `studies.compared` says what a step is, and what is chosen for each method: the score is then the
accuracy, on validation rows, of 10 of the training clients that play new ones. What was found stands in
docs/studies.md.

If the image set is missing, the study uses scikit-learn's digits: 16 clients, 6 of which train.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hierfl import plots
from hierfl.data.clients import ClientData
from hierfl.studies import image_splits as images
from hierfl.studies.compared import FEDABML, FEDAVG, GRIDS, LOCAL, accuracy, trained
from hierfl.studies.ood_entropy import digits
from hierfl.studies.results import Found, Numbers, Say, kept, quiet, spread
from hierfl.studies.tuning import Choice, told, tuned

METHODS = tuple(GRIDS)


@dataclass(frozen=True)
class Setting:
    """Settings of every run; a cohort of a tenth of the training clients is the paper's.

    Args:
        clients: clients in all.
        trained: clients that train; the others are new.
        rounds: rounds of training.
        cohort: clients in a round.
        adapted: rounds of 30 local steps after which a new client is scored.
        draws: posterior draws of a prediction.
        scaling: how pixels are standardised, as in `image_splits.deal`.
        images: the image set.
        validated: clients, of those that train, that play new ones in a trial of the tuning.
        tuning_rounds: rounds of a trial.
    """

    clients: int = 200
    trained: int = 40
    rounds: int = 100
    cohort: int = 4
    adapted: tuple[int, ...] = (0, 1, 2, 5, 10)
    draws: int = 20
    scaling: Literal["pixel", "one"] = "one"
    images: Literal["fashion", "digits"] = "fashion"
    validated: int = 10
    tuning_rounds: int = 25


SMALL = Setting(clients=16, trained=6, cohort=2, rounds=60, images="digits", validated=2)
QUICK = replace(SMALL, rounds=5, tuning_rounds=1, adapted=(0, 1, 2))


def run(
    out: Path,
    *,
    quick: bool = False,
    say: Say = quiet,
    seeds: int = 3,
    rounds: int = Setting.rounds,
) -> Found:
    """Measure the accuracy of new clients after 0 to 10 rounds of steps on their own rows, by method.

    Args:
        out: folder to write to.
        quick: run a few rounds on scikit-learn's digits.
        say: called with one line of text for each run that is started.
        seeds: number of runs of each method. A seed fixes the split, the initial weights, the order of rows
            and the draws.
        rounds: rounds of training on Fashion-MNIST; the paper's is 100.

    Returns:
        The accuracy of every run and the table of means over seeds.
    """
    setting = Setting(rounds=rounds, tuning_rounds=max(1, rounds // 4))
    if quick:
        seeds, setting = 1, QUICK
    else:
        try:
            images.merged("fashion_mnist")
        except FileNotFoundError as error:
            say(f"using scikit-learn's digits instead of Fashion-MNIST: {error}")
            setting = SMALL
    records, chosen = [], {seed: dict[str, Choice]() for seed in range(seeds)}
    for seed in range(seeds):
        for name in METHODS:
            settings = {
                "study": "new-clients-fashion",
                "method": name,
                "seed": seed,
                **asdict(setting),
            }
            key = f"new-{setting.images}-{name}-{seed}"
            options = tuned(
                out, key, settings, GRIDS[name], partial(trial, name, seed, setting), say
            )
            found = kept(
                out,
                key,
                {**settings, "options": options},
                partial(curve, name, seed, setting, options),
                say,
            )
            chosen[seed][name] = options
            records += [
                {"method": name, "seed": seed, "steps": LOCAL * r, "accuracy": a}
                for r, a in zip(setting.adapted, found["accuracy"], strict=True)
            ]
    scores = pd.DataFrame(records)
    files = {
        out / "new_clients_fashion.csv": "accuracy by method, seed and local steps",
        out / "new_clients_fashion.png": "the same numbers as curves",
    }
    scores.to_csv(out / "new_clients_fashion.csv", index=False)
    picture(scores).savefig(out / "new_clients_fashion.png", dpi=150)
    title = f"Accuracy of {setting.clients - setting.trained} new clients, %, by local steps"
    lines = [*reading(scores), *(f"Seed {seed}. {told(c)}" for seed, c in chosen.items())]
    return Found(title, table(scores), scores, lines, files)


@lru_cache(maxsize=1)
def federation(setting: Setting, seed: int) -> tuple[ClientData, ClientData]:
    """Return all clients' training and test rows, with pixels scaled by those of the clients that train."""
    if setting.images == "fashion":
        source, sizes = images.merged("fashion_mnist"), {"train": 150, "test": 25}
    else:
        source, sizes = digits(), {"train": 30, "test": 13}
    rows = images.equal_classes(source.y, clients=setting.clients, classes=2, seed=seed, **sizes)
    train, test, _ = images.deal(source, *rows, scaling=setting.scaling, scaled_by=setting.trained)
    return train, test


# ------------------------------------------------------------------------------------------------ one run
def trial(name: str, seed: int, setting: Setting, options: Choice) -> float:
    """Return the accuracy in %, on validation rows, of clients that play new ones, after their first round."""
    train, _ = federation(setting, seed)
    known = list(train.names[: setting.trained])
    ours, theirs = known[: -setting.validated], known[-setting.validated :]
    fitted = trained(name, seed, setting, options, train.select(ours), setting.tuning_rounds)
    fitting, held_out = train.select(theirs).split(0.8, seed=seed)
    return accuracy(name, fitted.personalise(fitting, rounds=1), held_out, seed, setting)


def curve(name: str, seed: int, setting: Setting, options: Choice) -> Numbers:
    """Run one method; return the new clients' mean accuracy in % after each number of rounds."""
    train, test = federation(setting, seed)
    known, new = train.names[: setting.trained], train.names[setting.trained :]
    fitted = trained(name, seed, setting, options, train.select(known), setting.rounds)
    found = [
        accuracy(
            name,
            fitted.personalise(train.select(new), rounds=rounds),
            test.select(new),
            seed,
            setting,
        )
        for rounds in setting.adapted
    ]
    return {"accuracy": found}


# ------------------------------------------------------------------------------------------------ results
def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Format mean ± sd over seeds: one row for each method, one column for each number of local steps."""
    found = spread(scores, ["method", "steps"], "accuracy")
    shown = found["mean"].map("{:.2f}".format)
    if found["count"].max() > 1:
        shown = shown + found["std"].map(" ± {:.2f}".format)
    frame = shown.unstack("steps").reindex(METHODS)
    frame.columns = [str(c) for c in frame.columns]
    return frame


def reading(scores: pd.DataFrame) -> list[str]:
    """State which method is best after the first and after the last number of local steps."""
    mean = scores.groupby(["steps", "method"])["accuracy"].mean().unstack()
    first, last = int(mean.index[1]), int(mean.index[-1])
    return [
        f"After {e} local steps the best method is {mean.loc[e].idxmax()} "
        f"with {mean.loc[e].max():.2f} %; "
        f"FedABML has {mean.loc[e, FEDABML]:.2f} %, FedAvg+FT {mean.loc[e, FEDAVG]:.2f} %."
        for e in dict.fromkeys([first, last])
    ]


def picture(scores: pd.DataFrame) -> Figure:
    """Plot accuracy against the number of local steps, from the first: the mean, with a band of one sd over seeds."""
    figure = Figure(figsize=(5.2, 3.5), layout="constrained")
    ax = figure.subplots()
    for k, name in enumerate(METHODS):
        own = scores[(scores.method == name) & (scores.steps > 0)].pivot_table(
            index="seed", columns="steps", values="accuracy"
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
    ax.set_xticks(sorted(set(scores.steps) - {0}))
    ax.set_xlabel("local steps on a new client's training rows", fontsize=9)
    ax.set_ylabel("accuracy on the client's test rows, %", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    return figure
