"""A node's policy: what its owner allows a run to do, in a TOML file that only the node reads (docs/node_policy.md)."""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args
from unicodedata import normalize

from hierfl.core.disk import private_folder, write_private
from hierfl.method import Client, Method, Phase
from hierfl.methods.listed import names
from hierfl.nodes.asking import AFTER
from hierfl.nodes.messages import Refused
from hierfl.nodes.supervised import Limits

FILE, SEEN = "policy.toml", "has-policy"  # in the node's folder; SEEN names the file last read
DISCLOSES = ("sums", "summaries")
# keys that are whole numbers above 0
COUNTS = (
    *("min_rows", "min_count", "questions_a_day", "states_a_run"),
    *("steps_a_round", "bytes_a_request", "seconds_a_request", "memory_a_request"),
    *("connections", "seconds_to_send"),
)
LISTS = ("methods", "discloses", "may_leave", "formulas", "columns", "transforms")
Approve = Literal["ask", "always"]
# "rows": an answer with a number for each of the client's rows, of its kind; "descriptions": of its
# rows, of which it need not have fitted anything
LEAVES = (*(kind for kind in AFTER if kind != "imputed"), "rows", "descriptions")


class Forbidden(Refused):
    """What the policy of a node does not allow."""


@dataclass(frozen=True)
class Policy:
    """What the owner of a node allows.

    Args:
        methods: names of methods (`Method.name`) that may run; None: all.
        discloses: what a method may have to show the server (`Method.discloses`).
        min_rows: rows that the client must have to take part, that the mini-batches of a round must
            hold together, and a quarter of which a summary must rest on.
        min_count: rows of a level or group whose name may leave the node, for a formula's schema; rows
            that must have changed between two answers, and on which an answer must rest.
        may_leave: answers of the node that may leave it.
        rounds_a_day: different rounds in any 24 hours; None: no limit.
        questions_a_day: different questions after the rounds in any 24 hours.
        states_a_run: different states of the server after the last round of a run, under which alone,
            and those of the rounds, questions are answered.
        steps_a_round: local steps of a method in one round, mini-batches or passes over all rows.
        bytes_a_request: size of a request, which is not read beyond it.
        seconds_a_request: after which the work on a request is ended.
        memory_a_request: bytes of memory that this work may take beside what the node has loaded.
        connections: open at once, of a server of HTTP.
        seconds_to_send: within which a request must have come in, headers and body, at such a server.
        epsilon: of each row's budget in all runs together, which methods with row noise alone keep;
            None: there is none.
        delta: of the budget.
        formulas: texts of formulas that may come with a request; others wait for the owner's approval,
            but for those of `columns`. What the owner's own code or `node.toml` names needs neither.
        columns: that a formula may read which comes with a request; None: each formula is approved.
        transforms: functions that it may have, each of a column alone; None: those whose constants
            clients agree on, such as `scale` and `s`, and codings of categories.
        approve: whether questions, an introduction and a run need the owner's approval.

    Raises:
        ValueError: a value is none that the key can have.
    """

    methods: frozenset[str] | None = None
    discloses: frozenset[str] = frozenset(DISCLOSES)
    min_rows: int = 1
    min_count: int = 5
    may_leave: frozenset[str] = frozenset()
    rounds_a_day: int | None = None
    questions_a_day: int = 100
    states_a_run: int = 3
    steps_a_round: int = 100_000
    bytes_a_request: int = 1 << 28
    seconds_a_request: int = 600
    memory_a_request: int = 1 << 32
    connections: int = 16
    seconds_to_send: int = 30
    epsilon: float | None = None
    delta: float | None = None
    formulas: frozenset[str] | None = None
    columns: frozenset[str] | None = None
    transforms: frozenset[str] | None = None
    approve: Approve = "always"

    def __post_init__(self) -> None:
        """Refuse values that a key cannot have."""
        _check_names("discloses", self.discloses, DISCLOSES)
        _check_names("may_leave", self.may_leave, LEAVES)
        for name in COUNTS:
            _check_count(name, getattr(self, name))
        if self.rounds_a_day is not None:
            _check_count("rounds_a_day", self.rounds_a_day)
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("epsilon and delta are one budget: give both, or neither")
        for name, value in zip(("epsilon", "delta"), self.budget or (), strict=False):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"{name} is {value!r}: it must be a number")
        epsilon, delta = self.budget or (1.0, 0.5)
        if not (0.0 < epsilon < math.inf and 0.0 < delta < 1.0):
            raise ValueError(f"epsilon is {epsilon} and delta is {delta}: above 0, and in (0, 1)")
        if self.approve not in get_args(Approve):
            raise ValueError(f"approve is {self.approve!r}: it must be 'ask' or 'always'")

    @property
    def budget(self) -> tuple[float, float] | None:
        """Epsilon and delta of each row; None: there is no budget."""
        return None if self.epsilon is None or self.delta is None else (self.epsilon, self.delta)

    @property
    def limits(self) -> Limits:
        """What the work on a request may take."""
        return Limits(self.seconds_a_request, self.memory_a_request)

    def said(self) -> dict[str, Any]:
        """Return the keys that differ from those of the default policy, as JSON."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        own = {key: value for key, value in own.items() if value != getattr(Policy, key)}
        own = {key: v.item() if hasattr(v, "item") else v for key, v in own.items()}  # NumPy's
        return {key: sorted(v) if isinstance(v, frozenset) else v for key, v in own.items()}

    def check(self, method: Method | None, rows: int) -> None:
        """Refuse a run that is not allowed, by the key of the policy; no `method`: it is not chosen yet."""
        if rows < self.min_rows:
            raise Forbidden(
                f"the node's policy asks for {self.min_rows} rows or more, and the client has "
                "fewer (min_rows): it takes no part"
            )
        if method is None:
            if self.methods == frozenset() or not self.discloses:
                raise Forbidden(
                    "the node's policy allows no method: it takes no part (methods, discloses)"
                )
            return
        if self.methods is not None and method.name not in self.methods:
            raise Forbidden(
                f"the node's policy does not allow method '{method.name}': it allows "
                f"{_listed(self.methods)} (methods)"
            )
        if method.discloses not in self.discloses:
            raise Forbidden(
                f"method '{method.name}' discloses {method.discloses}, and the node's policy "
                f"allows {_listed(self.discloses)}: take a method that discloses less, or let its "
                "owner add it to discloses"
            )

    def check_client(self, client: Client, rows: int) -> None:
        """Refuse steps that could single rows out, by few rows in a round or no row noise, and too many of them."""
        if (steps := sum(_steps_of(phase, rows) for phase in client.phases)) > self.steps_a_round:
            raise Forbidden(
                f"a round has {steps:,} local steps, and the node's policy allows "
                f"{self.steps_a_round:,}: take fewer, or let its owner set a larger steps_a_round"
            )
        for phase in client.phases:
            if (least := _rows_of(phase, rows)) < self.min_rows:
                raise Forbidden(
                    f"the mini-batches of a round hold {least} rows, and the node's policy asks "
                    f"for {self.min_rows} or more (min_rows): take larger batch_size or more steps"
                )
        if self.budget is not None and client.row_noise is None:
            raise Forbidden(
                "the node's policy has a budget of epsilon for each row, and the method adds no "
                "noise to rows: take two_stage(model, row_noise=...)"
            )


def _steps_of(phase: Phase, rows: int) -> int:
    """Return how many steps of a round a phase takes."""
    passes = phase.unit == "epoch" and phase.batch_size is not None
    return phase.count * (-(-rows // (phase.batch_size or rows)) if passes else 1)


def _rows_of(phase: Phase, rows: int) -> int:
    """Return how many rows the steps of a phase go through at least, or all where it reads none."""
    rows = rows if phase.rows == "all" else max(1, rows // 2)
    if not (phase.scores_rows and phase.count) or phase.batch_size is None or phase.unit == "epoch":
        return rows
    return min(rows, phase.count * phase.batch_size)


def policy_at(
    named: str | Path | None, folder: Path | None = None, *, own: Method | None = None
) -> Policy:
    """Read the policy of a node, the default one where there never was a file; it may name the user's `own` method."""
    root = Path(named or "").parent if folder is None else folder
    path = root / FILE if named is None else Path(named)
    content, seen = b"", root / SEEN
    try:
        content = path.read_bytes()
    except OSError as error:
        if named is not None or os.path.lexists(path) or seen.exists():
            raise ValueError(_lost(path, seen, error)) from error
    _check_alone(path, root)
    if path.exists() and not (seen.exists() and seen.read_text() == str(path)):
        private_folder(root)
        write_private(seen, str(path).encode())
    try:
        found = policy_of(tomllib.loads(content.decode()))
        _check_methods(found.methods or (), own)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the policy '{path}' cannot be read ({error}): fix the file") from error
    return found


def _lost(path: Path, seen: Path, error: OSError) -> str:
    """Return what to say of a policy that is named, or was there, and cannot be read."""
    if not isinstance(error, FileNotFoundError):
        return f"the policy '{path}' cannot be read ({error.strerror}): it must be a readable file"
    found = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, found, n=1)
    said = f"there is no policy '{path}'" + (f" (there is '{near[0]}')" if near else "")
    if not seen.exists():
        return f"{said}: write it, or name the file that there is"
    return (
        f"{said}, and the node has been under '{seen.read_text()}': put that file back, or remove "
        f"'{seen}' to go on under the default policy"
    )


def _check_alone(path: Path, folder: Path) -> None:
    """Refuse a folder with another file that its owner may take for the policy."""
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        other = folder / name
        same = path.exists() and other.exists() and path.samefile(other)
        if name != SEEN and not same and looks_like_a_policy(name, path.exists()):
            raise ValueError(
                f"'{folder}' holds '{name}', and the node's policy is read from '{path}' alone: "
                f"rename it to '{FILE}', or remove it"
            )


def looks_like_a_policy(name: str, there: bool) -> bool:
    """Return whether a file may be meant as the policy; where one is there, copies may have other endings."""
    plain = normalize("NFKC", name).casefold().strip()
    near = difflib.SequenceMatcher(None, plain, FILE).ratio() > 0.75
    near |= "policy" in plain and (".toml" in plain or plain.partition(".")[0] == "policy")
    return near and (not there or plain.endswith((".toml", ".txt")))


def _check_methods(found: Collection[str], own: Method | None) -> None:
    """Refuse a name that no method has; wrappers follow a method's name."""
    known = names()
    for name in sorted(found):
        if re.split(r"[+ ]", name)[0] not in known and (own is None or name != own.name):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"methods holds '{name}': did you mean '{near}'?")


def policy_of(found: Mapping[str, Any]) -> Policy:
    """Return the policy of some keys and values; refuse unknown ones."""
    known = [each.name for each in fields(Policy)]
    for key, value in found.items():
        if key not in known:
            if isinstance(value, Mapping):
                raise ValueError(f"there is no table '{key}': keys stand at the top, in no table")
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"there is no key '{key}': did you mean '{near}'?")
    values: dict[str, Any] = {
        key: _names(key, value) if key in LISTS else value for key, value in found.items()
    }
    return Policy(**values)


def _names(key: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{key} is {value!r}: it must be a list of names")
    return frozenset(value)


def _check_names(key: str, found: Collection[str], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(found) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)[0]
        raise ValueError(f"{key} holds '{unknown[0]}': did you mean '{near}'?")


def _check_count(key: str, value: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}: it must be an integer of 1 or more")


def _listed(found: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(found)) or "none"
