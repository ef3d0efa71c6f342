"""The latent sites of a model, the flat vectors that guides are written in; families and recorded calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from importlib import import_module
from itertools import filterfalse
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributions import AffineTransform, ComposeTransform, biject_to, constraints
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform
from torch.distributions.utils import _sum_rightmost

from hierfl.core.arguments import check_names, keywords
from hierfl.data.batch import ClientBatch

Model = Callable[[ClientBatch], Any]
Guide = Callable[[ClientBatch], Any]
Values = dict[str, Tensor]
SIZE, IS_LOCAL = attrgetter("size"), attrgetter("is_local")
# a global site that nothing depends on, of a program without one; no answer shows it
COMMON = "_common"


class _InUnits(AffineTransform):
    """Multiplies by a unit, on the device and in the dtype of what it is given."""

    def __init__(self, unit: Tensor, event_dim: int) -> None:
        super().__init__(0.0, unit, event_dim)
        self.unit = unit

    def _call(self, x: Tensor) -> Tensor:
        return x * self.unit.to(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return y / self.unit.to(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        total: Tensor = _sum_rightmost(self.unit.to(x).log().expand(x.shape), self.event_dim)
        return total


class _InRoots(Transform):
    """Multiplies vectors by an upper triangular matrix, on the device and in the dtype of what it is given."""

    domain = codomain = constraints.real_vector
    bijective = True

    def __init__(self, root: Tensor) -> None:
        super().__init__()
        self.root = root

    def _call(self, x: Tensor) -> Tensor:
        return (self.root.to(x) @ x[..., None])[..., 0]

    def _inverse(self, y: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.root.to(y), y[..., None], upper=True)[..., 0]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        logs = self.root.to(x).diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return logs.expand(x.shape[:-1])


@dataclass(frozen=True, eq=False)
class LatentSite:
    """A site in one client's shapes; its prior has center `start` and, far from 1, scale `unit`.

    Of vectors with a strongly correlated prior the unit is a root of their covariance, with one
    dimension more than values: scalars of a slope and of an intercept far from the rows would else
    be known to a few digits only.
    """

    name: str
    is_local: bool
    plates: tuple[tuple[str, int, int], ...]
    batch_shape: torch.Size
    event_shape: torch.Size
    support: Constraint
    has_mean: bool
    start: Tensor
    unit: Tensor | None = None

    @cached_property
    def transform(self) -> Transform:
        """The map from R^k to the support."""
        transform: Transform = biject_to(self.support)
        if self.unit is None:
            return transform
        if self.has_root:
            return ComposeTransform([transform, _InRoots(self.unit)])
        return ComposeTransform([transform, _InUnits(self.unit, len(self.event_shape))])

    @property
    def has_root(self) -> bool:
        """Whether the unit is a matrix."""
        return self.unit is not None and self.unit.dim() > self.start.dim()

    @property
    def is_real(self) -> bool:
        """Whether its unconstrained values are its values."""
        return of_scalars(self.support) is constraints.real and self.unit is None

    @property
    def has_logs(self) -> bool:
        """Whether its unconstrained values are logs of scalars, or log odds."""
        support = of_scalars(self.support)
        return not support.event_dim and support is not constraints.real

    @cached_property
    def free_start(self) -> Tensor:
        """`start`, unconstrained."""
        free: Tensor = self.transform.inv(self.start)
        return free.detach().clone()

    @property
    def size(self) -> int:
        """Number of unconstrained values: of one client, or in all for a global site."""
        return self.free_start.numel()

    @property
    def free_event_dim(self) -> int:
        """Number of dimensions of an unconstrained event."""
        return self.free_start.dim() - len(self.batch_shape)

    def constrain(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """Map free numbers (*batch, *event) to values, with their log Jacobians (*batch,)."""
        value = self.transform(free)
        jacobian = self.transform.log_abs_det_jacobian(free, value)
        over = self.free_event_dim - (free.dim() - jacobian.dim())
        return value, _sum_rightmost(jacobian, over)

    @contextmanager
    def within(self, batch: ClientBatch) -> Iterator[None]:
        """Open the plates of the site for a batch."""
        with ExitStack() as stack:
            for name, size, dim in self.plates:
                stack.enter_context(batch.plate(name, size, dim))
            if self.is_local:
                stack.enter_context(batch.clients())
            yield


@dataclass(frozen=True, eq=False)
class Block:
    """Sites in one unconstrained vector: (K,) for global sites, (C, 1, D) for local ones."""

    sites: tuple[LatentSite, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Lengths of the sites' pieces of the vector."""
        return list(map(SIZE, self.sites))

    @property
    def size(self) -> int:
        """Length of the vector: K of global sites, D of local ones."""
        return sum(self.sizes)

    @cached_property
    def start(self) -> Tensor:
        """The sites' starting points, (K,), or (1, 1, D) for local sites."""
        return self.flatten({site.name: site.start for site in self.sites})

    def shaped(self, vector: Tensor) -> Values:
        """Split a vector, (K,) or (C, 1, D), into pieces in the unconstrained shapes of its sites."""
        pieces = {}
        for site, piece in zip(self.sites, vector.split(self.sizes, -1), strict=True):
            if site.is_local:
                inner = site.batch_shape[:-2]  # plates left of the clients
                event = site.free_start.shape[len(site.batch_shape) :]
                by_client = piece.reshape(
                    *piece.shape[:-1], *inner, *event
                )  # (C, 1, *inner, *event)
                pieces[site.name] = by_client.movedim((0, 1), (len(inner), len(inner) + 1))
            else:
                pieces[site.name] = piece.reshape(site.free_start.shape)
        return pieces

    def unflatten(self, vector: Tensor) -> tuple[Values, Values]:
        """Split a vector, (K,) or (C, 1, D), into values of its sites and log Jacobians."""
        values, jacobians = {}, {}
        for site, free in zip(self.sites, self.shaped(vector).values(), strict=True):
            values[site.name], jacobians[site.name] = site.constrain(free)
        return values, jacobians

    def values_of(self, draws: Tensor) -> Values:
        """Return the values of global sites at draws (S, K), with S draws in front."""
        values: Values = torch.vmap(lambda z: self.unflatten(z)[0])(draws)
        return values

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector of the sites' values; the inverse of `unflatten`."""
        pieces = []
        for site in self.sites:
            free = site.transform.inv(values[site.name])
            if site.is_local:
                inner = len(site.batch_shape) - 2
                free = free.movedim((inner, inner + 1), (0, 1))
                pieces.append(free.reshape(*free.shape[:2], -1))
            else:
                pieces.append(free.reshape(-1))
        return torch.cat(pieces, -1) if pieces else torch.zeros(0)


@dataclass(frozen=True, eq=False)
class Latents:
    """All latent sites of a model, in the model's order."""

    sites: tuple[LatentSite, ...]

    @cached_property
    def global_block(self) -> Block:
        """The global sites, outside the clients plate."""
        return Block(tuple(filterfalse(IS_LOCAL, self.sites)))

    @cached_property
    def local_block(self) -> Block:
        """The local sites, inside the clients plate."""
        return Block(tuple(filter(IS_LOCAL, self.sites)))

    def in_own_units(self) -> Latents:
        """Return the sites with unconstrained values in their own units, not in their priors'."""
        return Latents(tuple(replace(site, unit=None) for site in self.sites))


@dataclass(frozen=True, eq=False)
class Family:
    """A guide family for any model: `guides.low_rank`, or `guides.low_rank(rank=8)`."""

    build: Callable[..., Guide]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, **options: Any) -> Family:
        """Return the same family with options set."""
        names = keywords(self.build)
        check_names(self.build.__name__, options, names and names[2:])
        return family(self.build, **{**self.options, **options})


def family(build: Callable[..., Guide], **options: Any) -> Family:
    """Return the guide family of a function `(model, latents, **options) -> guide`."""
    made = Family(build, options)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        object.__setattr__(made, attribute, getattr(build, attribute))
    return made


def dims_of(model: object) -> Mapping[str, Sequence[tuple[str, Sequence[str]]]]:
    """Return what a model says of its sites' dimensions: site -> (name, labels) of each."""
    # what observes its labels as floats wraps the model (`hierfl.program.read_traces`)
    own = inspect.unwrap(model) if callable(model) else model
    dims: Mapping[str, Sequence[tuple[str, Sequence[str]]]] = getattr(own, "dims", {})
    return dims if isinstance(dims, Mapping) else {}


def repeat_over_clients(site: LatentSite, start: Tensor, batch: ClientBatch) -> Tensor:
    """Return a param's starting value (*batch, *event) for every client of a batch."""
    if not site.is_local:
        return start
    return start.repeat_interleave(batch.num_clients, dim=len(site.batch_shape) - 2)


def of_scalars(support: Constraint) -> Constraint:
    """Return the support of the scalars of independent ones, or the support itself."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Recipe:
    """A factory and the options it was called with."""

    factory: Callable[..., Any]
    options: Mapping[str, Any]

    def __reduce__(self) -> Any:
        """Pickle the factory by its name, which is that of what wraps it."""
        name = self.factory.__module__, self.factory.__qualname__
        return _by_name, (*name, dict(self.options))

    def again(self) -> Any:
        """Return what the factory makes."""
        made = self.factory(**self.options)
        object.__setattr__(made, "__recipe__", self)
        return made


def _by_name(module: str, name: str, options: Mapping[str, Any]) -> Recipe:
    wrapper = getattr(import_module(module), name)
    return Recipe(inspect.unwrap(wrapper), options)


def recorded(factory: Callable[P, R]) -> Callable[P, R]:
    """Wrap a factory so that its result remembers the call (`recipe_of`); misspelling is a TypeError."""
    signature, names = inspect.signature(factory), keywords(factory)
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    keyword_rest = kinds.get(inspect.Parameter.VAR_KEYWORD)

    @wraps(factory)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names(factory.__name__, kwargs, names)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        guide = bound.arguments.get("guide")
        if guide is not None and not isinstance(guide, Family):
            from hierfl.program.pyro_guides import family_of  # few guides are Pyro's

            bound.arguments["guide"] = family_of(guide)
        result = factory(*bound.args, **bound.kwargs)
        options = dict(bound.arguments)
        options |= options.pop(keyword_rest) if keyword_rest else {}
        object.__setattr__(result, "__recipe__", Recipe(factory, options))
        return result

    made.__dict__["__recorded__"] = True
    return made


def recipe_of(thing: object) -> Recipe | None:
    """Return the recipe that something was made by; None where no recorded factory made it."""
    recipe = getattr(thing, "__recipe__", None)
    return recipe if isinstance(recipe, Recipe) else None
