"""Compiled steps of every method: the states and the history of eager steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import hierfl
from hierfl import methods
from hierfl.engine.federation import federate
from hierfl.method import Method
from hierfl.optimizers import SGD
from tests.engine.test_engines import METHODS, _shared, state_of
from tests.methods.test_messages import OTHERS
from tests.methods.test_privacy import METHODS as SENDING
from tests.methods.test_privacy import SUMMARIES, TEN_ROUNDS
from tests.programs import federation


def clusters() -> Method:
    """Return clustered_fl of settings in which the clients part at once."""
    return methods.clustered_fl(
        _shared(),
        mean_norm=10.0,
        client_norm=0.0,
        warmup_rounds=0,
        optimizer=SGD(0.05, 0.9),
        batch_size=2,
    )


ALL: dict[str, Callable[[], Method]] = {
    **METHODS,
    **{name: make for name, (make, _) in SENDING.items() if name.startswith("fedsvi")},
    **{name: make for name, (make, *_) in TEN_ROUNDS.items()},
    **{name: OTHERS[name][0] for name in ("ditto", "fedbn", "fedmap", "fedvi", "local_only")},
    "by_rows": lambda: methods.by_rows(METHODS["pfedme"]()),
    "clustered_fl": clusters,
    "differentially_private": lambda: methods.differentially_private(
        METHODS["fedavg"](), clipping_norm=0.1, noise_multiplier=0.5, secret=1
    ),
    "robust": lambda: methods.robust(METHODS["pfedme"](), rule="clipped"),
    "server_optimized": lambda: methods.server_optimized(METHODS["fedavg"](), SGD(0.5, 0.9)),
}
WRAPPED = {
    "averaging_some": "pfedbred, some averaged",
    "fine_tuned": "pfedbred mh",
    "over_relaxed": "fedavg, momentum, beta",
}
ELSEWHERE = {"batch_normed": "tests/methods/test_batch_normed.py, compiled there"}
EAGER = {"two_stage": "inductor lowers no step of it (Phase.eager)"}
QUICK = ("fedavg", "fedpac", "scaffold I")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALL]
)
def test_compiled_steps_of_every_method(name: str) -> None:
    fits = []
    for how in (False, True):
        torch.manual_seed(0)  # heads and constructors start at random
        data = federation((5, 3, 7, 1, 2))
        fits.append(
            hierfl.fit(ALL[name](), data, rounds=3, seed=4, settings=hierfl.Settings(compile=how))
        )
    assert [fit.progress.compiled for fit in fits] == [False, True]
    eager, compiled = (state_of(fit) for fit in fits)
    assert any(bool((value != 0.0).any()) for value in eager.values())
    for path, value in eager.items():
        assert torch.allclose(value, compiled[path], rtol=0.0, atol=1e-9), path
    left = fits[0].history.select_dtypes("number").drop(columns="seconds")
    right = fits[1].history[left.columns]
    assert np.allclose(left, right, rtol=0.0, atol=1e-7, equal_nan=True)


def test_every_method_is_compiled_or_says_why_not() -> None:
    """A wrapper is listed by a method that it wraps."""
    listed = {name.split()[0] for name in ALL} | set(WRAPPED) | set(EAGER) | set(ELSEWHERE)
    assert set(WRAPPED.values()) <= set(ALL)
    assert set(methods.__all__) - listed == set()
    for name in EAGER:
        client = federate(SUMMARIES[name][0](), federation()).client
        assert all(phase.eager for phase in client.phases)
