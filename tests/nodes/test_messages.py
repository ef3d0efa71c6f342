"""Messages as bytes: what is written is read, and nothing else is."""

import io
import json
import pickle
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save

from hierfl import LogShare, Share
from hierfl.core.trees import named_leaves, tree_map
from hierfl.method import Each
from hierfl.nodes.agreement import Introduction
from hierfl.nodes.messages import (
    HEADER,
    JSON,
    LARGEST,
    Refused,
    check_about,
    from_bytes,
    like,
    read_json,
    read_typed,
    to_bytes,
)

TREE: Any = {
    "theta": Share({"weight": torch.arange(6.0).reshape(2, 3), "empty": {}}, torch.tensor([3.0])),
    "own": Each({"codes": torch.tensor([[1, 2]]), "flag": torch.tensor([True])}),
    "log": LogShare([torch.zeros(1, 0), torch.full((1,), -1e6)], torch.tensor([-2.0])),
}
GOOD = to_bytes(TREE, {"round": 3})


def test_what_is_written_is_read() -> None:
    found = from_bytes(GOOD, most=1 << 12)
    assert found.about == {"round": 3}
    back = like(found.tree, TREE)
    assert type(back["theta"]) is Share and type(back["log"]) is LogShare
    here, there = named_leaves(TREE), named_leaves(back)
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert value.dtype == there[name].dtype and torch.equal(value, there[name])


def test_tensors_that_share_memory_are_written() -> None:
    base = torch.arange(4.0)
    found = from_bytes(to_bytes({"a": base[:2], "b": base[1:], "c": base}, {}), most=1 << 12)
    assert [v.tolist() for v in found.tree.values()] == [[0, 1], [1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("wrong", [{"a": 1.0}, {"a": "x"}, {1: torch.ones(1)}, {"a": None}])
def test_what_is_no_tensor_is_not_written(wrong: Any) -> None:
    with pytest.raises(TypeError, match="a message"):
        to_bytes(wrong, {})


def with_header(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return a message whose header is changed."""
    length = int.from_bytes(GOOD[:8], "little")
    header = json.loads(GOOD[8 : 8 + length])
    text = json.dumps(change(header)).encode()
    return len(text).to_bytes(8, "little") + text + GOOD[8 + length :]


def with_tree(form: Any) -> bytes:
    return with_header(
        lambda h: {
            **h,
            "__metadata__": {"hierfl": json.dumps({"tree": form, "about": {"round": 3}})},
        }
    )


def deep(levels: int) -> Any:
    form: Any = 0
    for _ in range(levels):
        form = {"list": [form]}
    return form


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code has run')",))


def pickled() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.ones(2)}, file)
    return file.getvalue()


BAD: dict[str, Any] = {
    "nothing": b"",
    "no bytes": "text",
    "a number": 3,
    "a pickle": pickle.dumps(Evil()),
    "a file of torch": pickled(),
    "random bytes": random.Random(0).randbytes(999),
    "half of it": GOOD[: len(GOOD) // 2],
    "one byte more": GOOD + b"x",
    "a length beyond the file": (1 << 40).to_bytes(8, "little") + GOOD[8:],
    "no metadata": save({"0": torch.ones(1)}),
    "metadata that is null": with_header(lambda h: {**h, "__metadata__": None}),
    "no tree": save({"0": torch.ones(1)}, {"hierfl": '{"about": {}}'}),
    "a tree that is not JSON": save({"0": torch.ones(1)}, {"hierfl": "{"}),
    "about that is no object": save({"0": torch.ones(1)}, {"hierfl": '{"tree": 0, "about": []}'}),
    "a tensor too few": with_tree({"list": [0, 99]}),
    "tensors beside the tree": with_tree(0),
    "another kind of node": with_tree({"set": [0]}),
    "a string in the tree": with_tree("0"),
    "true in the tree": with_tree(True),
    "two kinds": with_tree({"list": [0], "dict": {}}),
    "a deep tree": with_tree(deep(100)),
    "a very deep tree": save({"0": torch.ones(1)}, {"hierfl": "[" * 100_000 + "]" * 100_000}),
    "half precision": to_bytes({"a": torch.ones(2, dtype=torch.float16)}, {}),
    "too many bytes": to_bytes({"a": torch.zeros(HEADER // 4 + (1 << 11))}, {}),
}


def test_what_is_no_message_is_refused() -> None:
    for name, content in BAD.items():
        with pytest.raises(Refused) as error:
            from_bytes(content, most=1 << 12)
        assert str(error.value).startswith(("it ", "its ", "what it ")), name


def changed(path: tuple[str, ...], value: Any) -> Any:
    """Return the tree with one part replaced, or removed where the value is None."""
    made = tree_map(lambda v: v, TREE)
    part = made
    for key in path[:-1]:
        part = part[key] if isinstance(part, dict) else part.value
    if value is None:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return made


WEIGHT = ("theta", "value", "weight")
UNLIKE: dict[str, tuple[Any, str]] = {
    "a name too many": (changed(("more",), torch.ones(1)), "nobody asked for"),
    "a name too few": (changed(("own",), None), "lacks"),
    "another shape": (changed(WEIGHT, torch.ones(3, 2)), "shape"),
    "another dtype": (changed(WEIGHT, torch.ones(2, 3, dtype=torch.int64)), "int64"),
    "a list for a tensor": (changed(WEIGHT, [torch.ones(2, 3)]), "nobody asked for"),
    "NaN": (changed(WEIGHT, torch.full((2, 3), torch.nan)), "not finite"),
    "infinity": (changed(WEIGHT, torch.full((2, 3), -torch.inf)), "not finite"),
    "a huge number": (changed(WEIGHT, torch.full((2, 3), 2.0 * LARGEST)), "above 1e"),
}


def test_what_is_unlike_the_template_is_refused() -> None:
    for wrong, why in UNLIKE.values():
        found = from_bytes(to_bytes(wrong, {}), most=1 << 12)
        with pytest.raises(Refused, match=why):
            like(found.tree, TREE)


@pytest.mark.parametrize(
    ("key", "template"),
    [("a']['b", {"a": {"b": torch.ones(2)}}), ("a'](0)['b", {"a": ({"b": torch.ones(2)},)})],
)
def test_a_key_that_looks_like_a_path_does_not_pass_for_what_lies_there(
    key: str, template: Any
) -> None:
    """It would be checked in place of the tensor that lies there, which may be missing or of another shape."""
    other_shape = tree_map(lambda v: torch.ones(9), template)
    for tree in ({key: torch.ones(2)}, {**other_shape, key: torch.ones(2)}):
        found = from_bytes(to_bytes(tree, {}), most=1 << 12)
        with pytest.raises(Refused, match="nobody asked for"):
            like(found.tree, template)


def test_states_may_hold_what_is_not_finite() -> None:
    wrong = changed(WEIGHT, torch.full((2, 3), torch.inf, dtype=torch.float32))
    assert like(wrong, TREE, finite=False)["theta"].value["weight"].isinf().all()


@pytest.mark.parametrize("read", [read_json, partial(read_typed, Introduction, called="start")])
def test_long_json_is_not_parsed(read: Callable[[bytes], object]) -> None:
    """64 MB of empty lists would take 1.5 GB of whoever reads them."""
    long = b"[" + b"[]," * (JSON // 3) + b"[]]"
    tracemalloc.start()
    with pytest.raises(Refused, match="it has more than 16,777,216 characters"):
        read(long)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("said", [{"rows": -7}, {"run": "another"}, {"round": None}])
def test_an_answer_says_of_itself_what_is_expected_alone(said: dict[str, object]) -> None:
    about = {"run": "a", "client": "north", "round": 3}
    check_about(about, dict(about))
    with pytest.raises(Refused, match="its answer is of run "):
        check_about({**about, **said}, about)
    with pytest.raises(Refused, match="its answer is of no run"):
        check_about({}, about)


def test_a_thousand_malformed_messages_are_a_thousand_refusals() -> None:
    """Bytes are flipped, dropped, doubled and cut; what is still a message has the names, shapes and dtypes."""
    draw, refused = random.Random(1), 0
    tracemalloc.start()
    for _ in range(1000):
        content = bytearray(GOOD)
        for _ in range(draw.randint(1, 8)):
            at = draw.randrange(len(content))
            kind = draw.randrange(4)
            if kind == 0:
                content[at] ^= 1 << draw.randrange(8)
            elif kind == 1:
                del content[at : at + draw.randint(1, 9)]
            elif kind == 2:
                content[at:at] = content[at : at + 9]
            else:
                content[at : at + 4] = draw.randbytes(4)
        try:
            back = like(from_bytes(bytes(content), most=1 << 12).tree, TREE)
        except Refused:
            refused += 1
        else:  # only numbers have changed
            for name, value in named_leaves(TREE).items():
                found = named_leaves(back)[name]
                assert (found.shape, found.dtype) == (value.shape, value.dtype)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 700
    assert peak < 1 << 24
