"""Names of any kind, and what has two meanings or none: columns, options and schemas."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.models import families
from tests.formulas.small import BASE, RNG, fields, on, refused

A, B = np.tile(["a", "b"], 30), np.repeat(["c", "d"] * 15, 2)


@pytest.mark.parametrize(
    ("one", "other"),
    [("x.1", "x_1"), ("年", "月"), ("g", "G"), ("a b", "a  b"), ("é", "è"), ("x_1_2", "x 1 2")],
)
def test_two_groupings_read_two_indices_and_their_own_columns(one: str, other: str) -> None:
    frame = BASE.assign(**{one: A, other: B})
    for text in (
        f"y ~ (1 | `{one}`) + (1 | `{other}`)",
        f"y ~ (0 + x | `{one}`) + (0 + z | `{other}`)",
    ):
        made = on(text, frame=frame)
        found = fields(made, frame)
        index = [v for v in found.values() if v.dtype.kind == "i"]
        assert len(index) == 2 and not np.array_equal(index[0], index[1])
    rows = [v[:, 0] for v in found.values() if v.ndim == 2]
    assert len(rows) == 2 and np.allclose(rows[0], BASE.x) and np.allclose(rows[1], BASE.z)


def test_combinations_beside_a_column_of_the_same_plain_name() -> None:
    frame = BASE.assign(w=A, h_w=B, **{"h:w": B})
    for other in ("h_w", "`h:w`"):
        made = on(f"y ~ (1 | h) + (1 | h:w) + (1 | {other})", frame=frame)
        index = [v for v in fields(made, frame).values() if v.dtype.kind == "i"]
        assert len(index) == 2 and not np.array_equal(index[0], index[1]), other


def test_values_with_a_colon_are_not_two_columns() -> None:
    frame = BASE.assign(one=np.tile(["a:b", "a"], 30), two=np.tile(["c", "b:c"], 30))
    assert on("y ~ (1 | one:two)", frame=frame).layout.groups[0].size == 2


def test_groups_above_the_clients() -> None:
    frame = pd.concat([BASE, BASE.assign(h=BASE.h + "2")], ignore_index=True)
    clients = ["a", "b", "c", "a2", "b2", "c2"]
    frame["r.1"] = frame.h.map(dict(zip(clients, "nnssns", strict=True)))
    frame["r_1"] = frame.h.map(dict(zip(clients, "pqqppq", strict=True)))
    data = on("y ~ (1 | h) + (1 | `r.1`) + (1 | `r_1`)", frame=frame).data(frame)
    assert len(data.client_fields) == 2


def test_several_terms_of_one_grouping_have_sites_of_their_own() -> None:
    terms = on("y ~ (1 | h) + (0 + x | h) + (0 + z | h)").layout.groups
    assert [term.site for term in terms] == ["h", "h.x", "h.z"]
    assert len({term.field for term in terms}) == 3


def test_columns_of_clients_and_groups_may_have_the_names_of_plates() -> None:
    for name in ("client", "clients", "data", "draw", "chain"):
        made = on(f"y ~ x + (1 | {name})", frame=BASE.rename(columns={"g": name}))
        assert made.layout.groups[0].site == f"{name}.Intercept"
        frame = BASE.rename(columns={"h": name})
        own = hierfl.formula(f"y ~ x + (1 | {name})", clients=name).on(frame)
        assert own.layout.groups[0].place == "clients" and own.data(frame).names == ("a", "b", "c")


def test_names_that_the_model_has_already_are_refused_before_the_fit() -> None:
    for name in ("sigma", "clients", "data", "draw", "chain", "client", "Intercept"):
        frame = BASE.rename(columns={"x": name})
        refused(lambda n=name, f=frame: on(f"y ~ {n}", frame=f).layout, "column", name)  # type: ignore[misc]
        if name != "Intercept":
            refused(lambda n=name, f=frame: on(f"{n} ~ z", frame=f).layout, "column", name)  # type: ignore[misc]
    frame = BASE.assign(**{"u[s]": BASE.z})
    refused(lambda: on("y ~ u + `u[s]`", frame=frame).layout, "two terms have a column 'u[s]'")


def test_names_of_dimensions_are_refused_before_the_fit() -> None:
    terms = {"u + u_dim": "u_dim", "h_term + (x | h)": "h_term", "g_group + (1 | g)": "g_group"}
    for text, name in terms.items():
        frame = BASE.assign(**{name: BASE.z})
        refused(lambda t=text, f=frame: on(f"y ~ {t}", frame=f).layout, name, "rename the column")  # type: ignore[misc]


def test_columns_of_any_name_are_read_as_they_are() -> None:
    """Keywords, functions, fields of a batch, and names that are one in another Unicode form."""
    odd = ["class", "lambda", "None", "log", "C", "I", "np", "offset", "weights", "trials"]
    odd += ["batch", "obs", "y.1", "X", "x\u00b2", "\u00e9", "e\u0301", "fi", "\ufb01", "a:b", "0"]
    columns = np.random.default_rng(2).normal(size=(len(odd), 60))
    frame = BASE.assign(**dict(zip(odd, np.exp(columns), strict=True)))
    text = " + ".join(f"`{name}`" for name in odd)
    made = on(f"y ~ {text} + C(u) + I(x ** 2) + np.log(np) + log(log)", frame=frame)
    assert made.layout.common.columns[: len(odd)] == tuple(odd)
    read = fields(made, frame)["x"]
    np.testing.assert_allclose(read[:, : len(odd)].T, np.exp(columns))
    np.testing.assert_allclose(read[:, -2:].T, columns[[odd.index("np"), odd.index("log")]])
    without = {name: part.drop(columns="h") for name, part in BASE.groupby("h")}
    refused(lambda: on("y ~ x + C(h)", frame=without), "client 'a' has no column 'h'")


MORE = BASE.assign(
    w=np.exp(BASE.z), t=np.exp(BASE.y), s=np.tile([0, 1, 1], 20), k=np.tile([1, 3, 7], 20)
)


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("u[s]", "u + (0 + `u[s]` | h)"),
        ("x:z", "x:z + (0 + `x:z` | h)"),
        ("scale(x)", "scale(x) + (0 + `scale(x)` | h)"),
        ("scale(x)", "z + (0 + scale(x) | h) + (0 + `scale(x)` | g)"),
    ],
)
def test_a_column_called_as_that_of_another_term_is_refused(name: str, terms: str) -> None:
    frame = BASE.assign(**{name: RNG.normal(size=60)})
    refused(lambda: on(f"y ~ {terms}", frame=frame).layout, "two terms", name)


@pytest.mark.parametrize(
    "terms", ["I(y * 2) + x", "scale(y)", "x + (0 + y | h)", "x + offset(y)", "x + (1 | y)"]
)
def test_the_response_is_no_predictor(terms: str) -> None:
    refused(lambda: hierfl.formula(f"y ~ {terms}", clients="h"), "'y'", "response")


@pytest.mark.parametrize("left", ["t | event(t)", "t | weights(t)", "t | event(s) + entry(t)"])
def test_the_response_is_no_addition(left: str) -> None:
    refused(lambda: hierfl.formula(f"{left} ~ x", "weibull", clients="h"), "'t'", "response")
    refused(lambda: hierfl.formula("h ~ x", "categorical", clients="h"), "'h'", "response")


@pytest.mark.parametrize(
    ("text", "family", "name"),
    [
        ("y | weights(w) ~ w", "gaussian", "w"),
        ("t | event(s) ~ s", "weibull", "s"),
        ("t | event(s) + entry(w) ~ w + x", "weibull", "w"),
    ],
)
def test_an_addition_that_is_a_predictor_is_read_to_predict(
    text: str, family: str, name: str
) -> None:
    frame = MORE.assign(w=0.5 * MORE.t)
    made = on(text, family, frame)
    response = made.declared.parts.response
    ahead = made.data(frame.drop(columns=response), labeled=False).fields["x"]
    np.testing.assert_array_equal(ahead, fields(made, frame)["x"])
    refused(lambda: made.data(frame.drop(columns=[response, name]), labeled=False), f"'{name}'")


@pytest.mark.parametrize(
    ("text", "levels", "words"),
    [
        ("y ~ u", {"U": ["r", "s", "t"]}, ["'U'", "u, y"]),
        ("y ~ x + (1 | h:u)", {"h:u": ["r", "s", "t"]}, ["'h:u'"]),
        ("y ~ u", {"u": ["r", "r", "s", "t"]}, ["'u'", "different"]),
        ("y ~ u", {"u": ["r", "r ", "s", "t"]}, ["'r '"]),
        ("y ~ u", {"u": "rst"}, ["'u'", "list"]),
        ("y ~ u", {"u": ["r", "s"]}, ["'u'", "not among the levels r, s"]),
        ("y ~ x", {"y": [1, 2]}, ["'y'", "number"]),
        ("y | weights(w) ~ x", {"w": [1, 2]}, ["'w'", "number"]),
    ],
)
def test_levels_without_a_use_are_refused(
    text: str, levels: dict[str, Any], words: list[str]
) -> None:
    refused(lambda: on(text, frame=MORE, levels=levels).layout, *words)


def test_units_of_no_column_are_refused() -> None:
    made = hierfl.formula("y ~ x", clients="h")
    refused(lambda: hierfl.schema(BASE, made, units={"age": "years"}), "'age'", "x, y")


def test_a_schema_of_other_clients_or_of_another_kind_of_response_is_not_taken() -> None:
    known = on("y ~ x + (1 | g)").agreed
    refused(lambda: hierfl.formula("y ~ x + (1 | g)", clients="g", schema=known), "'h'", "'g'")
    frame = MORE.assign(y=MORE.k)
    ordinal = on("y ~ x", "cumulative", frame).agreed
    count = hierfl.formula("y ~ x", "poisson", clients="h", schema=ordinal)
    assert not count.has_schema
    assert fields(count.on(frame), frame)["y"].tolist() == MORE.k.tolist()


@pytest.mark.parametrize("far", [3e6, 1e7])
def test_numbers_too_far_from_zero_for_single_precision_are_refused(far: float) -> None:
    made = hierfl.formula("y ~ x", clients="h")
    for name in "xy":
        frame = BASE.assign(**{name: BASE[name] + far})
        refused(lambda frame=frame: made.on(frame).all_priors, f"'{name}'")  # type: ignore[misc]
    near = BASE.assign(x=BASE.x + 1e4)
    assert np.abs(fields(on("y ~ x", frame=near), near)["x"][:, 0] - near.x).max() < 1e-3


def test_priors_of_thresholds_and_hazards_know_the_offset() -> None:
    """The intercept's prior did; 20 units off, those in its place said otherwise."""
    frame = MORE.assign(e=20.0 + BASE.z, o=MORE.k)
    ordinal = on("o ~ x + offset(e)", "cumulative", frame).all_priors["thresholds"]
    assert ordinal.base.loc == pytest.approx(frame.e.mean(), abs=1e-4)  # type: ignore[union-attr]
    hazards = families.piecewise_exponential(breaks=(1.0, 3.0))
    made = hierfl.formula("t | event(s) ~ x + offset(e)", hazards, clients="h").on(frame)
    loc = made.all_priors["log_hazard"].base_dist.loc  # type: ignore[union-attr]
    assert float(loc[0]) == pytest.approx(-np.log(frame.t.mean()) - frame.e.mean(), abs=1e-3)


def test_words_that_are_numbers_in_a_category_keep_their_names() -> None:
    """Categories of single precision were named 1.0 beside another client's 1."""
    narrow = pd.Categorical(np.tile(np.array([1, 2], dtype="float32"), 10))
    frames = {"a": BASE[:20].assign(k=narrow), "b": BASE[20:40].assign(k=np.tile([1, 2], 10))}
    assert on("y ~ C(k)", frame=frames).layout.common.columns == ("C(k)[2]",)


def test_a_frame_of_one_client_does_not_hold_several() -> None:
    """They were one client, and their column was not read."""
    made = hierfl.formula("y ~ x + (1 | h)", clients="h")
    refused(lambda: made.on({"all": BASE}), "'all'", "3 clients", "'h'")
    assert made.on({"one": BASE[:20], "two": BASE[20:40]}).agreed.rows == 40
