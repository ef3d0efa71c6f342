"""The command line: `hierfl demo --out DIR`, `hierfl study NAME`, `hierfl --version`."""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

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
        Path,
        typer.Option("--out", metavar="DIR", help="Folder to write to; made if it is not there."),
    ],
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the fits and the draws.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Hardly any rounds, to see that it runs.")
    ] = False,
) -> None:
    """Heart disease at four hospitals: four methods, held-out patients, hospitals never seen. About a minute."""
    import torch  # the slow imports are left to the commands that need them
    from rich.console import Console

    from hierfl.demo.run import run

    # The process is ours: small tensors are faster on one thread, and Newton's Hessians safer in double precision.
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    began = time.perf_counter()
    progress = Console(stderr=True)
    try:
        workers = (
            1 if quick else min(2, os.cpu_count() or 1)
        )  # a worker's imports take longer than all of --quick
        found = run(
            out,
            seed=seed,
            quick=quick,
            workers=workers,
            say=lambda line: progress.print(f"{line} ...", style="dim"),
        )
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write to '{out}': {error.strerror or error}", param_hint="--out"
        ) from error
    console = Console()
    console.print(found.table)
    for line in found.reading:
        console.print(line)
    console.print()
    for path, what in found.files.items():
        console.print(f"Wrote {path}: {what}.", soft_wrap=True)
    console.print(f"Took {time.perf_counter() - began:.0f} s.")


@app.command()
def study(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Which study; another word lists them.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Hardly any work, to see that it runs.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder to write to. Default: study-NAME."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON that holds every number.")
    ] = False,
) -> None:
    """Measure again what a paper measured. Stopped, it goes on where it was: finished runs are kept in --out."""
    from rich.console import Console

    from hierfl import studies
    from hierfl.demo.run import writable

    if name not in studies.names():
        raise typer.BadParameter(
            f"there is no study '{name}'; there are {', '.join(studies.names())}", param_hint="NAME"
        )
    folder = out or Path(f"study-{name}")
    try:
        writable(folder)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write to '{folder}': {error.strerror or error}", param_hint="--out"
        ) from error
    began, console, progress = time.perf_counter(), Console(), Console(stderr=True)
    parts = []
    try:
        for found in studies.run(
            name, folder, quick=quick, say=lambda line: progress.print(f"{line} ...", style="dim")
        ):
            console.print(found.printed())
            for line in found.reading:
                console.print(line)
            for path, what in found.files.items():
                console.print(f"Wrote {path}: {what}.", soft_wrap=True)
            console.print()
            parts.append(found.as_json())
    except FileNotFoundError as error:  # a data set: the message says how to get it
        progress.print(
            f"This study needs data that are not here: {error}", style="red", soft_wrap=True
        )
        raise typer.Exit(1) from error
    seconds = time.perf_counter() - began
    console.print(f"Took {seconds:.0f} s.")
    if as_json:
        typer.echo(
            json.dumps(
                {"study": name, "quick": quick, "seconds": round(seconds, 1), "parts": parts}
            )
        )


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
