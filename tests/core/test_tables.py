"""Everything public prints as a short table: in a terminal, in a notebook and by great_tables, names escaped."""

import re
import sys
import warnings
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl import ClientData, diagnostics, guides, methods
from hierfl.core.tables import FIRST, LAST, Shown, cell, html_of, printed, text_of
from hierfl.datasets import Labeled
from hierfl.diagnostics.nuts import Reference
from tests.programs import fit, regression

MOST_LINES = 60
N = 70  # more clients than lines are printed


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return results of every public kind."""
    data = ClientData.from_clients(
        {f"client-{k}": {"x": [[0.1 * k, 1.0], [1.0, 0.2]], "y": [0.1, 0.7]} for k in range(N)},
        client_fields={"height": [0.0] * N},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fit(methods.fedsvi(regression, guide=guides.structured), data, rounds=2)
        prediction, draws = found.predict(data, draws=5), found.draws(100)
        r_hat = dict.fromkeys([*draws.shared, *draws.own], 1.0)
        reference = Reference(draws.shared, draws.own, r_hat, 1.0)
        ranks = np.zeros((9, N, 3), dtype=np.int64)
        sizes = tuple([2] * N)
        return {
            "data": data,
            "fit": found,
            "summary": found.summary(draws=20),
            "draws": draws,
            "reference": reference,
            "against": diagnostics.against_nuts(found, draws=50, reference=reference),
            "prediction": prediction,
            "unlabeled": found.predict(data.without("y"), draws=5),
            "corrected": diagnostics.corrected(found, 100, proposals=100, rounds=1),
            "convergence": diagnostics.convergence(found, draws=2, proposals=100),
            "loo": diagnostics.loo(found, draws=100),
            "gap": diagnostics.generalization_gap(prediction, prediction),
            "ood": diagnostics.out_of_distribution(prediction, prediction),
            "sbc": diagnostics.Sbc({}, {"w": ranks}, 9, data.names, sizes, np.zeros(9)),
            "pac_bayes": hierfl.diagnostics.pac_bayes(found, clip=(0.0, 5.0), draws=5),
            "program": found.program,
            "federation": found.federation,
            "progress": found.progress,
            "method": found.method,
            "client": found.federation.client,
            "server": found.federation.server,
            "batch": hierfl.full_batch(data),
            "scaling": hierfl.Scaling("x", torch.zeros(500), torch.ones(500)),
            "labeled": Labeled(torch.zeros(9, 1, 2, 2), torch.zeros(9).long(), ("a", "b")),
        }


@pytest.mark.slow
def test_no_result_is_long_or_a_dump_of_tensors(results: dict[str, Any]) -> None:
    for name, result in results.items():
        for text in (repr(result), str(result)):
            assert len(text.splitlines()) <= MOST_LINES, name
            assert "tensor(" not in text and "array(" not in text, name
            assert len(text) < 8000, name


TABLES = (
    "fit summary draws reference against prediction unlabeled corrected convergence loo gap ood "
    "sbc pac_bayes program scaling labeled"
).split()


@pytest.mark.parametrize("name", TABLES)
def test_a_notebook_shows_the_same_cells(name: str, results: dict[str, Any]) -> None:
    class Cells(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.words: list[str] = []

        def handle_data(self, data: str) -> None:
            self.words += data.split()

    parser = Cells()
    parser.feed(results[name]._repr_html_())
    assert sorted(parser.words) == sorted(repr(results[name]).split())


def test_a_fit_says_where_its_table_is(results: dict[str, Any]) -> None:
    assert "fit.summary()" in repr(results["fit"]) and f"{2 * N} rows" in repr(results["fit"])
    assert "Trustworthy" not in repr(results["fit"])  # its history alone does not tell


def test_numbers_are_those_of_the_frame(results: dict[str, Any]) -> None:
    scores = results["prediction"].scores()
    line = next(row for row in repr(results["prediction"]).splitlines() if "client-3 " in row)
    assert line.split() == ["client-3", *(cell(value) for value in scores.loc["client-3"])]


def test_a_long_table_is_printed_by_its_ends() -> None:
    frame = pd.DataFrame({"number": range(1000)})
    lines = text_of(Shown("Many", frame)).splitlines()
    assert lines[-1].startswith("1,000 rows in all")
    numbers = [int(line) for line in lines[2:-1] if line.strip().isdigit()]
    assert numbers == [*range(FIRST), *range(1000 - LAST, 1000)]
    whole = pd.DataFrame({"number": range(FIRST + LAST + 1)})
    assert "..." not in text_of(Shown("Few", whole))


def test_names_are_escaped_in_html() -> None:
    frame = pd.DataFrame({"client": ["<b>x</b>"], "mean": [1.0]})
    text = html_of(Shown("<i>t</i>", frame, "<script>"))
    assert "<b>x" not in text and "<i>t" not in text and "<script>" not in text


pytest.importorskip("great_tables")


@printed
class Found:
    """A result with two tables."""

    def __tables__(self) -> Shown:
        population = pd.DataFrame({"mean": [0.123456, 2.0]}, index=["age", "sex[<i>m]"])
        by_client = pd.DataFrame({"client": ["a_b"], "mean": [float("nan")]})
        tables = (("Population", population), ("By client", by_client))
        return Shown("A <b>title</b>\nbelow it", None, "A note of 5% & more.", tables)


def test_tables_are_groups_of_rows_and_names_are_escaped() -> None:
    made = hierfl.great_table(Found())
    html = made.as_raw_html()
    assert "<b>title" not in html and "&lt;b&gt;title" in html and "sex[<i>m]" not in html
    rows = re.findall(r'<th [^>]*gt_stub">(.*?)</th>', html)
    assert rows == ["age", "sex[&lt;i&gt;m]", ""] and html.count('class="gt_group_heading"') == 2
    assert ">0.123</td>" in html and "nan" not in html.lower().split("<tbody")[1]
    latex = made.as_latex()
    assert r"a\_b" in latex and r"5\% \& more" in latex and "By client" in latex


def test_all_rows_are_written() -> None:
    made = hierfl.great_table(pd.DataFrame({"n": range(100)}))
    assert made.as_raw_html().count('class="gt_row') == 100


def test_table_1_and_a_summary_are_tables() -> None:
    frame = pd.DataFrame({"h": ["a"] * 5 + ["b"] * 5, "x": range(10), "y": [0, 1] * 5})
    found = hierfl.describe(frame, by="h")
    html = hierfl.great_table(found).as_raw_html()
    for text in ("x, mean (sd)", "4.5 (3.03)", "All rows, by h"):
        assert text in html


def test_what_is_no_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="a int is not printed as a table"):
        hierfl.great_table(3)
    with pytest.raises(ValueError, match="two columns 'x'"):
        hierfl.great_table(pd.DataFrame([[1, 2]], columns=["x", "x"]))
    without: Any = None
    monkeypatch.setitem(sys.modules, "great_tables", without)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "hierfl\[tables\]"'):
        hierfl.great_table(pd.DataFrame())
