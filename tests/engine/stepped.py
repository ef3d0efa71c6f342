"""One step by its graph."""

from collections.abc import Callable
from typing import Any

from hierfl.core.trees import Tree
from hierfl.engine.compiled import Graphs, Loop


def stepped(graphs: Graphs, function: Callable[..., Any], work: Tree, *fixed: Tree) -> Any:
    """Return `function(work, *fixed)` by its graph, which may overwrite `work`."""
    loop = Loop(graphs, "step", function, work, *fixed)
    loop.step()
    return loop.value()
