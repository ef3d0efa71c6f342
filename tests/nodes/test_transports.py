"""Fits over transports of one's own and over files: as here; and hostile requests and answers are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hierfl
from hierfl import cli
from hierfl.nodes import Reached, Refused, Station, by_files, over
from hierfl.nodes import TooFewNodes as TooFew
from hierfl.nodes.envelope import read_answer, write_answer, write_request
from hierfl.nodes.log import entries
from hierfl.nodes.officer_page import write_page
from tests.nodes.test_faults import HOSTILE, plain
from tests.nodes.transports import (
    TEXT,
    answering,
    asked_by,
    assert_refused,
    assert_same,
    demo,
    demo_stations,
    formula,
    formula_stations,
    frames,
    patients,
    plain_stations,
)

Over = Callable[[Mapping[str, Station]], Reached]


@pytest.fixture(params=["bytes", "files"])
def reached(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Over:
    """Nodes reached by a function, or by files that they answer while the server waits."""

    def here(stations: Mapping[str, Station]) -> Reached:
        answered = answering(stations)
        if request.param == "bytes":
            return over(asked_by(answered), stations)
        folder = tmp_path / "mail"

        def nodes_work(_: float) -> None:
            for path in sorted(folder.glob("*/*.request.hfl")):
                answer = path.with_name(path.name.replace(".request.", ".answer."))
                if not answer.exists():
                    answer.write_bytes(answered(path.parent.name, path.read_bytes()))

        import sys

        time = SimpleNamespace(sleep=nodes_work, monotonic=iter(range(10**6)).__next__)
        monkeypatch.setattr(sys.modules["hierfl.nodes.request_files"], "time", time)
        return by_files(folder, stations, timeout=10.0)

    return here


def test_the_demos_hierarchy_is_fitted_as_here(reached: Over, tmp_path: Path) -> None:
    found = hierfl.nodes.fit(demo(), reached(demo_stations(tmp_path)))
    assert found.chosen is not None and found.chosen.startswith("two_stage")
    assert_same(found, hierfl.fit(demo(), patients()))


def test_a_formula_is_fitted_as_here(reached: Over, tmp_path: Path) -> None:
    found = hierfl.nodes.fit(formula(), reached(formula_stations(tmp_path)))
    assert_same(found, hierfl.fit(formula(), frames()))


def test_wrong_answers_are_refused(reached: Over, tmp_path: Path) -> None:
    nodes = reached(plain_stations(tmp_path))
    assert_refused(hierfl.nodes.fit(plain(), nodes, rounds=len(HOSTILE)))


# ------------------------------------------------------------ hostile requests
class Evil:
    def __reduce__(self) -> Any:
        return (Path("/nowhere").touch, ())


DEEP = b"[" * 100_000
WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no JSON"),
    "pickle": (pickle.dumps(Evil()), "no JSON"),
    "a line without an end": (b'{"hierfl": 1, "request": "introduce", "bytes": 0}', "no file"),
    "another version": (b'{"hierfl": 2, "request": "introduce", "bytes": 0}\n', "another version"),
    "a part": (write_request("round", b"0123")[:-1], "holds 3 bytes, not 4"),
    "too long a line": (b'{"hierfl": "' + b"1" * 5000 + b'"}\n', "no JSON of 4,096"),
    "deep": (DEEP + b"\n", "no JSON"),
    "an answer": (write_answer(b"", b""), "no request"),
    "another kind": (write_request("rows", b""), "asks for 'rows'"),
    "a number": (b'{"hierfl": 1, "request": 7, "bytes": 0}\n', "no request"),
    "a round too soon": (write_request("round", b""), "agreed on nothing yet"),
    "a pickled round": (write_request("agree", pickle.dumps(Evil())), "no JSON"),
    "a deep agreement": (write_request("agree", DEEP), "no JSON"),
    "code": (
        write_request("agree", json.dumps({"seed": 0, "agreement": "__import__('os')"}).encode()),
        "no agreement",
    ),
    "a schema of none": (write_request("schema", b"{}"), "no formula that lacks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_node_answers_hostile_requests_by_a_fixed_text(name: str, tmp_path: Path) -> None:
    node = demo_stations(tmp_path)["cleveland"]
    request, why = WRONG[name]
    with pytest.raises(Refused, match=why):
        read_answer(request, node.answer(request, by="nobody"))
    (line,) = entries(tmp_path / "cleveland")
    assert line["what"] == "refusal" and line["by"] == "nobody"


def test_an_error_of_the_rows_leaves_no_value(tmp_path: Path) -> None:
    def broken() -> Any:
        raise KeyError("patient 4711")

    from hierfl.nodes.call import FitCall

    node, request = Station(FitCall(demo()), broken, tmp_path), write_request("introduce", b"")
    assert b"4711" not in node.answer(request)
    assert "4711" in (tmp_path / "refused.jsonl").read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        pickle.dumps(Evil()),
        write_answer(b"another request", b"{}"),
        write_answer(write_request("introduce", b""), DEEP),
        write_answer(write_request("introduce", b""), b"[]"),
        write_answer(write_request("introduce", b""), b'{"client": "__import__"}'),
    ],
)
def test_a_server_goes_on_without_a_node_that_introduces_nobody(
    wrong: bytes, tmp_path: Path
) -> None:
    stations = plain_stations(tmp_path)

    def answered(name: str, request: bytes) -> bytes:
        return wrong if name == "west" else stations[name].answer(request)

    with pytest.warns(UserWarning, match="'west' is left out"):
        found = hierfl.nodes.fit(plain(), over(asked_by(answered), stations), rounds=1)
    assert found.clients == ("east", "north", "south")
    with pytest.raises(TooFew, match="3 nodes introduce a client, and 4 are needed"):
        hierfl.nodes.fit(plain(), over(asked_by(answered), stations, fewest=4), rounds=1)


def test_nodes_are_named_once() -> None:
    with pytest.raises(ValueError, match="name each once"):
        over(asked_by(lambda name, request: b""), ["a", "a"])
    with pytest.raises(ValueError, match="it must be 1 to 1"):
        over(asked_by(lambda name, request: b""), ["a"], fewest=2)
    with pytest.raises(ValueError, match="timeout is 0: it must be above 0 s"):
        by_files("x", ["a"], timeout=0)


# ------------------------------------------------------------ files by hand
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
    (tmp_path / "ask.hfl").write_bytes(write_request("schema", _question()))
    return folder


def _question() -> bytes:
    from hierfl.formulas.questions import Question

    return Question("columns", least=5).json().encode()


def run(*command: str) -> Any:
    return CliRunner().invoke(cli.app, list(command))


def test_a_request_is_read_answered_and_the_answer_read(north: Path, tmp_path: Path) -> None:
    asked, answer = tmp_path / "ask.hfl", tmp_path / "answer.hfl"
    shown = run("show", str(asked))
    assert "Asks for counts and sums of the rows" in shown.output and '"columns"' in shown.output
    done = run("node", "answer", str(asked), "--folder", str(north))
    assert done.exit_code == 0
    answer.write_bytes(done.stdout_bytes)
    found = json.loads(read_answer(asked.read_bytes(), done.stdout_bytes))
    assert found["client"] == "north"
    assert '"client": "north"' in run("show", str(answer)).output
    assert [one["what"] for one in entries(north)] == ["schema"]


def test_all_requests_of_a_folder_are_answered_once(north: Path, tmp_path: Path) -> None:
    mail = tmp_path / "mail"
    mail.mkdir()
    (mail / "0001-schema-x.request.hfl").write_bytes((tmp_path / "ask.hfl").read_bytes())
    for count in (1, 0):
        done = run("node", "answer", str(mail), "--folder", str(north))
        assert done.exit_code == 0 and done.stderr.count("Answered") == count
    assert (mail / "0001-schema-x.answer.hfl").exists()


def test_an_answer_is_not_written_through_a_link(north: Path, tmp_path: Path) -> None:
    """A server that shares the folder may put links there, to files of the node."""
    mail, own = tmp_path / "mail", north / "policy.toml"
    mail.mkdir()
    own.write_text("min_rows = 20\n")
    (mail / "1.request.hfl").write_bytes((tmp_path / "ask.hfl").read_bytes())
    for name in ("1.answer.hfl", "1.answer.draft"):
        (mail / name).symlink_to(own)
    assert run("node", "answer", str(mail), "--folder", str(north)).exit_code == 0
    assert own.read_text() == "min_rows = 20\n"
    assert not (mail / "1.answer.hfl").is_symlink()


def test_show_refuses_what_is_no_request(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(Evil()))
    done = run("show", str(tmp_path / "x"))
    assert done.exit_code == 1 and "is no request and no answer" in done.output
    assert run("show", str(tmp_path / "y")).exit_code == 2


def test_show_names_the_tensors_of_a_round(tmp_path: Path) -> None:
    from hierfl.nodes.messages import to_bytes

    content = to_bytes({"message": {"loc": torch.ones(9)}, "mail": {}}, {"run": "r", "round": 3})
    (tmp_path / "x").write_bytes(write_request("round", content))
    shown = run("show", str(tmp_path / "x")).output
    assert "update of one round" in shown and '"round": 3' in shown
    assert "loc" in shown and "(9,): 1, 1, 1, 1, 1, 1, ..." in shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have rows, and a model or a formula"),
        ('rows = "rows.csv"\nformula = "y ~ x"\nmodel = "a:b"\n', "and a model or a formula"),
        ("rows = 3\n", "rows = 3, which is no key or no text"),
        ('row = "x"\n', "row = 'x', which is no key"),
        ("rows", "cannot be read"),
        ('rows = "rows.csv"\nmodel = "nowhere_at_all:x"\n', "cannot be imported"),
        ('rows = "rows.csv"\nformula = "y ~"\nclients = "h"\n', "nothing on one side"),
    ],
)
def test_a_wrong_node_file_is_refused(text: str, why: str, north: Path, tmp_path: Path) -> None:
    (north / "node.toml").write_text(text)
    done = run("node", "answer", str(tmp_path / "ask.hfl"), "--folder", str(north))
    assert done.exit_code == 1 and why in " ".join(done.output.split())
    (north / "node.toml").unlink()
    done = run("node", "answer", str(tmp_path / "ask.hfl"), "--folder", str(north))
    assert done.exit_code == 1 and "No such file" in done.output


def test_a_fit_by_files_that_is_started_again_asks_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    stations, asked = plain_stations(tmp_path / "nodes"), []
    module, mail = sys.modules["hierfl.nodes.request_files"], tmp_path / "mail"

    def nodes_work(_: float) -> None:
        for name, one in stations.items():
            asked.extend(module.answer_waiting(one, mail / name))

    time = SimpleNamespace(sleep=nodes_work, monotonic=iter(range(10**6)).__next__)
    monkeypatch.setattr(module, "time", time)
    first = hierfl.nodes.fit(plain(), by_files(mail, stations, timeout=10.0), rounds=2)
    count = len(asked)
    assert count == 16  # introduce, agree and two rounds, of four nodes
    again = hierfl.nodes.fit(plain(), by_files(mail, stations, timeout=10.0), rounds=2)
    assert len(asked) == count
    assert_same(again, first)
    monkeypatch.setattr(
        module, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
    )
    with pytest.raises(TooFew, match=r"there is no answer '.*' after 3 s"):
        hierfl.nodes.fit(plain(), by_files(tmp_path / "other", stations, timeout=3.0), rounds=2)


# ------------------------------------------------------------ the officer's page
def test_the_page_of_a_node_says_what_left_and_why(tmp_path: Path) -> None:
    stations = demo_stations(tmp_path / "nodes")
    folder = tmp_path / "nodes" / "cleveland"
    folder.mkdir(parents=True)
    (folder / "policy.toml").write_text('min_rows = 20\nmay_leave = ["summaries"]\n')

    def answered(name: str, request: bytes) -> bytes:
        return stations[name].answer(request, by="<b>server</b>.example.org")

    method = hierfl.methods.fedsvi(demo())
    fit = hierfl.nodes.fit(method, over(asked_by(answered), stations), rounds=2)
    fit.local_summary(draws=10)
    stations["cleveland"].answer(write_request("rows", b""), by="stranger")
    page = tmp_path / "page.html"
    done = run("node", "report", str(folder), "--out", str(page))
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert fit.run in text and "fedsvi" in text and "rounds 0 to 1" in text
    assert "&lt;b&gt;server&lt;/b&gt;.example.org" in text and "<b>server" not in text
    assert "Summaries of the client" in text
    assert "min_rows = 20" in text and "stranger" in text and "asks for &#39;rows&#39;" in text
    assert f">{patients().select(['cleveland']).num_rows}<" in text
    write_page(folder, page)  # its own page may be written again
    page.write_text("mine")
    assert run("node", "report", str(folder), "--out", str(page)).exit_code == 1
    assert run("node", "report", str(tmp_path / "nowhere")).exit_code == 2


def test_the_page_of_an_idle_node(tmp_path: Path) -> None:
    write_page(tmp_path, tmp_path / "page.html")
    assert "nothing has left it" in (tmp_path / "page.html").read_text()
