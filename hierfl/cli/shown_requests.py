"""A request to a node, or its answer, as text; nothing in it is executed."""

import json
from collections.abc import Iterator
from hashlib import sha256

from hierfl.core.trees import named_leaves
from hierfl.nodes.envelope import ASKS, MOST, read_line
from hierfl.nodes.messages import Refused, from_bytes, read_json

FEW = 6  # values of a tensor that are printed


def show(whole: bytes) -> str:
    """Return a request or an answer as text, its own words escaped; or raise Refused."""
    line, content = read_line(whole)
    if "request" in line:
        head = [f"Request {line['request']!r}, SHA-256 {sha256(whole).hexdigest()}"]
        head += [ASKS.get(str(line["request"]), "No node answers it.")]
    else:
        head = [f"Answer to the request with SHA-256 {line.get('answer')!r}"]
        head += [f"Refused: {line['wrong']!r}"] if line.get("wrong") else []
    return "\n".join([*head, f"{len(content):,} bytes", *(_content(content) if content else ())])


def _content(content: bytes) -> Iterator[str]:
    try:
        tree, about = from_bytes(content, most=MOST)
    except Refused:
        try:
            yield json.dumps(read_json(content), indent=1)
        except Refused as error:
            yield f"It is neither JSON nor tensors, and will be refused: {str(error)!r}"
        return
    if about.get("kind", "round") != "round":
        yield f"After the rounds: {about['kind']!r} of the client."
    yield json.dumps(about)
    for name, value in named_leaves(tree).items():
        flat = value.flatten()
        values = ", ".join(f"{float(v):.6g}" for v in flat[:FEW]) + ", ..." * (len(flat) > FEW)
        dtype = str(value.dtype).removeprefix("torch.")
        # a name may hold what moves a terminal's cursor
        yield f"  {json.dumps(name)[1:-1]}  {dtype} {tuple(value.shape)}: {values}"
