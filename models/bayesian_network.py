"""Bayesian neural networks of any `nn.Module`, with local and global weight tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl.core.arguments import NameRule, names_by_rule
from hierfl.data.batch import ClientBatch
from hierfl.models.functional import apply, frozen_copy, spread_of, weights
from hierfl.models.likelihood import Likelihood, as_likelihood, field, observe
from hierfl.models.priors import Prior, check_scale, given, is_distribution, varying
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model, ScaleLink, scale_constraint

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
    local_reparameterization: bool = False,
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
            is that of the FedABML paper. See `hierfl.program.sites`.
        global_prior: prior of each element of a global tensor, for example Normal(0, 1). Default
            None: point estimates.
        centered: whether the local sites are the weights themselves or standardized offsets; see
            `priors.varying`.
        local_reparameterization: whether dense layers sample their outputs, row by row, instead of
            their weights (Kingma et al. 2015, arXiv:1506.02557). The expectation is the same, with
            less noise in the gradient and far fewer random numbers. This needs a guide that gives
            each weight an independent Normal (`mean_field`); other layers, other guides and
            predictions sample weights as usual.

    Raises:
        ValueError: the module mixes rows in another way than by nn.BatchNorm, draws noise of its
            own (dropout in training mode), has lazy parameters, or has none that requires a
            gradient; `local` matches no tensor; a scale is not > 0; `prior_loc`, `prior_scale` or
            `scale_link` is not one of its allowed values; or `local_reparameterization` is set and
            `centered` is not.
        ProgramError: (at fit) the module has batch norm, and no `hierfl.methods.batch_normed` is
            around the method.

    >>> bayesian_network(nn.Linear(2, 3), local=["weight"], prior_scale="learned").__name__
    'bayesian_network'
    """
    if local_reparameterization and not centered:
        raise ValueError(
            "local_reparameterization is set and centered is False: it needs the weights "
            "themselves as sites; set centered=True"
        )
    net = frozen_copy(module)
    tensors = weights(net)
    priors = WeightPriors(
        tensors=tensors,
        own=names_by_rule(list(tensors), local, option="local"),
        loc=prior_loc,
        scale=prior_scale,
        scale_start=scale_start,
        scale_link=scale_link,
        shared=global_prior,
        centered=centered,
    )
    given_output = as_likelihood(likelihood)

    def bayesian_network(batch: ClientBatch) -> None:
        (theta, scale), label = priors.above(), given_output()
        with batch.clients():
            own = priors.below(theta, scale, batch.num_clients)
            shared = {name: value for name, value in theta.items() if name not in own}
            spread = spread_of(own, "w.", batch.key) if local_reparameterization else None
            output = apply(net, own, shared, field(batch, x), spread, mask=batch.rows)
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
    """Build one network for all clients, without a prior: the model that FedAvg trains.

        y_kn ~ likelihood(f(x_kn; theta))

    Every tensor is a global param, `theta.<tensor>` (*shape). The model is
    `bayesian_network(module, local="none")`, which documents the arguments and the errors.
    """
    return bayesian_network(module, likelihood=likelihood, x=x, y=y, local="none")


@dataclass(frozen=True, eq=False)
class WeightPriors:
    """Priors of all weight tensors: local w_k ~ Normal(theta, s^2), global ones theta alone."""

    tensors: Mapping[str, Tensor]  # name -> the module's own values
    own: frozenset[str]  # names of the local tensors
    loc: Loc
    scale: Scale
    scale_start: float
    scale_link: ScaleLink
    shared: Prior | None  # of theta of the global tensors; None: point estimates
    centered: bool

    def __post_init__(self) -> None:
        for name, value, words in (
            ("prior_loc", self.loc, ("zero", "module", "learned")),
            ("prior_scale", self.scale, ("learned", "client")),
        ):
            if isinstance(value, str) and value not in words:
                choice = ", ".join(map(repr, words))
                raise ValueError(
                    f"{name} is {value!r}: it must be {choice}, a number or a distribution"
                )
        check_scale("scale_start", self.scale_start)
        scale_constraint(self.scale_link)
        if not isinstance(self.scale, str):
            check_scale("prior_scale", self.scale)

    def above(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Declare the global params and sites: theta of each tensor, and s of local ones."""
        return {name: self._theta(name) for name in self.tensors}, {
            name: self._scale(name) for name in self.tensors if name in self.own
        }

    def _theta(self, name: str) -> Tensor:
        start, prior = self.tensors[name], self.loc if name in self.own else self.shared
        if prior is None or (isinstance(prior, str) and prior == "learned"):
            return pyro.param(f"theta.{name}", start.clone)
        if isinstance(prior, str):
            return start if prior == "module" else torch.zeros_like(start)
        return given(f"theta.{name}", prior, tuple(start.shape), start=start)

    def _scale(self, name: str) -> Tensor:
        if self.scale == "client":
            return torch.ones(())
        if isinstance(self.scale, str):
            start = torch.full_like(self.tensors[name], self.scale_start)
            return pyro.param(f"scale.{name}", start, constraint=scale_constraint(self.scale_link))
        return given(f"scale.{name}", self.scale)

    def below(
        self, theta: Mapping[str, Tensor], scale: Mapping[str, Tensor], clients: int
    ) -> dict[str, Tensor]:
        """Sample the local tensors, (C, 1, *shape) each. Call it inside the clients plate."""
        if self.scale == "client":
            start = torch.full((clients, 1), self.scale_start)
            spread = pyro.param(SPREAD, start, constraint=scale_constraint(self.scale_link))
            scale = {n: spread.reshape(clients, 1, *(1,) * theta[n].dim()) for n in scale}
        # Guides start at the module's values where the prior's mean is a number: 0 has no gradient.
        has_number = (
            self.loc == "zero" if isinstance(self.loc, str) else not is_distribution(self.loc)
        )
        return {
            name: varying(
                f"w.{name}",
                theta[name],
                s,
                centered=self.centered,
                start=self.tensors[name] if has_number else None,
            )
            for name, s in scale.items()
        }
