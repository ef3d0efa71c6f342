"""`hierfl methods`, `audit`, `new`, `data get` and `node`: what owners of nodes do."""

from pathlib import Path
from typing import Annotated

import typer

from hierfl.cli.messages import ending_on, show_files, show_wide
from hierfl.core.extras import extras_for


def _of_a_node(folder: Path) -> Path:
    """Refuse a folder that no node uses: it may be a misspelled one."""
    from hierfl.cli import node_folder
    from hierfl.nodes import account, log, policy

    files = (node_folder.FILE, policy.FILE, policy.SEEN, log.FILE, log.REFUSED, account.FILE)
    if not any((folder / name).exists() for name in (*files, *log.MARKS)):
        raise typer.BadParameter(
            f"'{folder}' is not a node's folder, as it has no {log.FILE}, {policy.FILE} or other "
            "file of a node: name the folder that the node was started with"
        )
    return folder


NodeFolder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="The node's folder.",
        exists=True,
        file_okay=False,
        callback=_of_a_node,
    ),
]


def methods() -> None:
    """List all methods: what clients share, and what each one keeps, sends and discloses."""
    from hierfl.methods.about import HEADINGS, About, described

    rows = [
        (name, *(getattr(about, field) for field in HEADINGS))
        for name, about in described(About).items()
    ]
    show_wide(("method", *HEADINGS.values()), rows)


def audit(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="A name that `hierfl methods` lists, for a logistic regression of the demo's "
            "patients on four features; or your own method, MODULE:NAME.",
        ),
    ] = "two_stage",
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="Your own ClientData, MODULE:NAME. Default: heart disease at four hospitals.",
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="The client whose messages are listed. Default: the one with the fewest rows."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Most rounds. Default: until the method is done, but at most 3."),
    ] = None,
) -> None:
    """List every tensor between server and client, and whether it depends on the client's rows."""
    import torch

    from hierfl.demo.audited import audited
    from hierfl.diagnostics.audit import COLUMNS

    if ":" not in method:
        torch.set_default_dtype(torch.float64)  # as in the demo
    with ending_on(KeyError, ValueError, TypeError, argument="METHOD, DATA or --client"):
        result = audited(method, data, client=client, rounds=rounds)
    show_wide(COLUMNS, result.table[COLUMNS].itertuples(index=False))
    typer.echo(result.reading)


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the project, its folder and its package.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes that a run waits for.")] = 4,
) -> None:
    """Write a Flower project: a model, a node's rows, and apps for simulation and SuperNodes."""
    from rich.console import Console

    from hierfl.flower.project import write_project

    with ending_on(ValueError, OSError, argument="NAME"):
        files = write_project(name, Path(), nodes=nodes)
    console = Console()
    show_files(console, files)
    run = f"flwr run . --stream --federation-config 'num-supernodes={nodes}'"
    line = f"Simulate it: cd {name}, pip install 'flwr[simulation]', {run}"
    console.print(line, markup=False, soft_wrap=True)


def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist or fashion_mnist.")],
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Folder to save it in. Default: HIERFL_DATA."),
    ] = None,
) -> None:
    """Download a data set from the Hugging Face Hub, check it, and save it for `hierfl.datasets`."""
    from hierfl.datasets.download import get

    with ending_on(ValueError, ConnectionError, out=folder or Path()):
        get(name, folder, typer.echo)


def approve(
    folder: NodeFolder,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, from the refusal.")],
) -> None:
    """Approve a run whose preview you have read; the node then takes part in it."""
    from hierfl.nodes import approval

    with ending_on(OSError, argument="RUN"):
        preview = approval.approve(folder, run)
    typer.echo(f"Approved run {run}, as described in {preview}.")


def log(
    folder: NodeFolder,
) -> None:
    """List what has left a node: time, run, round, what, bytes."""
    from rich.console import Console
    from rich.table import Table

    from hierfl.cli.officer_page import entries

    if not (lines := entries(folder)):
        return typer.echo("Nothing has left the node.")
    names = ("time", "run", "round", "what", "bytes")
    table = Table(*names, box=None, pad_edge=False)
    for entry in lines:
        table.add_row(*("" if entry.get(n) is None else str(entry[n]) for n in names))
    Console(markup=False).print(table)


def serve(
    supernode: Annotated[
        str, typer.Option(help="Host and port of the SuperNode's Runtime API.")
    ] = "127.0.0.1:9094",
    root_certificates: Annotated[
        Path | None, typer.Option(help="Root certificate of the API, PEM. Default: no TLS.")
    ] = None,
    secret: Annotated[
        Path | None, typer.Option(help="The SuperNode's --superexec-auth-secret-file.")
    ] = None,
) -> None:
    """Answer the messages of a SuperNode started with --isolation process, until it stops."""
    with extras_for("hierfl node serve"):
        from hierfl.flower.serving import serve as served

    with ending_on(OSError, argument="--supernode or a file"):
        read = [None if file is None else file.read_bytes() for file in (root_certificates, secret)]
        served(supernode, root_certificates=read[0], secret=read[1])
