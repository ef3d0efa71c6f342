"""Study files that ship: each runs quickly, and says what it is of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from hierfl.cli import app
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.read_study import read

FILES = sorted((Path(__file__).parents[2] / "examples" / "studies").glob("*.toml"))
SHIPPED = (
    "digits",
    "fedabml_lines",
    "fedmap_feature",
    "fedmap_label",
    "fedmap_lines",
    "fedmap_quantity",
    "heart_disease",
    "radon",
)  # data that need no file


def variants() -> list[Any]:
    """Return (file, variant); all but the first variant of each file are slow."""
    found: list[Any] = []
    for file in FILES:
        for place, name in enumerate(read(file)):
            marks = pytest.mark.slow if place else ()
            found.append(pytest.param(file, name, marks=marks, id=f"{file.stem}-{name}"))
    return found


@pytest.mark.parametrize(("file", "variant"), variants())
def test_a_quick_run_scores_every_method(file: Path, variant: str, tmp_path: Path) -> None:
    own = read(file, quick=True)[variant]
    if own.data.name not in SHIPPED and "HIERFL_DATA" not in os.environ:
        pytest.skip(f"{own.data.name} is read from HIERFL_DATA")
    chosen = ["--variant", variant] if variant else []
    words = ["compare", str(file), "--quick", "--out", str(tmp_path), *chosen]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    scores = pd.read_csv(tmp_path / variant / "results.csv")
    assert set(scores["method"]) == {entry.label for entry in own.methods}
    assert set(scores["seed"]) == set(own.run.seeds) and scores["value"].notna().all()
    for entry in own.methods:
        assert f"| {entry.label} |" in done.output


@pytest.mark.slow
@pytest.mark.parametrize(("file", "variant"), variants())
def test_the_full_form_has_clients_with_rows_for_every_seed(file: Path, variant: str) -> None:
    own = read(file)[variant]
    if own.data.name not in SHIPPED and "HIERFL_DATA" not in os.environ:
        pytest.skip(f"{own.data.name} is read from HIERFL_DATA")
    for seed in own.run.seeds:
        found = of_study(own, seed)
        for rows in (found.train, found.test, *(found.joining or ())):
            assert int(rows.counts.min()) > 0
