"""`fit`, predictions and draws from several threads: the answers of one thread, and nothing global left changed."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyro
import torch

import hierfl
from hierfl.core.process import one_at_a_time
from hierfl.methods import fedsvi
from tests.programs import federation, fit, regression
from tests.runs.fits import two_rounds


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls at once, each in a thread; an error is returned as its text."""
    start = threading.Barrier(len(calls))

    def answer(call: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return call()
        except Exception as error:
            return repr(error)

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(answer, calls))


def test_four_threads_get_the_answers_of_one() -> None:
    """Without turns, three of four such fits failed inside Pyro's handlers."""
    fitted = two_rounds()

    def losses(seed: int) -> Any:
        return fit(fedsvi(regression), federation(), rounds=2, seed=seed).history["elbo"].tolist()

    calls: list[Callable[[], Any]] = [
        lambda: losses(0),
        lambda: losses(1),
        lambda: fitted.predict(federation(), draws=8).mean.tolist(),
        lambda: fitted.replicate(federation(), draws=8).tolist(),
    ]
    wanted = [call() for call in calls]
    threads, filters, state = torch.get_num_threads(), list(warnings.filters), torch.get_rng_state()
    assert in_threads(calls) == wanted
    assert torch.get_num_threads() == threads and warnings.filters == filters
    assert torch.equal(torch.get_rng_state(), state)
    assert not pyro.poutine.runtime._PYRO_STACK


def test_two_threads_in_one_folder(tmp_path: Any) -> None:
    """The second waits for the first, and then resumes what is done already."""

    def go() -> Any:
        options = {"rounds": 3, "checkpoint": tmp_path, "checkpoint_every": 1, "resume": True}
        return fit(fedsvi(regression), federation(), **options).history["elbo"].tolist()

    one, two = in_threads([go, go])
    assert one == two and isinstance(one, list)


def test_calls_nest_and_errors_give_the_turn_back() -> None:
    @one_at_a_time
    def inner(fails: bool) -> int:
        if fails:
            raise ValueError("no")
        return 1

    @one_at_a_time
    def outer(fails: bool) -> int:
        return inner(fails)

    assert in_threads([lambda: outer(True), lambda: outer(False), lambda: outer(True)]) == [
        "ValueError('no')",
        1,
        "ValueError('no')",
    ]
    assert hierfl.fit.__doc__ and hierfl.fit.__name__ == "fit"
