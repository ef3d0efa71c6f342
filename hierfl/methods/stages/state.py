"""What clients and the server of two_stage keep, in float64; its N clients in the order of their names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_class
from hierfl.method import Reports
from hierfl.program.sites import Values
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.surrogate import SINGULAR
from hierfl.summaries.weights import Points

GATHER, WEIGHT, DONE = range(3)
OF_CLIENTS = ("seen", "weighted", "heavy", "failed")
LOGGED = ("moved", "changed", "r_hat", "k_hat", "effective", "k_hat_client", "inner_error")
NUMBERS = (*LOGGED, "share", "raised", "apart")
ROUNDING = 1e-6  # of a symmetric matrix, relative to its largest entry
# the least eigenvalue of a belief's correlations; of nodes, whose last digits may differ, any above 0 will do
LEAST = 0.5 * SINGULAR


class TwoStageClientState(NamedTuple):
    """What a client keeps; the parts that a fit does not need are `()`."""

    precision: Tensor  # (V, V), of its factor
    shift: Tensor  # (V,)
    seen: Tensor  # (), how many factors it has sent in a row
    wide_precision: Any = ()  # (V, V), of its factor about a wider belief
    wide_shift: Any = ()  # (V,)
    loc: Any = ()  # (2, M), of proposals of mixing variables
    tril: Any = ()  # (2, M, M)
    num_rows: Any = ()  # ()
    square: Any = ()  # (), what the rows' predictors leave of their squares
    center: Any = ()  # (V,), of the polynomial of many rows
    terms: Any = ()  # (P,)
    fits: Any = ()  # (), 1 where the polynomial stands for the rows

    def keeping(self, values: Mapping[str, Tensor]) -> TwoStageClientState:
        """Return the state with those of some values for which it has a part."""
        parts = self._asdict()
        return self._replace(
            **{n: v for n, v in values.items() if isinstance(parts.get(n), Tensor)}
        )

    def without_rows(self) -> tuple[Tensor, TwoStageClientState]:
        """Return whether draws need no rows, above 0, and the state of a client whose draws read none."""
        return self.fits, self._replace(fits=())


class TwoStageWork(NamedTuple):
    """A client's state, its fields in double precision, by name, and what it sends, by name."""

    own: TwoStageClientState
    fields: Values
    sent: Mapping[str, Tree]


@tree_class
class Belief:
    """What any client's v may be, by the server's current posterior."""

    loc: Tensor  # (V,)
    covariance: Tensor  # (V, V)

    @staticmethod
    def of(loc: Tensor, covariance: Tensor) -> Belief:
        """Return a belief that every node takes: narrow, and definite, where draws have collapsed."""
        if is_definite(covariance, LEAST) or not bool(covariance.isfinite().all()):
            return Belief(loc, covariance)
        unit, sds = _correlations(covariance)
        values, vectors = torch.linalg.eigh(0.5 * (unit + unit.mT))
        unit = (vectors * values.clamp(min=SINGULAR)) @ vectors.mT
        return Belief(loc, 0.5 * (unit + unit.mT) * (sds[:, None] * sds))


def is_definite(covariance: Tensor, least: float = 0.0) -> bool:
    """Return whether a matrix (V, V) is symmetric, with eigenvalues of its correlations above `least`."""
    unit, _ = _correlations(covariance.double())
    if not unit.numel() or not bool(((unit - unit.mT).abs() <= ROUNDING).all()):
        return not unit.numel()
    lowered = 0.5 * (unit + unit.mT) - least * torch.eye(len(unit), dtype=unit.dtype)
    return int(torch.linalg.cholesky_ex(lowered).info) == 0


def _correlations(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return a covariance in units of its sds, and these: 1 where a variance is not above 0."""
    variance = covariance.diagonal()
    sds = torch.where(variance > 0.0, variance, 1.0).sqrt()
    return covariance / (sds[:, None] * sds), sds


@tree_class
class Anchor:
    """Where small steps are (`two_stage_anchored`)."""

    step: Tensor  # (), the number of the next one, negative once they are over
    narrow: Tensor  # (V,), the precision by which a belief is narrower than the posterior


@tree_class
class Attempt:
    """Draws that clients have weighted, to which a worse proposal about them returns."""

    final: Points
    ratios: Tensor  # (S,)
    each: Tensor  # (A, N) or (A, 0)
    powers: Tensor  # (N,)
    proposed: Tensor  # ()
    k_hat: Tensor  # ()
    effective: Tensor  # ()


@tree_class
class ServerState:
    """The state of the server; S draws, of which clients weight A."""

    stage: Tensor  # (), GATHER, WEIGHT or DONE
    factors: Factors
    scouts: Points  # of the surrogate, by which factors are gathered
    bounds: Tensor  # (2, Ks), how far scales may lie
    seen: Tensor  # (N,) bool, clients whose factors are here
    weighted: Tensor  # (N,) bool, clients whose log ratios are here
    heavy: Tensor  # (N,) bool, clients whose weights have a heavy tail
    failed: Tensor  # (N,) bool, clients that failed when last asked
    # the draws to weight
    final: Points
    powers: Tensor  # (N,), of the factors that they are of
    asked: Tensor  # (A,), sums of log ratios over clients
    each: Tensor  # (A, N) log ratios, or (A, 0) where they are not kept
    ratios: Tensor  # (S,) log ratios of all clients
    before: Attempt
    again: Tensor  # (), restarts from weighted draws
    # () bool: any draws of the surrogate, draws of a proposal, draws of chains on the rows
    sampled: Tensor
    proposed: Tensor
    chained: Tensor
    # () numbers of the history
    share: Tensor  # of the draws of chains, that is effective
    raised: Tensor  # mean number of negative eigenvalues of a client's factor
    apart: Tensor  # by how much two sets of weighted draws differ, beyond chance
    moved: Tensor  # largest shift of a mean, in posterior sds
    changed: Tensor  # largest relative change of an sd
    r_hat: Tensor
    k_hat: Tensor
    effective: Tensor
    k_hat_client: Tensor  # largest k-hat of one client's weights
    inner_error: Tensor  # sd of the error of the log weights, in nats
    belief: Belief | None = None  # None: sums of rows suffice
    anchor: Anchor | None = None  # None: likewise, or with row noise

    def __post_init__(self) -> None:
        """Hold numbers in double precision, as a saved state does, whatever the default is."""
        for name in NUMBERS:
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                object.__setattr__(self, name, value.double())

    @property
    def is_done(self) -> bool:
        """Whether no client is asked any more."""
        return int(self.stage) == DONE

    @property
    def weights(self) -> bool:
        """Whether clients weight draws."""
        return int(self.stage) == WEIGHT

    @property
    def was_anchored(self) -> bool:
        """Whether the posterior was approached in small steps."""
        return self.anchor is not None and int(self.anchor.step) < 0

    @property
    def all_seen(self) -> bool:
        """Whether every client has sent a factor, or failed."""
        return bool((self.seen | self.failed).all())

    def logged(self) -> dict[str, float]:
        """Return the next stage, moves of the posterior, R-hat, k-hat and ESS, where they are known."""
        numbers = {name: float(getattr(self, name)) for name in ("stage", *LOGGED)}
        return {name: number for name, number in numbers.items() if math.isfinite(number)}

    def at(self, stage: int) -> ServerState:
        """Return the state at another stage."""
        return replace(self, stage=torch.tensor(stage))

    def asking(self) -> ServerState:
        """Return the state that asks clients to weight the final draws."""
        none = torch.zeros_like(self.weighted)
        return replace(
            self.at(WEIGHT),
            weighted=none,
            heavy=none.clone(),
            failed=none.clone(),
            asked=torch.zeros_like(self.asked),
            each=torch.zeros_like(self.each),
            ratios=torch.zeros_like(self.ratios),
            inner_error=torch.tensor(torch.nan),
        )

    def gathering(self) -> ServerState:
        """Return the state that asks for factors again, about other draws."""
        nan = torch.tensor(torch.nan)
        return replace(self.at(GATHER), moved=nan, changed=nan, k_hat_client=nan)

    def ended(self, effective: Tensor) -> ServerState:
        """Return the state with final draws of which nothing is to be weighted; done, if all were seen."""
        stage = DONE if self.all_seen else GATHER
        return replace(self.at(stage), weighted=self.seen.clone(), effective=effective)

    def attempt(self) -> Attempt:
        """Return what a worse proposal returns to."""
        return Attempt(**{field.name: getattr(self, field.name) for field in fields(Attempt)})

    def returned(self, to: Attempt) -> ServerState:
        """Return the state with the draws of an attempt."""
        return replace(self, **vars(to))

    def with_failed(self, reports: Reports, left_out: Tensor) -> ServerState:
        """Return the state with the clients that failed when last asked; the server does not wait for them."""
        failed = self.failed.index_fill(0, reports.ids, False).index_fill(0, left_out, True)
        return replace(self, failed=failed)

    def with_inner_error(self, reports: Reports, variance: Tensor | None) -> ServerState:
        """Return the state with the sd of the log weights' error; clients' errors are independent."""
        if variance is None:
            return self
        new = int((~self.weighted[reports.ids]).sum())
        total = self.inner_error.nan_to_num().square() + new * torch.as_tensor(variance).double()
        return replace(self, inner_error=total.sqrt())

    def with_error(self, error: float) -> ServerState:
        """Return the state with one more error of the log weights, in nats."""
        if not error:
            return self
        inner = self.inner_error
        return replace(self, inner_error=inner.nan_to_num().hypot(inner.new_tensor(error)))
