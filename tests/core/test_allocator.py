"""Freed memory stays in the process, and `keep_memory` changes nothing where it should not."""

import subprocess
import sys

import pytest

from hierfl.core.process import keep_memory

FAULTS = """
import resource, torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    # Together more than twice the largest tensor, which is what glibc learns to keep by itself.
    several = [torch.ones(2_000_000) for _ in range(6)]
    del several
def of_eight():
    work()
    before = faults()
    for _ in range(8):
        work()
    return faults() - before
first = of_eight()
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


@pytest.mark.skipif(
    not keep_memory(), reason="not glibc, or the environment sets the thresholds already"
)
def test_freed_memory_is_reused_by_the_next_step() -> None:
    # A round may still find the heap in pieces that the fit left: the least of three counts.
    program = f"{FAULTS}{FIT}assert 5 * min(of_eight() for _ in range(3)) < first"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_fit_alone_changes_malloc() -> None:
    program = f"{NO_MALLOPT}import hierfl\nprint('imported', flush=True){FIT}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "imported\n" and "malloc is changed" in done.stderr, done.stderr


def test_the_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_memory()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_memory()
