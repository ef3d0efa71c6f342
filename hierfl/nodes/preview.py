"""The preview of a run, which the owner of a node approves: what leaves, the model and the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import torch

from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, named_leaves, nbytes, tree_map
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import client_round, once_each
from hierfl.method import Clock
from hierfl.nodes.client_state import Node
from hierfl.program.outline import relations_of, site_lines, source_lines
from hierfl.program.recipes import describe

FEW = 5  # rows that one step is tried on
SEEN = {
    "sums": "sums over clients only; without secure aggregation it sees each client's update.",
    "summaries": "a summary of each single client, as in a meta-analysis.",
}


@one_at_a_time
def preview(node: Node) -> str:
    """Return the preview of a run."""
    method, program = node.method, node.federation.program
    data = node.federation.data
    rows = data.where(torch.arange(data.num_rows) < FEW)
    graph = relations_of(node.method.model, full_batch(rows, torch.tensor([0])))
    # one step on a few rows has the tensors of a whole round
    message, up = _first_round(node, rows)
    reads = sorted(program.reads.model | program.reads.guide)
    text = [
        f"Run {node.run}",
        f"Client '{node.client}' with {data.num_rows} rows, of {program.num_clients} clients.",
        f"Method {method.name}. The server has to see {SEEN[method.discloses]}",
        "",
        f"What this node sends in a round, {nbytes(up):,} bytes (the first; docs/crossing.md has "
        "others)",
        *_tensors(up),
        f"What the server sends, {nbytes(message):,} bytes",
        *_tensors(message),
        "",
        "The model",
        *(site_lines(graph) if graph else ["  cannot be run alone; its source is below"]),
        f"Fields of the rows that model and guide read: {', '.join(reads) or 'none'}",
        "",
        "Source of the model",
        *source_lines(method.model),
        "",
        "Settings",
        json.dumps(describe(method), indent=1, default=str),
    ]
    return "\n".join(text)


def _first_round(node: Node, rows: ClientData) -> tuple[Tree, Tree]:
    federation = replace(node.federation, data=rows)
    server = federation.server
    message = server.down(server.state, Clock(0, 1))
    own = tree_map(lambda v: v[None], federation.client.own)
    phases, only = once_each(federation.client.phases), torch.zeros(1, dtype=torch.long)
    up, _ = client_round(federation, phases, message, own, only, 0)
    return message, tree_map(lambda v: v[0], up)


def _tensors(tree: Tree) -> Iterator[str]:
    for name, value in named_leaves(tree).items():
        kind = str(value.dtype).removeprefix("torch.")
        yield f"  {name or 'a tensor'}  {kind} {tuple(value.shape)}, {value.nbytes:,} bytes"
