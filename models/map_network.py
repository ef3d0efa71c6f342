"""A network whose weights are each client's own, under a prior that is learned above them: what FedMAP fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl.data.batch import ClientBatch
from hierfl.models.functional import apply, frozen_copy, weights
from hierfl.models.likelihood import Likelihood, categorical
from hierfl.models.map_priors import Isotropic, MapPrior
from hierfl.models.observe import field, observe
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


@recorded
def map_network(
    module: nn.Module,
    *,
    prior: MapPrior | Mapping[str, MapPrior] = Isotropic(),  # noqa: B008 (frozen)
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """y_kn ~ likelihood(f(x_kn; w_k)),  w_k ~ prior(theta, ...), a site `w.<tensor>` for each tensor `theta.<tensor>`.

    Args:
        module: as in `bayesian_network`.
        prior: `Isotropic`, `LearnedVariance`, `LearnedNormal` or `InputConvex` of `hierfl.models.map_priors`, or one's own; or
            several, each for the tensors whose names begin with its key, the first that fits ("": all that are left).
        likelihood: from `hierfl.models.likelihood`, or `(output (C, B, K)) -> distribution`. Default `categorical()`.
        x: the field that goes in.
        y: the field of labels.

    Raises:
        ValueError: a module that `bayesian_network` refuses; a tensor for which no prior is given.

    >>> map_network(nn.Linear(2, 3)).__name__
    'map_network'
    """
    net = frozen_copy(module)
    tensors = weights(net)
    priors = {name: _of(prior, name) for name in tensors}
    given_output = (
        likelihood
        if isinstance(likelihood, Likelihood)
        else Likelihood(likelihood)
        if likelihood
        else categorical()
    )

    def map_network(batch: ClientBatch) -> None:
        label = given_output()
        above = {name: priors[name].above(name, start) for name, start in tensors.items()}
        pyro.factor(
            "hyper", -torch.stack([priors[name].hyper(a) for name, a in above.items()]).sum()
        )
        with batch.clients():
            own = {
                name: pyro.sample(f"w.{name}", priors[name].given(a)) for name, a in above.items()
            }
            output = apply(net, own, {}, field(batch, x))
            with batch.data():
                observe(y, label(output), batch)

    return map_network


def _of(prior: MapPrior | Mapping[str, MapPrior], name: str) -> MapPrior:
    if not isinstance(prior, Mapping):
        return prior
    for beginning, each in prior.items():
        if name.startswith(beginning):
            return each
    raise ValueError(
        f"prior: none of {', '.join(map(repr, prior))} begins '{name}': give one for it, or one for \"\", all others"
    )
