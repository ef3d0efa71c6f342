"""Names of columns and groups become names of fields and sites, never two of them the same one."""

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.formulas.writer import ProgramWriter, unique_names
from tests.formulas.small import BASE, fields, on, refused

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


def test_unique_names() -> None:
    texts = ["a", "a.b", "a_b", "a b", "a_b_2", "年", "月", "a"]
    found = unique_names("g_", texts)
    assert found.keys() == set(texts) and len(set(found.values())) == len(found)
    writer = ProgramWriter()
    assert len({writer.named(text) for text in [*texts, "A", "1", "eta", "b_eta"]}) == 11
