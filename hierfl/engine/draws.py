"""What a traced step draws: all normals by one call, and normals times a scale by the same kernel."""

from collections.abc import Iterable
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from hierfl.engine.entrywise import (
    KEPT,
    MANY,
    Writer,
    is_large_entrywise,
    same_numbers,
    squeeze,
)
from hierfl.engine.graph_rewrites import VIEWS, behind_of, is_call, reaches
from hierfl.engine.quotients import Deviation, cancel_quotients

aten = torch.ops.aten


class Draw(NamedTuple):
    """A value loc + e^log_scale noise, of inputs `loc` and `log_scale`; `scaled` is the product."""

    noise: fx.Node
    loc: fx.Node
    log_scale: fx.Node
    scaled: fx.Node
    value: fx.Node


def shorten(graph: fx.GraphModule) -> None:
    """Cancel quotients; draw loc + e^x noise by one kernel where nothing else reads the noise."""
    draws, deviations = [], {}
    for node in list(graph.graph.nodes):
        draw = _draw(node)
        if draw is None:
            continue
        writer = Writer(graph.graph, draw.value.meta["val"])
        with graph.graph.inserting_after(draw.value):
            loc = writer.shaped(draw.loc)
        with graph.graph.inserting_after(loc if loc is not draw.loc else draw.value):
            away = writer.made(aten.sub.Tensor, draw.value, loc)
        scale = _other(draw.scaled, node)
        deviations[node] = Deviation(scale, draw.scaled, away)
        draws.append(draw)
    cancel_quotients(graph.graph, deviations)
    graph.graph.eliminate_dead_code()
    _sample_together(graph, [draw for draw in draws if _readers(draw.noise) == {draw.scaled}])
    squeeze(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _draw(noise: fx.Node) -> Draw | None:
    """Return the large value that is drawn with some noise; None: there is none."""
    if noise.target is not torch.ops.hierfl.normals.default or noise.meta["val"].numel() < MANY:
        return None
    for scaled in _readers(noise):
        if not is_large_entrywise(scaled) or len(scaled.users) != 1:
            continue
        [value] = scaled.users
        scale: Any = _other(scaled, noise) if is_call(scaled, aten.mul.Tensor) else None
        loc = _other(value, scaled) if is_call(value, aten.add.Tensor) else None
        if is_call(scale, aten.exp.default) and loc is not None:
            inputs = loc, same_numbers(scale.args[0])
            if all(node.op == "placeholder" for node in inputs):
                return Draw(noise, *inputs, scaled, value)
    return None


def _other(node: fx.Node, argument: fx.Node) -> Any:
    """Return the second argument of a large node besides `one`; None: there is none."""
    own = [same_numbers(arg) for arg in node.all_input_nodes] if is_large_entrywise(node) else []
    return own[1 - own.index(argument)] if len(own) == 2 and argument in own else None


def _readers(node: fx.Node) -> set[fx.Node]:
    return reaches(node, (*VIEWS, *KEPT, aten.permute.default))


def _sample_together(graph: fx.GraphModule, draws: list[Draw]) -> None:
    if not draws:
        return
    keys = [draw.noise.args[0] for draw in draws]
    lists = keys, [draw.loc for draw in draws], [draw.log_scale for draw in draws]
    made = _called_once(graph, [draw.noise for draw in draws], keys, "samples_of", lists)
    for draw, own in zip(draws, made, strict=True):
        shape = list(draw.value.meta["val"].shape)
        with graph.graph.inserting_before(draw.value):
            value = graph.graph.call_function(aten.view.default, (own, shape))
        value.meta["val"] = draw.value.meta["val"]
        draw.value.replace_all_uses_with(value)


def draw_together(graph: fx.GraphModule) -> None:
    """Draw all normals by one call: what inductor puts between calls, it compiles piece by piece."""
    draws = [n for n in graph.graph.nodes if n.target is torch.ops.hierfl.normals.default]
    if len(draws) < 2:
        return
    keys, counts = zip(*(node.args for node in draws), strict=True)
    for node, own in zip(
        draws, _called_once(graph, draws, keys, "normals_of", (keys, counts)), strict=True
    ):
        node.replace_all_uses_with(own)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _called_once(
    graph: fx.GraphModule, draws: list[fx.Node], keys: Iterable[Any], op: str, args: tuple[Any, ...]
) -> list[fx.Node]:
    """Call an operation on lists before the first draw, with the keys of all; return its results."""
    first, is_after, behind = draws[0], False, behind_of(list(keys))
    for node in list(graph.graph.nodes):
        is_after = is_after or node is first
        if is_after and node in behind:
            first.prepend(node)
    results = []
    with graph.graph.inserting_before(first):
        drawn = graph.graph.call_function(getattr(torch.ops.hierfl, op).default, args)
        drawn.meta["val"] = [node.meta["val"] for node in draws]
        for place, node in enumerate(draws):
            results.append(graph.graph.call_function(getitem, (drawn, place)))
            results[-1].meta["val"] = node.meta["val"]
    return results
