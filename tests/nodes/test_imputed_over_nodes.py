"""A formula with mi() over nodes is that of the frames; each node imputes its own rows, and sends none of it."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.nodes.policy import Policy
from tests.formulas.test_imputed import lacking
from tests.programs import assert_close
from tests.sampled import sampled

TEXTS = ["y ~ mi(dose) * sex + (1 + mi(dose) | site)", "dose | mi() ~ beds + (1 | site)"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:k-hat", "ignore:the rounds ended")  # of two rounds
@pytest.mark.parametrize("family", sampled(["gaussian", "bernoulli"], ["bernoulli"]))
def test_the_fit_and_what_it_imputes_are_those_of_one_machine(tmp_path: Path, family: str) -> None:
    response = {"gaussian": "y", "bernoulli": "ill"}[family]
    frame = lacking(rows=60)
    frame = frame[frame["site"].isin(["s0", "s1", "s3", "s5"])]
    # one that knows four values tells none of them, and one knows none
    frame.loc[(frame["site"] == "s5") & (frame.index % 60 > 3), "dose"] = np.nan
    frame.loc[frame["site"] == "s1", "dose"] = frame["dose"].fillna(1.0)  # who lacks nothing
    parts = {str(site): part for site, part in frame.groupby("site")}
    texts = [TEXTS[0].replace("y ~", f"{response} ~"), TEXTS[1]]
    formula = hierfl.formula(texts, family, clients="site")
    nodes = hierfl.nodes.in_process(parts, tmp_path)
    over = hierfl.nodes.fit(formula, nodes, rounds=2, disclose="sums", seed=3)
    ready = formula.on(parts, min_count=5)
    settings = hierfl.Settings(compile=False)
    here = hierfl.fit(
        over.method, ready.data(parts), rounds=2, seed=3, progress=False, settings=settings
    )
    assert_close(over.message, here.message)

    found = over.imputed(draws=50, seed=1)
    assert not found.given and set(found.withheld) == set(parts)
    assert set(found.withheld.values()) == {"missing values of rows stay at their node"}
    files = {name: [*(tmp_path / name).glob("answers/*-imputed-50-1.csv")] for name in parts}
    tables = {name: pd.read_csv(*files[name]) for name in parts}
    assert not len(tables["s1"])
    some = [table for table in tables.values() if len(table)]
    assert all([*table.columns] == [*some[0].columns] for table in tables.values())
    every = pd.concat(some, ignore_index=True)
    wanted = here.imputed(draws=50, seed=1).frame
    assert len(every) == len(wanted) > frame["dose"].isna().sum()
    wanted = wanted.sort_values(["client", "row"], ignore_index=True)
    columns = ["mean", "sd", "low", "high"]
    np.testing.assert_allclose(every[columns], wanted[columns], rtol=1e-6)
    for name in ("row", "client", "column"):
        assert every[name].tolist() == wanted[name].tolist()


def test_no_policy_lets_it_leave() -> None:
    with pytest.raises(ValueError, match="imputed"):
        Policy(may_leave=frozenset({"imputed"}))  # type: ignore[arg-type]


def test_it_is_of_a_formula_with_missing_covariates(tmp_path: Path) -> None:
    parts = {str(site): part for site, part in lacking(rows=12).groupby("site")}
    nodes = hierfl.nodes.in_process(parts, tmp_path)
    formula = hierfl.formula("y ~ age", clients="site")
    over = hierfl.nodes.fit(formula, nodes, rounds=1, disclose="sums")
    with pytest.raises(ValueError, match=r"not a formula with mi\(x\)"):
        over.imputed()
