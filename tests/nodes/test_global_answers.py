"""The server of a run over nodes answers of the global sites as `hierfl.Fit` does, without a message to anybody."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl import methods
from hierfl.nodes.fit_over_nodes import FitOverNodes
from tests.effects.made import frame
from tests.programs import fit

Pair = tuple[FitOverNodes, hierfl.Fit]


@cache
def pair() -> Pair:
    """A fit over nodes and one of all rows, which draw the same."""
    ready = hierfl.formula("y ~ age + sex + (1 + dose | site)", clients="site").on(frame())
    data, method = ready.data(frame()), methods.fedsvi(ready)
    with TemporaryDirectory() as folder:
        over = hierfl.nodes.fit(method, hierfl.nodes.in_process(data, folder), rounds=3, seed=2)
    return over, fit(method, data.select(sorted(data.names)), rounds=3, seed=2)


SAME: dict[str, Callable[[Any], pd.DataFrame]] = {
    "effects": lambda f: f.effects("age", by="sex", grid=[40, 60]).frame,
    "new": lambda f: f.effects("age", client="new", grid=[40, 60], prob=0.5).frame,
    "comparisons": lambda f: f.comparisons("sex", scale="link").frame,
    "slopes": lambda f: f.comparisons("age", comparison="slope").frame,
    "hypotheses": lambda f: f.hypotheses(["age > 0", "sd_site[dose] = 1"]).frame,
    "icc": lambda f: f.icc().frame,
}


@pytest.mark.parametrize("name", SAME)
def test_the_answers_are_those_of_a_fit(name: str) -> None:
    over, here = (SAME[name](one) for one in pair())
    pd.testing.assert_frame_equal(over, here, rtol=1e-6, atol=1e-9)


def test_the_summary_has_the_global_rows_of_that_of_a_fit() -> None:
    over, here = (one.summary(prob=0.95, draws=400) for one in pair())
    wanted = here.frame[here.frame["client"] == ""].set_index(["site", "entry"])
    found = over.frame.set_index(["site", "entry"])
    assert set(found.index) == set(wanted.index)
    numbers = ["mean", "sd", "low", "high"]
    np.testing.assert_allclose(found[numbers], wanted.loc[found.index, numbers], rtol=1e-6)
    assert [h for h, _ in over.tables] == [h for h, _ in here.tables if "by client" not in h]
    assert list(over.tables[0][1].columns[-2:]) == ["2.5 %", "97.5 %"]
    assert over.trustworthy in (None, here.trustworthy)
    assert "fit.local_summary() asks for them" in repr(over)


def test_it_prints_in_a_few_lines() -> None:
    lines = repr(pair()[0]).splitlines()
    assert lines[0].startswith("FitOverNodes(fedsvi, 4 clients, 3 rounds, ")
    assert len(lines) < 12 and "fit.summary() shows the global sites" in lines[-1]


WRONG: dict[str, Callable[[FitOverNodes], Any]] = {
    "clients' rows are at their nodes: take a typical row": lambda f: f.comparisons("sex", "rows"),
    "draws is 30: a 95 % interval needs 40 or more": lambda f: f.summary(draws=30, prob=0.95),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_at_nodes_is_refused_by_name(words: str) -> None:
    with pytest.raises((KeyError, ValueError), match=words):
        WRONG[words](pair()[0])


def test_other_models_have_a_summary_too(tmp_path: Any) -> None:
    rows = hierfl.ClientData.from_clients(
        {c: {"x": np.ones((6, 1)), "y": np.arange(6.0)} for c in "ab"}
    )
    method = methods.fedsvi(hierfl.models.regression("gaussian"))
    over = hierfl.nodes.fit(method, hierfl.nodes.in_process(rows, tmp_path), rounds=2)
    assert set(over.summary().frame["client"]) == {""} and over.summary().tables == ()
    with pytest.raises(TypeError, match=r"fit\.effects is for fits of a hierfl\.formula"):
        over.effects("x")
