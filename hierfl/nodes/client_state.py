"""A node, and its client's state, kept with the one before it, to go on from if an answer was not counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyro
import torch

from hierfl.core.disk import replace_private
from hierfl.core.trees import Tree, nbytes, tree_map
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.engine.federation import Federation
from hierfl.method import Client, Clock, Method
from hierfl.nodes.approval import check_approved
from hierfl.nodes.messages import Refused, from_bytes, like, to_bytes
from hierfl.nodes.policy import FILE, Forbidden, Policy, policy_at
from hierfl.runs.run_folder import sync

if TYPE_CHECKING:
    from hierfl.nodes.row_sets import RowCodes


class ClientStates(NamedTuple):
    """The states after `round`, the last one, and `before` it, after `base`, the last counted one; -1: none."""

    round: int
    base: int
    before: Tree
    after: Tree


@dataclass(frozen=True, eq=False)
class Node:
    """One client's part of a run: what is run, on which rows, their codes, and the folder of the client state."""

    method: Method
    federation: Federation
    run: str
    folder: Path
    policy: Path
    behind: RowCodes

    @cached_property
    def batch(self) -> ClientBatch:
        """The client's rows."""
        return full_batch(self.federation.rows, torch.zeros(1, dtype=torch.long))

    @cached_property
    def rests_on_at_first(self) -> float:
        """How many rows an update rests on under the server's first message; infinite where that is not known."""
        server, client = self.federation.server, self.federation.client
        own = tree_map(lambda v: v[None], client.own)
        return rests_on(self, server.down(server.state, Clock(0, 1)), own)

    @property
    def client(self) -> str:
        """The client's name."""
        return self.federation.data.names[0]

    @property
    def about(self) -> Mapping[str, Any]:
        """What the log says of each answer."""
        return {"rows": self.federation.data.num_rows, "method": self.method.name}

    def allowed(self) -> Policy:
        """Return the policy as it is now: the owner may have changed it during the run."""
        try:
            named = None if self.policy == self.folder / FILE else self.policy
            policy = policy_at(named, self.folder, own=self.method)
        except ValueError as error:
            raise Forbidden("the node's policy cannot be read: its owner must fix it") from error
        policy.check(self.method, self.federation.data.num_rows)
        policy.check_client(self.federation.client, self.federation.data)
        if policy.approve == "ask":
            check_approved(self.folder, self.run)
        return policy


def rests_on(node: Node, message: Tree, own: Tree) -> float:
    """Return how many rows an update under a message rests on; infinite where that is not known."""
    if (rows_behind := node.federation.client.rests_on) is None:
        return math.inf
    with pyro.validation_enabled(False):  # of scales, which vmap cannot read
        return float(rows_behind(message, own, node.batch))


def kept(node: Node) -> ClientStates:
    """Return the client state that a node has kept, or the one before the first round."""
    own, path = node.federation.client.own, _file(node)
    if not path.exists():
        return ClientStates(-1, -1, own, own)
    try:
        tree, about = from_bytes(path.read_bytes(), most=4 * nbytes(own))
        # its numbers may be anything, also infinite
        before, after = (like(tree[name], own, finite=False) for name in ("before", "after"))
        return ClientStates(int(about["round"]), int(about["base"]), before, after)
    except (Refused, KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"the client state '{path.name}' is damaged: restore it, or remove it to start again"
        ) from error


def state_after(node: Node, counted: int) -> Tree:
    """Return the client state after `counted`, the last round in which the client was counted."""
    state = kept(node)
    if state.round == counted or not nbytes(state.after):
        return state.after
    if state.base == counted:
        return state.before
    if counted < state.base:
        why = (
            f"has been through round {state.round}, and cannot go back to its state after round "
            f"{counted}: restart the server from its newest checkpoint; to begin again, remove the "
            f"node's {_file(node).name}"
        )
    else:
        why = (
            f"has no state of round {counted}, in which the server counted it: restore the node's "
            "folder from its newest backup; or begin a run, if clients have left the fit or joined it "
            "and its server was started again"
        )
    raise Refused(f"client '{node.client}' {why}")


def keep(node: Node, state: ClientStates) -> None:
    """Write the client state, whole or not at all."""
    states = {"before": state.before, "after": state.after}
    content = to_bytes(states, {"round": state.round, "base": state.base})
    replace_private(_file(node), content)
    sync(node.folder)


def forget(node: Node) -> None:
    """Remove the client state that a node has kept, so that its run begins again."""
    for ending in ("state", "answer"):
        _file(node, ending).unlink(missing_ok=True)


def answer_again(node: Node, request: str) -> bytes | None:
    """Return the answer to a request that was the run's last one; None: it was not."""
    try:
        content = _file(node, "answer").read_bytes()
    except FileNotFoundError:
        return None
    return content[64:] if content[:64] == request.encode() else None


def keep_answer(node: Node, request: str, content: bytes) -> None:
    """Keep the answer to the run's last request, whole or not at all."""
    replace_private(_file(node, "answer"), request.encode() + content)


def _file(node: Node, ending: str = "state") -> Path:
    return node.folder / f"{node.run}.{ending}"


def with_mail(client: Client, own: Tree, mail: Tree) -> Tree:
    """Return a client state with what the server has for this client alone."""
    if isinstance(mail, Mapping) and not mail:
        return own
    if not client.mail:
        raise Refused("it holds mail, which the method does not send")
    return client.with_mail(own, like(mail, client.mail_in(own)))
