"""Entrywise operations on large tensors of a traced step: which nodes hold the same numbers, and new nodes."""

from typing import Any

import torch
from torch import Tensor, fx

from hierfl.engine.graph_rewrites import VIEWS, is_call

aten = torch.ops.aten
MANY = 1 << 16  # numbers, for which a pass over memory takes longer than starting a kernel
# where no number is added or lost, the order is kept
KEPT = (aten.expand.default, aten.select.int, aten.sum.dim_IntList, aten.detach.default)
ENTRYWISE: tuple[object, ...] = (aten.exp.default, aten.reciprocal.default, aten.neg.default)
ENTRYWISE += (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def is_large_entrywise(node: fx.Node) -> bool:
    """Return whether a node computes each number of a large tensor from one number of each argument."""
    if node.target not in ENTRYWISE or node.kwargs or node.meta["val"].numel() < MANY:
        return False
    return all(isinstance(arg, int | float) or _is_like(arg, node) for arg in node.args)


def _is_like(arg: Any, node: fx.Node) -> bool:
    """Return whether an argument has as many numbers as a node's value, of the same type."""
    own = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    value = node.meta["val"]
    return isinstance(own, Tensor) and (own.dtype, own.numel()) == (value.dtype, value.numel())


def same_numbers(node: fx.Node) -> fx.Node:
    """Return the node that has the same numbers in the same order, perhaps in another shape."""
    while is_call(node, *VIEWS, *KEPT) or _keeps_order(node):
        if not _is_like(node.args[0], node):
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def _keeps_order(node: fx.Node) -> bool:
    order: Any = node.args[1] if is_call(node, aten.permute.default) else None
    return order is not None and list(order) == sorted(order)


class Writer:
    """Writes nodes whose value is like one tensor, where the graph inserts."""

    def __init__(self, graph: fx.Graph, like: Tensor) -> None:
        self._graph, self._like = graph, like

    def made(self, op: Any, *args: Any) -> fx.Node:
        """Return a new call of an operation."""
        new = self._graph.call_function(op, args)
        new.meta["val"] = self._like
        return new

    def shaped(self, node: fx.Node) -> fx.Node:
        """Return a node's numbers in the shape of the values."""
        for same in (node, same_numbers(node)):
            if same.meta["val"].shape == self._like.shape:
                return same
        return self.made(aten.view.default, node, list(self._like.shape))


def squeeze(graph: fx.Graph) -> None:
    """Compute on tensors without dimensions of size 1: inductor fuses only loops of equal ranges."""
    for node in list(graph.nodes):
        if not isinstance(value := node.meta.get("val"), Tensor) or value.numel() < MANY:
            continue
        if is_call(node, aten.sum.dim_IntList) and _is_like(node.args[0], node):
            with graph.inserting_before(node):
                node.replace_all_uses_with(Writer(graph, value).shaped(node.args[0]))
        elif is_large_entrywise(node) and 1 in value.shape[1:]:
            small = Writer(graph, value.squeeze(tuple(range(1, value.dim()))))
            with graph.inserting_before(node):
                args = [small.shaped(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
                back = Writer(graph, value).shaped(small.made(node.target, *args))
            node.replace_all_uses_with(back)
            graph.erase_node(node)
