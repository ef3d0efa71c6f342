"""Quotients that a later factor cancels: (a / (b c) + d) b -> a / c + d b, and noise read from a draw."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import fx

from hierfl.engine.entrywise import KEPT, MANY, Writer, is_large_entrywise, same_numbers
from hierfl.engine.graph_rewrites import VIEWS, is_call, reaches

aten = torch.ops.aten
MOST = 4  # terms of a sum that is multiplied out

Powers = frozenset[tuple[fx.Node, int]]  # a product: nodes and their powers
Terms = Mapping[Powers, float]  # a sum of products, with their constant factors


class Deviation(NamedTuple):
    """Noise times its scale: the product in the trace, and a node that reads it from a draw."""

    scale: fx.Node
    product: fx.Node
    read: fx.Node


Deviations = Mapping[fx.Node, Deviation]  # by their noise


def cancel_quotients(graph: fx.Graph, deviations: Deviations) -> None:
    """Multiply large sums out where a factor cancels a divisor, or is the scale of noise.

    In the gradient of a KL of Normals with scales s = e^x and t = e^y, (-1 / (s/t) + s/t) / t s
    becomes (s/t)^2 - 1, which divides once instead of twice.
    """
    terms: dict[fx.Node, Terms] = {}
    shorter: list[tuple[fx.Node, Deviations]] = []
    drawn: Deviations = {}  # those that are read before the node
    noises = {own.read: noise for noise, own in deviations.items()}
    for node in graph.nodes:
        if node in noises:
            drawn = {**drawn, noises[node]: deviations[noises[node]]}
        factors = _terms(node, terms) if is_large_entrywise(node) else None
        # of a constant alone no node would have the shape
        if factors and any(factors) and len(factors) <= MOST and 0.0 not in factors.values():
            terms[node] = factors
            if is_call(node, aten.mul.Tensor) and _is_shorter(node, terms, drawn):
                shorter.append((node, drawn))
    for node, before in reversed(shorter):
        if node.users:  # else it went with a later one
            with graph.inserting_before(node):
                new = _Sum(graph, node.meta["val"]).of(terms[node], before)
            node.replace_all_uses_with(new)
            _erase(node)
    _invert_exponentials(graph)


def _erase(node: fx.Node) -> None:
    """Erase a node, and what it alone reads."""
    if not node.users and node.op == "call_function":
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for each in inputs:
            _erase(each)


def _terms(node: fx.Node, terms: Mapping[fx.Node, Terms]) -> Terms | None:
    """Return a node as a sum of products of earlier nodes; None: it is a factor itself."""
    of = partial(_of, terms=terms)
    match node.target:
        case aten.neg.default:
            return _product(of(node.args[0]), {frozenset(): -1.0})
        case aten.mul.Tensor:
            return _product(of(node.args[0]), of(node.args[1]))
        case aten.div.Tensor:
            return _product(of(node.args[0]), _inverse(of(node.args[1])))
        case aten.reciprocal.default:
            return _inverse(of(node.args[0]))
        case aten.add.Tensor | aten.sub.Tensor:
            sign = -1.0 if node.target is aten.sub.Tensor else 1.0
            total = dict(of(node.args[0]))
            for powers, factor in of(node.args[1]).items():
                total[powers] = total.get(powers, 0.0) + sign * factor
            is_divided = any(power < 0 for powers in total for _, power in powers)
            # a sum that others read as well is computed once
            return total if len(total) == 1 or (is_divided and len(node.users) == 1) else None
    return None


def _of(arg: Any, terms: Mapping[fx.Node, Terms]) -> Terms:
    if not isinstance(arg, fx.Node):
        return {frozenset(): float(arg)}
    own = same_numbers(arg)
    return terms.get(own, {frozenset({(own, 1)}): 1.0})


def _product(first: Terms, other: Terms | None) -> Terms | None:
    if other is None or min(len(first), len(other)) > 1:
        return None
    total: dict[Powers, float] = {}
    for (a_node, a), (right, b) in product(first.items(), other.items()):
        powers = dict(a_node)
        for node, power in right:
            powers[node] = powers.get(node, 0) + power
        key = frozenset((node, power) for node, power in powers.items() if power)
        total[key] = total.get(key, 0.0) + a * b
    return total


def _inverse(terms: Terms) -> Terms | None:
    if len(terms) > 1:
        return None
    [(powers, factor)] = terms.items()
    return {frozenset((node, -power) for node, power in powers): 1.0 / factor} if factor else None


def _is_shorter(node: fx.Node, terms: Mapping[fx.Node, Terms], deviations: Deviations) -> bool:
    """Return whether a factor of a product cancels a divisor in the other, or scales noise in it."""
    if len(node.all_input_nodes) < 2:
        return False
    first, second = (_of(arg, terms) for arg in node.args)
    for above, right in product(map(dict, first), map(dict, second)):
        if any(above[n] * right[n] < 0 for n in above.keys() & right.keys()):
            return True
        for noise, (scale, own, _) in deviations.items():
            scaled = (noise in above and scale in right) or (noise in right and scale in above)
            if scaled and node is not own:
                return True
    return False


class _Sum(Writer):
    """Writes a sum of products."""

    def of(self, terms: Terms, deviations: Deviations) -> fx.Node:
        total: Any = None
        for powers, factor in sorted(terms.items(), key=lambda item: not item[0]):
            own = _with_deviations(dict(powers), deviations)
            term = self._product(own, factor) if own else factor
            total = term if total is None else self.made(aten.add.Tensor, total, term)
        node: fx.Node = total
        return node

    def _product(self, powers: dict[fx.Node, int], factor: float) -> fx.Node:
        """Return a product; a ratio is raised to its power, since powers could overflow."""
        factors: list[fx.Node] = []
        for size in sorted(set(map(abs, powers.values()))):
            own = [self._factor(n, power > 0) for n, power in powers.items() if abs(power) == size]
            # one node reads the base: inductor stores an exponential that two read
            factors.append(self._multiplied([self._multiplied(own)] * size))
        node = self._multiplied(factors)
        return node if factor == 1.0 else self.made(aten.mul.Tensor, node, factor)

    def _multiplied(self, factors: list[fx.Node]) -> fx.Node:
        node, *others = factors
        for other in others:
            node = self.made(aten.mul.Tensor, node, other)
        return node

    def _factor(self, node: fx.Node, multiplies: bool) -> fx.Node:
        own = self.shaped(node)
        return own if multiplies else self.made(aten.reciprocal.default, own)


def _with_deviations(powers: dict[fx.Node, int], deviations: Deviations) -> dict[fx.Node, int]:
    """Return a product in which noise times its scale is read from the draw."""
    for noise, (scale, _, read) in deviations.items():
        if powers.get(noise) == 1 and powers.get(scale, 0) > 0:
            powers = {**powers, noise: 0, scale: powers[scale] - 1, read: 1}
    return {node: power for node, power in powers.items() if power}


def _invert_exponentials(graph: fx.Graph) -> None:
    """1 / e^x -> e^(-x), where nothing else reads e^x."""
    for node in list(graph.nodes):
        if not is_call(node, aten.reciprocal.default) or node.meta["val"].numel() < MANY:
            continue
        of = same_numbers(node.args[0])
        readers = reaches(of, (*VIEWS, *KEPT))
        if is_call(of, aten.exp.default) and all(is_call(r, node.target) for r in readers):
            writer = Writer(graph, node.meta["val"])
            for user in list(node.users):
                # one for each reader: inductor stores an exponential that two nodes read
                with graph.inserting_before(user):
                    minus = writer.made(aten.neg.default, writer.shaped(of.args[0]))  # type: ignore[arg-type]
                    user.replace_input_with(node, writer.made(aten.exp.default, minus))
