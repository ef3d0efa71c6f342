"""What commands print of their progress and files, and how they end on an error."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 190  # columns of a table of many columns


def show_step(progress: "Console", line: str) -> None:
    """Print what is done now."""
    # as markup, words in brackets would be lost, such as those of hierfl[data]; so everywhere here
    progress.print(f"{line} ...", style="dim", markup=False)


def show_files(console: "Console", files: Mapping[Path, str]) -> None:
    """Print what was written: a line for each file."""
    for path, what in files.items():
        console.print(f"Wrote {path}: {what}.", markup=False, soft_wrap=True)


def show_wide(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table of many columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    # words of nine columns break to pieces in a narrow window; a long line can be scrolled
    Console(width=max(Console().width, WIDE), markup=False).print(table)


def stopped(message: str) -> typer.Exit:
    """Print what went wrong, and return what ends the command."""
    typer.secho(message, fg="red", err=True)
    return typer.Exit(1)


@contextmanager
def ending_on(
    *errors: type[Exception], argument: str | None = None, out: Path | None = None
) -> Iterator[None]:
    """End the command on an error by its message: as a wrong `argument`, or where `out` cannot be written."""
    try:
        yield
    except errors as error:
        message = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        if argument is None:
            raise stopped(message) from error
        raise typer.BadParameter(message, param_hint=argument) from error
    except OSError as error:
        if out is None:
            raise
        message = f"cannot write to '{out}': {error.strerror or error}"
        raise typer.BadParameter(message, param_hint="--out") from error
