"""FedVI on FEMNIST's writers (its Table 1): those it was trained with, and those it never saw, personalised without a label.

A writer who takes part is scored on test rows, his own head made from the inputs of his training rows; one who is new on half of
his rows, his head made from the inputs of the other half. "New" are twenty of the 105 writers, left out at random; "other mix" are
the set's other 79 (less those of a single row), in whose rows the classes are shared out otherwise. Beside FedVI stand FedAvg, and
FedVI without the writers' own heads, which is FedAvg with momentum on the server on the same halves of the rows: the difference of
the two is what the heads are worth.

The paper has 3400 writers and 1500 rounds of 100; here 85 take part, in rounds of ten, with a network an eighth as large and rates
to match. Its numbers are no target of that.

Means of seeds 0 to 2, participating, new and other mix: FedAvg 63.4, 64.7 and 31.7 %, FedVI with one head for all 73.5, 74.2 and
44.9, FedVI 72.3, 73.3 and 47.1: with so few rows a writer, the heads cost a point where writers are alike, and gain two where they
are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from hierfl import datasets
from hierfl.data.clients import ClientData
from hierfl.diagnostics.pac_bayes import pac_bayes
from hierfl.method import Method
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fedvi import fedvi
from hierfl.models import PersonalHeads, network
from hierfl.optimisers import SGD
from hierfl.runs.fit import fit
from hierfl.runs.result import Fit
from hierfl.studies.results import Found, Numbers, Say, kept, quiet

METHODS = ("FedAvg", "FedVI, one head for all", "FedVI")
PUBLISHED = {"FedAvg": (83.4, 83.1), "FedVI": (90.3, 90.6)}
CLASSES = 62
KINDS = ("participating", "new", "other mix")


@dataclass(frozen=True)
class Settings:
    """What the study is run with; the paper's are lr 0.02 and 3.0 at the server, batches of 256 and tau 1e-9."""

    rounds: int = 80
    cohort: int = 10
    lr: float = 0.1
    server_lr: float = 1.0
    momentum: float = 0.9
    batch_size: int = 32
    tau: float = 1e-9
    new: int = 20
    writers: int | None = None


def run(out: Path, *, quick: bool = False, say: Say = quiet, seeds: int = 3) -> Found:
    """Accuracy of writers that took part and of new ones, by method and seed.

    Args:
        out: folder to write to.
        quick: two rounds with eight writers.
        say: told what is being done.
        seeds: of first weights, cohorts and draws.

    Raises:
        FileNotFoundError: FEMNIST is not there.
    """
    settings = Settings(rounds=2, cohort=3, writers=8, new=2) if quick else Settings()
    records = []
    for seed in range(1 if quick else seeds):
        for name in METHODS:
            about = {"study": "femnist-writers", "method": name, "seed": seed, **asdict(settings)}
            slug = name.lower().replace(", ", "-").replace(" ", "-")
            found = kept(
                out,
                f"writers-{slug}-{seed}",
                about,
                lambda n=name, s=seed: one(n, s, settings),  # type: ignore[misc]
                say,
            )
            records.append({"method": name, "seed": seed, **found})
    scores = pd.DataFrame(records)
    scores.to_csv(out / "femnist_writers.csv", index=False)
    files = {out / "femnist_writers.csv": "accuracy and the parts of the bound by method and seed"}
    return Found(
        "FEMNIST's writers: accuracy of a row, % (published of 3400 writers)",
        table(scores),
        scores,
        reading(scores),
        files,
    )


def one(name: str, seed: int, settings: Settings) -> Numbers:
    """One run: accuracy on both kinds of writers, and the parts of the PAC-Bayes bound."""
    train, test, others = datasets.femnist()
    others = others.select([k for k, n in enumerate(others.counts.tolist()) if n > 1])
    if settings.writers is not None:
        few = list(range(settings.writers))
        train, test, others = train.select(few), test.select(few), others.select(few)
    order = torch.randperm(
        train.num_clients, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    new, train = train.select(order[: settings.new]), train.select(order[settings.new :])
    test = test.select(test.index(train.names))
    fitted = fit(
        methods(settings, seed)[name](),
        train,
        rounds=settings.rounds,
        cohort=settings.cohort,
        seed=seed,
        compile=False,
    )
    strangers = {}
    for kind, rows in (("new", new), ("other mix", others)):
        read, asked = rows.split(0.5, seed=0)
        strangers[kind] = accuracy(fitted.personalise(read.without("y"), rounds=1), asked, seed)
    bound = pac_bayes(fitted, draws=1, seed=seed)
    return {
        "participating": accuracy(fitted, test, seed),
        **strangers,
        "loss": float(fitted.history["loss"].iloc[-1]),
        "empirical_risk": bound.empirical_risk,
        "kl": bound.kl,
        "bound_without_slack": bound.bound(),
    }


def accuracy(fitted: Fit, rows: ClientData, seed: int) -> float:
    """The share of all rows that are right, %: the model is given their inputs alone."""
    found = fitted.predict(rows.without("y"), draws=5, seed=seed)
    return 100.0 * float((found.mean.argmax(-1) == rows.fields["y"]).double().mean())


def methods(settings: Settings, seed: int) -> dict[str, Callable[[], Method]]:
    """The methods by name, all from the same first weights."""
    optimiser, batch = SGD(settings.lr), settings.batch_size
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
    """What merges the two heads where the writers' own is left out."""
    return common


def embedding(seed: int) -> nn.Module:
    """Two convolutions and a dense layer of 128, its weights a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(800, 128), nn.ReLU(),
        )  # fmt: skip


def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds, in brackets what is published of 3400 writers."""
    mean = scores.groupby("method", sort=False)[list(KINDS)].mean().reindex(list(METHODS))
    for place, kind in enumerate(KINDS):
        printed = [
            f" ({PUBLISHED[m][place]})" if m in PUBLISHED and place < 2 else "" for m in METHODS
        ]
        mean[kind] = [f"{value:.1f}{p}" for value, p in zip(mean[kind], printed, strict=True)]
    return mean


def reading(scores: pd.DataFrame) -> list[str]:
    """What the heads are worth."""
    wide = scores.set_index(["method", "seed"])
    gain = {k: (wide.loc["FedVI"] - wide.loc["FedVI, one head for all"])[k].mean() for k in KINDS}
    bound = wide.loc["FedVI"].mean()
    return [
        f"The writers' own heads add {gain['participating']:+.2f} points for those who took part, {gain['new']:+.2f} for new ones "
        f"and {gain['other mix']:+.2f} for those of another mix, who gave no label.",
        f"The PAC-Bayes bound of FedVI at eta = rows, its slack term apart: {bound['bound_without_slack']:.3f} nats a row, of which "
        f"{bound['empirical_risk']:.3f} are empirical risk; its KL is {bound['kl']:.0f} nats in all.",
    ]
