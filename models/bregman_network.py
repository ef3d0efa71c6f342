"""A network whose local weights have a Bregman prior: constraint, transform, kernel, model."""

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
from hierfl.models.likelihood import Likelihood, as_likelihood, field, observe
from hierfl.program.sites import Model, recorded


class Means(Constraint):
    """The constraint that values are means of a prior; unconstrained, they are natural parameters."""

    def __init__(self, prior: BregmanPrior, event_dim: int = 0) -> None:
        self.prior, self._event_dim = prior, event_dim
        super().__init__()

    @property
    def event_dim(self) -> int:  # type: ignore[override]
        """Dimensions of one event, as given."""
        return self._event_dim

    def check(self, value: Tensor) -> Tensor:
        """Return whether each entry (each tensor if `event_dim` > 0) is in the domain of means."""
        inside: Tensor = self.prior.mean.check(value)
        return inside.flatten(value.dim() - self._event_dim).all(-1) if self._event_dim else inside


class ToMean(Transform):
    """The transform from natural parameters to means, grad g; `event_dim` as for `Means`."""

    bijective = True

    def __init__(self, prior: BregmanPrior, event_dim: int = 0) -> None:
        self.prior, self.together = prior, event_dim
        natural = prior.natural
        self.domain = constraints.independent(natural, event_dim) if event_dim else natural
        self.codomain = Means(prior, event_dim)
        super().__init__()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToMean):
            return False
        return other.prior is self.prior and other.together == self.together

    def __hash__(self) -> int:
        return hash((id(self.prior), self.together))

    def _call(self, x: Tensor) -> Tensor:
        return self._each(self.prior.mean_of, x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self._each(self.prior.natural_of, y)

    def _each(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        if not self.together:
            return function(values)
        event = values.shape[values.dim() - self.together :]
        return torch.vmap(function)(values.reshape(-1, *event)).reshape(values.shape)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log curvature of a separable g; else NaN, as only points are fitted."""
        if self.together:
            return x.new_full(x.shape[: x.dim() - self.together], torch.nan)
        if self.prior.separable(x):
            return self.prior.curvature(x).log()
        return torch.full_like(x, torch.nan)


for _registry in (biject_to, transform_to):
    _registry.register(Means, lambda domain: ToMean(domain.prior, domain.event_dim))


class BregmanKernel(TorchDistribution):
    """A kernel with log density -lam D_{g*}(x, loc), up to a constant, of a tensor x."""

    arg_constraints: dict[str, Constraint] = {}  # noqa: RUF012 (torch's name and kind)

    def __init__(self, prior: BregmanPrior, loc: Tensor, lam: float = 1.0) -> None:
        self.prior, self.loc, self.lam = prior, loc, lam
        super().__init__(torch.Size(), loc.shape)

    @property
    def support(self) -> Constraint:
        """The domain of the means."""
        dims = len(self.event_shape)
        if self.prior.separable(self.loc):
            return constraints.independent(Means(self.prior), dims)
        return Means(self.prior, dims)

    @property
    def mean(self) -> Tensor:
        """The mode mu, where guides start: the exponential family's mean, not the kernel's."""
        return self.loc

    def log_prob(self, value: Tensor) -> Tensor:
        """Return -lam D of each event, (*batch)."""
        batch = value.shape[: value.dim() - len(self.event_shape)]
        events = value.reshape(-1, *self.event_shape)
        divergences = torch.vmap(lambda x: self.prior.divergence(x, self.loc))(events)
        return -self.lam * divergences.view(batch)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Raise an error, because the kernel cannot be sampled."""
        raise NotImplementedError(
            "a Bregman kernel cannot be sampled: fit its sites with guides.delta"
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
    """Build a network whose local weights have a Bregman prior with a learned mean.

        y_kn ~ likelihood(f(x_kn; link(v_k))),    v_k ~ exp(-D_{g*}(v_k, mu))  for each tensor

    Sites and params:

    * `theta.<tensor>` (*shape), a global param: mu. Its unconstrained value, which is what methods
      learn and average, is the natural parameter grad g*(mu).
    * `w.<tensor>` (C, 1, *shape), a local site: v_k.
    * the observed site, named after the field `y`, and the global sites of the likelihood, if any.

    Args:
        module: maps the rows of one client, (B, ...), to outputs (B, outputs) or (B,). Its weights
            are the initial values of link(mu).
        prior: `gaussian()`, `bernoulli()`, `poisson()` or `exponential()` of
            `hierfl.models.bregman`, or another `BregmanPrior`.
        link: the transform from the prior's domain to the network's weights. Default None: logit
            for values in (0, 1), log for positive values, the identity for real ones.
        likelihood: from `hierfl.models.likelihood`, or a function `(output (C, B, outputs)) ->
            distribution` of batch shape (C, B). Default `categorical()`.
        x: name of the field of inputs.
        y: name of the field of labels.

    Raises:
        ValueError: `bayesian_network` does not accept the module.

    Reference: Shi et al. 2023, arXiv:2310.09183.
    """
    net = frozen_copy(module)
    tensors = weights(net)
    to_weights = biject_to(prior.mean).inv if link is None else link
    given_output = as_likelihood(likelihood)

    def bregman_network(batch: ClientBatch) -> None:
        label = given_output()
        start = {n: to_weights.inv(v) for n, v in tensors.items()}
        theta = {n: pyro.param(f"theta.{n}", v, constraint=Means(prior)) for n, v in start.items()}
        with batch.clients():
            drawn = {n: pyro.sample(f"w.{n}", BregmanKernel(prior, mu)) for n, mu in theta.items()}
            own = {n: to_weights(v) for n, v in drawn.items()}
            output = apply(net, own, {}, field(batch, x), mask=batch.rows)
            with batch.data():
                observe(y, label(output), batch)

    return bregman_network
