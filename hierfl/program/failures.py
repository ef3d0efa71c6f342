"""One sentence for a model or guide that fails: its line, what is wrong, and the fix."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hierfl.data.batch import ClientBatch

_HERE = str(Path(__file__).parent.parent)
_LIBRARIES = ("torch", "pyro", "numpy", "functools", "contextlib")
_SHAPES = (
    "align them from the right: a field is [clients, rows, ...], a local site [clients, 1, ...]"
)

# Pattern in the cause's first line -> what is wrong, and the fix. `{0}` is its first group.
_KNOWN = (
    (
        r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)",
        f"dimensions of {{0}} and {{1}} do not fit: {_SHAPES}",
    ),
    (
        r"shapes cannot be multiplied \((\S+) and (\S+)\)",
        "a matrix product of {0} by {1} does not fit: make the layer's inputs as many as the "
        "field's columns",
    ),
    (
        r"t\(\) expects a tensor with <= 2 dimensions",
        "a layer's weights are sampled in the plate of rows, a set for each row: call the network "
        "before the plates are opened, and use its result inside them",
    ),
    (
        r"Shape mismatch inside plate\('(\w+)'\) at site (\S+) dim -\d+, (\d+) vs (\d+)",
        "site '{1}' has {3} values where the plate '{0}' has {2}: declare its own dimensions with "
        ".to_event(1), sum over them, or read rows from the batch, whose plates of clients and rows "
        "are batch.clients() and batch.data()",
    ),
    (
        r"scalar type|same dtype|dtype|expected .* to have type|result type",
        "numbers of different types are mixed: give constants and fields the type of batch.counts, "
        ".to(batch.counts.dtype)",
    ),
    (
        r"first two dimensions of batch2|batch1 and batch2|mat1|mat2|size mismatch, got|einsum|"
        r"shape '.*' is invalid|broadcast",
        f"shapes do not fit: {_SHAPES}; rows times a local vector are (batch.x * w).sum(-1)",
    ),
    (
        r"stack expects each tensor to be equal size|Sizes of tensors must match except",
        "values of different sizes are joined, as [clients, 1] of a client and [clients, rows] of rows: "
        "give all of them one size, torch.stack(torch.broadcast_tensors(*values), -1)",
    ),
    (
        r"Boolean value of Tensor|data-dependent control flow",
        "a tensor is used as a condition of `if` or `while`, or read by .item(): choose with "
        "torch.where(condition, a, b)",
    ),
    (
        r"call numpy\(\)|__array__|can't convert .* to numpy|\.item\(\)|tolist",
        "values are taken out of their tensor: use functions of torch in place of numpy, float(), "
        ".item() and .tolist()",
    ),
    (
        r"inplace arithmetic|accessing `data` under vmap",
        "a value is written into a tensor: build the tensor by torch.cat, torch.stack or torch.where",
    ),
    (
        r"dynamic shape|boolean mask|nonzero",
        "entries are picked by a condition: keep all, and choose with torch.where(condition, a, b)",
    ),
    (
        r"subsample_size does not match",
        "a plate takes a sample of the rows: open batch.data() in its place; with few rows a step, "
        "name a method with batch_size=",
    ),
    (
        r"Multiple sample sites named '(clients|data)'",
        "pyro.plate('{0}', ...) is next to batch.{0}(): open only `with batch.{0}():`",
    ),
    (
        r"Multiple (?:sample|param) sites named '(\S+)'",
        "two sites are named '{0}': rename one of them",
    ),
    (
        r"(\S+) is already in the trace as a (sample|param)",
        "'{0}' names a {1} and something else, such as a parameter of a module: rename one of them",
    ),
    (
        r"Expected parameter (\w+) \(.*\) of distribution (\w+)",
        "parameter '{0}' of {1} is out of its range: scales and rates must be positive (softplus "
        "or exp), probabilities within 0 and 1 (logits)",
    ),
    (
        r"missing (\d+) required positional|takes 0 positional",
        "it is called with one argument, the batch: write def model(batch)",
    ),
    (r"'ClientBatch' object is not subscriptable", "a field is an attribute: write batch.y"),
    (
        r"'(?:Tensor|NoneType)' object is not callable",
        "what is called is no function: a field is an attribute, batch.y, and the plate of rows is "
        "batch.data()",
    ),
    (r"must be Tensor, not ClientBatch", "it is a network: wrap it, hierfl.models.network(net)"),
    (
        r"context manager protocol|__enter__",
        "a plate is opened by a call: write `with batch.clients():`",
    ),
    (
        r"index .*out of (?:range|bounds)|out of range",
        "an index is out of range: code the values 0, 1, ..., and size the table to them",
    ),
    (
        r"linalg|cholesky|singular|positive.definite",
        "a matrix is not positive definite: scale the columns (hierfl.standardize), add to its "
        "diagonal, or integrate a walk out ('Series of a client' in docs/recipes_series.md)",
    ),
    (
        r"no attribute '(GaussianRandomWalk|RandomWalk|AR|AutoRegressive)'",
        "Pyro has no {0}: integrate it out, batch.joint_normal ('Series of a client' in "
        "docs/recipes_series.md)",
    ),
    (
        r"used as indices",
        "a field of numbers is used as an index: give it as integers, data.with_fields(k=k.long())",
    ),
)


def why_it_fails(
    what: str,
    error: BaseException,
    batch: ClientBatch,
    plates: Mapping[str, int] | None = None,
) -> str:
    """Return one sentence on a failed run of a program; `plates` are those that it made itself."""
    cause = root_of(error)
    reason = _reason(cause)
    shown = ""
    if reason is not None and _SHAPES in reason and plates:
        name, size = next(iter(plates.items()))
        reason += (
            f"; for clients and rows open batch.clients() and batch.data() in place of pyro.plate, "
            f"and give a plate inside them, such as '{name}' of {size}, dim=-3"
        )
    if reason is None or _SHAPES in reason or "are mixed" in reason or "layer's inputs" in reason:
        shown = f" ({_fields(batch)})"
    if reason is None:
        reason = f"{_first_line(cause)}: fix what it names"
        if isinstance(cause, RuntimeError) and not _is_ours(cause):
            reason = "an operation of torch refuses its operands: see the error above"
    elif reason == "":
        reason, shown = _first_line(cause), ""
    return f"the {what} fails{_where(cause)}: {reason}{shown}"


def why_in_line(error: BaseException) -> str:
    """Return line, what is wrong and the fix of a known error in the user's code; "" otherwise."""
    cause = root_of(error)
    reason = _reason(cause)
    line = _where(cause) if reason else ""
    return f"{line.strip()}: {reason}" if line else ""


def root_of(error: BaseException) -> BaseException:
    """Return the original error: Pyro raises a copy with the shapes of all sites added."""
    cause = error.__cause__
    while cause is not None and type(cause) is type(error) and str(error).startswith(str(cause)):
        error, cause = cause, cause.__cause__
    return error


def _reason(cause: BaseException) -> str | None:
    """Return what is wrong and the fix; "" if the error says so, None if it is not known."""
    if _is_ours(cause):
        return ""
    first = _first_line(cause)
    for pattern, sentence in _KNOWN:
        match = re.search(pattern, first)
        if match:
            return sentence.format(*match.groups())
    return None


def _first_line(cause: BaseException) -> str:
    text = str(cause).strip().splitlines()
    return text[0] if text else type(cause).__name__


def _frames(cause: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(cause.__traceback__))


def _is_ours(cause: BaseException) -> bool:
    frames = _frames(cause)
    if not frames or not frames[-1].filename.startswith(_HERE):
        return False
    return "raise" in linecache.getline(frames[-1].filename, frames[-1].lineno or 0)


def _where(cause: BaseException) -> str:
    for frame in reversed(_frames(cause)):
        path = Path(frame.filename)
        inside = frame.filename.startswith(_HERE) or any(
            part in _LIBRARIES for part in (*path.parts, path.stem)
        )
        if not inside and not frame.filename.startswith("<frozen"):
            shown = f", `{frame.line.strip()[:80]}`" if frame.line else ""
            return f" in line {frame.lineno} of {path.name}{shown}"
    return ""


def _fields(batch: ClientBatch) -> str:
    fields: dict[str, Any] = {**batch.fields, **batch.client_fields}
    return "fields: " + ", ".join(
        f"{name} {tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}"
        for name, v in fields.items()
    )
