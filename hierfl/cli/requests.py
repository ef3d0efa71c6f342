"""`hierfl show`, `node answer` and `node report`: requests in files, and what a node's log says of all."""

import re
import sys
import time
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from hierfl.cli.messages import ending_on, show_files, stopped
from hierfl.cli.projects import NodeFolder

REQUEST = ".request."  # in the name of a file
LOOK = 0.5  # seconds between two looks for requests
MOST = 1 << 29  # bytes of a file that is read by hand


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A request or an answer.")],
) -> None:
    """Print what a request asks, or what an answer reveals. Nothing in it is executed."""
    from hierfl.cli.shown_requests import show as shown
    from hierfl.nodes.account import digest
    from hierfl.nodes.messages import Refused

    content = _content(file, "FILE")
    try:
        typer.echo(shown(content))
    except Refused as error:
        raise stopped(f"'{file}' is neither a request nor an answer: {error}") from error
    if REQUEST in file.name:
        only = f"--only {digest(content)}"
        typer.echo(
            f"Answer this and nothing else: hierfl node answer {quote(str(file))} --folder DIR {only}"
        )


def _content(file: Path, hint: str) -> bytes:
    """Return the bytes of a file: of none that has gigabytes, or waits for what writes into it."""
    from hierfl.nodes.messages import Refused
    from hierfl.nodes.request_files import read

    try:
        return read(file, MOST)
    except Refused as error:
        raise typer.BadParameter(f"'{file}': {error}", param_hint=hint) from error


def answer(
    request: Annotated[
        Path,
        typer.Argument(
            metavar="REQUEST", help="A request; or a folder, to answer all requests in it."
        ),
    ],
    folder: Annotated[
        Path,
        typer.Option("--folder", metavar="DIR", help="The node's folder, with node.toml and rows."),
    ] = Path(),
    wait: Annotated[
        bool, typer.Option("--wait", help="Keep answering a folder's requests until stopped.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="SHA256", help="Answer this request alone; `hierfl show` prints its SHA-256."
        ),
    ] = None,
) -> None:
    """Answer a request to standard output, or a folder's requests into files beside them."""
    import torch

    from hierfl.cli.node_folder import station_at
    from hierfl.nodes.account import digest
    from hierfl.nodes.request_files import answer_waiting

    if only is not None and re.fullmatch("[0-9a-f]{64}", only) is None:
        raise typer.BadParameter(f"'{only}' is not a SHA-256 in hex digits", param_hint="--only")
    torch.set_default_dtype(torch.float64)  # unless the owner's model says otherwise
    content = b"" if request.is_dir() else _content(request, "REQUEST")
    with ending_on(ValueError, TypeError):
        station = station_at(folder)
    if not request.is_dir():
        if sys.stdout.isatty():
            raise stopped("an answer is not for the screen: hierfl node answer REQUEST > ANSWER")
        if only and digest(content) != only:
            raise stopped(
                f"'{request}' has the SHA-256 {digest(content)}, not {only}: look at it again"
            )
        answered = station.answer(content)
        sys.stdout.buffer.write(answered)
        return _tell(request, answered)
    answers = 0
    while True:
        with ending_on(ValueError):  # of the policy
            for path, answered in answer_waiting(station, request, only=only):
                _tell(path, answered)
                answers += 1
        if only and not answers and not wait:
            raise stopped(f"no request in '{request}' that waits has the SHA-256 {only}")
        if not wait:
            return
        time.sleep(LOOK)


def _tell(request: Path, answer: bytes) -> None:
    """Tell the owner whether a request was answered, or why it was refused."""
    from hierfl.nodes.envelope import read_line

    wrong = read_line(answer)[0].get("wrong")
    typer.echo(f"Refused {request}: {wrong!r}." if wrong else f"Answered {request}.", err=True)


def report(
    folder: NodeFolder,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path(
        "node-report.html"
    ),
    policy: Annotated[
        Path | None, typer.Option(help="The node's policy. Default: policy.toml in the folder.")
    ] = None,
) -> None:
    """Write a page for a data protection officer: what was asked, what left, under which policy."""
    from rich.console import Console

    from hierfl.cli.officer_page import write_page

    with ending_on(ValueError):
        write_page(folder, out, policy)
    show_files(Console(), {out: "what left the node, for its data protection officer"})


def reset_account(
    folder: NodeFolder,
    questions: Annotated[
        bool,
        typer.Option(
            "--questions", help="Forget only answers to questions about rows; keep budgets."
        ),
    ] = False,
) -> None:
    """Forget what a node has answered and spent, if its account is lost or does not add up."""
    from hierfl.nodes import account

    if questions:
        with ending_on(account.BrokenLedger):
            account.answer_questions_again(folder)
        typer.echo("The node answers questions about its rows again.")
        return
    aside = account.begin_again(folder)
    typer.echo(
        "The account begins again." + (f" The earlier lines are in {aside}." if aside else "")
    )
