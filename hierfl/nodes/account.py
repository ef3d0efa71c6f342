"""A node's ledger: its account of everything that it has answered, in all runs, as a chain of hashes.

{"before": "SHA-256 of the line before", "time": "2026-01-01T12:00:00.000000+00:00", "kind": "round",
 "run": "1f0c...", "request": "SHA-256 of the request", "spent": 0.25, ...}

`has-account` says how many lines there are and the hash of the last one, and each line of the log
says which the last one was. An account that is gone, cut, reordered or edited stops the node. A line
is on disk before its mark, so a crash between the two leaves a line more than the mark counts.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from hierfl.core.disk import PRIVATE_FILE, private_folder, write_all, write_private, writing
from hierfl.core.trees import Tree, named_leaves
from hierfl.nodes import log
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, Policy
from hierfl.summaries.row_noise import RowNoise

FILE, KEY = "account.jsonl", "account.key"
ROWS = "rows"  # a folder of the codes of rows
AGAIN = "its owner may let it answer again, hierfl node reset-account FOLDER --questions"
ROUNDING = 1e-9  # of a budget
END, RESET = "end", "questions again"  # kinds of entries
START = hashlib.sha256(b"hierfl").hexdigest()  # before the first line


class BrokenLedger(Refused):
    """What a node has answered is not known any more."""


class RowSet(Struct, frozen=True, omit_defaults=True):
    """Rows behind an answer: column -> digest of their cells' codes.

    `labels` are columns by which rows are told apart that the answer does not describe.
    """

    columns: dict[str, str]
    labels: dict[str, str] = {}

    @property
    def every(self) -> Mapping[str, str]:
        """All columns, of both kinds."""
        return {**self.labels, **self.columns}


class Subject(NamedTuple):
    """What a question is about that a node answers once.

    Args:
        rows: which rows and columns; nothing of a formula, so that another one tells nothing new.
        place: of which the node answers one question.
        columns: the schema's columns, which must be the same in all questions about the rows.
        basis: what the schema of a fit must be.
    """

    rows: str
    place: str
    columns: str = ""
    basis: str = ""


class Entry(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of a ledger.

    Args:
        kind: "round", "end", "question", or one of `hierfl.nodes.gate`; "begun" is the first line.
        request: digest of the request; "" where there is none.
        run: name of the run; "" before it.
        subject: what the request is about, where a node answers once; the server's state, of a run.
        answer: the answer, where it is given again.
        rows: the sets of rows behind the answer that are behind no earlier one.
        spent: of the rows' budget; None: nothing was paid.
        time: in UTC.
        before: SHA-256 of the line before.
    """

    kind: str
    request: str = ""
    run: str = ""
    subject: tuple[str, ...] = ()
    answer: str = ""
    rows: tuple[RowSet, ...] = ()
    spent: Annotated[float, Meta(ge=0.0)] | None = None
    time: str = field(default_factory=log.now)
    before: str = ""


def digest(content: bytes) -> str:
    """Return the digest of a request."""
    return hashlib.sha256(content).hexdigest()


def state_of(tree: Tree) -> str:
    """Return the digest of what a server sends a client, message and mail, whatever their order."""
    whole = hashlib.sha256()
    for name, value in sorted(named_leaves({k: tree[k] for k in ("message", "mail")}).items()):
        whole.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        whole.update(value.detach().cpu().contiguous().numpy().tobytes())
    return whole.hexdigest()


class Ledger:
    """The ledger in a node's folder; who holds one holds the folder's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries = folder, list[Entry]()
        self._head, self._size, self._key = START, 0, b""

    @staticmethod
    def at(folder: Path) -> Ledger:
        """Read a ledger, and raise BrokenLedger where it does not add up."""
        made, heads = Ledger(folder), [START]
        for line in _lines(folder / FILE):
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise broken(f"line {len(heads)} of {FILE} cannot be read") from error
            if entry.before != heads[-1]:
                raise broken(f"line {len(heads)} of {FILE} does not follow the one before it")
            heads.append(digest(line))
            made.entries.append(replace(entry, before=""))
            made._size += len(line) + 1
        made._head = heads[-1]
        _check_marks(folder, heads)
        made._key = _key(folder, made.entries)
        return made

    @property
    def key(self) -> bytes:
        """The key of the codes of rows, with which the ledger begins."""
        self._begin()
        return self._key

    def append(self, entry: Entry) -> None:
        """Write down an entry, and wait until it is on disk."""
        self._begin()
        self._write(entry)

    def _begin(self) -> None:
        """Write the first line, of a ledger without one."""
        if self.entries:
            return
        private_folder(self.folder)
        self._key = secrets.token_bytes(32)
        write_private(self.folder / KEY, self._key)
        self._write(Entry("begun", digest(self._key)))

    def _write(self, entry: Entry) -> None:
        line = msgspec.json.encode(replace(entry, before=self._head))
        path = self.folder / FILE
        with writing(path, len(line)):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
            try:
                os.ftruncate(handle, self._size)  # without a line that a crash has cut
                write_all(handle, line + b"\n", self._size, path)
                os.fsync(handle)
            finally:
                os.close(handle)
        self._head, self._size = digest(line), self._size + len(line) + 1
        self.entries.append(entry)
        log.set_mark(self.folder, log.Mark(len(self.entries), self._head))

    # ------------------------------------------------------------ what was answered
    def earlier(self, kind: str, request: str, run: str = "") -> Entry | None:
        """Return the first entry of a request, or None."""
        of = (kind, request, run)
        return next((e for e in self.entries if (e.kind, e.request, e.run) == of), None)

    def given(self, entry: Entry) -> bytes | None:
        """Return the answer to a request that is answered once; refuse another one about the same (`Subject`)."""
        resets = [k for k, before in enumerate(self.entries) if before.kind == RESET]
        own = Subject(*entry.subject)
        for before in self.entries[max(resets, default=0) :]:
            if before.kind != entry.kind:
                continue
            of = Subject(*before.subject)
            same = of[:2] == own[:2]
            if same and before.request == entry.request:
                return before.answer.encode()
            others = of.rows == own.rows and own.columns
            if same or (others and of.columns not in ("", own.columns)):
                raise Refused(
                    f"it has answered a question of the kind '{entry.kind}' about these columns "
                    "before, with other columns, groups, levels or constants: a node answers once; "
                    f"{AGAIN}"
                )
        return None

    def is_paid(self, run: str, request: str) -> bool:
        """Return whether the noise of the answer to a request is paid for."""
        of = (run, request)
        return any((e.run, e.request) == of and e.spent is not None for e in self.entries)

    def of_run(self, run: str) -> set[str]:
        """Return the different rounds that were answered in a run."""
        return {e.request for e in self.entries if (e.kind, e.run) == ("round", run)}

    def check_state(self, run: str, state: str, policy: Policy, *, ends: bool) -> None:
        """Refuse a state of the server that is not of a run's rounds; where the run `ends`, take a few others."""
        of_run = [e for e in self.entries if e.run == run and e.kind in ("round", END)]
        if any(e.subject == (state,) for e in of_run):
            return
        if not ends:
            raise Forbidden(
                "it asks under parameters that the node has not received in the rounds of the run, or "
                "at its end: ask by the fit that the run has returned"
            )
        last = max((k for k, e in enumerate(of_run) if e.kind == "round"), default=-1)
        if (count := len({e.subject for e in of_run[last + 1 :]})) >= policy.states_a_run:
            raise Forbidden(
                f"the node has answered under {count} states of the server after the last round of "
                "the run: begin a new run, or let its owner set a larger states_a_run in its policy"
            )
        self.append(Entry(END, state, run, (state,)))

    def of_today(self, kind: str, now: datetime | None = None) -> set[tuple[str, str]]:
        """Return the different requests of a kind, with their runs, of the last 24 hours."""
        since = log.written((now or datetime.now(UTC)) - timedelta(days=1))
        return {(e.run, e.request) for e in self.entries if e.kind == kind and e.time > since}

    def check_limits(
        self, kind: str, run: str, request: str, policy: Policy, most: int | None
    ) -> None:
        """Refuse a new request beyond what the policy allows a day, or a method in a run."""
        if self.earlier(kind, request, run) is not None:
            return
        allowed = policy.rounds_a_day if kind == "round" else policy.questions_a_day
        if allowed is not None and (count := len(self.of_today(kind))) >= allowed:
            raise Forbidden(
                f"the node's policy allows {allowed} {kind}s a day, and it has been through "
                f"{count}: ask again tomorrow, or let its owner set a larger {kind}s_a_day"
            )
        if kind == "round" and most is not None and len(self.of_run(run)) >= most:
            raise Refused(
                f"the method takes at most {most} rounds, and the node has answered as many of "
                f"run '{run}': begin a new run"
            )

    def check_budget(self, how: RowNoise, policy: Policy) -> None:
        """Refuse a step whose noise the budget of the rows does not pay for, in all runs together."""
        if self.share_spent(how, policy, how.spent_by_round) > 1.0 + ROUNDING:
            epsilon, delta = policy.budget or (how.epsilon, how.delta)
            raise Forbidden(
                f"the rows' budget of epsilon {epsilon:g} at delta {delta:g} is spent: the node "
                "answers nothing new about them"
            )

    def share_spent(self, how: RowNoise, policy: Policy, more: float = 0.0) -> float:
        """Return which share of the rows' budget is spent, in all runs together, with what is spent `more`."""
        worth = how.worth(*(policy.budget or (how.epsilon, how.delta)))
        return (sum(entry.spent or 0.0 for entry in self.entries) + more) / worth


# ------------------------------------------------------------ what must add up
def _lines(path: Path) -> list[bytes]:
    """Return the whole lines of a file; what follows them was cut off by a crash."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise broken(f"{path.name} cannot be read") from error


def _check_marks(folder: Path, heads: list[str]) -> None:
    """Refuse a ledger of fewer or other lines than the mark and the log know of."""
    count = len(heads) - 1
    mark, in_log = log.mark_of(folder), log.last_account(folder)
    if not count and any(os.path.lexists(folder / name) for name in (log.MARK, ROWS)):
        raise broken(f"{FILE} is gone, or empty")
    if mark is None and (count > 1 or os.path.lexists(folder / log.MARK)):
        raise broken(f"{log.MARK} is gone, or cannot be read")
    if mark is not None and heads[min(mark.entries, count)] != mark.head:
        raise broken(f"{FILE} lacks lines that were in it, or has others")
    if in_log not in (None, *heads):
        raise broken(f"{FILE} lacks lines that {log.FILE} names")


def _key(folder: Path, entries: list[Entry]) -> bytes:
    """Return the key of the codes of rows; it must be the one of the first line."""
    if not entries:
        return b""
    try:
        key = (folder / KEY).read_bytes()
    except OSError as error:
        raise broken(f"{KEY} cannot be read") from error
    if (entries[0].kind, entries[0].request) != ("begun", digest(key)):
        raise broken(f"{KEY} is not the one of {FILE}")
    return key


def broken(why: str) -> BrokenLedger:
    """Return the error of a ledger that does not add up, with the remedy."""
    return BrokenLedger(
        f"the node's account of what it has answered does not add up ({why}): its owner puts the "
        "node's folder back as it was, from the newest backup; or forgets what the node has "
        "answered and spent, hierfl node reset-account FOLDER"
    )


def answer_questions_again(folder: Path) -> None:
    """Let what a node answers once be answered again, for its owner; limits, budgets and rows stay as they are."""
    with log.answering(folder, of_owner=True):
        Ledger.at(folder).append(Entry(RESET))
        log.left(folder, b"The owner lets questions about rows be answered again.", "owner")


def begin_again(folder: Path) -> Path | None:
    """Begin a new ledger for an owner who knows that the earlier one is lost; return where its lines are put."""
    path, aside = folder / FILE, None
    with log.answering(folder, of_owner=True):
        if os.path.lexists(path):
            aside = folder / f"account-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.jsonl"
            path.replace(aside)
        (folder / log.MARK).unlink(missing_ok=True)
        shutil.rmtree(folder / ROWS, ignore_errors=True)
        made = Ledger(folder)
        made.append(Entry("begun again", digest(made.key)))
        log.left(folder, b"The owner has begun a new account.", "owner")
    return aside
