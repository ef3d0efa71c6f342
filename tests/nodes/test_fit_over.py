"""`hierfl.nodes.fit` gives the numbers of `hierfl.fit`, and refuses by name what means nothing over nodes."""

import json
import unicodedata
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl import ClientData, methods
from hierfl.nodes import FitOverNodes, InProcess, in_process, station, stations
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.envelope import read_answer, write_request
from hierfl.nodes.messages import Refused
from hierfl.nodes.node import answer as node_answer
from tests.formulas.frames import patients
from tests.nodes.one_process import rows
from tests.programs import assert_close, federation, fit, regression


def same(over: FitOverNodes, here: Any) -> None:
    assert_close(over.message, here.message)


def test_a_named_method_gives_the_numbers_of_a_fit_here(tmp_path: Path) -> None:
    method = methods.fedsvi(regression)
    over = hierfl.nodes.fit(method, in_process(rows(), tmp_path), rounds=3, seed=4, cohort=3)
    here = fit(method, rows(), rounds=3, seed=4, cohort=3)
    same(over, here)
    assert over.chosen is None
    (tmp_path / "east" / "policy.toml").write_text('may_leave = ["summaries"]\n')
    found = over.local_summary(50, seed=1)  # after the call has returned
    assert list(found.given) == ["east"]
    slope = here.draws(50, seed=1).own["slope"][:, here.clients.index("east")]
    assert found.table["mean"].tolist() == pytest.approx(slope.mean(0).tolist())


def test_a_run_that_has_ended_is_asked_again_from_its_checkpoint(tmp_path: Path) -> None:
    """As by a notebook that was restarted: no round is run twice, and the nodes answer as before."""
    how: dict[str, Any] = {"rounds": 2, "checkpoint": tmp_path / "server"}
    method = methods.fedsvi(regression)
    first = hierfl.nodes.fit(method, in_process(rows(), tmp_path / "nodes"), **how)
    (tmp_path / "nodes" / "east" / "policy.toml").write_text('may_leave = ["scores"]\n')
    before = first.scores().table
    again = hierfl.nodes.fit(method, in_process(rows(), tmp_path / "nodes"), resume=True, **how)
    assert len(again.history) == 2
    pd.testing.assert_frame_equal(again.scores().table, before)
    how["rounds"] = 4
    with pytest.raises(ValueError, match="already holds a run: continue it with resume=True"):
        hierfl.nodes.fit(method, in_process(rows(), tmp_path / "nodes"), **how)


def test_other_wrong_arguments_are_named(tmp_path: Path) -> None:
    loose: Any = hierfl.nodes.fit
    around = in_process(rows(), tmp_path)
    method = methods.fedsvi(regression)
    with pytest.raises(TypeError, match=r"nodes is a str: make it with hierfl\.flower\.superlink"):
        loose(method, "127.0.0.1:8000")
    with pytest.raises(TypeError, match="rounds is '3': it must be an integer"):
        loose(method, around, rounds="3")
    with pytest.raises(ValueError, match="method 'two_stage' shows the server a summary"):
        loose(methods.two_stage(regression), around, disclose="sums")
    with pytest.raises(ValueError, match="resume is True, and there is no checkpoint"):
        loose(method, around, rounds=1, resume=True)
    with pytest.raises(ValueError, match="fewest is 5: it must be 1 to 4"):
        in_process(rows(), tmp_path, fewest=5)
    here: Any = hierfl.fit
    with pytest.raises(TypeError, match="has no argument 'nodes'"):
        here(regression, nodes=around)
    with pytest.raises(TypeError, match="data is a InProcess, not ClientData"):
        here(regression, around)


@pytest.mark.slow
def test_fitting_again_begins_again(tmp_path: Path) -> None:
    """The same model, another one between, and after a run that was interrupted: each is a run of its own."""
    whole = {str(site): part for site, part in patients(rows=40).groupby("site")}
    frames = {site: whole[site] for site in sorted(whole)[:3]}

    def fitted(text: str) -> FitOverNodes:
        formula = hierfl.formula(text, clients="site")
        around = in_process(frames, tmp_path)
        return hierfl.nodes.fit(formula, around, rounds=2, disclose="sums")

    first = fitted("y ~ age + (1 | site)")
    other = fitted("y ~ dose + (1 | site)")
    again = fitted("y ~ age + (1 | site)")
    assert other.run != first.run == again.run
    same(again, first)


def test_rows_that_count_several_times(tmp_path: Path) -> None:
    """How many rows an update rests on is computed under vmap, where Pyro cannot check a scale."""
    frames = {str(site): part for site, part in patients(rows=30).groupby("site")}
    some = {site: frames[site].assign(w=[1.0, 2.0, 3.0] * 10) for site in sorted(frames)[:2]}
    formula = hierfl.formula("y | weights(w) ~ age + (1 | site)", clients="site")
    fit = hierfl.nodes.fit(formula, in_process(some, tmp_path), rounds=1)
    assert fit.history["clients"].tolist() == [2]


@pytest.mark.slow
def test_a_run_that_was_interrupted_begins_again_or_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, around = methods.fedsvi(regression), in_process(rows(), tmp_path / "nodes")
    whole = hierfl.nodes.fit(method, around, rounds=3)
    asked = node_answer
    left = iter(range(5))

    def answer(*given: Any) -> bytes:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return asked(*given)

    how: dict[str, Any] = {"rounds": 3, "checkpoint": tmp_path / "server"}
    monkeypatch.setattr(stations, "answer", answer)
    with pytest.raises(KeyboardInterrupt):  # in the second round
        hierfl.nodes.fit(method, around, **how)
    monkeypatch.setattr(stations, "answer", asked)
    same(hierfl.nodes.fit(method, around, **how, resume=True), whole)
    same(hierfl.nodes.fit(method, around, rounds=3), whole)


def test_a_node_reads_its_rows_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again where its policy is another one since it has introduced them, or in another run."""
    count, real = [0], stations.Station._read

    def counted(node: Any) -> Any:
        count[0] += 1
        return real(node)

    monkeypatch.setattr(stations.Station, "_read", counted)
    part = federation().select(["north"])
    agreed = {"agreement": asdict(Agreement.between([Introduction.of(part)])), "method": None}
    content = json.dumps({**agreed, "seed": 0}).encode()
    node = station(methods.fedsvi(regression), part, tmp_path)
    for policy, reads in (("", 1), ("questions_a_day = 7\n", 2)):
        count[0] = 0
        node.reply("introduce", b"")
        (tmp_path / "policy.toml").write_text(policy)
        node.reply("agree", content)
        assert count == [reads]
    node.reply("agree", content)
    assert count == [3]


def test_no_client_has_its_folder_outside(tmp_path: Path) -> None:
    names = ["..", "../up", ".a", "a", "a/b"]
    data = ClientData.from_arrays(names, x=torch.zeros(5, 1), y=torch.zeros(5))
    made: InProcess = in_process(data, tmp_path)
    found = [folder.resolve() for folder in made.folders.values()]
    assert len(set(found)) == 5 and all(folder.parent == tmp_path.resolve() for folder in found)


@pytest.mark.parametrize("made", ["NFC", "NFD"])
def test_a_folder_is_found_by_its_name_however_its_letters_are_composed(
    made: Literal["NFC", "NFD"], tmp_path: Path
) -> None:
    """Also one whose name has a space, which is not encoded."""
    home = tmp_path / unicodedata.normalize(made, "H\u00f4pital Charit\u00e9")
    home.mkdir()
    (home / "policy.toml").write_text('methods = ["fedavg"]')
    for form in ("NFC", "NFD"):
        name = unicodedata.normalize(form, "H\u00f4pital Charit\u00e9")
        data = ClientData.from_arrays([name] * 3, x=torch.zeros(3, 1), y=torch.zeros(3))
        assert in_process(data, tmp_path).folders == {name: home}
        with pytest.raises(ValueError, match=r"does not allow the method|policy"):
            method = methods.fedsvi(hierfl.models.regression("bernoulli"))
            hierfl.nodes.fit(method, in_process(data, tmp_path), rounds=1)


@pytest.mark.slow
def test_a_non_centered_program_starts_from_the_same_at_every_node(tmp_path: Path) -> None:
    """Its effects are read off perturbed copies of a node's rows, which differ by rounding."""
    data = hierfl.datasets.heart_disease().select(("cleveland", "hungarian"))
    data = replace(data.with_fields(x=data.fields["x"][:, :3]), features={})
    model = hierfl.models.regression("bernoulli")
    with pytest.warns(UserWarning, match="the rounds ended"):
        found = hierfl.nodes.fit(model, in_process(data, tmp_path), rounds=1)
    assert found.history["clients"].tolist() == [2]


AGREEMENTS: dict[str, Any] = {
    "another field": lambda of: of["form"]["fields"].update(more=["float64"]),
    "one field too few": lambda of: of["form"]["fields"].pop("x"),
    "no field": lambda of: of["form"].update(fields={}),
    "another shape": lambda of: of["form"]["fields"].update(x=["float64", 3]),
    "no codes": lambda of: of.update(codes={}),
    "other codes": lambda of: of.update(codes={"more": [0, 1]}),
    "fewer codes": lambda of: of["codes"].update(ward=[0, 1]),
    "other rows": lambda of: of.update(rows=[9, 9]),
}


@pytest.mark.parametrize("what", AGREEMENTS)
def test_an_agreement_without_the_clients_own_rows_is_refused_in_words(
    what: str, tmp_path: Path
) -> None:
    """Not by an error of the node's, whose owner would have to look for it in the log."""
    ward = torch.tensor([0, 1, 2, 2] * 2)
    data = hierfl.ClientData.from_arrays(
        ["a"] * 4 + ["b"] * 4, x=torch.ones(8, 2), y=torch.arange(8.0), ward=ward
    )
    parts = [data.select([name]) for name in data.names]
    method = methods.fedsvi(hierfl.models.regression("gaussian", centered=True))
    agreed = asdict(Agreement.between([Introduction.of(part) for part in parts]))
    here = station(method, parts[0], tmp_path)
    content = {"agreement": agreed, "seed": 0, "method": None}
    assert here.reply("agree", json.dumps(content).encode())
    AGREEMENTS[what](agreed)
    request = write_request("agree", json.dumps(content).encode())
    with pytest.raises(Refused, match=r"agreement|among those that agreed"):
        read_answer(request, here.answer(request))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_an_end_of_an_interval_that_was_corrected_is_a_row_that_changed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    time = rng.exponential(9.0, 60) + 0.1
    kind = np.where(np.arange(60) % 3, "none", "interval")
    of = {"time": time, "kind": kind, "upto": np.where(kind == "none", np.nan, time + 1.0)}
    frame = pd.DataFrame({"x": rng.normal(size=60), **of})
    made = hierfl.formula("time | cens(kind, upto) ~ x", "weibull", clients="h")
    fit = hierfl.nodes.fit(made, in_process({"north": frame}, tmp_path), rounds=1)
    assert fit.history["clients"].tolist() == [1]
    frame.loc[3, "upto"] += 2.0
    with pytest.raises(Refused, match="fewer than 5 rows have changed"):
        hierfl.nodes.fit(made, in_process({"north": frame}, tmp_path), rounds=1)


def survivors(shift: float) -> dict[str, pd.DataFrame]:
    """Return times of four clients, of which one has a single row, by a column far from 0."""
    g, parts = np.random.default_rng(3), {}
    for name, n in zip("abcd", (30, 1, 24, 18), strict=True):
        x, u = g.normal(size=n), 0.5 * g.normal()
        t = (g.weibull(1.6, n) * np.exp(0.4 * x + u)).clip(1e-3)
        event = (g.random(n) < 0.8).astype(float)
        parts[name] = pd.DataFrame({"t": t, "y": np.log(t), "e": event, "x": x + shift})
    return parts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "family"),
    [("t | event(e) ~ center(x) + (1 | c)", "weibull"), ("y ~ x + (1 | c)", "gaussian")],
)
def test_one_row_and_a_column_far_from_0_change_nothing(
    text: str, family: Any, tmp_path: Path
) -> None:
    frames = survivors(1000.0)
    formula = hierfl.formula(text, family, clients="c")
    over = hierfl.nodes.fit(formula.on(frames), in_process(frames, tmp_path), seed=0)
    same(over, hierfl.fit(formula, frames, seed=0))
