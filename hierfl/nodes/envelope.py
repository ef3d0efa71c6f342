"""A request to a node and its answer: as bytes, one line of JSON and what `hierfl.nodes` sends; and as text.

{"hierfl": 1, "request": "round", "bytes": 1234}
{"hierfl": 1, "answer": "SHA-256 of the request", "bytes": 1234, "wrong": ""}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from hierfl.core.trees import named_leaves
from hierfl.nodes.messages import Refused, from_bytes, read_json

FORM = 1
LONGEST = 4096  # bytes of the line
MOST = 1 << 31  # bytes of a file
FEW = 6  # values of a tensor that `show` prints
ASKS = {
    "describe": "Asks for counts, means and sds of the rows, for a table of all clients.",
    "schema": "Asks for counts and sums of the rows, from which the clients agree on a schema.",
    "introduce": "Asks for the client's name, its number of rows and the form of its rows.",
    "agree": "Tells what all clients agreed on, and asks for a hash of what the node starts from.",
    "round": "Asks for the update of one round, or for an answer after the rounds.",
}


def write_request(kind: str, content: bytes) -> bytes:
    """Return a request of a kind (`hierfl.nodes.station`)."""
    return _written(content, request=kind)


def read_request(request: bytes) -> tuple[str, bytes]:
    """Return the kind and the content of a request, or raise Refused."""
    line, content = read_line(request)
    if not isinstance(line.get("request"), str):
        raise Refused("it is no request of hierfl")
    return line["request"], content


def write_answer(request: bytes, content: bytes = b"", *, wrong: str = "") -> bytes:
    """Return the answer to a request: its content, or what is wrong."""
    return _written(content, answer=sha256(request).hexdigest(), wrong=wrong[:500])


def read_answer(request: bytes, answer: bytes) -> bytes:
    """Return the content of the answer to a request; what is none, or says what is wrong, is Refused."""
    line, content = read_line(answer)
    if line.get("answer") != sha256(request).hexdigest():
        raise Refused("it answers another request")
    if line.get("wrong"):
        raise Refused(str(line["wrong"])[:500])
    return content


def _written(content: bytes, **line: str) -> bytes:
    head = {"hierfl": FORM, **line, "bytes": len(content)}
    return json.dumps(head).encode() + b"\n" + content


def read_line(whole: object) -> tuple[dict[str, Any], bytes]:
    """Return what a request or an answer says of itself, and its content, or raise Refused."""
    if not isinstance(whole, bytes):
        raise Refused(f"it is a {type(whole).__name__}, not bytes")
    head, end, content = whole.partition(b"\n")
    line, why = read_json(head, LONGEST), ""
    if not end or not isinstance(line, dict) or line.get("hierfl") != FORM:
        why = "it is no file of hierfl, or one of another version"
    elif line.get("bytes") != len(content):
        why = f"it holds {len(content):,} bytes, not {repr(line.get('bytes'))[:20]}"
    if why:
        raise Refused(why)
    return line, content


# ------------------------------------------------------------ as text
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
