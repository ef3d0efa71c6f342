"""A Gaussian likelihood's rows as their sums say them: one unit a client, whose predictors are R l.

With A = R' R a client's log likelihood, up to a constant, is

    log p(y_k | l, s) = -N log g(s) - (S + |R l - R l^|^2) / (2 g(s)^2)

with S the sum of squares at l^: a function of predictors R l and of s, like that of rows. So
whoever has the sums can do with them what a client does with its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hierfl.summaries.exact import SMALL, Spread, Sums
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.units import UnitScore


class SummedRows(PackedRows):
    """The rows of C clients, of which the sums are known."""

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

    def some(self, who: Tensor) -> SummedRows:
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
