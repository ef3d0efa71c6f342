"""Entropy of predictions in and out of distribution: the form of FedABML's Fig. 5 and 6.

The question is whether a client's model knows what it does not know. The clients are those of FedABML's Table
1: Fashion-MNIST split among 200 clients with 2 classes each, and of each class 150 training and 25 test rows.
A multinomial logistic regression is trained for 100 rounds with 20 clients a round. Then every client takes a
round, and two, of steps of its own from the global model. Let p be the predictive probabilities and H =
-sum_c p_c log p_c their entropy (the paper omits the minus sign). H is compared between a client's own test
rows and equally many images of MNIST and notMNIST. AUROC is the probability that a foreign image has the
higher entropy.

Three methods fit the same model: a point estimate (FedAvg, fine-tuned), mean-field posteriors that clients
keep (pFedBayes), and FedABML. All take 30 local steps a round; `studies.compared` says which, and what is
chosen for each method on validation rows. The paper takes five passes a round, which with its K = 5 are 150
steps; equally many for FedAvg would be 25 passes.

The scaling of the pixels decides much of the result. "pixel", which is how the paper's "standardised" is read
here, scales each pixel by its own mean and sd. Pixels that clothes never touch then become very large where
letters touch them. There a point estimate has no spread and is confident; a posterior has its prior's spread.
With "one", there is a single mean and sd for all pixels. What was found stands in docs/studies.md; the paper
reports an accuracy of 96.57 for FedABML.

If the image sets are missing, the study uses scikit-learn's 8 x 8 digits: 16 clients with two of the digits 0
to 7 each, and the digits 8 and 9 as foreign images.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from hierfl import datasets, plots
from hierfl.data.clients import ClientData
from hierfl.datasets import Labelled
from hierfl.diagnostics import out_of_distribution
from hierfl.studies import image_splits as images
from hierfl.studies.compared import (
    FEDABML,
    FEDAVG,
    GRIDS,
    LOCAL,
    PFEDBAYES,
    POINTS,
    accuracy,
    trained,
)
from hierfl.studies.results import Found, Numbers, Say, kept, quiet, spread
from hierfl.studies.tuning import Choice, told, tuned

METHODS = (FEDAVG, PFEDBAYES, FEDABML)
CURVES = 20  # clients whose entropies are saved for the figure


@dataclass(frozen=True)
class Setting:
    """Settings of every run.

    Args:
        rounds: rounds of training.
        cohort: clients in a round.
        adapted: rounds of its own, of 30 local steps, after which a client is scored.
        draws: posterior draws of a prediction.
        scaling: how pixels are standardised, as in `image_splits.deal`.
        images: the image set.
        tuning_rounds: rounds of a trial of the tuning.
        tuning_clients: clients of a trial, the first ones.
    """

    rounds: int = 100
    cohort: int = 20
    adapted: tuple[int, ...] = (1, 2)
    draws: int = 20
    scaling: Literal["pixel", "one"] = "pixel"
    images: Literal["fashion", "digits"] = "fashion"
    tuning_rounds: int = 25
    tuning_clients: int = 20


SMALL = Setting(rounds=60, cohort=8, images="digits", tuning_rounds=30, tuning_clients=16)
QUICK = replace(SMALL, rounds=5, tuning_rounds=1)


def run(
    out: Path,
    *,
    quick: bool = False,
    say: Say = quiet,
    seeds: int = 3,
    scaling: Literal["pixel", "one"] = "pixel",
    rounds: int = Setting.rounds,
) -> Found:
    """Measure accuracy, and the AUROC of entropy for each foreign image set, by method.

    Args:
        out: folder to write to.
        quick: run a few rounds on scikit-learn's digits.
        say: called with one line of text for each run that is started.
        seeds: number of runs of each method. A seed fixes the split, the initial weights, the order of rows
            and the draws.
        scaling: how pixels are standardised, as in `image_splits.deal`.
        rounds: rounds of training on Fashion-MNIST; the paper's is 100.

    Returns:
        The accuracy and AUROC of every run and the table of means over seeds.
    """
    setting = Setting(scaling=scaling, rounds=rounds, tuning_rounds=max(1, rounds // 4))
    try:
        if not quick:
            foreign()
    except FileNotFoundError as error:
        say(f"using scikit-learn's digits instead of Fashion-MNIST, MNIST and notMNIST: {error}")
        setting = replace(SMALL, scaling=scaling)
    if quick:
        seeds, setting = 1, replace(QUICK, scaling=scaling)
    found = _all_runs(out, setting, seeds, say)
    scores, by_client = _scores(found)
    files = {
        out / "ood_entropy.csv": "accuracy and AUROC of every run",
        out / "ood_entropy_clients.csv": "AUROC of every client",
        out / "ood_entropy.png": "densities of entropy, one curve for each client",
    }
    scores.to_csv(out / "ood_entropy.csv", index=False)
    by_client.to_csv(out / "ood_entropy_clients.csv", index=False)
    picture({m: found[m, 0] for m in METHODS}).savefig(out / "ood_entropy.png", dpi=150)
    steps = " and ".join(str(LOCAL * r) for r in setting.adapted)
    title = f"Accuracy, % (after {steps} local steps), and AUROC of entropy out of distribution"
    lines = [*reading(scores), *(told_of(found, seed) for seed in range(seeds))]
    return Found(title, table(scores), scores, lines, files)


def told_of(found: dict[tuple[str, int], Numbers], seed: int) -> str:
    """State what was chosen for each method in one seed."""
    return f"Seed {seed}. {told({name: found[name, seed]['options'] for name in METHODS})}"


def _all_runs(out: Path, setting: Setting, seeds: int, say: Say) -> dict[tuple[str, int], Numbers]:
    """Return the numbers of every run by method and seed, computing those that are not saved yet."""
    found: dict[tuple[str, int], Numbers] = {}
    for seed in range(seeds):
        for name in METHODS:
            settings = {"study": "ood-entropy", "method": name, "seed": seed, **asdict(setting)}
            label = f"{setting.images}-{setting.scaling}-{name}-{seed}"
            options = tuned(
                out, f"ood-{label}", settings, GRIDS[name], partial(trial, name, seed, setting), say
            )
            numbers = kept(
                out,
                f"ood-{label}",
                {**settings, "options": options},
                partial(measure, name, seed, setting, options),
                say,
            )
            found[name, seed] = {**numbers, "options": options}
    return found


def _scores(found: dict[tuple[str, int], Numbers]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tabulate the scores of every run, and the AUROC of every client."""
    scores = [
        {"method": m, "seed": s, **{k: v for k, v in n.items() if isinstance(v, float)}}
        for (m, s), n in found.items()
    ]
    by_client = [
        {"method": m, "seed": s, "set": what, "client": k, "auroc": value}
        for (m, s), n in found.items()
        for what, values in n["by_client"].items()
        for k, value in enumerate(values)
    ]
    return pd.DataFrame(scores), pd.DataFrame(by_client)


# ------------------------------------------------------------------------------------------------ data
@cache
def foreign() -> dict[str, Tensor]:
    """Return the images that belong to no client, by name of their set: each (n, 784) in [0, 1].

    Raises:
        FileNotFoundError: an image set is missing; the message says how to get it.
    """
    return {"notMNIST": datasets.notmnist().x.flatten(1), "MNIST": datasets.mnist()[1].x.flatten(1)}


def digits() -> Labelled:
    """Return scikit-learn's digits, x (1797, 64) in [0, 1].

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "without image sets this study runs on scikit-learn's digits: pip install 'hierfl[data]'"
        ) from error
    x, y = load_digits(return_X_y=True)
    return Labelled(
        torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y).long(), tuple("0123456789")
    )


@lru_cache(maxsize=1)
def federation(setting: Setting, seed: int) -> tuple[ClientData, ClientData, dict[str, ClientData]]:
    """Return training rows, test rows, and for each foreign set as many rows per client as its test rows."""
    if setting.images == "fashion":
        source, strangers = images.merged("fashion_mnist"), foreign()
        rows = images.equal_classes(source.y, clients=200, classes=2, train=150, test=25, seed=seed)
    else:
        ten = digits()
        known = ten.y < 8
        source, strangers = (
            Labelled(ten.x[known], ten.y[known], ten.classes),
            {"digits 8, 9": ten.x[~known]},
        )
        rows = images.equal_classes(source.y, clients=16, classes=2, train=30, test=13, seed=seed)
    train, test, scaling = images.deal(source, *rows, scaling=setting.scaling)
    each = int(test.counts[0])
    out = {}
    for name, x in strangers.items():
        order = np.random.Generator(np.random.Philox(seed)).permutation(len(x))
        taken = torch.from_numpy(np.resize(order, each * test.num_clients))
        out[name] = scaling.apply(ClientData({"x": x[taken]}, test.offsets, test.names))
    return train, test, out


# ------------------------------------------------------------------------------------------------ one run
def trial(name: str, seed: int, setting: Setting, options: Choice) -> float:
    """Return the accuracy in %, on validation rows, of some clients after their first round of adaptation."""
    train, _, _ = federation(setting, seed)
    fitting, held_out = train.select(train.names[: setting.tuning_clients]).split(0.8, seed=seed)
    fitted = trained(name, seed, setting, options, fitting, setting.tuning_rounds)
    return accuracy(name, fitted.personalise(fitting, rounds=1), held_out, seed, setting)


def measure(name: str, seed: int, setting: Setting, options: Choice) -> Numbers:
    """Run one method and score it.

    Returns:
        Accuracy after each number of local steps; after the first of them also the AUROC, overall and of each
        client, and the entropies of the first `CURVES` clients.
    """
    train, test, strangers = federation(setting, seed)
    fitted = trained(name, seed, setting, options, train, setting.rounds)
    numbers: Numbers = {"by_client": {}, "entropies": {}}
    draws = 1 if name in POINTS else setting.draws
    for rounds in setting.adapted:
        tuned_fit = fitted.personalise(train, rounds=rounds)
        numbers[f"accuracy {LOCAL * rounds}"] = accuracy(name, tuned_fit, test, seed, setting)
        if rounds == setting.adapted[0]:
            own = tuned_fit.predict(test, draws=draws, seed=seed)
            for what, rows in strangers.items():
                found = out_of_distribution(own, tuned_fit.predict(rows, draws=draws, seed=seed))
                numbers[f"AUROC {what}"] = float(found.overall["auroc"])
                numbers["by_client"][what] = found.clients["auroc"].tolist()
                for part, values in zip(("own", what), found.entropies, strict=True):
                    numbers["entropies"][part] = (
                        values.reshape(rows.num_clients, -1)[:CURVES].round(4).tolist()
                    )
    return numbers


# ------------------------------------------------------------------------------------------------ results
def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Format mean ± standard deviation over seeds: one row for each method, one column for each score."""
    rows = {}
    for method in METHODS:
        row = {}
        for what in scores.columns.drop(["method", "seed"]):
            found = spread(scores, "method", what).loc[method]
            places = 2 if what.startswith("accuracy") else 3
            sd = f" ± {found['std']:.{places}f}" if found["count"] > 1 else ""
            row[what] = f"{found['mean']:.{places}f}{sd}"
        rows[method] = row
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame.index.name = "method"
    return frame


def reading(scores: pd.DataFrame) -> list[str]:
    """State by how much FedABML's AUROC differs from the point estimate's on each foreign set."""
    mean = scores.groupby("method").mean(numeric_only=True)
    sets = [c for c in mean.columns if c.startswith("AUROC")]
    return [
        f"{c.removeprefix('AUROC ')}: FedABML's AUROC minus that of the point estimate is "
        f"{mean.loc[FEDABML, c] - mean.loc[FEDAVG, c]:+.3f}."
        for c in sets
    ]


def picture(found: dict[str, Numbers]) -> Figure:
    """Plot densities of entropy: a row for each method, a column for each foreign set.

    Each thin curve is one client; the thick curve is of all clients.
    """
    sets = [name for name in next(iter(found.values()))["entropies"] if name != "own"]
    figure = Figure(figsize=(3.4 * len(sets) + 0.8, 1.9 * len(found) + 0.4), layout="constrained")
    axes = figure.subplots(len(found), len(sets), sharex=True, squeeze=False)
    for row, (method, numbers) in zip(axes, found.items(), strict=True):
        for ax, what in zip(row, sets, strict=True):
            own, foreign = (np.array(numbers["entropies"][part]) for part in ("own", what))
            plots.entropies(ax, own, foreign, labels=("own test rows", "foreign images"))
            ax.set(xlabel=None, ylabel=None)
            ax.set_title(
                f"{method}, {what}: AUROC {numbers[f'AUROC {what}']:.2f}", fontsize=8.5, loc="left"
            )
            ax.tick_params(labelsize=7)
    for ax in axes[-1]:
        ax.set_xlabel("entropy of the prediction, nats", fontsize=8)
    for row in axes:
        row[0].set_ylabel("density", fontsize=8)
    axes[0, 0].legend(fontsize=7, frameon=False)
    return figure
