"""One node of four lies: the run ends with the three others' posterior, and its history names the liar."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attacks import hostile_server, lying_nodes


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the runs in which the liar is silent."""
    return {"folder": tmp_path_factory.mktemp("honest")}


@pytest.mark.parametrize("lie", [*lying_nodes.LIES, *lying_nodes.BYTES])
def test_a_run_ends_without_the_liar_and_names_it(
    lie: str, honest: dict[str, Any], tmp_path: Path
) -> None:
    kind = lying_nodes.runs()["exact"]
    if "fit" not in honest:
        honest["fit"] = lying_nodes.lied_to(kind, None, honest["folder"])
    fitted = lying_nodes.lied_to(kind, lie, tmp_path)
    assert lying_nodes.is_named(fitted)
    assert lying_nodes.same(fitted, honest["fit"])


@pytest.mark.parametrize("name", ["two_stage", "pvi", "fedavg"])
def test_a_negative_definite_factor_and_a_large_weight(name: str, tmp_path: Path) -> None:
    kind = lying_nodes.runs()[name]
    silent = lying_nodes.lied_to(kind, None, tmp_path / "silent", rounds=1)
    for number, lie in enumerate(
        ("a negative definite factor", "a weight of 1e12", "numbers of 1e14")
    ):
        if (name, lie) == ("fedavg", "a negative definite factor"):
            continue  # it has none
        fitted = lying_nodes.lied_to(kind, lie, tmp_path / str(number), rounds=1)
        assert lying_nodes.is_named(fitted), lie
        assert lying_nodes.same(fitted, silent), lie


def test_a_hostile_server_reads_no_row() -> None:
    found = hostile_server.attack(36, seed=1)
    assert found["wrong"] == found["raw"] == 0 and found["refused"] > 20
