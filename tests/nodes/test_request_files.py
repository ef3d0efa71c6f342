"""Requests in files: read, answered by hand or in a shared folder, in which the other side may put anything."""

import json
import os
import pickle
import shlex
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hierfl
from hierfl import cli
from hierfl.cli.node_folder import station_at
from hierfl.cli.officer_page import entries
from hierfl.formulas.questions import Question
from hierfl.nodes import TooFewNodes as TooFew
from hierfl.nodes import by_files
from hierfl.nodes.account import digest
from hierfl.nodes.envelope import read_answer, write_answer, write_request
from hierfl.nodes.messages import Refused, to_bytes
from hierfl.nodes.request_files import MOST_ANSWERED, answer_waiting
from hierfl.nodes.same_process import folder_of
from tests.nodes.test_faults import plain
from tests.nodes.transports import RAN, TEXT, Evil, assert_same, frames, plain_stations

pytestmark = pytest.mark.usefixtures("without_copies")

ASK = write_request("schema", Question("columns", least=5).json().encode())


@pytest.fixture
def north(tmp_path: Path) -> Path:
    """A node's folder with rows and a node.toml, and a request to it."""
    folder = tmp_path / "north"
    folder.mkdir()
    frames()["va"].to_csv(folder / "rows.csv", index=False)
    (folder / "node.toml").write_text(
        f'rows = "rows.csv"\nclient = "north"\nformula = "{TEXT}"\nfamily = "bernoulli"\n'
        'clients = "hospital"\n'
    )
    (tmp_path / "ask.hfl").write_bytes(ASK)
    return folder


@pytest.fixture
def mail(tmp_path: Path) -> Path:
    """A shared folder with one request."""
    folder = tmp_path / "mail"
    folder.mkdir()
    (folder / "1.request.hfl").write_bytes(ASK)
    return folder


Work = Callable[[Callable[[], object]], None]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Have something done whenever the server waits; a second passes with each look at the clock."""

    def set_to(work: Callable[[], object]) -> None:
        clock = iter(range(10**6)).__next__
        time = SimpleNamespace(sleep=lambda _: work(), monotonic=clock)
        monkeypatch.setattr(sys.modules["hierfl.nodes.request_files"], "time", time)

    return set_to


def run(*command: str) -> Any:
    return CliRunner().invoke(cli.app, list(command))


def test_a_request_is_read_answered_and_the_answer_read(north: Path, tmp_path: Path) -> None:
    asked, answer = tmp_path / "ask.hfl", tmp_path / "answer.hfl"
    shown = run("show", str(asked))
    assert "Asks for counts and sums of the rows" in shown.output and '"columns"' in shown.output
    done = run("node", "answer", str(asked), "--folder", str(north))
    assert done.exit_code == 0 and done.stderr == f"Answered {asked}.\n"
    answer.write_bytes(done.stdout_bytes)
    found = json.loads(read_answer(asked.read_bytes(), done.stdout_bytes))
    assert found["client"] == "north"
    assert '"client": "north"' in run("show", str(answer)).output
    assert [one["what"] for one in entries(north)] == ["schema"]


def test_the_owner_is_told_of_a_refusal(north: Path, tmp_path: Path) -> None:
    (north / "policy.toml").write_text('approve = "ask"\n')
    done = run("node", "answer", str(tmp_path / "ask.hfl"), "--folder", str(north))
    assert "Refused" in done.stderr and "hierfl node approve FOLDER schema-" in done.stderr
    (tmp_path / "answer.hfl").write_bytes(done.stdout_bytes)
    assert "Refused: " in run("show", str(tmp_path / "answer.hfl")).output
    assert run("node", "answer", str(tmp_path / "none"), "--folder", str(north)).exit_code == 2


def test_all_requests_of_a_folder_are_answered_once(north: Path, mail: Path) -> None:
    for count in (1, 0):
        done = run("node", "answer", str(mail), "--folder", str(north))
        assert done.exit_code == 0 and done.stderr.count("Answered") == count
    assert (mail / "1.answer.hfl").exists()


def test_show_refuses_what_is_no_request(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(Evil()))
    done = run("show", str(tmp_path / "x"))
    assert done.exit_code == 1 and "is neither a request nor an answer" in done.output
    assert run("show", str(tmp_path / "y")).exit_code == 2
    (tmp_path / "x").write_bytes(write_request("round", pickle.dumps(Evil())))
    assert "neither JSON nor tensors" in run("show", str(tmp_path / "x")).output
    assert not RAN.exists()


def test_show_names_the_tensors_of_a_round(tmp_path: Path) -> None:
    content = to_bytes({"message": {"loc": torch.ones(9)}, "mail": {}}, {"run": "r", "round": 3})
    (tmp_path / "x").write_bytes(write_request("round", content))
    shown = run("show", str(tmp_path / "x")).output
    assert "update of one round" in shown and '"round": 3' in shown
    assert "['message']['loc']  float64 (9,): 1, 1, 1, 1, 1, 1, ..." in shown


def test_what_is_shown_does_not_move_the_cursor(tmp_path: Path) -> None:
    """Whoever wrote the file may have put in what a terminal obeys."""
    evil = "\x1b[2J\u202e\r\n"
    tensors = to_bytes({evil: torch.ones(1)}, {"kind": evil, evil: evil})
    files = [
        write_request(evil, b""),
        write_request("round", tensors),
        write_request("agree", json.dumps({evil: evil}).encode()),
        write_request("agree", evil.encode()),
        write_answer(b"", wrong=evil),
        json.dumps({"hierfl": 1, "answer": evil, "bytes": evil}).encode() + b"\n",
        json.dumps({"hierfl": 1, "answer": [evil], "bytes": 0}).encode() + b"\n",
    ]
    for content in files:
        (tmp_path / "x").write_bytes(content)
        shown = run("show", str(tmp_path / "x")).output.replace("\n", "")
        assert shown and all(sign.isprintable() for sign in shown), content
    with pytest.raises(Refused) as error:  # of which the server's user is warned
        read_answer(b"", write_answer(b"", wrong=evil))
    assert str(error.value).isprintable()


def test_the_name_of_a_file_is_no_command_and_no_cursor(tmp_path: Path, north: Path) -> None:
    """The other side of a shared folder names the files, and `show` prints a command to copy."""
    evil = tmp_path / "x'; touch ran; '.request.hfl"
    evil.write_bytes(write_request("agree", b"{}"))
    (command,) = (of for of in run("show", str(evil)).output.splitlines() if "--only" in of)
    assert str(evil) in shlex.split(command.partition(": ")[2])
    evil = evil.rename(tmp_path / "x\x1b[2J.request.hfl")
    assert run("show", str(evil)).exit_code == 2
    assert list(answer_waiting(station_at(north), tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have rows, and a model or a formula"),
        ('rows = "rows.csv"\nformula = "y ~ x"\nmodel = "a:b"\n', "and a model or a formula"),
        ("rows = 3\n", "Expected `str`, got `int`"),
        ('row = "x"\n', "Invalid enum value 'row'"),
        ("rows", "cannot be read"),
        ('rows = "rows.csv"\nmodel = "nowhere_at_all:x"\n', "cannot be imported"),
        ('rows = "rows.csv"\nformula = "y ~"\nclients = "h"\n', "ends with '~'"),
    ],
)
def test_a_wrong_node_file_is_refused(text: str, why: str, north: Path, tmp_path: Path) -> None:
    (north / "node.toml").write_text(text)
    done = run("node", "answer", str(tmp_path / "ask.hfl"), "--folder", str(north))
    assert done.exit_code == 1 and why in " ".join(done.output.split())
    (north / "node.toml").unlink()
    done = run("node", "answer", str(tmp_path / "ask.hfl"), "--folder", str(north))
    assert done.exit_code == 1 and "No such file" in done.output


def test_an_answer_is_not_written_through_a_link(north: Path, mail: Path) -> None:
    own = north / "policy.toml"
    own.write_text("min_rows = 20\n")
    for name in ("1.answer.hfl", "1.answer.draft"):
        (mail / name).symlink_to(own)
    assert run("node", "answer", str(mail), "--folder", str(north)).exit_code == 0
    assert own.read_text() == "min_rows = 20\n"
    assert not (mail / "1.answer.hfl").is_symlink()


def test_what_is_no_file_is_no_request(mail: Path, tmp_path: Path) -> None:
    """A link would have the node tell the hash of a file of its own; a pipe would have it wait."""
    node = plain_stations(tmp_path)["north"]
    (tmp_path / "secret").write_text("4711")
    (mail / "2.request.hfl").symlink_to(tmp_path / "secret")
    (mail / "3.request.hfl").mkdir()
    os.mkfifo(mail / "4.request.hfl")
    (mail / "5.request.hfl").symlink_to(mail / "nowhere")
    (mail / "6.request.hfl").write_bytes(ASK)
    answered = [path.name for path, _ in answer_waiting(node, mail)]
    assert answered == ["1.request.hfl", "6.request.hfl"]
    assert sorted(path.name for path in mail.glob("*.answer.*")) == ["1.answer.hfl", "6.answer.hfl"]


def test_a_file_that_is_too_long_is_not_read(mail: Path, tmp_path: Path) -> None:
    node = plain_stations(tmp_path)["north"]
    os.truncate(mail / "1.request.hfl", 1 << 32)  # a hole, which takes no space
    assert not list(answer_waiting(node, mail))


def test_nothing_is_worked_out_that_has_no_place(mail: Path, tmp_path: Path) -> None:
    """A request with so long a name that none with a longer one can be written would else be answered at each look."""
    node = plain_stations(tmp_path)["north"]
    whole = write_request("introduce", b"")
    (mail / "1.request.hfl").write_bytes(whole)
    (mail / f"{'0' * 240}.request.hfl").write_bytes(whole)
    (first,) = (path.name for path, _ in answer_waiting(node, mail))
    assert first == "1.request.hfl" and not list(answer_waiting(node, mail))
    said = [one["what"] for one in entries(tmp_path / "north")]
    assert said.count("introduction") == 1 and said.count("refusal") == 2


def test_by_hand_no_file_of_gigabytes_is_read_and_no_pipe_waited_for(
    north: Path, mail: Path
) -> None:
    os.truncate(mail / "1.request.hfl", 1 << 31)
    os.mkfifo(mail / "2.request.hfl")
    for name in ("1.request.hfl", "2.request.hfl", "none.request.hfl"):
        for command in (["show"], ["node", "answer", "--folder", str(north)]):
            done = run(*command, str(mail / name))
            assert done.exit_code == 2
            assert ("No such file" if name[0] == "n" else "it is not a file of") in done.output


def test_a_policy_that_cannot_be_read_stops_who_answers(north: Path, mail: Path) -> None:
    (north / "policy.toml").write_text("min_row = 20\n")
    done = run("node", "answer", str(mail), "--folder", str(north))
    assert done.exit_code == 1 and "did you mean 'min_rows'" in " ".join(done.output.split())


def test_half_a_request_is_answered_again_once_it_is_whole(mail: Path, tmp_path: Path) -> None:
    node, whole = plain_stations(tmp_path)["north"], write_request("introduce", b"")
    (mail / "1.request.hfl").write_bytes(whole[:-1])
    ((_, first),) = answer_waiting(node, mail)
    (mail / "1.request.hfl").write_bytes(whole)
    ((_, second),) = answer_waiting(node, mail)
    assert b"not a file" in first and json.loads(read_answer(whole, second))["client"] == "north"


def test_a_fit_by_files_that_is_started_again_asks_nothing_twice(
    tmp_path: Path, meanwhile: Work
) -> None:
    stations, mail = plain_stations(tmp_path / "nodes"), tmp_path / "mail"
    asked: list[Any] = []

    def nodes_work() -> None:
        for name, one in stations.items():
            asked.extend(answer_waiting(one, mail / name))

    meanwhile(nodes_work)
    first = hierfl.nodes.fit(plain(), by_files(mail, stations, timeout=10.0), rounds=2)
    count = len(asked)
    assert count == 16  # introduce, agree and two rounds, of four nodes
    again = hierfl.nodes.fit(plain(), by_files(mail, stations, timeout=10.0), rounds=2)
    assert len(asked) == count
    assert_same(again, first)


def test_what_an_owner_has_not_approved_yet_is_asked_again(tmp_path: Path, meanwhile: Work) -> None:
    stations = plain_stations(tmp_path / "nodes")
    (tmp_path / "nodes" / "north").mkdir(parents=True)
    (tmp_path / "nodes" / "north" / "policy.toml").write_text('approve = "ask"\n')
    mail = tmp_path / "mail"
    meanwhile(lambda: [list(answer_waiting(one, mail / name)) for name, one in stations.items()])
    nodes = by_files(mail, stations, timeout=10.0, fewest=4)
    for _ in range(2):  # the introduction, and the run
        with pytest.raises(TooFew, match="waits for the approval") as error:
            hierfl.nodes.fit(plain(), nodes, rounds=1)
        run_ = str(error.value).partition("hierfl node approve FOLDER ")[2].split()[0].strip(");")
        assert run("node", "approve", str(tmp_path / "nodes" / "north"), run_).exit_code == 0
    found = hierfl.nodes.fit(plain(), nodes, rounds=1)
    assert len(found.clients) == 4


def test_what_is_no_answer_is_not_read_at_each_look(tmp_path: Path, meanwhile: Work) -> None:
    """Half a gigabyte of a hole in place of an answer, and two in place of the request."""
    stations, mail = plain_stations(tmp_path / "nodes"), tmp_path / "mail"
    request = write_request("introduce", b"")
    (mail / "north").mkdir(parents=True)
    with open(mail / "north" / f"1-introduce-{digest(request)[:8]}.request.hfl", "wb") as hole:
        hole.truncate(1 << 31)

    def nodes_work() -> None:
        for path in (mail / "north").glob("*.request.hfl"):
            with open(path.with_name(path.name.replace("request", "answer")), "wb") as answer:
                answer.truncate(MOST_ANSWERED)
        for name in ("east", "south"):
            list(answer_waiting(stations[name], mail / name))

    meanwhile(nodes_work)
    nodes = by_files(mail, ["east", "north", "south"], timeout=9.0)
    tracemalloc.start()
    answers = {of.client: of for of in nodes.send("introduce", dict.fromkeys(nodes.nodes, b""))}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answers["east"].content and answers["south"].content and peak < MOST_ANSWERED / 4
    assert answers["north"].content is None and "is not JSON" in answers["north"].reason


def test_what_is_no_answer_is_waited_for_and_named(tmp_path: Path, meanwhile: Work) -> None:
    """Half an answer, a link, a folder, an answer to another request, and one that never comes."""
    stations, mail = plain_stations(tmp_path / "nodes"), tmp_path / "mail"
    (tmp_path / "secret").write_text("4711")

    def nodes_work() -> None:
        for name in ("north", "south", "west", "a/b", ".."):
            for path in folder_of(mail, name).glob("*.request.hfl"):
                answer = path.with_name(path.name.replace("request", "answer"))
                if answer.exists() or name == "a/b":
                    continue
                whole = write_answer(path.read_bytes(), b"{}")
                if name == "north":
                    answer.write_bytes(whole[:-1])
                elif name == "south":
                    answer.symlink_to(tmp_path / "secret")
                elif name == "west":
                    answer.write_bytes(write_answer(b"another", b"{}"))
                else:
                    answer.mkdir()
        list(answer_waiting(stations["east"], mail / "east"))

    meanwhile(nodes_work)
    nodes = by_files(mail, ["east", "north", "south", "west", "a/b", ".."], timeout=9.0)
    with pytest.warns(UserWarning) as said:
        found = hierfl.nodes.fit(plain(), nodes, rounds=1)
    assert found.clients == ("east",)
    text = "\n".join(str(one.message) for one in said)
    for why in ("holds 1 bytes, not 2", "it cannot be read (Too many levels", "is not a file of"):
        assert why in text
    assert "west/0001-introduce" in text and "beside it" in text
    assert "a%2Fb/0001-introduce" in text and "No such file" in text
    assert {path.name for path in tmp_path.iterdir()} == {"mail", "nodes", "secret"}
    with pytest.raises(ValueError, match="timeout is 0: it must"):
        by_files("x", ["a"], timeout=0)


def test_a_request_that_was_replaced_is_written_again(tmp_path: Path, meanwhile: Work) -> None:
    stations, mail = plain_stations(tmp_path / "nodes"), tmp_path / "mail"

    def nodes_work() -> None:
        for name, one in stations.items():
            list(answer_waiting(one, mail / name))

    meanwhile(nodes_work)
    first = hierfl.nodes.fit(plain(), by_files(mail, stations, timeout=9.0), rounds=1)
    (there,) = (mail / "north").glob("*-introduce-*.request.hfl")
    there.write_bytes(b"another")
    assert_same(hierfl.nodes.fit(plain(), by_files(mail, stations, timeout=9.0), rounds=1), first)
    assert len(list((mail / "north").glob("*-introduce-*.request.hfl"))) == 2


def test_a_model_of_the_nodes_folder_is_imported(tmp_path: Path) -> None:
    (tmp_path / "its_own_model.py").write_text(
        "from tests.nodes.test_faults import plain, rows\n"
        'model = plain()\n\n\ndef mine():\n    return rows().select(["east"])\n'
    )
    (tmp_path / "node.toml").write_text(
        'model = "its_own_model:model"\nrows = "its_own_model:mine"\n'
    )
    (tmp_path / "ask.hfl").write_bytes(write_request("introduce", b""))
    done = run("node", "answer", str(tmp_path / "ask.hfl"), "--folder", str(tmp_path))
    sys.path.remove(str(tmp_path))
    found = read_answer(write_request("introduce", b""), done.stdout_bytes)
    assert json.loads(found)["client"] == "east"
