"""Effect handlers that run a program as a function of params, sites and keyed noise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.distributions as torch_dist
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor, nn
from torch.distributions import transform_to
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hierfl.core import noise
from hierfl.core.process import replaced
from hierfl.data.batch import ClientBatch
from hierfl.program.carried import CARRIED
from hierfl.program.mixture import Mixture
from hierfl.program.sites import Model, Values
from hierfl.program.traces import AtSites, Site, in_clients, in_data, middle, samples, sums_by_owner

# whether sites of rows are at the middles of their distributions, where rows in other orders are compared
AT_MIDDLES: ContextVar[bool] = ContextVar("at_middles", default=False)
# torch 2.14 deprecates what it calls itself when derivatives are first taken forward
warnings.filterwarnings(
    "ignore", ".torch.jit.script. is deprecated", FutureWarning, r"torch\._decomp"
)
TRIES = 8  # proposals of a Gamma draw: all are refused with a chance of 0.05^8


class ModuleWeights(TorchFunctionMode):
    """A mode in which functions take params for registered weights; entered at the first weight."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, Tensor] = {}

    def take(self, msg: Site) -> None:
        """Note the value of a param, if it was declared with a module's weight as its start."""
        args = msg["args"]
        start = args[1] if len(args) > 1 else None
        if not isinstance(start, nn.Parameter) or start is msg["value"]:
            return
        if not self._values:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._values[id(start)] = msg["value"]

    def leave(self) -> None:
        """End the mode, if it was entered."""
        if self._values:
            self._values = {}
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return func(*args)  # pyro.module asks it of the weight itself
        args, kwargs = tree_map(self._replaced, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replaced(self, value: Any) -> Any:
        return self._values.get(id(value), value) if isinstance(value, nn.Parameter) else value


class TakesWeights(Messenger):
    """A handler in which the functions of a module take its params from `pyro.param`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = ModuleWeights()

    def __exit__(self, *error: Any) -> None:
        self.weights.leave()
        super().__exit__(*error)

    def _pyro_post_param(self, msg: Site) -> None:
        self.weights.take(msg)


class NoKeyedDraw(NotImplementedError):
    """A distribution that hierfl cannot draw by transforming normals or uniforms."""


class NoSampler(NoKeyedDraw):
    """A distribution that cannot be drawn from at all."""


class KeyedNoise:
    """Normals and uniforms of a key, (2,), (C, 2), or (C, B, 2) of rows; `axis` is the clients' dimension.

    Gammas pass no gradient: a draw that has to be `reparameterized` takes none.
    """

    def __init__(self, key: Tensor, axis: int, *, reparameterized: bool = True) -> None:
        self.key, self.axis, self.calls = key, axis, 0
        self.reparameterized = reparameterized

    def drawn(self, source: Callable[..., Tensor], like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return `noise.normals` or `noise.uniforms` of a shape, in the dtype of `like`."""
        key = noise.fold(self.key, self.calls) if self.calls else self.key
        self.calls += 1
        if key.dim() == 1:
            return source(key, tuple(shape), like.dtype)
        own = list(range(self.key.dim() - 1))  # the dimensions that have keys of their own
        others = (*shape[: self.axis], *shape[self.axis + len(own) :])
        return source(key, others, like.dtype).movedim(own, [self.axis + at for at in own])

    def log_gammas(self, concentration: Tensor, shape: Sequence[int]) -> Tensor:
        """Return logarithms of Gamma(a, 1), by the first accepted of some tries (doi:10.1145/358407.358414).

        At a of 0.01 most draws are below the smallest number, and their ratios would be lost.
        """
        a = concentration.expand(tuple(shape))
        d = torch.where(a < 1.0, a + 1.0, a) - 1.0 / 3.0
        tries, wide = (*shape, TRIES), d[..., None]
        x, u = (self.drawn(of, a, tries) for of in (noise.normals, noise.uniforms))
        v = (1.0 + x / (9.0 * wide).sqrt()) ** 3
        accepted = (v > 0.0) & (u.log() < 0.5 * x.square() + wide * (1.0 - v + v.log()))
        first = v.gather(-1, accepted.to(torch.int8).argmax(-1, keepdim=True))[..., 0]
        power = self.drawn(noise.uniforms, a, shape).log() / a
        return (d * first).log() + torch.where(a < 1.0, power, 0.0)

    def gammas(self, concentration: Tensor, shape: Sequence[int]) -> Tensor:
        """Draw Gamma(a, 1) of a shape."""
        return _within(self.log_gammas(concentration, shape).exp())


def draw(fn: Any, source: KeyedNoise) -> Tensor:
    """Return a reparameterized draw, or `NoKeyedDraw` where it is no known transform (Gamma, Poisson)."""
    # fn.shape() is Pyro's alone: torch's own distributions, as inside a HalfNormal, lack it
    shape = torch.Size((*fn.batch_shape, *fn.event_shape))
    if isinstance(fn, dist.Delta):
        return fn.v
    if isinstance(fn, torch_dist.Independent | dist.MaskedDistribution):
        return draw(fn.base_dist, source)
    if isinstance(fn, torch_dist.TransformedDistribution):
        value = draw(fn.base_dist, source)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if isinstance(fn, torch_dist.Normal):
        return fn.loc + fn.scale * source.drawn(noise.normals, fn.loc, shape)
    if isinstance(fn, torch_dist.MultivariateNormal):
        eps = source.drawn(noise.normals, fn.loc, shape)
        return fn.loc + (fn._unbroadcasted_scale_tril @ eps[..., None])[..., 0]
    if isinstance(fn, torch_dist.LowRankMultivariateNormal):
        factor = fn._unbroadcasted_cov_factor
        low = source.drawn(noise.normals, fn.loc, fn.batch_shape + factor.shape[-1:])
        own = source.drawn(noise.normals, fn.loc, shape)
        return fn.loc + (factor @ low[..., None])[..., 0] + fn._unbroadcasted_cov_diag.sqrt() * own
    if isinstance(fn, torch_dist.Uniform):
        return fn.low + (fn.high - fn.low) * source.drawn(noise.uniforms, fn.low, shape)
    if isinstance(fn, torch_dist.Cauchy | torch_dist.Laplace | torch_dist.Exponential):
        like = fn.rate if isinstance(fn, torch_dist.Exponential) else fn.loc
        inverse: Any = fn.icdf
        return inverse(source.drawn(noise.uniforms, like, shape))
    if not source.reparameterized:
        of = _of_mixture if isinstance(fn, torch_dist.MixtureSameFamily | Mixture) else _by_gammas
        if (drawn := of(fn, source, shape)) is not None:
            return drawn
    raise NoKeyedDraw(
        type(fn.base_dist if isinstance(fn, dist.ExpandedDistribution) else fn).__name__
    )


def _of_mixture(fn: Any, source: KeyedNoise, shape: torch.Size) -> Tensor:
    """Return a draw of each component, (*batch, K, *event), at a component drawn by its probability."""
    at = len(fn.batch_shape)
    if isinstance(fn, Mixture):
        first = len(fn.over)
        probs, parts = fn.probs, fn.fn.expand((*fn.sizes, *fn.batch_shape))
        source.axis += first
        values = draw(parts, source).flatten(0, first - 1).movedim(0, at)
        source.axis -= first
    else:
        probs, values = fn.mixture_distribution.probs, draw(fn.component_distribution, source)
    uniform = source.drawn(noise.uniforms, probs, (*fn.batch_shape, 1))
    below = probs.cumsum(-1)[..., :-1] < uniform  # the last sum may be rounded to less than 1
    index = below.sum(-1, keepdim=True)[(..., *[None] * fn.event_dim)]
    return values.gather(at, index.expand(*shape[:at], 1, *shape[at:])).squeeze(at)


def _by_gammas(fn: Any, source: KeyedNoise, shape: torch.Size) -> Tensor | None:
    """Return a draw of a distribution that is a function of Gamma draws; None of others."""
    if isinstance(fn, torch_dist.Gamma):
        return source.gammas(fn.concentration, shape) / fn.rate
    if isinstance(fn, torch_dist.StudentT):
        square = source.gammas(0.5 * fn.df, shape) / (0.5 * fn.df)
        return fn.loc + fn.scale * source.drawn(noise.normals, fn.loc, shape) / square.sqrt()
    if isinstance(fn, torch_dist.Beta):
        first, second = (
            source.log_gammas(a, shape) for a in (fn.concentration1, fn.concentration0)
        )
        return _within((first - second).sigmoid())
    if isinstance(fn, torch_dist.Dirichlet):
        return _within(source.log_gammas(fn.concentration, shape).softmax(-1))
    return None


def _within(value: Tensor) -> Tensor:
    """Return draws above 0, as torch's own are."""
    return value.clamp(min=torch.finfo(value.dtype).tiny)


def seeded(fn: torch_dist.Distribution, key: Tensor, *, reparameterized: bool = True) -> Tensor:
    """Draw by torch's sampler, seeded by the key, outside vmap; `reparameterized`: with a gradient."""
    if reparameterized and not fn.has_rsample:
        raise NoKeyedDraw(f"{type(fn).__name__} (which has no reparameterized draw)")
    unkeyed = NoKeyedDraw(
        f"{type(fn).__name__} (drawn by torch itself, one client and one draw at a time)"
    )
    if key.numel() != 2:
        raise unkeyed
    try:
        first, second = key.flatten().tolist()
    except RuntimeError as error:  # under vmap the value of a key cannot be read
        raise unkeyed from error
    with torch.random.fork_rng(devices=[]):
        noise.seed_torch(((first & 0x7FFFFFFF) << 32) | (second & 0xFFFFFFFF))
        try:
            value: Tensor = fn.rsample() if fn.has_rsample else fn.sample()
        except NotImplementedError as error:
            raise NoSampler(type(fn).__name__) from error
    return value


def keyed_draw(site: Site, batch: ClientBatch, *, reparameterized: bool = True) -> Tensor:
    """Draw a site by the keys of a batch and the site's name."""
    key = batch.key if in_clients(site) else batch.shared_key
    key = noise.fold(key, noise.word(site["name"]))
    if in_data(site):  # each row its own, however many are padded
        if AT_MIDDLES.get():
            return middle(site["fn"])
        key = noise.fold(key[:, None], torch.arange(batch.num_rows, device=key.device))
    try:
        axis = len(site["fn"].batch_shape) - 2
        return draw(site["fn"], KeyedNoise(key, axis, reparameterized=reparameterized))
    except NoKeyedDraw:
        try:
            return seeded(site["fn"], key, reparameterized=reparameterized)
        except NoSampler as error:
            raise NoSampler(f"site '{site['name']}' ({error})") from error


class Substitute(TakesWeights):
    """Answers every `pyro.param` from a dict, and every draw by the batch's keys, where they are given."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        batch: ClientBatch | None,
        *,
        reparameterized: bool = True,
    ) -> None:
        super().__init__()
        self.params, self.batch, self.reparameterized = params, batch, reparameterized

    def _pyro_param(self, msg: Site) -> None:
        if msg["name"] in self.params:
            constraint = msg["kwargs"].get("constraint", dist.constraints.real)
            free = self.params[msg["name"]]
            msg["value"] = (
                free if constraint is dist.constraints.real else transform_to(constraint)(free)
            )
            msg["done"] = True

    def _pyro_sample(self, msg: Site) -> None:
        if msg["done"] or msg["is_observed"] or isinstance(msg["fn"], _Subsample):
            return
        if self.batch is None:
            return
        if isinstance(msg["fn"], dist.Delta):
            # making a key takes a fair part of a small eager step, and a Delta needs none
            msg["value"], msg["done"] = msg["fn"].v, True
            return
        msg["value"] = keyed_draw(msg, self.batch, reparameterized=self.reparameterized)
        msg["done"] = True


class _AllSeen(Exception):
    """A program has sampled all sites that are asked for."""


def sites_until(run: Callable[[], Any], names: Iterable[str]) -> dict[str, Site]:
    """Return the sites of a program up to the last of some of them: rows that come later are not read."""
    missing = set(names)

    def seen(site: Site) -> None:
        missing.discard(site["name"])
        if not missing:
            raise _AllSeen

    with poutine.trace() as tracer, suppress(_AllSeen), AtSites(seen, after=True):
        run()
    return dict(tracer.trace.nodes)


@contextmanager
def unchecked() -> Iterator[None]:
    """Let no distribution check or branch on its values: a traced function has none to read."""
    with pyro.validation_enabled(False), replaced(CARRIED):
        yield


@contextmanager
def untouched_store() -> Iterator[None]:
    """Restore Pyro's param store and torch's generator on leaving."""
    with pyro.get_param_store().scope(), torch.random.fork_rng(devices=[]):
        yield


def traces_of(
    model: Model,
    guide: Callable[[ClientBatch], Any],
    params: Mapping[str, Tensor],
    batch: ClientBatch,
    support: ClientBatch,
) -> tuple[Any, Any]:
    """Trace the guide, and the model at the guide's draws."""
    with Substitute(params, batch):
        guided = poutine.trace(guide).get_trace(support)
        return guided, poutine.trace(poutine.replay(model, guided)).get_trace(batch)


def log_joint(
    model: Model, values: Values, batch: ClientBatch, params: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return log densities (C,) of local sites and rows at given values, and () of global sites."""
    with Substitute(params, batch):
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(batch)
    return sums_by_owner(
        ((site, site["fn"].log_prob(site["value"])) for _, site in samples(trace)), batch
    )
