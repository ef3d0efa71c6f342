"""Wrong formulas, frames and schemas: each is refused with the column, the value and the fix."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch

import hierfl
from tests.formulas.frames import patients

ERRORS = (ValueError, TypeError, KeyError)
Change = Callable[[pd.DataFrame], Any]


def declared(text: str, family: Any = "gaussian", **options: Any) -> hierfl.Formula:
    return hierfl.formula(text, family, clients="site", **options)


# ------------------------------------------------------------ formulas
# Family -> formula -> words of its refusal; what the grammar refuses stands in test_grammar.
FORMULAS: dict[str, dict[str, str]] = {
    "gaussian": {
        "y ~ s(site, bs='re')": "must be 'cr'; .* \\(1 \\| hospital\\) is 're'",
        "mvbind(y, dose) ~ age": "the response is not a column",
        "y ~ age + (1 + offset(dose) | site)": "offset",
        "y ~ age + (0 | site)": "no columns",
        "y ~ age + offset(sex)": "'offset.sex.' is a category, not a number",
        "y ~ age + log(sex)": "cannot be evaluated",
        "y ~ poly(age, 0)": "degree of poly\\(\\) is 0: it must be an integer from 1 to 6",
        "y ~ poly(age, dose)": "degree of poly\\(\\) is dose: it must be an integer",
        "y ~ bs(age)": "bs\\(\\) has no 'df': write bs\\(column, df=",
        "y ~ bs(age, df=2)": "at least its degree 3",
        "y ~ bs(age, df=5, upper_bound=10)": "between its bounds|lower_bound",
        "y ~ y": "is the response",
        "Intercept ~ age": "'Intercept'",
        "y | trials(n) ~ age": "gaussian' takes no row fields, not 'trials'",
        "y | event(died) ~ age": "not 'cens'",
        "y ~ missing_column": "no column 'missing_column'",
        "nothing ~ age": "no column 'nothing'",
        "y ~ (1 | nowhere)": "no column 'nowhere'",
        "kind ~ age": "reads it as a number",
        "y ~ I(age > 500)": "one value|no effect",
        "y ~ log(age - 1000)": "not finite in row 0 of client 's0'",
        "y ~ scale(log(age - 1000))": "is not finite in row 0 of client 's0'",
        "y ~ scale(constant)": "one value",
        "y ~ constant": "one value, 3",
        "y ~ single": "single level 'only'",
        "y ~ day": "holds dates: make it numbers, such as days",
        "y ~ (age | site) + (0 + age + dose || site)": "both have 'age' of 'site'",
        "y ~ (1 | site/ward) + (age | site)": "both have 'Intercept' of 'site'",
        "y ~ digits": "number '1' as a string",
        "y ~ mixed": "numbers, strings or categories|holds",
        "y ~ spaced": "differ only in case, spaces",
        "y ~ mo(age)": "'age' has 192 levels in 192 rows, like an ID",
        "y ~ age + (mo(grade) | site)": "may appear among the common terms only",
        "y ~ mo(sex)": "have no order",
        "y ~ mo(died)": "has 2 levels, which need no order",
        "y ~ mo(log(age))": "must be a single column",
        "y ~ mo(age) + age": "codes a column that is read as a number elsewhere",
        "y ~ s(age) * sex": r"s\(x, by=z\) varies with z",
        "y ~ s(age, dose)": "one argument too many: write s\\(column, k=",
        "y ~ s(age, k=2)": r"k of s\(\) is 2: it must be an integer, 3 or more",
        "y ~ s(age, bs='tp')": r"bs of s\(\) is 'tp': it must be 'cr'",
        "y ~ s(age, by=log(dose))": "by of s\\(\\) is log\\(dose\\): it must be a single column",
        "y ~ dose + s(age, by=dose)": "already includes the effect of 'dose'",
        "y ~ s(age, by=site)": r"write s\(age, site, bs='fs'\)",
        "y ~ s(n, k=10)": r"values in 6 places only.*write s\(n, k=6\)",
        "y ~ s(sex)": "needs one column of numbers",
        "y ~ gp(age, c=1)": r"c of gp\(\) is 1: it must be a number above 1",
        "y ~ gp(age, k=6, c=1.25)": "too few sines",
        "y ~ (1 + s(age) | site)": r"no correlations: write \(1 \+ s\(age\) \|\| site\)",
        "y ~ (1 + s(age, by=sex) || site)": "leave by= out",
        "y ~ s(age, site, bs='fs') + s(age, site, bs='fs', foo=2)": "no option 'foo'",
        "y ~ age; sigmaa ~ age": "gives terms to 'sigmaa', .*write 'sigma ~ ...'",
        "y ~ age; sigma ~ age; sigma ~ sex": "'sigma' has two formulas",
        "sigma ~ age; y ~ age": "after the formula of the response write 'sigma ~",
        "y ~ age; sigma ~ age + offset(dose)": "'sigma ~ ...' has an offset",
        "y ~ sigma_age + age; sigma ~ age": "'sigma_age' is a term of the response",
        "y ~ age; sigma ~ y": "'y' is the response",
        "y ~ cs(dose)": "use family='sratio' or 'acat'",
        "y | trunc(3, 1) ~ age": "the first must be below the second",
        "y | trunc(lb=0) ~ age": "only values from 0 to inf are recorded",
        "y | trunc(lb=-9, lower=2) ~ age": "no option 'lower': write trunc\\(lb, ub=",
    },
    "cumulative": {"grade ~ cs(dose)": "use family='sratio' or 'acat'"},
    "sratio": {
        "grade ~ cs(dose) * age": "is in a product",
        "grade ~ cs(log(dose))": "must be a single column",
        "grade ~ age + (cs(dose) | site)": "among the common terms only",
        "ill ~ cs(dose)": "for several thresholds, and there is only one",
    },
    "categorical": {"kind ~ s(age)": "for one predictor, and the response has 2", "two ~ age": "family='bernoulli'"},
    "multinomial": {
        "cbind(wins, wins) | trials(n) ~ age": "two different columns or more",
        "c(wins, lost) | trials(n) ~ age": r"write cbind\(a, b, c\)",
        "wins | trials(n) ~ age": r"write cbind\(a, b, c\)",
        "cbind(wins, lost, visits) ~ age": "the sum of a row",
        "cbind(wins, lost, visits) | trials(n) ~ age": "the sum of the row's counts",
        "cbind(wins, lost) | trials(n) ~ age": "family='binomial'",
    },
    "binomial": {"cbind(wins, lost) | trials(n) ~ age": r"wins \| trials\(n\) ~"},
    "dirichlet": {
        "cbind(most, part, part2) ~ age": "divide the row's shares by their sum",
        "cbind(wins, lost, visits) ~ age": "use family='multinomial' for counts",
        "cbind(most, part, rest) ~ age + part": "is the response",
        "cbind(part, rest) ~ age": "family='beta'",
    },
    "von_mises": {"age ~ dose": "an angle from -pi to pi, in radians"},
    "student": {
        "y | trunc(lb=-9) ~ age": "family 'student' cannot be truncated",
        "y ~ age; nu ~ age": "gives terms to 'nu', which family 'student' cannot have",
    },
    "gamma": {"days | trunc(lb=0.1) ~ age": "family 'gamma' cannot be truncated"},
    "weibull": {"days | trunc(lb=1) + event(died) ~ age": r"write entry\(start\)"},
    "poisson": {
        "visits ~ age; shape ~ age": "family 'poisson' cannot have: .*write none",
        "some | trunc(lb=101) ~ age": "without an upper one it goes up to 100",
        "some | trunc(1, 2000) ~ age": "less than 1000 above the lower one",
    },
}  # fmt: skip


def odd() -> pd.DataFrame:
    """Return patients with odd columns besides, and responses in several columns."""
    frame, n = patients(), len(patients())
    share = 1.0 / (1.0 + np.exp(-frame["y"]))
    return frame.assign(
        constant=3.0,
        single="only",
        day=pd.Timestamp("2020-01-01"),
        digits=["1", "2"] * (n // 2),
        mixed=[1, "a"] * (n // 2),
        spaced=["a b", "a  b"] * (n // 2),
        two=frame["sex"].replace("x", "m"),
        sigma_age=frame["age"] * 2.0 + frame["dose"],
        lost=frame["n"] - frame["wins"],
        some=frame["visits"] + 1,
        most=0.7 * share,
        part=0.3 * share,
        part2=0.5,
        rest=1.0 - share,
    )


WRONG = [(family, text) for family, texts in FORMULAS.items() for text in texts]


@pytest.mark.parametrize(("family", "text"), WRONG)
def test_wrong_formulas(family: str, text: str) -> None:
    with pytest.raises(ERRORS, match=FORMULAS[family][text]):
        made = declared(text, family).on(odd())
        made.data(odd())
        made.program()


# ------------------------------------------------------------ arguments
ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: hierfl.formula(3, clients="site"), "must be a string"),  # type: ignore[arg-type]
    (lambda: hierfl.formula(["y ~ age", 3], clients="site"), "string, .* or a list of strings"),  # type: ignore[list-item]
    (lambda: hierfl.formula({"y": "~ age"}, clients="site"), "the formula is a dict"),  # type: ignore[arg-type]
    (lambda: declared("y ~ age", "normalish"), "normalish"),
    (lambda: declared("y ~ age", 3), "family is 3"),
    (lambda: declared("y ~ age", "binom"), "binomial"),
    (lambda: hierfl.formula("y ~ age", clients=None), "column that names the clients"),  # type: ignore[arg-type]
    (lambda: declared("y ~ age", missing="ignore"), "'refuse', 'drop'"),
    (lambda: declared("wins ~ age", "binomial"), "trials"),
    (lambda: declared("y ~ age").program(), "not agreed on a schema"),
    (lambda: declared("y ~ age")(None), "not agreed on a schema"),  # type: ignore[arg-type]
    (lambda: declared("y ~ age", priors="normal(0, 1)"), "priors is 'normal.*give a dict"),
    (lambda: declared("y ~ age", priors=[("b", "normal(0, 1)")]), "priors is a list: give a dict"),
    (lambda: declared("y ~ age", priors={3: "normal(0, 1)"}), "give a dict of sites' names"),
    (lambda: declared("y ~ age", data2=[patients()]), "data2 is a list: give a dict of frames"),
    (
        lambda: declared("age ~ sex", "cumulative").on(patients()),
        "'age' has 192 levels in 192 rows",
    ),
    (lambda: hierfl.schema(patients()), "clients='hospital'"),
    (lambda: hierfl.schema(patients(), declared("y ~ age"), rare="drop"), "'refuse', 'merge'"),  # type: ignore[arg-type]
    (lambda: hierfl.schema(patients(), declared("y ~ age"), min_count=0), "1 or more"),
    (lambda: hierfl.schema([1, 2], declared("y ~ age")), "one pandas frame"),
    (lambda: hierfl.schema("a.csv", declared("y ~ age")), r"pandas\.read_csv reads a file"),
    (lambda: hierfl.schema({}, declared("y ~ age")), "empty"),
    (lambda: hierfl.schema({"a": patients()[:0]}, declared("y ~ age")), "no rows"),
    (lambda: hierfl.schema(patients().drop(columns="site"), declared("y ~ age")), "'site'"),
    (lambda: hierfl.fit(declared("y ~ age"), [1, 2]), "frames is a list"),
]


@pytest.mark.parametrize(("call", "message"), ARGUMENTS)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ERRORS, match=message):
        call()


# ------------------------------------------------------------ priors
PRIORS: list[tuple[dict[str, Any], str]] = [
    ({"agee": dist.Normal(0.0, 1.0)}, "did you mean 'age'"),
    ({"age": 3.0}, "'age' is 3.0: give a distribution"),
    ({"sd": dist.Normal(0.0, 1.0)}, "a scale must be > 0"),
    ({"sd_site": dist.Normal(0.0, 1.0)}, "a scale must be > 0"),
    ({"cor": dist.Normal(0.0, 1.0)}, "concentration of an LKJ"),
    ({"cor": -1.0}, "concentration of an LKJ"),
    ({"sex[m]": dist.Normal(0.0, 1.0), "sex[x]": dist.Laplace(0.0, 1.0)}, "one kind"),
    ({"sigma": dist.Normal(1.0, 1.0)}, "'sigma' is .* allows -1"),
    ({"sex": dist.Normal(torch.zeros(3), 1.0)}, "has shape \\(3,\\): it must be"),
]


@pytest.mark.parametrize(("priors", "message"), PRIORS)
def test_wrong_priors(priors: dict[str, Any], message: str) -> None:
    with pytest.raises(ERRORS, match=message):
        declared("y ~ age + sex + (1 + age | site)", priors=priors).on(patients()).program()


# ------------------------------------------------------------ frames
def at(column: str, value: Any) -> Change:
    """Return what puts a value into row 30, which is row 6 of client s1."""

    def changed(frame: pd.DataFrame) -> pd.DataFrame:
        values = frame[column].astype(object)
        values.iloc[30] = value
        try:
            return frame.assign(**{column: pd.to_numeric(values)})
        except (ValueError, TypeError):
            return frame.assign(**{column: values})

    return changed


TEXT = "y | weights(w) ~ age + sex + beds + (1 | region) + (1 | year) + (1 | site/ward)"
FRAMES: list[tuple[Change, str]] = [
    (at("age", np.nan), "'age' of client 's1' is missing 1 of 24 values, the first in row 6"),
    (at("age", np.inf), "'age' of client 's1' is infinite in row 6"),
    (at("age", "old"), "'age' of client 's1' holds 'old'"),
    (at("sex", None), "'sex' of client 's1' is missing 1 of"),
    (at("sex", "q"), "'sex' of client 's1' has the value 'q' in row 6"),
    (at("y", np.nan), "'y' of client 's1' is missing 1 of"),
    (at("w", -1.0), "weight in row 6 of client 's1' is -1"),
    (at("region", "moon"), "'s1' is in the groups"),
    (lambda f: f.assign(region="moon"), "'moon' of 'region' in row 0"),
    (at("year", 1999), "'1999' of 'year' in row 6"),
    (at("ward", "w9"), "4 groups of 'site:ward'.*at most 3"),
    (at("site", None), "no client in row 30"),
    (lambda f: f.drop(columns="age"), "no column 'age'"),
    (lambda f: f.drop(columns="ward"), "no column 'ward'"),
    (lambda f: pd.concat([f, f["age"]], axis=1), "2 columns 'age'"),
    (lambda f: f[:0], "frames|no rows|empty"),
    (lambda f: f.assign(sex=1), "'1' in row 0"),
]


@pytest.mark.parametrize(("change", "message"), FRAMES)
def test_frames_that_disagree_with_the_schema(change: Change, message: str) -> None:
    made = declared(TEXT).on(patients(rows=60))
    with pytest.raises(ERRORS, match=message):
        made.data(change(patients()))


RESPONSES: list[tuple[str, str, Change, str]] = [
    ("ill ~ age", "bernoulli", at("ill", 2), "'ill' of client 's1'.*2"),
    ("visits ~ age", "poisson", at("visits", -1), "'visits' of client 's1'.*-1"),
    ("visits ~ age", "poisson", at("visits", 1.5), "'visits' of client 's1'.*1.5"),
    ("wins | trials(n) ~ age", "binomial", at("n", 0), "'wins' of client 's1'"),
    ("days ~ age", "gamma", at("days", 0.0), "'days' of client 's1'.*0"),
    ("days | event(died) ~ age", "weibull", at("died", 2), "'died' of client 's1' has the value 2"),
    ("days | cens(died) ~ age", "weibull", at("died", 7), "'days' of client 's1'.*7"),
    ("days | event(died) + entry(dose) ~ 1", "weibull", lambda f: f.assign(dose=99.0), "entry"),
    ("grade ~ age", "cumulative", lambda f: f.assign(grade="top"), "'top' in row 0"),
]


@pytest.mark.parametrize(("text", "family", "change", "message"), RESPONSES)
def test_responses_outside_the_family(text: str, family: str, change: Change, message: str) -> None:
    frame = patients(rows=60).assign(dose=0.0)
    made = declared(text, family).on(frame)
    with pytest.raises(ERRORS, match=message):
        made.data(change(frame.groupby("site").head(24).reset_index(drop=True)))


# ------------------------------------------------------------ schemas
def changed(**parts: Any) -> str:
    """Return a schema's text with parts changed; a dotted name is a path."""
    found = json.loads(declared("y ~ age + sex + (1 | region)").on(patients()).agreed.json())
    for path, value in parts.items():
        inside, *names = path.split("__")
        place = found
        for name in [inside, *names][:-1]:
            place = place[name]
        place[[inside, *names][-1]] = value
    return json.dumps(found)


SCHEMAS: list[tuple[str, str]] = [
    ("", "cannot be read .DecodeError"),
    ("{", "cannot be read .DecodeError"),
    ("[]", "Expected `object`, got `array`"),
    ("{}", "missing required field `clients`"),
    (changed(rows="many"), r"Expected `int`, got `str` - at `\$.rows`"),
    (changed(rows=1.5), r"Expected `int`, got `float` - at `\$.rows`"),
    (changed(clients=3), r"Expected `str`, got `int` - at `\$.clients`"),
    (changed(more=1), "some that are not known"),
    (changed(columns=[]), "Expected `object`, got `array`"),
    (changed(columns__age__kind="size"), "Invalid enum value 'size'"),
    (changed(columns__age__mean="old"), "Expected `float`, got `str`"),
    (changed(columns__sex__levels="fm"), "Expected `array`, got `str`"),
    (changed(columns__sex__levels=[1]), "Expected `str`, got `int`"),
    (changed(groups__region__level="below"), "Invalid enum value 'below'"),
    (changed(groups__region__most="3); import os"), "Expected `int`, got `str`"),
    (changed(response__mean=None), r"got `null` - at `\$.response.mean`"),
]


@pytest.mark.parametrize(("text", "message"), SCHEMAS)
def test_wrong_schemas(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hierfl.Schema.of_json(text)


def test_clients_that_hold_other_kinds_are_named() -> None:
    frames = {str(k): part for k, part in patients().groupby("site")}
    frames["s3"] = frames["s3"].assign(sex=1)
    with pytest.raises(ValueError, match="'sex' holds names at client 's0' and numbers at client"):
        hierfl.schema(frames, declared("y ~ sex"))


def test_a_schema_of_another_formula_is_not_taken_for_this_one() -> None:
    agreed = declared("y ~ age").on(patients()).agreed
    with pytest.raises(ValueError, match="not agreed on a schema for 'y ~ dose'"):
        declared("y ~ dose", schema=agreed).program()
    assert replace(agreed, formula="").formula == ""
