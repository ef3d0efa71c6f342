"""Levels: none is lost, merged or moved without a word, and rows may lack some of them."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

import hierfl
from tests.formulas.small import BASE, fields, on, refused

K = BASE.assign(k=np.tile([1, 2, 10], 20))


# ------------------------------------------------------------ C(), S() and T()
def test_a_client_may_lack_a_level_of_a_coded_category() -> None:
    frame = BASE.assign(sex=np.where(BASE.h == "c", "f", np.resize(["f", "m"], 60)))
    plain, coded = on("y ~ sex", frame=frame), on("y ~ C(sex)", frame=frame)
    assert np.array_equal(fields(plain, frame)["x"], fields(coded, frame)["x"])
    less = BASE[~((BASE.h == "c") & (BASE.u == "t"))]
    assert on("y ~ S(u)", frame=less).layout.common.columns == ("S(u)[r]", "S(u)[s]")


def test_a_row_alone_has_the_columns_that_it_has_within_the_frame() -> None:
    for term in (
        "C(k)",
        "S(k)",
        "T(u, 's')",
        "T(k, 10)",
        "S(k, omit=1)",
        "C(k):x",
        "x + (C(k) | h)",
    ):
        made = on(f"y ~ {term}", frame=K)
        alone, whole = fields(made, K.iloc[[7]]), fields(made, K)
        for name, values in alone.items():
            assert np.allclose(values[0], whole[name][7]), (term, name)
    refused(lambda: on("y ~ T(u, 'q')"), "'q'", "r, s, t")


def test_a_column_is_not_a_number_and_a_category_at_once() -> None:
    for text in ("k + C(k)", "scale(k) + S(k)", "C(k) + (1 + k | h)", "C(k) + offset(k)"):
        refused(lambda t=text: on(f"y ~ {t}", frame=K), "'C(k)'" if "S" not in text else "S(k)")  # type: ignore[misc]
    assert on("y ~ C(u) + (u | h)").layout.groups[0].columns == ("Intercept", "u[s]", "u[t]")


def test_declared_levels_may_be_numbers() -> None:
    kinds = pd.Categorical(np.tile([3.0, 1.0, 2.0], 20), [3.0, 1.0, 2.0], ordered=True)
    made = on("y ~ k", frame=BASE.assign(k=kinds))
    assert made.agreed.columns["k"].levels == ("3", "1", "2")


def test_typical_rows_beside_a_coded_category() -> None:
    from hierfl.effects.predictor_rows import typical

    made = on("y ~ C(k) + x + (1 | h)", frame=K)
    rows = typical(made, None, {"x": [0.0, 1.0]})
    assert rows.common.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


# ------------------------------------------------------------ rare ones
def test_rare_levels_of_an_ordinal_response_are_not_merged_above_all() -> None:
    frame = BASE.assign(o=np.r_[0, 0, np.resize([1, 2, 3], 58)])
    made = hierfl.formula("o ~ x", "cumulative", clients="h")
    refused(lambda: made.on(frame, rare="merge", min_count=5), "'o'", "ordered")
    columns = hierfl.schema(frame, clients="h")  # as a number, which the response is not
    start = hierfl.formula("o ~ x", "cumulative", clients="h", schema=columns)
    refused(lambda: start.on(frame, rare="merge", min_count=5), "'o'", "ordered")


def test_merging_beside_a_level_of_the_same_name() -> None:
    values = np.resize(np.array(["p", "q", "other"], dtype=object), 60)
    values[:2] = "seldom"
    made = hierfl.formula("y ~ k", clients="h").on(BASE.assign(k=values), rare="merge", min_count=5)
    assert made.agreed.columns["k"].levels == ("p", "q", "other")


# ------------------------------------------------------------ without rows
def test_an_empty_level_of_an_ordinal_response_keeps_its_threshold() -> None:
    for have in ("bcd", "abd", "abc"):
        frame = BASE.assign(o=pd.Categorical(np.tile(list(have), 20), list("abcd"), ordered=True))
        unused = next(iter({*"abcd"} - {*have}))
        with pytest.warns(UserWarning, match=f"'o' declares .*no rows have, '{unused}', .*prior"):
            made = on("o ~ x", "cumulative", frame)
        assert "Ordered(dist.StudentT(3.0, 0.0, 2.5), 3)" in made.program()


def test_an_empty_level_of_a_predictor_is_named_or_keeps_its_prior() -> None:
    made = on("y ~ u", levels={"u": ["r", "s", "t", "v"]})
    assert made.all_priors["u[v]"].scale > 0 and "u[v]" in made.layout.common.columns  # type: ignore[union-attr]
    frame = BASE.assign(u=pd.Categorical(BASE.u, list("rstv"), ordered=True))
    with pytest.warns(UserWarning, match="'u' declares .*no rows have, 'v', which is left out"):
        assert on("y ~ u", frame=frame).layout.common.columns == ("u[s]", "u[t]")
    refused(lambda: on("y ~ u", levels={"u": ["v", "r", "s"]}), "'u'")


# ------------------------------------------------------------ names that become one
def test_values_that_would_have_one_name_are_refused() -> None:
    frames = {1: BASE[:20], "1": BASE[20:40], "b": BASE[40:]}
    refused(lambda: on("y ~ x", frame=frames), "1", "'1'")
    refused(lambda: on("y ~ x", frame={"a": BASE[:20], "a ": BASE[20:40]}), "spaces")
    for one, other in ((1, "1"), (True, "True"), (1.0, "1")):
        ids = pd.Series([one] * 20 + [other] * 20 + ["b"] * 20, dtype=object)
        refused(lambda i=ids: on("y ~ x", frame=BASE.assign(h=i)), "'h'", "both named")  # type: ignore[misc]
    levels = pd.Index([1, "1", "b"], dtype=object)
    frame = BASE.assign(k=pd.Categorical.from_codes(np.tile([0, 1, 2], 20), categories=levels))
    refused(lambda: on("y ~ k", frame=frame), "'k'", "both named")
    refused(lambda: on("y ~ (1 | k)", frame=frame), "'k'", "both named")


def test_true_and_1_at_two_clients_are_refused_and_0_1_of_two_widths_are_one() -> None:
    yes, one = np.tile([True, False], 10), np.tile([1, 0], 10)
    frames = {"a": BASE[:20].assign(k=yes), "b": BASE[20:40].assign(k=one)}
    for text in ("y ~ C(k)", "y ~ (1 | k)"):
        refused(lambda t=text: on(t, frame=frames), "'k'", "True or False")  # type: ignore[misc]
    wide = np.tile([0.1, 0.2], 10)
    frames = {"a": BASE[:20].assign(k=wide.astype("float32")), "b": BASE[20:40].assign(k=wide)}
    assert on("y ~ C(k)", frame=frames).layout.common.columns == ("C(k)[0.2]",)


def test_an_ordinal_response_has_an_order() -> None:
    """The alphabet put high below low without a word."""
    words = np.tile(["low", "mid", "high"], 20)
    for values in (words, pd.Categorical(words, ["low", "mid", "high"])):
        frame = BASE.assign(o=values)
        refused(lambda f=frame: on("o ~ x", "cumulative", f), "'o'", "no order")  # type: ignore[misc]
        made = on("o ~ x", "cumulative", frame, levels={"o": ["low", "mid", "high"]})
        assert fields(made, frame)["y"].tolist() == [0.0, 1.0, 2.0] * 20
    ten = on("o ~ x", "cumulative", BASE.assign(o=np.tile([1, 10, 2], 20)))
    assert ten.agreed.columns["o"].levels == ("1", "2", "10")


def test_brackets_stay_in_names_of_levels_and_nothing_is_no_name() -> None:
    made = on("y ~ 0 + k", frame=BASE.assign(k=np.tile(["a]", "[a", "k[a]"], 20)))
    assert made.dims["k"] == (("k_dim", ("[a", "a]", "k[a]")),)
    empty = BASE.assign(k=np.tile(["", "a", "b"], 20))
    refused(lambda: on("y ~ k", frame=empty), "'k'", "missing")


def test_names_that_look_the_same_at_two_clients_are_refused() -> None:
    for one, other in (("m", "m "), ("caf\u00e9", "cafe\u0301")):
        frames = {
            "a": BASE[:20].assign(k=np.tile([one, "f"], 10)),
            "b": BASE[20:40].assign(k=np.tile([other, "f"], 10)),
        }
        for text in ("y ~ k", "y ~ (1 | k)", "y ~ x + C(k)"):
            refused(lambda t=text, f=frames: on(t, frame=f), "'k'", "spaces")  # type: ignore[misc]


def test_words_of_censoring_are_known_beforehand() -> None:
    codes = np.where(np.arange(60) % 20 == 3, 2, 0)
    frame = BASE.assign(t=np.exp(BASE.z), c=codes, w=np.where(codes == 2, "interval", "none"))
    frame["up"] = frame.t + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_code, by_word = (
            fields(on(f"t | cens({name}, up) ~ x", "lognormal", frame), frame) for name in "cw"
        )
    assert np.array_equal(by_code["cens"], by_word["cens"])
    wrong = frame.assign(w=np.where(codes == 2, "between", "none"))
    refused(lambda: fields(on("t | cens(w, up) ~ x", "lognormal", wrong), wrong), "'between'")
