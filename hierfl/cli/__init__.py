"""The command line `hierfl`; commands import torch and the rooms, so that --help is quick."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from hierfl.cli import projects, requests, studies
from hierfl.core.extras import MissingExtra

COMMANDS: tuple[Callable[..., None], ...] = (
    studies.demo,
    studies.compare,
    studies.table,
    studies.plot,
    projects.methods,
    projects.audit,
    projects.new,
    requests.show,
)
NODES: tuple[Callable[..., None], ...] = (
    projects.approve,
    projects.log,
    requests.report,
    requests.answer,
    requests.reset_account,
    projects.serve,
)

app = typer.Typer(
    help="Hierarchical Bayesian federated learning on Pyro.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
data = typer.Typer(help="Data sets that do not come with hierfl.", no_args_is_help=True)
node = typer.Typer(
    help="For the owner of a node: approve runs, answer requests, see what left the node."
)


def _version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"hierfl {version('hierfl')}")
        raise typer.Exit


@app.callback()
def hierfl(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hierarchical Bayesian federated learning on Pyro."""


for command in COMMANDS:
    app.command()(command)
data.command("get")(projects.data_get)
for command in NODES:
    node.command()(command)
app.add_typer(data, name="data")
app.add_typer(node, name="node", no_args_is_help=True)


def main() -> None:
    """Run the command line, with GOMP_SPINCOUNT set before torch is imported (docs/engines.md)."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        app()
    except MissingExtra as error:
        sys.exit(str(error))
