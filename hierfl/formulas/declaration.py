"""What a user declares: a formula, a family and the column of the clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from hierfl.formulas.columns import Kind
from hierfl.formulas.parse import Group, Parts, parse
from hierfl.formulas.schema import Schema
from hierfl.formulas.terms import bare_columns, coded_columns, columns_of, described
from hierfl.models.families import Response, ResponseFamily

Missing = Literal["refuse", "drop"]


@dataclass(frozen=True)
class Declaration:
    """A formula before clients have agreed on a schema; missing="refuse" or "drop" rows that miss a value."""

    text: str
    family: ResponseFamily
    clients: str
    missing: Missing = "refuse"

    @cached_property
    def parts(self) -> Parts:
        """The formula, taken apart."""
        return parse(self.text)

    @property
    def common(self) -> Any:
        """The common terms as a new `formulae` model; evaluation changes it."""
        return described(self.parts.common)

    def of_group(self, group: Group) -> Any:
        """Return the terms of a group as a new `formulae` model."""
        return described(group.terms)

    @property
    def described(self) -> tuple[Any, ...]:
        """The common terms, and those of each group."""
        return (self.common, *(self.of_group(group) for group in self.parts.groups))

    @cached_property
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        """The columns of each kind of group but the clients, each once."""
        found = dict.fromkeys(group.by for group in self.parts.groups)
        return tuple(by for by in found if by != (self.clients,))

    @cached_property
    def columns(self) -> dict[str, Kind | None]:
        """Column of a term, the response or an addition -> its kind; None: as the frame has it."""
        every = self.described
        coded = {name for found in every for name in coded_columns(found)}
        coded -= {name for found in every for name in bare_columns(found)}
        names = [name for found in every for name in columns_of(found)]
        kinds: dict[str, Kind | None] = {
            name: "category" if name in coded else None for name in dict.fromkeys(names)
        }
        labels = self.family.kind in ("category", "ordered")
        # yes and no are taken as 1 and 0
        number: Kind | None = None if self.family.kind == "binary" else "number"
        kinds[self.parts.response] = "category" if labels else number
        for addition, column in self.parts.additions.items():
            if addition != "upper":  # which is missing where no interval ends
                kinds[column] = None if addition == "cens" else "number"
        return kinds

    @property
    def rows_of(self) -> dict[str, Kind | None]:
        """All columns that the formula reads, those of groups too, except the clients'."""
        by = {name: None for grouping in self.groupings for name in grouping}
        found: dict[str, Kind | None] = {**by, **self.columns}
        return {name: kind for name, kind in found.items() if name != self.clients}


def response_of(declared: Declaration, schema: Schema) -> Response:
    """Return what the schema knows about the response, as the family needs it."""
    column = schema.columns[declared.parts.response]
    if schema.response is None:
        return Response(float("nan"), float("nan"), column.levels)
    return Response(schema.response.mean, schema.response.sd)
