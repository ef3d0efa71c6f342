"""Cells of a study: one method and seed, computed once and kept under a key of its dependencies."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from hierfl.comparisons.federations import StudyFederation, of_study
from hierfl.comparisons.measures import ScoreWatch
from hierfl.comparisons.study_data import REGRESSION
from hierfl.comparisons.study_file import Net, Study, StudyEntry
from hierfl.core.disk import replace_text
from hierfl.core.trees import nbytes
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import ClientError
from hierfl.engine.federation import Settings
from hierfl.method import Method
from hierfl.methods import averaging_some
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD, Adam
from hierfl.runs.fit import fit
from hierfl.runs.result import Fit
from hierfl.studies import image_splits as images
from hierfl.studies.baseline_methods import baseline, tuning
from hierfl.studies.baseline_parts import Budget

# rooms that no number of a cell depends on
APART = ("cli", "demo", "effects", "flower", "formulas", "nodes", "plots", "report")
PACKAGES = ("torch", "pyro-ppl", "numpy")
OPTIMIZERS = {"sgd": SGD, "adam": Adam}
Options = Mapping[str, float]


@cache
def code() -> str:
    """Return a digest of the source that numbers depend on, and of its packages' versions."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0].removesuffix(".py") not in APART:
            digest.update(f"{inside.as_posix()}\n".encode() + path.read_bytes())
    digest.update(" ".join(f"{name} {version(name)}" for name in PACKAGES).encode())
    return digest.hexdigest()[:12]


def described(study: Study, entry: StudyEntry) -> dict[str, Any]:
    """Return all that a method's numbers depend on but the seed, as JSON-compatible values."""
    tables = {"data", "net", "run", "evaluation", "tuning"}
    described_tables = study.model_dump(mode="json", include=tables)
    seeds = described_tables["run"].pop("seeds")
    own = entry.model_dump(mode="json", exclude={"label", "published"})
    # options are chosen with the clients of the first seed
    tuned = {"tuning_seed": seeds[0]} if study.tuning.rounds else {}
    return {"code": code(), **described_tables, "method": own, **tuned}


def file_of(out: Path, kind: str, label: str, key: Mapping[str, Any]) -> Path:
    """Return the file of a cell, a trial or a choice; its name ends with a digest of the key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    plain = "".join(c if c.isalnum() or c in "-+_." else "-" for c in label)[:80].lstrip(".")
    return out / kind / f"{plain}-{digest}.json"


def kept(path: Path) -> dict[str, Any] | None:
    """Return what a file holds, None where there is none; a damaged file is a ValueError."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())["found"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"'{path}' is damaged ({error})"
        raise ValueError(f"{what}: remove it, and it is computed again") from error
    return content


def keep(path: Path, key: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a file whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"key": key, "found": content}, indent=1))


def cell_file(out: Path, study: Study, entry: StudyEntry, seed: int) -> tuple[Path, dict[str, Any]]:
    """Return the file of a cell, and its key."""
    key = {**described(study, entry), "seed": seed}
    return file_of(out, "cells", f"{entry.label}-{seed}", key), key


def net_of(study: Study, features: int, classes: int, seed: int) -> nn.Sequential:
    """Return the network that every method of a study starts from."""
    between = nn.ReLU if study.net.activation == "relu" else lambda: nn.LeakyReLU(0.1)

    def made() -> nn.Sequential:
        below, inside = convolutions(study.net, features, between)
        sizes = (inside, *study.net.hidden, max(classes, 1))
        layers = [
            part
            for n, m in pairwise(sizes)
            for part in (nn.Linear(n, m, bias=study.net.bias), between())
        ]
        return nn.Sequential(*below, *layers[:-1])

    net = images.started(made, seed if study.run.start is None else study.run.start)
    assert isinstance(net, nn.Sequential)
    return net


def convolutions(
    net: Net, features: int, between: Callable[[], nn.Module]
) -> tuple[list[nn.Module], int]:
    """Return the layers below the dense ones, for flat square images, and their features."""
    if not net.conv:
        return [], features
    channels = 1 if math.isqrt(features) ** 2 == features else 3
    side = math.isqrt(features // channels)
    if channels * side * side != features:
        what = "net.conv needs square images of one channel or three"
        raise ValueError(f"{what}; rows have {features} features")
    layers: list[nn.Module] = [nn.Unflatten(-1, (channels, side, side))]
    for width in net.conv:
        layers += [nn.Conv2d(channels, width, net.kernel), between(), nn.MaxPool2d(2)]
        side, channels = (side - net.kernel + 1) // 2, width
        if side < 1:
            raise ValueError(f"net.conv has {len(net.conv)} layers: too many for the images")
    return [*layers, nn.Flatten()], channels * side * side


def budget_of(study: Study, train: ClientData, rounds: int) -> Budget:
    """Return what a client may spend in a round."""
    run = study.run
    client_rows = train.num_rows / train.num_clients
    return Budget(
        evaluations=run.evaluations,
        rows=run.batch,
        rounds=rounds,
        clients=train.num_clients,
        client_rows=round(client_rows),
        passes=max(1, round(run.evaluations / math.ceil(client_rows / run.batch))),
        scale=run.scale,
        tune_steps=study.evaluation.tune_steps,
        counts_steps=run.counts_steps,
        likelihood=normal(study.data.noise) if study.data.name in REGRESSION else None,
    )


def value_of(name: str, value: Any, lr: float) -> Any:
    """Return an option as the method takes it, from the word or number in a study file."""
    if not name.endswith("optimizer"):
        return lr if value == "lr" else value
    return OPTIMIZERS[value](lr) if value in OPTIMIZERS else SGD(float(value))


def method_of(
    study: Study, entry: StudyEntry, options: Options, rows: StudyFederation, rounds: int, seed: int
) -> Method:
    """Return the method of an entry, for these clients."""
    train = rows.train
    net = net_of(study, train.fields["x"].shape[1], rows.classes, seed)
    settings = {**entry.settings, **options}
    how = baseline(entry.name)
    adaptive = how.adaptive or settings.get("optimizer") == "adam"
    default = study.run.adam if adaptive else study.run.lr
    lr = settings.pop("lr", default)
    settings = {name: value_of(name, value, lr) for name, value in settings.items()}
    budget = budget_of(study, train, rounds)
    made: Method = how.made(net, lr, budget, **settings)
    if entry.fine_tune:
        made = tuning(made, lr, budget, own_steps=False)
    cohort = entry.cohort or study.run.cohort
    if not study.run.everyone_trains or cohort is None or entry.averages_all:
        return made
    return averaging_some(made, share=min(1.0, cohort / train.num_clients))


def plan_of(study: Study, entry: StudyEntry, clients: int, rounds: int) -> tuple[int, int | None]:
    """Return the rounds and the cohort of a run; fewer rounds if the method needs all clients."""
    planned = entry.cohort or study.run.cohort
    cohort = None if study.run.everyone_trains or planned is None else min(planned, clients)
    if baseline(entry.name).everyone and cohort is not None and cohort < clients:
        return max(1, round(rounds * cohort / clients)), None
    return rounds, cohort


def trained(
    study: Study,
    entry: StudyEntry,
    options: Options,
    rows: StudyFederation,
    rounds: int,
    seed: int,
    callback: Any = None,
) -> Fit:
    """Fit a method to clients' training rows."""
    taken, cohort = plan_of(study, entry, rows.train.num_clients, rounds)
    return fit(
        method_of(study, entry, options, rows, taken, seed),
        rows.train,
        rounds=taken,
        cohort=cohort,
        seed=seed,
        settings=Settings(compile=study.run.compiled),
        progress=False,
        callback=callback,
    )


def computed(study: Study, entry: StudyEntry, options: Options, seed: int) -> dict[str, Any]:
    """Return the scores of one cell; a run that diverges has none."""
    how, federation = baseline(entry.name), of_study(study, seed)
    rounds, _ = plan_of(study, entry, federation.train.num_clients, study.run.rounds)
    watch = ScoreWatch(study, entry, federation, rounds, seed)
    began = time.perf_counter()
    try:
        fit = trained(study, entry, options, federation, study.run.rounds, seed, watch.look)
        scores = watch.scores(fit)  # the round of all and that of tuning may diverge too
    except ClientError as error:  # an update that is not finite
        return {"options": dict(options), "diverged": str(error), "scores": [], "curve": []}
    history = fit.history
    return {
        "options": dict(options),
        "scores": [score._asdict() for score in scores],
        "curve": watch.curve,
        "clients": watch.clients,
        "classes": watch.classes,
        "entropies": watch.entropies,
        "lines": watch.lines,
        "kb_down": float((history["bytes_down"] / history["clients"]).mean()) / 1e3,
        "kb_up": float((history["bytes_up"] / history["clients"]).mean()) / 1e3,
        "kb_kept": nbytes(fit.federation.client.own) / 1e3,
        "seconds": time.perf_counter() - began,
        # without the first round, which compiles
        "round_seconds": float(history["seconds"][min(1, len(history) - 1) :].mean()),
        "evaluations": how.spent(study.run.evaluations) if not study.run.counts_steps else None,
    }
