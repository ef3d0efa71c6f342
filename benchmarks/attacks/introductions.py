"""Crafted introductions: each is refused, or the others agree, and go through a round, beside it.

"wrong" counts introductions by which a run of three honest nodes cannot begin, or a run that a server
cannot set up in time. Run `python -m benchmarks.attacks introductions`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch

from benchmarks.attacks.lying_nodes import LIAR, rows
from benchmarks.attacks.mutations import mutated
from hierfl import methods, models
from hierfl.nodes import (
    Agreement,
    Answer,
    Introduction,
    Refused,
    answer,
    fit_nodes,
    node,
)
from hierfl.nodes.messages import read_json

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
    kind = how.randrange(10)
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
    else:
        found["form"][how.choice(["features", "levels"])] = {"x": ["a"] * how.choice([1, 2, 10**5])}
    return json.dumps(found)


def outcome(text: str, others: list[Introduction]) -> str:
    """Read one introduction beside those of others, and run a round over these.

    Say "refused", "right", "wrong" or "raw".
    """
    try:
        found = Introduction.from_json(read_json(text))
    except Refused:
        return "refused"
    agreement, _ = Agreement.of_most([*others, found])
    if not {one.client for one in others} - {found.client} <= set(agreement.names):
        return "wrong"
    model: Any = models.regression("gaussian", prior_scale=dist.HalfNormal(0.5), centered=True)
    data = rows()
    with tempfile.TemporaryDirectory() as root:
        method = methods.fedsvi(model)
        nodes = {
            name: node(method, data.select([name]), agreement, Path(root) / name)
            for name in agreement.names
            if name in data.names and name != found.client
        }

        def ask(contents: Mapping[str, bytes]) -> Iterator[Answer]:
            for name in contents.keys() & nodes.keys():
                yield Answer(name, answer(nodes[name], contents[name]))

        fitted = fit_nodes(method, agreement, ask, rounds=1)
    return "right" if fitted.history["clients"][0] == len(nodes) else "wrong"


def attack(n: int = 100, seed: int = 0) -> dict[str, int]:
    """Read n crafted introductions beside three honest ones, and count what becomes of them."""
    counts, how = dict.fromkeys(("right", "refused", "wrong", "raw"), 0), random.Random(seed)
    data, dtype = rows(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        others = [Introduction.of(data.select([n])) for n in data.names if n != LIAR]
        honest = Introduction.of(data.select([LIAR])).as_json()
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
