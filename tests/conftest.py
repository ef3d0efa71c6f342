"""Fixtures of all tests: what each starts from, and what it must leave behind."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pyro
import pytest
import torch

from hierfl.engine import federation
from hierfl.nodes import node
from tests.read_once import Programs, once

# whose tests are of what comes after reading a program
ROOMS = "diagnostics engine flower formulas methods nodes posterior report runs summaries".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests, or the cells that a mark names, unless HIERFL_SLOW is set, as `make test-slow` sets it."""
    if os.environ.get("HIERFL_SLOW"):
        return
    for item in items:
        for mark in item.iter_markers("slow"):
            cells = mark.args  # none: all
            if not cells or (isinstance(item, pytest.Function) and item.callspec.id in cells):
                item.add_marker(pytest.mark.skip(reason="slow: run by make test-slow"))


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among what all tests share: it took a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True, scope="session")
def eager_unless_asked() -> Iterator[None]:
    """Let `compile="auto"` compile nothing: on a busy machine it compiles what takes a second eagerly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hierfl.runs.one_run.worth_compiling", lambda *of_a_run: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def not_synced() -> Iterator[None]:
    """Leave it to the system when files reach the disk: nodes ask 6,000 times; tests of `fsync` patch it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def without_copies() -> Iterator[None]:
    """Let nodes answer in this process: tests of limits and of transports copy it, which takes 50 ms a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hierfl.engine.supervised.CAN_COPY", False)
        yield


@pytest.fixture(autouse=True, scope="session")
def in_double() -> None:
    """Fixtures of a file are in double precision, as its tests are."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="session")
def programs_read() -> Programs:
    """Return the programs that tests have read."""
    return {}


@pytest.fixture(autouse=True)
def read_once(request: pytest.FixtureRequest, programs_read: Programs) -> Iterator[None]:
    """Read equal programs once in a file, where no code is patched: it is a fifth of the time."""
    if request.path.parent.name not in ROOMS or "monkeypatch" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in (federation, node):
            patch.setattr(module, "read", once(module.read, programs_read))
        yield


@pytest.fixture
def data_files() -> Path:
    """Return the folder of data sets that are not shipped; skip the test where there is none."""
    if "HIERFL_DATA" not in os.environ:
        pytest.skip("HIERFL_DATA names no folder")
    return Path(os.environ["HIERFL_DATA"])


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Float64 by default, a fixed seed of torch, Pyro's checks on, and an empty global param store.

    The store must be empty after the test too.
    """
    torch.set_default_dtype(torch.float64)
    torch.default_generator.manual_seed(0)  # without what CUDA costs
    pyro.enable_validation(True)
    pyro.clear_param_store()
    yield
    left = list(pyro.get_param_store().keys())
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float64)
    assert not left, f"the test left {left} in Pyro's global param store: keep state in an object"


@pytest.fixture
def global_generator_untouched() -> Iterator[None]:
    """Check that torch's global generator does not move.

    Use it in a test of a function that must draw from keys alone.
    """
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "torch's global generator was used"


@pytest.fixture
def not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and rewrite compiled steps, but run their graphs as they are.

    torch takes seconds to read a graph again, and with an empty cache inductor and the C++ compiler
    take up to a minute; tests/engine/test_compiled.py and test_compiled_methods.py let them work.
    """
    monkeypatch.setattr(torch, "compile", lambda graph, **how: graph)
