"""The run's seed is that of everything random: what a method's server draws too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from hierfl.core.trees import named_leaves
from hierfl.methods import two_stage
from tests.methods.cases import METHODS
from tests.programs import federation, fit, logistic

DRAWING = ("fedem", "fedep", "fedfomo", "fedlaplace", "ifca", "pfedhn", "pvi")


def draws(fitted: Any) -> torch.Tensor:
    """Return the global draws that two_stage's server keeps."""
    found: torch.Tensor = fitted.progress.server.final.draws
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_resumed_and_a_loaded_run_draw_by_the_seed_of_the_first(tmp_path: Path) -> None:
    data, method = federation(), two_stage(logistic, draws=100)

    def run(**options: Any) -> hierfl.Fit:
        return fit(method, data, rounds=2, checkpoint=tmp_path / "whole", **options)

    whole = run(seed=5, checkpoint_every=1)
    shutil.rmtree(tmp_path / "whole" / "round-00000002")
    assert torch.equal(draws(run(seed=5, resume=True)), draws(whole))
    other = fit(method, data, rounds=2, seed=1)
    assert not torch.isclose(draws(whole), draws(other)).any(0).all()
    whole.save(tmp_path / "saved")
    loaded = hierfl.load(tmp_path / "saved", method=method, data=data)
    assert loaded.program.seed == 5
    assert torch.equal(loaded.draws(9).shared["loc"], whole.draws(9).shared["loc"])
    assert whole.personalize(federation((3, 2), seed=8)).program.seed == 5


@pytest.mark.slow("fedep", "fedlaplace", "pvi")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", DRAWING)
def test_every_method_that_draws_does_so_by_the_seed_of_fit(name: str) -> None:
    first, other = (
        named_leaves(fit(METHODS[name](), federation((3, 2)), rounds=2, seed=seed).progress.server)
        for seed in (0, 2**63 + 7)
    )
    assert any(not torch.equal(first[k].nan_to_num(), other[k].nan_to_num()) for k in first)
