"""A request to a node and its answer as bytes: one line of JSON, and what `hierfl.nodes` sends.

{"hierfl": 1, "request": "round", "bytes": 1234}
{"hierfl": 1, "answer": "SHA-256 of the request", "bytes": 1234, "wrong": ""}
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hierfl.nodes.messages import Refused, read_json

FORM = 1
LONGEST = 4096  # bytes of the line


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
        raise Refused(f"it holds {len(content):,} bytes, not {str(said.get('bytes'))[:20]}")
    return said, content
