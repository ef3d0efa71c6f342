"""Nodes that are reached by files in folders, and the node.toml of a node that answers them."""

from __future__ import annotations

import os
import secrets
import stat
import time
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hierfl.core.arguments import imported, spelled
from hierfl.data.clients import ClientData
from hierfl.nodes import log
from hierfl.nodes.account import digest
from hierfl.nodes.asking import Answer
from hierfl.nodes.call import FitCall
from hierfl.nodes.envelope import MOST, answers, read_line, read_request
from hierfl.nodes.messages import Refused
from hierfl.nodes.reached import Reached, over
from hierfl.nodes.same_process import folder_of
from hierfl.nodes.stations import Station

REQUEST, ANSWER = ".request.hfl", ".answer.hfl"
ANOTHER = "it answers another request"
HINT = "answers another request: put the answer to the request beside it there"
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

    A request to node "north" is the file FOLDER/north/0003-round-1f0c22aa.request.hfl. Its answer is
    the file 0003-round-1f0c22aa.answer.hfl beside it, which `hierfl node answer` writes. A fit that
    is started again with the same folder reads the answers that are there and goes on. What a node
    refused before the rounds, such as a run that its owner had not approved, is asked again.

    Args:
        folder: of the files of one fit; made if it does not exist. It holds what crosses in the
            rounds, and no row.
        nodes: names of the nodes. Each has a subfolder, named as by `in_process`.
        fewest: as in `over`.
        timeout: seconds to wait for the answers to one request. Default: a day.
        look: seconds between two looks into the folders.

    Raises:
        ValueError: as `over`; or `timeout` or `look` is not above 0.
    """
    for name, value in (("timeout", timeout), ("look", look)):
        if not value > 0.0:
            raise ValueError(f"{name} is {value}: it must be above 0 s")
    home = Path(folder)

    def ask(requests: Mapping[str, bytes]) -> Iterator[Answer]:
        waits: dict[str, Path] = {}
        for name, request in requests.items():
            try:
                waits[name] = _written(folder_of(home, name), request)
            except OSError as error:  # the node's side may put anything into its folder
                yield Answer(name, None, f"no request can be written for it ({error.strerror})")
        until, warned = time.monotonic() + timeout, set[Path]()
        while waits:
            late = time.monotonic() >= until
            for name, path in list(waits.items()):
                try:
                    answer = Answer(name, _answer(path, requests[name]))
                except Refused as error:
                    if str(error) == ANOTHER and path not in warned:
                        warned.add(path)
                        warnings.warn(f"'{path}' {HINT}", stacklevel=2)
                    if not late:
                        continue
                    why = f"'{path}' is no answer after {timeout:g} s: {error}"
                    answer = Answer(name, None, why)
                del waits[name]
                yield answer
            time.sleep(look if waits else 0.0)

    def forget(name: str) -> None:
        for path in folder_of(home, name).glob("*.answer.*"):  # drafts too
            with suppress(OSError):  # a folder that the node's side has put there
                path.unlink()

    return replace(over(ask, nodes, fewest=fewest), forget=forget, send_end=False)


def _written(folder: Path, request: bytes) -> Path:
    """Write a request, whole or not at all, unless it is there; return the file of its answer."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = read_request(request)[0]
    name = f"{kind}-{digest(request)[:8]}"
    for there in folder.glob(f"*-{name}{REQUEST}"):
        with suppress(Refused):
            if read(there) == request:
                if kind != "round" and (_said(_of(there), request) or {}).get("wrong"):
                    _of(there).unlink()
                return _of(there)
    there = folder / f"{len(list(folder.glob('*' + REQUEST))) + 1:04d}-{name}{REQUEST}"
    _write_whole(there, request)
    return _of(there)


def _of(request: Path) -> Path:
    """Return the file of the answer to a request."""
    return request.with_name(request.name.removesuffix(REQUEST) + ANSWER)


def answer_waiting(
    station: Station, folder: Path, *, only: str = ""
) -> Iterator[tuple[Path, bytes]]:
    """Answer the requests in a node's folder that have no answer yet, in order; yield their files, and the answers.

    A request whose answer cannot be written, since the other side has put something else in its
    place, is passed over: those after it are answered. `only`: the request with this SHA-256.
    """
    for path in sorted(folder.glob(f"*{REQUEST}")):
        try:
            request = read(path, station.allowed.bytes_a_request)
        except Refused:  # a link to a file of the node would tell the hash of that file
            continue
        other = bool(only) and digest(request) != only
        if other or _of(path).is_dir() or _said(_of(path), request):
            continue
        answer = station.answer(request)
        try:
            _write_whole(_of(path), answer)
        except OSError as error:
            log.refused(station.folder, None, f"'{path.name}' has no place for an answer", error)
            continue
        yield path, answer


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, by a draft whose name the other side cannot guess."""
    draft = path.with_suffix(f".{secrets.token_hex(8)}.draft")
    try:
        with open(draft, "xb") as file:  # never through a link that the other side has put there
            file.write(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path, most: int = MOST) -> bytes:
    """Return the bytes of a file; what the other side has put there in place of one is Refused."""
    try:
        # neither through a link, nor waiting for what writes into a pipe
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Refused(f"it cannot be read ({error.strerror})") from error
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_size > most:
        os.close(handle)
        raise Refused(f"it is no file of {most:,} bytes or fewer")
    with open(handle, "rb") as file:
        return file.read()


def _answer(path: Path, request: bytes) -> bytes:
    """Return the answer in a file; none, a part of one, and one to another request are Refused."""
    found = read(path)
    if not answers(request, found):
        raise Refused(ANOTHER)
    return found


def _said(path: Path, request: bytes) -> dict[str, Any] | None:
    """Return what a file says of itself that holds the answer to a request; None: it holds none."""
    try:
        return read_line(_answer(path, request))[0]
    except Refused:
        return None


# ------------------------------------------------------------ a node
def station_at(folder: Path) -> Station:
    """Return the station of a node whose folder has a valid `node.toml` (docs/nodes_files.md), or raise ValueError."""
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
    # here: pandas, which most models do not need
    from hierfl.formulas.declare import formula

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
