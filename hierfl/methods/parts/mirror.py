"""Mirror descent for the guide `delta`: natural parameters step along the gradient in the means.

    v <- v - lr grad_x loss(v(x))      v natural parameters, x = x(v) the means

For a Gaussian of unit precision the two are one, and this is gradient descent.
"""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.distributions import transform_to
from torch.distributions.constraints import Constraint

from hierfl.method import slope
from hierfl.models.bregman import keep_inside
from hierfl.program.program import Params, Program

Loss = Callable[[Params], Tensor]


def mirror_gradient(program: Program, loss: Loss, at: Params) -> Params:
    """Return the gradient of a loss in the means, at natural parameters `at`."""
    to_mean = {f"{site.name}.at": site.transform for site in program.latents.local_block.sites}
    means = {name: to_mean[name](value) for name, value in at.items()}
    gradient, _ = slope(lambda x: loss({name: to_mean[name].inv(x[name]) for name in x}), means)
    return gradient


def domains_of_sites(program: Program) -> dict[str, Constraint]:
    """Return the domain of each local param."""
    sites = program.latents.local_block.sites
    return {f"{site.name}.at": site.transform.domain for site in sites}


def domains_of_params(program: Program) -> dict[str, Constraint]:
    """Return the domain of each unconstrained global param; natural parameters can have bounds."""
    specs = (spec for spec in program.params if not spec.is_local)
    return {spec.name: transform_to(spec.constraint).domain for spec in specs}


def kept_inside(domains: Mapping[str, Constraint], new: Params, before: Params) -> Params:
    """Return params, those that a step has moved out of their domain put halfway to the bound."""
    return {name: keep_inside(domains[name], v, before[name]) for name, v in new.items()}


def moved_inside(
    domains: Mapping[str, Constraint], params: Params, by: Params, rate: float
) -> Params:
    """Return params - rate * by, inside their domains."""
    return kept_inside(domains, {n: v - rate * by[n] for n, v in params.items()}, params)
