"""Supports of sites: maps of real numbers onto those that torch has none for, and sites that have none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import pyro.distributions as dist
import torch
import torch.distributions.constraints as constraints
from pyro.poutine.runtime import apply_stack
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import biject_to, transform_to
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform

from hierfl.program.program import ProgramError, refuse_first
from hierfl.program.sites import of_scalars
from hierfl.program.traces import (
    Center,
    Site,
    in_data,
    is_enumerable,
    is_latent,
)


def _of_components(constraint: Any) -> Transform:
    """Return the map onto the support of a mixture's components, which is that of the mixture."""
    base = constraint.base_constraint
    if any(isinstance(bound, Tensor) and bound.dim() for bound in vars(base).values()):
        raise NotImplementedError("components of several supports have no map in common")
    return biject_to(base)


class LogCholesky(Transform):
    """Covariance matrices L L' of n (n + 1) / 2 numbers: L by rows, its diagonal as logs.

    log |d Sigma / d x| = n log 2 + sum_i (n + 1 - i) x_ii,    i = 0, ..., n - 1, entries below the
    diagonal counted once (Pinheiro and Bates 1996, Stat. Comput. 6).
    """

    domain = constraints.real_vector
    codomain = constraints.positive_definite
    bijective = True

    def __eq__(self, other: object) -> bool:
        """All are the same."""
        return isinstance(other, LogCholesky)

    __hash__ = Transform.__hash__

    def _call(self, x: Tensor) -> Tensor:
        n = _order(x.shape[-1])
        row, column = torch.tril_indices(n, n, device=x.device)
        place = torch.nn.functional.one_hot(row * n + column, n * n).to(x)
        tril = (torch.where(row == column, x.exp(), x) @ place).reshape(*x.shape[:-1], n, n)
        return tril @ tril.mT

    def _inverse(self, y: Tensor) -> Tensor:
        tril = torch.linalg.cholesky(y)
        row, column = torch.tril_indices(*y.shape[-2:], device=y.device)
        entries: Tensor = tril[..., row, column]
        return torch.where(row == column, entries.abs().log(), entries)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log Jacobian, without the event's dimension."""
        n = _order(x.shape[-1])
        at = torch.arange(n, device=x.device)
        diagonal = x[..., at * (at + 3) // 2]
        return n * math.log(2.0) + (diagonal * (n + 1 - at)).sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        """Return the shape of matrices."""
        n = _order(shape[-1])
        return torch.Size((*shape[:-1], n, n))

    def inverse_shape(self, shape: Any) -> torch.Size:
        """Return the shape of their numbers."""
        return torch.Size((*shape[:-2], shape[-1] * (shape[-1] + 1) // 2))


def _order(numbers: int) -> int:
    """Return n of n (n + 1) / 2 numbers."""
    return (math.isqrt(8 * numbers + 1) - 1) // 2


def register_maps() -> None:
    """Let `biject_to` know the maps; newer releases of torch have a type for mixtures' support."""
    biject_to.register(type(constraints.positive_definite), lambda constraint: LogCholesky())
    if hasattr(constraints, "MixtureSameFamilyConstraint"):
        biject_to.register(constraints.MixtureSameFamilyConstraint, _of_components)
        transform_to.register(constraints.MixtureSameFamilyConstraint, _of_components)


FINITE = ("Bernoulli", "Categorical", "Binomial", "BetaBinomial")  # of which scalars are summed out
# how a distribution fails that does not implement something
LACKING = (NotImplementedError, TypeError, AssertionError, AttributeError)


class OfRows(ProgramError):
    """A latent site in the data plate: the program is read once it is integrated out."""


class Enumerable(ProgramError):
    """A discrete latent site of finite support: the program is read once it is summed out."""


def check_support(site: Site, *, integrates: bool = False) -> None:
    """Refuse a latent site that no vector of real numbers can stand for; `integrates`: also one of rows."""
    name, fn = site["name"], site["fn"]
    if not integrates and in_data(site) and not is_enumerable(site):
        raise OfRows(f"site '{name}' is latent in the data plate")
    support = support_of(name, fn)
    if getattr(support, "is_discrete", False) and is_enumerable(site):
        raise Enumerable(f"site '{name}' is discrete")
    refuse_first(_faults_of_support(name, kind_of(fn), support))


def _faults_of_support(name: str, kind: str, support: Any) -> Iterator[str]:
    if getattr(support, "is_discrete", False) and kind in FINITE:
        yield (
            f"site '{name}' is a vector of discrete sites ({kind}): sample each of its entries as a "
            "site of its own, in a loop of Python or in a plate"
        )
    if getattr(support, "is_discrete", False):
        yield (
            f"site '{name}' is discrete ({kind}) and latent, with no finite support to sum it out "
            "over: give it one, such as a Binomial's, or observe it"
        )
    if kind == "Delta":
        yield (
            f"site '{name}' is latent and drawn from a Delta, which fixes its value: write it as "
            f"pyro.deterministic('{name}', value)"
        )
    if kind in ("VonMises", "SineBivariateVonMises", "SineSkewed"):
        yield (
            f"site '{name}' ({kind}) is a latent angle, whose density repeats forever on the real "
            "line, so there is no posterior: sample two Normals u and v instead, and use "
            "torch.atan2(v, u); or sum the angle out"
        )
    try:
        biject_to(support)
    except NotImplementedError:
        yield (
            f"site '{name}' ({kind}) is latent, and no map from real numbers onto its support is "
            "known, in which guides and NUTS move: build it from sites that have one, such as "
            "Normals and their transforms, with pyro.deterministic"
        )


class Mapped(dist.TransformedDistribution):  # type: ignore[misc]
    """A map of scalars whose support is the image of the base's: torch's is all that the map may reach."""

    @property
    def support(self) -> Constraint:
        """The interval between the images of the base's ends."""
        low, high = _ends(of_scalars(self.base_dist.support))
        for transform in self.transforms:
            rises, at = torch.as_tensor(transform.sign > 0), _ends(transform.domain)
            to = _ends(transform.codomain)
            # maps such as a logit are clamped at the ends of their domains
            first = torch.where(low == at[0], torch.where(rises, *to), transform(low))
            last = torch.where(high == at[1], torch.where(rises, *to[::-1]), transform(high))
            low, high = torch.where(rises, first, last), torch.where(rises, last, first)
        above, below = bool(low.isfinite().all()), bool(high.isfinite().all())
        image: Constraint = constraints.interval(low, high) if above and below else constraints.real
        if above != below:
            image = constraints.greater_than(low) if above else constraints.less_than(high)
        return image


def _ends(support: Constraint) -> tuple[Tensor, Tensor]:
    """Return the ends of an interval."""
    low, high = (
        getattr(support, "lower_bound", -math.inf),
        getattr(support, "upper_bound", math.inf),
    )
    return torch.as_tensor(low), torch.as_tensor(high)


def _is_monotone(transform: Transform) -> bool:
    """Return whether a map is of scalars, and says whether it rises or falls."""
    try:
        return not transform.domain.event_dim and transform.bijective and transform.sign is not None
    except NotImplementedError:
        return False


def mapped_of(fn: dist.TransformedDistribution) -> Mapped | None:
    """Return a map of scalars with the support that it has; None of what has no ends to map."""
    base = fn.base_dist
    while isinstance(base, torch.distributions.Independent | dist.ExpandedDistribution):
        base = base.base_dist
    if type(base) is dist.TransformedDistribution:
        base = mapped_of(base)
    monotone = all(map(_is_monotone, fn.transforms))
    if base is None or base.event_shape or base.support.is_discrete or not monotone:
        return None
    made = Mapped(base.expand(fn.shape()), list(fn.transforms))
    return made.to_event(len(fn.event_shape)) if fn.event_shape else made


def check_of_pyro(site: Site) -> None:
    """Refuse a distribution that `pyro.sample` cannot call, as those of torch."""
    if not callable(site["fn"]):
        fix = "import pyro.distributions in the place of torch.distributions"
        what = f"site '{site['name']}' ({kind_of(site['fn'])})"
        raise ProgramError(f"{what} is not a Pyro distribution: {fix}")


def check_density(name: str, site: Site) -> None:
    """Refuse a site whose distribution cannot compute its log density."""
    value = torch.as_tensor(site["value"])
    try:  # booleans, which the program is given as numbers, raise what a lacking density raises
        site["fn"].log_prob(value.float() if value.dtype == torch.bool else value)
    except (*LACKING, ValueError, RuntimeError) as error:
        if isinstance(error, LACKING) or is_latent(site):
            raise ProgramError(
                f"site '{name}' ({kind_of(site['fn'])}) has no log density at its value: use "
                "another distribution, or write the density out as pyro.factor"
            ) from error


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


def in_words(support: Constraint) -> str:
    """Return a support in words, such as "0..2"."""
    if support is constraints.boolean:
        return "0 and 1"
    low, high = getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)
    if getattr(support, "is_discrete", False) and low is not None:
        return f"{low}..{high}" if high is not None else f"{low}, {int(low) + 1}, ..."
    return str(support)


register_maps()


ScaleLink = Literal["softplus", "exp"]
_LINKS: dict[str, Constraint] = {
    "softplus": dist.constraints.softplus_positive,
    "exp": dist.constraints.positive,
}


def scale_constraint(link: ScaleLink) -> Constraint:
    """Return the constraint of a scale that is learned as softplus(r) = log(1 + e^r) or as exp(r).

    Above 0.1 a long step in r makes exp(r) explode, while softplus(r) moves as r does.

    >>> scale_constraint("exp")
    GreaterThan(lower_bound=0.0)
    """
    if link not in _LINKS:
        raise ValueError(f"scale_link is {link!r}; it must be {' or '.join(map(repr, _LINKS))}")
    return _LINKS[link]


class PriorCenters(Center):
    """Sets latent sites to the centers of their priors; refuses one without continuous support."""

    def _pyro_sample(self, msg: Site) -> None:
        check_of_pyro(msg)
        if not msg["done"] and not msg["is_observed"] and not isinstance(msg["fn"], _Subsample):
            check_support(msg)
        super()._pyro_sample(msg)
