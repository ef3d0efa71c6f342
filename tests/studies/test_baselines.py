"""The methods that study files name: which there are, what each spends, which rows it sees."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hierfl import ClientData, Fit, fit
from hierfl.comparisons import cells
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.study_file import Study
from hierfl.methods.about import names
from hierfl.studies import image_splits as images
from hierfl.studies.baseline_methods import BASELINES
from hierfl.studies.baseline_parts import HELD, Budget

PARTITION = {"kind": "equal_classes", "clients": 10, "classes": 3, "train": 5, "test": 3}
RUN = {"rounds": 1, "evaluations": 6, "batch": 7, "scale": 0.05, "seeds": [0], "compiled": False}


def small(name: str, *, hidden: tuple[int, ...] = (8,), **run: Any) -> Study:
    """Return a study of one method on digits."""
    data = {"name": "digits", "partition": PARTITION}
    given = {"title": "small", "data": data, "net": {"hidden": hidden}, "run": {**RUN, **run}}
    given |= {"evaluation": {"draws": 2, "calibration": True}, "methods": {name: {}}}
    return Study.model_validate(given)


def one(name: str, **changes: Any) -> dict[str, float]:
    """Return a method's scores, each client counting the same, by score and metric."""
    own = small(name, **changes)
    found = cells.computed(own, own.methods[0], {}, 0)
    assert found["kb_up"] > 0.0 and found["round_seconds"] > 0.0
    return {
        f"{score['score']} {score['metric']}": score["value"]
        for score in found["scores"]
        if score["weighting"] == "clients"
    }


@pytest.fixture(autouse=True)
def single_precision() -> None:
    torch.set_default_dtype(torch.float32)


# what else is in `hierfl.methods`, and why it is in no table
OPTIONS = "averaging_some batch_normed by_rows differentially_private quantized robust"
LEFT_OUT = {
    **dict.fromkeys("two_stage fedlaplace pvi bfi fedep".split(), "of few parameters"),
    **dict.fromkeys([*OPTIONS.split(), "server_optimized"], "an option of other methods"),
}


# -------------------------------------------------------------------------------- who is among them
def test_every_method_is_compared_or_named_with_the_reason() -> None:
    used = {how.method for how in BASELINES.values()} | {"fine_tuned", "over_relaxed"}
    assert used | set(LEFT_OUT) == set(names()), "add an entry to BASELINES, or to LEFT_OUT"
    assert not used & set(LEFT_OUT) and all(LEFT_OUT.values())


class Counted(nn.Linear):
    """A linear map that counts the mini-batches that it is evaluated on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # FedVI scores 3 of 7 rows; a prior is looked up at others
        Counted.calls += x.shape[-2] in (7, 3)
        return super().forward(x)


# evaluations on mini-batches without a gradient of the likelihood, in a round of 6 evaluations
BESIDE = {
    "pfedme": 1,  # the copy of the prior, of each mini-batch
    "pfedbayes": 1,
    "fedabml": 1,
    "pfedbred": 2,  # the gradient of mu, and the loss
    "fedem": 6,  # the responsibilities of three models, of each mini-batch
    "fedwba": -4,  # the gradients of five particles are one evaluation
    "qlsd": -1,  # its gradient is of all rows
}
FEWER = ("qlsd",)  # methods that spend less


def net_of(study: Study, features: int, classes: int, seed: int) -> nn.Sequential:
    made = images.started(partial(Counted, features, 8), seed)
    head = images.started(partial(nn.Linear, 8, classes), seed)
    return nn.Sequential(made, nn.ReLU(), head)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_every_method_spends_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "net_of", net_of)
    own, calls = small(name), []
    rows = of_study(own, 0)
    for rounds in (1, 2):
        Counted.calls = 0
        cells.trained(own, own.methods[0], {"lr": 0.01}, rows, rounds, 0)
        calls.append(Counted.calls)
    spent = BASELINES[name].spent(6)
    assert calls[1] - calls[0] == spent + BESIDE.get(name, 0)
    assert spent == 1 if name in FEWER else abs(spent - 6) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_every_method_is_scored_with_and_without_a_hidden_layer(name: str) -> None:
    for hidden in ((8,), ()) if not BASELINES[name].body else ((8,),):
        scores = one(name, hidden=hidden, lr=0.01)
        assert all(np.isfinite(value) for value in scores.values())
        assert 0.0 <= scores["P accuracy"] <= 100.0 and scores["P log_score"] < 0.0
        assert 0.0 <= scores["P calibration_error"] <= 100.0


def test_a_method_that_needs_all_clients_takes_fewer_rounds_of_all() -> None:
    """A client is in as many rounds, and spends as much."""
    for name, how in BASELINES.items():
        own = small(name, cohort=1, rounds=10)
        method = how.made(net_of(own, 64, 10, 0), 0.1, Budget(6, 7, 100, 10, 15, 2, 0.05))
        assert how.everyone == method.everyone, name
        rounds, cohort = cells.plan_of(own, own.methods[0], 10, 10)
        assert rounds * (cohort or 10) == 10, name


# ------------------------------------------------------------------------------- which rows it sees
def rows_of(data: ClientData) -> set[bytes]:
    return {row.numpy().tobytes() for row in data.fields["x"]}


def test_test_rows_are_predicted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[bytes]] = {"fit": set(), "personalize": set(), "predict": set()}

    def spied(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(one: Any, data: ClientData, **options: Any) -> Any:
            seen[name] |= rows_of(data)
            return function(one, data, **options)

        return called

    rows = of_study(small("fedavg+FT"), 0)
    train, test = rows_of(rows.train), rows_of(rows.test)
    monkeypatch.setattr(cells, "fit", spied("fit", fit))
    for name in ("personalize", "predict"):
        monkeypatch.setattr(Fit, name, spied(name, getattr(Fit, name)))
    one("fedavg+FT")
    assert not train & test and seen == {"fit": train, "personalize": train, "predict": test}


def test_numbers_without_own_rows_are_those_of_the_common_model() -> None:
    common = one("fedavg")
    assert one("fedavg+FT")["G accuracy"] == common["G accuracy"] == common["P accuracy"]
    alone, untrained = one("local_only"), one("fedavg", lr=1e-30)
    assert alone["G accuracy"] == untrained["P accuracy"] == untrained["G accuracy"]
    assert alone["P accuracy"] > alone["G accuracy"] + 20.0


def test_a_fifth_of_the_training_rows_is_marked() -> None:
    train = of_study(small("fedavg"), 0).train
    assert float(train.fields[HELD].mean()) == pytest.approx(0.2)
    assert len(set(train.fields["y"][train.fields[HELD] > 0].tolist())) == 10
