"""Responses in several columns, and responses between two bounds: cbind(a, b) and y | trunc(lb=0)."""

from __future__ import annotations

from dataclasses import replace

from hierfl.formulas.declaration import Declaration
from hierfl.models import families

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
    if parts.bounds is None:
        return declared
    of_times = {"cens", "event", "upper", "entry"} & parts.additions.keys()
    if of_times:
        raise ValueError(
            f"the response has trunc() and {min(of_times)}(): of times write entry(start) for "
            "those that entered late, in place of trunc()"
        )
    return replace(declared, family=families.truncated(declared.family, *parts.bounds))
