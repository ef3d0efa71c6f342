"""A node's policy: what its owner allows a run to do, in a TOML file that only the node reads.

methods = ["two_stage", "fedsvi"]   # names of methods that may run; default: all
discloses = ["sums"]                # "sums", "summaries", or both, the default
min_rows = 50                       # rows that the client must have to take part; default 1
may_leave = ["summaries"]           # "summaries", "draws", "predictions", "scores"; default: none
min_count = 5                       # rows of a level or group that may be named; default 5
rounds_a_day = 200                  # rounds in any 24 hours; default: no limit
approve = "ask"                     # "always", the default: a run needs no approval of its owner
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from hierfl.method import Method
from hierfl.nodes.messages import Refused

FILE = "policy.toml"  # in the node's folder
DISCLOSES = ("sums", "summaries")
Approve = Literal["ask", "always"]
Kind = Literal["summaries", "draws", "predictions", "scores"]  # of answers about the client
KINDS: tuple[str, ...] = get_args(Kind)


class Forbidden(Refused):
    """What the policy of a node does not allow."""


@dataclass(frozen=True)
class Policy:
    """What the owner of a node allows.

    Args:
        methods: names of methods (`Method.name`) that may run; None: all.
        discloses: what a method may have to show the server (`Method.discloses`).
        min_rows: rows that the client must have to take part.
        min_count: rows of a level or group whose name may leave the node, for a formula's schema.
        may_leave: answers of the node that may leave it.
        rounds_a_day: rounds in any 24 hours; None: no limit.
        approve: whether a run needs the owner's approval.

    Raises:
        ValueError: a value is none that the key can have.
    """

    methods: frozenset[str] | None = None
    discloses: frozenset[str] = frozenset(DISCLOSES)
    min_rows: int = 1
    min_count: int = 5
    may_leave: frozenset[str] = frozenset()
    rounds_a_day: int | None = None
    approve: Approve = "always"

    def __post_init__(self) -> None:
        """Refuse values that a key cannot have."""
        _check_names("discloses", self.discloses, DISCLOSES)
        _check_names("may_leave", self.may_leave, KINDS)
        _check_count("min_rows", self.min_rows)
        _check_count("min_count", self.min_count)
        if self.rounds_a_day is not None:
            _check_count("rounds_a_day", self.rounds_a_day)
        if self.approve not in get_args(Approve):
            raise ValueError(f"approve is {self.approve!r}: it must be 'ask' or 'always'")

    def check(self, method: Method | None, rows: int) -> None:
        """Refuse a run that is not allowed.

        Args:
            method: of the run; None: it has not been chosen yet.
            rows: of the client.

        Raises:
            Forbidden: it is not; the message names the key of the policy.
        """
        if rows < self.min_rows:
            raise Forbidden(
                f"the node's policy asks for {self.min_rows} rows or more, and the client has "
                "fewer: it takes no part"
            )
        if method is None:
            return
        if self.methods is not None and method.name not in self.methods:
            raise Forbidden(
                f"the node's policy does not allow method '{method.name}': it allows "
                f"{_listed(self.methods)}"
            )
        if method.discloses not in self.discloses:
            raise Forbidden(
                f"method '{method.name}' discloses {method.discloses}, and the node's policy "
                f"allows {_listed(self.discloses)}: take a method that discloses less"
            )


def policy_file(folder: Path, policy: str | Path | None) -> Path:
    """Return the file of a node's policy: the named one, or the one in its folder."""
    return folder / FILE if policy is None else Path(policy)


def policy_at(path: Path) -> Policy:
    """Read a policy; without a file, return the default one.

    Raises:
        ValueError: the file is no TOML, or has an unknown key, or a value that the key cannot have.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Policy()
    try:
        found = tomllib.loads(content.decode())
        return policy_of(found)
    except ValueError as error:
        raise ValueError(f"the policy '{path}' cannot be read ({error}): fix the file") from error


def policy_of(found: Mapping[str, Any]) -> Policy:
    """Return the policy of some keys and values; refuse unknown ones."""
    known = [each.name for each in fields(Policy)]
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"there is no key '{key}': did you mean '{near}'?")
    values: dict[str, Any] = {
        key: _names(key, value) if key in ("methods", "discloses", "may_leave") else value
        for key, value in found.items()
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
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}: it must be an integer of 1 or more")


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
