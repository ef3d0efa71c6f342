"""Requests to nodes and their answers: trees of tensors as safetensors, with JSON; reading them runs no code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import torch
from msgspec import Meta
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.core.typed_json import made_of, read_as
from hierfl.method import Client

ENTRY = "hierfl"  # one entry of metadata, as safetensors writes several in no fixed order
DEEPEST = 32  # levels of a tree
HEADER = 1 << 20  # bytes of names and shapes, beside the numbers
JSON = 1 << 24  # characters; they take 24 times as many bytes of memory
LARGEST = 1e15  # of an honest update; squares of larger values overflow in single precision
NAMES = "float32 float64 int8 int16 int32 int64 uint8 bool".split()
DTYPES = frozenset(getattr(torch, name) for name in NAMES)

Made = TypeVar("Made")


class Refused(ValueError):
    """A message that is not what it should be; the error says what, and no value of the rows."""

    logged = False  # by the node

    def __init__(self, text: str) -> None:
        """Keep what may be another machine's words for a terminal, whose cursor they cannot move."""
        super().__init__("".join(of if of.isprintable() else " " for of in text))


class NodeFailed(RuntimeError):
    """A node cannot answer; the message names client and round, and no value of the rows."""

    logged = False  # by the node


class Message(NamedTuple):
    """A tree of tensors in dicts, lists and tuples, and JSON about it, such as the round."""

    tree: Tree
    about: Mapping[str, Any]


def to_bytes(tree: Tree, about: Mapping[str, Any]) -> bytes:
    """Write a tree of tensors in dicts, lists and tuples; named tuples are read back as tuples."""
    leaves: dict[str, Tensor] = {}
    form = _form(tree, leaves)
    content: bytes = save(leaves, {ENTRY: json.dumps({"tree": form, "about": about})})
    return content


def _form(tree: Tree, leaves: dict[str, Tensor]) -> Any:
    """Return a tree with indices in place of its tensors, and collect the tensors."""
    if isinstance(tree, Tensor):
        place = str(len(leaves))
        # of its own memory: safetensors refuses tensors that share it
        leaves[place] = tree.detach().cpu().contiguous().clone()
        return int(place)
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"a message has keys {list(tree)}: they must be strings")
        return {"dict": {key: _form(part, leaves) for key, part in tree.items()}}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_form(part, leaves) for part in tree]}
    raise TypeError(f"a message holds a {type(tree).__name__}: it may hold tensors alone")


def from_bytes(content: object, *, most: int = 1 << 31) -> Message:
    """Read what `to_bytes` wrote: tensors of at most `most` bytes, names and shapes of a mebibyte."""
    if not isinstance(content, bytes):
        raise Refused(f"it is a {type(content).__name__}, not bytes")
    if len(content) > most + HEADER:
        raise Refused(f"it has {len(content):,} bytes, and {most + HEADER:,} at most were expected")
    try:
        leaves: dict[str, Tensor] = load(content)
        header = read_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        whole = read_json(header["__metadata__"][ENTRY])
        form, about = whole["tree"], dict(whole["about"].items())
    except Exception as error:  # a reader of crafted bytes may raise anything
        why = f"{type(error).__name__}: {str(error)[:100]}"
        raise Refused(f"it is not a message of hierfl ({why})") from error
    if any(leaf.dtype not in DTYPES for leaf in leaves.values()):
        raise Refused(f"it holds tensors of {sorted({str(v.dtype) for v in leaves.values()})}")
    unused = dict(leaves)
    tree = _built(form, leaves, unused, 0)
    if unused:
        raise Refused(f"it holds {len(unused)} tensors that are nowhere in its tree")
    return Message(tree, about)


def read_json(content: object, most: int = JSON) -> Any:
    """Read JSON that came from elsewhere, of numbers that are finite and of few levels."""
    if not isinstance(content, bytes | str):
        raise Refused(f"it is a {type(content).__name__}, not JSON")
    try:
        return read_as(Any, content, most=most)
    except ValueError as error:
        raise Refused(f"it is not JSON ({error})") from error


def read_typed(kind: type[Made], content: object, called: str) -> Made:
    """Read JSON, or what it holds, as a dataclass, or raise Refused."""
    try:
        return made_of(kind, read_json(content) if isinstance(content, bytes) else content)
    except ValueError as error:
        article = "an" if called[0] in "aeiou" else "a"
        raise Refused(f"it is not {article} {called} ({error})") from error


def _built(form: Any, leaves: Mapping[str, Tensor], unused: dict[str, Tensor], depth: int) -> Tree:
    """Return the tree of a form, and take its tensors from those that are not used yet."""
    if depth > DEEPEST:
        raise Refused(f"its tree has more than {DEEPEST} levels")
    if isinstance(form, int) and not isinstance(form, bool):
        if str(form) not in leaves:
            raise Refused(f"its tree has a tensor {form}, which is not there")
        unused.pop(str(form), None)
        return leaves[str(form)]
    if isinstance(form, dict) and len(form) == 1:
        ((kind, parts),) = form.items()
        if kind == "dict" and isinstance(parts, dict):
            return {key: _built(part, leaves, unused, depth + 1) for key, part in parts.items()}
        if kind in ("list", "tuple") and isinstance(parts, list):
            made = [_built(part, leaves, unused, depth + 1) for part in parts]
            return made if kind == "list" else tuple(made)
    raise Refused("its tree is not made of dicts, lists, tuples and tensors")


def like(tree: Tree, template: Tree, *, finite: bool = True) -> Tree:
    """Return a tree like a template in names, shapes and dtypes; `finite` also refuses values beyond 1e15."""
    leaves, expected = dict(_named(tree, "")), dict(_named(template, ""))
    if unknown := sorted(leaves.keys() - expected.keys()):
        raise Refused(f"it has {_list(unknown)}, which nobody asked for")
    if missing := sorted(expected.keys() - leaves.keys()):
        raise Refused(f"it lacks {_list(missing)}")
    for name, leaf in expected.items():
        own = leaves[name]
        for what, its, right in (
            ("is of", own.dtype, leaf.dtype),
            ("has shape", tuple(own.shape), tuple(leaf.shape)),
        ):
            if its != right:
                raise Refused(f"{name} {what} {its}, and {right} was expected")
    if finite:
        check_numbers(tree)
    return tree_unflatten([leaves[name] for name in expected], tree_structure(template))


def check_numbers(tree: Tree) -> None:
    """Refuse a tree with a value that is not finite, or larger than 1e15."""
    for name, leaf in _named(tree, ""):
        largest = float(leaf.abs().max()) if leaf.is_floating_point() and leaf.numel() else 0.0
        if not largest <= LARGEST:
            size = f"has a number of {largest:.1e}, above {LARGEST:.0e}"
            raise Refused(f"{name} {size if isfinite(largest) else 'is not finite'}")


def check_about(about: Mapping[str, Any], expected: Mapping[str, Any], *beside: str) -> None:
    """Refuse an answer that says anything else of itself than was expected, what stands `beside` it aside."""
    own = {name: of for name, of in about.items() if name not in beside}
    if own != expected:
        said = ", ".join(f"{str(name)[:40]} {str(of)[:40]}" for name, of in own.items())
        raise Refused(f"its answer is of {said[:200] or 'no run'}")


def _named(tree: Tree, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree by their places, with the kinds of what holds them."""
    if isinstance(tree, Tensor):
        yield path or "it", tree
    elif isinstance(tree, Mapping):
        for key, part in tree.items():
            # as repr writes it: a key with signs of paths would else pass for what lies elsewhere
            yield from _named(part, f"{path}[{key!r}]")
    else:
        mark = "[{}]" if isinstance(tree, list) else "({})"
        for number, part in enumerate(tree):
            yield from _named(part, path + mark.format(number))


def _list(names: list[str]) -> str:
    return ", ".join(name[:80] for name in names[:3]) + ", ..." * (len(names) > 3)


Round = Annotated[int, Meta(ge=0, lt=1 << 31)]
Counted = Annotated[int, Meta(ge=-1, lt=1 << 31)]  # -1: in no round
# of answers about the client; "imputed" never leaves: it has a value of each row
AfterKind = Literal["summaries", "draws", "predictions", "scores", "imputed"]
AFTER: tuple[str, ...] = get_args(AfterKind)
ROUND = "round"  # kind of a request in the rounds; others are questions
SILENT = "it did not answer"
COUNTED = "counted"  # of the history: in which round each client that stayed was last counted


class Answer(NamedTuple):
    """What came back from a node: the name of its client, and bytes; None: there are none, for a reason."""

    client: str
    content: bytes | None
    reason: str = ""


@dataclass(frozen=True)
class RoundRequest:
    """A client's update in a round of a run; it was last counted in round `counted`."""

    run: str
    round: Round
    counted: Counted
    kind: Literal["round"] = "round"


@dataclass(frozen=True)
class StateRequest:
    """An answer about a client under the state after `rounds` rounds, which may be that of the run's end."""

    kind: AfterKind | Literal["end"]
    run: str
    rounds: Round
    counted: Counted
    ends: bool
    draws: Annotated[int, Meta(ge=1, le=100_000)] = 1
    seed: Annotated[int, Meta(gt=-(1 << 63), le=(1 << 63) - 1)] = 0
    site: str | None = None


Ask = Callable[[Mapping[str, bytes]], Iterable[Answer]]


def last_counted(federation: Any, history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the last round in which each client was counted, without clients that never were."""
    data, counted = federation.data, dict[str, int]()
    for record in history:
        if COUNTED in record:  # it is known, as where a client has left and no round was run
            counted = {of["client"]: int(of["round"]) for of in record[COUNTED]}
            continue
        ids = noise.cohort(federation.seed, record["round"], data.num_clients, federation.cohort)
        left_out = {of["client"] for of in record.get("left_out", ())}
        cohort = {data.names[int(i)] for i in data.by_name[ids]}
        counted.update(dict.fromkeys(cohort - left_out, int(record["round"])))
    return counted


def mail_of(client: Client, own: Tree, place: int) -> Tree:
    """Return what the server has for the client at a place of the states, `own`; {}: nothing."""
    return tree_map(lambda v: v[place], client.mail_in(own)) if client.mail else {}
