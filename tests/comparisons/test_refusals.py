"""What `hierfl compare`, `table` and `plot` refuse: names, values of wrong kinds, files."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from hierfl.cli import app
from hierfl.comparisons import cells, printed_table
from hierfl.comparisons.compare import check_methods
from hierfl.comparisons.figures import draw
from hierfl.comparisons.read_study import read
from hierfl.comparisons.result_files import COSTS, CURVES, RESULTS, STUDY, TUNED
from tests.comparisons.small import MINIMAL, study
from tests.comparisons.test_score_table import VALUES, three, written


def refused(tmp_path: Path, text: str) -> str:
    """Return what the command says of a study file that it refuses."""
    file = tmp_path / "study.toml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["compare", str(file), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    "name", ["../../escape", "..", ".", ".hidden", "a/b", "a\\b", "", "/tmp/x", "a.", "x" * 90, "a\nb"]
)  # fmt: skip
def test_a_variant_cannot_leave_its_folder(name: str, tmp_path: Path) -> None:
    key = name.replace("\\", "\\\\").replace("\n", "\\n")
    message = refused(tmp_path, f'{MINIMAL}\n[variants."{key}"]\nrun = {{ rounds = 1 }}')
    assert "becomes the name of a folder" in message
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


def test_the_names_of_variants_that_ship_are_folders(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    names = ["0.01", "table-1-cifar10-2", "50 clients, seed 1", "größer", "a+b=(c)"]
    file.write_text(MINIMAL + "".join(f'[variants."{name}"]\n' for name in names))
    assert list(read(file)) == names


@pytest.mark.parametrize("label", ["../../escape", "..", "x" * 500, "a/b", "\\", "|", "a\0b"])
def test_a_label_cannot_leave_its_folder(label: str, tmp_path: Path) -> None:
    own = study(methods=[{"name": "fedavg", "label": label}])
    file, _ = cells.cell_file(tmp_path, own, own.methods[0], 0)
    cells.keep(file, {}, {"a": 1})
    assert file.resolve().parent == tmp_path / "cells" and cells.kept(file) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variants = 5\n" + MINIMAL, "variants must be a table, and is 5"),
        ("variants = [1]\n" + MINIMAL, "variants must be a table"),
        ("variants = { a = 5 }\n" + MINIMAL, "variants.a must be a table, and is 5"),
        ("quick = 5\n" + MINIMAL, "quick must be a table, and is 5"),
        ("variants = { a = { quick = 5 } }\n" + MINIMAL, "variants.a.quick must be a table"),
        ("leave_out = 5\n" + MINIMAL, "leave_out must be a list of labels"),
        ('leave_out = "one"\n' + MINIMAL, "leave_out must be a list of labels"),
        ("leave_out = [{}]\n" + MINIMAL, "leave_out must be a list of labels"),
        ("leave_out = [[1]]\n" + MINIMAL, "leave_out must be a list of labels"),
        (MINIMAL.replace('{ one = { name = "fedavg" } }', "5"), "methods"),
        (MINIMAL.replace('{ name = "fedavg" }', "5"), "methods.one must be a table, and is 5"),
        (MINIMAL.replace('"fedavg"', "5"), "methods.one.name"),
        (MINIMAL.replace('"fedavg"', '"fedavg", settings = 5'), "methods.one.settings"),
        (MINIMAL.replace('"fedavg"', '"fedavg", grid = { lr = 5 }'), "methods.one.grid.lr"),
        (MINIMAL.replace('"t"', "5"), "title"),
        (MINIMAL.replace('"t"', "1979-05-27"), "title"),
        (MINIMAL + "net = 5", "net"),
        (MINIMAL + "run = { lr = inf }", "run.lr"),
        (MINIMAL + "run = { lr = nan }", "run.lr"),
        (MINIMAL + "run = { seeds = 5 }", "run.seeds"),
        (MINIMAL + "run = { seeds = [0, 0] }", "has one twice"),
        (MINIMAL + "run = { seeds = [-1] }", "run.seeds.0"),
        (MINIMAL + "notes = [1]", "notes.0"),
        ("list = 5\n" + MINIMAL, "list must be a table"),
        (MINIMAL + "list = { full = 3 }", "list.full is 3"),
        (MINIMAL + "run = { rounds = true }", "rounds is True: it must be no boolean"),
        (MINIMAL + "run = { seeds = [false] }", "seeds is [False]: it must be no boolean"),
        (MINIMAL + "costs = 1", "costs is 1: it must be true or false"),
        (MINIMAL.replace('"fedavg"', '"fedavg", grid = { lr = [] }'), "methods.one.grid.lr"),
        (MINIMAL + "published = 5", "published"),
        ("a = " + "[" * 5000, "not a TOML"),
    ],
)  # fmt: skip
def test_values_of_a_wrong_kind_are_named(text: str, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, text)


def test_a_folder_is_no_study_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert done.exit_code == 1 and "there is no study" in done.output


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"prox": "much"}},
        {"settings": {"optimizer": "adamm"}},
        {"published": {"P": ["x", "P"]}},
    ],
)
def test_a_setting_of_a_wrong_kind_names_its_method_before_any_work(changes: Any) -> None:
    beside = {"paper": "PRIOR", "table": "T1", "dataset": "FMNIST", "model": "MCLR"}
    own = study(methods=[{"name": "fedavg", "label": "mine", **changes}], published=beside)
    with pytest.raises(ValueError, match="method 'mine'"):
        check_methods(own)


@pytest.mark.parametrize("file", [RESULTS, COSTS, TUNED, CURVES, STUDY])
@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "method,seed,value\nx,one,two\n", "{}"])
def test_files_that_are_not_of_a_study_are_named(file: str, content: str, tmp_path: Path) -> None:
    written(tmp_path, three(tuning={"rounds": 1}), VALUES)
    (tmp_path / file).write_text(content)
    found = [CliRunner().invoke(app, [word, str(tmp_path)]) for word in ("table", "plot")]
    bad = [done for done in found if done.exit_code]
    assert bad, "one of the commands reads it"
    for done in bad:
        assert isinstance(done.exception, SystemExit), done.exception
        assert f"{file} is not what `hierfl compare` wrote" in done.output


def test_signs_of_latex_and_markdown_are_escaped(tmp_path: Path) -> None:
    label = r"a|b\c $d$ {e} ~f^g <h> **i**"
    own = study(methods=[{"name": "fedavg", "label": label}], run={"seeds": [0]}, title="x_1 & \\y")
    written(tmp_path, own, {label: [90.0]})
    text = printed_table.latex(tmp_path)
    escaped = (
        r"a|b\textbackslash{}c \$d\$ \{e\} \textasciitilde{}f\textasciicircum{}g "
        r"\textless{}h\textgreater{} **i** & \textbf{90.00} \\"
    )
    assert escaped in text and r"\caption{x\_1 \& \textbackslash{}y. " in text
    row = next(line for line in printed_table.markdown(tmp_path).splitlines() if "90.00" in line)
    assert row.startswith(r"| a\|b\c $d$ {e}") and row.replace(r"\|", "").count("|") == 3


def test_an_empty_column_of_numbers_is_read(tmp_path: Path) -> None:
    written(tmp_path, three(), {"best": [None] * 3, "similar": [None] * 3, "worse": [None] * 3})
    assert pd.read_csv(tmp_path / RESULTS).empty
    assert "| best |" in printed_table.markdown(tmp_path)


def test_dollars_of_labels_are_no_mathematics_in_figures(tmp_path: Path) -> None:
    labels = {"costs $\\frac$ more": "best", "$x^$": "similar", "worse": "worse"}
    methods = [{"name": "fedavg", "label": label} for label in labels]
    own = study(methods=methods, run={"seeds": [0, 1, 2]}, title="of $\\frac{ and $")
    written(tmp_path, own, {label: VALUES[name] for label, name in labels.items()})
    assert [path.name for path in draw(tmp_path)] == ["figure.png"]
