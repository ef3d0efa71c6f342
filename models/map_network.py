"""A network whose weights are each client's own, under a prior that is learned above them: what FedMAP fits."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl.batch import ClientBatch
from hierfl.models.fields import known, observe
from hierfl.models.likelihood import Likelihood, categorical
from hierfl.models.map_priors import Isotropic, MapPrior
from hierfl.models.modules import apply, frozen_copy, weights
from hierfl.recipes import recorded
from hierfl.sites import Model


@recorded
def map_network(
    module: nn.Module,
    *,
    prior: MapPrior = Isotropic(),  # noqa: B008 (frozen)
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """y_kn ~ likelihood(f(x_kn; w_k)),  w_k ~ prior(theta, ...), a site `w.<tensor>` for each tensor `theta.<tensor>`.

    Args:
        module: as in `bayesian_network`.
        prior: `Isotropic`, `LearnedVariance`, `LearnedNormal` or `InputConvex` of `hierfl.models.map_priors`, or one's own.
        likelihood: from `hierfl.models.likelihood`, or `(output (C, B, K)) -> distribution`. Default `categorical()`.
        x: the field that goes in.
        y: the field of labels.

    Raises:
        ValueError: a module that `bayesian_network` refuses.

    >>> map_network(nn.Linear(2, 3)).__name__
    'map_network'
    """
    net = frozen_copy(module)
    tensors = weights(net)
    given_output = likelihood if isinstance(likelihood, Likelihood) else Likelihood(likelihood) if likelihood else categorical()

    def map_network(batch: ClientBatch) -> None:
        label = given_output()
        above = {name: prior.above(name, start) for name, start in tensors.items()}
        pyro.factor("hyper", -torch.stack([prior.hyper(a) for a in above.values()]).sum())
        with batch.clients():
            own = {name: pyro.sample(f"w.{name}", prior.given(a)) for name, a in above.items()}
            output = apply(net, own, {}, known(batch, x))
            with batch.data():
                observe(y, label(output), batch)

    return map_network
