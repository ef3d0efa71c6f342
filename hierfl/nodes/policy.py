"""A node's policy: what its owner allows a run to do, in a TOML file that only the node reads (docs/node_policy.md)."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from unicodedata import normalize

import msgspec
from msgspec import Meta

from hierfl.core.arguments import check_known
from hierfl.core.disk import private_folder, write_private
from hierfl.data.clients import ClientData
from hierfl.engine.supervised import Limits
from hierfl.method import Client, Method
from hierfl.methods.about import names
from hierfl.nodes.messages import Refused
from hierfl.program.recipes import counts

FILE, SEEN = "policy.toml", "has-policy"  # in the node's folder; SEEN names the file last read
Names = frozenset[str]
Count = Annotated[int, Meta(ge=1, lt=1 << 53)]
# "rows": an answer with a number for each of the client's rows, of its kind; "descriptions": of its
# rows, of which it need not have fitted anything
Leaves = Literal["summaries", "draws", "predictions", "scores", "rows", "descriptions"]


class Forbidden(Refused):
    """What the policy of a node does not allow."""


@dataclass(frozen=True)
class Policy:
    """What the owner of a node allows, by the keys of `policy.toml`; docs/node_policy.md says what each is.

    Raises:
        ValueError: a value is none that the key can have.
    """

    methods: Names | None = None
    discloses: frozenset[Literal["sums", "summaries"]] = frozenset({"sums", "summaries"})
    min_rows: Count = 1
    min_count: Count = 5
    min_joint_count: Count = 1
    may_leave: frozenset[Leaves] = frozenset()
    rounds_a_day: Count | None = None
    questions_a_day: Count = 100
    states_a_run: Count = 3
    steps_a_round: Count = 100_000
    bytes_a_request: Count = 1 << 28
    seconds_a_request: Annotated[int, Meta(ge=1, lt=1 << 31)] = 600
    memory_a_request: Count = 1 << 32
    connections: Count = 16
    seconds_to_send: Count = 30
    epsilon: Annotated[float, Meta(gt=0.0, le=1e300)] | None = None
    delta: Annotated[float, Meta(gt=0.0, lt=1.0)] | None = None
    formulas: Names | None = None
    columns: Names | None = None
    transforms: Names | None = None
    approve: Literal["ask", "always"] = "always"

    def __post_init__(self) -> None:
        for key, kind in TYPES.items():
            value = getattr(self, key)
            value = value.item() if hasattr(value, "item") else value  # NumPy's
            try:
                object.__setattr__(self, key, msgspec.convert(value, kind))
            except (msgspec.ValidationError, RecursionError) as error:
                raise ValueError(f"{key} is {str(value)[:200]!r}: {error}") from error
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("epsilon and delta are one budget: give both, or neither")

    @property
    def budget(self) -> tuple[float, float] | None:
        """Epsilon and delta of each row; None: there is no budget."""
        return None if self.epsilon is None or self.delta is None else (self.epsilon, self.delta)

    def limits_of(self, request: bytes) -> Limits:
        """Return what the work on a request may take; refuse one that is too long (`Forbidden`)."""
        if len(request) > self.bytes_a_request:
            allowed = f"the node's policy allows {self.bytes_a_request:,} (bytes_a_request)"
            raise Forbidden(f"it has {len(request):,} bytes, and {allowed}")
        return Limits(self.seconds_a_request, self.memory_a_request)

    def said(self) -> dict[str, Any]:
        """Return the keys that differ from those of the default policy, as JSON."""
        own = {key: of for key in KEYS if (of := getattr(self, key)) != getattr(Policy, key)}
        return {key: sorted(v) if isinstance(v, frozenset) else v for key, v in own.items()}

    def check(self, method: Method | None, rows: int) -> None:
        """Refuse a run that is not allowed, by the key of the policy; no `method`: it is not chosen yet."""
        why, most = "", max(((count, name) for name, count in counts(method)), default=(0, ""))
        if rows < self.min_rows:
            fewer = "and the client has fewer (min_rows)"
            why = f"the node's policy asks for {self.min_rows} rows or more, {fewer}"
        elif method is None:
            if self.methods == frozenset() or not self.discloses:
                why = "the node's policy allows no method (methods, discloses)"
        elif self.methods is not None and method.name not in self.methods:
            allowed = f"it allows {_listed(self.methods)} (methods)"
            why = f"the node's policy does not allow method '{method.name}': {allowed}"
        elif method.discloses not in self.discloses:
            allowed = f"the node's policy allows {_listed(self.discloses)} (discloses)"
            why = f"method '{method.name}' discloses {method.discloses}, and {allowed}"
        elif most[0] > self.steps_a_round:
            why = self._too_many(f"method '{method.name}' has {most[1]}={most[0]:,}", most[0])
        if why:
            raise Forbidden(why)

    def check_client(self, client: Client, data: ClientData) -> None:
        """Refuse steps that could single rows out, by few rows in a round or no row noise, and too many of them."""
        rows, by, why = data.num_rows, client.sums_by, ""
        steps, (alone, together) = sum(p.passes(rows) for p in client.phases), client.rows_of(rows)
        fewest = int(data.fields[by].unique(return_counts=True)[1].min()) if by else rows
        if steps > self.steps_a_round:
            why = self._too_many(f"a round has {steps:,} local steps", steps)
        elif together < self.min_rows:
            why = f"a round's mini-batches hold {together} rows, not {self.min_rows} or more (min_rows)"
        elif alone < (least := min(self.min_count, rows)):
            what = f"a mini-batch holds {alone} of the client's {rows} rows"
            why = f"{what}, not {least} or more (min_count): change batch_size"
        elif fewest < least:
            what = f"the method sends sums of each code of field '{by}'"
            why = f"{what}, and fewer than {least} rows have one of them (min_count): merge codes"
        elif self.budget is not None and client.row_noise is None:
            what = "the rows have a budget of epsilon, and the method adds no noise to rows"
            why = f"{what}: use two_stage(model, row_noise=...)"
        if why:
            raise Forbidden(why)

    def _too_many(self, what: str, count: int) -> str:
        allowed = f"the node's policy allows {self.steps_a_round:,}"
        return f"{what}, and {allowed}: steps_a_round = {count} would allow it"


TYPES: Mapping[str, Any] = get_type_hints(Policy, include_extras=True)
KEYS = tuple(TYPES)


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
        values = tomllib.loads(content.decode())
        for key in values:
            check_known("there is no key", key, KEYS)
        policy = Policy(**values)
        for name in sorted((policy.methods or frozenset()) - {getattr(own, "name", None)}):
            check_known("methods holds", re.split(r"[+ ]", name)[0], names())  # wrappers follow
        for name in sorted(policy.transforms or ()):
            from hierfl.formulas.signatures import TERMS  # pandas

            check_known("transforms holds", name, frozenset(TERMS))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the policy '{path}' cannot be read ({error}): fix the file") from error
    return policy


def _lost(path: Path, seen: Path, error: OSError) -> str:
    """Return what to say of a policy that is named, or was there, and cannot be read."""
    if not isinstance(error, FileNotFoundError):
        return f"the policy '{path}' cannot be read ({error.strerror}): it must be a readable file"
    there = seen.exists() and f", and the node has been under '{seen.read_text()}'"
    back = f"put that file back, or remove '{seen}' to go on under the default policy"
    return f"there is no policy '{path}'{there or ''}: {back if there else 'write or name it'}"


def _check_alone(path: Path, folder: Path) -> None:
    """Refuse a folder with another file that its owner may take for the policy."""
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if name == SEEN or not looks_like_a_policy(name, path.exists()):
            continue
        if not (path.exists() and (folder / name).exists() and path.samefile(folder / name)):
            raise ValueError(
                f"'{folder}' holds '{name}', and the node's policy is read from '{path}' alone: "
                f"rename it to '{FILE}', or remove it"
            )


@lru_cache(maxsize=10_000)
def looks_like_a_policy(name: str, there: bool) -> bool:
    """Return whether a file may be meant as the policy; where one is there, copies may have other endings."""
    plain = normalize("NFKC", name).casefold().strip()
    near = difflib.SequenceMatcher(None, plain, FILE).ratio() > 0.75
    near |= "policy" in plain and (".toml" in plain or plain.partition(".")[0] == "policy")
    return near and (not there or plain.endswith((".toml", ".txt")))


def _listed(values: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(values)) or "none"
