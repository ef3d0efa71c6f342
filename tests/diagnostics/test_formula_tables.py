"""The summary of a formula prints in brms's order; its frame is that of any summary."""

from functools import cache
from typing import Any

import hierfl
from hierfl import methods
from hierfl.posterior.site_table import COLUMNS
from tests.effects.made import frame
from tests.programs import federation, fit, regression

TEXT = "y ~ age + sex + (1 + dose | site) + (1 | year) + (1 | site:ward)"


@cache
def summarized() -> Any:
    rows = frame()
    made = hierfl.formula(TEXT, clients="site").on(rows)
    return fit(methods.fedsvi(made), made.data(rows), rounds=3).summary(draws=50)


def test_tables_stand_in_brms_order() -> None:
    found = summarized()
    assert [heading for heading, _ in found.tables] == [
        "Population level",
        "Group level, site (4 groups)",
        "Group level, year (2 groups)",
        "Group level, site:ward (at most 3 groups in one site)",
        "Family, gaussian",
        "site: own coefficients by client",
        "year: deviations",
        "site:ward: deviations by client",
    ]
    tables = [table for _, table in found.tables]
    assert list(tables[0].index) == ["Intercept", "age", "sex[m]"]
    assert list(tables[0].columns) == ["estimate", "est. error", "5%", "95%"]
    assert list(tables[1].index) == ["sd(Intercept)", "sd(dose)", "cor(Intercept, dose)"]
    assert list(tables[2].index) == ["sd(Intercept)"]
    assert list(tables[4].index) == ["sigma"]
    assert list(tables[5]["term"].unique()) == ["Intercept", "dose"]
    assert list(tables[6].index) == ["year[y0]", "year[y1]"]


def test_tables_hold_the_numbers_of_the_frame() -> None:
    found = summarized()
    assert tuple(found.frame.columns) == COLUMNS
    at = found.frame.set_index(["site", "entry", "client"])["mean"]
    _, population = found.tables[0]
    assert population["estimate"]["sex[m]"] == at["sex", "m", ""]
    _, groups = found.tables[1]
    assert groups["estimate"]["sd(dose)"] == at["sd_site", "dose", ""]
    assert groups["estimate"]["cor(Intercept, dose)"] == at["cor_site", "Intercept, dose", ""]
    own = found.tables[5][1].set_index(["client", "term"])["estimate"]
    assert own["south", "dose"] == at["site", "dose", "south"]


def test_it_prints_formula_tables_and_verdict() -> None:
    found = summarized()
    lines = repr(found).splitlines()
    assert lines[0] == f"{TEXT}, gaussian with link identity"
    assert lines[1].startswith("fedsvi: 4 clients")
    headings = [heading for heading, _ in found.tables]
    assert [line for line in lines if line in headings] == headings
    assert "".join(lines[-8:]).count(found.verdict[:20]) == 1
    page = found._repr_html_()
    assert all(heading in page for heading in headings)


def test_other_models_print_one_table() -> None:
    found = fit(methods.fedsvi(regression), federation(), rounds=2).summary(draws=50)
    assert found.tables == ()
    assert "site entry client" in repr(found).splitlines()[1]
