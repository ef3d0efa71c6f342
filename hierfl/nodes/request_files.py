"""Nodes that are reached by files in folders, and the node.toml of a node that answers them."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hierfl.core.arguments import imported, spelled
from hierfl.data.clients import ClientData
from hierfl.nodes.account import digest
from hierfl.nodes.asking import Answer
from hierfl.nodes.call import FitCall
from hierfl.nodes.envelope import answers, read_request
from hierfl.nodes.messages import Refused
from hierfl.nodes.reached import Reached, over
from hierfl.nodes.stations import Station

REQUEST, ANSWER = ".request.hfl", ".answer.hfl"
FILE = "node.toml"
KEYS = ("rows", "client", "model", "formula", "family", "clients", "missing")
HOW = (
    'write rows = "rows.csv" and formula = "y ~ x + (x | hospital)", family = "bernoulli", clients '
    '= "hospital"; or model = "MODULE:NAME" and rows, a CSV file or "MODULE:NAME"'
)


@spelled
def by_files(
    folder: str | Path,
    nodes: Iterable[str],
    *,
    fewest: int = 1,
    timeout: float = 86400.0,
    look: float = 0.5,
) -> Reached:
    """Return nodes that are asked by files, for `hierfl.nodes.fit`.

    A request to node "north" is the file FOLDER/north/0003-round-1f0c22aa.request.hfl, its answer
    the file 0003-round-1f0c22aa.answer.hfl beside it, which `hierfl node answer` writes. A fit that
    is started again with the same folder reads the answers that are there, and goes on.

    Args:
        folder: of the files of one fit; made if it does not exist. It holds no row, but what crosses
            in the rounds.
        nodes: names of the nodes.
        fewest: as in `over`.
        timeout: seconds to wait for the answers to one request.
        look: seconds between two looks into the folders.

    Raises:
        ValueError: as `over`; or `timeout` or `look` is not above 0.
    """
    for name, value in (("timeout", timeout), ("look", look)):
        if not value > 0.0:
            raise ValueError(f"{name} is {value}: it must be above 0 s")
    names = list(nodes)

    def ask(requests: Mapping[str, bytes]) -> Iterator[Answer]:
        waits = {name: _written(Path(folder) / name, one) for name, one in requests.items()}
        until = time.monotonic() + timeout
        while waits and time.monotonic() < until:
            for name, path in list(waits.items()):
                if (found := _answer(path, requests[name])) is not None:
                    del waits[name]
                    yield Answer(name, found)
            time.sleep(look if waits else 0.0)
        for name, path in waits.items():
            yield Answer(name, None, f"there is no answer '{path}' after {timeout:g} s")

    return over(ask, names, fewest=fewest)


def _written(folder: Path, request: bytes) -> Path:
    """Write a request, whole or not at all, unless it is there; return the file of its answer."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{read_request(request)[0]}-{digest(request)[:8]}"
    there = next(folder.glob(f"*-{name}{REQUEST}"), None)
    if there is None:
        there = folder / f"{len(list(folder.glob('*' + REQUEST))) + 1:04d}-{name}{REQUEST}"
        _write_whole(there, request)
    return _of(there)


def _of(request: Path) -> Path:
    """Return the file of the answer to a request."""
    return request.with_name(request.name.removesuffix(REQUEST) + ANSWER)


def answer_waiting(station: Station, folder: Path) -> Iterator[Path]:
    """Answer the requests in a node's folder that have no answer yet, in order; yield their files."""
    for path in sorted(folder.glob(f"*{REQUEST}")):
        request = path.read_bytes()
        if _answer(_of(path), request) is None:
            _write_whole(_of(path), station.answer(request))
            yield path


def _write_whole(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with open(draft, "xb") as file:  # never through a link that the other side has put there
        file.write(content)
    draft.replace(path)


def _answer(path: Path, request: bytes) -> bytes | None:
    """Return an answer; None: there is none yet, or not all of it, or it is to another request."""
    try:
        found = path.read_bytes()
        return found if answers(request, found) else None
    except (OSError, Refused):
        return None


# ------------------------------------------------------------ a node
def station_at(folder: Path) -> Station:
    """Return the station of a node whose folder has a `node.toml` (docs/nodes.md), which must be right (ValueError)."""
    path = folder / FILE
    try:
        said = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"'{path}' cannot be read ({error}): {HOW}") from error
    for key, value in said.items():
        if key not in KEYS or not isinstance(value, str):
            raise ValueError(f"'{path}' has {key} = {value!r}, which is no key or no text: {HOW}")
    if "rows" not in said or ("model" in said) == ("formula" in said):
        raise ValueError(f"'{path}' must have rows, and a model or a formula: {HOW}")
    model = _formula(said) if "formula" in said else imported(said["model"], folder)
    return Station(FitCall(model), lambda: _rows(said, folder), folder)


def _formula(said: dict[str, str]) -> Any:
    # here: pandas and formulae, which most models do not need
    from hierfl.formulas.formula import formula

    options: Any = {name: said[name] for name in ("family", "clients", "missing") if name in said}
    return formula(said["formula"], **options)


def _rows(said: dict[str, str], folder: Path) -> Any:
    """Return the rows of the file or name that `rows` is; of a `client`, where they do not name it."""
    if ":" in said["rows"]:
        found = imported(said["rows"], folder)
        rows = found() if callable(found) else found
    else:
        import pandas as pd

        rows = pd.read_csv(folder / said["rows"])
    return rows if isinstance(rows, ClientData) or "client" not in said else {said["client"]: rows}
