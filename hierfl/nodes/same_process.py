"""Nodes in this process: a run over nodes tried out before there are machines, with the same messages and policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from hierfl.core.arguments import spelled
from hierfl.data.clients import ClientData
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.asking import Answer
from hierfl.nodes.call import FitCall
from hierfl.nodes.choosing import decided
from hierfl.nodes.client_state import Node, NodeFailed, forget
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.node import answer, introduce, introduced, node
from hierfl.nodes.run import fit_nodes
from hierfl.runs.run_folder import checkpoints

if TYPE_CHECKING:
    import pandas as pd


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
            Forbidden: a node's policy does not allow the run.
        """
        call, parts = self._read(call)
        agreement = Agreement.between([Introduction.of(part) for part in parts.values()])
        method, rounds, why, read = decided(call, agreement)
        each: dict[str, Node] = {}
        # no server goes on from a checkpoint: what an earlier fit has left at the nodes is not of
        # this run
        begins = not (call.resume and call.checkpoint and checkpoints(call.checkpoint))
        for name, part in parts.items():
            introduce(method, part, self.folders[name])
            each[name] = node(method, part, agreement, self.folders[name], seed=call.seed)
            if begins:
                forget(each[name])
        starts = {name: str(introduced(one)["start"]) for name, one in each.items()}

        def ask(contents: Mapping[str, bytes]) -> Iterator[Answer]:
            for name, content in contents.items():
                try:
                    yield Answer(name, answer(each[name], content))
                except (ValueError, NodeFailed) as error:
                    yield Answer(name, None, str(error))

        return fit_nodes(
            method,
            agreement,
            ask,
            rounds=rounds,
            seed=call.seed,
            cohort=call.cohort,
            fewest=self.fewest,
            starts=starts,
            checkpoint=call.checkpoint,
            resume=call.resume,
            chosen=why,
            read=read,
        )

    def _read(self, call: FitCall) -> tuple[FitCall, dict[str, ClientData]]:
        """Return the call and each client's rows, once nodes have agreed on the schema of a formula without one."""
        rows = {name: part for name, part in self.parts.items() if isinstance(part, ClientData)}
        if rows:
            return call, rows
        # here: pandas and formulae, which most models do not need
        from hierfl.formulas.formula import Formula
        from hierfl.nodes.agreed_schema import agreed_over, answer_schema

        asked, frames = call.method, {name: {name: part} for name, part in self.parts.items()}
        if not isinstance(asked, Formula):
            raise TypeError("the nodes have frames: fit a hierfl.formula, or give them ClientData")

        def send(content: bytes) -> list[bytes]:
            return [
                answer_schema(asked, frames[name], self.folders[name], content) for name in frames
            ]

        formula = agreed_over(asked, send) if call.lacks_schema else asked
        return replace(call, method=formula), {n: formula.data(frames[n]) for n in frames}


@spelled
def in_process(
    data: ClientData | Mapping[str, pd.DataFrame], folder: str | Path, *, fewest: int = 1
) -> InProcess:
    """Return a node for each client, all in this process, for `hierfl.nodes.fit`.

    Args:
        data: the rows of all clients, each node has those of its own; or for a `hierfl.formula`
            client -> its frame.
        folder: each node has a private folder in it, named after its client, where it keeps the
            client state, its log and its answers, and reads `policy.toml`.
        fewest: clients that a round needs.

    Raises:
        ValueError: `fewest` is below 1, or above the number of clients.
    """
    parts: dict[str, ClientData | pd.DataFrame]
    if isinstance(data, ClientData):
        parts = {name: data.select([name]) for name in data.names}
    else:
        parts = dict(sorted(data.items()))
    if not 1 <= fewest <= len(parts):
        raise ValueError(f"fewest is {fewest}: it must be 1 to {len(parts)}")
    folders = {name: Path(folder) / _folder(name) for name in parts}
    return InProcess(parts, folders, fewest)


def _folder(client: str) -> str:
    """Return the name of a client's folder, in which there is no separator of paths and which is no `..`."""
    name = quote(client, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name
