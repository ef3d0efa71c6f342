"""A hospital withdraws from a fit over nodes: no node is asked, and nothing that it had sent is left."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

import hierfl
from hierfl.methods import two_stage
from hierfl.nodes import FitOverNodes, in_process, station
from hierfl.nodes.messages import Answer
from tests.formulas.frames import patients
from tests.nodes.ways import files
from tests.programs import fit
from tests.runs.test_living import COUNTS, binary, bytes_of, is_on_grid, others, secrets_of
from tests.summaries import programs
from tests.summaries.programs import people


def over(folder: Path, draws: int = 400, **options: Any) -> FitOverNodes:
    method = two_stage(programs.binary, draws=draws)
    nodes = in_process(people(COUNTS), folder / "nodes")
    return hierfl.nodes.fit(method, nodes, checkpoint=folder / "server", **options)


def answering(folder: Path, clients: Iterable[str]) -> None:
    """Let nodes answer about their clients."""
    for name in clients:
        policy = folder / "nodes" / name / "policy.toml"
        policy.write_text('may_leave = ["summaries"]\nmin_count = 4\n')


@cache
def of_all(base: Path) -> tuple[FitOverNodes, Path]:
    """Return a fit of six hospitals that answer about their clients, and its folder below `base`."""
    folder = base / "living"
    fitted = over(folder, 4000)
    answering(folder, fitted.clients)
    return fitted, folder


def nobody(contents: Mapping[str, bytes]) -> Iterable[Answer]:
    raise AssertionError(f"asked {sorted(contents)}")


def test_a_hospital_withdraws(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    fitted, folder = of_all(tmp_path_factory.getbasetemp())
    secret = secrets_of(fitted.progress.server.factors, fitted.clients.index("c2"))
    server = copytree(folder / "server", tmp_path / "server")
    assert all(part in bytes_of(server) for part in secret)
    found = replace(fitted, ask=nobody).without("c2", folder=server)
    assert not any(part in bytes_of(server) for part in secret)
    assert found.clients == ("c0", "c1", "c3", "c4", "c5")
    assert found.certificates["client"].tolist() == ["c2"]
    here = binary().without("c2")
    torch.testing.assert_close(
        found.message["params"]["_shared.points"],
        here.message["params"]["_shared.points"],
        atol=1e-6,
        rtol=0.0,
    )
    is_on_grid(here, others(people(COUNTS), "c2"))


@pytest.mark.slow
def test_what_a_transport_keeps_of_a_hospital_is_gone_too(tmp_path: Path) -> None:
    data, mail = people(COUNTS), tmp_path / "way"
    method = two_stage(programs.binary, draws=400)
    stations = {n: station(method, data.select([n]), tmp_path / "nodes" / n) for n in data.names}
    with files(mail) as way:
        fitted = hierfl.nodes.fit(method, way.reached(stations), checkpoint=tmp_path / "server")
    place = fitted.clients.index("c2")
    state = fitted.progress.server
    secret = secrets_of(state.factors, place)
    secret += [v.numpy().tobytes() for v in state.each[:, place]]
    for folder in (mail, tmp_path / "server"):
        before = bytes_of(folder)
        assert all(part in before for part in secret)
    for there in ("c2/0009-round-0.answer.draft", "c3/0001-round-0.answer.hfl"):
        next(mail.glob("mail-*")).joinpath(there).write_bytes(b"half an answer")
    fitted.without("c2", folder=tmp_path / "server")
    for folder in (mail, tmp_path / "server"):
        left = bytes_of(folder)
        assert not any(part in left for part in secret)
    (home,) = mail.glob("mail-*")
    assert {path.name.rpartition(".")[0][-8:] for path in (home / "c2").iterdir()} == {".request"}
    assert list((home / "c3").glob("*.answer.hfl"))


def test_the_others_are_asked_about_their_clients_as_before(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    fitted, _ = of_all(tmp_path_factory.getbasetemp())
    found = fitted.without("c5").without("c0")
    answers = found.local_summary(500)
    assert list(answers.given) == ["c1", "c2", "c3", "c4"] and not answers.withheld
    here = binary().without("c5").without("c0")
    expected = here.draws(500).own["a"][:, here.clients.index("c3")]
    own = answers.table.set_index("client").loc["c3"]
    assert float(own["mean"]) == pytest.approx(float(expected.mean()), abs=1e-4)


@pytest.mark.slow
def test_clients_of_partial_cohorts_go_on_from_their_own_rounds(tmp_path: Path) -> None:
    fitted = over(tmp_path, cohort=4)
    answering(tmp_path, fitted.clients)
    found = fitted.without("c1")
    assert not found.local_summary(100).withheld


def test_a_folder_of_another_run_is_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fitted, _ = of_all(tmp_path_factory.getbasetemp())
    with pytest.raises(hierfl.CheckpointError, match="does not hold this run"):
        fitted.without("c2", folder=tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_hospital_joins_and_no_other_is_asked(tmp_path: Path) -> None:
    data = people(COUNTS)
    method, server = two_stage(programs.binary, draws=4000), tmp_path / "server"
    nodes = in_process(others(data, "c2"), tmp_path / "nodes")
    before = hierfl.nodes.fit(method, nodes, checkpoint=server)
    new = in_process(data.select(["c2"]), tmp_path / "nodes")
    found = replace(before, ask=nobody).updated(new, folder=server)
    here = fit(method, others(data, "c2")).updated(data.select(["c2"]))
    torch.testing.assert_close(
        found.message["params"]["_shared.points"],
        here.message["params"]["_shared.points"],
        atol=1e-6,
        rtol=0.0,
    )
    is_on_grid(here, data)
    assert found.clients == data.names and len(list(server.glob("round-*"))) == 1
    found = before.updated(new)
    answering(tmp_path, found.clients)
    answers = found.local_summary(500)
    assert list(answers.given) == list(found.clients)
    left = found.without("c4").local_summary(500)
    assert list(left.given) == ["c0", "c1", "c2", "c3", "c5"]


@pytest.mark.slow
def test_a_hospital_joins_a_formula_with_its_schema(tmp_path: Path) -> None:
    frames = patients()
    whole = hierfl.formula("ill ~ scale(age) + (1 | site)", "bernoulli", clients="site").on(frames)
    parts = {str(name): frame for name, frame in frames.groupby("site")}
    first, *rest = parts
    nodes = in_process({name: parts[name] for name in rest}, tmp_path)
    before = hierfl.nodes.fit(whole, nodes)
    found = before.updated(in_process({first: parts[first]}, tmp_path))
    assert found.clients == tuple(sorted(parts))
    here: Any = hierfl.fit(whole, frames).posterior(2000)
    over: Any = found.posterior(2000)
    for name, x in over.posterior.items():
        value = here.posterior[name]
        apart = (x.mean(("chain", "draw")) - value.mean(("chain", "draw"))) / value.std(
            ("chain", "draw")
        )
        assert float(abs(apart).max()) < 0.15
