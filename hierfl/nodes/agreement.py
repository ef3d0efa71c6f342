"""What nodes report about their rows before the first round, without a row, and what they agree on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Annotated, Any, Literal, TypeVar

import torch
from msgspec import Meta

from hierfl.data.absent import FILLS, form_of, rows_absent, stand_in
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.laplace.trials import FAILS, moved_rows, terms_at, trial
from hierfl.nodes.messages import NAMES, Refused, read_json
from hierfl.program.few_rows import point
from hierfl.program.labels import codes_of
from hierfl.program.program import Program
from hierfl.program.read import read_model
from hierfl.program.sites import Model

Made = TypeVar("Made")
Key = TypeVar("Key")  # of a node, to the transport
Fills = tuple[float, float]
FEW = 5  # rows of a client that stand in for its own
# of a client, of a code, and of a row's field: what a server and its programs can hold
MOST_ROWS, MOST_CODES, MOST_ENTRIES = 1 << 26, 1 << 31, 1 << 24
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
Count = Annotated[int, Meta(ge=1, lt=MOST_ROWS)]
Code = Annotated[int, Meta(ge=-MOST_CODES, le=MOST_CODES)]
Size = Annotated[int, Meta(ge=0, le=MOST_ENTRIES)]
Ranges = Mapping[str, tuple[Code, Code]]
Shapes = Mapping[str, Sequence[str | Size]]  # field -> dtype, and the shape of a row
KINDS = {
    "fields": "field",
    "client_fields": "client field",
    "features": "names of the columns of field",
    "levels": "names of the levels of field",
}


@dataclass(frozen=True)
class Fields:
    """The form of a client's rows: dtype and row shape of each field, names of columns and codes, and torch's dtype."""

    fields: Shapes
    client_fields: Shapes
    features: Mapping[str, Sequence[str]]
    levels: Mapping[str, Sequence[str]]
    dtype: Literal["torch.float32", "torch.float64"]

    def __post_init__(self) -> None:
        for name, (dtype, *shape) in (*self.fields.items(), *self.client_fields.items()):
            sizes = [max(1, size) for size in shape if isinstance(size, int)]
            whole = len(sizes) == len(shape) <= 8
            if dtype not in NAMES or not whole or prod(sizes) > MOST_ENTRIES:
                raise ValueError(f"field {name[:40]!r} is of {str((dtype, *shape))[:80]}")

    @staticmethod
    def of(data: ClientData) -> Fields:
        """Return the form of some clients' rows."""
        dtype: Any = str(torch.get_default_dtype())
        return Fields(**form_of(data), dtype=dtype)


def client_name(name: Any) -> str:
    """Return the name of a client as it was sent, or raise ValueError."""
    if not isinstance(name, str) or not name.strip() or len(name) > 1000 or not name.isprintable():
        raise ValueError(f"a client is named {str(name)[:40]!r}")
    return name


def _check(names: Sequence[str], codes: Ranges) -> None:
    """Refuse names that cannot be printed, and ranges without a code."""
    [*map(client_name, names)]
    for name, (low, high) in codes.items():
        if low > high:
            raise ValueError(f"the codes of {name[:40]!r} range from {low} to {high}")


@dataclass(frozen=True)
class Introduction:
    """What a node reports: client, rows, form, field of codes -> their range, and columns with `moved` values."""

    client: Name
    rows: Count
    form: Fields
    codes: Ranges
    moved: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        _check([self.client, *self.moved], self.codes)

    @staticmethod
    def of(data: ClientData, moved: Sequence[str] = ()) -> Introduction:
        """Return what a node reports about its one client; refuse rows of several."""
        if data.num_clients != 1:
            what = f"a node has the rows of one client, and these are of {data.num_clients}"
            raise ValueError(f"{what}: start a node for each")
        form, codes = Fields.of(data), codes_of(data)
        return Introduction(data.names[0], data.num_rows, form, codes, tuple(moved))


@dataclass(frozen=True)
class Agreement:
    """What all nodes know before the first round: clients, sorted, their rows, the form, and the ranges of codes."""

    names: tuple[Name, ...]
    rows: tuple[Count, ...]
    form: Fields
    codes: Ranges

    def __post_init__(self) -> None:
        _check(self.names, self.codes)
        if len(self.names) != len(self.rows) or [*self.names] != sorted({*self.names}):
            raise ValueError("its names are not sorted, or not as many as its numbers of rows")

    @staticmethod
    def between(introductions: Sequence[Introduction]) -> Agreement:
        """Return what some nodes agree on; refuse clients of one name, and rows of different forms (ValueError)."""
        agreement, out = Agreement.of_most(introductions)
        if out:
            raise ValueError(next(iter(out.values())))
        return agreement

    @staticmethod
    def of_most(introductions: Sequence[Introduction]) -> tuple[Agreement, dict[str, str]]:
        """Return what more than half of the nodes agree on, else refuse; and of the others, why they do not."""
        if not introductions:
            raise ValueError("no node has introduced itself: start one or more")
        count = Counter(of.client for of in introductions)
        twice = [name for name in count if count[name] > 1]
        out = {n: f"two nodes have a client '{n}': give each its own name" for n in twice}
        once = [of for of in introductions if of.client not in out]
        once.sort(key=lambda of: of.client)
        forms = [_form(of) for of in once]
        ((usual, times),) = Counter(forms).most_common(1) or [("", 0)]
        same = [of for of, form in zip(once, forms, strict=True) if form == usual]
        out |= {of.client: _difference(same[0], of) for of in once if of not in same}
        if 2 * times <= len(once):
            raise ValueError(next(iter(out.values())))
        codes = {
            name: (min(of.codes[name][0] for of in same), max(of.codes[name][1] for of in same))
            for name in same[0].codes
        }
        names, rows = zip(*((of.client, of.rows) for of in same), strict=True)
        return Agreement(names, rows, same[0].form, codes), out

    def check_own(self, own: Introduction) -> None:
        """Refuse what a server says was agreed on, if it is not of a client's rows, their form and codes."""
        if (own.client, own.rows) not in zip(self.names, self.rows, strict=True):
            who = f"client '{own.client}' with {own.rows} rows"
            raise Refused(f"{who} is not among those that agreed: introduce it first")
        if _form(own) != _form(self):
            raise Refused("the agreement is of rows of another form than the client has introduced")
        for name, (low, high) in own.codes.items():
            if low < self.codes[name][0] or self.codes[name][1] < high:
                raise Refused(f"the agreement lacks codes of field '{name}' that the client has")

    @property
    def digest(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def absent_rows(self, fills: Fills) -> ClientData:
        """Return all clients without their rows; two numbers may stand in for the values."""
        return rows_absent(self.names, self.rows, asdict(self.form), fills)

    def tried(
        self, make: Callable[[ClientData], Made], why: str, fills: Sequence[Fills] = FILLS
    ) -> tuple[Made, Fills]:
        """Return what is made of rows that stand in, and their two values; a ValueError, `why`, where none do."""
        failed: Exception | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that are not the clients'
            for two in fills:
                try:
                    return make(stand_in(self.absent_rows(two), 0)), two
                except ValueError as error:  # labels outside their support, for example
                    failed = failed or error
        raise ValueError(why.format(failed)) from failed

    def agreed(self, program: Program) -> Program:
        """Return a program that some clients' rows gave as all give it; its prototype's client fields are made up."""
        absent = self.absent_rows(FILLS[0])
        made_up = full_batch(few_made_up(absent), torch.zeros(1, dtype=torch.long))
        prototype = replace(program.prototype, client_fields=made_up.client_fields)
        return replace(
            program,
            num_clients=len(self.names),
            client_keys=absent.keys,
            ranks=torch.arange(len(self.names)),
            codes=dict(self.codes),
            prototype=prototype,
        )


def _form(of: Introduction | Agreement) -> str:
    return json.dumps([asdict(of.form), sorted(of.codes)], sort_keys=True)


def few_made_up(absent: ClientData) -> ClientData:
    """Return clients whose rows are absent with a few made-up rows each."""
    fills = next(iter(absent.fields.values())).fills  # type: ignore[attr-defined]
    counts = [min(FEW, count) for count in absent.counts.tolist()]
    return stand_in(rows_absent(absent.names, counts, form_of(absent), fills), 0)


def _difference(usual: Introduction, other: Introduction) -> str:
    """Return how the rows of two clients differ in form, in a sentence."""
    here, there = asdict(usual.form), asdict(other.form)
    for kind, called in KINDS.items():
        for name in sorted({*here[kind], *there[kind]}):
            own, others = (list(of[kind].get(name, ())) or "none" for of in (here, there))
            if own != others:
                return (
                    f"{called} '{name}' is {own} at client '{usual.client}', and {others} at "
                    f"'{other.client}': agree on one"
                )
    if here["dtype"] == there["dtype"]:
        return "its codes are of other fields"
    return (
        f"client '{usual.client}' computes in {here['dtype']}, and '{other.client}' in "
        f"{there['dtype']}: set the same torch.set_default_dtype"
    )


def whose_codes_run(
    model: Model, introductions: Sequence[Introduction]
) -> tuple[Agreement, dict[str, str]]:
    """Return what most nodes agree on, without those alone with codes at which the model fails, who are named."""
    agreement, differ = Agreement.of_most(introductions)
    remaining = {of.client: of for of in introductions if of.client in agreement.names}
    least, alone = len(remaining) // 2 + 1, dict[str, str]()
    while (far := _alone_with_codes(remaining.values())) and _fails(model, agreement):
        if len(remaining) <= least:  # it fails by itself
            return Agreement.of_most(introductions)
        client, name = far
        del remaining[client]
        agreement = Agreement.between(list(remaining.values()))
        alone[client] = f"no other client has its codes of field '{name}', at which the model fails"
    return agreement, differ | alone


def _alone_with_codes(introductions: Iterable[Introduction]) -> tuple[str, str] | None:
    """Return the client that has the code farthest beyond all others', and its field; None: nobody has."""
    gaps = {}
    for name in {name for of in introductions for name in of.codes}:
        for sign, end in ((-1, 0), (1, 1)):
            ends = sorted((sign * of.codes[name][end], of.client) for of in introductions)
            if len(ends) > 2 and ends[-1][0] > ends[-2][0]:
                gaps[ends[-1][0] - ends[-2][0]] = ends[-1][1], name
    return gaps[max(gaps)] if gaps else None


def _fails(model: Model, agreement: Agreement) -> bool:
    """Return whether a model fails on rows of agreed codes, where it can be read without rows."""

    def fails(data: ClientData) -> bool:
        program, g = agreement.agreed(read_model(model, data).program), torch.Generator()
        with trial():
            try:
                terms_at(program, point(program, 0.0)[1], moved_rows(program, g.manual_seed(0)))
            except FAILS:
                return True
        return False

    with suppress(ValueError):
        return agreement.tried(fails, "{}")[0]
    return False


def named_answers(
    answers: Mapping[Key, bytes],
    read: Callable[[Key, str, Any], Made],
    left_out: dict[Key, str],
    unlike: Callable[[Mapping[str, Made]], Mapping[str, str]],
) -> tuple[dict[str, Made], dict[str, Key]]:
    """Return each client's answer, sorted by name, and its node; add to `left_out` why others' are refused.

    `read` takes a node, the name of its client and its answer's JSON; `unlike` says which clients'
    answers are unlike the others'.
    """
    clients: dict[Key, str] = {}
    values: dict[Key, Made] = {}
    for key in answers.keys() - left_out.keys():
        try:
            answer = read_json(answers[key])
            if not isinstance(answer, dict) or answer.keys() != {"client", "answer"}:
                raise Refused("it answers without the name of its client")
            client = client_name(answer["client"])
            values[key], clients[key] = read(key, client, answer["answer"]), client
        except ValueError as error:
            left_out[key] = str(error)[:500]
    left_out |= of_one_name(clients)
    by_name = sorted(clients.items(), key=lambda of: of[1])
    keys = {client: key for key, client in by_name if key not in left_out}
    by_client = {client: values[key] for client, key in keys.items()}
    left_out |= {keys[client]: why for client, why in unlike(by_client).items()}
    return {n: of for n, of in by_client.items() if keys[n] not in left_out}, keys


def of_one_name(clients: Mapping[Key, str]) -> dict[Key, str]:
    """Return why nodes of one name are left out, but for the one that the server knows by that name."""
    out = {}
    for node, client in clients.items():
        others = [str(key)[:40] for key, of in clients.items() if of == client and key != node]
        if others and str(node) != client:
            out[node] = f"it introduces client '{client}', and so does {', '.join(others)}"
    return out
