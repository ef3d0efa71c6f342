"""`hierfl demo`, `study`, `compare`, `table` and `plot`: runs, and what is read of their folders."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hierfl.cli.messages import show_files, show_step, stopped, unwritable


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
        found = run(out, seed=seed, quick=quick, workers=workers, say=partial(show_step, progress))
    except OSError as error:
        raise unwritable(out, error) from error
    console.print(found.table)
    for line in (*found.reading, ""):
        console.print(line, markup=False)
    show_files(console, found.files)
    console.print(f"Took {time.perf_counter() - began:.0f} s.")


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
        raise unwritable(folder, error) from error
    began, console, progress = time.perf_counter(), Console(), Console(stderr=True)
    parts = []
    try:
        for found in studies.run(name, folder, quick=quick, say=partial(show_step, progress)):
            console.print(found.printed())
            for line in found.reading:
                console.print(line, markup=False)
            show_files(console, found.files)
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
        raise unwritable(folder, error) from error
    seconds = time.perf_counter() - began
    console.print(f"Took {seconds:.0f} s.")
    if as_json:
        answer = {"study": name, "quick": quick, "seconds": round(seconds, 1), "parts": parts}
        typer.echo(json.dumps(answer))


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
            say = partial(show_step, progress)
            failed += compared(declared[name], inside, processes=processes, say=say)
            typer.echo(markdown(inside))
            typer.echo(f"{inside} has every number; `hierfl plot {inside}` draws them.")
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        raise stopped(str(error)) from error  # of a data set, the message says how to get it
    except OSError as error:
        raise unwritable(folder, error) from error
    for one in failed:
        progress.print(f"{one.what} failed: {one.why}", style="red", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


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
            raise stopped(str(error)) from error


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
        raise stopped(str(error)) from error
    except OSError as error:
        raise unwritable(file, error) from error


def _as_users() -> None:
    """Make this process one like those that compute: single precision."""
    import torch

    torch.set_default_dtype(torch.float32)
