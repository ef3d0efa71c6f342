"""The run's seed is that of everything random: what a method's server draws too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from hierfl import methods, models
from hierfl.core.trees import named_leaves
from hierfl.method import Method
from hierfl.nodes import in_process
from hierfl.runs.result import Fit
from tests.programs import fit
from tests.summaries.programs import binary, people, spread

COUNTS = (4, 3, 5)


def network() -> Any:
    """Return a small network that all clients share."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    return models.network(net, likelihood=models.likelihood.normal(1.0))


METHODS: dict[str, Any] = {
    "fedem": lambda: methods.fedem(network(), components=2, batch_size=2),
    "fedep": lambda: methods.fedep(spread, steps=1, draws=8),
    "fedfomo": lambda: methods.fedfomo(network(), models=1, batch_size=2),
    "fedlaplace": lambda: methods.fedlaplace(spread, settle_draws=8, weighting_rounds=1),
    "ifca": lambda: methods.ifca(network(), clusters=2, steps=1),
    "pfedhn": lambda: methods.pfedhn(network(), steps=1),
    "pvi": lambda: methods.pvi(spread, draws=8, steps=1),
    "two_stage": lambda: methods.two_stage(binary, draws=100),
}


def draws(fitted: Any) -> torch.Tensor:
    """Return the global draws that two_stage's server keeps."""
    found: torch.Tensor = fitted.progress.server.final.draws
    return found


def posterior_mu(fitted: Any) -> Any:
    """Return 50 posterior draws of a global site."""
    return fitted.posterior(50, seed=3).posterior["mu"].values


def two_stage(seed: int, **options: Any) -> Fit:
    """Return a short fit of two_stage."""
    found: Fit = fit(METHODS["two_stage"](), people(COUNTS), rounds=2, seed=seed, **options)
    return found


def server(method: Method, seed: int) -> dict[str, torch.Tensor]:
    """Return the server's state after what it first draws for."""
    rounds = 2 if method.name == "fedlaplace" else 1
    return named_leaves(fit(method, people((3, 2)), rounds=rounds, seed=seed).progress.server)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_stage_draws_by_the_seed_of_fit_on_both_engines_and_over_nodes(tmp_path: Path) -> None:
    first, other = two_stage(0), two_stage(1)
    one_by_one = two_stage(0, engine="sequential")
    assert not torch.isclose(draws(first), draws(other)).any(0).all()
    torch.testing.assert_close(draws(one_by_one), draws(first))
    nodes = in_process(people(COUNTS), tmp_path)
    over = hierfl.nodes.fit(METHODS["two_stage"](), nodes, rounds=2, seed=1)
    torch.testing.assert_close(posterior_mu(over), posterior_mu(other))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_resumed_and_a_loaded_run_draw_by_the_seed_of_the_first(tmp_path: Path) -> None:
    whole = two_stage(5, checkpoint=tmp_path / "whole", checkpoint_every=1)
    shutil.rmtree(tmp_path / "whole" / "round-00000002")
    resumed = two_stage(5, checkpoint=tmp_path / "whole", resume=True)
    assert torch.equal(draws(resumed), draws(whole))
    whole.save(tmp_path / "saved")
    loaded = hierfl.load(tmp_path / "saved", method=METHODS["two_stage"](), data=people(COUNTS))
    assert loaded.program.seed == 5
    assert torch.equal(loaded.draws(9).shared["mu"], whole.draws(9).shared["mu"])
    new = whole.personalize(people((3, 2)))
    assert new.program.seed == 5


@pytest.mark.slow("fedep", "fedlaplace", "pvi")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in METHODS if name != "two_stage"])
def test_every_method_that_draws_does_so_by_the_seed_of_fit(name: str) -> None:
    first, other = (server(METHODS[name](), seed) for seed in (0, 2**63 + 7))
    assert any(not torch.equal(first[k].nan_to_num(), other[k].nan_to_num()) for k in first)
