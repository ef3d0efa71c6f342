"""Posterior draws of a formula's coefficients, in one shape for all families and groups."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName
from hierfl.core.intervals import PROB, check_draws, check_prob
from hierfl.core.trees import tree_map
from hierfl.core.user_warnings import warn
from hierfl.data.absent import Sites
from hierfl.data.clients import ClientData
from hierfl.formulas.declaration import response_of
from hierfl.formulas.expressions import DesignTerm
from hierfl.formulas.formula import Formula
from hierfl.formulas.layout import GroupTerm, Layout, Parameter
from hierfl.formulas.smooths import drawn_spread
from hierfl.formulas.structures import drawn_values
from hierfl.formulas.writer import CENTERED, INTERCEPT, THRESHOLDS
from hierfl.models.families import Response, ResponseFamily
from hierfl.posterior.corrected import corrected
from hierfl.posterior.draws import known_sites, posterior_draws
from hierfl.posterior.snapshot import Snapshot, expect_fit, global_sites, lacks_rows


@dataclass(frozen=True, eq=False)
class CoefficientDraws:
    """S draws of a formula's coefficients for N clients: `shared`, (S, *shape), and `own`, (S, N, *shape), float64."""

    formula: Formula
    clients: tuple[str, ...]
    data: ClientData
    shared: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    parameter: Parameter | None = None  # whose terms these are; None: the response's
    seed: int = 0  # of what is drawn beside them
    prob: float = PROB  # of the intervals of answers

    @property
    def count(self) -> int:
        """The number S of draws."""
        return len(next(iter({**self.shared, **self.own}.values())))

    def position(self, client: str) -> int:
        """Return the position of a client; refuse one that was not fitted."""
        if client not in self.clients:
            raise NoSuchName(f"client '{client}' was not fitted: fit.personalize(its rows) first")
        return self.clients.index(client)

    @property
    def layout(self) -> Layout:
        """Which coefficients are global and which are a client's own."""
        return self.formula.layout if self.parameter is None else self.parameter.layout

    @property
    def family(self) -> ResponseFamily:
        """The family of the response."""
        return (self.parameter or self.formula).declared.family

    @cached_property
    def response(self) -> Response:
        """What clients agreed on about the response."""
        return response_of(self.formula.declared, self.formula.agreed)

    @cached_property
    def outputs(self) -> int:
        """O: 1, or the number of levels but the first of a categorical response."""
        return self.family.outputs(self.response)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The family's parameters, (S, 1, *event), beside predictors (S, n)."""
        own = self.family.parameters(self.response)
        values = {name: self.shared[name][:, None] for name in own if name in self.shared}
        if self.layout.threshold_means and not self.layout.steps:
            values[THRESHOLDS] = self.thresholds(torch.zeros(1, len(self.layout.common.columns)))
        return values

    @cached_property
    def with_terms(self) -> "dict[str, CoefficientDraws]":
        """The coefficients of each parameter that has terms."""
        parameters = self.formula.parameters
        return {
            name: replace(self, parameter=parameter)
            for name, parameter in parameters.items()
            if not parameter.is_covariate  # whose values rows have
        }

    @cached_property
    def common(self) -> Tensor:
        """Coefficients of the common columns, (S, P, O)."""
        coefficients = [
            self._of(term).reshape(self.count, len(term.columns), self.outputs)
            for term in self.layout.common.terms
        ]
        empty = torch.zeros(self.count, 0, self.outputs, dtype=torch.float64)
        return torch.cat(coefficients, 1) if coefficients else empty

    def _of(self, term: DesignTerm) -> Tensor:
        """Return the coefficients of a common term, (S, *shape)."""
        if term.by_step:  # it moves thresholds, and not the predictor
            return torch.zeros(self.count, len(term.columns), dtype=torch.float64)
        if not term.monotone:
            return self.shared[term.name]
        mean, shares = (self.shared[f"{kind}_{term.name}"] for kind in ("b", "simplex"))
        return (len(term.steps) * mean[..., None] * shares).flatten(1)

    def thresholds(self, common: Tensor) -> Tensor:
        """Return the thresholds of rows with some common columns (n, P), moved by those of cs(), (S, n or 1, K - 1)."""
        names, means = self.layout.common.columns, self.layout.threshold_means
        before = self.shared[f"{THRESHOLDS}{CENTERED if means else ''}"][:, None]
        terms = [term for term in self.layout.common.terms if term.by_step]
        moves = torch.zeros(self.count, len(names), before.shape[-1], dtype=before.dtype)
        for term in terms:
            at = [names.index(name) for name in term.columns]
            moves[:, at] = self.shared[term.name].view(self.count, len(at), -1)
        origin = torch.tensor([means.get(name, 0.0) for name in names], dtype=before.dtype)
        before = before + torch.einsum("p,spk->sk", origin, self.common + moves)[:, None]
        if not terms:
            return before
        return before - torch.einsum("np,spk->snk", common, moves)

    @cached_property
    def base(self) -> Tensor:
        """The predictor of a row whose common columns are all zero, (S, O)."""
        predictor = torch.zeros(self.count, self.outputs, dtype=torch.float64)
        if self.layout.has_intercept:
            site = self.layout.sampled_intercept
            predictor = predictor + self.shared[site].reshape(self.count, self.outputs)
        means = [self.layout.means.get(name, 0.0) for name in self.layout.common.columns]
        return predictor - (torch.tensor(means).double()[:, None] * self.common).sum(1)

    def groups(self, term: GroupTerm, client: int | None = None) -> Tensor:
        """Return the deviations of a term's groups, (S, groups, q, O), of those within `client` if it is given."""
        if term.group.kind:
            value = drawn_values(term, self.formula.agreed, self.shared)
        else:
            value = self.shared[term.site] if client is None else self.own[term.site][:, client]
        return value.reshape(self.count, term.size, len(term.columns), self.outputs)

    def of_client(self, term: GroupTerm, client: int) -> Tensor:
        """Return how far a client's own coefficients lie from their means, (S, q, O)."""
        own = self.own[term.site][:, client].reshape(self.count, len(term.columns), self.outputs)
        means = [self._mean(term, name, client) for name in term.columns]
        return own - torch.stack(means, 1)

    def _mean(self, term: GroupTerm, name: str, client: int) -> Tensor:
        """Return the mean of one of a client's own coefficients, (S, O), as in the program."""
        mean = torch.zeros(self.count, self.outputs, dtype=torch.float64)
        if self.layout.own.get(name) is not term:
            return mean
        columns = self.layout.common.columns
        if name == INTERCEPT:
            mean = mean + self.base
        elif name in columns:
            mean = mean + self.common[:, columns.index(name)]
        for group in self.layout.at("above"):
            if name in group.columns:
                place = self.group_above(group, client)
                mean = mean + self.groups(group)[:, place, group.columns.index(name)]
        return mean

    def group_above(self, term: GroupTerm, client: int) -> int:
        """Return the index of the group above a client in which it lies."""
        return int(self.data.client_fields[term.index][client])

    def spread(self, term: GroupTerm) -> Tensor:
        """Return the standard deviations of a term's coefficients, (S, q O)."""
        if term.places:
            return drawn_spread(term, self.shared)
        return self.shared[term.sd].reshape(self.count, -1)

    def of_new(self, term: GroupTerm) -> Tensor:
        """Draw a new group's deviations from the group-level distribution, (S, q, O)."""
        if term.group.kind:
            what = f"a new group is not in the matrix '{term.group.cov}' of '{term.group.text}'"
            raise ValueError(f"{what}: name one, at={{'{term.group.name}': ...}}, or clients")
        place = [group.site for group in self.layout.groups].index(term.site)
        if self.parameter is not None:  # apart from the groups of the response's terms
            place += 1000 * (1 + list(self.formula.parameters).index(self.parameter.name))
        generator = torch.Generator().manual_seed(1_000_003 * (place + 1) + self.seed)
        size = len(term.columns) * self.outputs
        unit = torch.randn(self.count, size, generator=generator, dtype=torch.float64)
        if term.cor:
            unit = (self.shared[term.cholesky] @ unit[..., None])[..., 0]
        deviations = unit * self.spread(term)
        return deviations.reshape(self.count, len(term.columns), self.outputs)


NEW, EACH = "new", "each"  # of an argument `client`: not names


class Sent(Protocol):
    """Draws that nodes have sent, client -> site: (S, *shape), or why they have not."""

    @property
    def given(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The draws of some clients."""

    @property
    def withheld(self) -> Mapping[str, str]:
        """Why there are none of the others."""


class AtNodes(Protocol):
    """A fit whose clients' own coefficients are at nodes: `here` is what the server has."""

    @property
    def here(self) -> Snapshot:
        """The fit as the server has it."""

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names."""

    def local_draws(self, draws: int, *, seed: int, clients: Collection[str] | None) -> Sent:
        """Ask nodes for draws of their clients' own sites, of some clients or of all."""


Fitted = Snapshot | AtNodes | CoefficientDraws


class Drawing(TypedDict, total=False):
    """How the posterior is drawn for an answer."""

    prob: float  # of the intervals; 0.9
    draws: int  # S; 1000
    seed: int  # of the draws; 0


def drawn(
    fit: Fitted,
    what: str,
    *,
    client: Any = None,
    draws: int = 1000,
    seed: int | None = None,
    prob: float = PROB,
) -> CoefficientDraws:
    """Draw a fitted formula's coefficients, or return given draws; `client` says whose own ones nodes are asked for."""
    check_prob(prob)
    if isinstance(fit, CoefficientDraws):
        return replace(fit, prob=prob, seed=fit.seed if seed is None else seed)
    seed = 0 if seed is None else seed
    over = getattr(fit, "here", None)  # of a run over nodes
    whole: Any = fit if over is None else over
    expect_fit(whole)
    check_draws(draws, prob)
    model = whole.method.model
    if not isinstance(model, Formula):
        name = getattr(model, "__name__", type(model).__name__)
        kind = f"is for fits of a hierfl.formula, and the model is '{name}'"
        raise TypeError(f"fit.{what} {kind}: use fit.predict(rows), or fit a formula")
    if over is None and whole.progress.corrected:  # which takes rows
        sites = corrected(whole, draws, seed=seed).draws
    else:
        keep = global_sites(whole.program) if over is not None else known_sites(whole)
        sites = posterior_draws(whole, draws=draws, seed=seed, keep=keep)
    sites = tree_map(lambda value: value.detach().double(), sites)
    own = Sites(sites.own) if over is None and lacks_rows(whole) else sites.own
    clients = whole.clients if over is None else ()  # own coefficients are at the nodes
    data = whole.federation.data
    coefficients = CoefficientDraws(model, clients, data, sites.shared, own, seed=seed, prob=prob)
    if over is None or client is None or client == NEW:
        return coefficients
    names = None if client == EACH else [client] if isinstance(client, str) else client
    return with_sent(coefficients, fit, what, names)


def with_sent(
    coefficients: CoefficientDraws, fit: Any, what: str, names: Collection[str] | None
) -> CoefficientDraws:
    """Return coefficients with those that nodes send; of `names` one that sends none is an error."""
    layouts = coefficients.formula.layouts
    if any(layout.at("above") for layout in layouts):
        raise ValueError(
            f"fit.{what} of a client needs the groups above it, which are at its node: ask for "
            "client=None or 'new'"
        )
    answers = fit.local_draws(coefficients.count, seed=coefficients.seed, clients=names)
    wrong = {name: _not_own(coefficients, draws) for name, draws in answers.given.items()}
    why = {**answers.withheld, **{name: reason for name, reason in wrong.items() if reason}}
    if why and names is not None:
        client, reason = next(iter(why.items()))
        raise ValueError(
            f"fit.{what} needs draws of client '{client}', which its node keeps: {reason}"
        )
    if why:
        some = "; ".join(f"'{client}': {reason}" for client, reason in list(why.items())[:5])
        warn(f"{len(why)} clients are left out, whose nodes send no draws ({some})")
    sent = {name: draws for name, draws in answers.given.items() if name not in why}
    groups = [term for layout in layouts for term in layout.groups]
    sites = {term.site for term in groups if term.place in ("clients", "within")} if sent else ()
    own = {s: torch.stack([of[s] for of in sent.values()], 1).double() for s in sorted(sites)}
    return replace(coefficients, clients=tuple(sent), own=own)


def _not_own(coefficients: CoefficientDraws, draws: Mapping[str, Tensor]) -> str:
    """Return why what a node sent is no draws of its client's coefficients; "": they are."""
    count = coefficients.count
    for of in (coefficients, *coefficients.with_terms.values()):
        for term in of.layout.groups:
            if term.place not in ("clients", "within"):
                continue
            size = len(term.columns) * of.outputs * (term.size if term.place == "within" else 1)
            value = draws.get(term.site, torch.zeros(0))
            if (value.shape[:1], value.numel()) != ((count,), count * size):
                return f"it does not send {count} draws of '{term.site}'"
            if not value.is_floating_point() or not bool(value.isfinite().all()):
                return f"its draws of '{term.site}' are not finite, or of groups with too few rows"
    return ""
