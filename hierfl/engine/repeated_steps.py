"""Graphs of repeated steps: what only the last step has to compute."""

from typing import Any

import torch
from torch import fx

from hierfl.engine.graph_rewrites import MUTATING, behind_of

aten = torch.ops.aten
MANY = 1 << 16  # numbers, for which a pass over memory takes longer than starting a kernel


def cut_end(graph: fx.GraphModule, given: int) -> fx.GraphModule | None:
    """Cut out sums of many numbers that only the last step needs, such as the value of a KL.

    Return their graph, with the same inputs. In `graph` the sums are now inputs, behind all others;
    before the last step anything may be given for them. Where a product is added in place, as in
    MAP's step, nothing is cut: the sum then costs less than the end.
    """
    nodes = graph.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"][:given]
    [end] = [node for node in nodes if node.op == "output"]
    outputs: Any = end.args[0] if isinstance(end.args[0], list | tuple) else [end.args[0]]
    if any(node.target in MUTATING for node in nodes):
        return None
    _read_shapes_alone(graph)
    pairs = list(zip(inputs, outputs, strict=False))
    if len(outputs) != given or not all(_are_alike(old, new) for old, new in pairs):
        return None  # the next step may have another graph, which reads other inputs
    needed = behind_of([new for old, new in pairs if old.users or new is old])
    sums = [node for node in nodes if _sums_many(node) and node not in needed]
    return _end_of(graph, sums) if sums else None


def _end_of(graph: fx.GraphModule, sums: list[fx.Node]) -> fx.GraphModule:
    """Move sums to a graph of their own."""
    own, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    own.graph_copy(graph.graph, copies)
    own.output([copies[node] for node in sums])
    own.eliminate_dead_code()
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for place, node in reversed(list(enumerate(sums))):
        with graph.graph.inserting_after(last):
            placeholder = graph.graph.placeholder(f"sum_{place}")
        placeholder.meta = dict(node.meta)
        node.replace_all_uses_with(placeholder)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return fx.GraphModule(graph, own)


def _are_alike(old: fx.Node, new: fx.Node) -> bool:
    a, b = old.meta["val"], new.meta.get("val")
    return b is not None and (a.shape, a.dtype) == (b.shape, b.dtype)


def _read_shapes_alone(graph: fx.GraphModule) -> None:
    """Replace ones and zeros like a value, of which only the shape is read."""
    for node in list(graph.graph.nodes):
        for like, value in ((aten.ones_like.default, 1.0), (aten.zeros_like.default, 0.0)):
            if node.target is like:
                made = node.meta["val"]
                with graph.graph.inserting_before(node):
                    full = graph.graph.call_function(
                        aten.full.default,
                        (list(made.shape), value),
                        {"dtype": made.dtype, "device": made.device},
                    )
                full.meta = dict(node.meta)
                node.replace_all_uses_with(full)
    graph.graph.eliminate_dead_code()


def _sums_many(node: fx.Node) -> bool:
    if node.target not in (aten.sum.dim_IntList, aten.sum.default):
        return False
    [summed] = node.all_input_nodes
    return bool(summed.meta["val"].numel() >= MANY)
