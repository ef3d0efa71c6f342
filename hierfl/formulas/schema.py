"""The schema that clients agree on, as JSON that people can read, compare and sign."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from hierfl.core.typed_json import Count, Number, read_as
from hierfl.formulas.columns import Column
from hierfl.formulas.transforms import Constants

OFFSET = "offset()"  # in a design: the sum of the offsets, which is not a column
Size = Annotated[float, Meta(ge=0.0, le=1e15)]
Level = Literal["above", "within", "crossed"]


@dataclass(frozen=True)
class Grouping:
    """What clients agree on about groups other than the clients.

    Args:
        level: "above", each client lies in one group; "within", each group lies in one client;
            "crossed", groups are the same at several clients.
        levels: the groups' names; none of those within clients, which stay there.
        most: of groups within clients, the largest number at one client.
        basis: of groups with a known covariance or neighbors, T: their values are T z.
        weights: of `car(type="escar")`, w, the eigenvalues.
    """

    level: Level
    levels: tuple[str, ...] = ()
    most: Annotated[int, Meta(ge=0, lt=1 << 26)] = 0
    basis: tuple[tuple[Number, ...], ...] = ()
    weights: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Margin:
    """Mean and sd of the response or a design column."""

    mean: Number
    sd: Size


@dataclass(frozen=True)
class Schema:
    """What clients have agreed on.

    Args:
        clients: the column that names the clients.
        rows: of all clients together.
        min_count: smallest count of a category that has left a client.
        columns: column -> its kind, unit, mean and sd, or levels.
        formula: whose parts follow; "" where the schema is of columns alone.
        transforms: call in the formula -> its constants.
        groups: groups other than clients -> how they lie to the clients.
        design: column of a term, or `OFFSET` -> its mean and sd.
        response: mean and sd of the response; None of a category.
    """

    clients: str
    rows: Count
    min_count: Annotated[int, Meta(ge=1, lt=1 << 26)]
    columns: Mapping[str, Column]
    formula: str = ""
    transforms: Mapping[str, Constants] = field(default_factory=dict)
    groups: Mapping[str, Grouping] = field(default_factory=dict)
    design: Mapping[str, Margin] = field(default_factory=dict)
    response: Margin | None = None

    def json(self) -> str:
        """Return the schema as JSON with sorted keys, so that two can be compared line by line."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the schema to a file.

        Raises:
            FileExistsError: the file holds another text.
        """
        path = Path(path)
        if path.exists() and path.read_text() != self.json():
            fix = "remove it, or save under another name"
            raise FileExistsError(f"'{path}' holds another text: {fix}")
        path.write_text(self.json())

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Read a schema from a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no schema; the message names the part.
        """
        return cls.of_json(Path(path).read_text())

    @classmethod
    def of_json(cls, text: str) -> Schema:
        """Return the schema of a text.

        Raises:
            ValueError: the text is not JSON, lacks a part, or a part is of another kind.
        """
        try:
            return read_as(cls, text)
        except ValueError as error:
            raise ValueError(f"the schema cannot be read ({error}): save it again") from error
