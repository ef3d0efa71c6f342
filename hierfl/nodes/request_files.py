"""Nodes that are reached by files in folders."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from hierfl.core.arguments import expect, spelled
from hierfl.nodes.account import digest
from hierfl.nodes.envelope import LONGEST, MOST, read_head, read_line, read_request
from hierfl.nodes.messages import Answer, Refused
from hierfl.nodes.reached import Reached, over
from hierfl.nodes.same_process import folder_of
from hierfl.nodes.stations import Station, said

REQUEST, ANSWER = ".request.hfl", ".answer.hfl"
MOST_ANSWERED = 1 << 29  # bytes of an answer


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
    expect(timeout=(timeout, "(0, inf)"), look=(look, "(0, inf)"))
    home = Path(folder)

    def ask(requests: Mapping[str, bytes]) -> Iterator[Answer]:
        waits: dict[str, Path] = {}
        for name, request in requests.items():
            try:
                waits[name] = _written(folder_of(home, name), request)
            except OSError as error:  # the node's side may put anything into its folder
                yield Answer(name, None, f"no request can be written for it ({error.strerror})")
        until = time.monotonic() + timeout
        while waits:
            late = time.monotonic() >= until
            for name, path in list(waits.items()):
                try:
                    answer = Answer(name, read(path, MOST_ANSWERED, requests[name]))
                except Refused as error:
                    if not late:
                        continue
                    why = f"'{path}' is not an answer after {timeout:g} s: {error}"
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
            if read(there, len(request)) == request:
                with suppress(Refused):
                    answer = read(_of(there), MOST_ANSWERED, request)
                    if kind != "round" and read_line(answer)[0].get("wrong"):
                        _of(there).unlink()
                return _of(there)
    there = folder / f"{len(list(folder.glob('*' + REQUEST))) + 1:04d}-{name}{REQUEST}"
    _write_whole(there, lambda: request)
    return _of(there)


def _of(request: Path) -> Path:
    """Return the file of the answer to a request."""
    return request.with_name(request.name.removesuffix(REQUEST) + ANSWER)


def answer_waiting(
    station: Station, folder: Path, *, only: str | None = None
) -> Iterator[tuple[Path, bytes]]:
    """Answer the requests in a node's folder that have no answer yet, in order; yield their files, and the answers.

    A request whose answer cannot be written, since the other side has put something else in its
    place, is passed over: those after it are answered. `only`: the request with this SHA-256.
    """
    for path in sorted(folder.glob(f"*{REQUEST}")):
        most = station.allowed.bytes_a_request  # or there is no policy: the owner is told
        try:
            request = read(path, most)
        except Refused:  # a link to a file of the node would tell the hash of that file
            continue
        if only not in (None, digest(request)) or _of(path).is_dir():
            continue
        with suppress(Refused):
            read(_of(path), MOST_ANSWERED, request)
            continue
        try:
            answer = _write_whole(_of(path), partial(station.answer, request))
        except OSError as error:
            said(Refused(f"'{path.name}' has no place for an answer ({error})"), station.folder)
            continue
        yield path, answer


def _write_whole(path: Path, make: Callable[[], bytes]) -> bytes:
    """Write what is made, whole or not at all, by a draft whose name the other side cannot guess."""
    draft = path.with_suffix(f".{secrets.token_hex(8)}.draft")
    try:
        with open(draft, "xb") as file:  # never through a link that the other side has put there
            file.write(content := make())
        draft.replace(path)
        return content
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path, most: int = MOST, request: bytes | None = None) -> bytes:
    """Return the bytes of a file; what the other side has put there in place of one is Refused.

    Of an answer to a `request`, what has another first line or length is not read.
    """
    if not path.name.isprintable():  # it may move a terminal's cursor
        raise Refused("its name cannot be printed")
    try:
        # neither through a link, nor waiting for what writes into a pipe
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Refused(f"it cannot be read ({error.strerror})") from error
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_size > most:
        os.close(handle)
        raise Refused(f"it is not a file of {most:,} bytes or fewer")
    with open(handle, "rb") as file:
        line = file.readline(LONGEST)
        if request and read_head(line, about.st_size - len(line)).get("answer") != digest(request):
            raise Refused("it answers another request: put the answer to it beside it there")
        content = line + file.read(about.st_size - len(line) + 1)
    if len(content) > about.st_size:
        raise Refused("it grows while it is read")
    return content
