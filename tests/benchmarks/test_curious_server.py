"""What the threat model says that a curious server learns from two default fits is what it learns."""

from pathlib import Path

import pytest

from benchmarks import curious_server
from tests.sampled import sampled

PAGE = Path(__file__).parents[2] / "docs" / "threat_model.md"


@pytest.mark.parametrize("family", sampled(["gaussian", "bernoulli"], 2))
def test_the_threat_model_states_what_the_server_computes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curious_server, "HALVES", 1)
    frame = curious_server.patients()
    got = curious_server.line(family, frame)
    line = next(of for of in PAGE.read_text().splitlines() if of.startswith(f"| {family}, "))
    *said, said_auc = (cell.strip() for cell in line.strip("| ").split("|"))
    *found, auc = got.values()
    for stated, value in zip(said, found, strict=True):
        # an exact number is exact to rounding
        is_zero = stated == "0" and abs(float(value)) < 1e-6
        assert stated == value or is_zero, (stated, value)
    mean, sd = map(float, said_auc.split(" ± "))
    assert abs(mean - 0.5) < 2.0 * sd and abs(float(auc.split(" ± ")[0]) - mean) < 4.0 * sd
