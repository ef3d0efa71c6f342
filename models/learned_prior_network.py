"""A network with local weights under a prior with learned parameters: the model that FedMAP fits."""

from collections.abc import Callable, Mapping

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl.data.batch import ClientBatch
from hierfl.models.functional import apply, frozen_copy, weights
from hierfl.models.learned_priors import Isotropic, LearnedPrior
from hierfl.models.likelihood import Likelihood, as_likelihood, field, observe
from hierfl.program.sites import Model, recorded


@recorded
def learned_prior_network(
    module: nn.Module,
    *,
    prior: LearnedPrior | Mapping[str, LearnedPrior] = Isotropic(),  # noqa: B008 (frozen)
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """Build a network whose weights are all local, under a prior whose parameters are learned.

        y_kn ~ likelihood(f(x_kn; w_k)),    w_k ~ prior(theta, ...)  for each tensor

    Sites and params, for a tensor `0.weight` of the module:

    * `theta.0.weight` (*shape), a global param, and the other global params that its prior
      declares.
    * `w.0.weight` (C, 1, *shape), a local site.
    * `hyper`, a global factor: minus the priors' penalties on their own params.
    * the observed site, named after the field `y`, and the global sites of the likelihood, if any.

    Args:
        module: as for `bayesian_network`.
        prior: `Isotropic`, `LearnedVariance`, `LearnedNormal` or `InputConvex` of
            `hierfl.models.learned_priors`, or another `LearnedPrior`. Or a mapping from prefixes of
            tensor names to priors: the first prefix that fits applies, and "" fits every name.
            Default `Isotropic()`.
        likelihood: from `hierfl.models.likelihood`, or a function `(output (C, B, outputs)) ->
            distribution` of batch shape (C, B). Default `categorical()`.
        x: name of the field of inputs.
        y: name of the field of labels.

    Raises:
        ValueError: `bayesian_network` does not accept the module, or a tensor has no prior.

    >>> learned_prior_network(nn.Linear(2, 3)).__name__
    'learned_prior_network'
    """
    net = frozen_copy(module)
    tensors = weights(net)
    priors = {name: _prior_of(prior, name) for name in tensors}
    given_output = as_likelihood(likelihood)

    def learned_prior_network(batch: ClientBatch) -> None:
        label = given_output()
        above = {name: priors[name].above(name, start) for name, start in tensors.items()}
        penalties = [priors[name].hyper(a) for name, a in above.items()]
        pyro.factor("hyper", -torch.stack(penalties).sum())
        with batch.clients():
            own = {
                name: pyro.sample(f"w.{name}", priors[name].given(a)) for name, a in above.items()
            }
            output = apply(net, own, {}, field(batch, x), mask=batch.rows)
            with batch.data():
                observe(y, label(output), batch)

    return learned_prior_network


def _prior_of(prior: LearnedPrior | Mapping[str, LearnedPrior], name: str) -> LearnedPrior:
    if not isinstance(prior, Mapping):
        return prior
    for prefix, of_prefix in prior.items():
        if name.startswith(prefix):
            return of_prefix
    raise ValueError(
        f"prior: none of the prefixes {', '.join(map(repr, prior))} fits '{name}': "
        f'add one for it, or "" for all other tensors'
    )
