"""The command line: `hierfl demo`, `study`, `compare`, `table`, `plot`, `methods`, `audit`, `new`, `data`, `node`.

Torch and the rooms are imported by the command that needs them, so that `hierfl --help` answers at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 190  # columns of the table of methods

app = typer.Typer(
    help="Hierarchical Bayesian federated learning on Pyro.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hierfl {version('hierfl')}")
        raise typer.Exit


@app.callback()
def hierfl(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hierarchical Bayesian federated learning on Pyro."""


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Output folder; created if missing.")
    ],
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the split, the fits and the draws.")
    ] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Take few features, rounds and draws, to check that all works."
        ),
    ] = False,
) -> None:
    """Heart disease at four hospitals: four methods, held-out patients, new hospitals. One to two minutes."""
    import torch
    from rich.console import Console

    from hierfl.demo.run import run

    # Small tensors are faster on one thread, and Newton's Hessians are safer in double precision. These settings are
    # global, but the process is ours.
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    began, progress, console = time.perf_counter(), Console(stderr=True), Console()
    # With --quick a second process would take longer to start than it saves.
    workers = 1 if quick else min(2, os.cpu_count() or 1)
    try:
        found = run(out, seed=seed, quick=quick, workers=workers, say=partial(_show_step, progress))
    except OSError as error:
        raise _unwritable(out, error) from error
    console.print(found.table)
    for line in (*found.reading, ""):
        console.print(line, markup=False)
    _show_files(console, found.files)
    console.print(f"Took {time.perf_counter() - began:.0f} s.")


@app.command()
def study(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Which study; an unknown name lists all studies.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Do very little work, to check that all works.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Output folder. Default: study-NAME."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every number as JSON, on the last line.")
    ] = False,
) -> None:
    """Repeat a paper's measurements. A study that was stopped resumes: finished runs are kept in --out."""
    from rich.console import Console

    from hierfl import studies

    if name not in studies.names():
        raise typer.BadParameter(
            f"there is no study '{name}'; choose from {', '.join(studies.names())}",
            param_hint="NAME",
        )
    folder = out or Path(f"study-{name}")
    try:
        studies.claim_files(name, folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    began, console, progress = time.perf_counter(), Console(), Console(stderr=True)
    parts = []
    try:
        for found in studies.run(name, folder, quick=quick, say=partial(_show_step, progress)):
            console.print(found.printed())
            for line in found.reading:
                console.print(line, markup=False)
            _show_files(console, found.files)
            console.print()
            parts.append(found.as_json())
    except FileNotFoundError as error:  # a missing data set: the message says how to get it
        progress.print(
            f"This study needs data that are missing: {error}",
            style="red",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1) from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    seconds = time.perf_counter() - began
    console.print(f"Took {seconds:.0f} s.")
    if as_json:
        answer = {"study": name, "quick": quick, "seconds": round(seconds, 1), "parts": parts}
        typer.echo(json.dumps(answer))


@app.command()
def compare(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="A study file.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="As the file's table 'quick' changes it.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Output folder; a variant has a folder in it. Default: the file's name.",
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", metavar="NAME", help="Of the file's variants; default: all."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 2,
) -> None:
    """Compare methods as a study file says. A run that was stopped resumes: what is finished is kept in --out."""
    _as_users()
    from rich.console import Console

    from hierfl.comparisons import read_study
    from hierfl.comparisons.compare import compare as compared
    from hierfl.comparisons.tables import markdown

    progress = Console(stderr=True)
    folder, failed = out or Path(f"{study.stem}{'-quick' * quick}"), []
    try:
        declared = read_study.read(study, quick=quick)
        for name in read_study.chosen(declared, variant):
            inside = folder / name
            say = partial(_show_step, progress)
            failed += compared(declared[name], inside, processes=processes, say=say)
            typer.echo(markdown(inside))
            typer.echo(f"{inside} has every number; `hierfl plot {inside}` draws them.")
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        raise _stopped(str(error)) from error  # of a data set, the message says how to get it
    except OSError as error:
        raise _unwritable(folder, error) from error
    for one in failed:
        progress.print(f"{one.what} failed: {one.why}", style="red", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@app.command()
def table(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR ...", help="Output folders of `hierfl compare`.")
    ],
    form: Annotated[
        str, typer.Option("--format", metavar="markdown|latex", help="Of the tables.")
    ] = "markdown",
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="PAGE",
            help="A Markdown page, in whose block <!-- DIR --> ... <!-- end of DIR --> a table is put.",
        ),
    ] = None,
) -> None:
    """Print the tables of compared methods, with published numbers beside ours."""
    from hierfl.comparisons import tables
    from hierfl.studies.results import put_text

    forms = {"markdown": tables.markdown, "latex": tables.latex}
    if form not in forms:
        raise typer.BadParameter(f"'{form}' is neither markdown nor latex", param_hint="--format")
    for folder in folders:
        try:
            text = forms[form](folder)
            if into is None:
                typer.echo(text)
            else:
                put_text(into, folder.as_posix(), text)
        except (FileNotFoundError, ValueError) as error:
            raise _stopped(str(error)) from error


@app.command()
def plot(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Output folder of `hierfl compare`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="PNG, PDF or SVG. Default: DIR/figure.png."),
    ] = None,
) -> None:
    """Draw compared methods, with published numbers and curves over rounds; and what was measured besides."""
    from hierfl.comparisons.figures import figure
    from hierfl.comparisons.figures_besides import figures

    file = out or folder / "figure.png"
    try:
        besides = {file.with_stem(f"{file.stem}-{n}"): f for n, f in figures(folder).items()}
        for path, drawn in {file: figure(folder), **besides}.items():
            drawn.savefig(path, dpi=150)
            typer.echo(f"{path}")
    except (FileNotFoundError, ValueError) as error:
        raise _stopped(str(error)) from error
    except OSError as error:
        raise _unwritable(file, error) from error


def _as_users() -> None:
    """Make this process one like those that compute: single precision."""
    import torch

    torch.set_default_dtype(torch.float32)


def _stopped(message: str) -> typer.Exit:
    """Print what went wrong, and return what ends the command."""
    typer.secho(message, fg="red", err=True)
    return typer.Exit(1)


@app.command()
def methods() -> None:
    """List all methods: what is common and what local, what a client keeps, sends and discloses."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from hierfl.methods.overview import HEADINGS, ROWS

    table = Table(*HEADINGS, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in ROWS:
        table.add_row(*row)
    # words of nine columns break to pieces in a narrow window; a long line can be scrolled
    console = Console()
    Console(width=max(console.width, WIDE), markup=False).print(table)


@app.command()
def audit(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="A method of hierfl by name, for the model of the demo; or MODULE:NAME of one of yours.",
        ),
    ] = "two_stage",
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="MODULE:NAME of a ClientData. Default: heart disease at four hospitals.",
        ),
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="Whose messages. Default: the client with the fewest rows.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="At most. Default: until the method is done, or 3."),
    ] = None,
) -> None:
    """List every tensor that crosses between the server and a client, and whether it depends on the client's rows."""
    import torch
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from hierfl.demo.audited import data_of, method_of
    from hierfl.diagnostics.audit import COLUMNS
    from hierfl.diagnostics.audit import audit as audited

    if ":" not in method:
        torch.set_default_dtype(torch.float64)  # as in the demo
    try:
        found = audited(method_of(method), data_of(data), client=client, rounds=rounds)
    except (KeyError, ValueError, TypeError) as error:
        raise typer.BadParameter(str(error.args[0] if error.args else error)) from error
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in found.table[COLUMNS].itertuples(index=False):
        table.add_row(*map(str, row))
    console = Console()
    Console(width=max(console.width, WIDE), markup=False).print(table)
    typer.echo(found.reading)


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of the project, its folder and its package.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that a run waits for.")] = 4,
) -> None:
    """Write a Flower project: a model, the rows of a node, and the two apps, for simulation and for SuperNodes."""
    from rich.console import Console

    from hierfl.nodes.project import write_project

    try:
        files = write_project(name, Path(), nodes=nodes)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error
    console = Console()
    _show_files(console, files)
    run = f"flwr run . --stream --federation-config 'num-supernodes={nodes}'"
    line = f"Simulate it: cd {name}, pip install 'flwr[simulation]', {run}"
    console.print(line, markup=False, soft_wrap=True)


data = typer.Typer(help="Data sets that do not ship.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist or fashion_mnist.")],
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Default: that of HIERFL_DATA."),
    ] = None,
) -> None:
    """Download a data set from the Hugging Face Hub, compare its checksum, and save it for `hierfl.datasets`."""
    from hierfl.datasets.download import get

    try:
        get(name, folder, typer.echo)
    except (ValueError, ImportError, ConnectionError) as error:
        raise _stopped(str(error)) from error
    except OSError as error:
        raise _unwritable(folder or Path(), error) from error


node = typer.Typer(
    help="What the owner of a node does: serve, approve runs, see what left the node."
)
app.add_typer(node, name="node", no_args_is_help=True)


@node.command()
def approve(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The node's folder.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, as refused.")],
) -> None:
    """Approve a run whose preview you have read; the node then takes part in it."""
    from hierfl.nodes import approval

    try:
        preview = approval.approve(folder, run)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="RUN") from error
    typer.echo(f"Approved run {run}, as described in {preview}.")


@node.command()
def log(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The node's folder.")],
) -> None:
    """List what has left a node: time, run, round, what, bytes."""
    from rich.console import Console
    from rich.table import Table

    from hierfl.nodes.log import entries

    names = ("time", "run", "round", "what", "bytes")
    table = Table(*names, box=None, pad_edge=False)
    for entry in entries(folder):
        table.add_row(*("" if entry.get(n) is None else str(entry[n]) for n in names))
    Console(markup=False).print(table)


@node.command()
def serve(
    supernode: Annotated[
        str, typer.Option(help="Host and port of the SuperNode's Runtime API.")
    ] = "127.0.0.1:9094",
    root_certificates: Annotated[
        Path | None, typer.Option(help="Authority of the API's certificate, PEM; default: no TLS.")
    ] = None,
    secret: Annotated[
        Path | None, typer.Option(help="The SuperNode's --superexec-auth-secret-file.")
    ] = None,
) -> None:
    """Answer the messages of a SuperNode that was started with --isolation process, until it is stopped."""
    from hierfl.flower.serving import serve as served

    try:
        read = [None if file is None else file.read_bytes() for file in (root_certificates, secret)]
        served(supernode, root_certificates=read[0], secret=read[1])
    except OSError as error:
        raise typer.BadParameter(str(error)) from error


def _show_step(progress: Console, line: str) -> None:
    # as markup, words in brackets would be lost, such as those of hierfl[data]; so everywhere here
    progress.print(f"{line} ...", style="dim", markup=False)


def _show_files(console: Console, files: Mapping[Path, str]) -> None:
    for path, what in files.items():
        console.print(f"Wrote {path}: {what}.", markup=False, soft_wrap=True)


def _unwritable(folder: Path, error: OSError) -> typer.BadParameter:
    return typer.BadParameter(
        f"cannot write to '{folder}': {error.strerror or error}", param_hint="--out"
    )


def main() -> None:
    """Run the command line: the entry point of the `hierfl` command."""
    app()


if __name__ == "__main__":
    main()
