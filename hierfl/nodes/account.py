"""A node's ledger: its account of everything that it has answered, in all runs, as a chain of hashes.

{"before": "SHA-256 of the line before", "time": "2026-01-01T12:00:00.000000+00:00", "kind": "round",
 "run": "1f0c...", "request": "SHA-256 of the request", "spent": 0.25, ...}

`has-account` and `has-answered` say how many lines there are and the hash of the last one, as of the log,
whose lines say which the account's last one was. An account that is gone, cut, reordered, edited or
of an older day stops the node. A line is on disk before its marks, which a crash between leaves behind it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from hierfl.core.disk import private_folder, write_line, write_private
from hierfl.core.trees import Tree, named_leaves
from hierfl.nodes import log
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, Policy
from hierfl.summaries.row_noise import RowNoise

FILE, KEY = "account.jsonl", "account.key"
ANSWER = ".answer"  # of a run, the last one
ROWS = "rows"  # a folder of the codes of rows
AGAIN = "its owner may let it answer again, hierfl node reset-account FOLDER --questions"
ROUNDING = 1e-9  # of a budget
END, QUESTION, RESET = "end", "question", "questions again"  # kinds of entries
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
    """What a question is about that a node answers once."""

    rows: str  # and columns; nothing of a formula, so that another one tells nothing new
    place: str  # of which the node answers one question
    columns: str = ""  # of the schema; it and `least` are the same in all questions about the rows
    least: str = ""  # how few rows may be told of
    basis: str = ""  # what the schema of a fit must be


class Entry(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of a ledger."""

    kind: str  # "round", "end", "question", or one of `hierfl.nodes.gate`; first "begun"
    request: str = ""  # its digest
    run: str = ""  # its name; "": before it
    subject: tuple[str, ...] = ()  # of what is answered once; the server's state, of a run
    answer: str = ""  # where it is given again
    rows: tuple[RowSet, ...] = ()  # sets of rows behind the answer that are behind no earlier one
    spent: Annotated[float, Meta(ge=0.0)] | None = None  # of the rows' budget; None: it is free
    time: str = field(default_factory=log.now)
    before: str = ""  # SHA-256 of the line before


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
        made, heads, content = Ledger(folder), [START], b""
        try:
            content = (folder / FILE).read_bytes()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise broken(f"{FILE} cannot be read") from error
        for line in content.split(b"\n")[:-1]:  # what follows was cut off by a crash
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
        _check_marks(folder, heads, made.entries)
        made._key = _key(folder, made.entries)
        return made

    @property
    def key(self) -> bytes:
        """The key of the codes of rows, with which the ledger begins."""
        if not self.entries:
            private_folder(self.folder)
            self._key = secrets.token_bytes(32)
            write_private(self.folder / KEY, self._key)
            self._write(Entry("begun", digest(self._key)))
        return self._key

    def append(self, entry: Entry) -> None:
        """Write down an entry, and wait until it is on disk."""
        _ = self.key  # the first line
        self._write(entry)

    def _write(self, entry: Entry) -> None:
        line = msgspec.json.encode(replace(entry, before=self._head))
        write_line(self.folder / FILE, line, self._size)
        self._head, self._size = digest(line), self._size + len(line) + 1
        self.entries.append(entry)
        before = log.mark_of(self.folder) or ()
        log.set_mark(self.folder, log.Mark(len(self.entries), self._head, *before[2:]))

    # ------------------------------------------------------------ what was answered
    def given(self, entry: Entry) -> bytes | None:
        """Return the answer to a request that is answered once; refuse another one about the same (`Subject`)."""
        resets = [k for k, before in enumerate(self.entries) if before.kind == RESET]
        own = Subject(*entry.subject)
        for before in (e for e in self.entries[max(resets, default=0) :] if e.kind == entry.kind):
            of = Subject(*before.subject)
            same = of[:2] == own[:2]
            if of == own and before.request == entry.request:
                return before.answer.encode()
            shared = zip((of.columns, of.least), (own.columns, own.least), strict=True)
            differs = any("" != value != other != "" for value, other in shared)
            if same or (of.rows == own.rows and differs):
                raise Refused(
                    f"it has answered another question of the kind '{entry.kind}' about these columns: "
                    f"a node answers once; {AGAIN}"
                )
        return None

    def check_state(self, run: str, state: str, policy: Policy, *, ends: bool, asks: bool) -> None:
        """Refuse a state of the server that is not of a run's rounds; where the run `ends`, take a few others.

        Whoever `asks` about the client does so under a few of all these: rounds take any of a server.
        """
        of_run = [(e.kind, e.subject) for e in self.entries if e.run == run]
        rounds = {of for kind, of in of_run if kind == "round"}
        own = {of for kind, of in of_run if kind == QUESTION}
        own |= {of for kind, of in of_run if kind == END} - rounds
        is_known = (state,) in rounds
        if (state,) in own or (is_known and not asks):
            return
        if not rounds:
            raise Refused("the node has been through no round of the run: ask after one")
        if not ends and not is_known:
            what = "it asks under parameters that the node has not received in the run"
            raise Forbidden(f"{what}: ask by its fit")
        if len(own) >= policy.states_a_run:
            what = f"the node answers under {policy.states_a_run} states of a run (states_a_run)"
            raise Forbidden(f"{what}: begin a new run")
        if not is_known:
            self.append(Entry(END, state, run, (state,)))

    def check_limits(
        self, kind: str, run: str, request: str, policy: Policy, most: int | None
    ) -> None:
        """Refuse a new request beyond what the policy allows in 24 hours, or a method in a run."""
        times = {(e.run, e.request): e.time for e in self.entries if e.kind == kind}
        if (run, request) in times:
            return
        allowed = policy.rounds_a_day if kind == "round" else policy.questions_a_day
        count = sum(time > log.now(timedelta(days=1)) for time in times.values())
        if allowed is not None and count >= allowed:
            raise Forbidden(
                f"the node's policy allows {allowed} {kind}s a day, and it has been through {count} "
                f"({kind}s_a_day): ask again tomorrow"
            )
        if most is not None and sum(of == run for of, _ in times) >= most:
            raise Refused(
                f"the method takes at most {most} rounds, which are answered in run '{run}'"
            )

    def check_budget(self, how: RowNoise, policy: Policy) -> None:
        """Refuse a step whose noise the budget of the rows does not pay for, in all runs together."""
        if self.share_spent(how, policy, how.spent_by_round) > 1.0 + ROUNDING:
            epsilon, delta = policy.budget or (how.epsilon, how.delta)
            raise Forbidden(f"the rows' budget of epsilon {epsilon:g} at delta {delta:g} is spent")

    def share_spent(self, how: RowNoise, policy: Policy, more: float = 0.0) -> float:
        """Return which share of the rows' budget is spent, in all runs together, with what is spent `more`."""
        worth = how.worth(*(policy.budget or (how.epsilon, how.delta)))
        return (sum(entry.spent or 0.0 for entry in self.entries) + more) / worth


def _check_marks(folder: Path, heads: list[str], entries: list[Entry]) -> None:
    """Refuse a ledger of fewer or other lines than the mark, the log and kept answers know of."""
    count, marks = len(heads) - 1, {name: log.mark_of(folder, name) for name in log.MARKS}
    in_log = log.accounts_since(folder, marks[log.MARK] or log.Mark(0, ""))
    there = {name: os.path.lexists(folder / name) for name in (*log.MARKS, ROWS)}
    requests, runs = ({getattr(e, name) for e in entries} for name in ("request", "run"))
    wrong = {f"{FILE} is gone, or empty": not count and any(there.values())}
    for name, mark in marks.items():
        wrong[f"{name} is gone, or cannot be read"] = not mark and (count > 1 or there[name])
        if mark and heads[min(mark.entries, count)] != mark.head:
            wrong[f"{FILE} lacks lines that {name} counts"] = True
    wrong |= {
        f"{log.FILE} lacks lines that were in it": in_log is None,
        f"{FILE} lacks lines that {log.FILE} names": not {*heads}.issuperset(in_log or ()),
        f"{FILE} lacks answers that are there": not requests.issuperset(answered_last(folder)),
        f"{FILE} lacks runs that are there": not runs.issuperset(
            p.stem for p in folder.glob("*.state")
        ),
    }
    for why in (why for why, is_so in wrong.items() if is_so):
        raise broken(why)


def answered_last(folder: Path) -> Iterator[str]:
    """Yield the digest of each run's last request, whose answer is kept after it."""
    for path in folder.glob(f"*{ANSWER}"):
        with open(path, "rb") as file:
            yield file.read(64).decode(errors="replace")


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
        f"the node's account of what it has answered does not add up ({why}): its owner restores "
        "the node's folder from the newest backup, or makes it forget what it has answered and "
        "spent, hierfl node reset-account FOLDER"
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
        for file in (*(folder / name for name in log.MARKS), *folder.glob(f"*{ANSWER}")):
            file.unlink(missing_ok=True)
        shutil.rmtree(folder / ROWS, ignore_errors=True)
        made = Ledger(folder)
        made.append(Entry("begun again", digest(made.key)))
        for path in folder.glob("*.state"):  # runs that go on
            made.append(Entry("begun again", run=path.stem))
        log.left(folder, b"The owner has begun a new account.", "owner")
    return aside
