"""Every example runs with `--smoke`; an example that is not listed here fails the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEPLOYED = "flower_hospitals"  # a project of Flower, which make demo-flower runs
EXAMPLES = {  # file -> text that its output must contain
    "own_model.py": "thalach",
    "own_prior.py": "my own, cosh",
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
    "unlabeled_clients.py": "without labels",
}


def test_every_example_is_listed() -> None:
    folder = ROOT / "examples"
    there = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]
    there = [name for name in there if not name.startswith(f"{DEPLOYED}/")]
    assert sorted(EXAMPLES) == sorted(there)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), "--smoke"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[name] in done.stdout
