"""A network whose clients' weights have a Bregman prior: its domain, its kernel and its program."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform

from hierfl.data.batch import ClientBatch
from hierfl.models.bregman import BregmanPrior
from hierfl.models.functional import apply, frozen_copy, weights
from hierfl.models.likelihood import Likelihood, categorical
from hierfl.models.observe import field, observe
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


class Means(Constraint):
    """Where the means of a prior lie; without its constraint such a value is its natural parameter.

    Args:
        prior: the family.
        event_dim: dimensions of a tensor whose numbers interact in g; 0: each number has a term of its own, or there is one tensor.
    """

    def __init__(self, prior: BregmanPrior, event_dim: int = 0) -> None:
        self.prior, self._event_dim = prior, event_dim
        super().__init__()

    @property
    def event_dim(self) -> int:  # type: ignore[override]
        """As given."""
        return self._event_dim

    def check(self, value: Tensor) -> Tensor:
        """Whether each number, or each tensor, may be a mean."""
        each: Tensor = self.prior.mean.check(value)
        return each.flatten(value.dim() - self._event_dim).all(-1) if self._event_dim else each


class ToMean(Transform):
    """From natural parameters to means: grad g."""

    bijective = True

    def __init__(self, prior: BregmanPrior, event_dim: int = 0) -> None:
        self.prior, self.together = prior, event_dim
        self.domain = (
            constraints.independent(prior.natural, event_dim) if event_dim else prior.natural
        )
        self.codomain = Means(prior, event_dim)
        super().__init__()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ToMean)
            and other.prior is self.prior
            and other.together == self.together
        )

    def __hash__(self) -> int:
        return hash((id(self.prior), self.together))

    def _call(self, x: Tensor) -> Tensor:
        return self._each(self.prior.mean_of, x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self._each(self.prior.natural_of, y)

    def _each(self, one: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """A function of one tensor's numbers, of each tensor of a batch."""
        if not self.together:
            return one(values)
        event = values.shape[values.dim() - self.together :]
        return torch.vmap(one)(values.reshape(-1, *event)).reshape(values.shape)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Log of the curvature of g where it is separable; NaN where it is not, since only points are inferred under such a g."""
        if self.together:
            return x.new_full(x.shape[: x.dim() - self.together], torch.nan)
        return (
            self.prior.curvature(x).log()
            if self.prior.separable(x)
            else torch.full_like(x, torch.nan)
        )


def _to_mean(domain: Means) -> Transform:
    return ToMean(domain.prior, domain.event_dim)


for _registry in (biject_to, transform_to):
    _registry.register(Means, _to_mean)


class BregmanKernel(TorchDistribution):
    """Log density -lam D_{g*}(x, mu) + const, of a tensor x.

    Args:
        prior: the family.
        loc: mu, (*event), the mode.
        lam: the concentration.
    """

    arg_constraints: dict[str, Constraint] = {}  # noqa: RUF012 (torch's name and kind)

    def __init__(
        self, prior: BregmanPrior, loc: Tensor, lam: float = 1.0, validate_args: bool | None = None
    ) -> None:
        self.prior, self.loc, self.lam = prior, loc, lam
        super().__init__(torch.Size(), loc.shape, validate_args=validate_args)

    @property
    def support(self) -> Constraint:
        """Where means lie."""
        dims = len(self.event_shape)
        if self.prior.separable(self.loc):
            return constraints.independent(Means(self.prior), dims)
        return Means(self.prior, dims)

    @property
    def mean(self) -> Tensor:
        """The mode mu, where guides start: the mean of the family, though not of the kernel."""
        return self.loc

    def log_prob(self, value: Tensor) -> Tensor:
        """-lam D, of each event."""
        batch = value.shape[: value.dim() - len(self.event_shape)]
        each = value.reshape(-1, *self.event_shape)
        found = torch.vmap(lambda x: self.prior.divergence(x, self.loc))(each)
        return -self.lam * found.view(batch)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Refuse."""
        raise NotImplementedError(
            "a Bregman kernel has no draws: infer its sites by the guide delta"
        )


@recorded
def bregman_network(
    module: nn.Module,
    prior: BregmanPrior,
    *,
    link: Transform | None = None,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """y_kn ~ likelihood(f(x_kn; link(v_k))),  v_k ~ exp(-D_{g*}(v_k, mu)) for each tensor, mu learned.

    What is learned and averaged are natural parameters: `theta.<tensor>` without its constraint, grad g*(mu).

    Args:
        module: takes the rows of a client, (B, ...), to (B, K) or (B,). Its values are where link(mu) starts.
        prior: `gaussian()`, `bernoulli()`, `poisson()`, `exponential()`, or one's own.
        link: from where the prior's values lie to the network's weights; None: logit for values in (0, 1), log for positive
            ones, and none for real ones.
        likelihood: from `hierfl.models.likelihood`. Default `categorical()`.
        x: the field that goes in.
        y: the field of labels.
    """
    net = frozen_copy(module)
    tensors = weights(net)
    to_weights = biject_to(prior.mean).inv if link is None else link
    given_output = (
        likelihood
        if isinstance(likelihood, Likelihood)
        else Likelihood(likelihood)
        if likelihood
        else categorical()
    )

    def bregman_network(batch: ClientBatch) -> None:
        label = given_output()
        theta = {
            n: pyro.param(f"theta.{n}", to_weights.inv(v), constraint=Means(prior))
            for n, v in tensors.items()
        }
        with batch.clients():
            own = {
                n: to_weights(pyro.sample(f"w.{n}", BregmanKernel(prior, mu)))
                for n, mu in theta.items()
            }
            output = apply(net, own, {}, field(batch, x))
            with batch.data():
                observe(y, label(output), batch)

    return bregman_network
