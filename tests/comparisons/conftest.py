"""What every test of comparisons starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hierfl.comparisons import federations


@pytest.fixture(autouse=True)
def single_precision() -> Iterator[None]:
    """Single precision, as in the processes of a study, and no clients of the test before."""
    torch.set_default_dtype(torch.float32)
    federations.federation.cache_clear()
    yield
    federations.federation.cache_clear()
