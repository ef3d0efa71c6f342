"""The parts of a client's log joint: rows with a linear predictor in the local sites, and the rest.

Row i of a generalized linear model has the log likelihood l_i(eta_i), with the scalar linear predictor
eta_i = a_i(z) + x_i(z) . w. Its part of the curvature in the local sites w is -x_i l_i'' x_i'. One pass over
the rows therefore gives the curvature, while reverse mode over reverse mode takes one pass for every entry of
w. Which observed sites have this structure is found by evaluating the program on made-up features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.data.batch import ClientBatch
from hierfl.laplace.derivatives import times
from hierfl.laplace.links import has_link, link_of
from hierfl.laplace.trials import first_row, perturbed, sites_at
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Program
from hierfl.program.sites import Values
from hierfl.program.traces import Site, in_clients, per_client, scored

# Linearity is tested at random points of these distances from 0, at each distance TRIES times.
TRIES, SIZES = 3, (0.3, 2.0, 8.0)


class Rows(NamedTuple):
    """The rows of one observed site at one z, with the predictor eta = base + design w.

    Args:
        base: (n,).
        design: (n, D).
        score: eta (n,) -> the log likelihood of each row, (n,).
        fixed: whether the design is the same at every z; then no derivative is taken of it.
    """

    base: Tensor
    design: Tensor
    score: Callable[[Tensor], Tensor]
    fixed: bool

    def predictor(self, w: Tensor) -> Tensor:
        """Return eta, (n,)."""
        return self.base + (times(w, self.design.T) if self.fixed else self.design @ w)

    def curved(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient (D,) and the Hessian (D, D) in w of the log likelihood of all rows."""
        slope, pull = vjp(grad(self.total), self.predictor(w))[:2]
        # The likelihood of a row depends on its own eta alone, so this is the diagonal of a diagonal Hessian.
        second = pull(torch.ones_like(slope))[0]
        if self.fixed:
            outer = (self.design[:, :, None] * self.design[:, None, :]).flatten(1)
            return times(slope, self.design), times(second, outer).view(len(w), len(w))
        return slope @ self.design, (self.design.T * second) @ self.design

    def total(self, eta: Tensor) -> Tensor:
        """Return the log likelihood of all rows, ()."""
        return self.score(eta).sum()


@dataclass(frozen=True, eq=False)
class Parts:
    """The log joint h(z, .) of one client at one z, as a function of its unconstrained local vector w (D,).

    Args:
        rest: (D,) -> (), all that is not in `rows`: the prior of w given z, and the observed sites without a
            linear predictor.
        rows: the observed sites with a linear predictor.
    """

    rest: Callable[[Tensor], Tensor]
    rows: tuple[Rows, ...]

    def density(self, w: Tensor) -> Tensor:
        """Return h(z, w), ()."""
        return sum((r.total(r.predictor(w)) for r in self.rows), self.rest(w))

    def slope(self, w: Tensor) -> Tensor:
        """Return the gradient of h in w, (D,)."""
        total: Tensor = grad(self.density)(w)
        return total

    def curved(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient (D,) and minus the Hessian (D, D) of h in w."""
        slope, pull = vjp(grad(self.rest), w)[:2]
        minus_hessian = -torch.vmap(lambda axis: pull(axis)[0])(torch.eye(len(w), dtype=w.dtype))
        for r in self.rows:
            first, second = r.curved(w)
            slope, minus_hessian = slope + first, minus_hessian - second
        return slope, minus_hessian


@dataclass(frozen=True)
class Linear:
    """What is known of the linear predictors of a program.

    Args:
        sites: the observed sites that depend on the local sites only through a linear predictor.
        fixed: those of them whose design is the same at every z. In a centered program, where the local sites
            are the effects themselves, all are.
        prior_alone: whether everything else is the prior of the local sites, and reads no rows.
    """

    sites: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    prior_alone: bool = False


UNKNOWN = Linear()  # no site is taken to have a linear predictor


def parts(program: Program, linear: Linear, shared: Values, batch: ClientBatch) -> Parts:
    """Return the parts of the log joint of one client, given the values of the global sites.

    Args:
        program: whose log joint it is.
        linear: the observed sites to treat as rows with a linear predictor, from `seen_linear`.
        shared: values of the global sites, by name.
        batch: the client's rows.
    """
    own = program.latents.local_block
    few = first_row(batch) if linear.prior_alone else batch

    def rest(w: Tensor) -> Tensor:
        values, jacobians = own.unflatten(w[None, None])
        nodes = sites_at(program, {**shared, **values}, few)
        total = sum((per_client(j)[0] for j in jacobians.values()), torch.zeros(()))
        for name, site in nodes.items():
            if in_clients(site) and name not in linear.sites:
                total = total + per_client(scored(site, site["fn"].log_prob(site["value"])))[0]
        return total

    return Parts(rest, _rows(program, linear, shared, batch) if linear.sites else ())


def _rows(program: Program, linear: Linear, shared: Values, batch: ClientBatch) -> tuple[Rows, ...]:
    """Return the rows of each site with a linear predictor, read off at w = 0 and at w = each unit vector."""
    own, names = program.latents.local_block, linear.sites

    def predictors(w: Tensor) -> dict[str, Tensor]:
        values, _ = own.unflatten(w[None, None])
        nodes = sites_at(program, {**shared, **values}, batch)
        return {name: link_of(nodes[name]).predictor(nodes[name]["fn"]).flatten() for name in names}

    values, _ = own.unflatten(torch.zeros(1, 1, own.size))
    nodes = sites_at(program, {**shared, **values}, batch)
    base = {name: link_of(nodes[name]).predictor(nodes[name]["fn"]).flatten() for name in names}
    along = torch.vmap(predictors)(torch.eye(own.size)) if own.size else {}

    def score(site: Site) -> Callable[[Tensor], Tensor]:
        def of(eta: Tensor) -> Tensor:
            fn = site["fn"]
            return scored(
                site, link_of(site).score(fn, site["value"], eta.view(fn.batch_shape))
            ).flatten()

        return of

    return tuple(
        Rows(base[n], (along[n] - base[n]).T, score(nodes[n]), n in linear.fixed)
        for n in sorted(names)
    )


def seen_linear(program: Program) -> Linear:
    """Find which observed sites of a program have a linear predictor, and whether the rest reads rows.

    The answer is tested at random points, not proven. The features of a few rows are perturbed, so that no
    column is 0 by chance. Points lie both near 0 and far from it, so that a predictor that bends or is
    clamped is recognized.
    """
    own, names = program.latents.local_block, frozenset(program.labels)
    if not own.size:
        return UNKNOWN
    g = torch.Generator().manual_seed(0)
    labels = frozenset(program.labels.values())
    batch = perturbed(program.prototype, names_of_labels=labels, g=g, codes=program.codes)
    with untouched_store(), torch.no_grad(), unchecked():
        found = frozenset(
            name for name in names if _try(partial(_is_linear, program, name, batch, g))
        )
        fixed = frozenset(name for name in found if _is_fixed(program, name, batch, g))
        alone = found == names and _try(partial(_reads_no_rows, program, found, batch, g))
    return Linear(found, fixed, alone)


def _try(question: Callable[[], bool]) -> bool:
    """Return the answer to a question, or False if the program fails at it."""
    try:
        return question()
    except (RuntimeError, ValueError, NotImplementedError, TypeError, AttributeError):
        # Not an error here: the general method needs no structure, and reports what is wrong with the
        # program.
        return False


def _is_linear(program: Program, name: str, batch: ClientBatch, g: torch.Generator) -> bool:
    """Return whether a site's log likelihood equals that of a linear predictor at every test point."""
    own = program.latents.local_block
    for shared, w in _points(program, g):
        values, _ = own.unflatten(w[None, None])
        site = sites_at(program, {**shared, **values}, batch)[name]
        if not in_clients(site) or not has_link(site):
            return False
        known = scored(site, site["fn"].log_prob(site["value"])).flatten()
        (rows,) = _rows(program, Linear(frozenset([name])), shared, batch)
        made = rows.score(rows.predictor(w))
        if not (bool(known.isfinite().all()) and torch.allclose(made, known, rtol=1e-8, atol=1e-8)):
            return False
    return True


def _is_fixed(program: Program, name: str, batch: ClientBatch, g: torch.Generator) -> bool:
    """Return whether the design of a site is the same at every test point."""
    of_site = Linear(frozenset([name]))
    designs = [
        _rows(program, of_site, shared, batch)[0].design for shared, _ in _points(program, g)
    ]
    return all(torch.allclose(design, designs[0], rtol=1e-10, atol=1e-10) for design in designs)


def _reads_no_rows(
    program: Program, names: frozenset[str], batch: ClientBatch, g: torch.Generator
) -> bool:
    """Return whether the log joint without these sites is the same on the first row as on all rows."""
    few, all_rows = Linear(names, prior_alone=True), Linear(names)
    return batch.num_rows > 1 and all(
        torch.allclose(
            parts(program, few, shared, batch).rest(w),
            parts(program, all_rows, shared, batch).rest(w),
            rtol=1e-12,
        )
        for shared, w in _points(program, g)
    )


def _points(program: Program, g: torch.Generator) -> list[tuple[Values, Tensor]]:
    """Return the test points: values of the global sites, and local vectors (D,)."""
    block, size = program.latents.global_block, program.latents.local_block.size
    made = []
    for far in SIZES * TRIES:
        z = block.start + 0.5 * torch.randn(block.size, generator=g)
        made.append((block.unflatten(z)[0], far * torch.randn(size, generator=g)))
    return made
