"""A node, and its client's state, kept with the one before it, to go on from if an answer was not counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hierfl.core.disk import write_private
from hierfl.core.trees import Tree, nbytes
from hierfl.engine.federation import Federation
from hierfl.method import Method
from hierfl.nodes.approval import check_approved
from hierfl.nodes.messages import Refused, from_bytes, like, to_bytes
from hierfl.nodes.policy import FILE, Forbidden, Policy, policy_at
from hierfl.runs.run_folder import sync

if TYPE_CHECKING:
    from hierfl.nodes.row_sets import Rows


class Kept(NamedTuple):
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
    behind: Rows

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
        rows = self.federation.data.num_rows
        policy.check(self.method, rows)
        policy.check_client(self.federation.client, rows)
        if policy.approve == "ask":
            check_approved(self.folder, self.run)
        return policy


def kept(node: Node) -> Kept:
    """Return the client state that a node has kept, or the one before the first round."""
    own, path = node.federation.client.own, _file(node)
    if not path.exists():
        return Kept(-1, -1, own, own)
    try:
        found = from_bytes(path.read_bytes(), most=4 * nbytes(own))
        # its numbers may be anything, also infinite
        before, after = (like(found.tree[part], own, finite=False) for part in ("before", "after"))
        return Kept(int(found.about["round"]), int(found.about["base"]), before, after)
    except (Refused, KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"the client state '{path.name}' is damaged: restore it, or remove it to start again"
        ) from error


def state_after(node: Node, counted: int) -> Tree:
    """Return the client state after `counted`, the last round in which the client was counted."""
    found = kept(node)
    if found.round == counted or not nbytes(found.after):
        return found.after
    if found.base == counted:
        return found.before
    if counted < found.base:
        state = f"after round {counted}" if counted >= 0 else "before the first round"
        raise Refused(
            f"client '{node.client}' has been through round {found.round}, and cannot go back to "
            f"its state {state}: restart the server from its newest checkpoint; to begin again, "
            f"remove the node's {_file(node).name}"
        )
    raise Refused(
        f"client '{node.client}' has no state of round {counted}, in which the server counted it: "
        "restore the node's folder from its newest backup; or begin a run, if clients have left the "
        "fit or joined it and its server was started again"
    )


def keep(node: Node, state: Kept) -> None:
    """Write the client state, whole or not at all."""
    states = {"before": state.before, "after": state.after}
    content = to_bytes(states, {"round": state.round, "base": state.base})
    path = _file(node)
    draft = path.with_suffix(".draft")
    write_private(draft, content)
    draft.replace(path)
    sync(node.folder)


def forget(node: Node) -> None:
    """Remove the client state that a node has kept, so that its run begins again."""
    for path in (_file(node), _answer_file(node)):
        path.unlink(missing_ok=True)


def answer_again(node: Node, request: str) -> bytes | None:
    """Return the answer to a request that was the run's last one; None: it was not."""
    try:
        content = _answer_file(node).read_bytes()
    except FileNotFoundError:
        return None
    return content[64:] if content[:64] == request.encode() else None


def keep_answer(node: Node, request: str, content: bytes) -> None:
    """Keep the answer to the run's last request, whole or not at all."""
    draft = _answer_file(node).with_suffix(".answer-draft")
    write_private(draft, request.encode() + content)
    draft.replace(_answer_file(node))


def _answer_file(node: Node) -> Path:
    return node.folder / f"{node.run}.answer"


def _file(node: Node) -> Path:
    return node.folder / f"{node.run}.state"


def with_mail(own: Tree, mail: Tree) -> Tree:
    """Return a client state with what the server has for this client alone."""
    if isinstance(mail, Mapping) and not mail:
        return own
    if not isinstance(own, Mapping) or "mail" not in own:
        raise Refused("it holds mail, which the method does not send")
    return {**own, "mail": like(mail, own["mail"])}
