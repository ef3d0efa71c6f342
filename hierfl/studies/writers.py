"""FedVI on FEMNIST's writers (its Table 1): participating writers, and new ones personalised without labels.

FedVI makes each writer's own head from the inputs of rows without labels. For a participating writer these
are the training rows, and the score is on test rows. For a new writer they are half of the rows, and the
score is on the other half. "New" are twenty of the 105 writers, left out at random. "Other mix" are the other
79 writers of the set (without those of a single row), whose rows have a different mix of classes. FedVI is
compared with FedAvg and with FedVI without the writers' own heads. The latter is FedAvg with momentum on the
server, on the same halves of the rows: its difference from FedVI is the contribution of the heads, and
FedAvg, which has no momentum, is no measure of them. All take one pass over a writer's rows in a round, and
each writers' step size is chosen from the same grid, on validation rows of the writers that take part.

The paper has 3400 writers and 1500 rounds of 100. Here 85 writers take part, in rounds of ten, with a network
an eighth as large, so the paper's numbers are not a target.

The paper's PAC-Bayes bound is not reported: its global params and the heads' biases are points, whose KL is
infinite (`hierfl.pac_bayes` refuses them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from hierfl import datasets
from hierfl.data.clients import ClientData
from hierfl.method import Method
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fedvi import fedvi
from hierfl.models import PersonalHeads, network
from hierfl.optimisers import SGD
from hierfl.runs.fit import fit
from hierfl.runs.result import Fit
from hierfl.studies.results import Found, Numbers, Say, kept, quiet
from hierfl.studies.tuning import RATES, Choice, tuned

METHODS = ("FedAvg", "FedVI, one head for all", "FedVI")
GRIDS = {name: {"lr": RATES} for name in METHODS}  # the writers' step size
PUBLISHED = {"FedAvg": (83.4, 83.1), "FedVI": (90.3, 90.6)}
CLASSES = 62
KINDS = ("participating", "new", "other mix")


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    The paper's are lr 0.02, server_lr 3.0, batch_size 256 and tau 1e-9; here lr is chosen on validation rows.

    Args:
        rounds: rounds of training.
        cohort: writers in a round.
        server_lr: step size of the server.
        momentum: momentum of the server.
        batch_size: rows of a mini-batch.
        tau: weight of FedVI's KL term.
        new: number of writers left out of training.
        writers: use only so many writers of each group; None: all.
        tuning_rounds: rounds of a trial of the tuning.
    """

    rounds: int = 80
    cohort: int = 10
    server_lr: float = 1.0
    momentum: float = 0.9
    batch_size: int = 32
    tau: float = 1e-9
    new: int = 20
    writers: int | None = None
    tuning_rounds: int = 20


def run(
    out: Path,
    *,
    quick: bool = False,
    say: Say = quiet,
    seeds: int = 3,
    rounds: int = Settings.rounds,
) -> Found:
    """Measure the accuracy on participating and on new writers, by method and seed.

    Args:
        out: folder to write to.
        quick: run two rounds with eight writers.
        say: called with one line of text for each run that is started.
        seeds: number of runs of each method. A seed fixes the new writers, the initial weights, the cohorts
            and the draws.
        rounds: rounds of training; a quarter as many in a trial of the tuning.

    Returns:
        The accuracy of every run and the table of means over seeds.

    Raises:
        FileNotFoundError: FEMNIST is missing; the message says how to get it.
    """
    settings = Settings(rounds=rounds, tuning_rounds=max(1, rounds // 4))
    if quick:
        settings = Settings(rounds=2, cohort=3, writers=8, new=2, tuning_rounds=1)
    records = []
    for seed in range(1 if quick else seeds):
        for name in METHODS:
            run_settings = {
                "study": "femnist-writers",
                "method": name,
                "seed": seed,
                **asdict(settings),
            }
            slug = name.lower().replace(", ", "-").replace(" ", "-")
            key, score = f"writers-{slug}-{seed}", partial(trial, name, seed, settings)
            options = tuned(out, key, run_settings, GRIDS[name], score, say)
            found = kept(
                out,
                key,
                {**run_settings, "options": options},
                partial(one, name, seed, settings, options),
                say,
            )
            records.append({"method": name, "seed": seed, **options, **found})
    scores = pd.DataFrame(records)
    scores.to_csv(out / "femnist_writers.csv", index=False)
    files = {out / "femnist_writers.csv": "accuracy by method and seed"}
    return Found(
        "FEMNIST's writers: accuracy over rows, % (published value, of 3400 writers)",
        table(scores),
        scores,
        reading(scores),
        files,
    )


def federation(
    seed: int, settings: Settings
) -> tuple[ClientData, ClientData, dict[str, ClientData]]:
    """Return the training rows and test rows of the writers that take part, and the rows of the others."""
    train, test, others = datasets.femnist()
    others = others.select([k for k, n in enumerate(others.counts.tolist()) if n > 1])
    if settings.writers is not None:
        few = list(range(settings.writers))
        train, test, others = train.select(few), test.select(few), others.select(few)
    order = torch.randperm(
        train.num_clients, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    new, train = train.select(order[: settings.new]), train.select(order[settings.new :])
    return train, test.select(test.index(train.names)), {"new": new, "other mix": others}


def trial(name: str, seed: int, settings: Settings, options: Choice) -> float:
    """Return the accuracy in % on validation rows of the writers that take part."""
    fitting, held_out = federation(seed, settings)[0].split(0.8, seed=seed)
    fitted = trained(name, seed, settings, options, fitting, settings.tuning_rounds)
    return accuracy(fitted, held_out, seed)


def trained(
    name: str, seed: int, settings: Settings, options: Choice, train: ClientData, rounds: int
) -> Fit:
    """Train one method."""
    method = methods(settings, seed, options)[name]()
    run_of: dict[str, Any] = {"cohort": settings.cohort, "seed": seed, "progress": False}
    return fit(method, train, rounds=rounds, compile=False, **run_of)


def one(name: str, seed: int, settings: Settings, options: Choice) -> Numbers:
    """Run one method; return its accuracy on each kind of writer."""
    train, test, others = federation(seed, settings)
    fitted = trained(name, seed, settings, options, train, settings.rounds)
    strangers = {}
    for kind, rows in others.items():
        support, scored = rows.split(0.5, seed=0)
        strangers[kind] = accuracy(fitted.personalise(support.without("y"), rounds=1), scored, seed)
    return {
        "participating": accuracy(fitted, test, seed),
        **strangers,
        "loss": float(fitted.history["loss"].iloc[-1]),
    }


def accuracy(fitted: Fit, rows: ClientData, seed: int) -> float:
    """Return the accuracy over all rows in %; the model sees only their inputs."""
    found = fitted.predict(rows.without("y"), draws=5, seed=seed)
    return 100.0 * float((found.mean.argmax(-1) == rows.fields["y"]).double().mean())


def methods(settings: Settings, seed: int, options: Choice) -> dict[str, Callable[[], Method]]:
    """Return a builder of each method by name; all methods start from the same weights."""
    optimiser, batch = SGD(options["lr"]), settings.batch_size
    server = SGD(settings.server_lr, momentum=settings.momentum)

    def personal(**heads: object) -> Method:
        model = PersonalHeads(embedding(seed), outputs=CLASSES, **heads)  # type: ignore[arg-type]
        return fedvi(
            model, tau=settings.tau, optimiser=optimiser, server_optimiser=server, batch_size=batch
        )

    def plain() -> Method:
        model = network(nn.Sequential(embedding(seed), nn.Linear(128, CLASSES)))
        return fedavg(model, optimiser=optimiser, steps=1, unit="epoch", batch_size=batch)

    return {
        "FedAvg": plain,
        "FedVI, one head for all": lambda: personal(merge=common_alone),
        "FedVI": personal,
    }


def common_alone(common: Tensor, own: Tensor) -> Tensor:
    """Merge the two heads by ignoring the writer's own."""
    return common


def embedding(seed: int) -> nn.Module:
    """Return two convolutions and a dense layer of 128 units, with weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(800, 128), nn.ReLU(),
        )  # fmt: skip


def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Format the mean over seeds, with the published value (of 3400 writers) in brackets."""
    mean = scores.groupby("method", sort=False)[list(KINDS)].mean().reindex(list(METHODS))
    for place, kind in enumerate(KINDS):
        printed = [
            f" ({PUBLISHED[m][place]})" if m in PUBLISHED and place < 2 else "" for m in METHODS
        ]
        mean[kind] = [f"{value:.1f}{p}" for value, p in zip(mean[kind], printed, strict=True)]
    return mean


def reading(scores: pd.DataFrame) -> list[str]:
    """State the gain in accuracy by the writers' own heads."""
    wide = scores.set_index(["method", "seed"])
    gain = {k: (wide.loc["FedVI"] - wide.loc["FedVI, one head for all"])[k].mean() for k in KINDS}
    return [
        f"The writers' own heads add {gain['participating']:+.2f} points for participating writers, "
        f"{gain['new']:+.2f} for new ones and {gain['other mix']:+.2f} for those of another mix of classes; "
        "the last two groups give no labels.",
    ]
