"""The preview of a run, which the owner of a node approves: what leaves, the model and the settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.inspect import get_model_relations

from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, named_leaves, nbytes, tree_map
from hierfl.data.batch import CLIENTS, ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import FAILURES, client_round, once_each
from hierfl.method import Clock
from hierfl.nodes.client_state import Node
from hierfl.program.recipes import describe
from hierfl.program.traces import Site

FEW = 5  # rows that one step is tried on
WRAPPERS = (dist.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)
SHOWN = 8  # numbers of an argument that are written out
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
    graph = _relations(node.method.model, full_batch(rows, torch.tensor([0])))
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
        *(_sites(graph) if graph else ["  cannot be run alone; its source is below"]),
        f"Fields of the rows that model and guide read: {', '.join(reads) or 'none'}",
        "",
        "Source of the model",
        *_source(method.model),
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


# ------------------------------------------------------------ the model
def _relations(model: Any, batch: ClientBatch) -> dict[str, Any] | None:
    """Return the model's sites and what each depends on, and a trace; None where it cannot run alone."""
    try:
        with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
            found: dict[str, Any] = get_model_relations(model, (batch,))
            return {**found, "trace": poutine.trace(model).get_trace(batch)}
    except (*FAILURES, NotImplementedError, AttributeError, TypeError):
        return None


def _sites(graph: Mapping[str, Any]) -> Iterator[str]:
    plates, trace = graph["plate_sample"], graph["trace"]
    local = set(plates.get(CLIENTS, ()))
    for name, above in graph["sample_sample"].items():
        site = trace.nodes[name]
        what = ["observed"] if name in graph["observed"] else []
        what += ["of each client" if name in local else "global"]
        what += [
            f"plate {plate}" for plate, of in plates.items() if name in of and plate != CLIENTS
        ]
        what += [f"given {', '.join(above)}"] if above else []
        kind = graph["sample_dist"][name]
        shown = kind if above or name in local else _written(kind, site)
        yield f"  {name} ~ {shown}  ({'; '.join(what)}; shape {tuple(site['value'].shape)})"


def _written(kind: str, site: Site) -> str:
    """Return a distribution with its short arguments."""
    fn = site["fn"]
    while isinstance(fn, WRAPPERS):
        fn = fn.base_dist
    given = []
    for name in getattr(fn, "arg_constraints", {}):
        # a distribution that holds logits may compute probabilities, which are not written again
        value = vars(fn).get(name, getattr(fn, name) if hasattr(fn, "transforms") else None)
        if isinstance(value, torch.Tensor):
            values = value.unique() if value.numel() > 1 else value.flatten()
            some = ", ".join(f"{float(v):.6g}" for v in values[:SHOWN])
            given.append(f"{name} {some if len(values) <= SHOWN else f'{some}, ...'}")
    return f"{kind}({', '.join(given)})" if given else kind


def _source(model: Any) -> list[str]:
    try:
        return inspect.getsource(model).rstrip().splitlines()
    except (OSError, TypeError):
        return [f"  not in a file: {type(model).__name__}; see the settings"]
