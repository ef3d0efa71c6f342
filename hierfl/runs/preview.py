"""The preview of a run: what one client would send, in words, for the owner of its rows."""

import json
from collections.abc import Iterator
from dataclasses import replace

import torch

from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, named_leaves, nbytes, tree_map
from hierfl.data.batch import full_batch
from hierfl.engine.chunks import client_round, once_each
from hierfl.engine.federation import Federation
from hierfl.method import Clock, Method
from hierfl.program.outline import relations_of, site_lines, source_lines
from hierfl.program.recipes import describe

SEEN = {
    "sums": "sums over clients only; without secure aggregation it sees each client's update.",
    "summaries": "a summary of each single client, as in a meta-analysis.",
}
FEW = 5  # rows that one step of a preview is tried on


@one_at_a_time
def preview(run: str, method: Method, federation: Federation) -> str:
    """Return what a client, of whose rows alone a federation is, would send in a run, and by which model."""
    program, data = federation.program, federation.data
    only = torch.zeros(1, dtype=torch.long)
    rows = data.where(torch.arange(data.num_rows) < FEW)
    graph = relations_of(method.model, full_batch(rows, only))
    # one step on a few rows has the tensors of a whole round
    federation = replace(federation, data=rows)
    server, client = federation.server, federation.client
    message = server.down(server.state, Clock(0, 1))
    own = tree_map(lambda v: v[None], client.own)
    up, _ = client_round(federation, once_each(client.phases), message, own, only, 0)
    up = tree_map(lambda v: v[0], up)
    reads = sorted(program.reads.model | program.reads.guide)
    text = [
        f"Run {run}",
        f"Client '{data.names[0]}' with {data.num_rows} rows, of {program.num_clients} clients.",
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


def _tensors(tree: Tree) -> Iterator[str]:
    for name, value in named_leaves(tree).items():
        kind = str(value.dtype).removeprefix("torch.")
        yield f"  {name or 'a tensor'}  {kind} {tuple(value.shape)}, {value.nbytes:,} bytes"
