"""What docs/disclosure.md says of one-row clients: their rows are read off what they send."""

import math

import pytest

from benchmarks.disclosure import METHODS, federation, nearest_reading, recovered
from tests.sampled import sampled

EXACT = ["fedavg, 1 step", "fedavg", "ditto", "pfedme", "fedlaplace", "pvi"]


@pytest.mark.parametrize("name", sampled(EXACT, 3))
def test_the_row_of_a_client_with_one_row_is_read_exactly(name: str) -> None:
    assert nearest_reading(METHODS[name](), federation(1, seed=0)) < 1e-10


@pytest.mark.slow("fedsvi(conditional)")
@pytest.mark.parametrize("name", ["fedabml", "fedsvi(conditional)"])
def test_noise_of_the_guide_hides_the_row_only_in_part(name: str) -> None:
    assert 1e-10 < nearest_reading(METHODS[name](), federation(1, seed=0)) < 0.1


@pytest.mark.parametrize("name", sampled(["fedavg", "fedlaplace"], ["fedavg"]))
def test_no_row_of_five_is_read_off_at_once(name: str) -> None:
    assert nearest_reading(METHODS[name](), federation(5, seed=0)) > 0.1


def test_a_method_that_sends_its_loss_alone_has_nothing_to_read() -> None:
    assert nearest_reading(METHODS["local_only"](), federation(1, seed=0)) == math.inf


def test_a_search_recovers_one_row() -> None:
    assert recovered(METHODS["fedavg, 1 step"](), federation(1, seed=0)) == 1.0
