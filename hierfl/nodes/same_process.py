"""Nodes in this process: a run over nodes tried out before there are machines, with the same messages and policies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from hierfl.core.arguments import spelled
from hierfl.data.clients import ClientData
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.client_state import forget
from hierfl.nodes.messages import Answer, NodeFailed
from hierfl.nodes.policy import FILE, looks_like_a_policy
from hierfl.nodes.reached import Reached, check_fewest
from hierfl.nodes.stations import Station, said
from hierfl.runs.run_folder import checkpoints

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class InProcess:
    """A node for each client, all in this process: client -> its rows, and its node's private folder."""

    parts: Mapping[str, ClientData | pd.DataFrame]
    folders: Mapping[str, Path]
    fewest: int

    def ask_about_rows(self, formula: Any, *question: Any) -> Any:
        """Ask the nodes about their rows; `hierfl.describe` and `hierfl.kaplan_meier` call it."""
        return self.reached(FitCall(formula)).ask_about_rows(formula, *question)

    def reached(self, call: FitCall) -> Reached:
        """Return the nodes of a call, as any transport reaches them."""
        frames = not isinstance(next(iter(self.parts.values())), ClientData)
        if frames and not hasattr(call.method, "has_schema"):
            raise TypeError("the nodes have frames: fit a hierfl.formula, or give them ClientData")
        rows: Any = {name: {name: of} if frames else of for name, of in self.parts.items()}
        stations = {n: Station(call, partial(rows.get, n), self.folders[n]) for n in rows}
        # no server resumes here: what an earlier fit has left at the nodes is not of this run
        begins = not (call.resume and call.checkpoint and checkpoints(call.checkpoint))

        def send(kind: str, contents: Mapping[Any, bytes]) -> Iterator[Answer]:
            errors: dict[str, Exception] = {}
            for name, content in contents.items():
                try:
                    answer = stations[name].reply(kind, content)
                except (ValueError, NodeFailed) as error:
                    errors[name] = error
                    continue
                if kind == "agree" and begins:
                    forget(stations[name].ready[self.folders[name]])
                yield Answer(name, answer)
            if kind != "round" and len(errors) == len(contents):
                raise next(iter(errors.values()))
            yield from (Answer(name, None, said(error, None)) for name, error in errors.items())

        return Reached(send, tuple(stations), self.fewest, send_recipe=False)


@spelled
def in_process(
    data: ClientData | Mapping[str, pd.DataFrame], folder: str | Path, *, fewest: int = 1
) -> InProcess:
    """Return a node for each client, all in this process, for `hierfl.nodes.fit`.

    Args:
        data: the rows of all clients, each node has those of its own; or for a `hierfl.formula`
            client -> its frame.
        folder: each node has a private folder in it, named after its client (signs that file
            systems forbid as %2F, letters composed or not), where it keeps the client state, its
            log and its answers, and reads `policy.toml`.
        fewest: as in `hierfl.nodes.over`.

    Raises:
        ValueError: `fewest` is below 1, or above the number of clients; or a policy lies where no node
            reads it.
    """
    parts: dict[str, Any] = (
        {name: data.select([name]) for name in data.names}
        if isinstance(data, ClientData)
        else dict(sorted(data.items()))
    )
    check_fewest(fewest, len(parts))
    folders = {name: folder_of(Path(folder), name) for name in parts}
    _check_policies_are_read(Path(folder), [path.name for path in folders.values()])
    return InProcess(parts, folders, fewest)


def folder_of(home: Path, client: str) -> Path:
    """Return a client's folder: of its name, whose letters are composed (NFC) or as they are there."""
    name = _FORBIDDEN.sub(lambda c: f"%{ord(c[0]):02X}", normalize("NFC", client))
    there = home.iterdir() if home.is_dir() else ()
    return next((path for path in there if normalize("NFC", path.name) == name), home / name)


def _check_policies_are_read(home: Path, clients: list[str]) -> None:
    """Refuse a policy that no node reads: beside the clients' folders, or in one of nearly a client's name."""
    names = {name.casefold().strip(): name for name in clients}
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        near = names.get(normalize("NFKC", path.name).casefold().strip(), "")
        unread = looks_like_a_policy(path.name, False) or (near and (path / FILE).exists())
        if unread and path.name not in clients:
            own = home / (near or "CLIENT") / FILE
            raise ValueError(f"no node reads the policy '{path}': a node reads '{own}' alone")


_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|%]|^\.|[. ]$')  # in names of files, of any system
