"""Graphs of repeated steps: what only the last step has to compute, and states updated in place."""

import copy

import torch
from torch import fx

from hierfl.engine.graph_rewrites import MUTATING, VIEWS, behind_of, origin_of, reaches

aten = torch.ops.aten
MANY = 1 << 16  # numbers, for which a pass over memory takes longer than starting a kernel


def cut_end(graph: fx.GraphModule, given: int) -> fx.GraphModule | None:
    """Cut out sums of many numbers that only the last step needs, such as the value of a KL.

    Return their graph, with the same inputs. In `graph` the sums are now inputs, behind all others;
    before the last step anything may be given for them. Where a product is added in place, as in
    MAP's step, nothing is cut: the sum then costs less than the end.
    """
    inputs, outputs, _ = _ends(graph, given)
    nodes = graph.graph.nodes
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


def in_place(graph: fx.GraphModule, given: int) -> fx.GraphModule | None:
    """Return a graph that writes large results over the inputs they replace, in fewer passes over memory."""
    graph = copy.deepcopy(graph)
    inputs, outputs, end = _ends(graph, given)
    nodes = graph.graph.nodes
    origins = [origin_of(new) for new in outputs]
    taken = {origin_of(node.args[0]) for node in nodes if node.target in MUTATING}
    taken |= {node for node in nodes if node.op == "placeholder"}
    for place, (old, new) in enumerate(zip(inputs, outputs, strict=False)):
        large = _are_alike(old, new) and old.meta["val"].numel() >= MANY
        # what the step itself reads again, inductor would write twice
        read_once = reaches(origins[place], VIEWS) == {end}
        if large and read_once and origins[place] not in taken and old not in origins:
            with graph.graph.inserting_before(end):
                graph.graph.call_function(aten.copy_.default, (old, new))
            outputs[place] = old
    if outputs == list(end.args[0]):  # type: ignore[arg-type]
        return None
    end.args = (outputs,)
    graph.recompile()
    return graph


def _ends(graph: fx.GraphModule, given: int) -> tuple[list[fx.Node], list[fx.Node], fx.Node]:
    """Return the first `given` inputs, the results, and the node that returns them."""
    [end] = [node for node in graph.graph.nodes if node.op == "output"]
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"][:given]
    results = end.args[0]
    return inputs, list(results) if isinstance(results, list | tuple) else [results], end


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
