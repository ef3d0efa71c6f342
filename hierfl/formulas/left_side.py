"""Responses in several columns, and responses between two bounds: cbind(a, b) and y | trunc(lb=0)."""

from __future__ import annotations

import math
from dataclasses import replace

from hierfl.formulas.parse import Declaration
from hierfl.models import families

OPTIONS = ("lb", "ub")
IN_PARTS = ("counts", "shares")  # kinds of families whose responses have several columns


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
