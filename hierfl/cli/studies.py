"""`hierfl demo`, `compare`, `table` and `plot`: runs, and what is read of their folders."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hierfl.cli.messages import ending_on, show_files, show_step

if TYPE_CHECKING:
    from hierfl.comparisons.compare import Failed
    from hierfl.comparisons.study_file import Study


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
            "--quick", help="Few features, rounds and draws: a check that everything works."
        ),
    ] = False,
) -> None:
    """Heart disease at four hospitals: four methods, new patients, new hospitals. About a minute."""
    import torch
    from rich.console import Console

    from hierfl.demo.run import run

    # One thread is faster for small tensors, and double precision safer for Hessians.
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    began, progress, console = time.perf_counter(), Console(stderr=True), Console()
    with ending_on(out=out):
        result = run(out, seed=seed, quick=quick, say=partial(show_step, progress))
    console.print(result.table)
    for line in (*result.reading, ""):
        console.print(line, markup=False)
    show_files(console, result.files)
    console.print(f"Took {time.perf_counter() - began:.0f} s.")


def compare(
    study: Annotated[
        str | None,
        typer.Argument(
            metavar="STUDY", help="A study's name, as --list prints it, or a file STUDY.toml."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A short form, as the table 'quick' of the study file says."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Output folder, with a folder for each variant. Default: the study's name.",
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="NAME",
            help="A variant of the study; may be repeated. Default: all.",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 2,
    every: Annotated[
        bool, typer.Option("--list", help="List the studies that come with hierfl.")
    ] = False,
) -> None:
    """Compare methods as a study file says. A stopped run continues from its output folder."""
    import torch

    if every:
        _list_studies()
        return
    if study is None:
        raise typer.BadParameter("name a study, or list them with --list", param_hint="STUDY")
    folder = out or Path(f"{Path(study).stem}{'-quick' * quick}")
    torch.set_default_dtype(torch.float32)  # as in the processes that compute
    with ending_on(FileNotFoundError, ValueError, RuntimeError, out=folder):
        failed = _variants_compared(study, quick, folder, variant, processes)
    for failure in failed:
        typer.secho(f"{failure.what} failed: {failure.why}", fg="red", err=True)
    if failed:
        raise typer.Exit(1)


def _variants_compared(
    study: str, quick: bool, folder: Path, variant: list[str] | None, processes: int
) -> "list[Failed]":
    """Run the variants of a study, without those whose data are missing unless they are named."""
    from hierfl.comparisons import read_study

    declared = read_study.read(read_study.find(study), quick=quick)
    names, failed, missing = read_study.chosen(declared, variant), [], []
    for name in names:
        try:
            failed += _compared(declared[name], folder / name, processes)
        except FileNotFoundError as error:  # of a data set; the message says how to get it
            missing.append(f"{name or study}: {error}")
            if variant or len(missing) == len(names):
                raise
    for line in missing:
        typer.secho(f"Left out {line}", fg="yellow", err=True)
    return failed


def _compared(study: "Study", folder: Path, processes: int) -> "list[Failed]":
    from rich.console import Console

    from hierfl.comparisons.compare import compare as compared
    from hierfl.comparisons.figures import draw
    from hierfl.comparisons.printed_table import markdown

    say = partial(show_step, Console(stderr=True))
    failed = compared(study, folder, processes=processes, say=say)
    typer.echo(markdown(folder))
    if study.see:
        typer.echo(f"What to see: {study.see}\n")
    typer.echo(f"Figures: {', '.join(str(path) for path in draw(folder))}. Every number: {folder}.")
    return failed


def _list_studies() -> None:
    from hierfl.comparisons.read_study import listed

    typer.echo("Times are CPU time of one core, measured on two cores of a shared x86 server.\n")
    for study in listed():
        typer.secho(study["name"], bold=True)
        typer.echo("  {shows}\n  Data: {data}.".format(**study))
        typer.echo("  Time with --quick: {quick}. In full: {full}.".format(**study))
        if study["variants"]:
            typer.echo(f"  Variants: {study['variants']}.")


def table(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR ...", help="Output folders of `hierfl compare`.")
    ],
    form: Annotated[
        str, typer.Option("--format", metavar="markdown|latex", help="Format of the tables.")
    ] = "markdown",
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="PAGE",
            help="Write the table into a Markdown page, between <!-- DIR --> and <!-- end of DIR -->.",
        ),
    ] = None,
) -> None:
    """Print the tables of a comparison, with published numbers beside ours."""
    from hierfl.comparisons import printed_table
    from hierfl.comparisons.printed_table import put_block

    forms = {"markdown": printed_table.markdown, "latex": printed_table.latex}
    if form not in forms:
        raise typer.BadParameter(f"'{form}' is neither markdown nor latex", param_hint="--format")
    for folder in folders:
        with ending_on(FileNotFoundError, ValueError):
            text = forms[form](folder)
            if into is None:
                typer.echo(text)
            else:
                put_block(into, folder.as_posix(), text)


def plot(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Output folder of `hierfl compare`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="PNG, PDF or SVG. Default: DIR/figure.png."),
    ] = None,
) -> None:
    """Draw a comparison: methods beside published numbers, curves, and other measurements."""
    from hierfl.comparisons.figures import draw

    with ending_on(FileNotFoundError, ValueError, out=out or folder):
        for path in draw(folder, out):
            typer.echo(f"{path}")
