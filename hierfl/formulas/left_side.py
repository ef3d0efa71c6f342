"""Responses in several columns, and responses between two bounds: cbind(a, b) and y | trunc(lb=0)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hierfl.formulas.parse import NAMES, Declaration, text_of_tokens
from hierfl.models import families

# What other packages call them -> what to write here.
ELSEWHERE = {
    "Surv": "time | event(status)",
    "p": "successes | trials(n)",
    "prop": "successes | trials(n)",
    "proportion": "successes | trials(n)",
    "c": "cbind(a, b, c)",
    "censored": "time | cens(status)",
    "truncated": "y | trunc(lb=0)",
    "rate": "count ~ offset(log(exposure))",
    "se": "a Pyro program with a known scale (docs/recipes.md)",
    "mi": "a Pyro program with latent values (docs/recipes.md)",
}
OPTIONS = ("lb", "ub")
IN_PARTS = ("counts", "shares")  # kinds of families whose responses have several columns


def columns_of_response(tokens: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    """Return the name and the columns of a response such as cbind(a, b, c), or say what to write."""
    called = tokens[0].lexeme if tokens else ""
    inner, text = tokens[2:-1], text_of_tokens(tokens)
    plain = [t.kind in NAMES for t in inner[::2]] + [t.lexeme == "," for t in inner[1::2]]
    brackets = [t.lexeme for t in (*tokens[1:2], *tokens[-1:])]
    if called != "cbind" or brackets != ["(", ")"] or len(inner) % 2 == 0 or not all(plain):
        advice = ELSEWHERE.get(called)
        raise ValueError(
            f"the response '{text}' is no column: "
            + (f"write {advice}" if advice else "make a column of it first")
        )
    columns = tuple(token.lexeme.strip("`") for token in inner[::2])
    if len(columns) < 2 or len({*columns}) < len(columns):
        raise ValueError(f"the response '{text}' must name two different columns or more")
    return text, columns


def check_columns(declared: Declaration) -> None:
    """Refuse several columns of a family that reads one, and one of a family that reads several."""
    family, parts = declared.family, declared.parts
    if (len(parts.labels) > 1) == (family.kind in IN_PARTS):
        if len(parts.labels) == 2:
            first, other = parts.labels[0], {"counts": "binomial", "shares": "beta"}[family.kind]
            text = f"{first} | trials(n)" if other == "binomial" else first
            raise ValueError(
                f"the response '{parts.response}' has two columns, of which one says all: write "
                f"'{text} ~ ...', family='{other}'"
            )
        return
    if len(parts.labels) > 1:
        raise ValueError(
            f"family '{family.name}' reads one column, and the response is '{parts.response}': take "
            "family='multinomial' for counts, 'dirichlet' for shares, or write "
            f"'{parts.labels[0]} | trials(n) ~ ...' for a binomial"
        )
    raise ValueError(
        f"family '{family.name}' reads several columns, and the response is '{parts.response}': "
        "write cbind(a, b, c), or take family="
        + ("'categorical' for a column of levels" if family.kind == "counts" else "'beta'")
    )


def with_bounds(declared: Declaration) -> Declaration:
    """Return a declaration whose family is that between the bounds of trunc()."""
    parts = declared.parts
    if not parts.trunc:
        return declared
    of_times = {"cens", "event", "upper", "entry"} & parts.additions.keys()
    if of_times:
        raise ValueError(
            f"the response has {parts.trunc} and {min(of_times)}(): of times write entry(start) for "
            "those that entered late, in place of trunc()"
        )
    low, high = _bounds(parts.trunc)
    return replace(declared, family=families.truncated(declared.family, low, high))


def _bounds(text: str) -> tuple[float, float]:
    """Return the numbers of trunc(lb=0, ub=10)."""
    found = {"lb": -math.inf, "ub": math.inf}
    wrong = ValueError(
        f"the addition '{text}' needs one or two numbers: write trunc(lb=0), trunc(ub=10) or "
        "trunc(lb=0, ub=10)"
    )
    inner = text.removeprefix("trunc").strip().removeprefix("(").removesuffix(")")
    for place, part in enumerate(inner.split(",")):
        name, _, value = part.rpartition("=")
        key = name.strip() or (OPTIONS[place] if place < len(OPTIONS) else "")
        try:
            number = float("".join(value.split()))
        except ValueError as error:
            raise wrong from error
        if key not in found or math.isnan(number):
            raise wrong
        found[key] = number
    if found == {"lb": -math.inf, "ub": math.inf}:
        raise wrong
    return found["lb"], found["ub"]
