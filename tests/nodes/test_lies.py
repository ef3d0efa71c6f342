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
    """Return a place for the nodes of each method, and for their run in which the liar is silent."""
    return {}


TWELVE = [
    "a negative definite factor",
    "a factor that is not symmetric",
    "single numbers of 1e14",
    "a weight of 1e12",
    "a negative weight",
    "NaN",
    "values of 1e14",
    "another dtype",
    "a name too many",
    "a list",
    "deep JSON",
    "another client",
]
ALL = [*lying_nodes.LIES, *lying_nodes.BYTES]


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        *(("exact", lie) for lie in ALL),
        *(("two_stage", lie) for lie in TWELVE[:7]),  # the others are of no method's numbers
        *(("fedavg", lie) for lie in TWELVE),
        *(("fedsvi", lie) for lie in [*TWELVE[2:7], "values of -1e14", "infinity"]),
        *(("pvi", lie) for lie in ("a negative definite factor", "values of -1e14")),
    ],
)
def test_a_run_ends_without_the_liar_and_names_it(
    name: str, lie: str, kept: dict[str, Any], tmp_path: Path
) -> None:
    if name not in kept:
        made = lying_nodes.around(lying_nodes.runs()[name], tmp_path)
        kept[name] = made, lying_nodes.lied_to(made, None, rounds=1)
    made, silent = kept[name]
    ended = lying_nodes.lied_to(made, lie, rounds=1)
    assert lying_nodes.is_named(ended), ended.fit.history["left_out"]
    assert lying_nodes.same(ended, silent)


@pytest.mark.parametrize("lie", ["values of 1e14", "values of -1e14", "another shape", "NaN"])
def test_a_lie_about_weights_alone(lie: str, kept: dict[str, Any], tmp_path: Path) -> None:
    if lying_nodes.LATE not in kept:
        made = lying_nodes.around(lying_nodes.runs()["two_stage"], tmp_path)
        kept[lying_nodes.LATE] = made, lying_nodes.lied_to(made, None, late=True)
    made, silent = kept[lying_nodes.LATE]
    ended = lying_nodes.lied_to(made, lie, late=True)
    assert ended.lied and lying_nodes.is_named(ended) and lying_nodes.same(ended, silent)


def test_a_hostile_server_reads_no_row() -> None:
    found = hostile_server.attack(36, seed=1)
    assert found["wrong"] == found["raw"] == 0 and found["refused"] > 20
