"""A request to a node and its answer: as bytes, one line of JSON and what `hierfl.nodes` sends.

{"hierfl": 1, "request": "round", "bytes": 1234}
{"hierfl": 1, "answer": "SHA-256 of the request", "bytes": 1234, "wrong": ""}
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from hierfl.nodes.messages import Refused, read_json

FORM = 1
LONGEST = 4096  # bytes of the line
MOST = 1 << 31  # bytes of a file
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
        raise Refused("it is not a request of hierfl")
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
    return read_head(head + end, len(content)), content


def read_head(head: bytes, length: int) -> dict[str, Any]:
    """Return what a first line says, of a file with so many bytes after it, or raise Refused."""
    line: Any = read_json(head, LONGEST)
    if head[-1:] != b"\n" or not isinstance(line, dict) or line.get("hierfl") != FORM:
        raise Refused("it is not a file of hierfl, or one of another version")
    if line.get("bytes") != length:
        raise Refused(f"it holds {length:,} bytes, not {repr(line.get('bytes'))[:20]}")
    return line
