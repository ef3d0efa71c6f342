"""Every command and function without the extras: it runs, or says which command installs its extra."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click import Command
from typer.core import TyperGroup
from typer.main import get_command

from hierfl.cli import app
from hierfl.core.extras import EXTRAS

ROOT = Path(__file__).parents[2]
DEMO = "demo --out demo --quick"
COMMANDS = {  # without extras -> the extra that it names, or "" if it needs none
    DEMO: "",
    "compare --list": "studies",
    "table demo": "studies",
    "plot demo": "studies",
    "methods": "",
    "audit fedavg --rounds 1": "",
    "new federation": "",
    "show request.hfl": "",
    "data get mnist --folder .": "data",
    "node approve . run": "",
    "node log .": "",
    "node report . --out page.html": "",
    "node answer . --folder .": "",
    "node reset-account .": "",
    "node serve": "flower",
}
CALLS = {
    "hierfl.flower.apps": "flower",
    "hierfl.flower.superlink": "flower",
    "hierfl.great_table(None)": "tables",
    "hierfl.partition.dirichlet([0, 1] * 9, num_clients=2, alpha=1.0, seed=0)": "data",
    "hierfl.methods.wrappers.differentially_private._library()": "privacy",
    "hierfl.summaries.row_noise.RowNoise.worth(1.0, 1e-5)": "privacy",
    "hierfl.studies.image_splits.digits()": "data",
}
SCRIPT = """
import contextlib, importlib, io, json, sys, traceback

missing, commands, calls = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(missing))
from hierfl import cli
from hierfl.demo import run
run.NEW = run.NEW[:1]  # one hospital left out in place of two
endings = {}
for command in commands:
    sys.argv, text = ["hierfl", *command.split()], io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            cli.main()
        except SystemExit as end:
            print(end.code, file=text)
        except BaseException:
            traceback.print_exc(file=text)
    endings[command] = text.getvalue()
import hierfl
for room in ("methods.wrappers.differentially_private", "summaries.row_noise", "studies.image_splits"):
    importlib.import_module(f"hierfl.{room}")
for call in calls:
    try:
        endings[call] = repr(eval(call))
    except Exception as error:
        endings[call] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(endings))
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command and call printed in a process that has no extra."""
    modules = set(EXTRAS) - {"PIL", "httpx"}  # Matplotlib and flwr bring these
    commands = {*COMMANDS} - (set() if os.environ.get("HIERFL_SLOW") else {DEMO})
    names = [json.dumps(list(table)) for table in (modules, commands, CALLS)]
    folder = tmp_path_factory.mktemp("bare")
    (folder / "request.hfl").write_text("none")
    (folder / "policy.toml").touch()  # it is a node's
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        cwd=folder,
        env={"PATH": "", "HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return printed


@pytest.mark.slow(f"{DEMO}-")
@pytest.mark.parametrize(("call", "extra"), [*COMMANDS.items(), *CALLS.items()])
def test_what_needs_no_extra_runs_and_the_other_says_how_to_install_it(
    call: str, extra: str, endings: dict[str, str]
) -> None:
    text = endings[call]
    assert "Traceback" not in text and "No module named" not in text
    assert (f'pip install "hierfl[{extra}]"' in text) if extra else ("hierfl[" not in text)


def imported(node: ast.AST) -> set[str]:
    """Return the packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {str(node.module).partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def unguarded(path: Path) -> set[str]:
    """Return the modules of extras that a file imports outside `with extras_for(...)`."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    blocks = [
        n for n in nodes if isinstance(n, ast.With) and "extras_for" in ast.unparse(n.items[0])
    ]
    inside = {id(n) for block in blocks for n in ast.walk(block)}
    return {name for n in nodes if id(n) not in inside for name in imported(n)} & set(EXTRAS)


def test_every_import_of_an_extra_says_how_to_install_it() -> None:
    """Two rooms need theirs throughout, and their `__init__` says so."""
    rooms = {"flower", "comparisons"}
    files = [p for of in ("hierfl", "models", "guides") for p in (ROOT / of).rglob("*.py")]
    assert {file.relative_to(ROOT).parts[1] for file in files if unguarded(file)} == rooms
    for room in rooms:
        assert "with extras_for(" in (ROOT / "hierfl" / room / "__init__.py").read_text()


def leaves(command: Command, name: str = "") -> list[str]:
    """Return the names of a command's commands."""
    if not isinstance(command, TyperGroup):
        return [name]
    return [leaf for word, c in command.commands.items() for leaf in leaves(c, f"{name} {word}")]


def test_all_commands_and_extras_are_covered() -> None:
    names = [name.strip() for name in leaves(get_command(app))]
    assert not [name for name in names if not any(c.startswith(name) for c in COMMANDS)]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) == set(declared["optional-dependencies"]) - {"dev", "docs"}
