"""Parts of a whole, several columns of one row: multinomial and Dirichlet responses."""

from __future__ import annotations

from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from hierfl.models.families.family import Response, ResponseFamily, no_parameters
from hierfl.models.families.links import phi, unit_scale
from hierfl.program.recipes import recorded


class Dirichlet(dist.Dirichlet):
    """dist.Dirichlet that leaves it to `ResponseFamily.check` whether shares add up to one.

    Rows that are not there have one number in place of all values, of which no sum is one.
    """

    support: Any = constraints.independent(constraints.unit_interval, 1)


class Multinomial(dist.TorchDistribution):
    """Counts of K categories, whose sum may be another in each row.

    Args:
        total_count: the sum, of the batch shape.
        logits: log probabilities up to a constant, (..., K).
        validate_args: whether to check values. Default None: Pyro's setting.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, total_count: Tensor, logits: Tensor, *, validate_args: bool | None = None
    ) -> None:
        shape = torch.broadcast_shapes(total_count.shape, logits.shape[:-1])
        self.total_count = total_count.expand(shape)
        self.logits = logits.log_softmax(-1).expand(*shape, logits.shape[-1])
        super().__init__(shape, self.logits.shape[-1:], validate_args=validate_args)

    @property
    def support(self) -> Any:
        """Counts with the sum of each row."""
        return constraints.multinomial(self.total_count)

    @property
    def probs(self) -> Tensor:
        """The probabilities of the categories, (..., K)."""
        return self.logits.exp()

    def expand(self, batch_shape: Any, _instance: Any = None) -> Multinomial:
        """Return the same distribution with a larger batch shape."""
        made: Any = self._get_checked_instance  # untyped in torch
        new: Multinomial = made(Multinomial, _instance)
        batch_shape = torch.Size(batch_shape)
        new.total_count = self.total_count.expand(batch_shape)
        new.logits = self.logits.expand(*batch_shape, *self.event_shape)
        super(Multinomial, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability in nats, of the batch shape.

        Args:
            value: (..., K) counts.
        """
        if self._validate_args:
            self._validate_sample(value)
        ways = torch.lgamma(value.sum(-1) + 1.0) - torch.lgamma(value + 1.0).sum(-1)
        return ways + (value * self.logits).sum(-1)

    @property
    def mean(self) -> Tensor:
        """Expected counts, (..., K)."""
        return self.total_count[..., None] * self.probs

    @property
    def variance(self) -> Tensor:
        """Variances of the counts, (..., K)."""
        return self.mean * (1.0 - self.probs)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return counts, (*sample_shape, *batch_shape, K): each category's is binomial given those before it."""
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.batch_shape
            left = self.total_count.to(self.logits.dtype).expand(shape)
            rest = self.logits.flip(-1).logcumsumexp(-1).flip(-1)  # of this category and later ones
            counts = []
            for share in (self.logits - rest).exp().clamp(max=1.0).unbind(-1)[:-1]:
                counts.append(torch.binomial(left, share.expand(shape)))
                left = left - counts[-1]
            return torch.stack([*counts, left], -1)


def _outputs(response: Response) -> int:
    """Return the number of columns but the first, which is the reference."""
    if len(response.levels) < 2:
        raise ValueError(
            f"a response in parts has {len(response.levels)} columns: it needs 2 or more, "
            "cbind(a, b, c)"
        )
    return len(response.levels) - 1


@recorded
def multinomial() -> ResponseFamily:
    """Return the family of counts in K categories that add up to the row field "trials".

        y ~ Multinomial(trials, softmax(0, eta_1, ..., eta_{K - 1}))

    The response has K columns, and the linear predictor K - 1; the first category is the reference.

    >>> multinomial().outputs(Response(float("nan"), float("nan"), ("a", "b", "c")))
    2
    """
    return ResponseFamily(
        name="multinomial",
        link="logit",
        kind="counts",
        likelihood=("families.Multinomial(batch.trials, torch.nn.functional.pad(eta, (1, 0)))"),
        parameters=no_parameters,
        scale=unit_scale,
        additions=("trials",),
        required=("trials",),
        outputs=_outputs,
    )


@recorded
def dirichlet() -> ResponseFamily:
    """Return the family of K shares that add up to one, each above 0.

        y ~ Dirichlet(p phi),    p = softmax(0, eta_1, ..., eta_{K - 1})
        phi ~ InverseGamma(0.4, 0.3)

    The response has K columns, and the linear predictor K - 1; the first share is the reference.
    The larger phi, the closer y to p.

    >>> dirichlet().outputs(Response(float("nan"), float("nan"), ("a", "b", "c")))
    2
    """
    likelihood = (
        "families.Dirichlet(torch.nn.functional.pad(eta, (1, 0)).softmax(-1) * phi[..., None])"
    )
    return ResponseFamily(
        "dirichlet", "logit", "shares", likelihood, phi, unit_scale, outputs=_outputs
    )
