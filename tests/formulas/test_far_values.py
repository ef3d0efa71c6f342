"""Values that are too far out are warned of, with client and count, and never their value."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.nodes import in_process

WORDS = "column 'bmi' of client 'b' has 1 value more than 8 sds"


def rows(n: int = 60, far: float = 270.0) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"h": np.resize(list("abc"), n), "bmi": rng.normal(27.0, 4.0, n)})
    frame["y"] = 0.1 * frame["bmi"] + rng.normal(0.0, 1.0, n)
    frame.loc[4, "bmi"] = far  # of client b
    return frame


def said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return sorted({str(warning.message) for warning in caught})


@pytest.mark.parametrize("n", [15, 60, 3000])
@pytest.mark.parametrize("family", ["gaussian", "poisson"])
@pytest.mark.parametrize(
    "text", ["y ~ bmi + (1 | h)", "y ~ s(bmi, k=4)", "y ~ scale(bmi) + (bmi | h)"]
)
def test_a_value_far_out_is_named_without_its_value(n: int, family: str, text: str) -> None:
    frame = rows(n).assign(y=lambda f: (f["y"].clip(lower=0.0) + 1.0).round())
    formula = hierfl.formula(text, family, clients="h").on(frame)
    messages = said(lambda: formula.data(frame))
    assert messages[-1].startswith(WORDS) and "270" not in str(messages)
    assert len(messages) == 1 or messages[0].startswith("'s(bmi, k=4)' is far outside of its knots")
    assert said(lambda: formula.data(frame.assign(bmi=frame["bmi"].clip(15.0, 32.0)))) == []


@pytest.mark.parametrize("family", ["gaussian", "student", "gamma", "poisson"])
def test_a_response_far_out_is_named_as_a_predictor_is(family: str) -> None:
    frame = rows(far=30.0)
    frame["y"] = (frame["y"].clip(lower=0.0) + 1.0).round()
    frame.loc[7, "y"] = 27000.0  # of client b
    formula = hierfl.formula("y ~ bmi + (1 | h)", family, clients="h").on(frame)
    messages = said(lambda: formula.data(frame))
    assert len(messages) == 1 and messages[0].startswith(WORDS.replace("bmi", "y"))
    assert "27000" not in messages[0]
    assert said(lambda: formula.data(frame, labeled=False)) == []


def test_counts_with_many_zeros_have_long_tails() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"h": np.resize(list("abc"), 3000), "x": rng.normal(size=3000)})
    frame["y"] = rng.poisson(rng.lognormal(0.0, 1.5, 3000)) * rng.integers(0, 2, 3000)
    assert frame["y"].max() > frame["y"].mean() + 8.0 * frame["y"].std()
    formula = hierfl.formula("y ~ x + (1 | h)", "negative_binomial", clients="h").on(frame)
    assert said(lambda: formula.data(frame)) == []


def test_new_rows_are_judged_by_the_agreed_mean_and_sd() -> None:
    frame = rows(far=30.0)
    formula = hierfl.formula("y ~ bmi + (1 | h)", clients="h").on(frame)
    new = pd.DataFrame({"h": ["a", "b", "new"], "bmi": [27.0, 270.0, 290.0]})
    assert [message[:33] for message in said(lambda: formula.data(new, labeled=False))] == [
        "column 'bmi' of client 'b' has 1 ",
        "column 'bmi' of client 'new' has ",
    ]


def test_rare_levels_of_two_are_not_far_out() -> None:
    n = 3000
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"h": np.resize(list("abc"), n), "y": rng.normal(size=n)})
    frame["x"], frame["k"] = (np.arange(n) < 8) * 1, 1 + (np.arange(n) < 8) * 1
    frame["flag"] = frame["x"] == 1
    formula = hierfl.formula("y ~ x + k + flag + (1 | h)", clients="h").on(
        frame.assign(k=rng.integers(1, 3, n))
    )
    assert said(lambda: formula.data(frame)) == []


def test_a_missing_covariate_is_not_far_out() -> None:
    """It stands as 0 in the program, which no value of this column is near."""
    frame = rows(far=30.0).assign(bmi=lambda f: f["bmi"].clip(25.0, 29.0))
    frame.loc[::7, "bmi"] = np.nan
    text = ["y ~ mi(bmi) + (1 | h)", "bmi | mi() ~ 1"]
    formula = hierfl.formula(text, clients="h").on(frame)
    assert said(lambda: formula.data(frame)) == []
    frame.loc[4, "bmi"] = 270.0
    assert said(lambda: formula.data(frame))[0].startswith(WORDS)


def test_a_long_tail_is_not_far_out() -> None:
    n = 3000
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"h": np.resize(list("abc"), n), "income": rng.lognormal(10.0, 1.3, n)})
    frame["y"] = rng.normal(size=n)
    assert frame["income"].max() > frame["income"].mean() + 8.0 * frame["income"].std()
    formula = hierfl.formula("y ~ income + (1 | h)", clients="h").on(frame)
    assert said(lambda: formula.data(frame)) == []


def test_over_nodes_each_node_warns_of_its_own(tmp_path: Path) -> None:
    formula = hierfl.formula("y ~ bmi + (1 | h)", clients="h")
    # of 200 rows the value has less than 99% of the squares, so that its node takes part
    parts = {str(name): part for name, part in rows(600).groupby("h")}
    messages = said(lambda: hierfl.nodes.fit(formula, in_process(parts, tmp_path), seed=0))
    assert [message[: len(WORDS)] for message in messages] == [WORDS]
    assert "270" not in "".join(messages)
    sent = [path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("270.0" in text for text in sent)


# ------------------------------------------------------------ products of a column far from 0
@pytest.mark.parametrize(
    ("text", "priors", "is_far"),
    [
        ("y ~ year * arm + (1 | h)", {}, True),
        ("y ~ arm:year + (1 | h)", {}, True),
        ("y ~ center(year) * arm + (1 | h)", {}, False),
        ("y ~ year + bmi * arm + (1 | h)", {}, False),
        ("y ~ year * arm + (1 | h)", {"year": "normal(0, 1)"}, False),
    ],
)
def test_a_product_of_a_column_far_from_0_is_named(
    text: str, priors: dict[str, Any], is_far: bool
) -> None:
    """After x + 1000 the slopes of g ~ x * k by group went from 0.042 to 0.002: their priors are at 0 of x."""
    rng = np.random.default_rng(0)
    frame = rows(far=27.0).assign(
        year=2000.0 + rng.integers(0, 20, 60), arm=np.resize(["p", "q"], 60)
    )
    formula = hierfl.formula(text, clients="h", priors=priors)
    words = " ".join(said(lambda: formula.on(frame).data(frame)))
    assert ("far from all rows" in words) is is_far
    assert ("write center(year) in the product" in words) is is_far
