"""`hierfl node`: what the owner of a node does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    """Answer the messages of a SuperNode started with --isolation process, until it stops."""
    from hierfl.flower.serving import serve as served

    try:
        read = [None if file is None else file.read_bytes() for file in (root_certificates, secret)]
        served(supernode, root_certificates=read[0], secret=read[1])
    except OSError as error:
        raise typer.BadParameter(str(error)) from error
