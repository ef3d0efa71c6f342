"""Programs under a handler: numbers of one type, masked values filled, a site that all programs have."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.reparam.reparam import Reparam
from pyro.poutine.messenger import Messenger
from pyro.poutine.reparam_messenger import ReparamMessenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor, equal
from torch.distributions import AffineTransform, ExpTransform, biject_to
from torch.distributions.transforms import (
    ComposeTransform,
    IndependentTransform,
    _InverseTransform,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hierfl.core.process import set_to
from hierfl.data.batch import ClientBatch, in_double
from hierfl.program.handlers import TakesWeights, untouched_store
from hierfl.program.sites import COMMON, Model, of_scalars
from hierfl.program.supports import mapped_of
from hierfl.program.traces import (
    AtSites,
    Center,
    Near,
    Site,
    counts_of,
    in_clients,
    is_latent,
    is_likelihood,
    leaves_nan_out,
    samples,
)

_PRIORS_ALONE = ContextVar("priors_alone", default=False)
# units of the real line, by which global sites start off their centers
AWAY = 0.0, 0.1, 0.2, 0.4, 0.8
OTHER_DTYPE = "scalar type|dtype|expected .* to have type|result type"  # in errors of torch


class _OneDtype(TorchFunctionMode):
    """A mode in which what torch refuses for its operands' types is computed in one floating type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if not re.search(OTHER_DTYPE, str(error)):
                raise
        to = partial(torch.Tensor.to, dtype=self.dtype)
        args, kwargs = tree_map_only(Tensor, to, (args, kwargs or {}))
        return func(*args, **kwargs)


class _SitesOfOneDtype(Messenger):
    """Gives distributions and values of sites one floating type, whatever that of their constants."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def _pyro_sample(self, msg: Site) -> None:
        if not isinstance(msg["fn"], _Subsample):
            msg["fn"], msg["value"] = self.cast(msg["fn"]), self.cast(msg["value"])

    def cast(self, value: Any) -> Any:
        """Return a floating tensor, or a distribution of such, in the type."""
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if isinstance(value, list | tuple):
            return type(value)(map(self.cast, value))
        if not isinstance(value, torch.distributions.Distribution | torch.distributions.Transform):
            return value
        other = copy.copy(value)
        vars(other).update({name: self.cast(own) for name, own in vars(value).items()})
        return other


def with_defined_start(model: Model, batch: ClientBatch) -> Model:
    """Start global sites off their priors' centers where the density is no number there, as of 1 / x at 0.

    Made-up rows decide, so that where a program starts tells nothing of a client.
    """
    made_up = [
        {n: torch.ones_like(v) for n, v in of.items()} for of in (batch.fields, batch.client_fields)
    ]
    rows = replace(batch, fields=made_up[0], client_fields=made_up[1])
    for away in AWAY:
        at = Near(away, 0, global_sites=True)
        try:
            with untouched_store(), pyro.validation_enabled(False), Center(), at:
                sites = dict(samples(poutine.trace(model).get_trace(rows)))
                densities = [site["fn"].log_prob(site["value"]) for site in sites.values()]
        except Exception:  # a mistake in the program is explained where it is read
            return model
        if not any(bool(density.isnan().any()) for density in densities):
            moved = {n: s["value"] for n, s in sites.items() if is_latent(s) and not in_clients(s)}
            return _started(model, moved) if away else model
    return model


def _started(model: Model, starts: Mapping[str, Tensor]) -> Model:
    def start(site: Site) -> None:
        if site["name"] in starts:
            site["infer"] = {**site["infer"], "start": starts[site["name"]]}

    return under(model, lambda _: AtSites(start))


class _Typed(TakesWeights, Center):
    """Sets continuous sites to their centers, and casts latent values and params, where they are to be."""

    def __init__(self, dtype: torch.dtype, *, casts: bool) -> None:
        super().__init__()
        self.dtype, self.casts = dtype, casts
        self.has_other_params = False

    def _pyro_sample(self, msg: Site) -> None:
        if is_latent(msg) and not getattr(msg["fn"].support, "is_discrete", False):
            super()._pyro_sample(msg)

    def _pyro_post_sample(self, msg: Site) -> None:
        if self.casts and is_latent(msg) and msg["value"].is_floating_point():
            msg["value"] = msg["value"].to(self.dtype)

    def _pyro_post_param(self, msg: Site) -> None:
        value = msg["value"].detach()
        self.has_other_params |= not self.casts and value.dtype != self.dtype
        msg["value"] = value.to(self.dtype) if self.casts else value
        super()._pyro_post_param(msg)


def mixes_dtypes(model: Model, batch: ClientBatch) -> bool:
    """Return whether torch refuses a program's types, on rows as they are or in double precision.

    A network whose own weights are of another type than the rows is to be converted by its user.
    """
    for rows, casts in ((batch, False), (in_double(batch), True)):
        typed = _Typed(rows.counts.dtype, casts=casts)
        with untouched_store(), pyro.validation_enabled(False), typed:
            try:
                poutine.trace(model).get_trace(rows).compute_log_prob()
            except Exception as error:  # all others are found where the program is read
                if isinstance(error, RuntimeError) and re.search(OTHER_DTYPE, str(error)):
                    return not typed.has_other_params
    return False


def with_one_dtype(model: Model) -> Model:
    """Return the model with each computation in the floating type of its rows."""

    @wraps(model, updated=())
    def typed(batch: ClientBatch) -> Any:
        with _OneDtype(batch.counts.dtype), _SitesOfOneDtype(batch.counts.dtype):
            return model(batch)

    return typed


def _fill(site: Site) -> None:
    """Fill observed values that no mask counts, which may be NaN, by a value inside their support."""
    value = site["value"]
    if not (site["is_observed"] and isinstance(value, Tensor) and value.is_floating_point()):
        return
    fn, counts = counts_of(site)
    if counts is not None and not leaves_nan_out(fn):
        is_counted = (counts > 0.0)[(..., *[None] * fn.event_dim)]
        site["value"] = torch.where(is_counted | value.isfinite(), value, _inside(fn, value))


def _inside(fn: Any, like: Tensor) -> Tensor:
    """Return a value inside the support of a distribution."""
    if getattr(fn.support, "is_discrete", False):
        return torch.zeros_like(like)
    transform = biject_to(fn.support)
    value: Tensor = transform(torch.zeros(transform.inverse_shape(like.shape), dtype=like.dtype))
    return value


def _make_plain(site: Site) -> None:
    """Give a latent site that is a map of others the Normal or log-normal, or the support, that it has."""
    if is_latent(site) and (plain := plain_of(site["fn"])) is not None:
        site["fn"] = plain


def plain_of(fn: Any) -> Any:
    """Return a map of a distribution as a Normal or log-normal, or with the support it has; or None."""
    if isinstance(fn, torch.distributions.Independent):
        inner = plain_of(fn.base_dist)
        return None if inner is None else inner.to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution):
        inner = plain_of(fn.base_dist)
        return None if inner is None else inner.expand(fn.batch_shape)
    if type(fn) is not dist.TransformedDistribution:
        return None
    base, events = fn.base_dist, len(fn.event_shape)
    while isinstance(base, torch.distributions.Independent | dist.ExpandedDistribution):
        base = base.base_dist
    *moves, last = _parts_of(fn.transforms) or [None]
    is_log = isinstance(last, ExpTransform)
    moves = moves if is_log else [*moves, last]
    is_normal = isinstance(base, torch.distributions.Normal)
    if not (is_normal and all(_is_affine(move) or _is_turn(move, base.scale) for move in moves)):
        return mapped_of(fn)
    loc, scale = base.loc, base.scale
    for move in moves:
        if _is_affine(move):
            loc, scale = move.loc + move.scale * loc, torch.as_tensor(move.scale).abs() * scale
        else:
            loc = move(loc)
    family: Any = dist.LogNormal if is_log else dist.Normal
    made = family(loc, scale).expand(fn.shape())
    return made.to_event(events) if events else made


def _is_affine(transform: Any) -> bool:
    return isinstance(transform, AffineTransform)


def _is_turn(transform: Any, scale: Tensor) -> bool:
    """Return whether it is an orthonormal matrix, of entries that have one scale."""
    turns = dist.transforms.DiscreteCosineTransform, dist.transforms.HaarTransform
    is_turn = isinstance(transform, turns) and transform.dim == -1
    is_even = scale.dim() > 0 and scale.stride(-1) == 0
    return is_turn and is_even and not getattr(transform, "smooth", 0.0)


def _parts_of(transforms: Iterable[Any]) -> list[Any]:
    """Return the transforms that others are made of, one after the other; the identity has none."""
    parts: list[Any] = []
    for transform in transforms:
        match transform:
            case ComposeTransform(parts=own):
                parts += _parts_of(own)
            case IndependentTransform(base_transform=base):
                parts += _parts_of([base])
            case _InverseTransform() if not _parts_of([transform.inv]):
                pass
            case _:
                parts.append(transform)
    return parts


def has_mapped_sites(trace: Any) -> bool:
    """Return whether a latent site is written as a transform of scalars."""
    return any(plain_of(site["fn"]) is not None for _, site in samples(trace) if is_latent(site))


def with_plain_sites(model: Model) -> Model:
    """Return the model with the supports, or the Normals, that latent sites are maps onto."""
    return under(model, lambda _: AtSites(_make_plain))


def sites_to_float(trace: Any) -> frozenset[str]:
    """Return the observed sites that need integers or booleans as floats, such as a Bernoulli's."""
    names = set()
    for name, site in samples(trace):
        value, fn = site["value"], site["fn"]
        if not is_likelihood(site) or not isinstance(value, Tensor):
            continue
        if value.is_floating_point():
            of_bernoulli = isinstance(getattr(fn, "base_dist", fn), dist.Bernoulli)
            picky = of_bernoulli and not _scores(site, value.long())
        else:
            as_float = value.to(torch.get_default_dtype())
            picky = not _scores(site, value) and _scores(site, as_float)
        if picky:
            names.add(name)
    return frozenset(names)


def _scores(site: Site, value: Tensor) -> bool:
    try:
        site["fn"].log_prob(value)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False
    return True


def with_float_labels(model: Model, sites: Iterable[str]) -> Model:
    """Return the model with the labels of some sites observed as floats."""
    chosen = frozenset(sites)

    def to_float(dtype: torch.dtype, site: Site) -> None:
        if site["name"] in chosen and site["is_observed"]:
            value = torch.as_tensor(site["value"])
            site["value"] = value if value.is_floating_point() else value.to(dtype)

    return under(model, lambda batch: AtSites(partial(to_float, batch.counts.dtype)))


def with_factors(model: Model, sites: frozenset[str]) -> Model:
    """Return the model with factors in the place of observed sites of several fields, of which any may be unknown."""

    def to_factor(site: Site) -> None:
        if site["name"] in sites:
            density = dist.Unit(site["fn"].log_prob(site["value"]))
            site["fn"], site["value"] = density, density.sample()
            site["infer"] = {**(site["infer"] or {}), "is_auxiliary": True}

    return under(model, lambda _: AtSites(to_factor))


def with_filled_labels(model: Model) -> Model:
    """Return the model with numbers in the place of observed values that are NaN and masked."""
    return under(model, lambda _: AtSites(_fill))


def under(model: Model, handler_of: Callable[[ClientBatch], Messenger]) -> Model:
    """Return the model under a handler made for each batch."""

    @wraps(model, updated=())
    def handled(batch: ClientBatch) -> Any:
        with handler_of(batch):
            return model(batch)

    return handled


def with_common_site(model: Model) -> Model:
    """Return a program without global sites with one that nothing depends on."""

    @wraps(model, updated=())
    def joined(batch: ClientBatch) -> Any:
        pyro.sample(COMMON, dist.Normal(0.0, 1.0))
        return model(batch)

    return joined


def add_factor(
    name: str, total: Callable[[], Tensor], batch: ClientBatch, *, by_row: bool = True
) -> None:
    """Add a term to a program's log density, (C, B) by row or (C, 1) by client.

    It is not computed where priors alone are asked for.
    """
    if _PRIORS_ALONE.get():
        return
    with batch.clients(), batch.data() if by_row else nullcontext():
        pyro.factor(name, total())


def priors_alone() -> AbstractContextManager[None]:
    """Leave out what `add_factor` adds to the programs that run meanwhile."""
    return set_to(_PRIORS_ALONE, True)


def has_bounds(trace: Any) -> bool:
    """Return whether the support of a latent site ends at a tensor, as a Uniform's."""
    return any(_bounds_of(site) for _, site in samples(trace) if is_latent(site))


def moving_supports(trace: Any, other: Any) -> frozenset[str]:
    """Return the latent sites whose supports differ from client to client, or between two traces."""
    return frozenset(
        name
        for name, site in samples(trace)
        if is_latent(site) and (_differ(site, other.nodes[name]) or _differ_by_client(site))
    )


def _bounds_of(site: Site) -> list[Tensor]:
    support = of_scalars(site["fn"].support)
    return [v for v in vars(support).values() if isinstance(v, Tensor)]


def _differ(site: Site, other: Site) -> bool:
    return not all(map(equal, _bounds_of(site), _bounds_of(other)))


def _differ_by_client(site: Site) -> bool:
    dim = 2 + site["fn"].event_dim
    bounds = [v for v in _bounds_of(site) if in_clients(site) and v.dim() >= dim]
    return any(bool((v != v.narrow(-dim, 0, 1)).any()) for v in bounds)


class _OnLine(Reparam):
    """Samples a site on the real line, from where it is mapped onto its support."""

    def apply(self, msg: Any) -> Any:
        fn, to_support = msg["fn"], biject_to(msg["fn"].support)
        free = dist.TransformedDistribution(fn, [to_support.inv])
        value = to_support(pyro.sample(f"{msg['name']}_free", free))
        made = dist.Delta(value, event_dim=fn.event_dim).mask(False)
        return {"fn": made, "value": value, "is_observed": True}


def with_fixed_supports(model: Model, names: Iterable[str]) -> Model:
    """Return the model with sites of moving supports as maps of sites on the real line."""
    config: dict[str, Reparam] = dict.fromkeys(names, _OnLine())
    return under(model, lambda _: ReparamMessenger(config))
