"""The owner's approval of what leaves a node, of a text in the node's folder; and the preview of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hierfl.core.disk import private_folder, write_private
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, named_leaves, nbytes, tree_map
from hierfl.data.batch import full_batch
from hierfl.engine.chunks import client_round, once_each
from hierfl.method import Clock
from hierfl.nodes.account import digest
from hierfl.nodes.policy import Forbidden
from hierfl.program.outline import relations_of, site_lines, source_lines
from hierfl.program.recipes import describe

PREVIEWS, APPROVED = "previews", "approved"
SEEN = {
    "sums": "sums over clients only; without secure aggregation it sees each client's update.",
    "summaries": "a summary of each single client, as in a meta-analysis.",
}
FEW = 5  # rows that one step of a preview is tried on
LONGEST = 1 << 18  # characters of a preview
MOST = 100  # previews that are kept; the oldest that were not approved go first


def preview_of(folder: Path, run: str) -> Path:
    """Return the file of a run's preview."""
    return folder / PREVIEWS / f"{run}.txt"


def write_preview(folder: Path, run: str, text: str) -> None:
    """Write the preview of a run into a node's folder; refuse one that nobody reads (`Forbidden`)."""
    if len(text) > LONGEST:
        raise Forbidden(f"what its owner would have to read has more than {LONGEST:,} characters")
    private_folder(folder / PREVIEWS)
    write_private(preview_of(folder, run), f"{text}\n".encode())
    texts = sorted((folder / PREVIEWS).glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)
    waiting = [path for path in texts if not (folder / APPROVED / path.stem).exists()]
    for path in waiting[:-MOST]:
        path.unlink()


def approve(folder: Path, run: str) -> Path:
    """Approve a run, whose preview the owner has read; return the file of the preview."""
    path = preview_of(folder, run)
    if "/" in run or not path.exists():
        runs = ", ".join(sorted(text.stem for text in path.parent.glob("*.txt")))
        waiting = f"it has those of {runs}" if runs else "no run has asked for approval yet"
        raise FileNotFoundError(f"'{folder}' has no preview of run '{run}': {waiting}")
    private_folder(folder / APPROVED)
    write_private(folder / APPROVED / run, digest(path.read_bytes()).encode())
    return path


def check_approved(folder: Path, run: str) -> None:
    """Refuse what the owner has not approved as its preview stands (`Forbidden`)."""
    path, approved = preview_of(folder, run), folder / APPROVED / run
    if path.exists() and approved.exists() and approved.read_text() == digest(path.read_bytes()):
        return
    raise Forbidden(
        f"run '{run}' waits for the approval of the node's owner, who reads "
        f"{PREVIEWS}/{run}.txt in the node's folder, and then runs hierfl node approve FOLDER {run}"
    )


def asked_first(folder: Path, what: str, text: str) -> None:
    """Refuse what leaves before a run, unless the owner has approved its text (`Forbidden`)."""
    name = f"{what}-{digest(text.encode())[:16]}"
    if not preview_of(folder, name).exists():
        write_preview(folder, name, text)
    check_approved(folder, name)


@one_at_a_time
def preview(node: Any) -> str:
    """Return the preview of the run of a `Node`."""
    method, program = node.method, node.federation.program
    data, only = node.federation.data, torch.zeros(1, dtype=torch.long)
    rows = data.where(torch.arange(data.num_rows) < FEW)
    graph = relations_of(node.method.model, full_batch(rows, only))
    # one step on a few rows has the tensors of a whole round
    federation = replace(node.federation, data=rows)
    server, client = federation.server, federation.client
    message = server.down(server.state, Clock(0, 1))
    own = tree_map(lambda v: v[None], client.own)
    up, _ = client_round(federation, once_each(client.phases), message, own, only, 0)
    up = tree_map(lambda v: v[0], up)
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


def _tensors(tree: Tree) -> Iterator[str]:
    for name, value in named_leaves(tree).items():
        kind = str(value.dtype).removeprefix("torch.")
        yield f"  {name or 'a tensor'}  {kind} {tuple(value.shape)}, {value.nbytes:,} bytes"
