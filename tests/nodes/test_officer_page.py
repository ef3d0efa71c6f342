"""`hierfl node report`: the page says what left a node, who asked, and by which policy."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import hierfl
from hierfl import cli
from hierfl.cli.officer_page import write_page
from hierfl.nodes import Answer, over
from hierfl.nodes.envelope import write_request
from tests.nodes.transports import demo, demo_stations, patients

pytestmark = pytest.mark.usefixtures("without_copies")


def run(*command: str) -> int:
    return CliRunner().invoke(cli.app, ["node", "report", *command]).exit_code


def test_the_page_of_a_node_says_what_left_and_why(tmp_path: Path) -> None:
    stations = demo_stations(tmp_path / "nodes")
    folder, by = tmp_path / "nodes" / "cleveland", "<b>server</b>.example.org"
    folder.mkdir(parents=True)
    (folder / "policy.toml").write_text('min_rows = 20\nmay_leave = ["summaries"]\n')
    nodes = over(
        lambda requests: [
            Answer(name, stations[name].answer(request, by=by))
            for name, request in requests.items()
        ],
        stations,
    )
    fit = hierfl.nodes.fit(hierfl.methods.fedsvi(demo()), nodes, rounds=2)
    fit.local_summary(draws=10)
    stations["cleveland"].answer(write_request("rows", b""), by="stranger")
    page = tmp_path / "page.html"
    assert run(str(folder), "--out", str(page)) == 0
    text = page.read_text()
    assert fit.run in text and "fedsvi" in text and "rounds 0 to 1" in text
    assert "&lt;b&gt;server&lt;/b&gt;.example.org" in text and "<b>server" not in text
    assert "Summaries of the client" in text
    assert "min_rows = 20" in text and "stranger" in text and "asks for &#39;rows&#39;" in text
    assert f">{patients().select(['cleveland']).num_rows}<" in text
    write_page(folder, page)  # its own page may be written again
    page.write_text("mine")
    assert run(str(folder), "--out", str(page)) == 1
    assert run(str(tmp_path / "nowhere")) == 2


def test_the_page_of_an_idle_node(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(str(tmp_path), "--out", str(page)) == 2 and not page.exists()  # of no node
    (tmp_path / "policy.toml").touch()
    assert run(str(tmp_path), "--out", str(page)) == 0
    assert "nothing has left it" in page.read_text()
    logged = CliRunner().invoke(cli.app, ["node", "log", str(tmp_path)])
    assert logged.exit_code == 0 and logged.output == "Nothing has left the node.\n"
