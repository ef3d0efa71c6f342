"""Continuous latent sites of rows, integrated out of a program before anything else reads it.

    p(y | z) = int p(e | z) p(y | e, z) de,    z the sites of clients and of all, e those of one row

Up to two numbers per row are integrated by adaptive Gauss-Hermite quadrature: nodes stand at the row's
mode and width, which carry no gradient, since the integral does not depend on them. More are
integrated by Laplace's approximation, whose mode moves with z. Where the log density is quadratic in
e, its integral is exact, for any number. An observed site that depends on e keeps its name, and has
its distribution given the sites observed before it.

Reference: Liu and Pierce (1994), "A note on Gauss-Hermite quadrature", Biometrika 81.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.utils import _sum_rightmost

from hierfl.core.process import set_to
from hierfl.data.batch import ClientBatch
from hierfl.program.program import Params, Program
from hierfl.program.quadrature import Log, Normals, by_points, drawn, fitted, integral, of_quadratic
from hierfl.program.row_mixture import mixture_of
from hierfl.program.row_runs import At, RowDensity, RowTerm, Structure, TermReached, isolated
from hierfl.program.row_steps import pieces_of
from hierfl.program.sites import Model, Values, of_scalars
from hierfl.program.traces import Site, is_deterministic, is_factor, is_latent
from hierfl.program.wrapped import add_factor

# where a run of a program leaves its rows
_ROWS: ContextVar[list[RowSites] | None] = ContextVar("rows", default=None)


@dataclass
class RowSites:
    """The rows of one run of a program, which can be run again at other values of their sites."""

    model: Model
    batch: ClientBatch
    structure: Structure
    values: Values = field(default_factory=dict)
    params: Values = field(default_factory=dict)
    observed: Values = field(default_factory=dict)
    sums: dict[tuple[RowTerm, torch.Size, bool], Tensor] = field(default_factory=dict)

    def frozen(self) -> RowSites:
        """Return the rows with values that carry no gradient."""
        values, params = (
            {name: value.detach() for name, value in of.items()}
            for of in (self.values, self.params)
        )
        return RowSites(self.model, self.batch, self.structure, values, params)

    def run(self, term: RowTerm, choose: Callable[[Site], Tensor]) -> dict[str, RowDensity]:
        """Run the program to a term, sites of rows set by `choose`."""
        handler = At(self.values, self.params, choose, term)
        with isolated(), suppress(TermReached), handler:
            self.model(self.batch)
        return handler.terms

    def center(self, term: RowTerm, shape: torch.Size) -> Tensor:
        """Return the middles of the priors of a term's row sites, unconstrained, (*shape, D)."""
        pieces: list[Tensor] = []

        def choose(site: Site) -> Tensor:
            value, fn = self.structure.center(site), site["fn"]
            if site["name"] in term.sites:
                free = biject_to(fn.support).inv(value)
                inner = free.shape[len(fn.batch_shape) :]
                pieces.append(free.expand(*shape, *inner).reshape(*shape, -1))
            return value

        self.run(term, choose)
        return torch.cat(pieces, -1).detach()

    def density(self, term: RowTerm, value: Tensor | None, *, last: bool) -> Log:
        """Return log p(e, terms before, and the term itself if `last`) as a function of (*shape, D)."""

        def log(free: Tensor) -> Tensor:
            terms, total = self.at(free, term)
            for name in term.before:
                total = total + terms[name].log_prob()
            return total + terms[term.name].log_prob(value) if last else total

        return log

    def at(self, free: Tensor, term: RowTerm) -> tuple[dict[str, RowDensity], Tensor]:
        """Return the terms at unconstrained values (*shape, D), and the sites' log density."""
        terms, _, total = self.constrained(free, term)
        return terms, total

    def constrained(
        self, free: Tensor, term: RowTerm
    ) -> tuple[dict[str, RowDensity], dict[str, Tensor], Tensor]:
        """Return the terms at unconstrained values, the sites' values, and their log density."""
        place, logs, values = [0], [torch.zeros(())], {}

        def choose(site: Site) -> Tensor:
            fn = site["fn"]
            if site["name"] not in term.sites:
                return self.structure.center(site)
            transform = biject_to(fn.support)
            event = transform.inverse_shape(fn.shape())[len(fn.batch_shape) :]
            piece = free[..., place[0] : place[0] + event.numel()]
            place[0] += event.numel()
            own = piece.reshape(*free.shape[:-1], *event)
            value: Tensor = transform(own)
            logs.append(fn.log_prob(value))
            if of_scalars(fn.support) is not constraints.real:
                jacobian = transform.log_abs_det_jacobian(own, value)
                extra = jacobian.dim() - (free.dim() - 1)
                logs.append(_sum_rightmost(jacobian, extra))
            values[site["name"]] = value
            return value

        terms = self.run(term, choose)
        return terms, values, sum(logs[1:], logs[0])

    def last_terms(self) -> list[RowTerm]:
        """Return the last term of each group, which has all sites of the group before it."""
        terms = self.structure.terms
        earlier = {name for term in terms.values() for name in term.before}
        return [term for name, term in terms.items() if name not in earlier]

    def drawn_given(
        self, term: RowTerm, shape: torch.Size, z: Tensor, chances: Tensor, *, last: bool
    ) -> Tensor:
        """Draw unconstrained values (*shape, D) of a row's sites given its terms, by noise."""
        place = self.place(term, None, shape, last=last)
        return drawn(self.density(term, None, last=last), place, z, chances)

    def density_at(self, value: Tensor, term: RowTerm) -> RowDensity:
        """Return a term at a value of its only site."""
        return self.run(term, lambda site: value)[term.name]

    def from_priors(self, term: RowTerm) -> RowDensity:
        """Return a term at a draw of its row sites from their priors."""
        return self.run(term, lambda site: site["fn"].sample())[term.name]

    def log_integral(self, term: RowTerm, value: Tensor | None, shape: torch.Size) -> Tensor:
        """Return log p(term | terms before), of the shape."""
        total = self.log_sum(term, value, shape)
        if not term.before:
            return total
        before = self.structure.terms[term.before[-1]]
        return total - self.log_sum(before, None, shape)

    def log_sum(self, term: RowTerm, value: Tensor | None, shape: torch.Size) -> Tensor:
        """Return log p(terms before, term), once where it is of the observed value."""
        if value is None or value is self.observed.get(term.name):
            key = term, shape, torch.is_grad_enabled()
            if key not in self.sums:
                self.sums[key] = self._log_sum(term, None, shape)
            return self.sums[key]
        return self._log_sum(term, value, shape)

    def _log_sum(self, term: RowTerm, value: Tensor | None, shape: torch.Size) -> Tensor:
        if term.steps:
            pieces = pieces_of(self, term, shape)
            densities = [self.density_at(at, term).log_prob(value) for at in pieces.values]
            logs = [p + log for p, log in zip(pieces.logs, densities, strict=True)]
            return torch.stack(torch.broadcast_tensors(*logs)).logsumexp(0)
        log = self.density(term, value, last=True)
        if term.quadratic:
            return of_quadratic(log, self.center(term, shape))
        return integral(log, self.place(term, value, shape, last=True), term.order)

    def error(self, term: RowTerm, shape: torch.Size) -> Tensor:
        """Return what more nodes change in the integral of each row, or points in Laplace's."""
        sums = self.log_sum(term, None, shape)
        if term.steps:
            return torch.zeros_like(sums)
        if term.order:
            finer = term._replace(order=2 * term.order + 1, quadratic=False)
            return self.log_sum(finer, None, shape) - sums
        log = self.density(term, None, last=True)
        return by_points(log, self.place(term, None, shape, last=True)) - sums

    def place(
        self, term: RowTerm, value: Tensor | None, shape: torch.Size, *, last: bool
    ) -> Normals:
        """Return the Normal of each row at the mode of its sites, without gradients."""
        rows = self.frozen()
        value = None if value is None else value.detach()
        center = rows.center(term, shape)
        prior = rows.density(term._replace(before=()), None, last=False)
        return fitted(rows.density(term, value, last=last), prior, center)


class Integrating(Messenger):
    """Hides the sites of rows, and gives what depends on them its distribution without them."""

    def __init__(self, rows: RowSites) -> None:
        super().__init__()
        self.rows = rows  # filled with the sites and params of the run
        self.latent: set[str] = set()
        self.joined = frozenset[str]().union(*rows.structure.joined.values())

    def _pyro_post_param(self, msg: Site) -> None:
        self.rows.params[msg["name"]] = msg["value"]

    def _pyro_sample(self, msg: Site) -> None:
        name, structure = msg["name"], self.rows.structure
        if name in self.joined:
            msg["stop"] = True
        elif name in structure.sites or name in structure.hidden:
            msg["stop"] = True
            if not is_deterministic(msg) and not msg["done"]:
                msg["value"], msg["done"] = structure.center(msg), True
        elif (term := structure.terms.get(name)) is not None:
            if is_factor(msg):
                total = self.rows.log_integral(term, None, msg["fn"].batch_shape)
                msg["fn"] = dist.Unit(total)
            else:
                self.rows.observed[name] = msg["value"]
                msg["fn"] = mixture_of(msg["fn"], self.rows, term)
        elif is_latent(msg):  # handlers outside may condition it
            self.latent.add(name)

    def _pyro_post_sample(self, msg: Site) -> None:
        if msg["name"] in self.latent:
            self.rows.values[msg["name"]] = msg["value"]


def integrated(model: Model, structure: Structure) -> Model:
    """Return a program without the sites of its rows."""

    @wraps(model, updated=())
    def marginal(batch: ClientBatch) -> Any:
        rows, runs = RowSites(model, batch, structure), _ROWS.get()
        if runs is not None:
            runs.append(rows)
        with Integrating(rows):
            value = model(batch)
        shape = torch.Size((batch.num_clients, batch.num_rows))
        for last, names in structure.joined.items():
            total = partial(rows.log_sum, structure.terms[last], None, shape)
            add_factor("+".join(n for n in structure.terms if n in names), total, batch)
        return value

    return marginal


def rows_of(
    program: Program, values: Values, batch: ClientBatch, params: Params
) -> RowSites | None:
    """Return the rows of a program at given values of its other sites; None without sites of rows."""
    runs: list[RowSites] = []
    with set_to(_ROWS, runs):
        program.conditioned(values, params, batch)
    return runs[0] if runs else None
