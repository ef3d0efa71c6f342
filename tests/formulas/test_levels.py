"""Levels: none is lost, merged or moved without a word, and rows may lack some of them."""

import warnings

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.formulas.answers import OfColumn
from hierfl.formulas.odd_answers import odd_answers
from hierfl.formulas.questions import Question
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
        made = on("o ~ x", "cumulative", frame)
        assert "Ordered(dist.StudentT(3.0, 0.0, 2.5), 3)" in made.program()


def test_an_empty_level_of_a_predictor_is_left_out_or_keeps_its_prior() -> None:
    made = on("y ~ u", levels={"u": ["r", "s", "t", "v"]})
    assert made.all_priors["u[v]"].scale > 0 and "u[v]" in made.layout.common.columns  # type: ignore[union-attr]
    frame = BASE.assign(u=pd.Categorical(BASE.u, list("rstv"), ordered=True))
    assert on("y ~ u", frame=frame).layout.common.columns == ("u[s]", "u[t]")
    refused(lambda: on("y ~ u", levels={"u": ["v", "r", "s"]}), "'u'")


# ------------------------------------------------------------ names that become one
def test_values_that_would_have_one_name_are_refused() -> None:
    frames = {1: BASE[:20], "1": BASE[20:40], "b": BASE[40:]}
    refused(lambda: on("y ~ x", frame=frames), "1", "'1'")
    refused(lambda: on("y ~ x", frame={"a": BASE[:20], "a ": BASE[20:40]}), "spaces")
    for one, other in ((1, "1"), (True, "True"), (1.0, "1")):
        ids = pd.Series([one] * 20 + [other] * 20 + ["b"] * 20, dtype=object)
        refused(lambda i=ids: on("y ~ x", frame=BASE.assign(h=i)), "'h'", "are both")  # type: ignore[misc]
    levels = pd.Index([1, "1", "b"], dtype=object)
    frame = BASE.assign(k=pd.Categorical.from_codes(np.tile([0, 1, 2], 20), categories=levels))
    refused(lambda: on("y ~ k", frame=frame), "'k'", "are both")
    refused(lambda: on("y ~ (1 | k)", frame=frame), "'k'", "are both")


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


# ------------------------------------------------------------ names that look like others
SPELLINGS = {
    **{"case": ("m", "M"), "a blank": ("male", "male\t"), "form": ("é", "e\u0301")},
    **{"width": ("A", "\uff21"), "dash": ("a-b", "a\u2013b")},
}


@pytest.mark.parametrize("kind", SPELLINGS)
@pytest.mark.parametrize("term", ["sex", "(1 | sex)", "s(x, by=sex)", "x + (sex | h)"])
def test_levels_that_look_alike_are_refused_with_both(kind: str, term: str) -> None:
    first, second = SPELLINGS[kind]
    frame = BASE.assign(sex=np.where(BASE.h == "c", second, first))
    frame.loc[::2, "sex"] = "f"
    parts = {str(name): part for name, part in frame.groupby("h")}
    for rows in (frame, parts):
        message = refused(lambda rows=rows: on(f"y ~ {term}", frame=rows), "'sex'", "case, spaces")  # type: ignore[misc]
        assert repr(first) in message and repr(second) in message
    data = {"x": np.zeros(60), "h": frame["h"], "sex": frame["sex"]}
    read = hierfl.ClientData.from_frame
    refused(lambda: read(pd.DataFrame(data), "h", sex="sex"), "'sex'", "case, spaces")


def test_numbers_that_pandas_wrote_beside_missing_values_are_the_same() -> None:
    """Three nodes write "1" and "2", the fourth "1.0" and "2.0": four levels without a word."""
    codes = np.where(BASE.h == "c", "1.0", "1").astype(object)
    codes[::2] = "2"
    frame = BASE.assign(sex=pd.Categorical(codes), ward=codes)
    refused(lambda: on("y ~ sex", frame=frame), "'sex'", "'1' and '1.0'", "case, spaces, .0")
    refused(lambda: on("y ~ x + (1 | ward)", frame=frame), "'ward'", "'1' and '1.0'")
    answers = {
        name: {"sex": OfColumn("category", "", None, dict.fromkeys(levels, 20))}
        for name, levels in {"a": "12", "b": "12", "c": ("1.0", "2.0")}.items()
    }
    assert [*odd_answers(Question("columns", 5), answers)] == ["c"]  # a node that is left out
    codes[codes == "1.0"] = "1.5"
    assert on("y ~ sex", frame=BASE.assign(sex=pd.Categorical(codes))).agreed.columns["sex"].levels


def test_blanks_alone_are_missing() -> None:
    frame = BASE.assign(u=BASE.u.mask(BASE.index == 3, "  "), z=BASE.z.astype(object))
    frame.loc[7, "z"] = "\t"
    refused(lambda: on("y ~ u", frame=frame), "'u'", "is missing 1 of")
    refused(lambda: on("y ~ z", frame=frame), "'z'", "is missing 1 of")
    assert on("y ~ u + z", frame=frame, missing="drop").agreed.rows == 58
    assert (hierfl.describe(frame[["u", "z"]]).frame["missing"] == 1).all()


def test_a_new_frame_with_another_spelling_is_refused() -> None:
    made = on("y ~ u")
    refused(lambda: made.data(BASE.assign(u=BASE.u.str.upper())), "'R'", "not one of r, s, t")


@pytest.mark.parametrize("missing", ["refuse", "drop"])
def test_words_for_what_is_missing_are_levels(missing: str) -> None:
    words = ("None", "masked", "nan")
    frame = BASE.assign(u=np.resize(words, 60), w=np.resize(["NaN", "NA"], 60))
    made = on("y ~ u + w + (1 | h)", frame=frame, missing=missing)
    assert made.agreed.columns["u"].levels == words and made.agreed.rows == 60
    assert made.agreed.columns["w"].levels == ("NA", "NaN")
    frame.loc[3, "u"] = None  # which is missing
    if missing == "drop":
        assert on("y ~ u", frame=frame, missing=missing).agreed.rows == 59
    else:
        refused(lambda: on("y ~ u", frame=frame), "'u'", "is missing 1 of")
    read = hierfl.ClientData.from_frame(BASE.assign(u=np.resize(words, 60)), "h", u="u")
    assert read.levels["u"] == words


# ------------------------------------------------------------ the reference
def listed(order: str, frame: pd.DataFrame = BASE) -> pd.DataFrame:
    return frame.assign(u=pd.Categorical(frame.u, list(order)))


def test_the_first_category_is_the_reference() -> None:
    """Of an unordered pandas category too, as in R; effects and new frames are by the same levels."""
    made = on("y ~ u", frame=listed("tsr"))
    assert made.agreed.columns["u"].levels == ("t", "s", "r")
    assert made.layout.common.columns == ("u[s]", "u[r]")
    new = fields(made, BASE.iloc[:3])["x"]  # words: r, s, t
    assert new.tolist() == [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    from hierfl.effects.predictor_rows import typical

    assert typical(made, None, {"u": ["t", "s", "r"]}).common.tolist() == [[0, 0], [1, 0], [0, 1]]
    kind = on("u ~ x", "categorical", listed("tsr"))
    assert kind.dims["x"] == (("u_level", ("s", "r")),)
    assert (
        "1 is a"
        in on("g ~ x", "bernoulli", BASE.assign(g=pd.Categorical(BASE.g, ["b", "a"]))).program()
    )


def test_clients_may_list_part_of_the_levels() -> None:
    """Lists of part of them, words, and lists by the alphabet go together; two choices are named."""
    a, b, c = (BASE[BASE.h == name] for name in "abc")
    few = listed("ts", b[b.u != "r"])
    assert on("y ~ u", frame={"a": listed("tr", a[a.u != "s"]), "b": few, "c": c}).agreed.columns[
        "u"
    ].levels == ("t", "r", "s")
    alphabetical = {"a": listed("str", a), "b": listed("rst", b), "c": c}
    assert on("y ~ u", frame=alphabetical).agreed.columns["u"].levels == ("s", "t", "r")
    two = {"a": listed("str", a), "b": listed("trs", b), "c": c}
    with pytest.warns(UserWarning, match="'u' lists its levels as s, t, r .* t, r, s at another"):
        assert on("y ~ u", frame=two).agreed.columns["u"].levels == ("r", "s", "t")


def test_an_unused_level_of_an_unordered_category_is_left_out() -> None:
    assert on("y ~ u", frame=listed("vtrs")).agreed.columns["u"].levels == ("t", "r", "s")


@pytest.mark.parametrize("have", ["bcd", "abd", "abc"])
def test_an_unused_level_of_mo_keeps_its_step(have: str) -> None:
    kinds = pd.Categorical(np.tile(list(have), 20), list("abcd"), ordered=True)
    made = on("y ~ mo(k) + (1 | h)", frame=BASE.assign(k=kinds))
    assert made.dims["mo(k)"][0][1] == ("b", "c", "d")
    made.program()
    one = pd.Categorical(["c"] * 60, list("abcd"), ordered=True)
    refused(lambda: on("y ~ mo(k)", frame=BASE.assign(k=one)), "one value")


# ------------------------------------------------------------ IDs and dates
NAMES = {
    "an ID": ([f"p{i}" for i in range(60)], "60 levels in 60 rows, like an ID"),
    "dates": (pd.date_range("2020-01-01", periods=60), "holds dates: make it numbers"),
    "days": (pd.date_range("2020-01-01", periods=60).date, "holds dates: make it numbers"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("term", ["k", "x * k", "x + (k | h)"])
def test_an_id_or_a_date_is_no_predictor(kind: str, term: str) -> None:
    values, words = NAMES[kind]
    refused(lambda: on(f"y ~ {term}", frame=BASE.assign(k=values)), "column 'k'", words)


ONES = {"k": [f"p{i}" for i in range(60)], "item": [f"p{i % 20}" for i in range(60)]}


@pytest.mark.parametrize(
    ("text", "family", "group"),
    [
        ("y ~ x + (x | k)", "gaussian", "(1 + x | k)"),
        ("y ~ x + (1 | h/k)", "gaussian", "(1 | h:k)"),
        ("y ~ x + (1 | item)", "gaussian", ""),  # each at each client, once
        ("y | weights(w) ~ x + (1 | k)", "gaussian", ""),
        ("v ~ x + (1 | k)", "poisson", ""),  # over-dispersion
    ],
)
def test_groups_of_one_row_beside_a_noise_scale_are_named(
    text: str, family: str, group: str
) -> None:
    frame = BASE.assign(**ONES, w=2.0, v=np.arange(60) % 4)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        on(text, family, frame)
    expected = [f"'{group}' has one row in each group: its sd and sigma cannot be told apart"]
    assert [str(of.message)[: len(expected[0])] for of in heard] == (expected if group else [])


def test_clients_of_one_row_beside_a_noise_scale_are_named() -> None:
    frame = BASE.assign(h=ONES["k"])
    with pytest.warns(UserWarning, match=r"'\(1 \| h\)' has one row in each group"):
        on("y ~ x + (1 | h)", frame=frame)


def test_groups_and_few_levels_are_no_ids() -> None:
    frame = BASE.assign(k=NAMES["an ID"][0], wave=np.resize(["2020-01-01", "2021-01-01"], 60))
    made = on("v ~ x + (1 | k) + wave", "poisson", frame.assign(v=np.arange(60) % 4))
    assert made.agreed.columns["wave"].levels[0] == "2020-01-01"
