"""`hierfl show`, `node answer` and `node report`: requests in files, and what a node's log says of all."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from hierfl.cli.messages import show_files, stopped

LOOK = 0.5  # seconds between two looks for requests


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A request or an answer.")],
) -> None:
    """Print what a request asks, or what an answer tells; no code of it is run."""
    from hierfl.nodes.envelope import show as shown
    from hierfl.nodes.messages import Refused

    try:
        typer.echo(shown(file.read_bytes()))
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from error
    except Refused as error:
        raise stopped(f"'{file}' is no request and no answer: {error}") from error


def answer(
    request: Annotated[
        Path,
        typer.Argument(metavar="REQUEST", help="A file; or a folder, for all that wait there."),
    ],
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="The node's, with node.toml and rows.")
    ] = Path(),
    wait: Annotated[
        bool, typer.Option("--wait", help="Of a folder: answer what comes, until stopped.")
    ] = False,
) -> None:
    """Answer a request, into standard output; those of a folder, into files beside them."""
    import torch

    from hierfl.nodes.request_files import answer_waiting, station_at

    torch.set_default_dtype(torch.float64)  # unless the owner's model says otherwise
    if not request.exists():
        raise typer.BadParameter(f"there is no '{request}'", param_hint="REQUEST")
    try:
        station = station_at(folder)
    except (ValueError, TypeError) as error:
        raise stopped(str(error)) from error
    if request.is_dir():
        while True:
            for path in answer_waiting(station, request):
                typer.echo(f"Answered {path}.", err=True)
            if not wait:
                return
            time.sleep(LOOK)
    elif sys.stdout.isatty():
        raise stopped("an answer is not for the screen: hierfl node answer REQUEST > ANSWER")
    else:
        sys.stdout.buffer.write(station.answer(request.read_bytes()))


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The node's folder.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path(
        "node-report.html"
    ),
    policy: Annotated[Path | None, typer.Option(help="Default: policy.toml of the folder.")] = None,
) -> None:
    """Write a page for a data protection officer: what was asked, what left, by which policy."""
    from rich.console import Console

    from hierfl.nodes.officer_page import write_page

    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder '{folder}'", param_hint="FOLDER")
    try:
        write_page(folder, out, policy)
    except ValueError as error:
        raise stopped(str(error)) from error
    show_files(Console(), {out: "what left the node, for its data protection officer"})
