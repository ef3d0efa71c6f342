"""The schema that clients agree on, as JSON that people can read, compare and sign; checks of its constants.

A server sends constants, and could choose them so that sums of a few rows leave. A node takes those
that its owner's formula has, which the agreement can have made, and whose curves rest on enough rows.
A transform without such a check cannot be registered: `Stateful` has no default.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hierfl.core.typed_json import Count, Number, read_as
from hierfl.formulas.columns import Column, ColumnSums
from hierfl.formulas.transforms import EDGES, Constants

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
    def load(cls, path: str | Path) -> "Schema":
        """Read a schema from a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no schema; the message names the part.
        """
        return cls.of_json(Path(path).read_text())

    @classmethod
    def of_json(cls, text: str) -> "Schema":
        """Return the schema of a text.

        Raises:
            ValueError: the text is not JSON, lacks a part, or a part is of another kind.
        """
        try:
            return read_as(cls, text)
        except ValueError as error:
            raise ValueError(f"the schema cannot be read ({error}): save it again") from error


CLIENTS = 400  # of how many clients a node believes that it may be one, by rows
NEAR = 1e-6
Floats = NDArray[np.float64]
Ends = Iterator[tuple[float, float]]


class Implausible(ValueError):
    """Constants that clients cannot have agreed on; the message holds no value of a row."""


class Stateful(NamedTuple):
    """A transform with constants."""

    needs: str  # of its argument besides mean and sd: "", "counts" or "powers"
    agrees: Callable[[Constants, Mapping[str, Any]], bool]  # may a call's options have constants
    supports: Callable[[Constants], Ends]  # where its columns' narrowest combinations are not 0


def _plain(constants: Constants) -> Constants:
    return Constants(constants.mean, constants.sd, constants.knots)


def _is_affine(constants: Constants, options: Mapping[str, Any]) -> bool:
    return constants == Constants(constants.mean, constants.sd)


def _everywhere(constants: Constants) -> Ends:
    yield -math.inf, math.inf


def _is_polynomial(constants: Constants, options: Mapping[str, Any]) -> bool:
    """Return whether polynomials are those of some moments: L L' of their inverse is a Hankel matrix.

    Mean and sd may be those of more clients: one may have been left out since.
    """
    degree, rows = options["degree"], constants.polynomials
    plain = Constants(constants.mean, constants.sd, (), degree, rows)
    if constants != plain or [*map(len, rows)] != [degree + 1] * degree:
        return False
    whole = np.vstack([np.eye(1, degree + 1), np.array(rows)])
    if np.triu(whole, 1).any() or not (whole.diagonal() > 0.0).all():
        return False
    lower = np.linalg.inv(whole)
    moments = lower @ lower.T
    size = np.sqrt(moments.diagonal())
    return all(
        np.ptp(moments[::-1].diagonal(k)) <= NEAR * float((size[:, None] * size).max())
        for k in range(-degree, degree + 1)
    )


def _within(constants: Constants) -> bool:
    """Return whether knots do not fall, and lie among the edges at which clients count."""
    knots = np.array(constants.knots)
    ends = constants.mean + constants.sd * EDGES[[0, -1]] * (1.0 + NEAR)
    return bool((np.diff(knots) >= 0.0).all() and ends[0] <= knots[0] and knots[-1] <= ends[1])


def _is_b_spline(constants: Constants, options: Mapping[str, Any]) -> bool:
    degree, df, knots = options["degree"], options["df"], constants.knots
    if constants != replace(_plain(constants), degree=degree):
        return False
    low, *inner, high = knots[degree : len(knots) - degree]
    right = knots == (*(low,) * (degree + 1), *inner, *(high,) * (degree + 1))
    ends = ((low, options["lower_bound"]), (high, options["upper_bound"]))
    right &= len(inner) == df - degree and all(bound in (None, end) for end, bound in ends)
    own = [end for end, bound in ends if bound is None]
    among = Constants(constants.mean, constants.sd, tuple(sorted([*own, *inner])))
    return right and [*inner] == sorted({*inner}) and low < high and _within(among)


def _of_b_spline(constants: Constants) -> Ends:
    knots = [-math.inf if k == constants.knots[0] else k for k in constants.knots]
    knots = [math.inf if k == constants.knots[-1] else k for k in knots]
    yield from zip(knots, knots[constants.degree + 1 :], strict=False)


def _is_smooth(constants: Constants, options: Mapping[str, Any]) -> bool:
    """Return whether a smooth has as many knots as its call, and no place more than one."""
    right = constants == _plain(constants) and _within(constants)
    right &= len(constants.knots) == options["k"]
    return right and bool((np.diff(constants.knots) >= 0.8 * PLACE * constants.sd).all())


def _of_smooth(constants: Constants) -> Ends:
    yield -math.inf, constants.knots[2]
    yield constants.knots[-3], math.inf
    yield from zip(constants.knots, constants.knots[4:], strict=False)


def _is_process(constants: Constants, options: Mapping[str, Any]) -> bool:
    if len(constants.knots) != 2 or not _within(constants):
        return False
    low, high = constants.knots
    boundary = options["c"] * (high - low) / 2.0
    made = replace(_plain(constants), degree=options["k"], boundary=boundary)
    return low < high and constants == made


PLACE = float(EDGES[1] - EDGES[0])  # in sds, between two edges
STATEFUL = {
    "scale": Stateful("", _is_affine, _everywhere),
    "standardize": Stateful("", _is_affine, _everywhere),
    "center": Stateful("", _is_affine, _everywhere),
    "bs": Stateful("counts", _is_b_spline, _of_b_spline),
    "poly": Stateful("powers", _is_polynomial, _everywhere),
    "s": Stateful("counts", _is_smooth, _of_smooth),
    "gp": Stateful("counts", _is_process, _everywhere),
}


def check_moments(
    text: str, mean: float, sd: float, own: ColumnSums, rows: int, *, constant: bool = False
) -> None:
    """Refuse a mean and an sd of `rows` rows that these cannot have with a client's own among them.

    Of N rows with n of the client's, N sd^2 >= n (own sd^2 + (own mean - mean)^2).
    """
    if not own.count:
        return
    mean_here = own.total / own.count
    spread = own.squares / own.count - mean_here**2 + (mean_here - mean) ** 2
    share = max(own.count / max(rows, own.count), 1.0 / CLIENTS)
    rounding = 1e-9 * (own.squares / own.count + mean**2)
    if (not sd > 0.0 and not constant) or share * spread > sd**2 * (1.0 + NEAR) + rounding:
        raise Implausible(f"the mean and sd of '{text}' are impossible given this client's rows")


def check_constants(
    name: str,
    text: str,
    constants: Constants,
    options: Mapping[str, Any],
    values: Floats,
    least: int,
) -> None:
    """Refuse constants of a call that its formula does not have, or with curves of a few of its values."""
    of = STATEFUL[name]
    numbers = (constants.mean, constants.sd, *constants.knots, *sum(constants.polynomials, ()))
    agrees = False
    if all(map(math.isfinite, numbers)):
        with suppress(IndexError, ValueError):  # of too few of them, or no matrix
            agrees = of.agrees(constants, options)
    if not agrees:
        what = f"the constants of '{text}' are not constants"
        raise Implausible(f"{what} that clients can have agreed on")
    for low, high in of.supports(constants):
        if 0 < int(((values > low) & (values < high)).sum()) < least:
            raise Implausible(
                f"the knots of '{text}' single out fewer than {least} rows of this client: write it "
                "with fewer knots (a smaller k or df), or let the node's owner lower min_count"
            )
