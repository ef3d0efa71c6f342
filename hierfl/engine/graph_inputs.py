"""What becomes inputs of a traced step: factors, so that steps share a graph, and sums that only the last reads."""

from typing import Any

import torch
from torch import Tensor, fx

from hierfl.engine.graph_rewrites import MUTATING, add_product, behind_of

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


# ------------------------------------------------------------ the end of repeated steps
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
