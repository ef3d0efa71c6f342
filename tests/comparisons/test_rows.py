"""No test row reaches training, scaling or tuning, and clients that join are not seen before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hierfl import Fit
from hierfl.comparisons import cells, federations, tuning
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.measures import everyones
from hierfl.comparisons.study_data import Data
from hierfl.core.trees import tree_leaves
from hierfl.studies import image_splits as images
from hierfl.studies.drawn_clients import Both
from tests.comparisons.small import study

MARKER = 100.0  # pixels are from 0 to 1
PARTITIONS: list[dict[str, Any]] = [
    {"kind": "equal_classes", "clients": 6, "classes": 2, "train": 16, "test": 6},
    {"kind": "shared_classes", "clients": 6, "classes": 3, "share": 0.5},
    {"kind": "dirichlet", "clients": 6, "concentration": 5.0},
    {"kind": "class_mixes", "clients": 6, "concentration": 0.01},
]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what plants a marker in every test row from then on."""
    plain = images.dealt

    def dealt(*given: Any) -> Both:
        train, test = plain(*given)
        return train, test.with_fields(x=MARKER * (1.0 - test.fields["x"]), y=test.fields["y"] * 0)

    def plant() -> None:
        monkeypatch.setattr(images, "dealt", dealt)
        federations.federation.cache_clear()

    return plant


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: str(p["kind"]))
@pytest.mark.parametrize("scaling", ["pixel", "one"])
def test_no_test_row_reaches_training_or_scaling(
    partition: dict[str, Any], scaling: str, marked: Callable[[], None]
) -> None:
    own = study(data={"scaling": scaling, "partition": partition}, evaluation={"new_clients": 2})
    before = of_study(own, 0)
    marked()
    after = of_study(own, 0)
    assert torch.equal(before.train.fields["x"], after.train.fields["x"])
    assert not torch.equal(before.test.fields["x"], after.test.fields["x"])
    assert before.joining is not None and after.joining is not None
    assert torch.equal(before.joining[0].fields["x"], after.joining[0].fields["x"])


def test_training_and_test_rows_of_all_clients_are_different_rows() -> None:
    for partition in PARTITIONS:
        own = study(data={"scaling": "none", "partition": partition}, evaluation={"new_clients": 2})
        found = of_study(own, 0)
        assert found.joining is not None
        parts = [found.train, found.test, *found.joining]
        rows = torch.cat([part.fields["x"] for part in parts])
        # a few of the digits are the same image twice
        assert len(rows.unique(dim=0)) > 0.99 * len(rows)
        assert not set(found.train.names) & set(found.joining[0].names)
        assert found.train.names == found.test.names


@pytest.mark.parametrize("on", ["rows", "clients"])
def test_tuning_is_blind_to_test_rows(on: str, marked: Callable[[], None], tmp_path: Path) -> None:
    own = study(tuning={"rounds": 2, "on": on, "lr": [0.01, 0.3]})
    before = tuning.chosen(tmp_path / "before", own, own.methods[0])
    marked()
    after = tuning.chosen(tmp_path / "after", own, own.methods[0])
    assert before == after and before["computed"] == 2


def test_a_run_is_blind_to_test_rows_but_for_its_scores(marked: Callable[[], None]) -> None:
    own = study()
    fits: list[Fit] = []

    def fitted() -> dict[str, Any]:
        rows = of_study(own, 0)
        fits.append(cells.trained(own, own.methods[0], {}, rows, 3, 0))
        return cells.computed(own, own.methods[0], {}, 0)

    before = fitted()
    marked()
    after = fitted()
    assert before["scores"] != after["scores"]
    one, other = (tree_leaves(fit.progress.server) for fit in fits)
    assert one and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_rows_of_all_clients_are_the_same_for_each() -> None:
    test = of_study(study(), 0).test
    found = everyones(test, 10, 0)
    assert found.names == test.names and set(found.counts.tolist()) == {10}
    first, *others = found.fields["x"].unflatten(0, (test.num_clients, 10))
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, everyones(test, 10, 1).fields["x"][:10])


def test_natural_clients_keep_their_rows() -> None:
    own = study().model_copy(update={"data": Data(name="heart_disease", scaling="pixel")})
    found = of_study(own, 0)
    assert (
        found.train.names == ("cleveland", "hungarian", "switzerland", "va") and found.classes == 2
    )
    assert found.train.num_rows + found.test.num_rows == 920
    assert found.train.fields["x"].mean(0).abs().max() < 1e-5


def test_more_new_clients_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="leave some to train"):
        of_study(study(evaluation={"new_clients": 6}), 0)
