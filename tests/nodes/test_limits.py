"""What a request may cost a node: local steps of a round, and bytes that are read."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import hierfl
from hierfl import ClientData, guides, methods
from hierfl.cli import app
from hierfl.cli.node_folder import station_at
from hierfl.formulas.questions import Question
from hierfl.nodes.account import digest
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.envelope import read_line, write_request
from hierfl.nodes.messages import Refused
from hierfl.nodes.node import introduced, node
from hierfl.nodes.policy import Forbidden, Policy
from hierfl.nodes.request_files import answer_waiting
from hierfl.nodes.stations import Station
from hierfl.program.sites import recipe_of
from tests.methods.cases import METHODS, counted_options


def rows() -> ClientData:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g)
    return ClientData.from_arrays(["a"] * 30 + ["b"] * 30, x=x, y=(x.sum(1) > 0).double())


def test_a_recipe_of_endless_steps_is_forbidden_by_its_key(tmp_path: Path) -> None:
    data = rows()
    parts = [data.select([name]) for name in data.names]
    agreement = Agreement.between([Introduction.of(part) for part in parts])
    model = hierfl.models.regression("bernoulli", centered=True)
    method = methods.fedsvi(model, guides.mean_field, local_steps=70_000, draws=2)
    with pytest.raises(Forbidden, match=r"140,002 local steps.* 100,000: steps_a_round = 140002"):
        node(method, parts[0], agreement, tmp_path)
    (tmp_path / "policy.toml").write_text("steps_a_round = 140002")
    assert introduced(node(method, parts[0], agreement, tmp_path))["client"] == "a"


COUNTS = [(name, option) for name, make in METHODS.items() for option in counted_options(make())]


@pytest.mark.parametrize("name, option", COUNTS)
def test_no_count_of_a_recipe_is_without_bound(name: str, option: str) -> None:
    """A method or option that is added later is among them."""
    recipe = recipe_of(METHODS[name]())
    assert recipe is not None
    try:
        method = replace(recipe, options={**recipe.options, option: 10**7}).again()
    except ValueError as error:
        assert option in str(error)
        return
    with pytest.raises(Forbidden, match=f"{option}=10,000,000.* steps_a_round = 10000000"):
        Policy().check(method, 30)
    with pytest.raises(Forbidden, match=f"{option}=10,000,000"):  # inside a wrapper too
        Policy().check(methods.averaging_some(method, share=0.5), 30)


def test_no_count_of_a_guide_is_without_bound() -> None:
    model = hierfl.models.regression("bernoulli")
    with pytest.raises(Forbidden, match=r"rank=10,000,000.*steps_a_round"):
        Policy().check(methods.fedsvi(model, guides.low_rank(rank=10**7)), 30)
    Policy().check(methods.fedsvi(model, guides.mean_field, batch_size=10**7), 30)


def own(folder: Path) -> Station:
    """Return a node whose owner lets requests of 2,000 bytes in."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=50), "y": rng.integers(0, 2, 50)})
    folder.mkdir()
    frame.to_csv(folder / "rows.csv", index=False)
    (folder / "policy.toml").write_text("bytes_a_request = 2000\n")
    (folder / "node.toml").write_text(
        'rows = "rows.csv"\nclient = "north"\nformula = "y ~ x + (1 | h)"\n'
        'family = "bernoulli"\nclients = "h"\n'
    )
    return station_at(folder)


def test_a_long_request_is_not_read(tmp_path: Path) -> None:
    station = own(tmp_path / "north")
    long = write_request("round", b"0" * 3000)
    assert "bytes_a_request" in str(read_line(station.answer(long))[0]["wrong"])
    mail = tmp_path / "mail"
    mail.mkdir()
    with (mail / "0001-round-1.request.hfl").open("wb") as file:
        file.truncate(3 << 30)  # of nothing: it takes no place on the disk
    assert list(answer_waiting(station, mail)) == []


def test_a_running_node_notices_that_its_folder_is_gone(tmp_path: Path) -> None:
    """In an empty folder its budget would begin again, under the default policy."""
    station, folder = own(tmp_path / "north"), tmp_path / "north"
    request = write_request("schema", Question("rows").json().encode())
    first = station.answer(request)
    assert not read_line(first)[0]["wrong"]
    folder.rename(tmp_path / "elsewhere")
    for _ in range(2):  # what the first refusal leaves in its place is no folder of the node
        assert "moved or replaced" in str(read_line(station.answer(request))[0]["wrong"])
    (mail := tmp_path / "mail").mkdir()
    (mail / "0001-x.request.hfl").write_bytes(request)
    with pytest.raises(Refused, match="moved or replaced"):  # who waits for requests is told
        list(answer_waiting(station, mail))
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path / "elsewhere")  # it is the same folder
    assert station.answer(request) == first


def test_only_the_request_that_was_shown_is_answered(tmp_path: Path) -> None:
    station, mail = own(tmp_path / "north"), tmp_path / "mail"
    mail.mkdir()
    requests = [write_request("introduce", b""), write_request("round", b"1")]
    for k, request in enumerate(requests):
        (mail / f"000{k}-x.request.hfl").write_bytes(request)
    shown = CliRunner().invoke(app, ["show", str(mail / "0001-x.request.hfl")])
    assert f"--only {digest(requests[1])}" in shown.output
    answered = [path.name for path, _ in answer_waiting(station, mail, only=digest(requests[1]))]
    assert answered == ["0001-x.request.hfl"]
    how = ["node", "answer", str(mail / "0000-x.request.hfl"), "--folder", str(tmp_path / "north")]
    found = CliRunner().invoke(app, [*how, "--only", digest(requests[1])])
    assert found.exit_code and digest(requests[0]) in found.output
    for only, why in (
        ("12ab", "not a SHA-256"),
        ("", "not a SHA-256"),
        ("0" * 64, "no request in"),
    ):
        of_folder = ["node", "answer", str(mail), *how[3:], "--only", only]
        found = CliRunner().invoke(app, of_folder)
        assert found.exit_code and why in found.output
