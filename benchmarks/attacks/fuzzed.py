"""Hostile bytes for the reader of messages, chosen by coverage.

Run `python -m benchmarks.attacks.fuzzed --seconds 300`.

libFuzzer changes valid messages: their bytes, and the JSON of their headers. Whatever `from_bytes`
and `like` are given, they return what was asked for or raise `Refused`; anything else ends the run
with an error, and the bytes are kept. It needs atheris, which hierfl does not depend on: `pip
install atheris`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attacks.mutations import flipped, mutated
from hierfl.core.trees import nbytes, tree_leaves
from hierfl.method import Each, LogShare, Share

MOST = 1 << 12  # bytes of all tensors of a message
LONGEST = 1 << 13  # bytes of a message that libFuzzer makes
KINDS = ("tree", "dict", "list", "tuple")
SIGNS = ("']['", "'](0)['", ".")  # between the parts of a path
TEMPLATES: tuple[Any, ...] = (
    {
        "theta": Share({"weight": torch.ones(2, 3), "empty": {}}, torch.ones(1)),
        "own": Each({"codes": torch.ones(1, 2, dtype=torch.int64), "flag": torch.ones(1).bool()}),
        "log": LogShare([torch.zeros(1, 0), torch.zeros(1)], torch.zeros(1)),
    },
    {"message": {"a": {"b": torch.ones(2), "c": torch.ones(())}}, "mail": {}},
    torch.ones(3, dtype=torch.float64),
)


def corpus(folder: Path) -> None:
    """Write valid messages into a folder."""
    from hierfl.nodes.messages import to_bytes

    for number, tree in enumerate(TEMPLATES):
        about = {"run": "0" * 16, "client": "north", "round": number}
        (folder / str(number)).write_bytes(to_bytes(tree, about))


def read(content: bytes) -> None:
    """Read bytes as a node and the server do.

    Raises:
        AssertionError: what was read is not what was asked for.
    """
    from hierfl.nodes.messages import DTYPES, Refused, from_bytes, like

    try:
        found = from_bytes(content, most=MOST)
    except Refused:
        return
    assert isinstance(found.about, dict)
    assert all(leaf.dtype in DTYPES for leaf in tree_leaves(found.tree))
    for template in TEMPLATES:
        try:
            back = like(found.tree, template)
        except Refused:
            continue
        assert nbytes(back) <= MOST
        for leaf, wanted in zip(tree_leaves(back), tree_leaves(template), strict=True):
            assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
            assert not leaf.is_floating_point() or bool(leaf.isfinite().all())


# ------------------------------------------------------------------------------------------------
# changes
def changed(content: bytes, how: random.Random) -> bytes:
    """Return a message with its tree, its header or its bytes changed.

    What is no message has its bytes changed.
    """
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        said = json.loads(header["__metadata__"]["hierfl"])
        kind = how.choice(["tree", "name", "name", "header", "bytes"])
        if kind == "tree":
            said = mutated(said, how)
        elif kind == "name":
            said = renamed(said, how)
        if kind == "bytes":
            return flipped(content, how)
        header["__metadata__"]["hierfl"] = json.dumps(said)
        text = json.dumps(mutated(header, how) if kind == "header" else header).encode()
    except (KeyError, TypeError, ValueError, RecursionError):
        return flipped(content, how)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def renamed(value: Any, how: random.Random) -> Any:
    """Return JSON with an entry moved or doubled, under a name that is its own path with one sign between its parts."""
    whole = json.loads(json.dumps(value))
    dicts: list[Any] = []
    path: list[Any] = []
    above: Any = None
    part: Any = whole
    while isinstance(part, dict | list) and part and (not path or how.random() < 0.9):
        if isinstance(part, dict):
            dicts.append(part)
        key = how.choice([*part]) if isinstance(part, dict) else how.randrange(len(part))
        path.append(key)
        above, part = part, part[key]
    if not dicts:
        return whole
    if how.random() < 0.5:
        del above[path[-1]]
    shown = [str(key) for key in path if key not in KINDS]
    how.choice(dicts)[how.choice(SIGNS).join(shown)] = part
    return whole


# ------------------------------------------------------------------------------------------------
# the run
def main(arguments: Sequence[str] | None = None) -> None:
    """Run libFuzzer, which prints what it does and ends the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    try:
        import atheris
    except ImportError as error:
        raise SystemExit("fuzzing needs atheris: pip install atheris") from error
    with atheris.instrument_imports(include=["hierfl.nodes.messages"]):
        import hierfl.nodes.messages  # noqa: F401

    def custom(content: bytes, most: int, seed: int) -> bytes:
        how = random.Random(seed)
        if how.random() < 0.5:
            return bytes(atheris.Mutate(content, most))
        return changed(content, how)[:most]

    folder = Path(tempfile.mkdtemp(prefix="fuzzed-"))
    corpus(folder)
    options = {
        "max_total_time": chosen.seconds,
        "max_len": LONGEST,
        "seed": chosen.seed,
        "timeout": 10,
        "rss_limit_mb": 2048,
        "print_final_stats": 1,
        "artifact_prefix": f"{folder}/crash-",
    }
    flags = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, str(folder)], read, custom_mutator=custom)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
