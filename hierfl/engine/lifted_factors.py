"""Constant factors of a traced step, such as step sizes, as inputs, so that steps share one graph."""

from typing import Any

import torch
from torch import Tensor, fx

from hierfl.engine.graph_rewrites import add_product

aten = torch.ops.aten
_library = torch.library.Library("hierfl", "FRAGMENT")
_library.define("add_scaled(Tensor(a!) weight, Tensor left, Tensor right, Tensor factor) -> ()")


def _add_scaled(weight: Tensor, left: Tensor, right: Tensor, factor: Tensor) -> None:
    """As `add_product`, with a factor () float64 on the CPU that is an input of the graph."""
    add_product(weight, left, right, factor.item())


_library.impl("add_scaled", _add_scaled, "CompositeExplicitAutograd")
_library.impl("add_scaled", lambda weight, left, right, factor: None, "Meta")
add_scaled = torch.ops.hierfl.add_scaled.default
STRUCTURAL = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)  # of derivatives and densities, not of options


def lift_factors(graph: fx.GraphModule) -> list[Tensor]:
    """Make inputs of a graph's constant factors, in the product's type: results are equal bit for bit."""
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
            # the factor of `add_product` stays a Python number when it runs
            own = torch.float64 if node.target is add_product else node.meta["val"].dtype
            args[at] = lifted(args[at], own)
            node.args = tuple(args)
            if node.target is add_product:
                node.target = add_scaled
    graph.recompile()
    return values


def _place(node: fx.Node) -> int | None:
    if node.op != "call_function":
        return None
    first, made = _value(node.args[0]) if node.args else None, _value(node)
    if node.target is add_product:
        lifts = _is_on_cpu(first) and node.args[3] not in STRUCTURAL
        return 3 if lifts else None
    if not _is_on_cpu(made) or not made.dtype.is_floating_point:
        return None
    if node.target is aten._to_copy.default:  # of a number that is divided by a tensor
        return 0 if isinstance(node.args[0], float) else None
    if node.target is not aten.mul.Tensor or first is None or first.dtype != made.dtype:
        return None
    return 1 if isinstance(node.args[1], float) and node.args[1] not in STRUCTURAL else None


def _value(node: object) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
