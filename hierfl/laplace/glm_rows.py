"""A client's log joint: rows with a linear predictor in the local sites, and other terms.

Row i, eta_i = a_i(z) + x_i(z) . w, has the curvature -x_i l_i'' x_i' in w: one pass for all of w.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.data.batch import ClientBatch
from hierfl.laplace.links import scores, times
from hierfl.laplace.trials import (
    FAILS,
    SIZES,
    TRIES,
    Predictors,
    Terms,
    first_row,
    is_linear,
    moved_rows,
    predictors_of,
    sites_at,
    trial,
)
from hierfl.program.program import Program
from hierfl.program.sites import Values
from hierfl.program.traces import Site, in_clients, per_client, scored


@dataclass(frozen=True, eq=False)
class GlmRows:
    """The rows with a linear predictor at one z."""

    read: Predictors
    fixed: bool  # the design is the same at every z: no derivative is taken of it

    def predictor(self, w: Tensor) -> Tensor:
        """Return eta, (n,)."""
        design = self.read.design
        return self.read.base + (times(w, design.T) if self.fixed else design @ w)

    def curved(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient (D,) and Hessian (D, D) in w of the log likelihood of all rows."""
        slope, pull = vjp(grad(self.total), self.predictor(w))[:2]
        # A row's likelihood depends on its own eta alone: this is a diagonal Hessian's diagonal.
        second = pull(torch.ones_like(slope))[0]
        design = self.read.design
        if self.fixed:
            outer = (design[:, :, None] * design[:, None, :]).flatten(1)
            return times(slope, design), times(second, outer).view(len(w), len(w))
        return slope @ design, (design.T * second) @ design

    def total(self, eta: Tensor) -> Tensor:
        """Return the log likelihood of all rows, ()."""
        return scores(self.read.terms, eta).sum()


@dataclass(frozen=True, eq=False)
class Parts:
    """The log joint h(z, .) of a client at one z, as a function of its local vector w (D,)."""

    rest: Callable[[Tensor], Tensor]  # (D,) -> (): the prior of w, and other observed sites
    rows: GlmRows | None

    def density(self, w: Tensor) -> Tensor:
        """Return h(z, w), ()."""
        rest = self.rest(w)
        return rest if self.rows is None else rest + self.rows.total(self.rows.predictor(w))

    def slope(self, w: Tensor) -> Tensor:
        """Return the gradient of h in w, (D,)."""
        return grad(self.density)(w)

    def curved(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient (D,) and minus the Hessian (D, D) of h in w."""
        slope, pull = vjp(grad(self.rest), w)[:2]
        minus_hessian = -torch.vmap(lambda axis: pull(axis)[0])(torch.eye(len(w), dtype=w.dtype))
        if self.rows is None:
            return slope, minus_hessian
        first, second = self.rows.curved(w)
        return slope + first, minus_hessian - second


@dataclass(frozen=True)
class Linear:
    """What is known of the linear predictors of a program."""

    sites: frozenset[str] = frozenset()  # those that depend on local sites through one alone
    fixed: bool = False  # their design is the same at every z, as in a centered program
    prior_alone: bool = False  # other terms are the local prior, and read no rows


UNKNOWN = Linear()  # no site is taken to have a linear predictor


def parts(program: Program, linear: Linear, shared: Values, batch: ClientBatch) -> Parts:
    """Return the parts of the log joint of one client, given the values of the global sites."""
    own = program.latents.local_block
    prior_batch = first_row(batch) if linear.prior_alone else batch

    def rest(w: Tensor) -> Tensor:
        values, jacobians = own.unflatten(w[None, None])
        nodes = sites_at(program, {**shared, **values}, prior_batch)
        total = sum((per_client(j)[0] for j in jacobians.values()), torch.zeros(()))
        for name, site in nodes.items():
            if in_clients(site) and name not in linear.sites:
                total = total + per_client(scored(site, site["fn"].log_prob(site["value"])))[0]
        return total

    if not linear.sites:
        return Parts(rest, None)
    terms = _terms(program, linear.sites, shared, batch)
    return Parts(rest, GlmRows(predictors_of(terms, own.size), linear.fixed))


def _terms(program: Program, names: frozenset[str], shared: Values, batch: ClientBatch) -> Terms:
    """Return the observed sites of these names as a function of the local vector."""

    def terms(w: Tensor) -> dict[str, Site]:
        values, _ = program.latents.local_block.unflatten(w[None, None])
        nodes = sites_at(program, {**shared, **values}, batch)
        return {name: nodes[name] for name in sorted(names)}

    return terms


def seen_linear(program: Program) -> Linear:
    """Find the sites with a linear predictor on perturbed rows, and whether other sites read rows."""
    own, names = program.latents.local_block, frozenset(program.labels)
    if not own.size:
        return UNKNOWN
    g = torch.Generator().manual_seed(0)
    with trial():
        batch = moved_rows(program, g)

        def linear(name: str) -> bool:
            return all(
                is_linear(_terms(program, frozenset([name]), shared, batch), w)
                for shared, w in _points(program, g)
            )

        linear_sites = frozenset(name for name in names if _try(partial(linear, name)))
        if not linear_sites:
            return UNKNOWN
        fixed = _try(partial(_is_fixed, program, linear_sites, batch, g))
        alone = linear_sites == names and _try(
            partial(_reads_no_rows, program, linear_sites, batch, g)
        )
    return Linear(linear_sites, fixed, alone)


def _try(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except FAILS:
        return False


def _is_fixed(
    program: Program, names: frozenset[str], batch: ClientBatch, g: torch.Generator
) -> bool:
    designs = [
        predictors_of(_terms(program, names, shared, batch), len(w)).design
        for shared, w in _points(program, g)
    ]
    return all(torch.allclose(design, designs[0], rtol=1e-10, atol=1e-10) for design in designs)


def _reads_no_rows(
    program: Program, names: frozenset[str], batch: ClientBatch, g: torch.Generator
) -> bool:
    """Return whether the log joint without these sites is equal on one row and on all rows."""
    prior_only, all_rows = Linear(names, prior_alone=True), Linear(names)
    return batch.num_rows > 1 and all(
        torch.allclose(
            parts(program, prior_only, shared, batch).rest(w),
            parts(program, all_rows, shared, batch).rest(w),
            rtol=1e-12,
        )
        for shared, w in _points(program, g)
    )


def _points(program: Program, g: torch.Generator) -> list[tuple[Values, Tensor]]:
    block, size = program.latents.global_block, program.latents.local_block.size
    made = []
    for far in SIZES * TRIES:
        z = block.start + 0.5 * torch.randn(block.size, generator=g)
        made.append((block.unflatten(z)[0], far * torch.randn(size, generator=g)))
    return made
