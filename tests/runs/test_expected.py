"""What is said before the first round: how long it will take, and in which words."""

import time
from typing import Any

import pytest

import hierfl
from hierfl import methods
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.runs import ended as expected
from hierfl.runs.ended import in_words, seconds_expected
from tests.programs import federation, means


def test_durations_are_rounded() -> None:
    words = [in_words(seconds) for seconds in (0.02, 12.4, 600.0, 9000.0)]
    assert words == ["about 1 s", "about 12 s", "about 10 minutes", "about 2.5 hours"]


def test_the_work_of_a_few_clients_is_scaled_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients that take 0.1 s together, and 0.01 s each."""
    made = federate(methods.fedsvi(means), federation())
    clock = [0.0]

    def work(federation: Any, phases: Any, task: Any) -> None:
        clock[0] += 0.1 + 0.01 * len(task.ids)

    monkeypatch.setattr(expected, "work_on", work)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    count = made.data.num_clients
    assert seconds_expected(made, begin(made), 50) == pytest.approx(50 * (0.1 + 0.01 * count))


def test_a_run_that_is_timed_first_is_the_same_run() -> None:
    """Nothing of the timed work stays."""
    one, other = (
        hierfl.fit(methods.fedsvi(means), federation(), rounds=3, progress=shown)
        for shown in (False, True)
    )
    for name, value in one.message["params"].items():
        assert value.equal(other.message["params"][name]), name
