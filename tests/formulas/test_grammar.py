"""Formulas are read as lme4 and brms read them, to the last sign, or refused where they cannot be read."""

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.formulas.grammar import Reader
from hierfl.formulas.terms import parse
from tests.formulas.small import BASE, fields, on, refused
from tests.formulas.test_program import traced

# Right side -> its common terms.
TERMS = {
    "0 + x - z + z + bs(x, df=5)": None,
    "x + z": "1 + x + z",
    "0 + x": "0 + x",
    "x - 1": "0 + x",
    "x + -1": "0 + x",
    "x - 1 + 1": "1 + x",
    "x * z": "1 + x + z + x:z",
    "x * z - x:z": "1 + x + z",
    "x * z - z:x": "1 + x + z",
    "x / z": "1 + x + x:z",
    "(x + z) / u": "1 + x + z + x:z:u",
    "x / (z + u:g)": "1 + x + x:z + x:u:g",
    "(x + z) ** 2": "1 + x + z + x:z",
    "(x + z + u) ** 3": "1 + x + z + u + x:z + x:u + z:u + x:z:u",
    "x:(z + u)": "1 + x:z + x:u",
    "x:z + z:x + x:z": "1 + x:z",
    "((x + (z)))": "1 + x + z",
    "{x + 1}": "1 + I(x + 1)",
    "(x + offset(z)) + u": "1 + x + offset(z) + u",
    "T(u, ref='s') + bs(x, 5)": "1 + T(u, ref='s') + bs(x, 5)",
    "scale ( x )+ log(x)": "1 + scale(x) + log(x)",
    "I((x + z) * 2) + I(x + z * 2)": "1 + I((x + z) * 2) + I(x + z * 2)",
    "I(x - (z - b)) + I(x - z - b)": "1 + I(x - (z - b)) + I(x - z - b)",
    "I(x / (z / 2)) + I(x / z / 2)": "1 + I(x / (z / 2)) + I(x / z / 2)",
    "I((-x) ** 2) + I(-x ** 2) + I(x * -1)": "1 + I((-x) ** 2) + I(-x ** 2) + I(x * -1)",
    "I(2 ** x ** 3) + I((2 ** x) ** 3)": "1 + I(2 ** x ** 3) + I((2 ** x) ** 3)",
    "I((x > 0) * (x < 1))": "1 + I((x > 0) * (x < 1))",
    "(1 | g)": "1",
}
GROUPS = {
    "(1 + x | a) + (1 || b)": ["(1 + x | a)", "(1 || b)"],
    "(x | a/b)": ["(1 + x | a)", "(1 + x | a:b)"],
    "(0 + x | a:b)": ["(0 + x | a:b)"],
    "(1 | a/b/c)": ["(1 | a)", "(1 | a:b)", "(1 | a:b:c)"],
    "((1 | h)) + (0 + x | (h))": ["(1 | h)", "(0 + x | h)"],
    "(1 | gr (g, cov=A)) + car(M, gr=`the site`)": ["gr(g, cov=A)", "car(the site, cov=M)"],
    "car(M, county)": ["car(county, cov=M)"],
    "s(x, g, bs='fs', k=4)": ["(1 + s(x, k=4) || g)"],
    "s(x, g, bs='fs') + (1 | g)": ["(1 | g)", "(0 + s(x) || g)"],
}


@pytest.mark.parametrize("text", [text for text in TERMS if TERMS[text]])
def test_terms(text: str) -> None:
    assert str(parse(f"y ~ {text}").common) == TERMS[text]


@pytest.mark.parametrize("text", GROUPS)
def test_groups(text: str) -> None:
    assert [group.text for group in parse(f"y ~ {text}").groups] == GROUPS[text]


def test_responses() -> None:
    found = parse("y | trials(n) + weights(`w w`) + trunc(-1, ub=2.5) ~ 1")
    assert (found.response, found.labels) == ("y", ("y",))
    assert (found.additions, found.bounds) == ({"trials": "n", "weights": "w w"}, (-1.0, 2.5))
    assert parse("t | cens(s, end) ~ 1").additions == {"cens": "s", "upper": "end"}
    assert parse("t | cens(s, upper=end) ~ 1").additions == {"cens": "s", "upper": "end"}
    assert parse("t | event(d) + entry(a) ~ 1").additions == {"event": "d", "entry": "a"}
    several = parse("cbind(a, `b c`) | trials(n) ~ x")
    assert (several.response, several.labels) == ("cbind(a, `b c`)", ("a", "b c"))


def test_formulas_of_parameters_and_covariates() -> None:
    found = parse("y ~ mi(x);\n  sigma ~ z + (1 | g); `x` | mi() ~ z")
    assert [*found.others] == ["sigma", "x"] and found.covariates == ("x",)
    assert found.texts == ("y ~ mi(x)", "sigma ~ z + (1 | g)", "`x` | mi() ~ z")
    assert (found.others["sigma"].response, found.others["x"].response) == ("y", "x")


@pytest.mark.parametrize("text", [*TERMS, *GROUPS])
def test_what_is_written_is_read_as_the_same_again(text: str) -> None:
    (sides,) = Reader(f"y ~ {text}").formulas()
    (second,) = Reader(f"y ~ {sides.right}").formulas()
    assert second.right == sides.right


# ------------------------------------------------------------ what is refused
# Formula, the column of the caret, and words of the message.
REFUSED = [
    ("y", 1, "no '~'"),
    ("y ~ x ~ z", 6, "write a list, one formula each"),
    ("", 0, "empty"),
    ("~ x", 0, "nothing on one side"),
    ("y ~", 3, "ends with '~'"),
    ("y ~ x +", 7, "ends with '+'"),
    ("y ~ x **", 8, "ends with '**'"),
    ("y ~ (x", 4, "an unmatched parenthesis: close it"),
    ("y ~ x)", 5, "remove the unmatched parenthesis"),
    ("y ~ `x", 4, "close the backtick"),
    ("y ~ ``", 4, "close the backtick"),
    ("y ~ C(x, 'a)", 9, "close the quote"),
    ("y ~ x $ z", 6, "from '$' on"),
    ("y ~ x, z", 5, "from ',' on"),
    ("y ~ x % 2", 6, "from '%' on"),
    ("y ~ x ! z", 6, "from '!' on"),
    ("y ~ x // z", 7, "from '/' on"),
    ("y ~ x z", 6, "from 'z' on"),
    ("y ~ 2x", 5, "from 'x' on"),
    ("y ~ sex[f]", 7, "from '[f]' on"),
    ("y ~ x = 3", 6, "from '=' on"),
    ("y ~ x . z", 6, "from '.' on"),
    ("y ~ (x, z | h)", 6, "from ',' on"),
    ("y ~ x + 'a'", 8, "a string is not a term"),
    ("y ~ x ^ 2", 6, "I(x ** 2)"),
    ("y ~ x ** 2", 6, "I(x ** 2)"),
    ("y ~ x + x*2", 9, "I(x * 2)"),
    ("y ~ exp(x)/2", 10, "I(exp(x) / 2)"),
    ("y ~ x > 0", 6, "I(x > 0)"),
    ("y ~ x + 2", 8, "I(2)"),
    ("y ~ True", 4, "I(True)"),
    ("y ~ x - z", 8, "removes 'z', which it does not have"),
    ("y ~ x - - z", 8, "two signs"),
    ("y ~ (x - 1) + z", 9, "put 0 at the start"),
    ("y ~ x + (0 + z)", 9, "put 0 at the start"),
    ("y ~ `x` * x", 8, "I(x * x)"),
    ("y ~ (0 + x):z", 5, "put 0 at the start"),
    ("y ~ x:x", 5, "I(x * x)"),
    ("y ~ x * z * x", 10, "I(x * x)"),
    ("y ~ log(x) * log(x)", 11, "I(log(x) * log(x))"),
    ("y ~ I(0 < x < 1)", 12, "compares twice"),
    ("y ~ I(x:z)", 7, "no calculation has ':'"),
    ("y ~ x + offset(z) + offset(z)", 20, "twice"),
    ("y ~ x + offset(z):g", 8, "an offset has no coefficient"),
    ("y ~ (x + offset(z)) * g", 9, "an offset has no coefficient"),
    ("y ~ x - offset(z)", 8, "removes 'offset(z)'"),
    ("y ~ scale(offset(z))", 10, "'offset(z)' is inside"),
    ("y ~ scale(s(x))", 10, "'s(x)' is inside"),
    ("y ~ bs(x, df=4):z", 4, "poly(x, 2) may appear in products"),
    ("y ~ mo(u):mo(g)", 4, "two monotonic effects"),
    ("y ~ scale(x, center=False)", 20, "scale() has no option 'center'"),
    ("y ~ poly(x, 2, raw=True)", 19, "no option 'raw': write poly(column, degree=...)"),
    ("y ~ poly(x, 2, degree=3)", 12, "one argument too many"),
    ("y ~ poly(x, degree=3, 2)", 22, "follows a named one"),
    ("y ~ poly(x, degree=3, degree=2)", 22, "given twice"),
    ("y ~ bs(x, 5, 3)", 13, "one argument too many"),
    ("y ~ log(x, 2)", 11, "log(column)"),
    ("y ~ standardize(x, 2)", 19, "standardize(column)"),
    ("y ~ C(u, 'r')", 9, "C(column)"),
    ("y ~ C(column=u)", 13, "no option 'column': write C(column)"),
    ("y ~ T(u, ref=None)", 13, "ref of T() is None: it must be a level, written out"),
    ("y ~ S(u, None)", 9, "omit of S() is None: it must be a level, written out"),
    ("y ~ s(x, g)", 9, "s(x, hospital, bs='fs')"),
    ("y ~ (1 | gr(1, cov=A))", 12, "the groups '1' are not columns"),
    ("y ~ C(x > 0)", 8, "a single column: make one of it first"),
    ("y ~ z + scale()", 8, "scale() has no argument"),
    ("y ~ foo(age)", 4, "no function 'foo'"),
    ("y ~ np(x)", 4, "no function 'np'"),
    ("y ~ x + np.linalg.inv(x)", 8, "np.linalg.inv"),
    ("y ~ x + `x:z` + x:z", 16, "two terms are called 'x:z'"),
    ("y ~ log(b) + `log(b)`", 13, "two terms are called 'log(b)'"),
    ("y ~ x + z | h", 10, "without parentheses"),
    ("y ~ 1 | h", 6, "write (1 | h)"),
    ("y ~ (1 | h):(z)", 7, "inside other parentheses"),
    ("y ~ (x + (1 | h))", 12, "inside other parentheses"),
    ("y ~ (1 |)", 8, "lacks one side"),
    ("y ~ (| g)", 5, "lacks one side"),
    ("y ~ (1 | f(g))", 9, "are not columns"),
    ("y ~ (1 | a:)", 11, "from ')' on"),
    ("y ~ (1 | a | b)", 11, "several bars"),
    ("y ~ (1 | a) + (1 | a)", 17, "twice"),
    ("y ~ (x | h) + (1 + x || h)", 21, "twice"),
    ("y ~ x - (1 | a)", 11, "away"),
    ("y ~ (x | gr(g, cov=A))", 5, "must be (1 | gr(g, cov=A))"),
    ("log(y) ~ x", 0, "make a column"),
    ("Surv(t, d) ~ x", 0, "event(status)"),
    ("cbind(a, log(b)) ~ x", 0, "is not a column"),
    ("wins / n ~ x", 5, "successes | trials(n)"),
    ("bf(y ~ x, sigma ~ x)", 5, "write a list, one formula each"),
    ("y | foo(s) ~ x", 4, "the additions are trials"),
    ("y | trials(n, m) ~ x", 14, "write trials(column)"),
    ("y | trials(10) ~ x", 11, "must be a column, the number of trials"),
    ("y | trials n ~ x", 11, "from 'n' on"),
    ("y | trials(n ~ x", 13, "from '~' on"),
    ("y | trials(n,) ~ x", 13, "from ')' on"),
    ("y | weights(a) + weights(b) ~ x", 17, "twice"),
    ("y | weights(a) - trials(b) ~ x", 17, "joined by '+'"),
    ("y | - weights(a) ~ x", 6, "joined by '+'"),
    ("y | cens(a) + event(b) ~ x", 0, "both cens"),
    ("y | trunc(w) ~ x", 10, "lb of trunc() is w: it must be a number"),
    ("y | trunc() ~ x", 4, "no argument: write trunc(lb, ub=...)"),
    ("y ~ (x + z):(x + u)", 11, "I(x * x)"),
    ("y ~ x; z", 8, "no '~'"),
    ("y ~ x; ~ z", 7, "not a formula of a parameter"),
    ("y ~ mi(x); x ~ z", 11, "write 'x | mi() ~ z'"),
]


@pytest.mark.parametrize(("text", "column", "words"), REFUSED)
def test_errors_point_at_the_place(text: str, column: int, words: str) -> None:
    message, line, caret = refused(lambda: hierfl.formula(text, clients="h"), words).split("\n")
    assert line.removeprefix("    ") == text and caret.index("^") == column + 4, message


def test_errors_show_the_line() -> None:
    message = refused(lambda: parse("y ~ x +\n  z z +\n  u"))
    assert message.endswith("\n      z z +\n        ^")


def test_long_and_deep_formulas() -> None:
    """Of 3,000 terms, and of parentheses beyond what can be read."""
    names = [f"x{i}" for i in range(3000)]
    assert len(parse(f"y ~ {' + '.join(names)} - x7").common.slopes) == 2999
    refused(lambda: parse(f"y ~ {'(' * 3000}x{')' * 3000}"), "too many nested parentheses")


# ------------------------------------------------------------ columns of any name
NAMES = ["tics(n)", "a;b", "x|g", "mi(x)", "a ~ b", "1", "\u03c3", " two  blanks ", ".", "cs(x)"]
NAMES += [
    'it\'s "q"',
    "gr(",
    "s(x, by=z)",
    "a:b",
    "x[1]",
    "trunc",
    "None",
    "b\\n",
    "by",
    "#",
    "x\n",
]
# `q` of these formulas has each name; `k` is a second such column.
PLACES = {
    "y ~ `q` + x:`q` + (1 + `q` | h)": "number",
    "y ~ scale(`q`) + I(`q` ** 2) + poly(`q`, 2) + (0 + `q` || h)": "number",
    "y ~ s(`q`, k=4) + offset(`q`) + x; sigma ~ `q`": "number",
    "`q` ~ x * z + (1 + x | h)": "number",
    "b | trials(`q`) ~ x": "count",
    "y | weights(`q`) ~ x": "count",
    "y ~ `q`*x + C(`q`):z + (1 | h)": "category",
    "y ~ mo(`q`) + z": "category",
    "y ~ s(x, by=`q`, k=4) + (1 | `q`)": "category",
    "y ~ x + (x | h:`q`)": "category",
    "y ~ mi(`q`) * z; `q` | mi() ~ z": "missing",
}


@pytest.mark.parametrize("text", PLACES)
def test_a_column_of_any_name_is_read_as_one_of_a_plain_name(text: str) -> None:
    values = {
        "number": np.exp(BASE.x * BASE.z / 3.0),
        "count": 1.0 + np.arange(60) % 3,
        "category": pd.Categorical(np.arange(60) % 3, ordered=True).rename_categories([*"ijk"]),
        "missing": BASE.x.where(np.arange(60) % 5 > 0),
    }[PLACES[text]]
    family = "binomial" if "trials" in text else "gaussian"
    plain = on(text.replace("`q`", "q"), family, BASE.assign(q=values))
    wanted = fields(plain, BASE.assign(q=values))
    density = traced(plain, BASE.assign(q=values)).log_prob_sum()
    for name in NAMES[[*PLACES].index(text) % 5 :: 5]:  # some at each place
        frame = BASE.assign(**{name: values})
        made = on(text.replace("`q`", f"`{name}`"), family, frame)
        columns = fields(made, frame)
        assert len(columns) == len(wanted), name
        for own, one in zip(columns.values(), wanted.values(), strict=True):
            np.testing.assert_array_equal(own, one)
        assert float(traced(made, frame).log_prob_sum()) == pytest.approx(float(density)), name
        assert hierfl.Schema.of_json(made.agreed.json()) == made.agreed


def test_columns_called_as_a_term_are_not_taken_for_it() -> None:
    frame = BASE.assign(**{"x:z": BASE.b, "x + z": BASE.b + 1.0, "a b": BASE.x})
    made = on("y ~ I(`x + z`) + I(x + z) + scale(`a b`) + `x:z`:x", frame=frame)
    assert made.layout.common.columns[:3] == ("I(`x + z`)", "I(x + z)", "scale(`a b`)")
    np.testing.assert_allclose(fields(made, frame)["x"][:, 0], frame["x + z"])


def test_transforms_of_two_expressions_have_constants_of_their_own() -> None:
    found = fields(on("y ~ scale((x + z) * b) + scale(x + z * b)"))["x"]
    wanted = ((BASE.x + BASE.z) * BASE.b, BASE.x + BASE.z * BASE.b)
    for values, column in zip(found.T, wanted, strict=True):
        np.testing.assert_allclose(values, (column - column.mean()) / column.std(ddof=0))
    refused(lambda: on("y ~ scale(poly(x, 2))"), "one column of numbers")
    refused(lambda: on("y ~ scale(u)"), "'u'", "one column of numbers")


def test_arithmetic_is_that_of_python_and_r() -> None:
    text = "y ~ I(-x ** 2) + I(2 ** x ** 3) + I((x > 0) + (z > 0)) + I(-x / 2 * z) + I(1e-1 * x)"
    x, z = BASE.x, BASE.z
    wanted = [-(x**2), 2.0 ** (x**3), 1.0 * (x > 0) + (z > 0), -x / 2.0 * z, 0.1 * x]
    np.testing.assert_allclose(fields(on(text))["x"].T, wanted, rtol=1e-6)


def test_terms_that_are_one_are_refused() -> None:
    refused(lambda: on("y ~ (1 | h:g) + (1 | g:h)"), "both have 'Intercept' of 'h:g'")
    refused(lambda: on("y ~ (1 | h) + (x | h)"), "write 0 for an intercept")


def test_products_without_bound_are_refused() -> None:
    """A task of vantage6 brings its formula: 40 columns have 2^40 products."""
    columns = [f"x{k}" for k in range(40)]
    few = f"y ~ ({' + '.join(columns[:14])}) ** 14"
    for text in (f"y ~ {'*'.join(columns)}", f"y ~ ({' + '.join(columns)}) ** 12", few):
        with pytest.raises(ValueError, match="more than 10,000 products"):
            hierfl.formula(text, clients="h")
