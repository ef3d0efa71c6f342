"""Formulas are taken apart as lme4 and brms read them, and what is not understood is refused by name."""

from __future__ import annotations

import pytest

from hierfl.formulas.parse import parse
from hierfl.formulas.syntax import Group


def test_response_additions_common_terms_and_groups_are_told_apart() -> None:
    found = parse("y | trials(n) + weights(w) ~ 0 + x - z + (1 + x | a) + bs(x, df=5) + (1 || b)")
    assert found.response == "y"
    assert found.additions == {"trials": "n", "weights": "w"}
    assert found.common == "0 + x - z + bs(x, df=5)"
    assert found.groups == (Group("1 + x", ("a",), True), Group("1", ("b",), False))


def test_a_slash_stands_for_groups_and_for_groups_within_them() -> None:
    assert parse("y ~ (x | a/b)").groups == (Group("x", ("a",), True), Group("x", ("a", "b"), True))
    assert parse("y ~ (x | a:b)").groups == (Group("x", ("a", "b"), True),)
    assert [group.by for group in parse("y ~ (1 | a/b/c)").groups] == [
        ("a",),
        ("a", "b"),
        ("a", "b", "c"),
    ]


def test_censoring_with_two_columns_names_the_end_of_the_interval() -> None:
    assert parse("t | cens(status, end) ~ 1").additions == {"cens": "status", "upper": "end"}
    assert parse("t | event(died) + entry(start) ~ 1").additions == {
        "event": "died",
        "entry": "start",
    }


def test_columns_with_other_names_stand_in_back_quotes() -> None:
    found = parse("`my y` ~ `a b` + (1 | `the site`)")
    assert (found.response, found.common) == ("my y", "`a b`")
    assert found.groups[0].by == ("the site",)


def test_no_common_terms_leave_the_intercept() -> None:
    assert parse("y ~ (1 | g)").common == "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y", "0 signs '~'"),
        ("y ~ x ~ z", "several|2 signs|more than one"),
        ("", "empty"),
        ("~ x", "nothing on one side"),
        ("y ~", "nothing on one side"),
        ("y ~ x +", "ends with '\\+'"),
        ("y ~ (x", "parenthesis"),
        ("y ~ x)", "parenthesis"),
        ("y ~ `x", "back-quote"),
        ("y ~ x $ z", "cannot be read"),
        ("log(y) ~ x", "make a column of it"),
        ("Surv(t, d) ~ x", "event\\(status\\)"),
        ("cbind(a, log(b)) ~ x", "is no column"),
        ("y | se(s) ~ x", "known scale"),
        ("y | foo(s) ~ x", "the additions are trials"),
        ("y | trials(n, m) ~ x", "needs one column"),
        ("y | trials(10) ~ x", "needs one column"),
        ("y | weights(a) + weights(b) ~ x", "twice"),
        ("y | cens(a) + event(b) ~ x", "both cens"),
        ("y ~ (1 |)", "lacks a side"),
        ("y ~ (| g)", "lacks a side"),
        ("y ~ (1 | f(g))", "no columns"),
        ("y ~ (1 | a:)", "no columns"),
        ("y ~ (1 | a | b)", "several bars"),
        ("y ~ (1 | a) + (1 | a)", "twice"),
        ("y ~ x - (1 | a)", "away"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a string"):
        parse(3)  # type: ignore[arg-type]
