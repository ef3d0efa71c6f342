"""A request to a node and its answer: as bytes, one line of JSON and what `hierfl.nodes` sends; and as text.

{"hierfl": 1, "request": "round", "bytes": 1234}
{"hierfl": 1, "answer": "SHA-256 of the request", "bytes": 1234, "wrong": ""}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
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
    return _line({"request": kind, "bytes": len(content)}) + content


def read_request(request: bytes) -> tuple[str, bytes]:
    """Return the kind and the content of a request, or raise Refused."""
    said, content = read_line(request)
    if not isinstance(said.get("request"), str):
        raise Refused("it is no request of hierfl")
    return said["request"], content


def write_answer(request: bytes, content: bytes = b"", *, wrong: str = "") -> bytes:
    """Return the answer to a request: its content, or what is wrong."""
    said = {"answer": hashlib.sha256(request).hexdigest(), "bytes": len(content)}
    return _line({**said, "wrong": wrong[:500]}) + content


def read_answer(request: bytes, answer: bytes) -> bytes:
    """Return the content of the answer to a request; what is none, or says what is wrong, is Refused."""
    if not answers(request, answer):
        raise Refused("it answers another request")
    said, content = read_line(answer)
    if wrong := said.get("wrong"):
        raise Refused(str(wrong)[:500])
    return content


def answers(request: bytes, answer: bytes) -> bool:
    """Return whether a whole answer is to a request; what is no answer at all is Refused."""
    return read_line(answer)[0].get("answer") == hashlib.sha256(request).hexdigest()


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps({"hierfl": FORM, **said}).encode() + b"\n"


def read_line(whole: object) -> tuple[dict[str, Any], bytes]:
    """Return what a request or an answer says of itself, and its content, or raise Refused."""
    if not isinstance(whole, bytes):
        raise Refused(f"it is a {type(whole).__name__}, not bytes")
    line, found, content = whole.partition(b"\n")
    said = read_json(line, LONGEST)
    if not found or not isinstance(said, dict) or said.get("hierfl") != FORM:
        raise Refused("it is no file of hierfl, or one of another version")
    if said.get("bytes") != len(content):
        raise Refused(f"it holds {len(content):,} bytes, not {repr(said.get('bytes'))[:20]}")
    return said, content


# ------------------------------------------------------------ as text
def show(whole: bytes) -> str:
    """Return a request or an answer as text, its own words escaped; or raise Refused."""
    said, content = read_line(whole)
    if "request" in said:
        head = [f"Request {said['request']!r}, SHA-256 {hashlib.sha256(whole).hexdigest()}"]
        head += [ASKS.get(str(said["request"]), "No node answers it.")]
    else:
        head = [f"Answer to the request with SHA-256 {said.get('answer')!r}"]
        head += [f"Refused: {said['wrong']!r}"] if said.get("wrong") else []
    return "\n".join([*head, f"{len(content):,} bytes", *_content(content)])


def _content(content: bytes) -> Iterator[str]:
    if not content:
        return
    try:
        found = from_bytes(content, most=MOST)
    except Refused:
        try:
            yield json.dumps(read_json(content), indent=1)
        except Refused as error:
            yield f"It is neither JSON nor tensors, and will be refused: {str(error)!r}"
        return
    about: dict[str, Any] = dict(found.about)
    if about.get("kind", "round") != "round":
        yield f"After the rounds: {about['kind']!r} of the client."
    yield json.dumps(about)
    for name, value in named_leaves(found.tree).items():
        flat = value.flatten()
        some = ", ".join(f"{float(v):.6g}" for v in flat[:FEW])
        some = f"{some}, ..." if len(flat) > FEW else some
        shown = json.dumps(name)[1:-1]  # a name may hold what moves a terminal's cursor
        yield f"  {shown}  {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}: {some}"
