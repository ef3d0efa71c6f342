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
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten

from hierfl.passes import mend
from hierfl.trees import Tree, tree_leaves

Signature = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Graphs:
    """Compiled functions of trees, by name and by the shapes and layouts of what goes in."""

    made: dict[Signature, Callable[..., Tree] | None] = field(default_factory=dict)

    def run(self, name: object, function: Callable[..., Tree], *trees: Tree, give: bool = False) -> Tree:
        """`function(*trees)`, by its graph; eagerly where it has none.

        Args:
            name: of the function.
            function: pure.
            trees: what it takes.
            give: the first tree is given away: what it holds may be overwritten.
        """
        leaves, spec = tree_flatten(trees)
        given = len(tree_leaves(trees[0])) if give else 0
        leaves = _apart(leaves, given)
        signature = (name, spec, given, *((v.shape, v.dtype, v.device) for v in leaves))
        if signature not in self.made:
            self.made[signature] = self._compile(function, leaves, spec, given)
        graph = self.made[signature]
        return function(*trees) if graph is None else graph(leaves)

    def _compile(self, function: Callable[..., Tree], leaves: list[Tensor], spec: Any, given: int) -> Callable[..., Tree] | None:
        try:
            return compiled(function, leaves, spec, given)
        except Exception as error:  # whatever tracing or lowering meets: the step itself is right, and runs eagerly
            warnings.warn(
                f"the step is not compiled and runs eagerly, more slowly: {type(error).__name__}: {str(error)[:300]}",
                stacklevel=2,
            )
            return None


def compiled(function: Callable[..., Tree], leaves: list[Tensor], spec: Any, given: int) -> Callable[[list[Tensor]], Tree]:
    """Trace, mend and lower a function of trees, as a function of their leaves."""
    shape: list[Any] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        out, out_spec = tree_flatten(function(*tree_unflatten(list(leaves), spec)))
        shape[:] = [out_spec]
        return out

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's, of its own insides
        graph = make_fx(flat)(*leaves)
        mend(graph, given)
        # with a shape environment, though no shape is dynamic, inductor keeps what it makes on disk for the next process
        fake = FakeTensorMode(shape_env=ShapeEnv())
        examples: list[Any] = [fake.from_tensor(leaf, static_shapes=True) for leaf in leaves]
        with tracing(TracingContext(fake)):
            lowered: Any = torch._inductor.compile(graph, examples)

    def run(leaves: list[Tensor]) -> Tree:
        with torch.no_grad():
            return tree_unflatten(list(lowered(*leaves)), shape[0])

    return run


def _apart(leaves: list[Tensor], given: int) -> list[Tensor]:
    """Leaves in plain layout, none of them twice: make_fx takes one tensor that comes in twice for one input, silently.

    The first `given`, which may be overwritten, share their memory with no other.
    """
    pointers: set[int] = set()
    memories: set[int] = set()
    out = [leaf.contiguous() for leaf in leaves]
    for i in reversed(range(len(out))):
        shared = out[i].untyped_storage().data_ptr() in memories if i < given else out[i].data_ptr() in pointers
        if shared and out[i].numel():
            out[i] = out[i].clone()
        pointers.add(out[i].data_ptr())
        memories.add(out[i].untyped_storage().data_ptr())
    return out
