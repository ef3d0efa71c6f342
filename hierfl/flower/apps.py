"""A run as a Flower ServerApp and ClientApp, for its simulation and for SuperNodes.

    query.introduce   a node tells of its client: name, number of rows, form of the rows
    query.agree       the node gets what all agreed on, and tells what it starts from
    train             one round: the method's message, and the client's update

Payloads are those of `hierfl.nodes.messages`: bytes in a ConfigRecord. Client states stay in the node's folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hierfl.data.clients import ClientData
from hierfl.method import Method
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.asking import Answer
from hierfl.nodes.choosing import rounds_of
from hierfl.nodes.fit import FitOverNodes
from hierfl.nodes.messages import Refused
from hierfl.nodes.run import TooFewNodes, fit_nodes
from hierfl.nodes.together import Summed
from hierfl.program.recipes import describe
from hierfl.program.sites import Model
from hierfl.runs.choice import Disclose

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from hierfl.flower.at_node import PAYLOAD, RECORD, Clients, Which, payload_of
    from hierfl.flower.secure import sum_of
except ImportError as error:
    raise ImportError(
        "hierfl.flower needs flwr: install it with pip install 'hierfl[flower]'"
    ) from error

ONCE_MORE = 1.0  # seconds between two looks for nodes


@dataclass(frozen=True)
class Apps:
    """The two apps of a run.

    Args:
        server: runs where no rows are.
        client: runs at each node.
    """

    server: ServerApp
    client: ClientApp


def apps(
    method: Method | Model,
    data_for_node: Callable[[Context], ClientData],
    *,
    done: Callable[[FitOverNodes], object],
    nodes: int,
    rounds: int | None = None,
    seed: int = 0,
    cohort: int | float | None = None,
    fewest: int = 1,
    timeout: float = 600.0,
    folder_for_node: Callable[[Context], str | Path] | None = None,
    policy_for_node: Callable[[Context], str | Path | None] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    disclose: Disclose = "summaries",
    secure: bool = False,
) -> Apps:
    """Return the apps of one run.

    Args:
        method: that is run; both apps are made by the same code. Or a model: then the method is chosen as `hierfl.fit`
            chooses, from what the nodes agree on; the fit says which (`FitOverNodes.chosen`). A chosen method that does
            not stop by itself runs for 200 rounds unless `rounds` says otherwise; whether that is enough is not judged.
        data_for_node: a node's context -> the rows of its one client.
        done: called with the fit at the server, at the end.
        nodes: how many nodes the run waits for before its first round.
        rounds: as in `hierfl.fit`.
        seed: of everything random.
        cohort: clients a round, as in `hierfl.fit`.
        fewest: clients that a round needs.
        timeout: seconds that the server waits for nodes, and for their answers in a round.
        folder_for_node: a node's context -> the private folder of its client state. Default None: the folder that
            the node's configuration names as `folder`.
        policy_for_node: a node's context -> the file of its owner's policy (`hierfl.nodes.policy`). Default None: the
            file that the node's configuration names as `policy`, else `policy.toml` in its folder.
        checkpoint: the server's folder for a checkpoint after each round.
        resume: continue from the newest checkpoint there.
        disclose: what the server may see, as in `hierfl.fit`.
        secure: rounds by Flower's secure aggregation, SecAgg+: the server learns the sum of the updates alone, of
            three clients or more. It takes four messages a node and round, and single updates cannot be checked.

    Returns:
        The apps.

    Raises:
        ValueError: `disclose` or `secure` does not go with what the method shows the server.
    """
    if secure and isinstance(method, Method) and method.discloses == "summaries":
        raise ValueError(
            f"secure is True, and method '{method.name}' needs a summary of each client by itself: take a method that "
            f"discloses sums, or secure=False"
        )
    disclose = "sums" if secure else disclose
    folder, policy = folder_for_node or _folder_of, policy_for_node or _policy_of
    which = Which(method, disclose, cohort, seed)
    clients = Clients(which, data_for_node, folder, policy, secure)
    server = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        found = _Nodes(grid, timeout)
        told = found.introductions(nodes)
        agreement = Agreement.between(list(told.values()))
        ids = {one.client: number for number, one in told.items()}

        def summed(contents: Mapping[str, bytes], size: int) -> Summed:
            return sum_of(grid, context, contents, ids, size, timeout)

        runs, why = which.of(agreement)
        starts = found.agree(agreement, ids, None if why is None else describe(runs))
        fitted = fit_nodes(
            runs,
            agreement,
            lambda contents: found.ask(contents, ids),
            rounds=rounds if why is None else rounds_of(runs, rounds),
            seed=seed,
            cohort=cohort,
            fewest=fewest,
            starts=starts,
            checkpoint=checkpoint,
            resume=resume,
            chosen=why,
            ask_sum=summed if secure else None,
        )
        done(fitted)

    server.main()(main)
    return Apps(server, clients.app())


def _policy_of(context: Context) -> str | None:
    policy = context.node_config.get("policy")
    return None if policy is None else str(policy)


def _folder_of(context: Context) -> str:
    folder = context.node_config.get("folder")
    if not isinstance(folder, str):
        raise ValueError(
            "the node's configuration names no folder for its client state: start it with "
            "--node-config 'folder=\"...\"', or hand in folder_for_node"
        )
    return folder


# ------------------------------------------------------------------------------------------------ at the server
@dataclass(frozen=True, eq=False)
class _Nodes:
    """The nodes, as the server reaches them."""

    grid: Grid
    timeout: float

    def introductions(self, count: int) -> dict[int, Introduction]:
        """Return what each node tells of its client, once there are as many nodes.

        Raises:
            TooFewNodes: there are fewer within the timeout.
        """
        until = time.monotonic() + self.timeout
        while len(ids := list(self.grid.get_node_ids())) < count:
            if time.monotonic() > until:
                raise TooFewNodes(
                    f"{len(ids)} nodes are connected after {self.timeout:g} s, and {count} are needed: start the others"
                )
            time.sleep(ONCE_MORE)
        told: dict[int, Introduction] = {}
        for number, content in self._sent("query.introduce", dict.fromkeys(ids, b"")):
            if isinstance(content, Refused):
                raise TooFewNodes(f"node {number} cannot tell of its client: {content}")
            told[number] = Introduction.from_json(json.loads(content))
        if len(told) < count:
            raise TooFewNodes(
                f"{len(told)} of {len(ids)} nodes told of their clients, and {count} are needed"
            )
        return told

    def agree(self, agreement: Agreement, ids: Mapping[str, int], recipe: Any) -> dict[str, str]:
        """Tell the nodes what all agreed on, and which method was chosen; return what each client starts from.

        Raises:
            TooFewNodes: a node cannot take part.
        """
        content = json.dumps({"agreement": agreement.as_json(), "method": recipe}).encode()
        names = {number: name for name, number in ids.items()}
        starts = {}
        for number, found in self._sent("query.agree", dict.fromkeys(names, content)):
            if isinstance(found, Refused):
                raise TooFewNodes(f"client '{names[number]}' cannot take part: {found}")
            starts[names[number]] = str(json.loads(found)["start"])
        if missing := sorted(ids.keys() - starts.keys()):
            raise TooFewNodes(f"client '{missing[0]}' did not answer within {self.timeout:g} s")
        return starts

    def ask(self, contents: Mapping[str, bytes], ids: Mapping[str, int]) -> Iterator[Answer]:
        """Ask clients for a round."""
        names = {number: name for name, number in ids.items()}
        there = set(self.grid.get_node_ids())
        for name in sorted(name for name in contents if ids[name] not in there):
            yield Answer(name, None, "its node is not connected")
        asked = {ids[name]: content for name, content in contents.items() if ids[name] in there}
        for number, found in self._sent("train", asked):
            if number in names and isinstance(found, Refused):
                yield Answer(names[number], None, str(found))
            elif number in names and not isinstance(found, Refused):
                yield Answer(names[number], found)

    def _sent(
        self, kind: str, contents: Mapping[int, bytes]
    ) -> Iterable[tuple[int, bytes | Refused]]:
        """Send payloads to nodes, and yield what comes back in time."""
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord({PAYLOAD: content})}),
                dst_node_id=number,
                message_type=kind,
                ttl=2.0 * self.timeout,
            )
            for number, content in contents.items()
        ]
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            try:
                yield reply.metadata.src_node_id, payload_of(reply)
            except Refused as error:
                yield reply.metadata.src_node_id, error
