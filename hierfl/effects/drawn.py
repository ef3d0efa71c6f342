"""Posterior draws of a formula's coefficients, in one shape whatever the family and the groups are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hierfl.core.arguments import expect_count
from hierfl.data.clients import ClientData
from hierfl.engine.rounds import is_corrected
from hierfl.formulas.formula import Formula
from hierfl.formulas.layout import INTERCEPT, GroupTerm, Layout
from hierfl.formulas.priors import response_of
from hierfl.formulas.source import index_of
from hierfl.models.families import Response, ResponseFamily
from hierfl.posterior.corrected import corrected
from hierfl.posterior.draws import posterior_draws
from hierfl.posterior.snapshot import Snapshot, expect_fit

LEAST_DRAWS = 20  # for a 90 % interval


@dataclass(frozen=True, eq=False)
class Drawn:
    """Draws of a formula's coefficients. S draws, N clients, P common columns, O predictors a row.

    Args:
        formula: with its schema.
        clients: N names.
        data: the clients' rows; what runs on them says so.
        shared: global site -> (S, *shape), float64.
        own: local site -> (S, N, *shape), float64.
    """

    formula: Formula
    clients: tuple[str, ...]
    data: ClientData
    shared: Mapping[str, Tensor]
    own: Mapping[str, Tensor]

    @property
    def count(self) -> int:
        """The number S of draws."""
        return len(next(iter({**self.shared, **self.own}.values())))

    @property
    def layout(self) -> Layout:
        """Which coefficients are global and which are a client's own."""
        return self.formula.layout

    @property
    def family(self) -> ResponseFamily:
        """The family of the response."""
        return self.formula.declared.family

    @cached_property
    def response(self) -> Response:
        """What clients agreed on of the response."""
        return response_of(self.formula.declared, self.formula.agreed)

    @cached_property
    def outputs(self) -> int:
        """O: 1, or the number of levels but the first of a categorical response."""
        return self.family.outputs(self.response)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The family's parameters, (S, 1, *event), beside predictors (S, n)."""
        return {name: self.shared[name][:, None] for name in self.family.parameters(self.response)}

    @cached_property
    def common(self) -> Tensor:
        """Coefficients of the common columns, (S, P, O)."""
        parts = [
            self.shared[term.name].reshape(self.count, len(term.columns), self.outputs)
            for term in self.layout.common.terms
        ]
        empty = torch.zeros(self.count, 0, self.outputs, dtype=torch.float64)
        return torch.cat(parts, 1) if parts else empty

    @cached_property
    def base(self) -> Tensor:
        """The predictor of a row whose common columns are all zero, (S, O)."""
        found = torch.zeros(self.count, self.outputs, dtype=torch.float64)
        if self.layout.has_intercept:
            found = found + self.shared[INTERCEPT].reshape(self.count, self.outputs)
        if self.layout.is_centered:
            design = self.formula.agreed.design
            means = torch.tensor(
                [design[n].mean for n in self.layout.common.columns], dtype=torch.float64
            )
            found = found - (means[:, None] * self.common).sum(1)
        return found

    def groups(self, term: GroupTerm, client: int | None = None) -> Tensor:
        """Return the deviations of a term's groups from the common coefficients, (S, groups, q, O).

        Args:
            term: with groups above the clients, or at several of them; or within them.
            client: the position of the client whose groups are asked for, of groups within clients.
        """
        value = self.shared[term.site] if client is None else self.own[term.site][:, client]
        return value.reshape(self.count, term.size, len(term.columns), self.outputs)

    def of_client(self, term: GroupTerm, client: int) -> Tensor:
        """Return how far a client's own coefficients lie from their means given the global level, (S, q, O).

        Args:
            term: with the clients as its groups.
            client: its position.
        """
        own = self.own[term.site][:, client].reshape(self.count, len(term.columns), self.outputs)
        means = [self._mean(term, name, client) for name in term.columns]
        return own - torch.stack(means, 1)

    def _mean(self, term: GroupTerm, name: str, client: int) -> Tensor:
        """Return the mean of one of a client's own coefficients, (S, O), as the program has it."""
        found = torch.zeros(self.count, self.outputs, dtype=torch.float64)
        if self.layout.own.get(name) is not term:
            return found
        columns = self.layout.common.columns
        if name == INTERCEPT:
            found = found + self.base
            if self.layout.above:
                above = self.data.client_fields["above"][client].double()
                at = [columns.index(column) for column in self.layout.above]
                found = found + (above[:, None] * self.common[:, at]).sum(1)
        elif name in columns:
            found = found + self.common[:, columns.index(name)]
        for group in self.layout.at("above"):
            if name in group.columns:
                place = self.group_above(group, client)
                found = found + self.groups(group)[:, place, group.columns.index(name)]
        return found

    def group_above(self, term: GroupTerm, client: int) -> int:
        """Return the number of the group above a client in which it lies."""
        return int(self.data.client_fields[index_of(term)][client])

    def of_new(self, term: GroupTerm, seed: int) -> Tensor:
        """Draw the deviations of a new group from the group-level distribution at each draw, (S, q, O).

        Args:
            term: with a bar.
            seed: of the draws; those of different terms are independent.
        """
        place = [one.site for one in self.layout.groups].index(term.site)
        generator = torch.Generator().manual_seed(1_000_003 * (place + 1) + seed)
        size = len(term.columns) * self.outputs
        unit = torch.randn(self.count, size, generator=generator, dtype=torch.float64)
        if term.cor:
            unit = (self.shared[term.cholesky] @ unit[..., None])[..., 0]
        found = unit * self.shared[term.sd].reshape(self.count, size)
        return found.reshape(self.count, len(term.columns), self.outputs)


def drawn(fit: Snapshot, what: str, *, draws: int = 1000, seed: int = 0) -> Drawn:
    """Draw the coefficients of a fitted formula, as `Fit.posterior` draws them.

    Args:
        fit: of a `hierfl.formula`.
        what: name of the method that was called, for the message.
        draws: S.
        seed: of the draws.

    Raises:
        TypeError: the fit is of another model; or is no fit.
        ValueError: `draws` is below 20.
        RowsNotSaved: the guide reads the clients' rows, which were not saved with the fit.
    """
    expect_fit(fit)
    if expect_count(draws, "draws") < LEAST_DRAWS:
        raise ValueError(f"draws is {draws}: a 90 % interval needs {LEAST_DRAWS} or more")
    model = fit.method.model
    if not isinstance(model, Formula):
        raise TypeError(
            f"fit.{what} is for fits of a hierfl.formula, and the model is '{_name(model)}': use "
            f"fit.predict(rows), or fit a formula"
        )
    weigh = is_corrected(fit.progress.history)
    found = (
        corrected(fit, draws, seed=seed).draws
        if weigh
        else posterior_draws(fit, draws=draws, seed=seed)
    )
    return Drawn(
        model,
        fit.clients,
        fit.federation.data,
        {name: value.detach().double() for name, value in found.shared.items()},
        {name: value.detach().double() for name, value in found.own.items()},
    )


def _name(model: Any) -> str:
    return str(getattr(model, "__name__", type(model).__name__))
