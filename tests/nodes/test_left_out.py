"""A client that takes no part in a fit over nodes is named wherever the fit is judged, by a reason without a value."""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl.formulas.questions import Question
from hierfl.nodes import in_process, station
from hierfl.nodes.envelope import read_answer, write_request
from hierfl.nodes.messages import Refused
from tests.methods.cases import CASES
from tests.nodes.ways import WAYS
from tests.sampled import sampled

SECRET = 31337.25  # stands in the rows of the node that fails
NAMES = ("east", "north", "south", "west")
Frames = dict[str, pd.DataFrame]


def frames() -> Frames:
    parts = {}
    for seed, name in enumerate(NAMES):
        g = np.random.default_rng(seed)
        part = pd.DataFrame({"age": g.normal(60, 9, 40).round(), "sex": g.choice(["m", "f"], 40)})
        part["y"] = 0.03 * (part.age - 60) + (part.sex == "f") * 0.5 + g.normal(size=40) + seed
        parts[name] = part
    return parts


def words(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(age=[f"{v} years" for v in frame["age"]])


# what is wrong at west -> what its node says of it
FAULTS: Mapping[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "missing": (
        lambda f: f.assign(age=f.age.mask(f.index == 3)),
        "column 'age' has missing values",
    ),
    "infinite": (
        lambda f: f.assign(age=f.age.mask(f.index == 3, np.inf)),
        "column 'age' has an infinite value",
    ),
    "digits": (lambda f: f.assign(sex=f.age.astype(str)), "column 'sex' holds numbers as strings"),
    "no column": (lambda f: f.drop(columns="sex"), "have no column 'sex'"),
    "words": (words, "the kind of column 'age' is 'category', and 'number' at most others"),
}


def without_west(fault: str) -> tuple[Frames, str]:
    """Return frames of which west's cannot be used, and what its node says of it."""
    parts, (change, why) = frames(), FAULTS[fault]
    parts["west"].loc[3, "y"] = SECRET
    return {**parts, "west": change(parts["west"])}, why


def formula() -> Any:
    return hierfl.formula("y ~ age + sex + (1 | hospital)", clients="hospital")


def assert_named(fit: Any, why: str, who: str = "west") -> None:
    """A client stands with the reason in all that judges a fit, and no value does."""
    summary = fit.summary()
    first = summary.verdict.split("\n")[0]
    assert summary.trustworthy is False and first.startswith("Not trustworthy.")
    assert fit.clients == NAMES[:3]
    in_history = [out for of in fit.history["left_out"] for out in of if out["client"] == who]
    assert len(in_history) == fit.progress.round  # in each round
    for text in (first, str(in_history), str(summary), repr(fit)):
        assert_said(text, who, why)


def assert_said(text: str, who: str, why: str) -> None:
    flat = " ".join(text.split())  # lines are wrapped
    assert who in flat and why in flat and str(SECRET)[:5] not in text, text


def fitted(model: Any, nodes: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hierfl.nodes.fit(model, nodes, seed=0, **options)


@pytest.mark.filterwarnings("ignore")
def test_a_node_whose_rows_cannot_be_used_is_named(tmp_path: Path) -> None:
    parts, why = without_west("words")
    nodes = in_process(parts, tmp_path / "nodes")
    fit = fitted(formula(), nodes)
    report = fit.report(tmp_path / "report.html", draws=60)
    assert_said((tmp_path / "report.html").read_text().replace("&#39;", "'"), "west", why)
    assert_said(str(report.warnings), "west", why)
    assert not report.trustworthy
    fit.save(tmp_path / "saved")
    again = in_process(frames(), tmp_path / "nodes")
    for one in (
        fit,
        hierfl.nodes.load(tmp_path / "saved"),
        hierfl.nodes.load(tmp_path / "saved", again),
    ):
        assert_named(one, why)
    assert "west" in fit.without("east").summary().verdict.split("\n")[0]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "words"])
def test_a_node_says_what_is_wrong_with_its_rows(fault: str, tmp_path: Path) -> None:
    parts, why = without_west(fault)
    request = write_request("schema", Question("columns", 5).json().encode())
    node = station(formula(), {"west": parts["west"]}, tmp_path)
    with pytest.raises(Refused, match=re.escape(why)) as error:
        read_answer(request, node.answer(request))
    assert str(SECRET)[:5] not in str(error.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "transport",
    sampled(WAYS, ["memory"]),
)
def test_over_each_transport(transport: str, tmp_path: Path) -> None:
    parts, why = without_west("missing")
    stations = {n: station(formula(), part, tmp_path / "nodes" / n) for n, part in _own(parts)}
    with WAYS[transport](tmp_path / "way") as way:
        fit = fitted(formula(), way.reached(stations))
        # vantage6 knows an organization by its number; its client has not told its name
        assert_named(fit, why, "node 3" if transport == "vantage6" else "west")


def _own(parts: Frames) -> Any:
    return [(name, {name: part}) for name, part in parts.items()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_level_that_an_agreed_schema_lacks(tmp_path: Path) -> None:
    agreed = formula().on(frames())
    parts = frames()
    parts["west"].loc[3, ["sex", "y"]] = "unheard", SECRET
    fit = fitted(agreed, in_process(parts, tmp_path / "nodes"))
    assert_named(fit, "column 'sex' has a value that is not an agreed level")
    assert "unheard" not in str(fit.history["left_out"].tolist())


def level(batch: Any) -> None:
    center, spread = (
        pyro.sample("center", dist.Normal(0.0, 1.0)),
        pyro.sample("s", dist.HalfNormal(1.0)),
    )
    with batch.clients():
        at = pyro.sample("at", dist.Normal(center, spread))
        with batch.data():
            pyro.sample("y", dist.Normal(at, 1.0), obs=batch.y)


# what is wrong at west -> what the server says of it
UNLIKE: Mapping[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "case": (lambda f: f.assign(sex=f.sex.str.upper()), "in column 'sex' is '"),
    "booleans": (
        lambda f: f.assign(sex=f.sex == "m"),
        "what column 'sex' holds is 'True or False', and 'names' at most others",
    ),
    "no rows": (lambda f: f.head(0), "client 'west' has no rows"),
    "all missing": (lambda f: f.assign(age=np.nan), "every row lacks a value"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", UNLIKE)
def test_a_client_that_differs_from_the_others_is_named_by_how(fault: str, tmp_path: Path) -> None:
    """What the node then refused of the others' schema stood in the place of the reason; booleans made levels."""
    parts, (change, why) = frames(), UNLIKE[fault]
    parts["west"] = change(parts["west"])
    model = hierfl.formula("y ~ age + sex + (1 | hospital)", clients="hospital", missing="drop")
    assert_named(fitted(model, in_process(parts, tmp_path)), why)
    with pytest.raises(ValueError, match=r"column .sex.|client .west."):
        hierfl.fit(model, parts, seed=0, progress=False)


@pytest.mark.filterwarnings("ignore")
def test_a_program_whose_rows_miss_a_value_at_one_node(tmp_path: Path) -> None:
    y = torch.randn(80, generator=torch.Generator().manual_seed(0))
    y[70], y[71] = torch.nan, SECRET
    data = hierfl.ClientData.from_arrays(list(np.repeat(NAMES, 20)), y=y)
    fit = fitted(level, in_process(data, tmp_path / "nodes"))
    told = str(fit.history["left_out"].tolist())
    assert "west" in told and "field 'y' has NaN or infinity" in told and "31337" not in told
    verdict = fit.summary().verdict.split("\n")[0]
    assert "west" in verdict and verdict.startswith("Not trustworthy")


@pytest.mark.filterwarnings("ignore")
def test_a_method_that_begins_again_names_whom_it_left_out(tmp_path: Path) -> None:
    from tests.programs import federation

    data = federation((5, 3, 7, 4))
    (tmp_path / "west").mkdir()
    (tmp_path / "west" / "policy.toml").write_text('methods = ["pvi"]')
    fit = fitted(CASES["clustered_fl"].make(), in_process(data, tmp_path), rounds=2)
    assert set(fit.clients) == {"north", "south", "east"}
    assert [[out["client"] for out in of] for of in fit.history["left_out"]] == [["west"]] * 2
    assert "west" in fit.summary().verdict.split("\n")[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_client_that_joins_later_is_no_longer_named(tmp_path: Path) -> None:
    parts, _ = without_west("missing")
    fit = fitted(formula(), in_process(parts, tmp_path / "nodes"))
    late = {"west": frames()["west"]}
    joined = fit.updated(in_process(late, tmp_path / "late"))
    assert "west" in joined.clients and "took no part" not in joined.summary().verdict


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", ["missing", "no rows"])
def test_a_client_that_cannot_join_is_named_by_the_reason(fault: str, tmp_path: Path) -> None:
    change, why = {**FAULTS, **UNLIKE}[fault]
    parts = frames()
    before = {name: parts[name] for name in NAMES[:3]}
    late = {"west": change(parts["west"]), "young": frames()["north"]}
    fit = fitted(formula(), in_process(before, tmp_path / "before"))
    joined = fit.updated(in_process(late, tmp_path / "late"))
    assert joined.clients == (*NAMES[:3], "young")
    for text in (joined.summary().verdict.split("\n")[0], str(joined.history["left_out"].iloc[-1])):
        assert "west" in text and why.removeprefix("have ") in text
    alone = hierfl.fit(formula(), before, seed=0, progress=False)
    with pytest.raises(ValueError, match="west"):
        alone.updated(late)
