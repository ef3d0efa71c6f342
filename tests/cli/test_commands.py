"""The command line as a whole: its commands, its version, and how soon it answers."""

import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from typer import Context
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from hierfl import cli
from hierfl.cli import app

COMMANDS = ("demo", "compare", "table", "plot", "methods", "audit", "new", "show", "data", "node")


def test_help_names_every_command_in_the_order_of_a_users_work() -> None:
    found = get_command(app)
    assert isinstance(found, TyperGroup) and tuple(found.list_commands(Context(found))) == COMMANDS


@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        "data get",
        *(f"node {name}" for name in "serve approve log answer report reset-account".split()),
    ],
)
def test_every_command_argument_and_option_has_help(command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0 and f"{command} [OPTIONS]" in done.stdout
    found: Any = get_command(app)
    for name in command.split():
        found = found.commands[name]
    assert all(param.help for param in found.params)


def test_the_module_runs_as_the_command_does_without_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['hierfl', '--version']\n"
        "try: runpy.run_module('hierfl', run_name='__main__')\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hierfl", version("hierfl"), "False"]


@pytest.mark.slow
def test_openmp_reads_the_spin_count_that_a_command_sets() -> None:
    """It is read when torch is first imported, so that no later moment will do."""
    command = [sys.executable, "-m", "hierfl", "methods"]
    spins = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in spins}
    env["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP here, or the command imports no torch")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


def test_a_spin_count_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "70")
    monkeypatch.setattr(sys, "argv", ["hierfl", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["GOMP_SPINCOUNT"] == "70"
