"""`hierfl new`: the project that it writes runs, in simulation and on nodes with folders of their own."""

import importlib
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flwr import app as flwr
from typer.testing import CliRunner

import hierfl
from hierfl import cli
from tests.flower.test_apps import Grid, identity, run

NAME = "written_by_hierfl"
Write = Callable[..., Path]
assert identity  # the fixture gives this process what Flower gives to a process of an app


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a project as the command does, and let it be imported for one test."""

    def written(*options: str) -> Path:
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(cli.app, ["new", NAME, *options])
        assert done.exit_code == 0, done.output
        monkeypatch.syspath_prepend(tmp_path / NAME)
        return tmp_path / NAME

    yield written
    for module in [m for m in sys.modules if m.partition(".")[0] == NAME]:
        del sys.modules[module]


def grid(app: Any, configs: list[dict[str, Any]], folder: Path) -> Grid:
    made = Grid(app, folder)
    made.contexts = {
        number: flwr.Context(
            run_id=7,
            node_id=number,
            node_config=config,
            state=flwr.RecordDict(),
            run_config={},
        )
        for number, config in enumerate(configs, start=11)
    }
    return made


def simulated(project: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Run the apps that pyproject.toml names on four simulated nodes."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    named = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    found = {
        kind: getattr(importlib.import_module(place.partition(":")[0]), place.partition(":")[2])
        for kind, place in named["components"].items()
    }
    configs = [{"partition-id": k, "num-partitions": 4} for k in range(4)]
    here = grid(found["clientapp"], configs, folder)
    found["serverapp"](here, next(iter(here.contexts.values())))
    return str(folder)


def test_the_command_says_how_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["new", NAME, "--nodes", "3"])
    assert "pip install 'flwr[simulation]'" in done.output
    assert "--federation-config 'num-supernodes=3'" in done.output
    assert "num-supernodes=3" in (tmp_path / NAME / "README.md").read_text()


@pytest.mark.parametrize("nodes", [3, 4, 8, 11])
def test_every_node_of_the_example_has_rows_of_its_own(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hierfl.flower.project import write_project

    write_project(NAME, tmp_path, nodes=nodes)
    space: dict[str, Any] = {}
    exec((tmp_path / NAME / NAME / "data.py").read_text(), space)
    parts = [space["in_simulation"](k, nodes) for k in range(nodes)]
    assert len({part.names for part in parts}) == nodes
    whole = hierfl.datasets.heart_disease()
    assert sum(part.num_rows for part in parts) == whole.counts[: min(nodes, 4)].sum()
    assert all(part.fields["x"].shape[1] == whole.fields["x"].shape[1] for part in parts)


def edited(project: Path, name: str, old: str, new: str) -> None:
    path = project / NAME / name
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_written_project_runs_in_simulation(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = write()
    edited(project, "app.py", "nodes=4,", 'nodes=4, rounds=2, disclose="sums",')
    simulated(project, monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert printed.startswith("fedsvi, since the server may see only sums")
    assert "slope_scale: mean" in printed and "Answers of 0 of 4 nodes" in printed
    assert len(list((tmp_path / NAME).glob("7-*/left.jsonl"))) == 4


@pytest.mark.slow
def test_a_written_project_runs_as_it_is(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulated(write(), monkeypatch, tmp_path)
    assert capsys.readouterr().out.startswith("two_stage, since every unknown has a prior")


def test_nodes_of_a_written_project_read_rows_from_their_folders(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = write("--nodes", "2")
    edited(project, "app.py", "nodes=2,", 'nodes=2, rounds=1, disclose="sums",')
    data = hierfl.datasets.heart_disease()
    configs = []
    for name in data.names[:2]:
        part, folder = data.select([name]).fields, tmp_path / name
        folder.mkdir(mode=0o700)
        columns = {f"x{k}": column for k, column in enumerate(part["x"].unbind(1))}
        table = pd.DataFrame({k: v.numpy() for k, v in {**columns, "y": part["y"]}.items()})
        table.to_csv(folder / "rows.csv", index=False)
        (folder / "policy.toml").write_text('may_leave = ["scores"]\n')
        configs.append({"client": name, "folder": str(folder)})
    app: Any = importlib.import_module(f"{NAME}.app")
    run(app.made, grid(app.client, configs, tmp_path))
    assert "Answers of 2 of 2 nodes" in capsys.readouterr().out
    assert all(list(Path(one["folder"]).glob("*.state")) for one in configs)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a-b", "cannot be the name"),
        ("class", "cannot be the name"),
        ("../up", "cannot be the name"),
        ("torch", "is the name of an installed"),
    ],
)
def test_names_that_cannot_be_packages_are_refused(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["new", name])
    assert done.exit_code == 2 and why in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_not_written_over(write: Write) -> None:
    project = write()
    (project / NAME / "model.py").write_text("mine")
    done = CliRunner().invoke(cli.app, ["new", NAME])
    assert done.exit_code == 2
    assert (project / NAME / "model.py").read_text() == "mine"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flwr's own use of pathspec
def test_flower_takes_the_written_project_as_an_app(write: Write) -> None:
    """Its names have hyphens where the package has underscores."""
    from flwr.cli.build import build_fab_from_disk

    project = write()
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == (
        NAME.replace("_", "-")
    )
    assert len(build_fab_from_disk(project)) > 1000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flwr's own use of pathspec
def test_flower_hub_takes_the_written_project(write: Write) -> None:
    """What `flwr app publish` checks before it uploads; the Hub itself is not asked."""
    from flwr.cli.config_utils import load_and_validate
    from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

    project = write()
    publish = importlib.import_module("flwr.cli.app_cmd.publish")
    config, warnings = load_and_validate(project / "pyproject.toml", check_module=True)
    assert not warnings and "Apache License" in (project / "LICENSE").read_text()
    found = normalize_and_validate_fab_format(config)
    assert found.fab_format_version == 1 and found.flwr_version_min == "1.41"
    publish._validate_description(config["project"]["description"])
    publish._validate_app_name(config["project"]["name"], "name")
    files = publish._collect_file_paths(project)
    publish._validate_files(files)
    assert {"LICENSE", "README.md", "app.py"} < {path.name for path in files}
    assert f"hierfl {version('hierfl')} and flwr 1.41" in (project / "README.md").read_text()
