"""FedMAP on its synthetic clients (Tables 1, 5 and 6): three skews, ten clients, balanced accuracy of each on rows of its own.

Every client sees the same two classes through a linear map of its own, so that a common first layer cannot serve them all: FedAvg
and FedProx fail for that reason, as published. FedMAP gives each client weights of its own; "FedMAP" has one variance for all of
them, as in the paper, "FedMAP, by layer" a wide one for the first layer, where clients differ, and a narrow one for those behind
it. The authors' network has no batch normalisation, with which their FedBN would be FedAvg: ours has some, for FedBN alone.

The paper trains Individual for 10 epochs and FedMAP for 1000; here every method has as many epochs. Variances and the number of
rounds were chosen on other draws of the data (seeds 100 and 101) than the ten that are reported.

Of seeds 0 to 9, means for feature, quantity and label skew (standard deviations of 0.6 to 1.9): Individual 87.7, 80.5 and 79.4;
FedAvg 66.1, 63.2, 62.0; FedProx 66.1, 63.3, 61.7; FedBN 67.1, 64.7, 64.0; FedMAP 87.8, 81.1, 82.5 (above all four in the mean, and in
5, 7 and 10 of the 10 seeds); by layer 88.4, 81.5, 83.0 (10, 9 and 10). Twice the rounds do Individual good (quantity skew, seed 100:
82.1 for 80.7, where FedMAP had 82.3 in as many, and by layer 82.6 in half as many).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from hierfl.data.clients import ClientData
from hierfl.method import Method
from hierfl.methods.ditto import individual
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fedbn import fedbn
from hierfl.methods.fedmap import fedmap
from hierfl.models import batch_norm_network, map_network, network
from hierfl.models.likelihood import bernoulli
from hierfl.models.map_priors import Isotropic, MapPrior
from hierfl.optimisers import Adam
from hierfl.runs.fit import fit
from hierfl.runs.result import Fit
from hierfl.studies.results import Found, Numbers, Say, kept, quiet
from hierfl.studies.synthetic_clients import FEATURES, Skew, synthetic_clients

SKEWS: tuple[Skew, ...] = ("feature", "quantity", "label")
METHODS = ("Individual", "FedAvg", "FedProx", "FedBN", "FedMAP", "FedMAP, by layer")
PUBLISHED = {  # in the order of METHODS: means of the tables' own columns, some of which their printed averages miss
    "feature": (83.80, 63.18, 63.00, 65.38, 86.27),
    "quantity": (74.27, 61.54, 61.35, 63.62, 78.24),
    "label": (76.63, 54.66, 54.91, 63.28, 84.84),
}


@dataclass(frozen=True)
class Settings:
    """What the study is run with; layers, batch and Adam are the paper's, the rate its code's.

    Args:
        rows: of a large client.
        rounds: of all methods.
        epochs: a round.
        variance: of FedMAP's prior.
        first: of the first layer's, by layer.
        rest: of the others'.
        prox: FedProx's mu; with the code's first, 2, it had 54 % on a draw that is not reported (quantity skew), with 0 it had 64.
    """

    rows: int = 2000
    rounds: int = 20
    epochs: int = 5
    lr: float = 1e-3
    batch_size: int = 64
    variance: float = 60.0
    first: float = 120.0
    rest: float = 5.0
    prox: float = 0.01


def run(out: Path, *, quick: bool = False, say: Say = quiet, seeds: int = 10) -> Found:
    """Balanced accuracy by skew, method, seed and client.

    Args:
        out: folder to write to.
        quick: two seeds, few rows and rounds.
        say: told what is being done.
        seeds: of clients, rows, first weights and batches.
    """
    settings = Settings(rows=200, rounds=2, epochs=1) if quick else Settings()
    records = []
    for seed in range(2 if quick else seeds):
        for skew in SKEWS:
            for name in METHODS:
                about = {
                    "study": "fedmap-synthetic",
                    "method": name,
                    "skew": skew,
                    "seed": seed,
                    **asdict(settings),
                }
                found = kept(out, f"{skew}-{name}-{seed}".lower().replace(", ", "-").replace(" ", "-"), about,
                             lambda n=name, k=skew, s=seed: one(n, k, s, settings), say)  # type: ignore[misc]  # fmt: skip
                for client, score in found["balanced_accuracy"].items():
                    records.append(
                        {
                            "skew": skew,
                            "method": name,
                            "seed": seed,
                            "client": client,
                            "balanced_accuracy": score,
                        }
                    )
    scores = pd.DataFrame(records)
    scores.to_csv(out / "fedmap_synthetic.csv", index=False)
    files = {out / "fedmap_synthetic.csv": "balanced accuracy by skew, method, seed and client"}
    return Found(
        "balanced accuracy of a client, %: mean ± sd over seeds (published)",
        table(scores),
        scores,
        reading(scores),
        files,
    )


def one(name: str, skew: Skew, seed: int, settings: Settings) -> Numbers:
    """One run: balanced accuracy of each client on its held-out rows, in per cent."""
    train, test = synthetic_clients(skew, seed=seed, rows=settings.rows)
    fitted = fit(methods(settings, seed)[name](), train, rounds=settings.rounds, seed=seed)
    return {"balanced_accuracy": balanced_accuracy(fitted, test)}


def methods(settings: Settings, seed: int) -> dict[str, Callable[[], Method]]:
    """The methods by name, all from the same first weights."""
    optimiser, likelihood, batch = Adam(settings.lr), bernoulli(), settings.batch_size

    def plain(prox: float = 0.0) -> Method:
        model = network(net(seed), likelihood=likelihood)
        return fedavg(
            model,
            optimiser=optimiser,
            steps=settings.epochs,
            unit="epoch",
            batch_size=batch,
            prox=prox,
        )

    def personal(prior: MapPrior | dict[str, MapPrior]) -> Method:
        model = map_network(net(seed), prior=prior, likelihood=likelihood)
        return fedmap(model, optimiser=optimiser, steps=settings.epochs, batch_size=batch)

    by_layer: dict[str, MapPrior] = {"0.": Isotropic(settings.first), "": Isotropic(settings.rest)}
    normed = batch_norm_network(net(seed, normed=True), likelihood=likelihood)
    alone = network(net(seed), likelihood=likelihood)
    return {
        "Individual": lambda: individual(
            alone, optimiser=optimiser, steps=settings.epochs, unit="epoch", batch_size=batch
        ),
        "FedAvg": plain,
        "FedProx": lambda: plain(settings.prox),
        "FedBN": lambda: fedbn(
            normed, optimiser=optimiser, steps=settings.epochs, batch_size=batch
        ),
        "FedMAP": lambda: personal(Isotropic(settings.variance)),
        "FedMAP, by layer": lambda: personal(by_layer),
    }


def net(seed: int, *, normed: bool = False) -> nn.Module:
    """The paper's 30-32-16-1, its weights a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [
            nn.Linear(FEATURES, 32),
            nn.ReLU(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 1),
        ]
    if normed:
        layers[1:1], layers[4:4] = [nn.BatchNorm1d(32)], [nn.BatchNorm1d(16)]
    return nn.Sequential(*layers)


def balanced_accuracy(fitted: Fit, rows: ClientData) -> dict[str, float]:
    """The mean of the shares of both classes that a client's own model has right, %, by client."""
    right = (fitted.predict(rows, draws=1).mean > 0.5) == (rows.fields["y"] > 0.5)
    frame = pd.DataFrame(
        {
            "client": rows.row_client.numpy(),
            "y": rows.fields["y"].numpy(),
            "right": 100.0 * right.double().numpy(),
        }
    )
    by_class = frame.groupby(["client", "y"])["right"].mean()
    return {rows.names[int(k)]: float(v) for k, v in by_class.groupby("client").mean().items()}


def by_seed(scores: pd.DataFrame) -> pd.DataFrame:
    """The mean over clients, a row a seed and method, a column a skew."""
    mean = scores.groupby(["method", "seed", "skew"], sort=False)["balanced_accuracy"].mean()
    return mean.unstack("skew")[list(SKEWS)]


def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds, the published mean in brackets."""
    found = by_seed(scores).groupby("method", sort=False)
    mean, sd = found.mean(), found.std(ddof=1)
    shown: dict[str, list[str]] = {}
    for skew in SKEWS:
        printed = [*(f" ({v:.1f})" for v in PUBLISHED[skew]), ""]
        shown[skew] = [
            f"{mean.loc[m, skew]:.1f} ± {sd.loc[m, skew]:.1f}{p}"
            for m, p in zip(METHODS, printed, strict=True)
        ]
    return pd.DataFrame(shown, index=pd.Index(METHODS, name="method"))


def reading(scores: pd.DataFrame) -> list[str]:
    """By how much FedMAP is above each other method, seed by seed."""
    wide, lines = by_seed(scores), []
    for ours in METHODS[4:]:
        for skew in SKEWS:
            gaps = {other: (wide.loc[ours] - wide.loc[other])[skew] for other in METHODS[:4]}
            least = min(gaps, key=lambda other: float(gaps[other].mean()))
            gap = gaps[least]
            lines.append(f"{skew} skew: {ours} is {gap.mean():+.2f} points from the best of the others, {least}, "
                         f"above it in {int((gap > 0).sum())} of {len(gap)} seeds.")  # fmt: skip
    return lines
