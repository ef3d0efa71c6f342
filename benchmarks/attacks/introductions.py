"""Crafted introductions: each is refused, or the others agree, and go through a round, beside it.

"wrong" counts introductions by which a run of three honest nodes cannot begin, is of another method, or
cannot be set up in time. Run `python -m benchmarks.attacks introductions`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch

import hierfl
from benchmarks.attacks.lying_nodes import LIAR, rows
from benchmarks.attacks.mutations import mutated
from hierfl.nodes import Answer, Refused
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.choosing import Decided, FitCall
from hierfl.nodes.client_state import Node
from hierfl.nodes.gathering import fit_introduced
from hierfl.nodes.messages import read_json, read_typed
from hierfl.nodes.node import answer, introduced, node

LONGEST = 20.0  # seconds that a server may take for one
VALUES: tuple[Any, ...] = (1 << 40, -1, 0, True, 1e300, None, "x" * 5000, [], {}, "float32", [[1]])


ROWS = (1, 10**6, 10**7, 10**9)  # that a client may have
NAMES = ("../../up", "a/b", "east", ".", "Charit\u00e9", "x" * 1000, " ", "nan")
FIELDS: tuple[list[Any], ...] = (
    ["float32"],
    ["float64", 3],
    ["float64", 1 << 20],
    ["int64", 2],
    ["bool"],
    [],
)


def crafted(honest: Any, how: random.Random) -> str:
    """Return the JSON of an introduction with something else at a place; half of them can be read."""
    found = json.loads(json.dumps(honest))
    kind = how.randrange(11)
    if kind == 0:
        found["rows"] = how.choice(VALUES)
    elif kind == 1:
        found["form"]["fields"]["x"] = how.choice([["float64", 1 << 40], ["quint8", 2], ["y"], 3])
    elif kind == 2:
        found["codes"] = how.choice([{"y": [0, 1 << 60]}, {"y": [3, 1]}, {"y": 3}, []])
    elif kind == 3:
        return "[" * 100_000 + "]" * 100_000
    elif kind == 4:
        found = mutated(found, how)
    elif kind == 5:
        found["rows"] = how.choice(ROWS)
    elif kind == 6:
        found["client"] = how.choice(NAMES)
    elif kind == 7:
        found["form"]["fields"][how.choice(["x", "y", "z"])] = how.choice(FIELDS)
    elif kind == 8:
        found["codes"] = {how.choice(["x", "y", "z"]): [0, 1 << 30]}
    elif kind == 10:
        found["codes"]["region"] = how.choice([[0, 1 << 31], [-(1 << 31), 1], [0, 3], [0, 9]])
    else:
        found["form"][how.choice(["features", "levels"])] = {"x": ["a"] * how.choice([1, 2, 10**5])}
    return json.dumps(found)


def by_region(batch: Any) -> None:
    """A hierarchy of slopes, with an effect of each of two regions, which rows name by their codes."""
    center = pyro.sample("center", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(center, 0.5).to_event(1))
        with batch.data():
            mean = (batch.x * slope).sum(-1) + effect[batch.region]
            pyro.sample("y", dist.Normal(mean, 1.0), obs=batch.y)


def four() -> hierfl.ClientData:
    """Return the rows of the four clients, with a region."""
    data = rows()
    return data.with_fields(region=torch.arange(data.num_rows) % 2)


def outcome(text: str, others: list[Introduction]) -> str:
    """Read one introduction beside those of others, and fit a model over these.

    Say "refused", "right", "wrong" or "raw". It is wrong as well if another method is chosen.
    """
    try:
        found = read_typed(Introduction, read_json(text), "introduction")
    except Refused:
        return "refused"
    data, nodes = four(), dict[str, Node]()
    honest = {one.client for one in others} - {found.client}  # one that is named twice is no one

    def agree(agreement: Agreement, run: Decided, ids: Mapping[str, int]) -> Any:
        there = honest & ids.keys()
        folder = Path(tempfile.mkdtemp(dir=root))
        for name in there:
            nodes[name] = node(run.method, data.select([name]), agreement, folder / name)
        starts = {name: introduced(nodes[name])["start"] for name in there}
        return starts, dict.fromkeys(ids.keys() - there, "it is silent")

    def ask(contents: Mapping[str, bytes]) -> Iterator[Answer]:
        for name in contents.keys() & nodes.keys():
            yield Answer(name, answer(nodes[name], contents[name]))

    with tempfile.TemporaryDirectory() as root:
        every = dict(enumerate([*others, found]))
        fitted = fit_introduced(FitCall(by_region), every, 1, agree, lambda ids: ask)
    counted = fitted.history["clients"].tolist()
    good = set(counted) == {len(honest)} and fitted.method.name == "two_stage"
    return "right" if good else "wrong"


def attack(n: int = 100, seed: int = 0) -> dict[str, int]:
    """Read n crafted introductions beside three honest ones, and count what becomes of them."""
    counts, how = dict.fromkeys(("right", "refused", "wrong", "raw"), 0), random.Random(seed)
    data, dtype = four(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        others = [Introduction.of(data.select([n])) for n in data.names if n != LIAR]
        honest = asdict(Introduction.of(data.select([LIAR])))
        for k in range(n):
            began = time.monotonic()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = outcome(crafted(honest, how), others)
            except Exception as error:
                found = "raw"
                print(f"introduction {k}: {type(error).__name__}: {error}", file=sys.stderr)
            found = "wrong" if time.monotonic() - began > LONGEST else found
            counts[found] += 1
    finally:
        torch.set_default_dtype(dtype)
    return counts
