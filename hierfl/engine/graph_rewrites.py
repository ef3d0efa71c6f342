"""Graph rewrites of a traced step before inductor compiles it; none changes the numbers."""

from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hierfl.core.add_to_row import add_

aten = torch.ops.aten

_library = torch.library.Library("hierfl", "DEF")
_library.define("add_product(Tensor(a!) weight, Tensor left, Tensor right, float factor) -> ()")


def _add_product(weight: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Weight += factor * left @ right, in place: no gradient is written, and no weight copied."""
    weight.view(left.shape[0], left.shape[1], right.shape[2]).baddbmm_(left, right, alpha=factor)


_library.impl("add_product", _add_product, "CompositeExplicitAutograd")
_library.impl("add_product", lambda weight, left, right, factor: None, "Meta")
add_product = torch.ops.hierfl.add_product.default

_library.define("add_to_row_(Tensor(a!) rows, Tensor vector, Tensor at) -> ()")
_library.impl("add_to_row_", add_, "CompositeExplicitAutograd")
_library.impl("add_to_row_", lambda rows, vector, at: None, "Meta")
add_to_row_ = torch.ops.hierfl.add_to_row_.default
MUTATING = (add_product, add_to_row_)  # their first argument

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim)
RESHAPED: tuple[object, ...] = (aten.transpose.int, aten.permute.default, aten.expand.default)
RESHAPED += (aten.select.int, aten.slice.Tensor, aten.detach.default, aten.alias.default)
FRESH: tuple[object, ...] = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
FRESH += (aten.add.Scalar, aten.mul.Scalar, aten.neg.default)


def is_call(node: object, *ops: object) -> bool:
    """Return whether a node calls one of some operations."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in ops


def rewrite(graph: fx.GraphModule, given: int = 0) -> None:
    """Apply all passes to a traced step, whose first `given` inputs may be overwritten."""
    graph.graph.eliminate_dead_code()  # a dead node would count as a user
    cancel_transposes(graph)
    view_only_entries(graph)
    drop_ones_and_zeros(graph)
    graph.graph.eliminate_dead_code()
    add_products_in_place(graph, given)
    add_to_rows_in_place(graph, given)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def cancel_transposes(graph: fx.GraphModule) -> None:
    """(A')' -> A: the gradient of a layer's weight is a product that is transposed twice."""
    for node in graph.graph.nodes:
        if is_call(node, aten.transpose.int) and is_call(node.args[0], aten.transpose.int):
            inner = node.args[0]
            rank = node.meta["val"].dim()
            if {d % rank for d in node.args[1:]} == {d % rank for d in inner.args[1:]}:
                node.replace_all_uses_with(inner.args[0])


def view_only_entries(graph: fx.GraphModule) -> None:
    """Replace a `select_backward` into a dimension of size 1 by a view, which writes no zeros."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if is_call(node, aten.select_backward.default) and value.shape[node.args[2]] == 1:
            args = node.args[0], node.args[2] % value.dim()
            with graph.graph.inserting_before(node):
                view = graph.graph.call_function(aten.unsqueeze.default, args)
            view.meta["val"] = value
            node.replace_all_uses_with(view)


def drop_ones_and_zeros(graph: fx.GraphModule) -> None:
    """1 x -> x and x + 0 -> x: torch's transform to positive values is exp, times 1, plus 0."""
    for node in graph.graph.nodes:
        for op, idle in ((aten.mul.Tensor, 1.0), (aten.add.Tensor, 0.0)):
            if is_call(node, op) and not node.kwargs and idle in node.args and len(node.args) == 2:
                [operand] = [arg for arg in node.args if arg != idle]
                own, value = operand.meta["val"], node.meta["val"]
                if (own.shape, own.dtype) == (value.shape, value.dtype):
                    node.replace_all_uses_with(operand)


def add_products_in_place(graph: fx.GraphModule, given: int = 0) -> None:
    """W + c (A B + R) -> (W + c R), c (A B) added in place; without R, an input W is not copied."""
    overwritable = set([node for node in graph.graph.nodes if node.op == "placeholder"][:given])
    free = set(overwritable)
    [end] = [node for node in graph.graph.nodes if node.op == "output"]
    inside: set[fx.Node] = set()  # nodes of sums that are dealt with already
    for node in reversed(list(graph.graph.nodes)):
        if node in inside or not is_call(node, aten.add.Tensor, aten.sub.Tensor):
            continue
        terms = _terms(node, node.meta["val"].shape, inside)
        fused = [term for term in terms if term.product is not None and term.factor != 1.0]
        unfused = [term for term in terms if term not in fused]
        if not fused or not any(
            term.node.meta["val"].shape == node.meta["val"].shape for term in unfused
        ):
            continue
        operands = {origin_of(arg) for term in fused for arg in term.product.args}  # type: ignore[union-attr]
        origin, at_end = None, False
        if len(unfused) == 1 and unfused[0].factor == 1.0:
            origin = origin_of(unfused[0].node)
            at_end = (
                origin in free
                and not overwritable & operands
                # only the output reads the new value, and no view of the input
                and reaches(node, VIEWS) == {end}
                and end not in reaches(origin, (*VIEWS, *RESHAPED))
                and _read_by_products(origin, node)
            )
            free -= {origin}
        with graph.graph.inserting_before(end if at_end else node):
            moved = (
                unfused[0].node if origin is not None else _summed(graph, unfused, node.meta["val"])
            )
            if origin is not None and not at_end and not _is_read_once(moved):
                moved = graph.graph.call_function(
                    aten.clone.default, (moved,), {"memory_format": torch.contiguous_format}
                )
                moved.meta["val"] = node.meta["val"].contiguous()
            whole = origin_of(moved, VIEWS)  # inductor would copy a view of it first
            for term in fused:
                first, right = term.product.args  # type: ignore[union-attr]
                graph.graph.call_function(add_product, (whole, first, right, term.factor))
        node.replace_all_uses_with(moved)


def add_to_rows_in_place(graph: fx.GraphModule, given: int = 0) -> None:
    """Add to a row of an input itself, one of the first `given`, where nothing else reads it."""
    overwritable = [node for node in graph.graph.nodes if node.op == "placeholder"][:given]
    [end] = [node for node in graph.graph.nodes if node.op == "output"]
    for node in list(graph.graph.nodes):
        if not is_call(node, torch.ops.hierfl.add_to_row.default):
            continue
        rows, vector, at = node.args
        if rows in overwritable and set(rows.users) == {node} and set(node.users) == {end}:
            with graph.graph.inserting_before(end):
                graph.graph.call_function(add_to_row_, (rows, vector, at))
            node.replace_all_uses_with(rows)


def draw_together(graph: fx.GraphModule) -> None:
    """Draw all normals by one call: what inductor puts between calls, it compiles piece by piece."""
    draws = [n for n in graph.graph.nodes if n.target is torch.ops.hierfl.normals.default]
    if len(draws) < 2:
        return
    keys, counts = zip(*(node.args for node in draws), strict=True)
    first, is_after, behind = draws[0], False, behind_of(list(keys))
    for node in list(graph.graph.nodes):
        is_after = is_after or node is first
        if is_after and node in behind:
            first.prepend(node)
    with graph.graph.inserting_before(first):
        drawn = graph.graph.call_function(torch.ops.hierfl.normals_of.default, (keys, counts))
        drawn.meta["val"] = [node.meta["val"] for node in draws]
        for place, node in enumerate(draws):
            own = graph.graph.call_function(getitem, (drawn, place))
            own.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(own)
    graph.graph.eliminate_dead_code()
    graph.recompile()


class Summand(NamedTuple):
    """A summand, `factor` times `node`; `product` if it is a batched product nothing else reads."""

    factor: float
    node: fx.Node
    product: fx.Node | None = None


def _terms(
    node: fx.Node, shape: torch.Size, inside: set[fx.Node], factor: float = 1.0
) -> list[Summand]:
    """Return the summands of a sum, through sums (put into `inside`) that nothing else reads."""
    plus, minus = is_call(node, aten.add.Tensor), is_call(node, aten.sub.Tensor)
    if (plus or minus) and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args):
        signs = (factor, factor if plus else -factor)
        inside.add(node)
        return [
            term
            for arg, by in zip(node.args, signs, strict=True)
            for term in _inner(arg, shape, inside, by)
        ]
    if is_call(node, aten.mul.Tensor) and isinstance(node.args[1], float | int):
        return _inner(node.args[0], shape, inside, factor * node.args[1])
    if is_call(node, aten.neg.default):
        return _inner(node.args[0], shape, inside, -factor)
    return [Summand(factor, node)]


def _inner(node: Any, shape: torch.Size, inside: set[fx.Node], factor: float) -> list[Summand]:
    product, own = _scaled_product(node)
    if product is not None and product.meta["val"].numel() == shape.numel():
        return [Summand(factor * own, node, product)]
    if len(node.users) > 1 or node.meta["val"].shape != shape:
        return [Summand(factor, node)]
    return _terms(node, shape, inside, factor)


def _summed(graph: fx.GraphModule, terms: list[Summand], like: Any) -> fx.Node:
    total: fx.Node | None = None
    for factor, node, _ in terms:
        term = node if factor == 1.0 else graph.graph.call_function(aten.mul.Tensor, (node, factor))
        total = term if total is None else graph.graph.call_function(aten.add.Tensor, (total, term))
        total.meta["val"] = term.meta["val"] = like.contiguous()
    assert total is not None
    return total


def _read_by_products(origin: fx.Node, node: fx.Node) -> bool:
    """Return whether only products read an input: inductor may run other readers after it is overwritten."""
    for reader in reaches(origin, (*VIEWS, *RESHAPED)) - {node}:
        if not is_call(reader, aten.bmm.default):
            return False
        first, right = (arg.meta["val"].shape for arg in reader.args)  # type: ignore[union-attr]
        if 1 in (*first[1:], right[2]):
            return False
    return True


def reaches(node: fx.Node, through: tuple[object, ...]) -> set[fx.Node]:
    """Return the nodes that read a node or a view of it, made by the operations `through`."""
    nodes = set()
    for user in node.users:
        nodes |= reaches(user, through) if is_call(user, *through) else {user}
    return nodes


def behind_of(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return all nodes that some nodes are computed from, and these."""
    ancestors, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in ancestors:
            ancestors.add(node)
            stack += node.all_input_nodes
    return ancestors


def _is_read_once(weight: fx.Node) -> bool:
    chain = [weight]
    while is_call(chain[-1], *VIEWS):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    own, is_read_once = chain[-1], all(len(node.users) == 1 for node in chain)
    return is_read_once and is_call(own, *FRESH) and own.meta["val"].is_contiguous()


def origin_of(node: Any, through: tuple[object, ...] = (*VIEWS, *RESHAPED)) -> Any:
    """Return the node that a node is a view of."""
    while is_call(node, *through):
        node = node.args[0]
    return node


def _scaled_product(node: Any) -> tuple[fx.Node | None, float]:
    """Return the batched product behind a node's views, and its constant factor; else (None, 1)."""
    factor = 1.0
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if is_call(node, aten.mul.Tensor) and isinstance(node.args[1], float | int):
            factor *= node.args[1]
        elif not is_call(node, *VIEWS):
            break
        node = node.args[0]
    if is_call(node, aten.bmm.default) and len(node.users) == 1:
        return node, factor
    return None, 1.0
