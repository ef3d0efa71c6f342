"""Every example runs with `--smoke`; an example that is not listed here fails the test."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from hierfl.summaries import surrogate

ROOT = Path(__file__).parent.parent
# a project of Flower, which make demo-flower runs, and an algorithm, of tests/nodes/test_vantage6.py
DEPLOYED = ("flower_hospitals/", "vantage6_formula/")
EXAMPLES = {  # file -> text that its output must contain
    "own_model.py": "thalach",
    "own_prior.py": "my own, cosh",
    "over_https.py": "1 rounds over HTTPS",
    "recipes/autoregression.py": "of a bad day",
    "recipes/frailty.py": "hazard ratio, a woman",
    "recipes/gaussian_process.py": "weeks over which",
    "recipes/group_level_predictor.py": "Twice the uranium",
    "recipes/horseshoe.py": "slopes have a median",
    "recipes/measurement_error.py": "reliability of one reading",
    "recipes/missing_covariates.py": "imputed",
    "recipes/network_meta_analysis.py": "heterogeneity tau",
    "recipes/ordinal.py": "switzerland",
    "recipes/three_levels.py": "strongest in",
    "recipes/two_kinds_of_clients.py": "what it adds there",
    "simulate_hospitals.py": "P9642,north,75.0",
    "unlabeled_clients.py": "without labels",
}


def test_every_example_is_listed() -> None:
    folder = ROOT / "examples"
    there = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]
    there = [name for name in there if not name.startswith(DEPLOYED)]
    assert sorted(EXAMPLES) == sorted(there)


@pytest.mark.slow(
    "over_https.py",
    "own_model.py",
    "own_prior.py",
    "recipes/group_level_predictor.py",
    "recipes/horseshoe.py",
)
@pytest.mark.filterwarnings("default")  # as a user's interpreter has it
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    path = ROOT / "examples" / name
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke"])
    monkeypatch.setattr(surrogate, "FEW", 30)  # draws of a prior, one after another
    runpy.run_path(str(path), run_name="__main__")
    assert EXAMPLES[name] in capsys.readouterr().out
