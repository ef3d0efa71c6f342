"""A node: one client's rows on a machine of their own, and the rounds of that client.

A node is asked for a round by a message, and answers with the client's update. The client state stays in the node's
folder, so that a node that was stopped goes on. A round that is asked for again is computed again from the state
before it, and gives the same answer: no state moves twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hierfl.core.disk import private_folder, write_private
from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.core.trees import Tree, nbytes, tree_map
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import FAILURES, client_round
from hierfl.engine.federation import Federation, federate
from hierfl.method import Method
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.messages import Refused, check_numbers, from_bytes, like, to_bytes
from hierfl.program.failures import why_it_fails
from hierfl.program.read import read
from hierfl.program.recipes import describe
from hierfl.runs.saved import start_of

MOST = 1 << 31  # bytes of a message to a node


class NodeFailed(RuntimeError):
    """A node cannot answer; the message names the client and the round."""


class Kept(NamedTuple):
    """The client state of a node.

    round: the last round that it has been through; -1: none.
    before: the state before that round.
    after: the state after it.
    """

    round: int
    before: Tree
    after: Tree


@dataclass(frozen=True, eq=False)
class Node:
    """One client's part of a run.

    Args:
        method: that is run, the same as the server's.
        federation: of the client alone, with what all agreed on.
        run: name of the run, the same at all nodes and at the server.
        folder: where the client state is kept.
    """

    method: Method
    federation: Federation
    run: str
    folder: Path

    @property
    def client(self) -> str:
        """The client's name."""
        return self.federation.data.names[0]


def run_name(method: Method, agreement: Agreement, seed: int) -> str:
    """Return the name of a run: the same method, seed and clients have the same."""
    whole = json.dumps([describe(method), agreement.digest, seed], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


@one_at_a_time
def node(
    method: Method, data: ClientData, agreement: Agreement, folder: str | Path, *, seed: int = 0
) -> Node:
    """Set up a node for a run.

    Args:
        method: that is run, the same as the server's.
        data: the rows of one client.
        agreement: what all nodes agreed on.
        folder: where the client state is kept; made if it does not exist. It is private: no one else should read it.
        seed: of the run.

    Raises:
        ValueError: the rows are not those that the node told of; or bad data.
        ProgramError: a model or guide that cannot be run as it is written.
    """
    told = Introduction.of(data)
    if (told.client, told.rows) not in zip(agreement.names, agreement.rows, strict=True):
        raise ValueError(
            f"client '{told.client}' with {told.rows} rows is not among those that agreed: introduce it first"
        )
    own = {name: data.fields[name] for name in agreement.form.fields}
    rows = replace(data, fields=own)
    program = agreement.agreed(read(method.model, method.guide, rows, seed=seed))
    federation = federate(method, rows, seed=seed, program=program)
    root = Path(folder)
    private_folder(root)
    return Node(method, federation, run_name(method, agreement, seed), root)


def introduced(node: Node) -> dict[str, Any]:
    """Return what a node tells of a run before its first round: its name, and a hash of what it starts from."""
    return {"run": node.run, "client": node.client, "start": start_of(node.federation)}


@one_at_a_time
def answer(node: Node, content: bytes) -> bytes:
    """Go through one round, keep the client state, and return the update.

    Args:
        node: that is asked.
        content: what the server sent.

    Raises:
        Refused: the content is no message of this run, or asks for a round that the node cannot go back to.
        NodeFailed: the client fails, or its update is not finite; the state stays as it was.
    """
    asked = from_bytes(content, most=MOST)
    if asked.about.get("run") != node.run:
        raise Refused(f"it is of run '{asked.about.get('run')}', and this node is in '{node.run}'")
    round_ = asked.about.get("round")
    if not isinstance(round_, int) or round_ < 0 or set(asked.tree) != {"message", "mail"}:
        raise Refused(f"it asks for round {round_!r}")
    check_numbers(asked.tree)
    before = _before(node, round_)
    own = _with_mail(before, asked.tree["mail"])
    up, after = _one_round(node, asked.tree["message"], own, round_)
    _keep(node, Kept(round_, before, after))
    return to_bytes(up, {"run": node.run, "client": node.client, "round": round_})


def _one_round(node: Node, message: Tree, own: Tree, round_: int) -> tuple[Tree, Tree]:
    """Return what the client sends, values times weights, with 1 in front; and its new state."""
    federation, only = node.federation, torch.zeros(1, dtype=torch.long)
    at_first = tree_map(lambda v: v[None], own)
    try:
        up, after = client_round(
            federation, federation.client.phases, message, at_first, only, round_
        )
        check_numbers(up)
    except FAILURES as error:
        batch = full_batch(federation.rows, only)
        why = str(error) if isinstance(error, Refused) else why_it_fails("round", error, batch)
        raise NodeFailed(f"round {round_}: client '{node.client}': {why}") from error
    return up, tree_map(lambda v: v[0], after)


def _with_mail(own: Tree, mail: Tree) -> Tree:
    """Return a client state with what the server has for this client alone."""
    return {**own, "mail": like(mail, own["mail"])} if isinstance(own, Mapping) and mail else own


# ------------------------------------------------------------------------------------------------ client state
def _file(node: Node) -> Path:
    return node.folder / f"{node.run}.state"


def kept(node: Node) -> Kept:
    """Return the client state that a node has kept, or the one before the first round.

    Raises:
        Refused: the file is damaged.
    """
    own, path = node.federation.client.own, _file(node)
    if not path.exists():
        return Kept(-1, own, own)
    try:
        found = from_bytes(path.read_bytes(), most=4 * nbytes(own))
        before, after = (_of_form(found.tree[part], own) for part in ("before", "after"))
        return Kept(int(found.about["round"]), before, after)
    except (Refused, KeyError, TypeError) as error:
        raise Refused(
            f"the client state '{path}' is damaged ({error}): restore it, or remove it to start anew"
        ) from error


def _of_form(tree: Tree, own: Tree) -> Tree:
    """Return a state with the structure of another; its numbers may be anything, also infinite."""
    return like(tree, own, finite=False)


def _before(node: Node, round_: int) -> Tree:
    """Return the client state before a round, which is the one after the last or, asked again, before it.

    Raises:
        Refused: the node has been through later rounds already.
    """
    found = kept(node)
    if round_ < found.round and nbytes(found.after):
        raise Refused(
            f"client '{node.client}' has been through round {found.round}, and cannot go back to round {round_}: "
            f"restart the server from its newest checkpoint"
        )
    return found.before if round_ == found.round else found.after


def _keep(node: Node, state: Kept) -> None:
    content = to_bytes({"before": state.before, "after": state.after}, {"round": state.round})
    path = _file(node)
    draft = path.with_suffix(".draft")
    write_private(draft, content)
    draft.replace(path)  # whole or not at all
