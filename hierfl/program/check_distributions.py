"""What a site's distribution must have: a support, a log density, copies over plates."""

from __future__ import annotations

from typing import Any

import torch.distributions.constraints as constraints
from pyro.poutine.runtime import apply_stack
from torch import Tensor
from torch.distributions import biject_to, transform_to
from torch.distributions.transforms import Transform

from hierfl.program.program import ProgramError
from hierfl.program.traces import Site, is_latent

# how a distribution fails that does not implement something
LACKING = (NotImplementedError, TypeError, AssertionError, AttributeError)


def _of_components(constraint: Any) -> Transform:
    """Return the map onto the support of a mixture's components, which is that of the mixture."""
    base = constraint.base_constraint
    if any(isinstance(bound, Tensor) and bound.dim() for bound in vars(base).values()):
        raise NotImplementedError("components of several supports have no map in common")
    return biject_to(base)


# torch gives the support of a mixture a type of its own, which it knows no map for; earlier
# releases do not
if hasattr(constraints, "MixtureSameFamilyConstraint"):
    biject_to.register(constraints.MixtureSameFamilyConstraint, _of_components)
    transform_to.register(constraints.MixtureSameFamilyConstraint, _of_components)


def check_support(site: Site) -> None:
    """Refuse a latent site that no vector of real numbers can stand for."""
    name, fn = site["name"], site["fn"]
    kind = kind_of(fn)
    support = support_of(name, fn)
    if getattr(support, "is_discrete", False):
        raise ProgramError(
            f"site '{name}' is discrete ({kind}) and latent, which no guide of hierfl supports: "
            "sum it out in the likelihood (dist.MixtureSameFamily), or observe it"
        )
    if kind == "Delta":
        raise ProgramError(
            f"site '{name}' is latent and drawn from a Delta, which fixes its value: write it as "
            f"pyro.deterministic('{name}', value)"
        )
    try:
        biject_to(support)
    except NotImplementedError as error:
        raise ProgramError(
            f"site '{name}' ({kind}) is latent, and no map from real numbers onto its support is "
            "known, in which guides and NUTS move: build it from sites that have one, such as "
            "Normals and their transforms, with pyro.deterministic"
        ) from error


def check_density(name: str, site: Site) -> None:
    """Refuse a site whose distribution cannot compute its log density."""
    try:
        site["fn"].log_prob(site["value"])
    except LACKING as error:
        raise _no_density(name, site) from error
    except (ValueError, RuntimeError) as error:
        if not is_latent(site):
            return  # of a label that does not fit, which the checks of labels name
        raise _no_density(name, site) from error


def _no_density(name: str, site: Site) -> ProgramError:
    return ProgramError(
        f"site '{name}' ({kind_of(site['fn'])}) has no log density at its value: use another "
        "distribution, or write the density out as pyro.factor"
    )


def refuse_in_sample(error: Exception) -> None:
    """Name the site of an error inside `pyro.sample` where its distribution lacks something."""
    msg = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is apply_stack.__code__:
            msg = trace.tb_frame.f_locals.get("msg") or trace.tb_frame.f_locals.get("initial_msg")
        trace = trace.tb_next
    if msg is None or msg["type"] != "sample" or not isinstance(error, LACKING):
        return
    raise ProgramError(
        f"site '{msg['name']}' ({kind_of(msg['fn'])}) cannot be repeated over its plates, or "
        "cannot be drawn from: use a distribution with `expand` and `sample`, or write its "
        "density out as pyro.factor"
    ) from error


def kind_of(fn: Any) -> str:
    """Return the name of a distribution, without what expands, masks or declares events of it."""
    while hasattr(fn, "base_dist") and type(fn).__name__ in (
        "ExpandedDistribution",
        "Independent",
        "MaskedDistribution",
    ):
        fn = fn.base_dist
    return type(fn).__name__


def support_of(name: str, fn: Any) -> Any:
    """Return the support of a site's distribution; a ProgramError where it has none."""
    try:
        return fn.support
    except NotImplementedError as error:
        raise ProgramError(
            f"site '{name}' ({kind_of(fn)}) has no support, the set its values lie in: give its "
            "class a property `support`, or use another distribution"
        ) from error
