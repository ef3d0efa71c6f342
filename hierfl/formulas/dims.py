"""Names and labels of the dimensions of a formula's sites."""

from __future__ import annotations

from hierfl.formulas.declaration import Declaration, response_of
from hierfl.formulas.layout import INTERCEPT, Layout
from hierfl.formulas.schema import Schema

Dims = tuple[tuple[str, tuple[str, ...]], ...]


def dims(declared: Declaration, schema: Schema, found: Layout) -> dict[str, Dims]:
    """Return the name and the labels of each dimension of each site that has one."""
    response = response_of(declared, schema)
    outputs = declared.family.outputs(response)
    # The first level of a category is the reference, which has no predictor.
    last: Dims = ((declared.parts.response, response.levels[-outputs:]),) if outputs > 1 else ()
    sites: dict[str, Dims] = {}
    if found.has_intercept and last:
        sites[INTERCEPT] = last
    for term in found.common.terms:
        own: Dims = ((f"{term.name}_dim", term.coords),) if term.coords else ()
        if own or last:
            sites[term.name] = own + last
    for group in found.groups:
        columns = group.columns
        if last:
            columns = tuple(f"{c}[{level}]" for c in columns for level in last[0][1])
        many = () if group.is_single and not last else ((f"{group.site}_term", columns),)
        if many:
            sites[group.sd] = many
        if group.cor:
            other = (f"{group.site}_term_2", columns)
            sites[group.cor] = (*many, other)
            sites[group.cholesky] = (*many, other)
        if group.place == "clients" and many:
            sites[group.site] = many
        if group.place in ("above", "crossed"):
            sites[group.site] = ((f"{group.site}_group", group.levels), *many)
        if group.place == "within":
            numbers = tuple(str(i) for i in range(group.size))
            sites[group.site] = ((f"{group.site}_group", numbers), *many)
    return sites
