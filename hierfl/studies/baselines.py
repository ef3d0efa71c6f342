"""Every method that fits a classifier, on the same clients, with equally many gradient evaluations a round.

For each method one row: P, the accuracy on a client's test rows of what it is served after the fit; log score and
calibration error of the same predictions; G, the accuracy on these rows of what a client is served that brings none
of its own (one of another name that takes no step); what a client receives, sends and keeps; seconds and gradient
evaluations of a round. `baseline_methods` says how each is built, and how it spends the budget.

In full the clients are those of FedABML's section 5: Fashion-MNIST, 200 clients with 2 classes each and multinomial
logistic regression; EMNIST, 150 clients with 3 classes each and a network with one hidden layer of 100 units. 100
rounds, a cohort of a tenth, 5 passes in mini-batches of 50 (as steps). Each method's step size is chosen from the
same five on validation rows, which its clients keep from the fit (`tuning`), once, with the clients of seed 0. P and
G are means over the last 10 rounds, P of methods that tune for a prediction is that of the end; both as in the
paper, whose numbers stand beside ours. EMNIST is the test split of ByClass, 70 % of which are as many rows as the
paper's 10 % of all; clients share the rows of a class equally. The paper gives no width of its network. Methods with
a body and a head are left out where the network has one layer. One that needs all clients in each round
(clustered_fl) takes a tenth of the rounds. Where a set of images is missing it is skipped; where
both are, the clients are of scikit-learn's digits.

`quick` is a small study of its own: scikit-learn's digits, 20 clients with 3 classes each, all of them in every
round, 20 mini-batches of 20 rows, and a network with 32 hidden units. Nothing is tuned there: one step size for all
methods that descend by gradients, and one for all that take Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from hierfl.core.trees import nbytes
from hierfl.data.clients import ClientData
from hierfl.datasets import Labeled
from hierfl.diagnostics.calibration import calibration_error, confidence
from hierfl.engine.chunks import ClientError
from hierfl.engine.settings import Settings
from hierfl.posterior.prediction import Prediction
from hierfl.runs.fit import fit
from hierfl.runs.result import Fit
from hierfl.studies import image_splits as images
from hierfl.studies.baseline_builders import Budget, held_out
from hierfl.studies.baseline_methods import BASELINES
from hierfl.studies.baseline_settings import DIGITS, EMNIST, FASHION, QUICK, Setting, of_method
from hierfl.studies.baseline_table import collected
from hierfl.studies.results import Found, Numbers, Say, kept, quiet
from hierfl.studies.tuning import RATES, Choice, tuned


def run(
    out: Path,
    *,
    quick: bool = False,
    say: Say = quiet,
    seeds: int = 3,
    settings: Sequence[Setting] | None = None,
    methods: Sequence[str] | None = None,
) -> Found:
    """Run every method on every set of clients, and return one table.

    Args:
        out: folder for the numbers; finished runs there are not repeated.
        quick: the small study on digits.
        say: called with one line for each run.
        seeds: number of seeds, from 0; each has its own clients and initial weights.
        settings: the sets of clients. Default None: the digits if `quick`, else those that are there.
        methods: keys of `baseline_methods.BASELINES`. Default None: all.

    Returns:
        The numbers of every run, and the table of means over seeds.

    Raises:
        KeyError: there is no such method.
    """
    if unknown := set(methods or ()) - set(BASELINES):
        raise KeyError(f"there is no method {sorted(unknown)}; choose from {', '.join(BASELINES)}")
    found = settings or ([QUICK] if quick else available(say))
    records = [
        {
            "images": setting.images,
            "method": name,
            "seed": seed,
            **numbers_of(out, name, seed, setting, say),
        }
        for setting in found
        for seed in range(seeds)
        for name in methods or BASELINES
        if setting.hidden or not BASELINES[name].body
    ]
    return collected(records, out / "baselines.csv", is_tuned=all(s.tuning_rounds for s in found))


def available(say: Say) -> list[Setting]:
    """Return the settings whose images are there, or the one of scikit-learn's digits."""
    found = []
    for setting in (FASHION, EMNIST):
        try:
            labeled(setting.images)
        except FileNotFoundError as error:
            say(f"leaving {setting.images} out: {error}")
        else:
            found.append(setting)
    return found or [DIGITS]


def labeled(name: Literal["fashion", "emnist", "digits"]) -> Labeled:
    """Return all rows of an image set, flat."""
    return images.labeled("fashion_mnist" if name == "fashion" else name)


@lru_cache(maxsize=1)
def federation(setting: Setting, seed: int) -> tuple[ClientData, ClientData]:
    """Return all clients' training and test rows; every fifth training row is marked for FedFomo."""
    source = labeled(setting.images)
    train, test = images.dealt(source, *rows_of(setting, source.y, seed))
    scaling = images.scaling_of(train, "one")
    train, test = scaling.apply(train), scaling.apply(test)
    return held_out(train), test


def rows_of(
    setting: Setting, labels: Tensor, seed: int
) -> tuple[list[images.Ids], list[images.Ids]]:
    """Return the numbers of each client's training rows, and of its test rows."""
    who: dict[str, int] = {"clients": setting.clients, "classes": setting.classes, "seed": seed}
    if not setting.train:
        return images.shared_classes(labels, share=setting.share, **who)
    return images.equal_classes(labels, train=setting.train, test=setting.test, **who)


def net_of(setting: Setting, seed: int) -> nn.Sequential:
    """Return the network that every method starts from."""
    source = labeled(setting.images)
    sizes = (source.x.shape[1], *setting.hidden, len(source.classes))

    def made() -> nn.Sequential:
        layers = [part for n, m in pairwise(sizes) for part in (nn.Linear(n, m), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    found = images.started(made, seed)
    assert isinstance(found, nn.Sequential)
    return found


# ------------------------------------------------------------------------------------------------ one run
def numbers_of(out: Path, name: str, seed: int, setting: Setting, say: Say) -> Numbers:
    """Return the numbers of one method and seed, tuned if the setting says so; saved in `out`."""
    setting = of_method(name, setting)
    described = {"study": "baselines", "method": name, **asdict(setting)}
    key = f"baselines-{setting.images}-{name}"
    options: Choice = {"lr": setting.adam if BASELINES[name].adaptive else setting.lr}
    if setting.tuning_rounds:
        options = tuned(out, key, described, {"lr": RATES}, partial(trial, name, 0, setting), say)
    work = partial(one, name, seed, setting, options["lr"])
    described |= {"seed": seed, "options": options}
    return {**options, **kept(out, f"{key}-{seed}", described, work, say)}


def trial(name: str, seed: int, setting: Setting, options: Choice) -> float:
    """Return P in % on validation rows, a fifth of each client's training rows, of a short fit to the others."""
    fitting, held_out = federation(setting, seed)[0].split(0.8, seed=seed)
    fitted = trained(name, seed, setting, options["lr"], fitting, setting.tuning_rounds)
    return accuracy(served(name, fitted, fitting, held_out, seed, setting))


def one(name: str, seed: int, setting: Setting, lr: float) -> Numbers:
    """Run one method; return its row of the table. A run that diverges has no numbers."""
    train, test = federation(setting, seed)
    seen: list[dict[str, float]] = []

    def look(fitted: Fit) -> None:
        if fitted.progress.round > setting.rounds - setting.averaged:
            seen.append(accuracies(name, fitted, train, test, seed, setting))

    try:
        fitted = trained(name, seed, setting, lr, train, setting.rounds, look)
    except ClientError:  # an update that is not finite
        return {"personal": None}
    means = {kind: sum(each[kind] for each in seen) / len(seen) for kind in seen[0]}
    return {**measured(name, fitted, train, test, seed, setting), **means}


def accuracies(
    name: str, fitted: Fit, train: ClientData, test: ClientData, seed: int, setting: Setting
) -> dict[str, float]:
    """Return G, and P of a method that does not tune for it, after some round."""
    strangers = tuple(f"new {client}" for client in train.names)
    new = fitted.personalize(replace(train, names=strangers), rounds=0)
    common = predicted(name, new, replace(test, names=strangers), seed, setting)
    found = {"global": accuracy(common)}
    if not BASELINES[name].tunes:
        found["personal"] = accuracy(predicted(name, fitted, test, seed, setting))
    return found


def measured(
    name: str, fitted: Fit, train: ClientData, test: ClientData, seed: int, setting: Setting
) -> Numbers:
    """Return what a client is served, receives, sends and keeps at the end."""
    how, history = BASELINES[name], fitted.history
    own = served(name, fitted, train, test, seed, setting)
    error = calibration_error(*confidence(own), draws=99)
    return {
        "personal": accuracy(own),
        "log_score": float(own.scores()["log_score"].mean()),
        "calibration_error": 100.0 * error.ece,
        "by_chance": 100.0 * error.by_chance,
        "bytes_up": float((history["bytes_up"] / history["clients"]).mean()),
        "bytes_down": float((history["bytes_down"] / history["clients"]).mean()),
        "seconds": float(history["seconds"][min(1, len(history) - 1) :].mean()),
        "state": nbytes(fitted.federation.client.own),
        "evaluations": how.spent(setting.evaluations),
    }


def trained(
    name: str,
    seed: int,
    setting: Setting,
    lr: float,
    train: ClientData,
    rounds: int,
    look: Callable[[Fit], None] | None = None,
) -> Fit:
    """Fit one method to some clients' rows; `look` is called after each round."""
    client_rows = len(train.fields["y"]) / train.num_clients
    mini_batches = -(-client_rows // setting.batch)
    budget = Budget(
        evaluations=setting.evaluations,
        rows=setting.batch,
        rounds=rounds,
        clients=setting.clients,
        client_rows=round(client_rows),
        passes=max(1, round(setting.evaluations / mini_batches)),
        scale=setting.scale,
    )
    method = BASELINES[name].made(net_of(setting, seed), lr, budget)
    return fit(
        method,
        train,
        rounds=rounds,
        cohort=setting.cohort,
        seed=seed,
        settings=Settings(compile="auto" if setting.compiled else False),
        progress=False,
        callback=look,
    )


def served(
    name: str, fitted: Fit, train: ClientData, rows: ClientData, seed: int, setting: Setting
) -> Prediction:
    """Predict clients' rows by what each is served after the fit."""
    own = fitted.personalize(train, rounds=1) if BASELINES[name].tunes else fitted
    return predicted(name, own, rows, seed, setting)


def predicted(name: str, fitted: Fit, rows: ClientData, seed: int, setting: Setting) -> Prediction:
    """Predict clients' rows, by draws where the method has a posterior."""
    return fitted.predict(rows, draws=setting.draws if BASELINES[name].draws else 1, seed=seed)


def accuracy(prediction: Prediction) -> float:
    """Return the clients' mean accuracy in %."""
    return 100.0 * float(prediction.scores()["accuracy"].mean())
