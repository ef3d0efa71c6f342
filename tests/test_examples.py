"""Every example runs with `--smoke`; an example that is not listed here fails the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {  # file -> text that its output must contain
    "fedabml_toy.py": "from least squares",
    "fedmap_lines.py": "client 5, 50 rows",
    "fedmap_synthetic.py": "FedMAP",
    "new_clients.py": "mean over 14 new clients",
    "ood_entropy.py": "AUROC",
    "own_model.py": "thalach",
    "own_prior.py": "my own, cosh",
    "prior_ablation.py": "mh + AM",
    "unlabelled_clients.py": "without labels",
}


def test_every_example_is_listed() -> None:
    assert sorted(EXAMPLES) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


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
