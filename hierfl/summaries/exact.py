"""Gaussian likelihoods: what a client's rows say at every noise scale, in a few sums.

Where rows are Normal about a linear predictor, with scales c_i g(s) that only a few numbers s
change, a client's rows matter through four sums alone:

    log p(y_k | l, s) = const - N log g - (R + (l - l^)' A (l - l^)) / (2 g^2)

A, the information, and l^, the least squares solution, are those at the program's starting scale,
where g is 1; R is the sum of squares left there, N the number of rows. They cross once. Where s is global
or fixed the server integrates exactly; of a client's own s it integrates by the sums what clients
otherwise do by rows (`SummedRows`). Known weights of rows and LogNormal responses are included.

Source: sums of squares and products are sufficient for linear mixed models, as in DLMM, Luo et al.
2022, Nature Communications 13:1678; the priors above them are the program's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.data.batch import in_double
from hierfl.laplace.trials import FAILS, moved_rows, trial
from hierfl.summaries.packed_rows import NATS, RELATIVE, PackedRows, packed
from hierfl.summaries.reading import Line, node_at_mean, start_of
from hierfl.summaries.units import UnitScore

SUMS = ("num_rows", "square")  # names of N and R
AWAY = (0.0, 1.0, -1.0)  # of s from its start, where N and R are read off
TESTED, FAR = 3, 0.5  # random points at which the sums are compared with the rows; their sd
SMALL = 1e-9  # eigenvalues that are nothing beside the largest


class Sums(NamedTuple):
    """What C clients' rows say."""

    precision: Tensor  # (C, V, V) A; zeros at s
    shift: Tensor  # (C, V) A l^
    num_rows: Tensor  # (C,) N; 0 where the scale is fixed
    square: Tensor  # (C,) R
    wrong: Tensor  # (C,) 1 for a client whose rows have another log likelihood


@dataclass(frozen=True, eq=False)
class Spread:
    """The noise scale of a Gaussian likelihood: global, a client's own, or fixed."""

    line: Line  # its linear predictors; `Line.rest` is s

    def __post_init__(self) -> None:
        """Build cached tensors outside torch.func transforms."""
        _ = self.first

    def at(self, z: Tensor) -> Tensor:
        """Return g at the global parameters z (K,), ()."""
        reading = self.line.reading
        return self.of(z[reading.shared][self.line.rest - reading.own_size])

    def of(self, s: Tensor) -> Tensor:
        """Return g at s (S,), ()."""
        if not len(s):
            return s.new_ones(())
        return self._scale(s) / self.first.to(s.dtype)

    @cached_property
    def first(self) -> Tensor:
        """The scale of the first made-up row at the program's start, ()."""
        return self._scale(start_of(self.line.reading).double()[self.line.rest])

    @cached_property
    def is_equal(self) -> bool:
        """Whether rows are Normal with equal scales, so that N alone tells the constant."""
        reading = self.line.reading
        with trial():
            batch = moved_rows(reading.program, torch.Generator().manual_seed(0))
            fns = [site["fn"] for site in reading.terms(start_of(reading).double(), batch).values()]
            first = self.first.double()
            return all(
                isinstance(fn, dist.Normal) and torch.allclose(fn.scale.double(), first)
                for fn in fns
            )

    def _scale(self, s: Tensor) -> Tensor:
        """Return the scale of the first made-up row, ()."""
        batch = self.line.reading.program.prototype
        batch = in_double(batch) if s.dtype == torch.float64 else batch
        terms = self.line.terms(s.new_zeros(len(self.line.inside)), s, batch)
        scale: Tensor = next(iter(terms.values()))["fn"].scale
        return scale.flatten()[0]


def seen_spread(score: UnitScore) -> Spread | None:
    """Find by trial whether a likelihood is Gaussian with one noise scale a client."""
    line = score.line
    if not len(line.inside):
        return None
    with trial():
        batch = moved_rows(line.reading.program, torch.Generator().manual_seed(0))
        try:
            terms = line.reading.terms(score.start, batch).values()
            if not all(isinstance(site["fn"], dist.Normal | dist.LogNormal) for site in terms):
                return None
            spread = Spread(line)
            rest = score.start[line.rest]
            scales = torch.stack([spread.of(rest + by) for by in AWAY])
            # what changes nothing here is read on the other side of a kink
            alone = [spread.of(rest + AWAY[-1] * axis) for axis in torch.eye(len(rest)).to(rest)]
            changes = torch.stack([*scales.diff(), *(of - scales[0] for of in alone)])
            distinct = len(line.rest) == 0 or bool(changes.abs().min() > 1e-3)
            right = distinct and not bool(sums_of(packed(score, batch), spread).wrong.any())
            return spread if right else None
        except FAILS:
            return None


def sums_of(rows: PackedRows, spread: Spread) -> Sums:
    """Return the sums of C clients' rows, compared with the rows themselves at random points."""
    line, start = rows.line, rows.score.start
    inside, clients, size = line.inside, rows.clients, len(start)
    here, eye = node_at_mean(line), torch.eye(size).expand(clients, -1, -1)
    zero = start.index_fill(0, inside, 0.0).expand(clients, -1)
    first = rows.expected(zero, eye, here)
    block = first.curvature[:, inside][:, :, inside]
    # rows of a large mean lose digits at 0: what is left to fit is found at the first solution
    near = (pseudo_inverse(block) @ first.slope[:, inside, None])[..., 0]
    middle = zero.index_copy(1, inside, near)
    slope = rows.expected(middle, eye, here).slope[:, inside]
    whole = (block @ near[..., None])[..., 0] + slope
    shift = torch.zeros(clients, size).index_copy(1, inside, whole)

    g = torch.Generator().manual_seed(0)
    away = torch.randn(TESTED, size, generator=g) * FAR
    moves = torch.zeros(len(AWAY), size).index_fill(1, line.rest, 1.0) * torch.tensor(AWAY)[:, None]
    moves = torch.cat([moves, away])
    values = rows.values(middle[:, None] + moves)
    scale = torch.stack([spread.of(start[line.rest] + move[line.rest]) for move in moves])
    terms = torch.stack([torch.ones_like(scale), -scale.log(), -0.5 / scale.square()], 1)
    if len(line.rest):
        constant, count, square = torch.linalg.solve(terms[:3], values[:, :3].mT)
    else:
        constant, count, square = values[:, 0], *torch.zeros(2, clients)
    square = square.clamp(min=0.0)
    # a direction that rows hardly say anything of is not solved for: its slope is left
    far = ((moves[:, inside] @ block) * moves[:, inside]).sum(-1)  # (C, len(moves))
    far = far - 2.0 * slope @ moves[:, inside].mT
    total = torch.stack([constant, count, square], 1) @ terms.mT - 0.5 * far / scale.square()
    # no comparison with NaN holds
    wrong = ~((total - values).abs() <= NATS + RELATIVE * values.abs())
    precision = torch.zeros(clients, size, size)
    precision[:, inside[:, None], inside] = 0.5 * (block + block.mT)
    return Sums(precision, shift, count, square, wrong.any(1).to(square.dtype))


def explained(precision: Tensor, shift: Tensor) -> Tensor:
    """Return l^' A l^ (C,), the sum of squares that goes with a factor (C, V, V) and (C, V)."""
    return ((pseudo_inverse(precision) @ shift[..., None])[..., 0] * shift).sum(-1)


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """Return the pseudo-inverse of symmetric matrices (C, V, V) without negative eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    above = values > SMALL * values.amax(-1, keepdim=True)
    back = torch.where(above, 1.0 / torch.where(above, values, 1.0), 0.0)
    return (vectors * back[..., None, :]) @ vectors.mT


class SummedRows(PackedRows):
    """The rows of C clients as their sums say them: one unit a client, whose predictors are R l.

    With A = R' R a client's log likelihood, up to a constant, is

        log p(y_k | l, s) = -N log g(s) - (S + |R l - R l^|^2) / (2 g(s)^2)

    with S the sum of squares at l^: a function of predictors R l and of s, like that of rows. So
    whoever has the sums can do with them what a client does with its rows.
    """

    def __init__(self, score: UnitScore, spread: Spread, sums: Sums) -> None:
        self.score, self.line, self.spread, self.sums = score, score.line, spread, sums
        self.clients = len(sums.shift)
        self.client = torch.arange(self.clients)
        inside = self.line.inside
        values, vectors = torch.linalg.eigh(sums.precision[:, inside][:, :, inside])
        above = values > SMALL * values.amax(-1, keepdim=True)
        root = torch.where(above, values, 0.0).sqrt()
        back = torch.where(above, 1.0 / torch.where(above, root, 1.0), 0.0)
        slope = (vectors.mT @ sums.shift[:, inside, None])[..., 0]
        # a direction that rows hardly say anything of is not solved for: its slope is left
        remainder = (vectors @ torch.where(above, 0.0, slope)[..., None]).mT
        self.design = torch.cat([root[..., None] * vectors.mT, remainder], 1)  # (C, L + 1, L)
        best = back * slope
        self.tensors = (best, sums.num_rows, sums.square)

    @property
    def _width(self) -> int:
        """How many scalars of a client an operation carries: its predictors."""
        return self.design.shape[1]

    def some(self, who: Tensor) -> "SummedRows":
        """Return the rows of the clients at some positions (C',)."""
        return SummedRows(self.score, self.spread, Sums(*(v[who] for v in self.sums)))

    def of_unit(self, shift: Tensor, rest: Tensor, *own: Tensor) -> Tensor:
        """Return the log likelihood of a client, (), at predictors (L + 1,) and s (S,)."""
        best, num_rows, square = own
        scale = self.spread.of(rest)
        squares = square + (shift[:-1] - best).square().sum() - 2.0 * shift[-1]
        return -num_rows * scale.log() - 0.5 * squares / scale.square()

    def over_units(self, function: Callable[..., Any], *trees: Any, in_dims: Any = 0) -> Any:
        """Map a function over clients."""
        return torch.vmap(function, in_dims=in_dims)(*trees)

    def by_client(
        self, of_units: Tensor, total: Tensor | None = None, part: Tensor | slice = slice(None)
    ) -> Tensor:
        """Return (C, ...) as they are, each client one unit, a `total` of other ones before them."""
        return of_units if total is None else torch.cat([total, of_units])
