"""The distribution of an observed site over the latent sites of its row, given terms observed before it."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions.utils import lazy_property
from torch.func import vmap

from hierfl.core.importance_sampling import normal_points
from hierfl.program.quadrature import CANDIDATES, POINTS, nodes_of
from hierfl.program.row_steps import pieces_of

if TYPE_CHECKING:
    from hierfl.program.row_runs import RowTerm

MEAN, VARIANCE = attrgetter("mean"), attrgetter("variance")
FINE = {1: 41, 2: 15}  # nodes of each number, of means and variances


class RowMixture(TorchDistribution):
    """The average of a distribution over the latent sites of its row.

    Args:
        fn: the distribution at the center of these sites.
        rows: the program, which is run again at other values of them.
        term: which site of the program this is.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, fn: Any, rows: Any, term: RowTerm) -> None:
        self.fn, self.rows, self.term = fn, rows, term
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the distribution at any value."""
        return self.fn.support

    @property
    def total_count(self) -> Any:
        """The number of trials, of a Binomial's."""
        return self.fn.total_count

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Always False."""
        return False

    def expand(self, batch_shape: Any, _instance: Any = None) -> RowMixture:
        """Return the distribution for more plates."""
        return RowMixture(self.fn.expand(torch.Size(batch_shape)), self.rows, self.term)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, integrated over the sites of each row."""
        own = value.shape[: value.dim() - self.event_dim]
        shape = torch.broadcast_shapes(own, self.batch_shape)
        return self.rows.log_integral(self.term, value, shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw the sites of each row, and a value given them."""
        shape = torch.Size(sample_shape)
        with torch.no_grad():
            draws = [self._draw() for _ in range(shape.numel())]
        return torch.stack(draws).reshape(*shape, *draws[0].shape)

    def _draw(self) -> Tensor:
        if not self.term.before:
            fn = self.rows.from_priors(self.term).fn
        else:
            size = self.rows.center(self.term, self.batch_shape).shape[-1]
            z, chances = (
                torch.randn(CANDIDATES, *self.batch_shape, size),
                torch.rand(self.batch_shape),
            )
            free = self.rows.drawn_given(self.term, self.batch_shape, z, chances, last=False)
            fn = self.rows.at(free, self.term)[0][self.term.name].fn
        value: Tensor = fn.expand(self.batch_shape).sample()
        return value

    @property
    def mean(self) -> Tensor:
        """The mean over the row's sites of the mean given them."""
        return self._moments()[0]

    @property
    def variance(self) -> Tensor:
        """The variance of the mean over the row's sites, and the mean of the variance."""
        return self._moments()[1]

    def _moments(self) -> tuple[Tensor, Tensor]:
        rows, term = self.rows, self.term
        if term.steps:
            pieces = pieces_of(rows, term, self.batch_shape)
            components = [
                rows.density_at(at, term).fn.expand(self.batch_shape) for at in pieces.values
            ]
            logs = torch.stack(torch.broadcast_tensors(*pieces.logs))
            return self._of(
                logs, *(torch.stack([f(fn) for fn in components]) for f in (MEAN, VARIANCE))
            )
        place = rows.place(term, None, self.batch_shape, last=False)
        size = place.loc.shape[-1]
        if size in FINE:
            z, counts = nodes_of(FINE[size], size, place.loc)
        else:
            z = normal_points(POINTS, size).to(place.loc)
            counts = 0.5 * z.square().sum(-1)

        def at(node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            free = place.at(node)
            fn = rows.at(free, term)[0][term.name].fn.expand(self.batch_shape)
            return rows.density(term, None, last=False)(free), fn.mean, fn.variance

        logs, means, variances = vmap(at)(z)
        return self._of(logs + counts.reshape(-1, *[1] * (logs.dim() - 1)), means, variances)

    def _of(self, logs: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of components, by their log weights."""
        weights = logs.softmax(0)[(..., *[None] * self.event_dim)]
        mean = (weights * means).sum(0)
        return mean, (weights * (variances + (means - mean) ** 2)).sum(0)


class _Classes:
    """Classes of rows: their logits are integrals, which are computed where they are asked for."""

    def __init__(self, fn: Any, rows: Any, term: RowTerm) -> None:
        self.fn, self.rows, self.term = fn, rows, term
        torch.distributions.Distribution.__init__(self, fn.batch_shape, validate_args=False)  # type: ignore[arg-type]

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, integrated over the sites of each row."""
        shape = torch.broadcast_shapes(value.shape, self.fn.batch_shape)
        integral: Tensor = self.rows.log_integral(self.term, value, shape)
        return integral

    def logs_of(self, classes: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the log densities of each class, up to a constant."""
        shape = self.fn.batch_shape
        values = [torch.full(shape, k, dtype=dtype) for k in range(classes)]
        return [self.rows.log_sum(self.term, value, shape) for value in values]

    @property
    def _param(self) -> Any:
        return self.logits  # type: ignore[attr-defined]

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Return the distribution for more plates."""
        shape = torch.Size(batch_shape)
        return mixture_of(self.fn.expand(shape), self.rows, self.term)


class RowBernoulli(_Classes, dist.Bernoulli):  # type: ignore[misc]
    """The average of a Bernoulli over the latent sites of its row."""

    @lazy_property
    def logits(self) -> Tensor:
        """The log odds of 1."""
        no, yes = self.logs_of(2, torch.get_default_dtype())
        return yes - no


class RowCategorical(_Classes, dist.Categorical):  # type: ignore[override]
    """The average of a Categorical over the latent sites of its row."""

    def __init__(self, fn: Any, rows: Any, term: RowTerm) -> None:
        super().__init__(fn, rows, term)
        self._num_events = fn._num_events

    @lazy_property
    def logits(self) -> Tensor:
        """The log probabilities of the classes."""
        logs = self.logs_of(self._num_events, torch.long)
        return torch.stack(logs, -1).log_softmax(-1)


def mixture_of(fn: Any, rows: Any, term: RowTerm) -> Any:
    """Return the average of a term's distribution; that of classes is one of classes again."""
    if isinstance(fn, dist.Bernoulli):
        return RowBernoulli(fn, rows, term)
    return (RowCategorical if isinstance(fn, dist.Categorical) else RowMixture)(fn, rows, term)
