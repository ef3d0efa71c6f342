"""Calls in a formula that are no terms of columns: car(M, gr=g), gr(g, cov=A), cbind(a, b)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hierfl.formulas.syntax import NAMES, Group, text_of_tokens

TYPES = ("escar", "esicar")  # of car(), as in brms
HOW = "write car(M, gr=county), or (1 | gr(hospital, cov=A))"
# What other packages call them -> what to write here.
ELSEWHERE = {
    "bf": "a list in place of bf(), ['y ~ x', 'sigma ~ x']",
    "mvbind": "a formula of each response",
    "Surv": "time | event(status)",
    "p": "successes | trials(n)",
    "prop": "successes | trials(n)",
    "proportion": "successes | trials(n)",
    "c": "cbind(a, b, c)",
    "censored": "time | cens(status)",
    "truncated": "y | trunc(lb=0)",
    "rate": "count ~ offset(log(exposure))",
    "se": "a Pyro program with a known scale (docs/recipes.md)",
    "mi": "the formula of the response first, ['y ~ mi(x) + z', 'x | mi() ~ z']; rows without y are left out",
}


def called_group(tokens: Sequence[Any], terms: str = "1") -> Group:
    """Return the group of `car(M, gr=county, type="escar")` or of `gr(hospital, cov=A)`."""
    words = "".join(token.lexeme for token in tokens)
    name, _, inside = words.partition("(")
    given: dict[str, str] = {}
    for place, part in enumerate(inside.removesuffix(")").split(",")):
        key, _, value = part.rpartition("=")
        given[key or str(place)] = value.strip("\"'`")
    first, second = ("cov", "gr") if name == "car" else ("gr", "cov")
    matrix = given.pop("M" if name == "car" and "M" in given else "0", "")
    known = {first: matrix, second: given.pop(second, ""), "type": given.pop("type", TYPES[0])}
    if given or not known["cov"].isidentifier() or not known["gr"]:
        raise ValueError(f"'{words}' cannot be read: {HOW}")
    if name == "gr" and (terms != "1" or "type" in words):
        raise ValueError(f"the term '({terms} | {words})' must be (1 | {words}): {HOW}")
    if known["type"] not in TYPES:
        raise ValueError(
            f"'{words}' has the type '{known['type']}': it must be 'escar' or 'esicar', the exact "
            "ones; for brms's 'bym2' write car(M, gr=county, type='esicar') + (1 | county)"
        )
    kind = "gr" if name == "gr" else known["type"]
    return Group("1", tuple(known["gr"].split(":")), correlated=False, kind=kind, cov=known["cov"])


# ------------------------------------------------------------ the matrix


def columns_of_response(tokens: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    """Return the name and the columns of a response such as cbind(a, b, c), or say what to write."""
    called = tokens[0].lexeme if tokens else ""
    inner, text = tokens[2:-1], text_of_tokens(tokens)
    plain = [t.kind in NAMES for t in inner[::2]] + [t.lexeme == "," for t in inner[1::2]]
    brackets = [t.lexeme for t in (*tokens[1:2], *tokens[-1:])]
    if called != "cbind" or brackets != ["(", ")"] or len(inner) % 2 == 0 or not all(plain):
        advice = ELSEWHERE.get("p" if brackets[:1] == ["/"] else called)
        raise ValueError(
            f"the response '{text}' is no column: "
            + (f"write {advice}" if advice else "make a column of it first")
        )
    columns = tuple(token.lexeme.strip("`") for token in inner[::2])
    if len(columns) < 2 or len({*columns}) < len(columns):
        raise ValueError(f"the response '{text}' must name two different columns or more")
    return text, columns
