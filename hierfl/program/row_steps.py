"""Sites of rows that are only compared with thresholds, as in probit augmentation: exact integrals.

    p(y) = sum_i P(t_i < e <= t_i+1) p(y | e in between)

The thresholds t are where what the program compares is 0, which must be linear in e.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import log_normal_between, log_normal_cdf
from hierfl.program.compared import Comparisons

if TYPE_CHECKING:
    from hierfl.program.row_runs import RowTerm

WRAPPERS = ("ExpandedDistribution", "MaskedDistribution")


class Pieces(NamedTuple):
    """Values of a row's site, one in each piece between thresholds, and the pieces' log probabilities."""

    values: list[Tensor]
    logs: list[Tensor]


def _margins(rows: Any, term: RowTerm, at: Tensor) -> list[Tensor]:
    with Comparisons() as compared:
        rows.run(term, lambda site: at)
    return [torch.as_tensor(left) - right for left, right in compared.sides]


def steps_of(rows: Any, term: RowTerm, value: Tensor) -> tuple[int, ...]:
    """Return the places of the comparisons that a term's only site is in; none if one is not linear in it."""
    marked = value.detach().clone().requires_grad_()
    with torch.enable_grad():
        margins = _margins(rows, term, marked)
    steps = tuple(place for place, margin in enumerate(margins) if margin.requires_grad)
    at = [_margins(rows, term, value + away) for away in (0.0, 1.0, 2.0)]
    for place in steps:
        low, middle, high = (margins[place] for margins in at)
        slope = middle - low
        if not torch.allclose(high - middle, slope, rtol=1e-4) or bool((slope == 0.0).any()):
            return ()
    return steps


def pieces_of(rows: Any, term: RowTerm, shape: torch.Size) -> Pieces:
    """Return the pieces of the only site of a term, of the shape each."""
    seen: list[tuple[Any, Tensor]] = []

    def first(site: Any) -> Tensor:
        seen.append((site["fn"], rows.structure.center(site).expand(shape)))
        return seen[0][1]

    rows.run(term, first)
    prior, center = seen[0]
    here, further = (_margins(rows, term, center + away) for away in (0.0, 1.0))
    thresholds = []
    for place in term.steps:
        at = center if here[place].dim() == len(shape) else center[..., None]
        crossing = at - here[place] / (further[place] - here[place])
        extra = crossing.shape[len(shape) :]
        crossing = crossing.expand(*shape, *extra).reshape(*shape, -1)
        thresholds.append(crossing)
    bounds = torch.cat(thresholds, -1).sort(-1).values.unbind(-1)
    return _between(prior, list(bounds))


def _between(fn: Any, bounds: list[Tensor]) -> Pieces:
    middles = [0.5 * (a + b) for a, b in pairwise(bounds)]
    values = [bounds[0] - 1.0, *middles, bounds[-1] + 1.0]
    while isinstance(fn, torch.distributions.Independent) or type(fn).__name__ in WRAPPERS:
        fn = fn.base_dist
    if isinstance(fn, torch.distributions.Normal):
        units = [(bound - fn.loc) / fn.scale for bound in bounds]
        inner = [log_normal_between(a, b) for a, b in pairwise(units)]
        return Pieces(values, [log_normal_cdf(units[0]), *inner, log_normal_cdf(-units[-1])])
    below = [fn.cdf(bound) for bound in bounds]
    inner = [b - a for a, b in pairwise(below)]
    tiny = torch.finfo(below[0].dtype).tiny
    return Pieces(values, [p.clamp(min=tiny).log() for p in (below[0], *inner, 1.0 - below[-1])])
