"""Lies in each field of an answer, of tensors or JSON, of one node of four."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hierfl.core.trees import Tree
from hierfl.nodes.messages import from_bytes, to_bytes

NUMBERS = {
    "nan": float("nan"),
    "inf": float("inf"),
    "1e308": 1e308,
    "-1e308": -1e308,
    "0": 0.0,
    "-7": -7.0,
    "2 ** 40": 2.0**40,
}
SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "another dtype": lambda v: v.to(torch.int32),
    "another shape": lambda v: v[None].clone(),
    "too few numbers": lambda v: v.flatten()[:0],
    "a list": lambda v: [v],
}
PLAUSIBLE = ("0", "-7")  # other rows have them


def first_as(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change of the first entry of a tensor."""

    def change(value: torch.Tensor) -> torch.Tensor:
        made = value.clone()
        made.view(-1)[:1] = number
        return made

    return change


LIES = {**{name: first_as(number) for name, number in NUMBERS.items()}, **SHAPES}


def leaves(tree: Tree, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of the tensors of a tree."""
    if isinstance(tree, torch.Tensor):
        yield path
    else:
        inside = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in inside:
            yield from leaves(value, (*path, key))


def changed(tree: Tree, path: tuple[Any, ...], change: Callable[[torch.Tensor], Any]) -> Tree:
    """Return a tree with another tensor at a place."""
    if not path:
        return change(tree)
    if isinstance(tree, Mapping):
        return {k: changed(v, path[1:], change) if k == path[0] else v for k, v in tree.items()}
    made = [changed(v, path[1:], change) if k == path[0] else v for k, v in enumerate(tree)]
    return made if isinstance(tree, list) else tuple(made)


def lies_of(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what is said in place of a message, with a name: in each of its tensors, and in what it says of itself."""
    tree, about = from_bytes(content, most=1 << 24)
    for path in leaves(tree):
        for name, change in LIES.items():
            yield f"{path} {name}", to_bytes(changed(tree, path, change), about)
    if isinstance(tree, Mapping):
        yield "one too many", to_bytes({**tree, "more": torch.ones(1)}, about)
        for key in tree:
            yield f"no {key}", to_bytes({k: v for k, v in tree.items() if k != key}, about)
    yield "says more", to_bytes(tree, {**about, "rows": -7})
    for key in about.keys() & {"run", "client", "round", "kind"}:
        for lie in ("lie", None, -7, [1], 2**40):
            yield f"{key} {lie}", to_bytes(tree, {**about, key: lie})
    if "few" in about:
        few: list[Any] = ["lie", None, [1], {"more": [0]}, {"more": 0}]
        for groups in (*few, *({site: [-1]} for site in tree)):
            yield f"few {groups}", to_bytes(tree, {**about, "few": groups})


DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
JSON_LIES: dict[str, Any] = {
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
    "nothing": None,  # the field is not there
    "one too many": None,  # beside the fields that are there
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values inside a JSON value, itself first; of long lists some."""
    yield path
    inside = value.items() if isinstance(value, dict) else ()
    listed = list(enumerate(value)) if isinstance(value, list) else []
    for key, part in [*inside, *listed[:: max(1, len(listed) // 12)]]:
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], lie: str) -> Any:
    """Return a JSON value with a lie at a path."""
    if not path:
        return JSON_LIES[lie]
    whole = copy.deepcopy(value)
    inner = at(whole, path[:-1])
    if lie == "nothing":
        del inner[path[-1]]
    elif lie == "one too many":
        if isinstance(inner, dict):
            inner["another"] = inner[path[-1]]
        else:
            inner.append(inner[path[-1]])
    else:
        inner[path[-1]] = JSON_LIES[lie]
    return whole


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
