"""Compiled steps of every method: the states and the history of eager steps."""

import numpy as np
import pytest
import torch

import hierfl
from hierfl.engine.federation import federate
from tests.engine.test_engines import state_of
from tests.methods.cases import CASES, METHODS
from tests.programs import federation
from tests.sampled import sampled

ALL = [name for name, case in CASES.items() if case.compiled]
QUICK = ("fedavg", "scaffold")


@pytest.mark.slow("scaffold")
@pytest.mark.parametrize("name", sampled(ALL, QUICK))
@pytest.mark.filterwarnings("ignore:too few rows at")  # of batch_normed
def test_compiled_steps_of_every_method(name: str) -> None:
    fits = []
    for how in (False, True):
        torch.manual_seed(0)  # heads and constructors start at random
        data = federation((5, 3, 7, 1, 2))
        fits.append(
            hierfl.fit(
                METHODS[name](), data, rounds=3, seed=4, settings=hierfl.Settings(compile=how)
            )
        )
    assert [fit.progress.compiled for fit in fits] == [False, True]
    eager, compiled = (state_of(fit) for fit in fits)
    assert any(bool((value != 0.0).any()) for value in eager.values())
    for path, value in eager.items():
        assert torch.allclose(value, compiled[path], rtol=0.0, atol=1e-9, equal_nan=True), path
    left = fits[0].history.select_dtypes("number").drop(columns="seconds")
    right = fits[1].history[left.columns]
    assert np.allclose(left, right, rtol=0.0, atol=1e-7, equal_nan=True)


def test_a_method_that_is_not_compiled_has_steps_that_cannot_be() -> None:
    for name, case in CASES.items():
        if not case.compiled:
            phases = federate(case.make(), federation()).client.phases
            assert all(phase.eager for phase in phases), name
