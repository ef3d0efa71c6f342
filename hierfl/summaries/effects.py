"""Local sites of a non-centered program, turned into the effects that its likelihood reads.

No Gaussian factor in (e, mu, tau) of mu + tau e is a good one. If row i depends on e ~ Normal(0, 1)
only through a linear predictor, with starting values z0,

    base_i(z) + design_i(z) . e = rest_i + design_i(z0) . (t(z) + T(z) e),

and rest_i is the same for all z that differ in some entries only, then the factor is taken in the
effect w = t(z) + T(z) e, measured in units of z0: w = e at z = z0. Where rows have
no link function, what is linear in e is read off the recorded operations of the likelihood.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core import graphs
from hierfl.data.batch import ClientBatch, in_dtype
from hierfl.laplace.links import all_linked, log_likelihoods, predictors
from hierfl.laplace.trials import (
    FAILS,
    is_linear,
    moved_rows,
    nearly_equal,
    nearness,
    repeated,
    slopes_of,
    terms_at,
    trial,
)
from hierfl.program.program import Program
from hierfl.program.sites import Values
from hierfl.program.traces import Site

TRIES = 3  # random points
FAR = 0.7  # how far one number is moved to see what it changes

Read = Callable[[Tensor, Tensor], Tensor]  # z (K,), e (D,) -> predictors, linear in e (n,)


@dataclass(frozen=True, eq=False)
class Effects:
    """The map from the local sites to the effects that the likelihood reads."""

    read: Read  # of made-up rows whose predictors determine t and T
    inside: Tensor  # (A,) int64, positions in z of the parameters that t and T depend on
    origin: Tensor  # (K,) z0
    base: Tensor  # (n,) predictors at z0 and e = 0
    inverse: Tensor  # (D, n), pseudo-inverse of the design at z0
    # (D, D), projects on the directions of e that no predictor reads; T leaves them as they are
    unseen: Tensor

    def at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return t (D,) and T (D, D) at z (K,); rates one prior sd away overflow in single precision."""
        place = torch.eye(len(self.origin), dtype=torch.float64)[self.inside]
        moved = self.origin.double().index_fill(0, self.inside, 0.0)
        moved = moved + z.double()[self.inside] @ place
        base, design = predicted(self.read, moved, len(self.unseen))
        inverse = self.inverse.double()
        shift, scale = (
            inverse @ (base - self.base.double()),
            inverse @ design + self.unseen.double(),
        )
        return shift.to(z.dtype), scale.to(z.dtype)


def predicted(read: Read, z: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the predictors at z and e = 0, (n,), and their derivatives in e, (n, D); size is D."""
    base = read(z, z.new_zeros(size))
    return base, slopes_of(partial(read, z), base, size, z.dtype)


class SeenEffects(NamedTuple):
    """A non-centered program's effects, if it has any; else whether a global site scales a local one."""

    effects: Effects | None = None
    is_scaled: bool = False


def seen_effects(program: Program, read: list[int]) -> SeenEffects:
    """Look for the effects of a program with local sites, whose likelihood `read`s some of z, at random points."""
    with trial():
        g = torch.Generator().manual_seed(0)
        try:
            return _tried(program, read, _made_up(program, g), g)
        except FAILS:
            return SeenEffects()


def _tried(
    program: Program, read: list[int], batch: ClientBatch, g: torch.Generator
) -> SeenEffects:
    block, size = program.latents.global_block, program.latents.local_block.size
    origin = block.start.double()
    away = [torch.randn(block.size, generator=g) for _ in range(TRIES)]
    draws = [torch.randn(size, generator=g) for _ in away]
    pairs = list(zip(away, draws, strict=True))
    is_linked = all_linked(_terms(program, origin, 0.0 * draws[0], batch))
    eta = partial(_linked, program, batch) if is_linked else _linear_parts(program, batch, pairs)
    if eta is None:
        return SeenEffects()
    near = nearness(lambda s: (eta(origin + s * z, s * e) for z, e in pairs))
    points = [(origin + 0.5 * near * z, near * e) for z, e in pairs]
    if is_linked and not all(
        is_linear(partial(_terms, program, z, batch=batch), e) for z, e in points
    ):
        return SeenEffects()
    base, design = predicted(eta, origin, size)
    inverse = torch.linalg.pinv(design)
    across = torch.eye(len(base)) - design @ inverse  # 0 along the columns of the design
    tests = [_Test(eta, z, e, FAR * near) for z, e in points]
    scales = {j for j in read if any(test.scales(j) for test in tests)}
    if not is_linked and not scales:  # shifts leave a Gaussian factor
        return SeenEffects()
    inside = [j for j in read if all(test.absorbs(j, across) for test in tests)]
    if not inside or not scales <= set(inside):
        return SeenEffects(is_scaled=is_linked and bool(scales))
    unseen = torch.eye(size, dtype=base.dtype) - inverse @ design
    effects = Effects(eta, torch.tensor(inside), origin, base, inverse, unseen)
    right = all(_is_right(effects, program, batch, z, e) for z, e in points)
    return SeenEffects(effects if right else None, is_linked and bool(scales) and not right)


def _linked(program: Program, batch: ClientBatch, z: Tensor, e: Tensor) -> Tensor:
    return predictors(_terms(program, z, e, batch))


def _linear_parts(
    program: Program, batch: ClientBatch, pairs: list[tuple[Tensor, Tensor]]
) -> Read | None:
    """Return the last values that a likelihood computes linearly in e; None where it has none."""

    def densities(z: Tensor, e: Tensor) -> Tensor:
        return log_likelihoods(_terms(program, z, e, batch))

    origin = program.latents.global_block.start.double()
    recording = graphs.recorded(densities, origin, 0.0 * pairs[0][1])
    if recording is None:
        return None
    moving, bent = set[int](), set[int]()
    for away, e in pairs:
        at = origin + 0.5 * away
        zero, *others = (recording.values(at, s * e) for s in (0.0, 1.0, -2.0))
        for n, value in zero.items():
            one, two = (of[n] for of in others)
            if n is not None and not (torch.equal(value, one) and torch.equal(value, two)):
                moving.add(n)
                if not _is_line(value, one, two):
                    bent.add(n)
    reads = (
        {v.number for v in of.leaves if isinstance(v, graphs.Value)}
        for of in recording.operations
        if bent.intersection(of.results)
    )
    ends = {recording.end}.union(*reads) & (moving - bent)
    operations = graphs.needed_by(ends, recording.operations)

    def read(z: Tensor, e: Tensor) -> Tensor:
        values = graphs.repeated(operations, (z, e))
        return torch.cat([values[end].flatten() for end in sorted(ends)])

    return read if ends else None


def _is_line(zero: Tensor, one: Tensor, two: Tensor) -> bool:
    """Return whether values at 0, e and -2 e lie on a line."""
    return zero.is_floating_point() and nearly_equal(two - zero, -2.0 * (one - zero))


def _made_up(program: Program, g: torch.Generator) -> ClientBatch:
    """Return perturbed copies of the prototype's rows, three times as many as local parameters."""
    least = 3 * program.latents.local_block.size + 3
    return moved_rows(program, g, repeated(program.prototype, least))


def _terms(program: Program, z: Tensor, e: Tensor, batch: ClientBatch) -> dict[str, Site]:
    latents = program.latents
    values: Values = {
        **latents.global_block.unflatten(z)[0],
        **latents.local_block.unflatten(e[None, None])[0],
    }
    return terms_at(program, values, in_dtype(batch, z.dtype))


class _Test:
    """Predictors at a random point, and with an entry j of z moved by a step (None: none is), each read once."""

    def __init__(self, eta: Read, z: Tensor, e: Tensor, step: float) -> None:
        def moved(j: int | None) -> Tensor:
            return z if j is None else z.index_add(0, torch.tensor([j]), z.new_tensor([step]))

        self.base = cache(lambda j: eta(moved(j), 0.0 * e))
        self.along = cache(lambda j: eta(moved(j), e) - self.base(j))
        self.design = cache(
            lambda j: slopes_of(partial(eta, moved(j)), self.base(j), len(e), z.dtype)
        )

    def scales(self, j: int) -> bool:
        """Return whether the step along j changes how far e moves the predictors."""
        return not nearly_equal(self.along(None), self.along(j))

    def absorbs(self, j: int, across: Tensor) -> bool:
        """Return whether the step along j moves predictors along the columns of the design alone."""
        base, design = self.base(j) - self.base(None), self.design(j) - self.design(None)
        moved = torch.cat([base[:, None], design], 1)
        # what moves nothing is not absorbed: no made-up row has its code
        return not nearly_equal(moved, 0.0 * moved) and nearly_equal(across @ moved, 0.0 * moved)


def _is_right(effects: Effects, program: Program, batch: ClientBatch, z: Tensor, e: Tensor) -> bool:
    """Return whether the likelihood at (z, e) equals that at the effects and z0."""
    shift, scale = effects.at(z)
    there = z.clone()
    there[effects.inside] = effects.origin[effects.inside]
    pairs = ((z, e), (there, shift + scale @ e))
    return nearly_equal(*(log_likelihoods(_terms(program, *at, batch)).sum() for at in pairs))
