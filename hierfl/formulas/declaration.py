"""What a user declares: a formula, a family and the column of the clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from hierfl.formulas.columns import Kind
from hierfl.formulas.parse import Parts, parse
from hierfl.formulas.schema import Schema
from hierfl.formulas.terms import bare_columns, calls, columns_of, described
from hierfl.formulas.transforms import CODINGS
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
    def described(self) -> tuple[Any, ...]:
        """The common terms, and those of each group, as new `formulae` models; evaluation changes them."""
        groups = (group.terms for group in self.parts.groups)
        return tuple(map(described, (self.parts.common, *groups)))

    @cached_property
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        """The columns of each kind of group but the clients, each once."""
        found = dict.fromkeys(group.by for group in self.parts.groups)
        return tuple(by for by in found if by != (self.clients,))

    @cached_property
    def columns(self) -> dict[str, Kind | None]:
        """Column of a term, the response or an addition -> its kind; None: as the frame has it."""
        kinds: dict[str, Kind | None] = {}
        every = self.described
        for found in every:
            for name in columns_of(found):
                kinds.setdefault(name, None)
        for call in chain.from_iterable(map(calls, every)):
            if call.callee in CODINGS:  # a category, even where it holds numbers
                name = call.args[0].name
                read_elsewhere = any(name in bare_columns(found) for found in every)
                kinds[name] = None if read_elsewhere else "category"
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
        found = {**dict.fromkeys(chain.from_iterable(self.groupings)), **self.columns}
        found.pop(self.clients, None)
        return found


def response_of(declared: Declaration, schema: Schema) -> Response:
    """Return what the schema knows about the response, as the family needs it."""
    column = schema.columns[declared.parts.response]
    if schema.response is None:
        return Response(float("nan"), float("nan"), column.levels)
    return Response(schema.response.mean, schema.response.sd)
