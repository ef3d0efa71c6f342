"""Fixtures of all tests: what each starts from, and what it must leave behind."""

from collections.abc import Iterator

import pyro
import pytest
import torch


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Float64 by default, a fixed seed of torch, Pyro's checks on, and an empty global param store.

    The store must be empty after the test too.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    pyro.enable_validation(True)
    pyro.clear_param_store()
    yield
    left = list(pyro.get_param_store().keys())
    pyro.clear_param_store()
    torch.set_default_dtype(dtype)
    assert not left, f"the test left {left} in Pyro's global param store: keep state in an object"


@pytest.fixture
def global_generator_untouched() -> Iterator[None]:
    """Check that torch's global generator does not move.

    Use it in a test of a function that must draw from keys alone.
    """
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "torch's global generator was used"
