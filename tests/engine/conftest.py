"""Fixtures of the tests of the engine."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Let torch have two threads, one for each chunk that is worked on at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
