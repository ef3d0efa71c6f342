"""Freed memory stays in the process, and `keep_memory` changes nothing where it should not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hierfl.core.process import keep_memory

FAULTS = """
import resource, torch
{}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    # Together more than twice the largest tensor, which is what glibc learns to keep by itself.
    several = [torch.ones(2_000_000) for _ in range(6)]
    del several
work()
before = faults()
for _ in range(20):
    work()
print(faults() - before)
"""

NO_MALLOPT = """
import ctypes, torch
attribute = ctypes.CDLL.__getattr__
def without_mallopt(library, name):
    assert name != "mallopt", "malloc is changed"
    return attribute(library, name)
ctypes.CDLL.__getattr__ = without_mallopt
"""

FIT = """
import hierfl
data = hierfl.ClientData.from_clients({"a": {"x": torch.ones(2, 1), "y": torch.zeros(2)}})
method = hierfl.methods.fedsvi(hierfl.models.regression())
hierfl.fit(method, data, rounds=1, settings=hierfl.Settings(compile=False))
"""


def faults(first: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(first)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not keep_memory(), reason="not glibc, or the environment sets the thresholds already"
)
def test_freed_memory_is_reused_by_the_next_step() -> None:
    assert 5 * faults(FIT) < faults("")


@pytest.mark.parametrize(("program", "changed"), [("import hierfl", False), (FIT, True)])
def test_a_fit_alone_changes_malloc(program: str, changed: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MALLOPT + program], capture_output=True, text=True
    )
    assert ("malloc is changed" in done.stderr) == changed, done.stderr
    assert (done.returncode != 0) == changed


def test_the_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_memory()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_memory()
