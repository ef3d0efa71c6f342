"""What a client's likelihood reads: its own local sites, and some of the global ones.

    v = (w, u),    w (D,) the client's local sites, u (U,) the global parameters that it reads

All are unconstrained; in a non-centered program w are effects (`hierfl.summaries.effects`). Random
points show which global sites change the likelihood of a few perturbed rows.

Of v = (l, s), row i depends on l only through eta_i = base_i(s) + x_i . l. It is Normal given s, so
an expectation is a one-dimensional Gauss-Hermite sum per row; over s, a sum over a few points,
Gauss-Hermite or quasi-random. Without a linear predictor s is all of v.
"""

from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hierfl.core.importance_sampling import frames, normal_points
from hierfl.core.process import double_precision
from hierfl.data.batch import ClientBatch
from hierfl.laplace.links import all_linked, are_quadratic, predictors, scores
from hierfl.laplace.trials import (
    FAILS,
    SIZES,
    is_linear,
    jacobian_of,
    moved_rows,
    nearly_equal,
    nearness,
    terms_at,
    trial,
)
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Program, once_a_program
from hierfl.program.sites import Values
from hierfl.program.traces import Site, per_client, scored
from hierfl.summaries.effects import Effects, SeenEffects, seen_effects

AWAY = 0.5  # how far they lie from the starting values, in unconstrained numbers
# likewise where curvature is looked for: of a column in units of 100 all other points lie far out
NEARER = (AWAY, 0.05, 0.005)
# Gauss-Hermite nodes of a predictor, of one in which log likelihoods are quadratic, for which these
# are exact, and of an s of one
ALONG_ROW, QUADRATIC, ALONE = 13, 2, 9
FEW, MANY = 16, 64  # quasi-random points of s, beside linear predictors and without any
FRAMED = 8  # scalars of s from which second derivatives, one by one, cost too much
EXACT = 1e-8  # relative differences that are rounding, in double precision
ROUNDING = 1e-12  # slopes, relative to the largest
TESTS = 2  # test points of each size


@dataclass(frozen=True, eq=False)
class Reading:
    """What the likelihood of a program reads."""

    program: Program
    shared: Tensor  # (U,) int64, positions of u in the unconstrained global vector z
    origin: Tensor  # (K,) z at which the global parameters stay that are not in u
    effects: Effects | None = None  # w, of a non-centered program; None: w are the local sites
    is_scaled: bool = False  # a global site scales a local one, and is no part of an effect

    def __post_init__(self) -> None:
        """Build cached tensors outside torch.func transforms."""
        _ = self._pieces

    @property
    def without_effects(self) -> "Reading":
        """The same of local sites as they are: what effects are made of is then read too."""
        inside = self.shared[:0] if self.effects is None else self.effects.inside
        shared = torch.cat([self.shared, inside]).sort().values
        return Reading(self.program, shared, self.origin)

    @property
    def own_size(self) -> int:
        """D, the number of unconstrained local parameters of a client."""
        return self.program.latents.local_block.size

    @property
    def size(self) -> int:
        """D + U, the length of v."""
        return self.own_size + len(self.shared)

    @cached_property
    def _pieces(self) -> tuple[list[int], list[Tensor]]:
        """The sizes of w and of the runs of z that are read, and what of `origin` follows each."""
        sizes, others, read = [self.own_size], [self.origin[:0]], set(self.shared.tolist())
        for is_read, run in groupby(range(len(self.origin)), read.__contains__):
            at = list(run)
            if is_read:
                sizes.append(len(at))
                others.append(self.origin[:0])
            else:
                others[-1] = self.origin[at]
        return sizes, others

    def values(self, v: Tensor) -> Values:
        """Return the values of all sites at v (D + U,), in the shapes of one client."""
        latents, (sizes, others) = self.program.latents, self._pieces
        w, *runs = v.split(sizes)
        # a product with rows of the identity would take twice as long, and its derivatives
        pairs = zip([v[:0], *runs], others, strict=True)
        z = torch.cat([part for read, other in pairs for part in (read, other.to(v.dtype))])
        values, _ = latents.global_block.unflatten(z)
        if self.own_size:
            values = {**values, **latents.local_block.unflatten(w[None, None])[0]}
        return values

    def terms(self, v: Tensor, batch: ClientBatch) -> dict[str, Site]:
        """Return the likelihood's sites of one client at v, by name."""
        return terms_at(self.program, self.values(v), batch)

    def log_likelihood(self, v: Tensor, batch: ClientBatch) -> Tensor:
        """Return log p(y | v) of the rows of one client, ()."""
        terms = self.terms(v, batch).values()
        densities = (scored(site, site["fn"].log_prob(site["value"])) for site in terms)
        return sum((per_client(term)[0] for term in densities), torch.zeros(()))

    def log_likelihoods(self, w: Tensor, u: Tensor, batch: ClientBatch) -> Tensor:
        """Return log p(y | v) of the rows of C clients, (C,), at w (C, D), or (D,) of all, and u (U,)."""
        own = self.program.latents.local_block
        values = self.values(torch.cat([u.new_zeros(own.size), u]))
        if own.size:
            many = w.expand(batch.num_clients, own.size)[:, None]
            values = {**values, **own.unflatten(many)[0]}
        terms = terms_at(self.program, values, batch).values()
        densities = [per_client(scored(site, site["fn"].log_prob(site["value"]))) for site in terms]
        return torch.stack(densities).sum(0)


@once_a_program
def read_likelihood(program: Program) -> Reading:
    """Find which global sites a likelihood reads; refuse unknown non-centered forms.

    A site is read if the likelihood is computed from it, whatever its derivative at these rows is:
    other rows may pick other entries, or take the other branch.
    """
    block = program.latents.global_block
    everything = Reading(program, torch.arange(block.size), block.start)
    with untouched_store(), unchecked(), double_precision(), torch.enable_grad():
        batch = moved_rows(program, torch.Generator().manual_seed(0))
        values = everything.values(start_of(everything).double().requires_grad_())
        terms = terms_at(program, values, batch).values()
        sums = [scored(site, site["fn"].log_prob(site["value"])).sum() for site in terms]
        total = torch.stack(sums).sum()
        sites = [values[site.name] for site in block.sites]
        slopes = (
            torch.autograd.grad(total, sites, allow_unused=True)
            if sites and total.requires_grad
            else [None] * len(sites)
        )
    pieces = torch.arange(block.size).split([site.size for site in block.sites])
    read = [
        j
        for at, slope in zip(pieces, slopes, strict=True)
        if slope is not None
        for j in at.tolist()
    ]
    effects, is_scaled = SeenEffects()
    if read and program.latents.local_block.size:
        effects, is_scaled = seen_effects(program, read)
    absorbed = set() if effects is None else set(effects.inside.tolist())
    shared = torch.tensor([j for j in read if j not in absorbed], dtype=torch.long)
    return Reading(program, shared, block.start, effects, is_scaled)


def is_curved(reading: Reading, linear: Tensor) -> bool:
    """Return whether the log likelihood curves, at random points, in each number that it slopes in.

    Those at the `linear` places enter by predictors alone, and may have kinks.
    """
    with untouched_store(), unchecked(), double_precision():
        g = torch.Generator().manual_seed(1)
        batch, flat = moved_rows(reading.program, g), torch.ones(reading.size, dtype=torch.bool)
        for away in NEARER:
            for _ in range(2):
                v = start_of(reading) + away * torch.randn(reading.size, generator=g)
                flat &= _flat_in(reading, v, batch, away)
    flat[linear] = False
    return not bool(flat.any())


@torch.enable_grad()
def _flat_in(reading: Reading, v: Tensor, batch: ClientBatch, away: float) -> Tensor:
    """Return in which numbers the log likelihood slopes the same at v and `away`, (D + U,) bool."""
    # second derivatives would import dynamo, a second: by torch.func, and of abs() by autograd too
    points = torch.cat([v[None], v + away * torch.eye(len(v))]).requires_grad_()
    if reading.program.in_vmap:
        values = torch.vmap(lambda at: reading.log_likelihood(at, batch))(points)
    else:
        values = torch.stack([reading.log_likelihood(at, batch) for at in points])
    (slopes,) = torch.autograd.grad(values.sum(), points)
    here, further = slopes[0], slopes[1:].diagonal()
    # as of a known matrix's entries that should be 0
    is_rounding = here.abs() <= ROUNDING * here.abs().max()
    return ~is_rounding & ((further - here).abs() <= EXACT * here.abs())


def start_of(reading: Reading) -> Tensor:
    """Return v at the starting values of its sites, (D + U,)."""
    own = reading.program.latents.local_block
    at = own.start.flatten() if own.size else torch.zeros(0)
    return torch.cat([at, reading.origin[reading.shared]]).to(torch.get_default_dtype())


# ------------------------------------------------------------------------------ linear predictors
class QuadratureNodes(NamedTuple):
    """Standard normal points and their weights."""

    rest: Tensor  # (J, S) of s
    rest_weights: Tensor  # (J,)
    row: Tensor  # (G,) of a predictor
    row_weights: Tensor  # (G,)
    # whether the points of s are frames, by which an expected curvature is that of slopes
    by_slopes: bool = False


@dataclass(frozen=True, eq=False)
class Line:
    """Which entries of v enter a likelihood through linear predictors alone."""

    reading: Reading
    inside: Tensor  # (L,) int64, positions in v of those entries
    is_quadratic: bool = False  # so are all rows' log likelihoods in their predictors

    def __post_init__(self) -> None:
        """Build cached tensors outside torch.func transforms."""
        _ = self.rest, self.order

    @cached_property
    def rest(self) -> Tensor:
        """Positions in v of all other entries, (S,) int64."""
        others = set(range(self.reading.size)) - set(self.inside.tolist())
        return torch.tensor(sorted(others), dtype=torch.long)

    @cached_property
    def order(self) -> Tensor:
        """Where each entry of v lies in (l, s), (V,) int64."""
        return torch.argsort(torch.cat([self.inside, self.rest]))

    def terms(self, line: Tensor, rest: Tensor, batch: ClientBatch) -> dict[str, Site]:
        """Return the likelihood's sites of one client at l (L,) and s (S,), by name."""
        return self.reading.terms(torch.cat([line, rest])[self.order], batch)


def nodes_of(line: Line) -> QuadratureNodes:
    """Return the nodes at which expectations are summed."""
    size, dtype, by_slopes = len(line.rest), torch.get_default_dtype(), False
    if size == 1:
        s, rest_weights = gauss_hermite(ALONE, dtype)
        s = s[:, None]
    elif size:
        by_slopes = size >= FRAMED and not len(line.inside)
        points = FEW if len(line.inside) else MANY
        s = frames(points, size) if by_slopes else normal_points(points, size)
        rest_weights = torch.full((len(s),), 1.0 / len(s))
    else:
        s, rest_weights = torch.zeros(1, 0), torch.ones(1)
    along = gauss_hermite(QUADRATIC if line.is_quadratic else ALONG_ROW, dtype)
    return QuadratureNodes(s, rest_weights, *along, by_slopes)


def node_at_mean(line: Line) -> QuadratureNodes:
    """Return the one node at the mean of v."""
    return QuadratureNodes(
        torch.zeros(1, len(line.rest)), torch.ones(1), torch.zeros(1), torch.ones(1)
    )


def gauss_hermite(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return nodes and weights (count,) of the expectation of a function of a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    weights = weights / weights.sum()
    return torch.as_tensor(nodes, dtype=dtype), torch.as_tensor(weights, dtype=dtype)


def seen_line(reading: Reading) -> Line:
    """Find by trial which entries of v enter a likelihood through linear predictors alone."""
    none = Line(reading, torch.zeros(0, dtype=torch.long))
    with trial():
        g = torch.Generator().manual_seed(0)
        batch = moved_rows(reading.program, g)
        try:
            return _tried(reading, batch, g) or none
        except FAILS:
            return none


def _entries_of_sites(reading: Reading) -> list[Tensor]:
    """Return the positions in v of each site's entries."""
    latents = reading.program.latents
    sizes = torch.tensor([s.size for s in latents.global_block.sites], dtype=torch.long)
    number = torch.arange(len(sizes)).repeat_interleave(sizes)[reading.shared]
    shared = [reading.own_size + (number == k).nonzero()[:, 0] for k in range(len(sizes))]
    return [*torch.arange(reading.own_size).split(latents.local_block.sizes), *shared]


def _tried(reading: Reading, batch: ClientBatch, g: torch.Generator) -> Line | None:
    start, sizes = start_of(reading).double(), [reading.own_size, len(reading.shared)]
    directions = []
    for far in SIZES * TESTS:
        w, u = torch.randn(reading.size, generator=g).split(sizes)
        directions.append(torch.cat([far * w, 0.5 * u]))
    terms = reading.terms(start, batch)
    if not all_linked(terms):
        return None

    @cache
    def terms_along(k: int, share: float) -> dict[str, Site]:
        return reading.terms(start + share * directions[k], batch)

    every = range(len(directions))
    near = nearness(lambda share: (predictors(terms_along(k, share)) for k in every))
    points = [start + near * away for away in directions]
    slopes = torch.stack(
        [jacobian_of(lambda v: predictors(reading.terms(v, batch)), v) for v in points]
    )
    constant = ((slopes - slopes[0]).abs() <= EXACT * (1.0 + slopes[0].abs())).all(0).all(0)
    constant &= bool(slopes.any())  # where all probabilities are 0 or 1, nothing is seen
    for k in every[: len(SIZES)]:
        eta = predictors(terms_along(k, near))
        here = scores(terms_along(k, near), eta)
        for j in constant.nonzero()[:, 0].tolist():
            other = points[k].clone()
            other[j] += 0.7 * near
            constant[j] &= nearly_equal(here, scores(reading.terms(other, batch), eta))
    seen = (slopes != 0.0).any(0).any(0)
    for entries in _entries_of_sites(reading):  # other rows pick entries that these do not
        if bool((seen & ~constant)[entries].any()):
            constant[entries] &= seen[entries]
    line = Line(reading, constant.nonzero()[:, 0], are_quadratic(terms))
    for k, v in enumerate(points if len(line.inside) else ()):
        along = partial(line.terms, rest=v[line.rest], batch=batch)
        if not is_linear(along, v[line.inside], terms_along(k, near)):
            return None
    return line
