"""What every test of comparisons starts from."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from hierfl.comparisons import compare, federations


class InProcess:
    """An executor of this process: a process of its own takes seconds to import torch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what a ProcessPoolExecutor takes."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: Any) -> None:
        """End: there is nothing to end."""


@pytest.fixture(autouse=True)
def single_precision(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Single precision, as in the processes of a study, no clients of the test before, one process."""
    if "own_processes" not in request.fixturenames:
        monkeypatch.setattr(compare, "ProcessPoolExecutor", InProcess)
    torch.set_default_dtype(torch.float32)
    federations.federation.cache_clear()
    yield
    federations.federation.cache_clear()


@pytest.fixture
def own_processes() -> None:
    """Let a study compute in processes of its own, as for users."""
