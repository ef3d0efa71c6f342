"""A node's ledger: a chain of lines that stops the node where it does not add up, and goes on after a crash."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hierfl.cli import app
from hierfl.cli.officer_page import entries
from hierfl.core import disk
from hierfl.core.disk import CannotWrite
from hierfl.nodes import account as module
from hierfl.nodes import log
from hierfl.nodes.account import BrokenLedger, Entry, Ledger, RowSet, begin_again
from hierfl.nodes.messages import NodeFailed, Refused
from hierfl.nodes.node import introduce
from hierfl.nodes.policy import Forbidden
from hierfl.nodes.stations import said
from tests.nodes.one_process import lone, rows
from tests.nodes.test_account import ask, noisy
from tests.nodes.test_faults import plain


def written(folder: Path, count: int = 3) -> Path:
    ledger = Ledger.at(folder)
    for k in range(count):
        ledger.append(Entry("round", f"request {k}", "run", spent=0.25))
        log.left(folder, b"an answer", "update")
    return folder / "account.jsonl"


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows_behind = RowSet({"age": "12", "y": "34"}, {"ward": "56"})
    entry = Entry("times", "a", subject=("b", "c"), answer="d", rows=(rows_behind,), spent=0.5)
    Ledger.at(tmp_path).append(entry)
    read = Ledger.at(tmp_path)
    assert read.entries[1:] == [entry] and read.entries[0].kind == "begun"
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("*account*")} == {0}


def lines_of(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], object]:
    def changed(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(change(lines)))

    return changed


def spends_less(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2].replace(b"0.25", b"0.01"), *lines[3:]]


def all_but_a_state(folder: Path) -> None:
    for there in folder.iterdir():
        shutil.rmtree(there) if there.is_dir() else there.unlink()
    (folder / "1f0c.state").write_bytes(b"of a run")


DEEP = b"[" * 100_000
DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut in a line": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "cut by a line": lines_of(lambda lines: lines[:-1]),
    "without its first line": lines_of(lambda lines: lines[1:]),
    "without a line within": lines_of(lambda lines: lines[:2] + lines[3:]),
    "in another order": lines_of(lambda lines: [lines[0], lines[2], lines[1], lines[3]]),
    "edited": lines_of(spends_less),
    "edited in its last line": lines_of(lambda ls: [*ls[:-1], ls[-1].replace(b"0.25", b"0.01")]),
    "no text": lambda path: path.write_bytes(os.urandom(400) + b"\n"),
    "of nothing but a key": lines_of(lambda lines: lines[:1]),
    "a folder": lambda path: path.rename(path.with_name("before")).with_name(path.name).mkdir(),
    "and its mark gone": lambda path: [of.unlink() for of in (path, path.parent / log.MARK)],  # type: ignore[func-returns-value]
    "gone with all but a client state": lambda path: all_but_a_state(path.parent),
    "without a run whose state is there": lambda path: path.with_name("1f0c.state").touch(),
    "without its mark": lambda path: (path.parent / log.MARK).unlink(),
    "without its other mark": lambda path: (path.parent / log.COPY).unlink(),
    "with no mark that is one": lambda path: (path.parent / log.MARK).write_bytes(b"[-1, 3]"),
    "with a mark of endless levels": lambda path: (path.parent / log.MARK).write_bytes(DEEP),
    "whose log is gone": lambda path: (path.parent / log.FILE).unlink(),
    "whose log is cut by a line": lambda path: lines_of(lambda lines: lines[:-1])(
        path.parent / log.FILE
    ),
    "whose log is edited": lambda path: lines_of(
        lambda lines: [*lines[:-1], lines[-1].replace(b"update", b"upkeep")]
    )(path.parent / log.FILE),
    "without its key": lambda path: (path.parent / module.KEY).unlink(),
    "of another key": lambda path: (path.parent / module.KEY).write_bytes(b"0" * 32),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_account_that_does_not_add_up_stops_the_node(name: str, tmp_path: Path) -> None:
    DAMAGE[name](written(tmp_path))
    with pytest.raises(BrokenLedger, match=r"does not add up .*hierfl node reset-account FOLDER"):
        Ledger.at(tmp_path)
    for begin in (introduce, lone):
        with pytest.raises(Refused, match="does not add up"):
            begin(plain(), rows().select(["east"]), tmp_path)


@pytest.mark.parametrize("lacks", [*log.MARKS, log.FILE])
def test_account_log_and_mark_of_an_older_day_do_not_make_a_node_forget(
    lacks: str, tmp_path: Path
) -> None:
    """A node that has answered questions about rows since has no later answer of a run."""
    names = {written(tmp_path, 2).name, *log.MARKS, log.FILE} - {lacks}
    before = {name: (tmp_path / name).read_bytes() for name in names}
    if lacks == log.FILE:
        written(tmp_path)
    else:
        Ledger.at(tmp_path).append(Entry("schema", "1f0c", answer="{}"))
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    verb = "names" if lacks == log.FILE else "counts"
    with pytest.raises(BrokenLedger, match=f"lacks lines that {lacks} {verb}"):
        Ledger.at(tmp_path)


def test_a_budget_is_not_whole_again_without_its_account(tmp_path: Path) -> None:
    one = noisy(tmp_path)
    ask(one, 0)
    names = ("account.jsonl", *log.MARKS, log.FILE)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    ask(one, 7)
    now = {name: (tmp_path / name).read_bytes() for name in before}
    for files, is_whole in ((before, False), (now, True)):  # a backup, but for the last answer
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        with nullcontext() if is_whole else pytest.raises(BrokenLedger, match="lacks answers"):
            Ledger.at(tmp_path)
    for name in names:
        (tmp_path / name).unlink()
        with pytest.raises(Refused, match="does not add up"):
            ask(noisy(tmp_path, seed=5), 0)


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", range(9))
def test_a_crash_at_any_write_leaves_a_ledger_that_adds_up(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is written whole, or by half, or not at all; the next process goes on."""
    left, half = [at], at % 2 == 1

    def crashing(real: Any) -> Any:
        def write(*args: Any) -> Any:
            if left[0] == 0:
                if half:
                    real(*(a[: len(a) // 2] if isinstance(a, bytes) else a for a in args))
                raise Crash
            left[0] -= 1
            return real(*args)

        return write

    with monkeypatch.context() as patched:
        for real in (disk.write_all, disk.write_private):
            patched.setattr(disk, real.__name__, crashing(real))
        patched.setattr(module, "write_private", disk.write_private)
        for k in range(9):
            try:
                Ledger.at(tmp_path).append(Entry("round", str(k), "run", spent=0.25))
            except Crash:
                break
    ledger = Ledger.at(tmp_path)
    before = len(ledger.entries)
    ledger.append(Entry("round", "last", "run"))
    again = Ledger.at(tmp_path)
    assert again.entries[-1].request == "last" and len(again.entries) == max(before, 1) + 1
    assert json.loads((tmp_path / log.MARK).read_bytes())[0] == len(again.entries)


def test_a_full_disk_loses_no_spending_and_says_what_to_do(tmp_path: Path) -> None:
    """Nothing more is written from some point on, until there is space; then the node goes on."""
    for at in range(0, 16, 5):
        folder, left = tmp_path / str(at), [at]
        one = noisy(folder)
        first = ask(one, 0)

        def full(real: Any, left: list[int] = left) -> Any:
            def write(*args: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args)

            return write

        with pytest.MonkeyPatch.context() as patched:
            for name in ("pwrite", "fsync"):
                patched.setattr(os, name, full(getattr(os, name)))
            for _ in range(2):
                try:
                    ask(one, 7)
                except (NodeFailed, CannotWrite) as error:
                    assert "its owner frees space there" in said(error, folder) and left[0] < 0
        assert ask(one, 7) != first
        spent = [entry for entry in Ledger.at(folder).entries if entry.spent is not None]
        assert len({entry.request for entry in spent}) == len(spent) == 2
    assert left[0] >= 0, "the last one has had enough space"


def test_no_kill_of_an_answer_stops_the_node(tmp_path: Path) -> None:
    """Whatever step of an answer is the last, the same answer is given afterwards, and is paid for once."""
    expected, sync = ask(noisy(tmp_path / "whole"), 0), os.fsync
    for at in range(0, 40, 7):
        count = [0]

        def fsync(handle: int, at: int = at, count: list[int] = count) -> None:
            count[0] += 1
            if count[0] > at:
                raise Crash
            sync(handle)

        folder = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patched:  # of no program
            patched.setattr(os, "fsync", fsync)
            try:
                ask(noisy(folder), 0)
                break
            except Crash:
                pass
        answer = ask(noisy(folder), 0)
        assert len(answer) == len(expected)
        assert sum(e.spent or 0.0 for e in Ledger.at(folder).entries) > 0.0
        ask(noisy(folder), 7)
        with pytest.raises(Forbidden, match="budget"):
            ask(noisy(folder, seed=5), 0)
    assert 5 < at < 36


def test_the_owner_begins_again_on_purpose(tmp_path: Path) -> None:
    one = noisy(tmp_path)
    ask(one, 0), ask(one, 7)
    (tmp_path / "account.jsonl").unlink()
    with pytest.raises(BrokenLedger):
        ask(one, 0)
    made = CliRunner().invoke(app, ["node", "reset-account", str(tmp_path)])
    assert made.exit_code == 0 and "begins again" in made.output
    ask(noisy(tmp_path, seed=5), 0)
    assert entries(tmp_path)[-2]["text"] == "The owner has begun a new account."


def test_what_is_forgotten_is_kept_aside(tmp_path: Path) -> None:
    content = written(tmp_path).read_bytes()
    aside = begin_again(tmp_path)
    assert aside is not None and aside.read_bytes() == content
    assert begin_again(tmp_path / "new") is None
    assert len(Ledger.at(tmp_path).entries) == 2


def test_a_folder_of_no_node_has_no_account(tmp_path: Path) -> None:
    DAMAGE["gone"](written(tmp_path))
    nowhere, other = str(tmp_path / "nowhere"), tmp_path / "other"
    other.mkdir()
    for options, why in (
        ([nowhere], "does not exist"),
        ([nowhere, "--questions"], "does not exist"),
        ([str(other)], "is not a node's folder"),
        ([str(other), "--questions"], "is not a node's folder"),
        ([str(tmp_path), "--questions"], "does not add up"),
    ):
        made = CliRunner().invoke(app, ["node", "reset-account", *options])
        said = " ".join(
            made.output.replace("│", " ").split()
        )  # of lines wrapped by the path's length
        assert made.exit_code != 0 and why in said
    assert not [*other.iterdir()]
