"""All normals of a traced step by one call."""

from operator import getitem

import torch
from torch import fx

from hierfl.engine.graph_rewrites import behind_of


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
