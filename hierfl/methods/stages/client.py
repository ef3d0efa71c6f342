"""The client of two_stage: a factor of its rows, and log ratios to it at the server's draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hierfl.core.gaussians import Factor, rounded
from hierfl.core.noise import fold
from hierfl.core.process import double_precision
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch, in_double
from hierfl.guides.from_factor import OWN_PARAM, belief_shapes, own_shapes
from hierfl.method import Each, Share, Up
from hierfl.methods.stages.checks import IMPOSSIBLE, NOWHERE, misread, points_to_test
from hierfl.methods.stages.expanded import Polynomials
from hierfl.methods.stages.state import TwoStageClientState, TwoStageWork
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params
from hierfl.program.sites import Values
from hierfl.summaries.conditional import Proposal, proposals_of
from hierfl.summaries.exact import SUMS, Spread, SummedRows, sums_of
from hierfl.summaries.expansion import coefficients_of
from hierfl.summaries.factor import damped, factor_of
from hierfl.summaries.growth import at_origin, moving
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.own_scale import is_one_number
from hierfl.summaries.packed_rows import PackedRows, packed
from hierfl.summaries.row_noise import RowNoise, private_factor, words_of
from hierfl.summaries.units import UnitScore
from hierfl.summaries.weighing import central_variance, is_sampled

Packed = Callable[[], PackedRows]  # rows of a chunk, packed when they are first needed
# the second factor is about a belief with so many times the sds, by few steps
WIDE, FEW = 4.0, 3


class RowWork:
    """What clients do with their rows."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        score: UnitScore,
        spread: Spread | None,
        row_noise: RowNoise | None,
    ) -> None:
        self.hierarchy, self.score, self.spread = hierarchy, score, spread
        self.row_noise = row_noise
        self.distinct = row_noise is None and spread is None
        with double_precision(), torch.no_grad(), unchecked():
            self.tested = points_to_test(score.reading)
        self.by_grid = (
            spread is not None and hierarchy.spread is None and is_one_number(hierarchy, spread)
        )
        sums = SUMS if self.by_grid else ()
        size, mixing = hierarchy.reading.size, hierarchy.mixing_size
        self.is_weighted = spread is None and row_noise is None
        self.has_wide = self.is_weighted and not mixing and hierarchy.normal_size > 0
        count = 0
        if self.is_weighted:
            count = coefficients_of(hierarchy, len(score.line.rest), by_row=score.by_row)
        self.polynomials = Polynomials(hierarchy, score, count)
        moves = bool(moving(score.line, hierarchy.reading.own_size))
        self.has_growth = self.has_wide and not count and moves
        # what is not Normal is then in reach of Newton steps, with what it multiplies, say
        mixing_sites = hierarchy.mixing
        is_vector = mixing_sites is not None and not mixing_sites.scattered and size > 1
        self.is_located = self.has_growth or (moves and is_vector)
        shapes = own_shapes(size, mixing, sums, wide=self.has_wide)
        shapes |= {"center": (size,), "terms": (count,)} if count else {}  # of its polynomial
        shapes |= {} if hierarchy.noise is None else {"num_rows": ()}
        self.shapes = shapes | ({} if hierarchy.noise is None else belief_shapes(size))
        shapes |= {"fits": ()} if count else {}
        parts = {name: torch.zeros(of, dtype=torch.float64) for name, of in shapes.items()}
        self.nothing = TwoStageClientState(**parts, seen=torch.zeros(()))

    def step(
        self, work: TwoStageWork, message: Tree, batch: ClientBatch, *, new: bool = False
    ) -> TwoStageWork:
        """Return the working state with factors or, of a message with draws, with log ratios.

        `new` clients have joined after the fit: nobody asks them for log ratios.
        """
        # weights are ratios of densities of hundreds of rows: single precision lacks the digits
        with double_precision(), torch.no_grad():
            rows = cache(partial(packed, self.score, batch, distinct=self.distinct))
            doubled = in_double(batch)
            fields = {n: doubled.client_fields[n][:, 0] for n in self.hierarchy.fields}
            if "draws" not in message:
                own, sent = self._factors(rows, doubled, message, work.own)
                wide = self._wide(rows, message, own) if new and self.has_wide else {}
                own = own._replace(**wide, **self.proposals(message, fields, own))
                return TwoStageWork(own, fields, sent)
            if self.row_noise is not None:
                raise ValueError("rows have a budget, and the server asks for log ratios of them")
            return self.weighted(rows, batch.key, message, work._replace(fields=fields))

    def weighted(
        self, rows: Packed, keys: Tensor, message: Tree, work: TwoStageWork
    ) -> TwoStageWork:
        """Return the working state with log ratios at a message's draws, the variance of their error, and proposals."""
        where = self.proposals(message, work.fields, work.own)
        wide = self._wide(rows, message, work.own) if self.has_wide else {}

        def of_clients(who: Tensor) -> dict[str, Any]:
            proposals = Proposal(*(v[who] for v in where.values())) if where else None
            factor = work.own.precision[who], work.own.shift[who]
            fields = {name: v[who] for name, v in work.fields.items()}
            how = {"keys": keys[who], "proposals": proposals, "rough": "rough" in message}
            return {"factor": factor, "fields": fields, **how}

        ratios, own = self.polynomials.ratios(rows, work.own, message["draws"], of_clients)
        # where rows are impossible a weight is nothing, which a server adds up
        least = (ratios.log.amax(1, keepdim=True) + IMPOSSIBLE).clamp(min=NOWHERE)
        log = ratios.log.clamp(min=least)
        inner = central_variance(torch.where(log > least, ratios.error, 0.0))
        own = own._replace(**where, **wide)
        return TwoStageWork(own, work.fields, {"log_ratios": log, "inner": inner})

    def _wide(self, rows: Packed, message: Tree, own: TwoStageClientState) -> dict[str, Tensor]:
        """Return factors about a belief with sds of WIDE times those of the server's."""
        wide = self._about((message["loc"], WIDE**2 * message["covariance"]), rows, own)
        return {"wide_precision": wide.precision, "wide_shift": wide.shift}

    def _about(
        self, belief: tuple[Tensor, Tensor], rows: Packed, own: TwoStageClientState
    ) -> Factor:
        """Return factors about a belief, by a few steps."""
        before = Factor(own.precision, own.shift, torch.zeros(()).expand(len(own.shift)))
        return rounded(self.polynomials.wide(rows, belief, before, own, FEW), belief[1])

    def _growing(
        self,
        rows: Packed,
        belief: tuple[Tensor, Tensor],
        own: TwoStageClientState,
        others: Factor,
    ) -> Factor:
        """Return factors at the origin of their growth, those `others` where they do not grow."""
        about, size = partial(self._about, rows=rows, own=own), self.hierarchy.reading.own_size
        factor, growth = at_origin(rows(), self.score.nodes, belief, about, size)
        moves = [growth.moves.view(-1, *[1] * (v.dim() - 1)) for v in others]
        return Factor(*map(torch.where, moves, factor, others))

    def _factors(
        self, rows: Packed, batch: ClientBatch, message: Tree, own: TwoStageClientState
    ) -> tuple[TwoStageClientState, dict[str, Tree]]:
        """Return states with factors, and what is sent: also whether rows were misread, which would disclose them."""
        noise, spread, none = self.row_noise, self.spread, torch.zeros(batch.num_clients)
        before = Factor(own.precision, own.shift, none)

        def result(
            state: TwoStageClientState,
            factor: Factor,
            wrong: Tensor = none,
            sent: Mapping[str, Tensor] | None = None,
        ) -> tuple[TwoStageClientState, dict[str, Tree]]:
            made = {"precision": factor.precision, "shift": factor.shift}
            sums = made if sent is None else dict(sent)
            told = {"factor": sums, "raised": factor.raised, "misread": wrong}
            return state.keeping({**sums, **made}), told

        if noise is not None and self.hierarchy.noise is not None:
            sums = self._noisy_sums(rows(), batch, message, before)
            return result(own, Factor(sums["precision"], sums["shift"], none), none, sums)
        if noise is not None:
            belief = _belief(message)
            new = private_factor(rows(), belief, before, self.score.nodes, noise, batch.key)
            return result(own, rounded(new, belief[1]))
        wrong = none if bool((own.seen > 0.0).all()) else misread(rows(), batch, self.tested)
        while bool(wrong.any()) and self.score.relies_less():
            rows = cache(partial(packed, self.score, batch, distinct=self.distinct))
            wrong = misread(rows(), batch, self.tested)
        if spread is None:
            belief = _belief(message)
            new, own = self.polynomials.factors(rows, batch, belief, before, own)
            new = damped(new, before, own.seen, belief)
            if "rough" in message and self.has_growth:
                new = self._growing(rows, belief, own, new)
            return result(own, rounded(new, belief[1]), wrong)
        own_sums = sums_of(rows(), spread)
        factor = rounded(Factor(own_sums.precision, own_sums.shift, none))
        sent = {"precision": factor.precision, "shift": factor.shift}
        sent |= {"num_rows": own_sums.num_rows, "square": own_sums.square}
        if self.hierarchy.spread is None and not self.by_grid:
            belief = _belief(message)
            of_sums = SummedRows(self.score, spread, own_sums)
            new = factor_of(of_sums, belief, self.score.nodes, before, own.seen > 0.0)
            factor = rounded(new, belief[1])
        return result(own, factor, wrong.maximum(own_sums.wrong), sent)

    def _noisy_sums(
        self, rows: PackedRows, batch: ClientBatch, message: Tree, before: Factor
    ) -> dict[str, Tensor]:
        """Return clients' sums with noise."""
        from hierfl.summaries.noisy_sums import noisy_sums  # here: few fits need it

        keys = fold(batch.key, *words_of(before, *(message[name] for name in sorted(message))))
        noise: Any = self.hierarchy.noise
        return noisy_sums(rows, batch.counts, noise, keys)

    def proposals(
        self, message: Tree, fields: Values, own: TwoStageClientState
    ) -> dict[str, Tensor]:
        """Return where clients' mixing variables lie, if they have any."""
        if self.hierarchy.mixing is None:
            return {}
        factor = own.precision, own.shift
        return proposals_of(self.hierarchy, message["few"], fields, factor)._asdict()

    def finish(
        self, work: TwoStageWork, message: Tree, own: TwoStageClientState, rows: Tensor
    ) -> tuple[Up, TwoStageClientState]:
        """Return what a client sends, and what it keeps."""
        turns = torch.ones(()) if "draws" in message else own.seen + 1.0
        own, sent = work.own._replace(seen=turns), work.sent
        if "draws" not in message:
            return {
                "factor": Each({**sent["factor"], "fields": work.fields}),
                "raised": Share(sent["raised"]),
                "misread": Share(sent["misread"]),
            }, own
        up: Up = {"log_ratios": Each(sent["log_ratios"])}
        inner: Up = {"inner_variance": Share(sent["inner"])} if is_sampled(self.hierarchy) else {}
        return {**up, **inner}, own

    def params(self, message: Tree, own: TwoStageClientState) -> Params:
        """Return the guide's params of a client."""
        if not self.hierarchy.reading.own_size:
            return dict(message["params"])
        # of sums, whose columns may depend on each other, single precision would make up directions
        dtype = torch.float64 if self.by_grid else torch.get_default_dtype()
        # rows may have to be read: no polynomial, which would not fit
        if isinstance(own.fits, Tensor):
            own = own._replace(terms=own.terms[:0])
        # a belief about all clients, which row noise needs, is in the message
        parts = {**message, **{n: v for n, v in own._asdict().items() if isinstance(v, Tensor)}}
        local = {f"{OWN_PARAM}.{n}": parts[n][None, None].to(dtype) for n in self.shapes}
        return {**message["params"], **local}

    def rests_on(self, message: Tree, own: TwoStageClientState, batch: ClientBatch) -> Tensor:
        """Return (sum c)^2 / sum c^2 of the rows' curvatures c, (C,): equal ones count all."""
        if "covariance" not in message or "draws" in message:
            return batch.counts.double()
        with double_precision(), torch.no_grad():
            rows = packed(self.score, batch)
            if not len(rows.line.inside):
                return batch.counts.double()
            precision = torch.linalg.inv_ex(message["covariance"]).inverse + own.precision
            pull = torch.linalg.solve(message["covariance"], message["loc"]) + own.shift
            mean = torch.linalg.solve(precision, pull[..., None])[..., 0]
            curvature = rows.by_predictor(mean, precision, self.score.nodes)[1].abs().sum(1)
            whole, squares = (rows.by_client(v) for v in (curvature, curvature.square()))
            return whole.square() / squares.clamp(min=1e-300)


def _belief(message: Tree) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of any client's v, as a server believes them."""
    loc, covariance = message["loc"], message["covariance"]
    if not bool(covariance.isfinite().all()):
        raise FloatingPointError(
            "what the priors say of a client has no finite variance: give the scale of its sites a "
            "prior without such tails, as HalfNormal(1), or Gamma(2, 1) of a precision"
        )
    return loc, covariance
