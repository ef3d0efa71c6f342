"""Nodes in this process: a run over nodes tried out before there are machines, with the same messages and policies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unicodedata import normalize

from hierfl.core.arguments import spelled
from hierfl.data.clients import ClientData
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.asking import Answer
from hierfl.nodes.call import FitCall
from hierfl.nodes.choosing import Decided
from hierfl.nodes.client_state import Node, NodeFailed, forget
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.gathering import check_enough, fit_introduced
from hierfl.nodes.messages import Refused, read_json
from hierfl.nodes.node import answer, introduce, introduced, node
from hierfl.nodes.policy import FILE, looks_like_a_policy
from hierfl.runs.run_folder import checkpoints

if TYPE_CHECKING:
    import pandas as pd

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class InProcess:
    """A node for each client, all in this process.

    Args:
        parts: client -> its rows.
        folders: client -> the private folder of its node.
        fewest: clients that a round needs.
    """

    parts: Mapping[str, ClientData | pd.DataFrame]
    folders: Mapping[str, Path]
    fewest: int

    def fit_over(self, call: FitCall) -> FitOverNodes:
        """Fit over the nodes; `hierfl.nodes.fit` calls it.

        Raises:
            Forbidden: no node's policy allows the run.
            TooFewNodes: fewer than `fewest` can take part.
        """
        call, parts = self._read(call)
        each: dict[str, Node] = {}
        failed: dict[str, str] = {}
        # no server resumes here: what an earlier fit has left at the nodes is not of this run
        begins = not (call.resume and call.checkpoint and checkpoints(call.checkpoint))

        def introduction(name: str) -> Introduction:
            content = introduce(call.named, parts[name], self.folders[name])
            return Introduction.from_json(read_json(content))

        def agree(agreement: Agreement, run: Decided, ids: Mapping[str, str]) -> Any:
            def start(name: str) -> str:
                method, folder = run.method, self.folders[name]
                each[name] = node(method, parts[name], agreement, folder, seed=call.seed)
                if begins:
                    forget(each[name])
                return str(introduced(each[name])["start"])

            failed.clear()
            starts, refused = _each(start, ids)
            failed.update(refused)
            return starts, refused

        def ask(contents: Mapping[str, bytes]) -> Iterator[Answer]:
            for name, content in contents.items():
                try:
                    if name in failed:
                        raise Refused(failed[name])
                    yield Answer(name, answer(each[name], content))
                except (ValueError, NodeFailed) as error:
                    yield Answer(name, None, str(error))

        found, refused = _each(introduction, parts)
        check_enough(found, refused, self.fewest, "introduce a client")
        return fit_introduced(call, found, self.fewest, agree, lambda ids: ask)

    def _read(self, call: FitCall) -> tuple[FitCall, dict[str, ClientData]]:
        """Return the call and each client's rows, once nodes have agreed on the schema of a formula without one."""
        rows = {name: part for name, part in self.parts.items() if isinstance(part, ClientData)}
        if rows:
            return call, rows
        # here: pandas and formulae, which most models do not need
        from hierfl.formulas.formula import Formula
        from hierfl.nodes.agreed_schema import agreed_over, answer_schema

        if not isinstance(call.method, Formula):
            raise TypeError("the nodes have frames: fit a hierfl.formula, or give them ClientData")
        formula, frames = call.method, {name: {name: part} for name, part in self.parts.items()}

        def send(content: bytes) -> dict[str, bytes]:
            def answered(name: str) -> bytes:
                return answer_schema(formula, frames[name], self.folders[name], content)

            found, refused = _each(answered, frames)
            check_enough(found, refused, self.fewest, "answer questions about the schema")
            for name in refused:
                del frames[name]
            return found

        left_out: dict[str, str] = {}
        if call.lacks_schema:
            formula, left_out = agreed_over(formula, send)
        frames = {name: frame for name, frame in frames.items() if name not in left_out}
        check_enough(frames, left_out, self.fewest, "agree on a schema")
        return replace(call, method=formula), {n: formula.data(one) for n, one in frames.items()}


def _each(
    work: Callable[[str], Found], names: Iterable[str]
) -> tuple[dict[str, Found], dict[str, str]]:
    """Return what the nodes of some clients give, and why others do not; an error of all is raised."""
    found: dict[str, Found] = {}
    errors: dict[str, Exception] = {}
    for name in names:
        try:
            found[name] = work(name)
        except (ValueError, NodeFailed) as error:
            errors[name] = error
    if errors and not found:
        raise next(iter(errors.values()))
    return found, {name: str(error) for name, error in errors.items()}


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
        fewest: clients that a run and each of its rounds need; nodes that fail are left out, with a
            warning, while so many remain.

    Raises:
        ValueError: `fewest` is below 1, or above the number of clients; or a policy lies where no node
            reads it.
    """
    parts: dict[str, ClientData | pd.DataFrame]
    if isinstance(data, ClientData):
        parts = {name: data.select([name]) for name in data.names}
    else:
        parts = dict(sorted(data.items()))
    if not 1 <= fewest <= len(parts):
        raise ValueError(f"fewest is {fewest}: it must be 1 to {len(parts)}")
    folders = {name: _folder(Path(folder), name) for name in parts}
    _check_policies_are_read(Path(folder), [path.name for path in folders.values()])
    return InProcess(parts, folders, fewest)


def _folder(home: Path, client: str) -> Path:
    """Return a client's folder: of its name, whose letters are composed (NFC) or as they are there."""
    name = _FORBIDDEN.sub(lambda c: f"%{ord(c[0]):02X}", normalize("NFC", client))
    there = home.iterdir() if home.is_dir() else ()
    return next((path for path in there if normalize("NFC", path.name) == name), home / name)


def _check_policies_are_read(home: Path, clients: list[str]) -> None:
    """Refuse a policy that no node reads: beside the clients' folders, or in one of nearly a client's name."""
    known = {_plain(name): name for name in clients}
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        near = known.get(_plain(path.name), "")
        unread = looks_like_a_policy(path.name, False) or (near and (path / FILE).exists())
        if unread and path.name not in clients:
            whose = near or "its client"
            raise ValueError(
                f"no node reads the policy '{path}': a node reads '{home / whose / FILE}' alone"
            )


def _plain(name: str) -> str:
    return normalize("NFKC", name).casefold().strip()


_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|%]|^\.|[. ]$')  # in names of files, of any system
