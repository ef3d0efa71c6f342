"""A client's rows as a formula reads them for its node: each step once for all that a question needs of them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.data.row_differences import Codes, codes_of_values
from hierfl.formulas.answers import ToldDesign, design_columns
from hierfl.formulas.columns import by_client, incomplete, without
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.design import every_design_of
from hierfl.formulas.disclosure import (
    Floats,
    coarse_columns,
    coarse_frame,
    outcomes_of,
    with_coarse,
)
from hierfl.formulas.imputed import with_known


@dataclass(frozen=True, eq=False)
class ReadRows:
    """The rows of a client's frame, of which no number may rest on fewer than `least`."""

    declared: Declaration
    frame: pd.DataFrame
    client: str
    least: int = 1
    _designs: list[tuple[Any, ToldDesign]] = field(default_factory=list, init=False)
    _codes: dict[tuple[str, bytes, bool], Codes] = field(default_factory=dict, init=False)

    @staticmethod
    def of(formula: Any, frames: Any, least: int = 1) -> "ReadRows":
        """Return the rows of a node's one client."""
        ((client, frame),) = by_client(frames, formula.clients).items()
        return ReadRows(formula.declared, frame, client, least)

    @cached_property
    def there(self) -> NDArray[np.bool_]:
        """Which rows the formula keeps, (N,)."""
        of = self.declared.rows_of, self.client, self.declared.missing
        return ~incomplete(self.frame, *of)

    @cached_property
    def whole(self) -> pd.DataFrame:
        """Those rows."""
        return without(self.frame, ~self.there, self.client)

    @cached_property
    def own(self) -> pd.DataFrame:
        """Those rows, covariates numbers or NaN."""
        if not self.declared.imputed:
            return self.whole
        return with_known(self.whole, self.declared, self.client, self.least)

    @cached_property
    def numbers(self) -> dict[str, tuple[Floats, Floats]]:
        """Column of numbers -> its values, (n,), and what is made of them (`coarse`)."""
        every = coarse_columns(self.own, self.declared.columns, self.declared, self.least)
        return {name: (values, made) for name, values, made in every}

    @cached_property
    def told(self) -> pd.DataFrame:
        """Those rows, with the values of which sums are told."""
        return with_coarse(self.own, {name: made for name, (_, made) in self.numbers.items()})

    @cached_property
    def compared(self) -> pd.DataFrame:
        """Those rows, with the values by which they are compared: also the few of a covariate that are not told."""
        if not self.declared.imputed:
            return self.told
        return coarse_frame(self.whole, self.declared.columns, self.declared, self.least)

    @cached_property
    def moved(self) -> dict[str, Floats]:
        """The covariates that a node fits by `coarse` values, (n,), so that rounds tell no more than a schema."""
        outcomes = outcomes_of(self.declared)
        return {
            name: made
            for name, (values, made) in self.numbers.items()
            if name not in outcomes and len(made) and not np.array_equal(made, values, True)
        }

    def told_design(self, schema: Any) -> ToldDesign:
        """Return what may be told of the columns of a schema's design: once for an answer, and what it tells of."""
        if schema not in [of for of, _ in self._designs]:
            designs = every_design_of(self.declared, schema)
            columns = design_columns(designs, self.declared, schema, self.told, self.client)
            made = ToldDesign.of(designs, *columns, schema.min_count)
            self._designs[:] = [(schema, made)]
        return self._designs[0][1]

    def codes(self, name: str, key: bytes) -> Codes:
        """Return keyed codes of a column's values in all rows, (N,)."""
        return self._coded(name, key, self.frame)

    def codes_kept(self, name: str, key: bytes, *, exact: bool) -> Codes:
        """Return those of the rows that the formula keeps, (n,); of numbers the `exact` ones, or those `compared`."""
        if exact or name not in self.numbers:
            return self.codes(name, key)[self.there]
        return self._coded(name, key, self.compared)

    def _coded(self, name: str, key: bytes, frame: pd.DataFrame) -> Codes:
        if (of := (name, key, frame is self.frame)) not in self._codes:
            self._codes[of] = codes_of_values(frame[name].to_numpy(), key)
        return self._codes[of]

    def on_every_row(self, columns: Floats) -> Floats:
        """Return columns of the rows that the formula keeps, (n, p), with NaN in the others, (N, p)."""
        return scattered(columns, self.there)


def scattered(columns: Floats, there: Any) -> Floats:
    """Return columns, (n, p), of the rows that are `there`, (N,), with NaN in the others, (N, p)."""
    made = np.full((len(there), columns.shape[1]), np.nan)
    made[there] = columns
    return made
