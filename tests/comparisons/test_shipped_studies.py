"""Study files that ship: each is read, found by its name, says what it is of, and runs quickly."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib import rc_context
from matplotlib.image import imread
from typer.testing import CliRunner

from hierfl.cli import app
from hierfl.comparisons import read_study
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.figures import figure
from hierfl.comparisons.read_study import read
from hierfl.comparisons.score_table import published
from hierfl.comparisons.study_data import SHIPPED
from hierfl.comparisons.study_file import Study

NAMED = [
    ("toy-linear-regression", "fedabml"),
    ("toy-linear-regression", "fedmap"),
    ("ood-entropy", ""),
]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def variants() -> list[Any]:
    """Return (study, variant)."""
    return [
        pytest.param(name, variant, id=f"{name}-{variant}")
        for name in read_study.names()
        for variant in read(read_study.find(name))
    ]


def skip_without_data(own: Study) -> None:
    if own.data.name not in SHIPPED and "HIERFL_DATA" not in os.environ:
        pytest.skip(f"{own.data.name} is read from HIERFL_DATA")


def test_every_study_is_read_in_full_and_quick_and_its_published_numbers_are_there() -> None:
    assert {"toy-linear-regression", "ood-entropy", "baselines"} < set(read_study.names())
    for name in read_study.names():
        file = read_study.find(name)
        full, quick = read(file), read(file, quick=True)
        assert list(quick) == list(full), name
        for variant, own in full.items():
            small = quick[variant]
            assert len(small.run.seeds) * small.run.rounds < len(own.run.seeds) * own.run.rounds
            assert not small.tuning.rounds or name == "digits", name
            assert [e.label for e in small.methods] == [e.label for e in own.methods], name
            assert own.see, f"{name}, {variant}: say what to see"
            for entry in own.methods:
                for score in entry.published:
                    published(own, entry, score)


def test_a_study_is_found_by_its_name_or_path_and_the_nearest_is_named(tmp_path: Path) -> None:
    assert read_study.find("ood-entropy").parent == read_study.FOLDER
    mine = tmp_path / "mine.toml"
    mine.write_text("")
    assert read_study.find(str(mine)) == mine
    done = run("compare", "ood-entropie", "--quick")
    assert done.exit_code == 1 and "did you mean 'ood-entropy'?" in done.output
    assert "toy-linear-regression" in done.output
    assert run("compare").exit_code == 2


def test_all_studies_are_listed() -> None:
    done = run("compare", "--list")
    assert done.exit_code == 0
    for one in read_study.listed():
        assert one["name"] in done.output and one["shows"] in done.output
        assert all(one[key] for key in ("shows", "quick", "full", "data")), one["name"]
    assert "mnist (HIERFL_DATA)" in done.output


def test_the_named_studies_need_no_file() -> None:
    for name, variant in NAMED:
        own = read(read_study.find(name))[variant]
        assert own.data.name in SHIPPED
        assert set(own.evaluation.foreign) <= {"unseen_classes", "shuffled_pixels"}


def test_variants_without_data_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HIERFL_DATA", raising=False)
    study = tmp_path / "two.toml"
    study.write_text(
        'title = "t"\nevaluation = { metric = "accuracy" }\nmethods = { fedavg = {} }\n'
        "run = { rounds = 1, evaluations = 1, seeds = [0], compiled = false }\n"
        'variants = { wisdm = { data = { name = "wisdm" } }, heart = { data = { name = "heart_disease" } } }'
    )
    out = tmp_path / "out"
    done = run("compare", str(study), "--out", str(out), "--processes", "1")
    assert done.exit_code == 0, done.output
    assert "Left out wisdm" in done.output and "| fedavg |" in done.output
    alone = run("compare", str(study), "--out", str(out), "--variant", "wisdm")
    assert alone.exit_code == 1 and "HIERFL_DATA" in alone.output


@pytest.mark.slow
def test_a_run_ends_with_its_table_its_figures_and_what_to_see(tmp_path: Path) -> None:
    """The toy regression in three rounds, of two methods."""
    text = read_study.find("toy-linear-regression").read_text()
    text = text.replace("run = { seeds = [0] }", "run = { seeds = [0], rounds = 3 }")
    short = tmp_path / "short.toml"
    left_out = 'net = { bias = false }\nleave_out = ["Ditto", "pFedBayes"]'
    short.write_text(text.replace("net = { bias = false }", left_out))
    out = tmp_path / "out"
    done = run("compare", str(short), "--quick", "--variant", "fedabml", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "| FedABML |" in done.output and "What to see: In figure-lines.png" in done.output
    figures = sorted(path.name for path in (out / "fedabml").glob("figure*.png"))
    assert figures == ["figure-lines.png", "figure.png"]
    with rc_context({"text.parse_math": False}):  # as they are drawn
        drawn = figure(out / "fedabml")
        drawn.canvas.draw()
    assert not any("$" in tick.get_text() for axes in drawn.axes for tick in axes.get_yticklabels())
    lines = pd.read_csv(out / "fedabml" / "lines.csv")
    served = lines[(lines["score"] == "P") & (lines["method"] == "FedABML")]
    assert served.groupby("client")["draw"].nunique().tolist() == [40, 40]
    assert lines[lines["score"] == "G"]["round"].unique().tolist() == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), variants())
def test_a_quick_run_scores_every_method(name: str, variant: str, tmp_path: Path) -> None:
    own = read(read_study.find(name), quick=True)[variant]
    skip_without_data(own)
    chosen = ["--variant", variant] if variant else []
    done = run("compare", name, "--quick", "--out", str(tmp_path), *chosen)
    assert done.exit_code == 0, done.output
    scores = pd.read_csv(tmp_path / variant / "results.csv")
    assert set(scores["method"]) == {entry.label for entry in own.methods}
    assert set(scores["seed"]) == set(own.run.seeds) and scores["value"].notna().all()
    for entry in own.methods:
        assert f"| {entry.label} |" in done.output
    assert f"What to see: {own.see}" in done.output
    figures = list((tmp_path / variant).glob("figure*.png"))
    assert figures and all(imread(file)[..., :3].std() > 0.05 for file in figures)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), variants())
def test_the_full_form_has_clients_with_rows_for_every_seed(name: str, variant: str) -> None:
    own = read(read_study.find(name))[variant]
    skip_without_data(own)
    for seed in own.run.seeds:
        found = of_study(own, seed)
        for rows in (found.train, found.test, *(found.joining or ())):
            assert int(rows.counts.min()) > 0
