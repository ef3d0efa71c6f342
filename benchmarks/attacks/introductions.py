"""Crafted introductions: each is refused, or the others agree without the node that sent it.

"wrong" counts introductions by which a run of three honest nodes cannot begin, or a run that a server
cannot set up in time. Run `python -m benchmarks.attacks introductions`.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from typing import Any

import pyro.distributions as dist
import torch

import hierfl
from benchmarks.attacks.lying_nodes import LIAR, rows
from benchmarks.attacks.mutations import mutated
from hierfl import methods, models
from hierfl.nodes import Agreement, Introduction, Refused
from hierfl.nodes.messages import read_json
from hierfl.program.read import read

LONGEST = 20.0  # seconds that a server may take for one
VALUES: tuple[Any, ...] = (1 << 40, -1, 0, True, 1e300, None, "x" * 5000, [], {}, "float32", [[1]])


def crafted(honest: Any, how: random.Random) -> str:
    """Return the JSON of an introduction with something else at a place."""
    found = json.loads(json.dumps(honest))
    kind = how.randrange(5)
    if kind == 0:
        found["rows"] = how.choice(VALUES)
    elif kind == 1:
        found["form"]["fields"]["x"] = how.choice([["float64", 1 << 40], ["quint8", 2], ["y"], 3])
    elif kind == 2:
        found["codes"] = how.choice([{"y": [0, 1 << 60]}, {"y": [3, 1]}, {"y": 3}, []])
    elif kind == 3:
        return "[" * 100_000 + "]" * 100_000
    else:
        found = mutated(found, how)
    return json.dumps(found)


def outcome(text: str, others: list[Introduction]) -> str:
    """Read one introduction beside those of others; say "refused", "right", "wrong" or "raw"."""
    try:
        found = Introduction.from_json(read_json(text))
    except Refused:
        return "refused"
    agreement, _ = Agreement.of_most([*others, found])
    if not {one.client for one in others} - {found.client} <= set(agreement.names):
        return "wrong"
    model: Any = models.regression("gaussian", prior_scale=dist.HalfNormal(0.5), centered=True)
    method = methods.fedsvi(model)
    data = hierfl.data.absent.stand_in(agreement.absent_rows((0.0, 1.0)), 0)
    agreement.agreed(read(method.model, method.guide, data))
    return "right"


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
