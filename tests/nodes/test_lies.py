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
def kept() -> dict[str, Any]:
    """Return a place for the nodes, and the run in which the liar is silent."""
    return {}


@pytest.mark.parametrize("lie", [*lying_nodes.LIES, *lying_nodes.BYTES])
def test_a_run_ends_without_the_liar_and_names_it(
    lie: str, kept: dict[str, Any], tmp_path: Path
) -> None:
    if not kept:
        kept["made"] = lying_nodes.around(lying_nodes.runs()["exact"], tmp_path)
        kept["silent"] = lying_nodes.lied_to(kept["made"], None)
    fitted = lying_nodes.lied_to(kept["made"], lie)
    assert lying_nodes.is_named(fitted), fitted.history["left_out"]
    assert lying_nodes.same(fitted, kept["silent"])


@pytest.mark.parametrize("name", ["two_stage", "pvi", "fedavg"])
def test_a_negative_definite_factor_and_a_large_weight(name: str, tmp_path: Path) -> None:
    made = lying_nodes.around(lying_nodes.runs()[name], tmp_path)
    silent = lying_nodes.lied_to(made, None, rounds=1)
    lies = ["a negative definite factor", "a weight of 1e12", "numbers of 1e14"]
    for lie in lies[name == "fedavg" :]:  # it has no factor
        fitted = lying_nodes.lied_to(made, lie, rounds=1)
        assert lying_nodes.is_named(fitted), (lie, fitted.history["left_out"])
        assert lying_nodes.same(fitted, silent), lie


def test_a_hostile_server_reads_no_row() -> None:
    found = hostile_server.attack(36, seed=1)
    assert found["wrong"] == found["raw"] == 0 and found["refused"] > 20
