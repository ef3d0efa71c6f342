"""A Bayesian network of any `nn.Module`: each weight tensor a client's own, given a prior, or shared by all."""

from __future__ import annotations

from collections.abc import Callable

from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl.data.batch import ClientBatch
from hierfl.models.functional import Local, apply, frozen_copy, own_names, spread_of, weights
from hierfl.models.likelihood import Likelihood, categorical
from hierfl.models.observe import field, observe
from hierfl.models.priors import Prior
from hierfl.models.weight_priors import Loc, Scale, WeightPriors
from hierfl.program.recipes import recorded
from hierfl.program.scale_links import ScaleLink
from hierfl.program.sites import Model


@recorded
def bayesian_network(
    module: nn.Module,
    *,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
    local: Local = "all",
    prior_loc: Loc = "learned",
    prior_scale: Scale = 0.1,
    scale_start: float = 0.1,
    scale_link: ScaleLink = "softplus",
    global_prior: Prior | None = None,
    centred: bool = True,
    local_reparameterisation: bool = False,
) -> Model:
    """y_kn ~ likelihood(f(x_kn; w_k, theta)),  w_k ~ Normal(theta, s^2) for each local tensor; theta alone for each global one.

    One site a tensor, never one long vector. For a tensor `0.weight` of the module:

    * local: `w.0.weight` (C, 1, *shape) in the clients plate; its mean `theta.0.weight` and scale `scale.0.weight`, where they
      are learned (a global param, a point estimate) or have a prior (a global site);
    * global: `theta.0.weight`, a global param (a point estimate), or with `global_prior` a global site.

    Parameters that need no gradient stay as they are, as do buffers. The module is copied, and its weights never changed.

    Args:
        module: takes the rows of a client, (B, ...), to (B, K) or (B,).
        likelihood: from `hierfl.models.likelihood`, or `(output (C, B, K)) -> distribution`. Default `categorical()`.
        x: the field that goes in.
        y: the field of labels.
        local: which tensors are a client's own, by name: "all", "none", a regular expression found in the name, a sequence of
            prefixes, or a predicate.
        prior_loc: theta of local tensors: "learned", starting from the module's values (as FedABML, FedMAP and pFedMe do),
            "module" (those values, fixed), "zero", a number, or a distribution, a prior of each number of theta.
        prior_scale: s: a number, "learned", one for each weight, or a distribution, the prior of one scale a tensor. Default
            0.1, about the size of a dense layer's starting weights (our choice: see how sensitive the answer is).
        scale_start: where learned scales start.
        scale_link: learned scales are softplus of what is learned, or exp (FedABML's paper): see `hierfl.program.scale_links`.
        global_prior: of each number of a global tensor, Normal(0, 1) say; None: point estimates.
        centred: see `priors.varying`.
        local_reparameterisation: whether, under a guide that draws each weight from a Normal of its own (`mean_field`), dense
            layers draw what comes out of them, row by row, in place of weights (Kingma et al. 2015, arXiv:1506.02557): the same
            expectation with less noise in the gradient, and far fewer draws. Other layers, other guides and predictions draw
            weights as ever.

    Raises:
        ValueError: a module that mixes rows or draws noise of its own, a `local` that matches no tensor, a scale that is not > 0,
            local reparameterisation of weights that are not centred.

    >>> bayesian_network(nn.Linear(2, 3), local=["weight"], prior_scale="learned").__name__
    'bayesian_network'
    """
    if local_reparameterisation and not centred:
        raise ValueError(
            "local_reparameterisation is of weights that the guide draws: it needs centred=True"
        )
    net = frozen_copy(module)
    tensors = weights(net)
    priors = WeightPriors(
        tensors=tensors,
        own=own_names(list(tensors), local),
        loc=prior_loc,
        scale=prior_scale,
        scale_start=scale_start,
        scale_link=scale_link,
        shared=global_prior,
        centred=centred,
    )
    given_output = (
        likelihood
        if isinstance(likelihood, Likelihood)
        else Likelihood(likelihood)
        if likelihood
        else categorical()
    )

    def bayesian_network(batch: ClientBatch) -> None:
        (theta, scale), label = priors.above(), given_output()
        with batch.clients():
            own = priors.below(theta, scale)
            shared = {name: value for name, value in theta.items() if name not in own}
            spread = spread_of(own, "w.", batch.key) if local_reparameterisation else None
            output = apply(net, own, shared, field(batch, x), spread)
            with batch.data():
                observe(y, label(output), batch)

    return bayesian_network


@recorded
def network(
    module: nn.Module,
    *,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """y_kn ~ likelihood(f(x_kn; theta)): one network for all, a param a tensor, no prior. What FedAvg averages.

    The same as `bayesian_network(module, local="none")`, whose arguments and refusals it has.
    """
    return bayesian_network(module, likelihood=likelihood, x=x, y=y, local="none")
