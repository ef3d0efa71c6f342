"""The client of two_stage: a factor of its rows, and log ratios to it at the server's draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hierfl.core.noise import fold
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.from_factor import OWN_PARAM
from hierfl.method import Each, Share, Up
from hierfl.methods.stages.checks import IMPOSSIBLE, NOWHERE
from hierfl.methods.stages.expanded import FITS, Polynomials, shapes_of
from hierfl.program.few_rows import double_precision, in_double
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params
from hierfl.program.sites import Values
from hierfl.summaries.conditional import Proposal, belief_shapes, own_shapes, proposals_of
from hierfl.summaries.exact import SUMS, Spread, sums_of
from hierfl.summaries.expansion import coefficients_of
from hierfl.summaries.factor import Factor, damped, factor_of, rounded
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.own_scale import is_one_number
from hierfl.summaries.packed_rows import PackedRows, misread, packed, points_to_test
from hierfl.summaries.reading import nodes_of
from hierfl.summaries.row_noise import RowNoise, private_factor, words_of
from hierfl.summaries.summed_rows import SummedRows
from hierfl.summaries.units import UnitScore
from hierfl.summaries.weighing import central_variance, is_sampled

Packed = Callable[[], PackedRows]  # rows of a chunk, packed when they are first needed
FACTOR = ("precision", "shift")
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
            self.nodes, self.tested = nodes_of(score.line), points_to_test(score.reading)
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
        self.polynomials = Polynomials(hierarchy, self.nodes, count)
        shapes = own_shapes(size, mixing, sums, wide=self.has_wide) | shapes_of(size, count)
        shapes |= {} if hierarchy.noise is None else {"num_rows": ()}
        self.shapes = shapes | ({} if hierarchy.noise is None else belief_shapes(size))
        shapes |= {FITS: ()} if count else {}
        self.nothing = {name: torch.zeros(of, dtype=torch.float64) for name, of in shapes.items()}

    def step(self, work: Tree, message: Tree, batch: ClientBatch, *, new: bool = False) -> Tree:
        """Return the working state with factors or, of a message with draws, with log ratios.

        `new` clients have joined after the fit: nobody asks them for log ratios.
        """
        # weights are ratios of densities of hundreds of rows: single precision lacks the digits
        with double_precision(), torch.no_grad():
            rows = cache(partial(packed, self.score, batch, distinct=self.distinct))
            doubled = in_double(batch)
            fields = {n: doubled.client_fields[n][:, 0] for n in self.hierarchy.fields}
            if "draws" not in message:
                gathered = {**work, **self._factors(rows, doubled, message, work), "fields": fields}
                wide = self._wide(rows, message, gathered) if new and self.has_wide else {}
                return {**gathered, **wide, **self.proposals(message, fields, gathered)}
            if self.row_noise is not None:
                raise ValueError("rows have a budget, and the server asks for log ratios of them")
            return {**work, **self.weighted(rows, batch.key, message, {**work, "fields": fields})}

    def weighted(self, rows: Packed, keys: Tensor, message: Tree, work: Tree) -> Tree:
        """Return clients' log ratios at a message's draws, the variance of their error, and proposals."""
        where = self.proposals(message, work["fields"], work)
        wide = self._wide(rows, message, work) if self.has_wide else {}

        def of_clients(who: Tensor) -> Tree:
            proposals = Proposal(*(v[who] for v in where.values())) if where else None
            factor = tuple(work[name][who] for name in FACTOR)
            fields = {name: v[who] for name, v in work["fields"].items()}
            return {"factor": factor, "fields": fields, "keys": keys[who], "proposals": proposals}

        ratios, fits = self.polynomials.ratios(rows, work, message["draws"], of_clients)
        # where rows are impossible a weight is nothing, which a server adds up
        least = (ratios.log.amax(1, keepdim=True) + IMPOSSIBLE).clamp(min=NOWHERE)
        log = ratios.log.clamp(min=least)
        inner = central_variance(torch.where(log > least, ratios.error, 0.0))
        return {**where, **wide, **fits, "log_ratios": log, "inner": inner}

    def _wide(self, rows: Packed, message: Tree, factor: Tree) -> Tree:
        """Return factors about a belief with sds of WIDE times those of the server's."""
        belief, none = (message["loc"], WIDE**2 * message["covariance"]), torch.zeros(())
        before = Factor(factor["precision"], factor["shift"], none.expand(len(factor["shift"])))
        wide = rounded(self.polynomials.wide(rows, belief, before, factor, FEW), belief[1])
        return {f"wide_{name}": getattr(wide, name) for name in FACTOR}

    def _factors(self, rows: Packed, batch: ClientBatch, message: Tree, work: Tree) -> Tree:
        """Return clients' factors, and whether their rows were misread, which would disclose them."""
        noise, spread, none = self.row_noise, self.spread, torch.zeros(batch.num_clients)
        before = Factor(work["precision"], work["shift"], none)
        if noise is not None and self.hierarchy.noise is not None:
            return {**self._noisy_sums(rows(), batch, message, before), "misread": none}
        if noise is not None:
            belief = _belief(message)
            own = private_factor(rows(), belief, before, self.nodes, noise, batch.key)
            return {**rounded(own, belief[1])._asdict(), "misread": none}
        wrong = none if bool((work["seen"] > 0.0).all()) else misread(rows(), batch, self.tested)
        if bool(wrong.any()) and self.score.recorded:
            # rows may take other branches than the first one
            self.score.recorded = False
            rows = cache(partial(packed, self.score, batch, distinct=self.distinct))
            wrong = misread(rows(), batch, self.tested)
        if spread is None:
            belief = _belief(message)
            own, polynomials = self.polynomials.factors(rows, batch, belief, before, work)
            own = damped(own, before, work["seen"])
            return {**rounded(own, belief[1])._asdict(), **polynomials, "misread": wrong}
        own_sums = sums_of(rows(), spread)
        sums = rounded(Factor(own_sums.precision, own_sums.shift, none))
        sent = {"num_rows": own_sums.num_rows, "square": own_sums.square}
        sent = {"precision": sums.precision, "shift": sums.shift, **sent}
        factor = {**sent, "raised": none}
        if self.hierarchy.spread is None and not self.by_grid:
            belief = _belief(message)
            of_sums = SummedRows(self.score, spread, own_sums)
            own = factor_of(of_sums, belief, self.nodes, before, work["seen"] > 0.0)
            factor = rounded(own, belief[1])._asdict()
        return {**factor, "sent": sent, "misread": wrong.maximum(own_sums.wrong)}

    def _noisy_sums(
        self, rows: PackedRows, batch: ClientBatch, message: Tree, before: Factor
    ) -> Tree:
        """Return clients' sums with noise."""
        from hierfl.summaries.noisy_sums import noisy_sums  # here: few fits need it

        keys = fold(batch.key, *words_of(before, *(message[name] for name in sorted(message))))
        noise: Any = self.hierarchy.noise
        sent = noisy_sums(rows, batch.counts, noise, keys)
        return {**sent, "sent": sent, "raised": torch.zeros(rows.clients)}

    def proposals(self, message: Tree, fields: Values, factor: Tree) -> Tree:
        """Return where clients' mixing variables lie, if they have any."""
        if self.hierarchy.mixing is None:
            return {}
        own = factor["precision"], factor["shift"]
        return proposals_of(self.hierarchy, message["few"], fields, own)._asdict()

    def finish(self, work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        """Return what a client sends, and what it keeps."""
        turns = torch.ones(()) if "draws" in message else own["seen"] + 1.0  # of factors, in a row
        own = {**{name: work[name] for name in self.nothing}, "seen": turns}
        if "draws" not in message:
            sent = work["sent"] if "sent" in work else {n: work[n] for n in FACTOR}
            return {
                "factor": Each({**sent, "fields": work["fields"]}),
                "raised": Share(work["raised"]),
                "misread": Share(work["misread"]),
            }, own
        up: Up = {"log_ratios": Each(work["log_ratios"])}
        inner: Up = {"inner_variance": Share(work["inner"])} if is_sampled(self.hierarchy) else {}
        return {**up, **inner}, own

    def params(self, message: Tree, own: Tree) -> Params:
        """Return the guide's params of a client."""
        if not self.hierarchy.reading.own_size:
            return dict(message["params"])
        dtype = torch.get_default_dtype()
        names = {name: f"{OWN_PARAM}.{name}" for name in self.nothing if name != FITS}
        if FITS in own:  # it may be that rows have to be read: no polynomial, which would not fit
            own = {**own, "terms": own["terms"][:0]}
        local = {of: own[name][None, None].to(dtype) for name, of in names.items()}
        if self.hierarchy.noise is not None:
            believed = belief_shapes(self.hierarchy.reading.size)
            beliefs = {"num_rows": own["num_rows"], **{name: message[name] for name in believed}}
            local |= {f"{OWN_PARAM}.{n}": v[None, None].to(dtype) for n, v in beliefs.items()}
        return {**message["params"], **local}

    def rests_on(self, message: Tree, own: Tree, batch: ClientBatch) -> Tensor:
        """Return (sum c)^2 / sum c^2 of the rows' curvatures c, (C,): equal ones count all."""
        with double_precision(), torch.no_grad():
            rows = packed(self.score, batch)
            if not len(rows.line.inside) or "covariance" not in message or "draws" in message:
                return batch.counts.double()
            precision = torch.linalg.inv_ex(message["covariance"]).inverse + own["precision"]
            pull = torch.linalg.solve(message["covariance"], message["loc"]) + own["shift"]
            mean = torch.linalg.solve(precision, pull[..., None])[..., 0]
            curvature = rows.by_predictor(mean, precision, self.nodes)[1].abs().sum(1)
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
