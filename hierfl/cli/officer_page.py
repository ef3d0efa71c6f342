"""A page for a data protection officer, made from a node's log: what was asked, what left, and by which policy."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment

from hierfl.core.disk import replace_text
from hierfl.nodes.approval import APPROVED, PREVIEWS
from hierfl.nodes.log import FILE, OLDER, REFUSED
from hierfl.nodes.policy import Policy, policy_at

MARK = b'<meta name="generator" content="hierfl node report'
Entry = dict[str, Any]
LONGEST = 20_000  # characters of an answer
# keys in which lines agree that are one here
SAME = ("run", "what", "tensors", "by", "rows", "method", "policy", "question")


def entries(folder: Path) -> list[dict[str, Any]]:
    """Return what has left a node, in order, without lines that a crash cut off."""
    lines: list[dict[str, Any]] = []
    for path in (folder / OLDER, folder / REFUSED, folder / FILE):
        for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
            with suppress(ValueError, TypeError):
                lines.append(dict(json.loads(text)))
    return sorted(lines, key=lambda line: str(line.get("time")))


def write_page(folder: Path, path: Path, own: Path | None = None) -> None:
    """Write the page of a node's folder, whose policy may be an `own` file; overwrite no other file (ValueError)."""
    if path.exists() and MARK not in path.read_bytes()[:2000]:
        raise ValueError(
            f"'{path}' already exists, and is not a report of a node: name another with --out"
        )
    every, policy = entries(folder), policy_at(own, folder)
    answers = [line for line in every if line.get("what") != "refusal"]
    refused = [line for line in every if line.get("what") == "refusal"]
    by_run = groupby(
        sorted(answers, key=lambda line: str(line.get("run"))), lambda line: line.get("run")
    )
    runs = [_run(folder, run, list(lines)) for run, lines in by_run if run]
    source = files("hierfl.cli").joinpath("officer_page.html").read_text(encoding="utf-8")
    page = (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(source)
        .render(
            folder=folder.resolve().name,
            span=[_when(every[0]), _when(every[-1])] if every else [],
            left=_groups(answers, SAME),
            refused=_groups(refused, ("by", "text", "detail")),
            size=_size(answers),
            runs=sorted(runs, key=lambda line: str(line["when"])),
            policy=[(key.name, _shown(getattr(policy, key.name))) for key in fields(Policy)],
            changed=policy.said(),
            budget=policy.budget,
            spent=max((line.get("budget_spent") or 0.0 for line in every), default=0.0),
            version=version("hierfl"),
            now=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        )
    )
    replace_text(path, page)


def _groups(lines: list[Entry], keys: Sequence[str]) -> list[Entry]:
    """Return lines that follow each other, and agree in some keys, as one each."""
    return [
        _group(list(same))
        for _, same in groupby(lines, lambda line: repr([line.get(key) for key in keys]))
    ]


def _group(same: list[Entry]) -> Entry:
    line = same[0]
    tensors = (line.get("tensors") or {}).items()
    return line | {
        "rows": line.get("rows", ""),
        "when": _span(same),
        "count": len(same),
        "rounds": _rounds(same),
        "size": _size(same),
        "tensors": [
            f"{name or 'a tensor'}: {' by '.join(map(str, shape)) or '1'} {dtype}"
            for name, (dtype, *shape) in tensors
        ],
        "texts": [_cut(str(line["text"])) for line in same if line.get("text")],
        "question": _shown(line.get("question")),
        "policy": [f"{key} = {_shown(value)}" for key, value in line.get("policy", {}).items()],
    }


def _run(folder: Path, run: str, lines: list[Entry]) -> Entry:
    """Return what a run received from the node, and whether its owner approved it."""
    return {
        "run": run,
        "method": next((line["method"] for line in lines if line.get("method")), ""),
        "by": sorted({str(line["by"]) for line in lines if line.get("by")}),
        "when": [_when(lines[0]), _when(lines[-1])],
        "rounds": len(_rounds(lines)),
        "size": _size(lines),
        "approved": (folder / APPROVED / run).exists(),
        "preview": (folder / PREVIEWS / f"{run}.txt").exists(),
    }


def _rounds(lines: Iterable[Entry]) -> list[int]:
    return sorted({line["round"] for line in lines if line.get("round") is not None})


def _when(line: Entry) -> str:
    return str(line.get("time", ""))[:19].replace("T", " ")


def _span(lines: list[Entry]) -> str:
    """Return when the first and the last of some lines were written, the day once."""
    first, last = _when(lines[0]), _when(lines[-1])
    end = last.removeprefix(first[:11]) if last != first else ""
    return f"{first} to {end}" if end else first


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... (left.jsonl has all of it)"


def _size(lines: Iterable[Entry]) -> str:
    count = sum(int(line.get("bytes", 0)) for line in lines)
    return f"{count:,} bytes" if count < 1 << 20 else f"{count / (1 << 20):,.1f} MB"


def _shown(value: Any) -> str:
    listed = isinstance(value, frozenset | list | tuple)
    return (
        ""
        if value is None
        else ", ".join(map(str, sorted(value))) or "none"
        if listed
        else str(value)[:1000]
    )
