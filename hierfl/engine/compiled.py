"""A local step as one compiled graph, without Pyro's Python; one that cannot be traced runs eagerly."""

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from hierfl.core.trees import Tree, leaves_of, tree_leaves
from hierfl.core.user_warnings import warn
from hierfl.engine.graph_rewrites import draw_together, rewrite

Signature = tuple[Any, ...]


class End(NamedTuple):
    """A lowered function of leaves for sums that only the last of repeated steps needs; zeros like them."""

    run: Callable[..., Any]
    zeros: tuple[Tensor, ...]


class Graph(NamedTuple):
    """A lowered function of leaves (and the sums of `end`), and the tree structure of its result."""

    run: Callable[..., Any]
    spec: Any
    end: End | None = None


@dataclass(frozen=True, eq=False)
class Graphs:
    """Compiled functions by name, structure and inputs; None for one that runs eagerly."""

    made: dict[Signature, Graph | None] = field(default_factory=dict)

    def graph(
        self,
        name: object,
        function: Callable[..., Tree],
        leaves: list[Tensor],
        spec: Any,
        given: int,
    ) -> Graph | None:
        """Return the graph of a pure function, or None; it may overwrite the first leaves."""
        signature = (name, spec, given, *((v.shape, v.dtype, v.device) for v in leaves))
        if signature not in self.made:
            self.made[signature] = _compile(function, leaves, spec, given)
        return self.made[signature]


class Loop:
    """A repeated step, which may overwrite `work`; flattened trees halve the time of small networks."""

    def __init__(
        self, graphs: Graphs, name: object, function: Callable[..., Tree], work: Tree, *fixed: Tree
    ) -> None:
        self._graphs, self._name, self._function = graphs, name, function
        self._work, self._work_spec = tree_flatten(work)
        self._fixed_tree = fixed
        self._fixed = [leaf.contiguous() for leaf in tree_leaves(fixed)]
        self._memories = {leaf.untyped_storage().data_ptr() for leaf in self._fixed}
        self._graph: Graph | None = None
        self._spec: Any = None

    def step(self, *batch: Tree, last: bool = True) -> None:
        """Take one step; every batch has the same structure and shapes. Before the `last`, no value is read."""
        work = _apart(self._work, self._memories)
        leaves = [*work, *self._fixed, *(leaf.contiguous() for leaf in leaves_of(batch))]
        if self._spec is None:
            _, self._spec = tree_flatten((self.value(), *self._fixed_tree, *batch))
            self._graph = self._graphs.graph(
                self._name, self._function, leaves, self._spec, len(work)
            )
        if self._graph is None:
            self._work, spec = tree_flatten(self._function(*tree_unflatten(leaves, self._spec)))
        else:
            self._work, spec = self._graph_results(leaves, last), self._graph.spec
        same = spec is self._work_spec or spec == self._work_spec
        for new, old in zip(self._work, work, strict=False):
            same = same and new.dtype == old.dtype and new.shape == old.shape
        if not same:
            self._spec = None  # the next step has other inputs, and needs another graph
        self._work_spec = spec

    def _graph_results(self, leaves: list[Tensor], last: bool) -> list[Tensor]:
        assert self._graph is not None
        end = self._graph.end
        if end is None:
            return list(self._graph.run(*leaves))
        return list(self._graph.run(*leaves, *(end.run(*leaves) if last else end.zeros)))

    def value(self) -> Tree:
        """Return the working state as it is now."""
        return tree_unflatten(self._work, self._work_spec)


def _compile(
    function: Callable[..., Tree], leaves: list[Tensor], spec: Any, given: int
) -> Graph | None:
    try:
        return compiled(function, leaves, spec, given)
    except Exception as error:
        # tracing and lowering can fail in many ways; the step itself is right, and runs eagerly
        warn(
            f"the step is not compiled and runs eagerly, more slowly: {type(error).__name__}: "
            f"{str(error)[:300]}",
        )
        return None


def compiled(function: Callable[..., Tree], leaves: list[Tensor], spec: Any, given: int) -> Graph:
    """Trace a pure function, rewrite its graph, and lower it to a function of leaves like these."""
    # eager runs need neither
    from hierfl.core.normal_kernel import in_graph
    from hierfl.engine.graph_inputs import cut_end

    shape: list[Any] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        out, out_spec = tree_flatten(function(*tree_unflatten(list(leaves), spec)))
        shape[:] = [out_spec]
        return out

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of inductor, about its own code
        with in_graph():
            graph = make_fx(flat)(*_distinct(leaves))
        rewrite(graph, given)
        draw_together(graph)
        cut, end = cut_end(graph, given), None
        if cut is not None:
            end = End(_lowered(cut, leaves), _zeros(cut))
            leaves = [*leaves, *end.zeros]
        return Graph(_lowered(graph, leaves), shape[0], end)


def _zeros(graph: fx.GraphModule) -> tuple[Tensor, ...]:
    """Return zeros like the results of a graph."""
    [end] = [node for node in graph.graph.nodes if node.op == "output"]
    values = [node.meta["val"] for node in end.all_input_nodes]
    return tuple(torch.zeros(v.shape, dtype=v.dtype, device=v.device) for v in values)


SKIPPED = getattr(torch.compiler, "skip_all_guards_unsafe", None)
# a product and a sum are one instruction; a weight's whole update is one kernel, of more than 16 parts
OPTIONS: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "fast",
    "cpp.max_horizontal_fusion_size": 64,
    "size_asserts": False,  # checks of inputs take 0.05 to 0.1 ms of a call
    "alignment_asserts": False,
    # `Graphs` finds a graph by all that torch would check again in each call (since torch 2.8)
    **({"guard_filter_fn": SKIPPED} if SKIPPED else {}),
}


def _lowered(graph: fx.GraphModule, leaves: list[Tensor]) -> Callable[..., Any]:
    """Let inductor lower a graph to a function of leaves like these."""
    from hierfl.engine.graph_inputs import lift_factors

    factors = lift_factors(graph)
    lowered: Any = torch.compile(graph, fullgraph=True, dynamic=False, options=OPTIONS)

    def run(*leaves: Tensor) -> Any:
        with torch.no_grad():
            return lowered(*leaves, *factors)

    run(*(leaf.clone() for leaf in leaves))  # else the first step would compile, and could fail
    return run


def _compile_alone() -> None:
    """Let a fork compile in its own thread: torch's compile workers are not copied."""
    OPTIONS["compile_threads"] = 1


os.register_at_fork(after_in_child=_compile_alone)


def _distinct(leaves: list[Tensor]) -> list[Tensor]:
    """Clone repeated tensors: make_fx takes a tensor that is passed twice for one input."""
    seen: set[int] = set()
    out = []
    for leaf in leaves:
        out.append(leaf.clone() if leaf.data_ptr() in seen else leaf)
        seen.add(leaf.data_ptr())
    return out


def _apart(leaves: list[Tensor], memories: Iterable[int]) -> list[Tensor]:
    """Return contiguous leaves, none of which shares memory with another or with `memories`."""
    seen = set(memories)
    out = []
    for leaf in leaves:
        own = leaf.contiguous()
        if own.untyped_storage().data_ptr() in seen and own.numel():
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        out.append(own)
    return out
