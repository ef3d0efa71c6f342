"""The study of all methods: who is in it, what a method spends, and which rows it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import hierfl
from hierfl import methods
from hierfl.data.clients import ClientData
from hierfl.methods.about import names
from hierfl.runs.result import Fit
from hierfl.studies import (
    baseline_builders,
    baseline_methods,
    baseline_table,
    baselines,
    hierarchy_builders,
)
from hierfl.studies import image_splits as images
from hierfl.studies.baseline_builders import HELD, Budget
from hierfl.studies.baseline_methods import BASELINES, LEFT_OUT
from hierfl.studies.baseline_settings import FASHION, QUICK, Setting, of_method
from hierfl.studies.tuning import RATES

SMALL = replace(
    QUICK,
    clients=10,
    cohort=10,
    train=5,
    test=3,
    hidden=(8,),
    rounds=1,
    evaluations=6,
    batch=7,
    draws=2,
)


@pytest.fixture(autouse=True)
def single_precision() -> None:
    torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------------ who is in it
def test_every_method_is_compared_or_named_with_the_reason() -> None:
    used = {
        name
        for name in names()
        for module in (baseline_methods, baseline_builders, hierarchy_builders)
        if getattr(module, name, None) is getattr(methods, name)
    }
    assert used | set(LEFT_OUT) == set(names()), "add an entry to BASELINES, or to LEFT_OUT"
    assert not used & set(LEFT_OUT) and all(LEFT_OUT.values())


class Counted(nn.Linear):
    """A linear map that counts the mini-batches that it is evaluated on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += x.shape[-2] in (
            7,
            3,
        )  # FedVI scores 3 of 7 rows; a prior is looked up at others
        return super().forward(x)


# evaluations on mini-batches without a gradient of the likelihood, in a round of 6 evaluations
BESIDE = {
    "pfedme": 1,  # the copy of the prior, of each mini-batch
    "pfedbayes": 1,
    "fedabml": 1,
    "pfedbred": 2,  # the gradient of mu, and the loss
    "fedem": 6,  # the responsibilities of three models, of each mini-batch
    "fedpac": 5,  # the features, of each step on the body
}


def net_of(setting: Setting, seed: int) -> nn.Sequential:
    made = images.started(partial(Counted, 64, setting.hidden[0]), seed)
    head = images.started(partial(nn.Linear, setting.hidden[0], 10), seed)
    return nn.Sequential(made, nn.ReLU(), head)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_every_method_spends_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "net_of", net_of)
    train, _ = baselines.federation(SMALL, 0)
    calls = []
    for rounds in (1, 2):
        Counted.calls = 0
        baselines.trained(name, 0, SMALL, 0.01, train, rounds)
        calls.append(Counted.calls)
    spent = BASELINES[name].spent(SMALL.evaluations)
    assert calls[1] - calls[0] == spent + BESIDE.get(name, 0)
    assert abs(spent - SMALL.evaluations) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_every_method_gives_a_finite_row(name: str) -> None:
    numbers = baselines.one(name, 0, SMALL, 0.01)
    assert all(np.isfinite(value) for value in numbers.values())
    assert 0.0 <= numbers["personal"] <= 100.0 and 0.0 <= numbers["global"] <= 100.0
    assert numbers["bytes_up"] > 0.0 and numbers["seconds"] > 0.0 and numbers["log_score"] < 0.0


# ------------------------------------------------------------------------------------------------ which rows it sees
def rows_of(data: ClientData) -> set[bytes]:
    return {row.numpy().tobytes() for row in data.fields["x"]}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[bytes]]:
    """Return the rows that runs hand to each function from now on."""
    found: dict[str, set[bytes]] = {"fit": set(), "personalize": set(), "predict": set()}

    def spied(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(one: Any, data: ClientData, **options: Any) -> Any:
            found[name] |= rows_of(data)
            return function(one, data, **options)

        return called

    monkeypatch.setattr(hierfl, "fit", spied("fit", hierfl.fit))
    for name in ("personalize", "predict"):
        monkeypatch.setattr(Fit, name, spied(name, getattr(Fit, name)))
    return found


def test_test_rows_are_predicted_alone(seen: dict[str, set[bytes]]) -> None:
    train, test = (rows_of(data) for data in baselines.federation(SMALL, 0))
    assert not train & test
    baselines.one("fedavg+FT", 0, SMALL, 0.1)
    assert seen == {"fit": train, "personalize": train, "predict": test}


def test_a_trial_sees_training_rows_alone_and_scores_those_it_keeps(
    seen: dict[str, set[bytes]],
) -> None:
    train = rows_of(baselines.federation(SMALL, 0)[0])
    tuning = replace(SMALL, tuning_rounds=1)
    baselines.trial("fedavg+FT", 0, tuning, {"lr": 0.1})
    assert seen["fit"] | seen["predict"] == train
    assert seen["personalize"] == seen["fit"] and not seen["fit"] & seen["predict"]


def test_numbers_without_own_rows_are_those_of_the_common_model() -> None:
    numbers = baselines.one("fedavg+FT", 0, SMALL, 0.1)
    assert numbers["global"] == baselines.one("fedavg", 0, SMALL, 0.1)["global"]
    alone = baselines.one("local_only", 0, SMALL, 0.1)
    untrained = baselines.one("fedavg", 0, SMALL, 0.0)
    assert alone["global"] == untrained["personal"] == untrained["global"]
    assert alone["personal"] > alone["global"] + 20.0


def test_a_fifth_of_the_training_rows_is_marked() -> None:
    train, _ = baselines.federation(QUICK, 0)
    assert float(train.fields[HELD].mean()) == pytest.approx(0.2)
    assert len(set(train.fields["y"][train.fields[HELD] > 0].tolist())) == 10


# ------------------------------------------------------------------------------------------------ the table
def test_a_small_study_gives_a_table_and_is_not_repeated(tmp_path: Path) -> None:
    lines: list[str] = []
    run = partial(
        baselines.run,
        tmp_path,
        say=lines.append,
        seeds=1,
        settings=[SMALL],
        methods=["fedavg", "fedrep"],
    )
    found = run()
    assert len(lines) == 2 and found.table.index.tolist() == ["fedavg", "fedrep"]
    written = pd.read_csv(tmp_path / "baselines.csv")
    assert written["evaluations"].tolist() == [6, 6] and written["personal"].notna().all()
    params = 64 * 8 + 8 + 8 * 10 + 10
    assert written["bytes_down"].tolist() == [4 * params, 4 * (64 * 8 + 8)]
    assert written["state"].tolist() == [0, 4 * (8 * 10 + 10 + 1)]
    pd.testing.assert_frame_equal(written, found.scores, check_dtype=False)
    assert any("two_stage" in line for line in found.reading)
    assert run().as_markdown() == found.as_markdown() and len(lines) == 2


def test_step_sizes_are_chosen_from_one_grid_for_every_method(tmp_path: Path) -> None:
    lines: list[str] = []
    tuning = replace(SMALL, tuning_rounds=1)
    found = baselines.run(
        tmp_path, say=lines.append, seeds=1, settings=[tuning], methods=["fedavg", "local_only"]
    )
    assert sum("tuning" in line for line in lines) == 2 * len(RATES)
    assert set(found.scores["lr"]) <= set(RATES)
    assert any(line.startswith("Step sizes, chosen on validation rows") for line in found.reading)


def test_a_network_of_one_layer_leaves_out_methods_with_a_head(tmp_path: Path) -> None:
    flat = replace(SMALL, hidden=())
    found = baselines.run(tmp_path, seeds=1, settings=[flat], methods=["fedavg", "fedrep"])
    assert found.table.index.tolist() == ["fedavg"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, how in BASELINES.items() if not how.body])
def test_every_method_without_a_head_takes_a_network_of_one_layer(name: str) -> None:
    numbers = baselines.one(name, 0, replace(SMALL, hidden=()), 0.01)
    assert all(np.isfinite(value) for value in numbers.values())


def test_accuracies_are_means_over_the_last_rounds() -> None:
    five = replace(SMALL, rounds=5)
    each = [
        baselines.one("fedavg", 0, replace(SMALL, rounds=rounds), 0.1)["global"]
        for rounds in (4, 5)
    ]
    assert each[0] != each[1]
    means = baselines.one("fedavg", 0, replace(five, averaged=2), 0.1)
    assert means["global"] == means["personal"] == pytest.approx(sum(each) / 2.0)
    tuned = [baselines.one("fedavg+FT", 0, replace(five, averaged=count), 0.1) for count in (1, 2)]
    assert tuned[0]["personal"] == tuned[1]["personal"], "of the end, as in the paper"
    assert tuned[1]["global"] == means["global"]


def test_published_numbers_stand_beside_ours(tmp_path: Path) -> None:
    row = {"seed": 0, "lr": 0.1, "by_chance": 1.0}
    row |= dict.fromkeys([*baseline_table.MEASURED, *baseline_table.COUNTED], 2.0)
    records = [
        {**row, "images": images_, "method": name, "personal": value}
        for images_, name, value in (
            ("fashion", "fedavg", 82.5),
            ("fashion", "ditto", 99.0),
            ("fashion", "apfl", 50.0),
            ("emnist", "fedavg", 58.0),
        )
    ]
    found = baseline_table.collected(records, tmp_path / "all.csv", is_tuned=True)
    assert found.table["published P, %"].tolist() == ["81.1", "96.4", "", "57.6"]
    assert "More than 1.5 points from the published P: fashion ditto +2.6." in found.reading
    known = {name for each in baseline_table.PUBLISHED.values() for name in each}
    assert known < set(BASELINES)


def test_a_run_that_diverges_is_named_and_counts_in_no_mean(tmp_path: Path) -> None:
    assert baselines.one("fedavg", 0, SMALL, 1e30) == {"personal": None}
    row = {"images": "digits", "lr": 0.1, "by_chance": 1.0}
    row |= dict.fromkeys([*baseline_table.MEASURED, *baseline_table.COUNTED], 2.0)
    records = [
        {**row, "method": "fedavg", "seed": 0},
        {**row, "method": "fedavg", "seed": 1, "personal": 4.0},
        {**row, "method": "fedrep", "seed": 0},
        {"images": "digits", "method": "fedrep", "seed": 1, "lr": 0.1, "personal": None},
        {"images": "digits", "method": "ditto", "seed": 0, "lr": 0.1, "personal": None},
    ]
    found = baseline_table.collected(records, tmp_path / "all.csv", is_tuned=False)
    assert found.table.loc["fedavg", "P, %"] == "3.0 ± 1.4"
    assert found.table.loc["ditto", "P, %"] == baseline_table.DIVERGED
    assert any("fedrep (seed 1), ditto (seed 0)" in line for line in found.reading)


def test_a_method_that_needs_all_clients_takes_fewer_rounds_of_all() -> None:
    """A client is in as many rounds, and spends as much."""
    for name, how in BASELINES.items():
        setting = of_method(name, FASHION)
        method = how.made(net_of(SMALL, 0), 0.1, Budget(6, 7, 100, 10, 15, 2, 0.05))
        assert how.everyone == method.everyone, name
        assert setting.cohort * setting.rounds == FASHION.cohort * FASHION.rounds
        assert of_method(name, SMALL) == SMALL
    assert of_method("clustered_fl", FASHION).rounds == 10
