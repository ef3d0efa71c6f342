"""A formula is read to its last sign, with every option, or refused where it cannot be read."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import hierfl
from tests.formulas.small import BASE, fields, on, refused

# Terms -> words of the refusal.
LOST = {
    "x, z": "from ',' on",
    "x % 2 + z": "from '%' on",
    "x %in% u + z": "from '%' on",
    "x ! z": "from '!' on",
    "x // z": "from '//' on",
    "x + z]": "from ']' on",
    "x z": "from 'z' on",
    "(x, z | h)": "from ',' on",
    "sex[f]": "no term",
    "'a'": "no term",
    "x = 3": "cannot be read",
    "(1 | :a b)": "no columns",
    "x - - z": "two signs",
    "(x + (1 | h))": "inside of other parentheses",
    "x + offset(z) + offset(z)": "twice",
    "(x - 1) + z": "put 0 at the start",
}
MISLEADING = {
    "x ^ 2": "I(x ** 2)",
    "x ** 2": "I(x ** 2)",
    "(x) ** 2": "I((x) ** 2)",
    "x*2": "I(x * 2)",
    "exp(x)/2": "I(exp(x) / 2)",
    "x > 0": "I(x > 0)",
    "x + 2": "I(2)",
    "True": "I(True)",
    "x - z": "I(x - z)",
    "x + z | h": "parentheses",
    "1 | h": "(1 | h)",
    "(1 + x | h):(z)": "parentheses",
    "x + offset(z):g": "offset",
    "(x + offset(z)) * g": "offset",
    "x - offset(z)": "offset",
    "scale(offset(z))": "offset",
    "I(-x ** 2)": "in two ways",  # formulae: (-x) ** 2
    "scale(2 ** x ** 3)": "in two ways",  # formulae: (2 ** x) ** 3
    "I(0 < x < 1)": "compares twice",  # formulae: (0 < x) < 1
    "x:x": "I(x * x)",
    "x * z * x": "I(x * z * x)",
    "log(x) * log(x)": "by itself",
}
OPTIONS = {
    "scale(x, center=False)": "'center', which is not known",
    "scale(x, scale=False)": "'scale', which is not known",
    "standardize(x, 2)": "standardize(column)",
    "center(x, 3)": "center(column)",
    "scale(x, z)": "scale(column)",
    "poly(x, 2, raw=True)": "'raw', which is not known",
    "poly(x, 2, degree=3)": "an argument too many",
    "bs(x, 5, 3)": "an argument too many",
    "log(x, 2)": "log(column)",
    "I(x, z)": "I(column)",
    "offset(x, z)": "offset(column)",
    "C(u, 'r')": "C(column)",
    "C(x > 0)": "make a column of 'x > 0'",
    "scale()": "'scale()'",
    "poly()": "'poly()'",
}
READ = {
    "(x + z) ** 2": ["x", "z", "x:z"],
    "x / z": ["x", "x:z"],
    "x * z - x:z": ["x", "z"],
    "x + -1": ["x"],
    "{x + 1}": ["I(x + 1)"],
    "(x + offset(z)) + u": ["x", "offset(z)", "u"],
    "bs(x, 5)": ["bs(x, 5)"],
    "T(u, ref='s')": ["T(u, ref='s')"],
    "I((x + z) * 2) + I(x + z * 2)": ["I((x + z) * 2)", "I(x + z * 2)"],
    "I(x - (z - b)) + I(x - z - b)": ["I(x - (z - b))", "I(x - z - b)"],
    "I(x / (z / 2)) + I(x / z / 2)": ["I(x / (z / 2))", "I(x / z / 2)"],
    "I((-x) ** 2) + I(-(x ** 2)) + I(x * -1)": ["I((-x) ** 2)", "I(-(x ** 2))", "I(x * -1)"],
    "I((x > 0) * (x < 1))": ["I((x > 0) * (x < 1))"],
    "x:z + z:x + x:z": ["x:z"],
    "((x + (z)))": ["x", "z"],
}


def test_nothing_of_a_text_is_lost() -> None:
    for terms, words in {**LOST, **MISLEADING, **OPTIONS}.items():
        refused(lambda t=terms: hierfl.formula(f"y ~ {t}", clients="h"), words)  # type: ignore[misc]
    for addition in ("trials n", "trials(n", "weights(a, b)", "cens(a b)", "trials(n,)"):
        refused(lambda t=addition: hierfl.formula(f"y | {t} ~ x", clients="h"))  # type: ignore[misc]


def test_what_formulas_allow_is_read() -> None:
    for terms, names in READ.items():
        found = hierfl.formula(f"y ~ {terms}", clients="h").declared.described[0].common_terms
        assert [term.name for term in found if term.name != "Intercept"] == names, terms


def test_transforms_of_two_expressions_have_constants_of_their_own() -> None:
    found = fields(on("y ~ scale((x + z) * b) + scale(x + z * b)"))["x"]
    wanted = ((BASE.x + BASE.z) * BASE.b, BASE.x + BASE.z * BASE.b)
    for values, column in zip(found.T, wanted, strict=True):
        np.testing.assert_allclose(values, (column - column.mean()) / column.std(ddof=0))
    refused(lambda: on("y ~ scale(poly(x, 2))"), "one column of numbers")
    refused(lambda: on("y ~ scale(u)"), "'u'", "one column of numbers")


def test_columns_called_as_a_term_are_not_taken_for_it() -> None:
    frame = BASE.assign(**{"x:z": BASE.b, "log(b)": BASE.z, "x + z": BASE.b + 1.0, "a b": BASE.x})
    for text in ("`x:z` + x:z", "log(b) + `log(b)`"):
        refused(lambda t=text: on(f"y ~ {t}", frame=frame), "two terms are called")  # type: ignore[misc]
    made = on("y ~ I(`x + z`) + I(x + z) + scale(`a b`) + `x:z`:x", frame=frame)
    assert made.layout.common.columns[:3] == ("I(`x + z`)", "I(x + z)", "scale(`a b`)")
    np.testing.assert_allclose(fields(made, frame)["x"][:, 0], frame["x + z"])


def test_terms_that_are_one_are_refused() -> None:
    refused(lambda: on("y ~ (x | h) + (1 + x || h)"), "both have 'Intercept' of 'h'")
    refused(lambda: on("y ~ (1 | h:g) + (1 | g:h)"), "both have 'Intercept' of 'h:g'")
    assert len(on("y ~ ((1 | h)) + (0 + x | (h))").layout.groups) == 2


def test_a_space_before_a_parenthesis_changes_nothing() -> None:
    """A `cs (x)` is no common effect, and the columns of `gr (g)` are read."""
    made = hierfl.formula(
        ["`blood (mg)` ~ center (dose) + T(arm, ref='new (b)')", "sigma ~ scale (x)"], clients="h"
    )
    assert made.text == "`blood (mg)` ~ center(dose) + T(arm, ref='new (b)'); sigma ~ scale(x)"
    with pytest.raises(ValueError, match="a coefficient for each threshold"):
        hierfl.formula("y ~ cs (x)", clients="h")
    near = pd.DataFrame(np.eye(2), index=["a", "b"], columns=["a", "b"])
    made = hierfl.formula("y ~ (1 | gr (g, cov=A))", clients="h", data2={"A": near})
    assert "g" in made.declared.rows_of
