"""Bayesian neural networks of any `nn.Module`, with local and global weight tensors."""

from collections.abc import Callable
from typing import Literal

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl.core.arguments import NameRule, names_by_rule
from hierfl.data.batch import ClientBatch
from hierfl.models.functional import apply, frozen_copy, weights
from hierfl.models.likelihood import Likelihood, as_likelihood, field, observe
from hierfl.models.priors import Prior, check_scale, given, is_distribution, varying
from hierfl.program.sites import Model, recorded
from hierfl.program.supports import ScaleLink, scale_constraint

Loc = Literal["zero", "module", "learned"] | Prior
Scale = Literal["learned", "client"] | Prior
SPREAD = "spread"  # the scale of a client's weights about theta, where each client has its own


@recorded
def bayesian_network(
    module: nn.Module,
    *,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
    local: NameRule = "all",
    prior_loc: Loc = "learned",
    prior_scale: Scale = 0.1,
    scale_start: float = 0.1,
    scale_link: ScaleLink = "softplus",
    global_prior: Prior | None = None,
    centered: bool = True,
) -> Model:
    """Build a Bayesian neural network from any `nn.Module`, with local and global weight tensors.

        y_kn ~ likelihood(f(x_kn; w_k, theta)),    w_k ~ Normal(theta, s^2)  for each local tensor

    A global tensor is theta itself. Every tensor is a site or param of its own; the weights are
    never flattened into one long vector.

    Sites and params, for a tensor `0.weight` of the module:

    * `w.0.weight` (C, 1, *shape), if the tensor is local: a local site, inside the clients plate.
      With `centered=False` the site is `w.0.weight_offset`, and `w.0.weight` is deterministic.
    * `theta.0.weight` (*shape): a global param (a point estimate), or a global site where it has a
      prior. If the theta of a local tensor is a known value, there is neither.
    * `scale.0.weight`, if the tensor is local: a global param (*shape) where s is "learned", a
      global site () where it has a prior.
    * `spread` (C, 1), a local param, if s is one for each client ("client").
    * the observed site, named after the field `y`, and the global sites of the likelihood, if any.

    Parameters that require no gradient keep their values, as do buffers. The module is copied; its
    own weights never change.

    Args:
        module: maps the rows of one client, (B, ...), to outputs (B, outputs) or (B,).
        likelihood: from `hierfl.models.likelihood`, or a function `(output (C, B, outputs)) ->
            distribution` of batch shape (C, B). Default `categorical()`.
        x: name of the field of inputs.
        y: name of the field of labels.
        local: the names of the local tensors: "all", "none", a regular expression searched for in
            each name, a sequence of prefixes, or a predicate `(name) -> bool`.
        prior_loc: theta of the local tensors: "learned" (a param that starts at the module's
            values, as in FedABML, FedMAP and pFedMe), "module" (fixed at those values), "zero", a
            number, or a distribution, the prior of each element of theta.
        prior_scale: s, a standard deviation > 0: a number, "learned" (one for each weight), a
            distribution, the prior of one scale per tensor, or "client" (one learned for each
            client, which keeps it). Default 0.1, about the size of a dense
            layer's initial weights. This is our choice: check how sensitive the results are to it.
        scale_start: initial value of learned scales, > 0.
        scale_link: "softplus" or "exp", the function from a real number to a learned scale; "exp"
            is that of the FedABML paper. See `hierfl.program.supports`.
        global_prior: prior of each element of a global tensor, for example Normal(0, 1). Default
            None: point estimates.
        centered: whether the local sites are the weights themselves or standardized offsets; see
            `priors.varying`.

    Raises:
        ValueError: the module mixes rows in another way than by nn.BatchNorm, draws noise of its
            own (dropout in training mode), has lazy parameters, or has none that requires a
            gradient; `local` matches no tensor; a scale is not > 0; or `prior_loc`, `prior_scale` or
            `scale_link` is not one of its allowed values.
        ProgramError: (at fit) the module has batch norm, and no `hierfl.methods.batch_normed` is
            around the method.

    >>> bayesian_network(nn.Linear(2, 3), local=["weight"], prior_scale="learned").__name__
    'bayesian_network'
    """
    _check_prior(prior_loc, prior_scale, scale_start)
    positive, net = scale_constraint(scale_link), frozen_copy(module)
    tensors, given_output = weights(net), as_likelihood(likelihood)
    local_names = names_by_rule(list(tensors), local, option="local")
    # guides start at the module's values where the prior's mean is a number: 0 has no gradient
    at_module = prior_loc == "zero" or not (
        isinstance(prior_loc, str) or is_distribution(prior_loc)
    )

    def theta_of(name: str, start: Tensor) -> Tensor:
        prior = prior_loc if name in local_names else global_prior
        if prior is None or (isinstance(prior, str) and prior == "learned"):
            return pyro.param(f"theta.{name}", start.clone)
        if isinstance(prior, str):
            return start if prior == "module" else torch.zeros_like(start)
        return given(f"theta.{name}", prior, tuple(start.shape), start=start)

    def scale_of(name: str, start: Tensor) -> Tensor:
        if isinstance(prior_scale, str):
            first = torch.full_like(start, scale_start)
            return pyro.param(f"scale.{name}", first, constraint=positive)
        return given(f"scale.{name}", prior_scale)

    def bayesian_network(batch: ClientBatch) -> None:
        theta, clients = {n: theta_of(n, v) for n, v in tensors.items()}, batch.num_clients
        own_names = [name for name in tensors if name in local_names]
        scale = {}
        if prior_scale != "client":
            scale = {name: scale_of(name, tensors[name]) for name in own_names}
        label = given_output()
        with batch.clients():
            if prior_scale == "client":
                first = torch.full((clients, 1), scale_start)
                spread = pyro.param(SPREAD, first, constraint=positive)
                scale = {n: spread.reshape(clients, 1, *[1] * theta[n].dim()) for n in own_names}
            own = {
                name: varying(
                    f"w.{name}",
                    theta[name],
                    s,
                    centered=centered,
                    start=tensors[name] if at_module else None,
                )
                for name, s in scale.items()
            }
            shared = {name: value for name, value in theta.items() if name not in own}
            output = apply(net, own, shared, field(batch, x), mask=batch.rows)
            with batch.data():
                observe(y, label(output), batch)

    return bayesian_network


def _check_prior(loc: Loc, scale: Scale, scale_start: float) -> None:
    for name, value, words in (
        ("prior_loc", loc, ("zero", "module", "learned")),
        ("prior_scale", scale, ("learned", "client")),
    ):
        if isinstance(value, str) and value not in words:
            choice = ", ".join(map(repr, words))
            raise ValueError(
                f"{name} is {value!r}: it must be {choice}, a number or a distribution"
            )
    check_scale("scale_start", scale_start)
    if not isinstance(scale, str):
        check_scale("prior_scale", scale)


@recorded
def network(
    module: nn.Module,
    *,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """Build one network for all clients, without a prior: the model that FedAvg trains.

        y_kn ~ likelihood(f(x_kn; theta))

    Every tensor is a global param, `theta.<tensor>` (*shape). The model is
    `bayesian_network(module, local="none")`, which documents the arguments and the errors.
    """
    return bayesian_network(module, likelihood=likelihood, x=x, y=y, local="none")


def batch_norm_network(
    module: nn.Module,
    *,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """Build the network of `hierfl.methods.fedbn`, which keeps its batch normalization at each client.

    It is `network(module)`; of layers nn.BatchNorm1d, 2d and 3d the statistics are the client's.
    """
    return network(module, likelihood=likelihood, x=x, y=y)
