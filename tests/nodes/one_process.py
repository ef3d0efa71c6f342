"""Nodes and a server in one process: messages are bytes, as between machines."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hierfl import ClientData, Method
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.client_state import Node
from hierfl.nodes.messages import Answer, NodeFailed, read_typed
from hierfl.nodes.node import answer, introduced, node
from tests.programs import federation


def rows(counts: Sequence[int] = (5, 3, 7, 2)) -> ClientData:
    """Return the clients of `federation()` in the order of their names, as nodes are."""
    data = federation(counts)
    return data.select(sorted(data.names))


@dataclass(frozen=True, eq=False)
class Machines:
    """Nodes by client, and everything that they have sent and been sent."""

    agreement: Agreement
    nodes: Mapping[str, Node]
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    asked: list[tuple[str, bytes]] = field(default_factory=list)

    def ask(self, contents: Mapping[str, bytes]) -> Iterable[Answer]:
        """Hand each message to its node."""
        for name, content in contents.items():
            self.asked.append((name, content))
            try:
                given = answer(self.nodes[name], content)
            except (ValueError, NodeFailed) as error:
                yield Answer(name, None, str(error))
                continue
            self.sent.append((name, given))
            yield Answer(name, given)

    def starts(self) -> dict[str, str]:
        return {name: introduced(each)["start"] for name, each in self.nodes.items()}


def lone(method: Method, part: ClientData, folder: Path, **options: Any) -> Node:
    """Start a node that has agreed with nobody else."""
    return node(method, part, Agreement.between([Introduction.of(part)]), folder, **options)


def machines(
    method: Method, data: ClientData, folder: Path, *, seed: int = 0, policy: str = ""
) -> Machines:
    """Start a node for each client, under a policy; what they tell of themselves has been through JSON."""
    parts = {name: data.select([name]) for name in data.names}
    told = [json.loads(json.dumps(asdict(Introduction.of(part)))) for part in parts.values()]
    agreement = Agreement.between([read_typed(Introduction, one, "introduction") for one in told])
    read = read_typed(Agreement, json.dumps(asdict(agreement)).encode(), "agreement")
    for k in range(len(parts) if policy else 0):
        (folder / str(k)).mkdir(parents=True)
        (folder / str(k) / "policy.toml").write_text(policy)
    nodes = {
        name: node(method, part, read, folder / str(k), seed=seed)
        for k, (name, part) in enumerate(parts.items())
    }
    return Machines(agreement, nodes)
