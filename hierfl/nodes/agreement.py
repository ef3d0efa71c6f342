"""What nodes report about their rows before the first round, and what they agree on.

A node reports its client's name, how many rows it has, the name, dtype and shape of each field, the
names of features and levels, and the least and largest value of a field of codes. It sends no row.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from hierfl.data.absent import FILLS, form_of, rows_absent, stand_in
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.nodes.messages import Refused
from hierfl.program.program import Program
from hierfl.program.read import ModelRead, codes_of

Ranges = dict[str, tuple[int, int]]
Read = TypeVar("Read", Program, ModelRead)
FEW = 5  # rows of a client that stand in for its own
KINDS = {
    "fields": "field",
    "client_fields": "client field",
    "features": "names of the columns of field",
    "levels": "names of the levels of field",
}


@dataclass(frozen=True)
class Fields:
    """The form of a client's rows.

    Args:
        fields: name -> dtype and the shape of a row.
        client_fields: name -> dtype and shape.
        features: field -> names of its columns.
        levels: field -> names of its codes.
        dtype: torch's default, in which clients compute.
    """

    fields: Mapping[str, Sequence[Any]]
    client_fields: Mapping[str, Sequence[Any]]
    features: Mapping[str, Sequence[str]]
    levels: Mapping[str, Sequence[str]]
    dtype: str

    @staticmethod
    def of(data: ClientData) -> Fields:
        """Return the form of some clients' rows."""
        return Fields(**form_of(data), dtype=str(torch.get_default_dtype()))


@dataclass(frozen=True)
class Introduction:
    """What a node reports about its client before the first round.

    Args:
        client: its name.
        rows: how many it has.
        form: of its rows.
        codes: field of codes -> its least and its largest value.
    """

    client: str
    rows: int
    form: Fields
    codes: Ranges

    @staticmethod
    def of(data: ClientData) -> Introduction:
        """Return what a node reports about its one client; refuse rows of several."""
        if data.num_clients != 1:
            raise ValueError(
                f"a node has the rows of one client, and these are of {data.num_clients}: start a "
                "node for each"
            )
        return Introduction(data.names[0], data.num_rows, Fields.of(data), codes_of(data))

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return asdict(self)

    @staticmethod
    def from_json(found: Any) -> Introduction:
        """Read what `as_json` returned, or raise Refused."""
        try:
            form = Fields(**found["form"])
            client, rows = found["client"], found["rows"]
            codes = _codes(found)
            _check_form(form)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(f"it is no introduction ({type(error).__name__}: {error})") from error
        if not isinstance(client, str) or not isinstance(rows, int) or not 1 <= rows < 1 << 48:
            raise Refused(f"it reports {rows!r} rows of client {client!r}")
        return Introduction(client, rows, form, codes)


def _codes(found: Any) -> Ranges:
    return {str(name): (int(low), int(high)) for name, (low, high) in found["codes"].items()}


def _check_form(form: Fields) -> None:
    for dtype, *shape in (*form.fields.values(), *form.client_fields.values()):
        if not isinstance(getattr(torch, dtype), torch.dtype):
            raise TypeError(f"{dtype} is no dtype")
        fits = all(isinstance(size, int) and 0 <= size < 1 << 24 for size in shape)
        if not fits or len(shape) > 8:
            raise ValueError(f"a row of shape {shape}")


@dataclass(frozen=True)
class Agreement:
    """What all nodes know before the first round.

    Args:
        names: of the clients, sorted.
        rows: how many each client has.
        form: of their rows.
        codes: field of codes -> least and largest value over all clients.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    form: Fields
    codes: Ranges

    @staticmethod
    def between(introductions: Sequence[Introduction]) -> Agreement:
        """Return what some nodes agree on.

        Raises:
            ValueError: there is none, two clients have the same name, or the forms of their rows
                differ; the message names client and field.
        """
        if not introductions:
            raise ValueError("no node has introduced itself: start one or more")
        found = sorted(introductions, key=lambda one: one.client)
        names = tuple(one.client for one in found)
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise ValueError(f"two nodes have a client '{twice[0]}': give each its own name")
        first = found[0]
        for one in found[1:]:
            if differs := _difference(first, one):
                raise ValueError(differs)
        all_codes = [one.codes for one in found]
        codes = {
            name: (min(c[name][0] for c in all_codes), max(c[name][1] for c in all_codes))
            for name in first.codes
        }
        return Agreement(names, tuple(one.rows for one in found), first.form, codes)

    @property
    def digest(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return asdict(self)

    @staticmethod
    def from_json(found: Any) -> Agreement:
        """Read what `as_json` returned, or raise Refused."""
        try:
            names, rows = tuple(map(str, found["names"])), tuple(map(int, found["rows"]))
            return Agreement(names, rows, Fields(**found["form"]), _codes(found))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(f"it is no agreement ({type(error).__name__}: {error})") from error

    def absent_rows(self, fills: tuple[float, float]) -> ClientData:
        """Return all clients without their rows; two numbers may stand in for the values."""
        return rows_absent(self.names, self.rows, asdict(self.form), fills)

    def few_made_up(self, fills: tuple[float, float]) -> ClientData:
        """Return all clients with a few made-up rows each, of the agreed form."""
        short = replace(self, rows=tuple(min(FEW, count) for count in self.rows))
        return stand_in(short.absent_rows(fills), 0)

    def agreed(self, program: Read) -> Read:
        """Return a program, or a model, that was read from some clients, as it is read from all of them.

        Where a method starts from some client's prior, that client's fields are the same made-up
        ones everywhere.
        """
        keys = self.absent_rows(FILLS[0]).keys
        made_up = full_batch(self.few_made_up(FILLS[0]), torch.zeros(1, dtype=torch.long))
        prototype = replace(program.prototype, client_fields=made_up.client_fields)
        return replace(
            program,
            num_clients=len(self.names),
            client_keys=keys,
            codes=dict(self.codes),
            prototype=prototype,
        )


def _difference(one: Introduction, other: Introduction) -> str | None:
    """Return how the rows of two clients differ in form, in a sentence; None: they do not."""
    for kind, called in KINDS.items():
        here, there = dict(getattr(one.form, kind)), dict(getattr(other.form, kind))
        for name in sorted(here.keys() | there.keys()):
            if name not in here or name not in there:
                has, lacks = (one, other) if name in here else (other, one)
                return (
                    f"client '{has.client}' has {called} '{name}', and '{lacks.client}' has "
                    "none: agree on it first"
                )
            if list(here[name]) != list(there[name]):
                return (
                    f"{called} '{name}' is {list(here[name])} at client '{one.client}', and "
                    f"{list(there[name])} at '{other.client}': agree on one"
                )
    if one.form.dtype != other.form.dtype:
        return (
            f"client '{one.client}' computes in {one.form.dtype}, and '{other.client}' in "
            f"{other.form.dtype}: set the same torch.set_default_dtype"
        )
    return None
