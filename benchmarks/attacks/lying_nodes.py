"""Nodes that lie: one of four sends what no honest client sends, in a run of `two_stage`, `pvi`, `fedavg` or `fedsvi`.

A run must end in time as if the liar were silent where it lies, and name it; "wrong" counts runs that
end otherwise, or take a lie without a word. Each lie is told to each method before one is told again.
Run `python -m benchmarks.attacks lying_nodes`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from safetensors.torch import save
from torch import nn

import hierfl
from hierfl import methods, models, optimizers
from hierfl.core.trees import named_leaves, tree_map
from hierfl.method import Method
from hierfl.nodes import Answer, FitOverNodes
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.client_state import Node, forget
from hierfl.nodes.messages import from_bytes, to_bytes
from hierfl.nodes.node import answer, node
from hierfl.nodes.run import fit_nodes

LIAR, ROUNDS, LONGEST = "north", 3, 60.0  # seconds that a run may take
LATE = "weighting"  # two_stage, to whose last stage alone the liar lies
NAMES = ("east", "north", "south", "west")
Lie = Callable[[Any], Any]


def rows() -> hierfl.ClientData:
    """Return four clients of 30 rows."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, generator=g, dtype=torch.float64)
    y = x.sum(1) + torch.randn(120, generator=g, dtype=torch.float64)
    return hierfl.ClientData.from_arrays([n for n in NAMES for _ in range(30)], x=x, y=y)


def runs() -> dict[str, tuple[Method, hierfl.ClientData]]:
    """Return the methods that a node lies to, with the rows."""
    data = rows()
    labels = data.with_fields(y=(data.fields["y"] > 0).double())
    binary: Any = models.regression("bernoulli", prior_scale=dist.HalfNormal(0.5), centered=True)
    normal: Any = models.regression("gaussian", prior_scale=dist.HalfNormal(0.5), centered=True)
    net = models.network(nn.Linear(2, 1), likelihood=models.likelihood.normal(1.0))
    plain = methods.fedavg(net, optimizer=optimizers.SGD(0.05), steps=2, batch_size=8)
    return {
        "two_stage": (methods.two_stage(binary, draws=200), labels),
        LATE: (methods.two_stage(binary, draws=200), labels),
        "exact": (methods.two_stage(normal, draws=200), data),
        "pvi": (methods.pvi(binary, draws=4, steps=1), labels),
        "fedavg": (plain, data),
        "fedsvi": (methods.fedsvi(binary, local_steps=2), labels),
    }


# ------------------------------------------------------------ lies, of an update's tree
def _matrices(change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Change each square matrix, or each tensor where there is none."""

    def lie(up: Any) -> Any:
        found = any(_is_square(v) for v in named_leaves(up).values())
        return tree_map(lambda v: change(v) if _is_square(v) or not found else v, up)

    return lie


def _is_square(value: torch.Tensor) -> bool:
    return value.dim() == 3 and value.shape[1] == value.shape[2]


def _shares(value: float | None, weight: float | None) -> Lie:
    """Say another value of each single number, or another weight of each share."""

    def lie(up: Any) -> Any:
        made = {}
        for name, share in up.items():
            if len(share) == 2 and value is not None and share[0] is not None:
                alone = isinstance(share[0], torch.Tensor) and share[0].numel() == 1
                share = (torch.full_like(share[0], value) if alone else share[0], share[1])
            if len(share) == 2 and weight is not None:
                share = (share[0], torch.full_like(share[1], weight))
            made[name] = share
        return made

    return lie


def _turned(value: torch.Tensor) -> torch.Tensor:
    if value.dim() < 2:  # no matrix, and a lie of another kind
        return value * float("nan")
    return value + torch.ones_like(value).triu(1) * (1.0 + value.abs().max())


def _with_values(share: Any, value: float) -> Any:
    """Return a share with one number everywhere in its value, and its own weight."""
    return (tree_map(lambda v: torch.full_like(v, value), share[0]), *share[1:])


LIES: dict[str, Lie] = {
    "a negative definite factor": _matrices(
        lambda v: -1e4 * (1.0 + v.abs().max()) * torch.ones_like(v)
    ),
    "a factor that is not symmetric": _matrices(_turned),
    "single numbers of 1e14": _shares(1e14, None),
    "a weight of 1e12": _shares(None, 1e12),
    "a negative weight": _shares(None, -1.0),
    "NaN": lambda up: tree_map(lambda v: v * float("nan"), up),
    "infinity": lambda up: tree_map(lambda v: v + float("inf"), up),
    "numbers of 1e30": lambda up: tree_map(lambda v: v + 1e30, up),
    "numbers of 1e14": lambda up: tree_map(lambda v: v + 1e14, up),
    "values of 1e14": lambda up: {name: _with_values(share, 1e14) for name, share in up.items()},
    "values of -1e14": lambda up: {name: _with_values(share, -1e14) for name, share in up.items()},
    "no values": lambda up: {name: ((), *share[1:]) for name, share in up.items()},
    "another dtype": lambda up: tree_map(lambda v: v.to(torch.int32), up),
    "another shape": lambda up: tree_map(lambda v: v[None].clone(), up),
    "a name too few": lambda up: dict(list(up.items())[1:]),
    "a name too many": lambda up: {**up, "more": torch.ones(1)},
    "a list": lambda up: [up],
}


# a gradient that looks right: what moves a mean is for `methods.robust`
NO_FACTOR = {(lie, "fedsvi") for lie in LIES if "factor" in lie}


def _deep(content: bytes) -> bytes:
    tree = '{"dict":{"a":' * 5000 + "0" + "}}" * 5000
    return save({"0": torch.ones(1)}, {"hierfl": f'{{"tree":{tree},"about":{{}}}}'})


BYTES: dict[str, Callable[[bytes], bytes | None]] = {
    "deep JSON": _deep,
    "an unknown dtype": lambda c: save(
        {"0": torch.ones(1, dtype=torch.bfloat16)}, {"hierfl": "{}"}
    ),
    "no bytes": lambda c: None,
    "a part of the bytes": lambda c: c[: len(c) // 2],
    "a gigabyte of names": lambda c: c + bytes(1 << 22),
    "JSON alone": lambda c: json.dumps([1, 2]).encode(),
    "another client": lambda c: _about(c, {"client": "east"}),
    "another round": lambda c: _about(c, {"round": 77}),
}


def _about(content: bytes, other: Mapping[str, Any]) -> bytes:
    found = from_bytes(content, most=1 << 24)
    return to_bytes(found.tree, {**found.about, **other})


def told(content: bytes, lie: str | Callable[[bytes], bytes]) -> bytes | None:
    """Return what a liar sends in place of an update."""
    if not isinstance(lie, str):
        return lie(content)
    if lie in BYTES:
        return BYTES[lie](content)
    found = from_bytes(content, most=1 << 24)
    return to_bytes(LIES[lie](found.tree), found.about)


# ------------------------------------------------------------ runs
class Around(NamedTuple):
    """Four nodes of a method, and what they agree on."""

    method: Method
    agreement: Agreement
    nodes: dict[str, Node]
    first_answers: dict[tuple[str, bytes], bytes]  # of a first round, which is the same in all runs


def around(kind: tuple[Method, hierfl.ClientData], root: Path) -> Around:
    """Set up the nodes of a method in folders under `root`."""
    method, data = kind
    parts = {name: data.select([name]) for name in data.names}
    agreement = Agreement.between([Introduction.of(part) for part in parts.values()])
    nodes = {name: node(method, part, agreement, root / name) for name, part in parts.items()}
    return Around(method, agreement, nodes, {})


def lied_to(
    made: Around,
    lie: str | Callable[[bytes], bytes] | None,
    rounds: int = ROUNDS,
    *,
    late: bool = False,
) -> Ended:
    """Run over four nodes from the beginning, of which one lies; without a lie it is silent.

    `late`: it is honest until log ratios are asked for.
    """
    lied: set[int] = set()
    is_first = rounds == 1 and not late
    for node_of in made.nodes.values() if not is_first or not made.first_answers else ():
        forget(node_of)

    def honest(name: str, content: bytes) -> bytes:
        if not is_first:
            return answer(made.nodes[name], content)
        if (name, content) not in made.first_answers:
            made.first_answers[name, content] = answer(made.nodes[name], content)
        return made.first_answers[name, content]

    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        for name, content in contents.items():
            given = honest(name, content)
            found = from_bytes(given, most=1 << 24)
            if name == LIAR and not (late and "log_ratios" not in found.tree):
                lied.add(found.about["round"])
                yield Answer(name, None if lie is None else told(given, lie))
            else:
                yield Answer(name, given)

    most = None if late else min(rounds, made.method.most_rounds or rounds)
    return Ended(fit_nodes(made.method, made.agreement, ask, rounds=most), lied)


class Ended(NamedTuple):
    """A run, and the rounds in which the liar lied."""

    fit: FitOverNodes
    lied: set[int]


def is_named(run: Ended) -> bool:
    """Return whether the liar, and nobody else, is left out of every round in which it lied."""
    named = [[one["client"] for one in of] for of in run.fit.history["left_out"]]
    return named == [[LIAR] if k in run.lied else [] for k in range(len(named))]


def same(one: Ended, other: Ended) -> bool:
    """Return whether two runs end with the same message, which the posterior is drawn from."""
    here, there = named_leaves(one.fit.message), named_leaves(other.fit.message)
    return all(torch.equal(value, there[name]) for name, value in here.items())


def attack(n: int = 100, seed: int = 0, first: int = 0) -> dict[str, int]:
    """Run n times, from number `first` on, with one liar among four nodes; count how the runs end."""
    counts = dict.fromkeys(("right", "refused", "wrong", "raw"), 0)
    dtype = torch.get_default_dtype()
    pairs = [one for one in product([*LIES, *BYTES], runs()) if one not in NO_FACTOR]
    random.Random(seed).shuffle(pairs)
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float64)
        try:
            kinds: dict[str, Around] = {}
            honest: dict[str, Ended] = {}
            for number in range(first, first + n):
                lie, name = pairs[number % len(pairs)]
                if name not in kinds:
                    kinds[name] = around(runs()[name], Path(root) / name)
                    honest[name] = lied_to(kinds[name], None, late=name == LATE)
                began = time.monotonic()
                try:
                    ended = lied_to(kinds[name], lie, late=name == LATE)
                    good = is_named(ended) and same(ended, honest[name])
                    late = time.monotonic() - began > LONGEST
                    found = "right" if good and not late else "wrong"
                except Exception as error:
                    found = "raw"
                    print(f"{name}, {lie}: {type(error).__name__}: {error}", file=sys.stderr)
                counts[found] += 1
                if found == "wrong":
                    print(f"run {number}, {name}, {lie}: not as without the liar", file=sys.stderr)
        finally:
            torch.set_default_dtype(dtype)
    return counts
