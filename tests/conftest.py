"""What every test starts from and must leave behind."""

from collections.abc import Iterator

import pyro
import pytest
import torch


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Float64 by default, one start for what a module draws, Pyro's checks on, nothing in its global store, before and after."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    pyro.enable_validation(True)
    pyro.clear_param_store()
    yield
    left = list(pyro.get_param_store().keys())
    pyro.clear_param_store()
    torch.set_default_dtype(dtype)
    assert not left, f"the test left {left} in Pyro's global param store: state must be an object"


@pytest.fixture
def global_generator_untouched() -> Iterator[None]:
    """Ask for it where a function must draw from keys alone: torch's global generator must not move."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "torch's global generator was used"
