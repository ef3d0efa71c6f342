"""What the C library is told, and when it is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hierfl.core.allocator import keep_memory

FAULTS = """
import resource, torch
{}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    several = [torch.ones(2_000_000) for _ in range(6)]  # in all more than twice the largest, which glibc learns to keep
    del several
work()
before = faults()
for _ in range(20):
    work()
print(faults() - before)
"""


def faults(first: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(first)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not keep_memory(), reason="another C library, or told already by the environment"
)
def test_what_a_step_gives_back_is_there_for_the_next() -> None:
    assert 5 * faults("import hierfl; hierfl.fit") < faults("")


def test_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_memory()


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_memory()
