"""A step as one compiled graph: traced once (Pyro's Python is gone), mended, lowered by inductor, cached by shapes.

What may be traced: any step whose draws are functions of keys and whose control flow does not depend on values. What may not
runs eagerly, with one warning that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from hierfl.trees import Tree

aten = torch.ops.aten
Signature = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Graphs:
    """Compiled functions of trees, by name and by the shapes and layouts of what goes in."""

    made: dict[Signature, Callable[..., Tree] | None] = field(default_factory=dict)

    def run(self, name: object, function: Callable[..., Tree], *trees: Tree) -> Tree:
        """`function(*trees)`, by its graph; eagerly where it has none."""
        leaves, spec = tree_flatten(trees)
        leaves = _apart(leaves)
        signature = (name, str(spec), *((v.shape, v.dtype, v.device) for v in leaves))
        if signature not in self.made:
            self.made[signature] = self._compile(function, leaves, spec)
        graph = self.made[signature]
        return function(*trees) if graph is None else graph(leaves)

    def _compile(self, function: Callable[..., Tree], leaves: list[Tensor], spec: Any) -> Callable[..., Tree] | None:
        try:
            return compiled(function, leaves, spec)
        except Exception as error:  # whatever tracing or lowering meets: the step itself is right, and runs eagerly
            warnings.warn(
                f"the step is not compiled and runs eagerly, more slowly: {type(error).__name__}: {str(error)[:300]}",
                stacklevel=2,
            )
            return None


def compiled(function: Callable[..., Tree], leaves: list[Tensor], spec: Any) -> Callable[[list[Tensor]], Tree]:
    """Trace, mend and lower a function of trees, as a function of their leaves."""
    shape: list[Any] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        out, out_spec = tree_flatten(function(*tree_unflatten(list(leaves), spec)))
        shape[:] = [out_spec]
        return out

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's, of its own insides
        graph = make_fx(flat)(*leaves)
        mend(graph)
        lowered: Any = torch._inductor.compile(graph, list(leaves))

    def run(leaves: list[Tensor]) -> Tree:
        with torch.no_grad():
            return tree_unflatten(list(lowered(*leaves)), shape[0])

    return run


def _apart(leaves: list[Tensor]) -> list[Tensor]:
    """Leaves in plain layout, none of them twice: make_fx takes one tensor that comes in twice for one input, silently."""
    seen: set[int] = set()
    out = []
    for leaf in leaves:
        plain = leaf.contiguous()
        if plain.data_ptr() in seen and plain.numel():
            plain = plain.clone()
        seen.add(plain.data_ptr())
        out.append(plain)
    return out


# ------------------------------------------------------------------------------------------------ passes
def mend(graph: fx.GraphModule) -> None:
    """The passes, in order; each leaves the numbers as they were."""
    for mending in (transposes_cancel, steps_ride_on_products):
        mending(graph)
        graph.graph.eliminate_dead_code()  # what is dead would still count as a use
    graph.recompile()


def transposes_cancel(graph: fx.GraphModule) -> None:
    """(A')' -> A. The gradient of a layer's weight comes transposed twice; seen through, it is a plain product."""
    for node in graph.graph.nodes:
        if _is(node, aten.transpose.int) and _is(node.args[0], aten.transpose.int):
            inner = node.args[0]
            rank = node.meta["val"].dim()
            if {d % rank for d in node.args[1:]} == {d % rank for d in inner.args[1:]}:
                node.replace_all_uses_with(inner.args[0])


def steps_ride_on_products(graph: fx.GraphModule) -> None:
    """Write w + c (A B) as baddbmm(w, A, B, alpha=c): the step rides on the product, and no gradient is ever written."""
    for node in graph.graph.nodes:
        if not (_is(node, aten.add.Tensor) or _is(node, aten.sub.Tensor)) or node.kwargs or len(node.args) != 2:
            continue
        weight, step = node.args
        sign = 1.0 if _is(node, aten.add.Tensor) else -1.0
        product, factor = _scaled_product(step)
        if product is None or not isinstance(weight, fx.Node):
            continue
        left, right = product.args
        shape, wanted = node.meta["val"].shape, product.meta["val"].shape
        if weight.meta["val"].shape != shape or shape.numel() != wanted.numel():
            continue
        with graph.graph.inserting_before(node):
            flat = graph.graph.call_function(aten.view.default, (weight, list(wanted)))
            moved = graph.graph.call_function(aten.baddbmm.default, (flat, left, right), {"alpha": sign * factor})
            shaped = graph.graph.call_function(aten.view.default, (moved, list(shape)))
            shaped.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(shaped)


def _scaled_product(node: object) -> tuple[fx.Node | None, float]:
    """The batched product, and the number it is multiplied by, that a node is, views apart; (None, 0) where it is none."""
    factor = 1.0
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if _is(node, aten.mul.Tensor) and isinstance(node.args[1], float | int):
            factor *= node.args[1]
        elif not any(_is(node, view) for view in VIEWS):
            break
        node = node.args[0]
    if _is(node, aten.bmm.default) and isinstance(node, fx.Node) and len(node.users) == 1 and factor != 1.0:
        return node, factor
    return None, 0.0


VIEWS = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim)


def _is(node: object, op: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is op
