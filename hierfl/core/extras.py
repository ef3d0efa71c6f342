"""What a missing extra of the package says: the command that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {  # module -> the extra of pyproject.toml that brings it
    "datasets": "data",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "flwr_datasets": "data",
    "great_tables": "tables",
    "httpx": "flower",  # flwr brings it
    "PIL": "data",
    "pydantic": "studies",
    "sklearn": "data",
}


class MissingExtra(ModuleNotFoundError):
    """A module of an extra is not installed; the message is the command that installs it."""


@contextmanager
def extras_for(purpose: str) -> Iterator[None]:
    """Turn the error of a missing extra into one that says which command installs it.

    Raises:
        MissingExtra: a module that an import in the block needs is of an extra and not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if isinstance(error, MissingExtra) or module not in EXTRAS:
            raise
        command = f'pip install "hierfl[{EXTRAS[module]}]"'
        raise MissingExtra(f"{purpose} needs {module}: {command}", name=error.name) from error
