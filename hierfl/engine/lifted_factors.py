"""Constant factors of a traced step as inputs of its graph, so that steps that differ in them share a compiled graph.

A step size is such a factor. Inductor keeps compiled graphs on disk, by everything in them: with step sizes in it, each
of a grid of step sizes would be compiled anew, which takes up to a minute.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from hierfl.engine.graph_rewrites import add_product, add_scaled

aten = torch.ops.aten
STRUCTURAL = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)  # of derivatives and densities, not of options


def lift_factors(graph: fx.GraphModule) -> list[Tensor]:
    """Make inputs of the constant factors of a graph, and return their values, in the order of the new inputs.

    The factors are those of products of a floating-point tensor and a number, and numbers that a graph turns into
    tensors. A factor of a product becomes a tensor without dimensions of the product's type, which the number was
    rounded to anyway: results are the same, bit for bit.

    Args:
        graph: of a step, after `graph_rewrites.rewrite`. It is changed.
    """
    inputs: dict[tuple[float, torch.dtype], fx.Node] = {}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1:]
    values: list[Tensor] = []

    def lifted(value: float, dtype: torch.dtype) -> fx.Node:
        if (value, dtype) not in inputs:
            tensor = torch.tensor(value, dtype=dtype)
            place = graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before()
            with place:
                node = graph.graph.placeholder(f"factor_{len(values)}")
            node.meta["val"] = tensor
            inputs[value, dtype] = node
            last[:] = [node]
            values.append(tensor)
        return inputs[value, dtype]

    for node in list(graph.graph.nodes):
        at = _place(node)
        if at is not None:
            args = list(node.args)
            args[at] = lifted(args[at], _dtype(node))
            node.args = tuple(args)
            if node.target is add_product:
                node.target = add_scaled
    graph.recompile()
    return values


def _place(node: fx.Node) -> int | None:
    """Return which argument of a node is a factor to lift; None: there is none."""
    if node.op != "call_function":
        return None
    if node.target is add_product:
        return 3 if node.args[3] not in STRUCTURAL else None
    if node.target not in (aten.mul.Tensor, aten._to_copy.default):
        return None
    made = node.meta.get("val")
    if made is None or not made.dtype.is_floating_point or made.device.type != "cpu":
        return None
    if node.target is aten._to_copy.default:  # of a number that is divided by a tensor
        return 0 if isinstance(node.args[0], float) else None
    product_of = node.args[0]
    if not isinstance(product_of, fx.Node) or product_of.meta["val"].dtype != made.dtype:
        return None
    return 1 if isinstance(node.args[1], float) and node.args[1] not in STRUCTURAL else None


def _dtype(node: fx.Node) -> torch.dtype:
    # the factor of `add_product` stays a Python number when it runs
    return torch.float64 if node.target is add_product else node.meta["val"].dtype
