"""Clients leave and join over nodes: the answers are those of one machine, on real rows."""

import os
import warnings
from pathlib import Path

import pytest

from benchmarks.living import CHANGES
from benchmarks.living_nodes import Both

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("HIERFL_DATA" not in os.environ, reason="HIERFL_DATA names no folder"),
]
MOST = {"nurses": 500, "heart": 165_000}  # bytes of the client that joins, both ways


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", MOST)
def test_answers_are_those_of_one_machine(name: str, what: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = Both(name, tmp_path, 100).line(what)
    here, over, asked, *apart = line[3:]
    joins = "joins" in what
    assert int(here) == int(over) <= MOST[name] * joins
    assert bool(int(over)) == joins
    assert int(asked) == joins
    means, ratios = apart[::2], apart[1::2]
    assert all(float(mean) < 1e-3 for mean in means)
    assert all(abs(float(r) - 1.0) < 1e-2 for both in ratios for r in both.split(" to "))
