"""The table of every method's rounds beside FedAvg's: what is counted, and that it is filled in."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks import method_rounds
from benchmarks.method_rounds import SIZES, Size, measure
from hierfl import ClientData, Method
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin, rounds
from hierfl.studies.baseline_methods import BASELINES

TINY = Size((4, 3, 2), clients=3, rows=10, batch=5, evaluations=4)


def eager(method: Method, data: ClientData) -> Iterator[None]:
    federation = federate(method, data)
    for _ in rounds(federation, begin(federation), 10**9):
        yield


def test_two_methods_are_timed_beside_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    """pFedMe takes five gradients a step: of a budget of 4 it spends 5."""
    monkeypatch.setattr(method_rounds, "run_method", eager)  # compiling takes seconds
    torch.set_default_dtype(torch.float32)
    found = list(measure(("fedavg", "pfedme"), TINY, turns=3, block=0.0))
    assert [timed.name for timed in found] == ["fedavg", "pfedme"]
    assert [timed.evaluations for timed in found] == [4, 5]
    assert all(len(timed.ratios) == len(timed.seconds) == 3 for timed in found)
    assert all(ratio > 0.0 for timed in found for ratio in timed.ratios)


@pytest.mark.parametrize("size", SIZES)
def test_every_method_can_be_built(size: str) -> None:
    """The budget of all methods is spent to within half of what one of their steps takes."""
    total = SIZES[size].evaluations
    spent = {name: how.spent(total) for name, how in BASELINES.items()}
    assert spent.pop("qlsd") == 1, "its clients send one gradient a round"
    assert all(abs(count - total) <= 3 for count in spent.values())
    assert {"x", "y", "held"} == set(SIZES[size].data().fields)
