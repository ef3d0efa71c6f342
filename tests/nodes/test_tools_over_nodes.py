"""A fit over nodes has the tools of a fit: the same calls and answers, as far as policies let, or a refusal by name."""

import inspect
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl import methods
from hierfl.nodes.answers import ask_nodes
from hierfl.nodes.fit_over_nodes import AT_NODES, FitOverNodes
from hierfl.nodes.messages import Answer, from_bytes, to_bytes
from tests.effects.made import frame
from tests.programs import fit

TEXT = "y ~ age + sex + (1 + dose | site)"


@cache
def pair() -> tuple[FitOverNodes, hierfl.Fit, Any, Path]:
    """A fit over nodes whose policies let draws leave, one of all rows that draws the same, and the nodes."""
    ready = hierfl.formula(TEXT, clients="site").on(frame())
    data, method, home = ready.data(frame()), methods.fedsvi(ready), Path(mkdtemp())
    for name in data.names:
        letting(home, name)
    nodes = hierfl.nodes.in_process(data, home)
    over = hierfl.nodes.fit(method, nodes, rounds=3, seed=2)
    return over, fit(method, data.select(sorted(data.names)), rounds=3, seed=2), nodes, home


def letting(home: Path, name: str, what: str = '"draws", "summaries"') -> None:
    (home / name).mkdir(exist_ok=True)
    (home / name / "policy.toml").write_text(f"may_leave = [{what}]\n")


def test_every_method_of_a_fit_is_there_or_refused_by_name() -> None:
    public = {name for name, _ in inspect.getmembers(hierfl.Fit) if not name.startswith("_")}
    missing = public - {name for name, _ in inspect.getmembers(FitOverNodes)}
    assert missing <= set(hierfl.Fit.__dataclass_fields__)
    over = pair()[0]
    for name in AT_NODES:
        with pytest.raises(ValueError, match=rf"fit\.{name} reads rows, which are at the nodes: "):
            getattr(over, name)("x")


ANSWERS: dict[str, Any] = {
    "effects of a client": lambda f: f.effects("age", client="east", grid=[40, 60]).frame,
    "effects of each": lambda f: f.effects("age", client="each", grid=[40]).frame,
    "effects by another column": lambda f: f.effects("age", by="sex", grid=[40, 60]).frame,
    "effects of a new client": lambda f: f.effects("age", client="new", prob=0.5).frame,
    "hypotheses": lambda f: f.hypotheses(["age > 0", "sd_site[dose] = 1"]).frame,
    "icc": lambda f: f.icc().frame,
    "comparisons": lambda f: f.comparisons("sex", client=["west", "east"]).frame,
    "slopes": lambda f: f.comparisons("age", comparison="slope", client="north").frame,
    "profile": lambda f: f.profile().frame,
    "profile of a slope": lambda f: f.profile("dose", best="high", prob=0.5).frame,
    "draws": lambda f: pd.DataFrame(
        {k: v.flatten() for k, v in f.draws(40).shared.items() if v.dim() == 1}
    ),
    "prior": lambda f: f.prior(40, var_names=["age"]).prior["age"].to_dataframe(),
    "posterior": lambda f: f.posterior(40, var_names=["age"]).posterior["age"].to_dataframe(),
}


@pytest.mark.slow("prior")
@pytest.mark.parametrize("name", ANSWERS)
def test_the_answers_are_those_of_a_fit(name: str) -> None:
    over, here = (ANSWERS[name](one) for one in pair()[:2])
    pd.testing.assert_frame_equal(over, here, rtol=1e-5, atol=1e-7)


def test_a_client_whose_node_keeps_its_draws() -> None:
    over, _, _, home = pair()
    letting(home, "east", '"summaries"')
    try:
        with pytest.raises(
            ValueError,
            match=r"needs draws of client 'east', which its node keeps: .*no draws leave",
        ):
            over.effects("age", client="east")
        with pytest.raises(ValueError, match=r"fit\.profile needs draws of client 'east'"):
            over.profile()
        with pytest.warns(
            UserWarning, match="send no draws .'east': the node's policy lets no draws"
        ):
            found = over.effects("age", client="each", grid=[40]).frame
        assert set(found["client"]) == {"north", "south", "west", "new"}
    finally:
        letting(home, "east")
    with pytest.raises(KeyError, match="nowhere"):
        over.effects("age", client="nowhere")


def changed(found: Any, name: str, value: Any) -> bytes:
    """Return an answer with other draws of one site."""
    read = from_bytes(found.content, most=1 << 30)
    return to_bytes({**read.tree, name: value}, dict(read.about))


LIES: dict[str, tuple[Any, str]] = {
    "another shape": (
        lambda one: changed(one, "site", torch.zeros(3, 2)),
        r"'site float64 \(3, 2\)', and 'site float64 \(1000, 2\)' at most others",
    ),
    "NaN": (lambda one: changed(one, "site", torch.full((1000, 2), torch.nan)), "not finite"),
    "whole numbers": (
        lambda one: changed(one, "site", torch.zeros(1000, 2, dtype=torch.int64)),
        r"'site int64 \(1000, 2\)', and 'site float64 \(1000, 2\)' at most others",
    ),
    "nothing": (lambda one: to_bytes({}, from_bytes(one.content, most=1 << 30).about), "is empty"),
    "no bytes": (lambda one: b"[]", "."),
}


@pytest.mark.parametrize("name", LIES)
def test_a_node_that_lies_about_draws_is_left_out(name: str) -> None:
    lie, why = LIES[name]
    over = pair()[0]

    def ask(contents: Any) -> Any:
        for one in over.ask(contents):
            yield Answer(one.client, lie(one)) if one.client == "west" else one

    with pytest.warns(UserWarning, match=f"1 clients are left out.*'west': .*{why}"):
        found = replace(over, ask=ask).effects("age", client="each", grid=[40]).frame
    assert "west" not in set(found["client"]) and np.isfinite(found["mean"]).all()


def test_the_summary_has_the_global_rows_of_that_of_a_fit() -> None:
    over, here = (fit.summary(prob=0.95, draws=400) for fit in pair()[:2])
    wanted = here.frame[here.frame["client"] == ""].set_index(["site", "entry"])
    found = over.frame.set_index(["site", "entry"])
    assert set(found.index) == set(wanted.index)
    numbers = ["mean", "sd", "low", "high"]
    np.testing.assert_allclose(found[numbers], wanted.loc[found.index, numbers], rtol=1e-6)
    assert [h for h, _ in over.tables] == [h for h, _ in here.tables if "by client" not in h]
    assert list(over.tables[0][1].columns[-2:]) == ["2.5%", "97.5%"]
    assert over.trustworthy in (None, here.trustworthy)
    assert "fit.local_summary() asks for them" in repr(over)


REFUSED: dict[str, Any] = {
    "clients' rows are at their nodes: use a typical row": lambda f: f.comparisons("sex", "rows"),
    "draws is 30: a 95% interval needs 40 or more": lambda f: f.summary(draws=30, prob=0.95),
    "'site' is not a global site": lambda f: f.posterior(40, var_names=["site"]),
    "correct and log_likelihood need": lambda f: f.posterior(40, correct="psis"),
    "labels are of rows": lambda f: f.prior(40, predictive=True),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_needs_rows_is_refused(words: str) -> None:
    with pytest.raises((KeyError, ValueError), match=words):
        REFUSED[words](pair()[0])


def test_it_is_saved_loaded_and_asked_again(tmp_path: Path) -> None:
    over, _, nodes, _ = pair()
    over.save(tmp_path / "saved")
    alone = hierfl.nodes.load(tmp_path / "saved")
    assert alone.clients == over.clients and repr(alone) == repr(over)
    pd.testing.assert_frame_equal(alone.summary(draws=100).frame, over.summary(draws=100).frame)
    with pytest.raises(
        ValueError, match=r"loaded without its nodes.*hierfl\.nodes\.load\(folder, nodes\)"
    ):
        alone.local_summary(50)
    again = hierfl.nodes.load(tmp_path / "saved", nodes)
    table = over.local_summary(50).table
    pd.testing.assert_frame_equal(again.local_summary(50).table, table)
    assert ask_nodes(again, "draws", dict, clients=["east"], draws=20, seed=0).given.keys() == {
        "east"
    }
    with pytest.raises(hierfl.CheckpointError, match="holds another run"):
        fit(methods.fedsvi(over.method.model), pair()[1].federation.data, rounds=1).save(
            tmp_path / "saved"
        )


def test_a_saved_fit_in_one_process_is_none_over_nodes(tmp_path: Path) -> None:
    pair()[1].save(tmp_path / "fit", with_data=True)
    with pytest.raises(hierfl.CheckpointError, match="no fit over nodes"):
        hierfl.nodes.load(tmp_path / "fit")


def test_a_report_says_what_the_server_knows(tmp_path: Path) -> None:
    over = pair()[0]
    report = over.report(tmp_path / "report.html", draws=100)
    page = (tmp_path / "report.html").read_text()
    assert "The global level" in page and "sd_site" in page and "The clients" not in page
    assert report.checks and report.path == tmp_path / "report.html"


def test_other_models_have_a_summary_too(tmp_path: Any) -> None:
    rows = hierfl.ClientData.from_clients(
        {c: {"x": np.ones((6, 1)), "y": np.arange(6.0)} for c in "ab"}
    )
    method = methods.fedsvi(hierfl.models.regression("gaussian"))
    over = hierfl.nodes.fit(method, hierfl.nodes.in_process(rows, tmp_path), rounds=2)
    assert set(over.summary().frame["client"]) == {""} and over.summary().tables == ()
    with pytest.raises(TypeError, match=r"fit\.effects is for fits of a hierfl\.formula"):
        over.effects("x")
