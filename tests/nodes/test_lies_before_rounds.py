"""One node of four lies in a field of an answer before the rounds: no run ends, and no lie is silent."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.nodes import Answer, over, station
from hierfl.nodes.envelope import read_answer, read_request, write_answer

LIAR, NODES = "north", ("east", "north", "south", "west")
FORMULA = hierfl.formula("y ~ scale(x) + sex + (1 | hospital)", "gaussian", clients="hospital")
KINDS = ("schema 0", "schema 1", "schema 2", "schema 3", "schema 4", "introduce", "agree")
EVERY = bool(os.environ.get("HIERFL_SLOW"))
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
LIES: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "1e308": 1e308,
    "-1e308": -1e308,
    "0": 0,
    "-7": -7,
    "2 ** 40": 1 << 40,
    "a text": "lie",
    "null": None,
    "a list": [1, 2],
    "a dict": {"lie": 1},
    "deep": DEEP,
}
# sums that other rows of one's own would have: nothing tells them from honest ones
OF_SOME_ROWS = {("total", "0"), ("total", "-7"), ("squares", "2 ** 40")}


def frames() -> dict[str, pd.DataFrame]:
    """Return 40 rows of each of four nodes."""
    rng = np.random.default_rng(0)
    parts = {}
    for name in NODES:
        x, sex = rng.normal(50.0, 9.0, 40), rng.choice(["f", "m"], 40)
        y = 0.1 * x + (sex == "m") + rng.normal(size=40)
        parts[name] = pd.DataFrame({"x": x, "sex": sex, "y": y})
    return parts


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values inside a JSON value, itself first."""
    yield path
    inside = value.items() if isinstance(value, dict) else ()
    for key, part in [*inside, *(enumerate(value) if isinstance(value, list) else ())]:
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], lie: Any) -> Any:
    """Return a JSON value with a lie at a path."""
    if not path:
        return lie
    whole = copy.deepcopy(value)
    at = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = lie
    return whole


class Lying:
    """Four nodes in memory, of which one changes its answer to one request."""

    def __init__(self, folder: Path, kind: str, path: tuple[Any, ...] | None, lie: Any) -> None:
        self.stations = {
            name: station(FORMULA, {name: rows}, folder / name) for name, rows in frames().items()
        }
        self.kind, self.path, self.lie = kind, path, lie
        self.seen: dict[str, Any] = {}

    def ask(self, requests: Mapping[str, bytes]) -> Iterator[Answer]:
        for name, request in requests.items():
            answer = self.stations[name].answer(request)
            if name == LIAR:
                answer = self._lied(request, answer)
            yield Answer(name, answer)

    def _lied(self, request: bytes, answer: bytes) -> bytes:
        kind = read_request(request)[0]
        if kind == "schema":
            kind = f"schema {sum(name.startswith('schema') for name in self.seen)}"
        if kind == "round":
            return answer
        self.seen[kind] = json.loads(read_answer(request, answer))
        if kind != self.kind or self.path is None:
            return answer
        whole = replaced(self.seen[kind], self.path, self.lie)
        return write_answer(request, json.dumps(whole).encode())

    def fit(self) -> tuple[tuple[str, ...], str]:
        """Return the clients of the fit, and all that it says of those who are left out."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = hierfl.nodes.fit(FORMULA, over(self.ask, NODES), seed=0)
        return found.clients, " ".join(str(one.message) for one in said)


def lies_of(folder: Path, kind: str) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the places of an answer, and the lies there; a spread of them unless all are asked for."""
    honest = Lying(folder / "honest", kind, None, None)
    assert honest.fit()[0] == NODES
    if kind not in honest.seen:
        return
    every = [(path, lie) for path in places(honest.seen[kind]) for lie in LIES]
    yield from every if EVERY else islice(every, 0, None, max(1, len(every) // 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_lie_ends_no_run_and_is_not_silent(kind: str, tmp_path: Path) -> None:
    honest = None
    for k, (path, lie) in enumerate(lies_of(tmp_path, kind)):
        lying = Lying(tmp_path / str(k), kind, path, LIES[lie])
        clients, said = lying.fit()
        assert set(clients) >= set(NODES) - {LIAR}, (path, lie)
        if LIAR in clients:
            told = lying.seen[kind]
            for key in path:
                told = told[key]
            honest = honest or told
            plausible = isinstance(told, str | list | dict) or LIES[lie] == told
            plausible |= (*path[-1:], lie) in OF_SOME_ROWS
            assert plausible, (path, lie, told)
        else:
            assert LIAR in said, (path, lie)
