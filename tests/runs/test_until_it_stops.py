"""`fit(method, data)` without `rounds=`: runs until the method stops itself, and refuses one that does not."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hierfl
from hierfl import CheckpointError, Method, Server
from hierfl.methods import (
    averaging_some,
    bfi,
    by_rows,
    fedavg,
    fedlaplace,
    fedsvi,
    fine_tuned,
    over_relaxed,
)
from hierfl.methods.posteriors import fedlaplace_server
from hierfl.methods.posteriors.fedlaplace import MOST_ROUNDS
from tests.methods.test_wrappers import common
from tests.programs import federation, fit, means, regression, same, three

# two weighting rounds, of 32 and of 64 points
SMALL: dict[str, Any] = {"settle_draws": 4, "draws": 64, "target_ess": 10**9, "weighting_rounds": 2}


@pytest.fixture(autouse=True, scope="module")
def few_points() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedlaplace_server, "FIRST", 32)
        yield


def never_still() -> Method:
    """FedAvg with a server that never finishes, though it says that it stops after four rounds."""
    return replace(fedavg(common(), steps=1), most_rounds=4)


@cache
def whole_run() -> hierfl.Fit:
    return fit(fedlaplace(means, **SMALL), three())


@pytest.mark.slow
def test_it_is_the_run_of_the_most_rounds() -> None:
    whole = whole_run()
    assert whole.federation.server.finished(whole.progress.server)
    assert len(whole.history) < 20 and whole.rounds == MOST_ROUNDS
    assert len(fit(bfi(means, steps=1), three()).history) == 1


def test_a_method_that_does_not_finish_ends_with_its_most_rounds() -> None:
    fitted = fit(never_still(), federation())
    assert fitted.progress.round == fitted.rounds == 4


def test_the_server_decides_before_the_most_rounds() -> None:
    def server(program: Any) -> Server:
        plain = never_still().server(program)
        return replace(plain, state={**plain.state}, finished=lambda state: next(calls) >= 2)

    calls = iter(range(100))
    fitted = fit(replace(never_still(), server=server, most_rounds=50), federation())
    assert fitted.progress.round < 4


@pytest.mark.parametrize(
    "method",
    [
        fedsvi(regression),
        fedavg(common(), steps=1),
        over_relaxed(never_still()),
        averaging_some(never_still(), share=0.5),
    ],
)
def test_others_need_a_number(method: Method) -> None:
    with pytest.raises(ValueError, match=r"does not stop automatically: say how many, rounds=100"):
        fit(method, federation())


@pytest.mark.parametrize("wrap", [by_rows, fine_tuned])
def test_wrappers_that_leave_the_end_as_it_is(wrap: Any) -> None:
    assert fit(wrap(never_still()), federation()).progress.round == 4


def test_most_rounds_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="most_rounds is 0: it must be 1 or more"):
        replace(never_still(), most_rounds=0)


@pytest.mark.slow
def test_a_finished_run_stays_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bar counts rounds without a total."""
    method, data = fedlaplace(means, **SMALL), three()
    fitted = fit(method, data, checkpoint=tmp_path, checkpoint_every=3, progress=True)
    shown = "".join(capsys.readouterr())
    assert "/?" in shown and f"/{MOST_ROUNDS}" not in shown
    same(fitted, whole_run())
    same(fitted, fit(method, data, checkpoint=tmp_path, resume=True))
    same(fitted, fit(method, data, rounds=MOST_ROUNDS, checkpoint=tmp_path, resume=True))
    same(fitted, hierfl.load(tmp_path, method=method, data=data))
    with pytest.raises(CheckpointError, match="rounds: 100 there, 9 here"):
        fit(method, data, rounds=9, checkpoint=tmp_path, resume=True)
