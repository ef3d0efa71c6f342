"""A step as one compiled graph: traced once (Pyro's Python is gone), mended, lowered by inductor, cached by shapes.

What may be traced: any step whose draws are functions of keys and whose control flow does not depend on values. What may not
runs eagerly, with one warning that says why.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten

from hierfl.core.trees import Tree, leaves_of, tree_leaves
from hierfl.engine.graph_rewrites import mend

Signature = tuple[Any, ...]


class Graph(NamedTuple):
    """A lowered function of leaves, and the structure of what it gives."""

    run: Callable[..., Any]
    spec: Any


@dataclass(frozen=True, eq=False)
class Graphs:
    """Compiled functions of trees, by name and by the shapes and layouts of what goes in.

    Args:
        made: what has been compiled; None: what runs eagerly.
    """

    made: dict[Signature, Graph | None] = field(default_factory=dict)

    def run(
        self, name: object, function: Callable[..., Tree], *trees: Tree, give: bool = False
    ) -> Tree:
        """`function(*trees)`, by its graph; eagerly where it has none.

        Args:
            name: of the function.
            function: pure.
            trees: what it takes.
            give: the first tree is given away: what it holds may be overwritten.
        """
        if give:
            loop = Loop(self, name, function, trees[0], *trees[1:])
            loop.step()
            return loop.value()
        leaves, spec = tree_flatten(trees)
        leaves = [leaf.contiguous() for leaf in leaves]
        graph = self.graph(name, function, leaves, spec, 0)
        return (
            function(*tree_unflatten(leaves, spec))
            if graph is None
            else tree_unflatten(graph.run(*leaves), graph.spec)
        )

    def graph(
        self,
        name: object,
        function: Callable[..., Tree],
        leaves: list[Tensor],
        spec: Any,
        given: int,
    ) -> Graph | None:
        """The graph for leaves like these, made now if need be; None: there is none."""
        signature = (name, spec, given, *((v.shape, v.dtype, v.device) for v in leaves))
        if signature not in self.made:
            self.made[signature] = _compile(function, leaves, spec, given)
        return self.made[signature]


class Loop:
    """A step that is taken again and again: lane -> step(lane, *fixed, *batch), the lane written over where that saves a copy.

    Trees are taken apart once, not at every step: on small networks that was half the time.
    """

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

    def step(self, *batch: Tree) -> None:
        """One step; batches have the same structure and shapes every time."""
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
            self._work, spec = list(self._graph.run(*leaves)), self._graph.spec
        if (spec is not self._work_spec and spec != self._work_spec) or any(
            map(_unlike, self._work, work)
        ):
            self._spec = None  # what comes next is another function
        self._work_spec = spec

    def value(self) -> Tree:
        """The lane as it is now."""
        return tree_unflatten(self._work, self._work_spec)


def _unlike(a: Tensor, b: Tensor) -> bool:
    return a.dtype != b.dtype or a.shape != b.shape


def _compile(
    function: Callable[..., Tree], leaves: list[Tensor], spec: Any, given: int
) -> Graph | None:
    try:
        return compiled(function, leaves, spec, given)
    except (
        Exception
    ) as error:  # whatever tracing or lowering meets: the step itself is right, and runs eagerly
        warnings.warn(
            f"the step is not compiled and runs eagerly, more slowly: {type(error).__name__}: {str(error)[:300]}",
            stacklevel=2,
        )
        return None


def compiled(function: Callable[..., Tree], leaves: list[Tensor], spec: Any, given: int) -> Graph:
    """Trace, mend and lower a function of trees, as a function of their leaves."""
    shape: list[Any] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        out, out_spec = tree_flatten(function(*tree_unflatten(list(leaves), spec)))
        shape[:] = [out_spec]
        return out

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's, of its own insides
        graph = make_fx(flat)(*_distinct(leaves))
        mend(graph, given)
        # with a shape environment, though no shape is dynamic, inductor keeps what it makes on disk for the next process
        fake = FakeTensorMode(shape_env=ShapeEnv())
        examples: list[Any] = [fake.from_tensor(leaf, static_shapes=True) for leaf in leaves]
        with tracing(TracingContext(fake)), _instructions_known():
            lowered: Any = torch._inductor.compile(graph, examples)

    def run(*leaves: Tensor) -> Any:
        with torch.no_grad():
            return lowered(*leaves)

    return Graph(run, shape[0])


@contextmanager
def _instructions_known() -> Iterator[None]:
    """Spare torch its trials of which vector instructions a compiler knows, where that is known: half of a first compilation.

    Six programs are compiled when a cache is new, 6 of 12 s for W1, and loaded by as many processes in every run, 1 of 3.4 s. GCC 12
    knows every instruction that torch asks for; whether the processor does, torch reads elsewhere.
    """
    try:
        from torch._inductor.cpp_builder import _is_gcc_version_less_than, get_cpp_compiler, is_gcc
        from torch._inductor.cpu_vec_isa import VecISA

        known = is_gcc() and not _is_gcc_version_less_than(get_cpp_compiler(), 12)
        trial = VecISA.check_build
    except (
        ImportError,
        AttributeError,
        RuntimeError,
    ):  # another release of torch, or no compiler: as it pleases
        known = False
    if not known:
        yield
        return
    VecISA.check_build = lambda self, code: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        VecISA.check_build = trial  # type: ignore[method-assign]


def _compile_alone() -> None:
    """In a copy of this process: compile without the threads and processes that torch compiles on, which are not copied."""
    if "torch._inductor.config" in sys.modules:
        torch._inductor.config.compile_threads = 1


os.register_at_fork(after_in_child=_compile_alone)


def _distinct(leaves: list[Tensor]) -> list[Tensor]:
    """Leaves none of which is there twice: make_fx takes one tensor that comes in twice for one input, silently."""
    seen: set[int] = set()
    out = []
    for leaf in leaves:
        out.append(leaf.clone() if leaf.data_ptr() in seen else leaf)
        seen.add(leaf.data_ptr())
    return out


def _apart(leaves: list[Tensor], memories: Iterable[int]) -> list[Tensor]:
    """Leaves in plain layout that may be overwritten: they share no memory with each other, nor with those memories."""
    seen = set(memories)
    out = []
    for leaf in leaves:
        own = leaf.contiguous()
        if own.untyped_storage().data_ptr() in seen and own.numel():
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        out.append(own)
    return out
