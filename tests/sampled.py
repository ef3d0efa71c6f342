"""Some cases of a parametrization in each run of the tests, and all of them in `make test-slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], quick: Collection[Any] | int) -> list[Any]:
    """Return cases as parameters of a test, all but the quick ones marked slow; of a number n, every n-th is quick."""
    listed = list(cases)
    chosen = listed[::quick] if isinstance(quick, int) else quick
    return [
        case
        if case in chosen
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in listed
    ]
