"""The parts of the paper studies: splits, scores, and the expected results on problems of seconds."""

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
from matplotlib.image import imread

from hierfl import studies
from hierfl.data.clients import ClientData
from hierfl.datasets import Labelled
from hierfl.engine.chunks import ClientError
from hierfl.studies import (
    compared,
    fedmap_synthetic,
    new_clients_fashion,
    ood_entropy,
    toy_fedabml,
    writers,
)
from hierfl.studies import image_splits as images
from hierfl.studies.new_clients_fashion import Setting as NewSetting
from hierfl.studies.new_clients_fashion import federation as new_federation
from hierfl.studies.tuning import RATES, tuned
from tests.programs import federation, fit


def labels(rows: int = 700) -> torch.Tensor:
    return torch.arange(10).repeat_interleave(rows)


# ------------------------------------------------------------------------------------------------ splits
@pytest.mark.parametrize("seed", [0, 1])
def test_equal_classes_uses_each_row_once_and_gives_each_client_two_classes(seed: int) -> None:
    y = labels(70)
    train, test = images.equal_classes(y, clients=20, classes=2, train=12, test=5, seed=seed)
    dealt = np.concatenate([*train, *test])
    assert len(set(dealt.tolist())) == len(dealt) == 20 * 2 * 17
    for here, held in zip(train, test, strict=True):
        assert np.bincount(y[here]).max() == 12 and np.bincount(y[held]).max() == 5
        assert set(y[here].tolist()) == set(y[held].tolist()) and len(set(y[here].tolist())) == 2
    assert np.bincount(np.concatenate([np.unique(y[h]) for h in train])).tolist() == [4] * 10
    with pytest.raises(ValueError, match=r"70 rows; 80 are needed"):
        images.equal_classes(y, clients=20, classes=2, train=15, test=5, seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_shared_classes_gives_the_clients_of_a_class_equally_many_of_its_rows(seed: int) -> None:
    sizes = torch.tensor([400, 100, 50, 60, 900])
    y = torch.repeat_interleave(torch.arange(5), sizes)[torch.randperm(int(sizes.sum()))]
    train, test = images.shared_classes(y, clients=10, classes=2, share=0.6, seed=seed)
    used = np.concatenate([*train, *test])
    assert len(set(used)) == len(used)
    for own, held in zip(train, test, strict=True):
        assert len(set(y[own].tolist())) == 2
        for c in set(y[own].tolist()):
            each = int(0.6 * sizes[c] / 4)  # 20 places, 4 of each class
            assert int((y[held] == c).sum()) == each // 7
            assert int((y[own] == c).sum()) == each - each // 7
    with pytest.raises(ValueError, match=r"class 2 has 50 rows, and 4 clients share 0\.5"):
        images.shared_classes(y, clients=10, classes=2, share=0.5, seed=seed)


def test_power_law_has_the_classes_of_the_paper_and_unequal_sizes() -> None:
    y = labels(7000)
    train, test = images.power_law(y, clients=100, classes=3, seed=0)
    dealt = np.concatenate([*train, *test])
    assert len(set(dealt.tolist())) == len(dealt)
    sizes = np.array([len(h) for h in train])
    assert sizes.min() >= 22 and sizes.max() > 5 * np.median(sizes)
    for u, (here, held) in enumerate(zip(train, test, strict=True)):
        assert set(y[np.concatenate([here, held])].tolist()) == {(u + j) % 10 for j in range(3)}, (
            "every client has exactly its own classes"
        )
        assert len(here) == int(0.75 * (len(here) + len(held)))


def test_the_authors_labels_are_wrong_where_their_script_is() -> None:
    y = labels(7000)
    train, test = images.power_law(y, clients=100, classes=3, seed=0)
    wrong = images.authors_labels(y, clients=100, classes=3, seed=0)
    for u, own in enumerate(np.concatenate(both) for both in zip(train, test, strict=True)):
        for j in range(3):
            rows = own[y[own].numpy() == (u + j) % 10]
            count = int((wrong[rows] != y[rows]).sum())
            assert count == (0 if (u + j) % 10 == j else 10)
            assert set(wrong[rows].tolist()) <= {j, (u + j) % 10}


def test_pixels_are_scaled_by_training_rows_alone() -> None:
    y = labels(40)
    x = (
        torch.randn(400, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 7.0)
        + 3.0
    )
    rows = images.equal_classes(y, clients=10, classes=2, train=10, test=5, seed=0)
    for scaling in ("pixel", "one"):
        train, _, scale = images.deal(Labelled(x, y, ()), *rows, scaling=scaling)
        values = train.fields["x"]
        assert float(values.mean()) == pytest.approx(0.0, abs=1e-6) and float(
            values.std(correction=0)
        ) == pytest.approx(1.0, abs=1e-6)
        assert (float(scale.sd.std()) > 0.1) == (scaling == "pixel")
    some, _, scale = images.deal(Labelled(x, y, ()), *rows, scaling="pixel", scaled_by=3)
    assert torch.allclose(
        some.select(some.names[:3]).fields["x"].mean(0), torch.zeros(6), atol=1e-6
    )
    assert some.fields["x"].mean(0).abs().max() > 1e-3


def test_initial_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    a, b, c = (images.started(partial(images.dnn, 4, 3), s)[0].weight for s in (1, 1, 2))  # type: ignore[index]
    assert (
        torch.equal(a, b) and not torch.equal(a, c) and torch.equal(before, torch.get_rng_state())
    )


# ------------------------------------------------------------------------------------------------ compared as equals
class Counted(torch.nn.Linear):
    """A linear map that counts the mini-batches that it is evaluated on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += x.shape[-2] == compared.ROWS  # not where a prior is looked up
        return super().forward(x)


@pytest.mark.parametrize("name", compared.GRIDS)
def test_every_method_takes_as_many_local_steps(name: str) -> None:
    """A gradient in the client's own model evaluates it once; so does a step of its copy of the prior."""
    drawn = federation((60, 50))
    fields = {"x": drawn.fields["x"], "y": drawn.fields["ill"].long()}
    data = ClientData(fields, drawn.offsets, drawn.names)
    options = {option: values[0] for option, values in compared.GRIDS[name].items()}
    method = compared.method_of(name, Counted(2, 2), options)

    def of_a_round(run: Callable[[int], object]) -> int:
        calls = []
        for rounds in (1, 2):
            Counted.calls = 0
            run(rounds)
            calls.append(Counted.calls)
        return calls[1] - calls[0]

    fitted = fit(method, data, rounds=1)
    of_copies = 0 if name in compared.POINTS else compared.BATCHES
    of_training = of_a_round(lambda rounds: fit(method, data, rounds=rounds))
    assert of_training == compared.LOCAL + of_copies
    assert of_a_round(lambda rounds: fitted.personalise(data, rounds=rounds)) == compared.LOCAL


def test_every_method_of_a_table_is_tuned_over_the_same_grids() -> None:
    for grids in (compared.GRIDS, fedmap_synthetic.GRIDS, writers.GRIDS):
        assert {grid["lr"] for grid in grids.values()} == {RATES}
    assert set(ood_entropy.METHODS) < set(new_clients_fashion.METHODS) == set(compared.GRIDS)
    assert set(fedmap_synthetic.METHODS) == set(fedmap_synthetic.GRIDS)
    assert set(writers.METHODS) == set(writers.GRIDS)
    assert compared.INNER == toy_fedabml.Toy().inner == 5  # FedABML's K


def test_a_search_takes_one_option_after_the_other_and_drops_what_diverges(tmp_path: Path) -> None:
    tried = []

    def score(options: dict[str, float]) -> float:
        tried.append(options)
        if options["lr"] > 0.2:
            raise ClientError("not finite")
        return (
            float("nan") if options["lr"] == 0.001 else -abs(options["lr"] * options["lam"] - 1e-3)
        )

    grid = {"lr": (0.1, 0.001, 0.3), "lam": (1.0, 0.01, 0.02)}
    found = tuned(tmp_path, "a", {"study": "x"}, grid, score)
    assert found == {"lr": 0.1, "lam": 0.01} and len(tried) == 5
    assert tuned(tmp_path, "a", {"study": "x"}, grid, score) == found and len(tried) == 5
    with pytest.raises(ValueError, match="every trial of 'lr' diverges"):
        tuned(tmp_path, "b", {}, {"lr": (0.3, 0.4), "lam": (1.0,)}, score)


@pytest.mark.parametrize("study", [ood_entropy, new_clients_fashion])
def test_options_are_chosen_without_test_rows(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial works where there are no test rows, and depends on rows that its fit does not see."""
    pytest.importorskip("sklearn")
    setting, options = replace(study.QUICK, tuning_rounds=2), {"lr": 0.1}
    train, *rest = study.federation(setting, 0)
    monkeypatch.setattr(study, "federation", lambda *_: (train, *(None for _ in rest)))
    score = study.trial(compared.FEDAVG, 0, setting, options)
    keep = study.accuracy
    monkeypatch.setattr(
        study,
        "accuracy",
        lambda name, fitted, rows, *rest: keep(
            name, fitted, rows.with_fields(y=(rows.fields["y"] + 1) % 8), *rest
        ),
    )
    assert score > 60.0 > 40.0 > study.trial(compared.FEDAVG, 0, setting, options)


# ------------------------------------------------------------------------------------------------ the toy
def test_fedavg_ends_at_the_fixed_point_of_its_ten_steps() -> None:
    """In closed form, oracle O4: it is off the target, and what the study calls distance is its bias."""
    toy, lr = replace(toy_fedabml.Toy(), rounds=10), 0.1
    for seed in range(2):
        data = toy_fedabml.clients(seed, toy)
        pairs = []
        for name in data.names:
            one = data.select([name])
            x, y = one.fields["x"], one.fields["y"]
            h = x.T @ x / len(y)
            c = torch.linalg.matrix_power(torch.eye(2) - lr * h, toy.steps)
            pairs.append((len(y) * (torch.eye(2) - c), torch.linalg.solve(x.T @ x, x.T @ y)))
        fixed = torch.linalg.solve(sum(w for w, _ in pairs), sum(w @ b for w, b in pairs))
        bias = float((fixed - toy_fedabml.pooled(data)).norm())
        away = distances(toy_fedabml.FEDAVG, seed, toy, lr)
        assert away[-1] == pytest.approx(bias, abs=2e-3) and bias > 0.01


def distances(method: str, seed: int, toy: toy_fedabml.Toy, lr: float) -> list[float]:
    data = toy_fedabml.clients(seed, toy)
    target = toy_fedabml.pooled(data)
    fits = toy_fedabml.each_round(
        toy_fedabml.methods(toy, {"lr": lr})[method](), data, seed, toy.rounds
    )
    return [float((f.message["theta.weight"].flatten() - target).norm()) for f in fits]


def test_band_is_the_student_t_interval() -> None:
    mean, half = toy_fedabml.band(np.array([[1.0], [2.0], [3.0]]))
    assert mean.tolist() == [2.0] and half[0] == pytest.approx(4.3027 / 3**0.5, rel=1e-4)


# ------------------------------------------------------------------------------------------------ entropy
def test_foreign_rows_are_as_many_as_test_rows_and_of_classes_no_client_has() -> None:
    pytest.importorskip("sklearn")
    train, test, strangers = ood_entropy.federation(ood_entropy.Setting(images="digits"), 0)
    assert train.num_clients == 16 and set(train.fields["y"].tolist()) == set(range(8))
    assert strangers["digits 8, 9"].counts.tolist() == test.counts.tolist()


def test_new_clients_do_not_affect_the_scaling() -> None:
    pytest.importorskip("sklearn")
    train, _ = new_federation(NewSetting(clients=16, trained=4, images="digits"), 0)
    known = train.select(train.names[:4]).fields["x"]
    assert float(known.mean()) == pytest.approx(0.0, abs=1e-6)
    assert abs(float(train.fields["x"].mean())) > 1e-4


# ------------------------------------------------------------------------------------------------ whole studies
@pytest.mark.slow
# that of all methods takes minutes, and has tests of its own
@pytest.mark.parametrize("name", [name for name in studies.names() if name != "baselines"])
def test_every_study_runs_quickly_and_then_reuses_its_saved_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    torch.set_default_dtype(torch.float32)
    try:
        computed: list[str] = []
        first = list(studies.run(name, tmp_path, quick=True, say=computed.append))
        computed_again: list[str] = []
        second = list(studies.run(name, tmp_path, quick=True, say=computed_again.append))
    except FileNotFoundError as error:
        pytest.skip(str(error)[:80])
    assert computed and not computed_again
    for one, two in zip(first, second, strict=True):
        assert one.as_json() == two.as_json()
        assert len(one.scores) and one.reading
        for path in one.files:
            if path.suffix == ".png":
                assert imread(path)[..., :3].std() > 0.05, "a figure with something in it"
            else:
                assert len(pd.read_csv(path)) >= len(one.table)
        saved = pd.read_csv(next(path for path in one.files if path.suffix == ".csv"))
        pd.testing.assert_frame_equal(saved, one.scores.reset_index(drop=True), check_dtype=False)
