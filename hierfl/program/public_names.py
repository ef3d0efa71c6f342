"""Names that a saved recipe may hold: an explicit list; what they name makes a value and no more."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, TypeVar, overload

from hierfl.core.arguments import spelled
from hierfl.program.sites import Family

# Public module -> what a recipe may hold of it. Of a module in `EXPORTING` also every exported
# builder: what `recorded`, `family` or a decorator made of them has decorated.
NAMES = {
    "hierfl": ("Formula", "Method", "Schema"),
    # not ResponseFamily: its likelihood is a text that is run
    "hierfl.formulas": ("Column", "Constants", "Grouping", "Margin"),
    "hierfl.guides": ("diagonal_normal", "full_normal", "low_rank_normal", "spline_flow"),
    "hierfl.methods": (),
    "hierfl.methods.personalized.pfedhn": ("Mlp",),
    "hierfl.models": (
        "GaussianProcessNetwork",
        "HeadedNetwork",
        "MemoryNetwork",
        "PersonalHeads",
    ),
    "hierfl.models.families": (),
    "hierfl.models.bregman": tuple("BregmanPrior bernoulli exponential gaussian poisson".split()),
    "hierfl.models.likelihood": ("Bernoulli", "Likelihood"),
    "hierfl.models.learned_priors": tuple(
        "InputConvex Isotropic LearnedNormal LearnedVariance Penalized".split()
    ),
    "hierfl.optimizers": tuple("SGD Adam TorchOptimizer".split()),
    # distributions of numbers alone; not those that take functions, search trees or compile code
    "pyro.distributions": tuple(
        (
            "AffineBeta AsymmetricLaplace Bernoulli Beta BetaBinomial Binomial Categorical Cauchy "
            "Chi2 ContinuousBernoulli Delta Dirichlet DirichletMultinomial Exponential "
            "FisherSnedecor Gamma GammaPoisson GeneralizedPareto Geometric Gumbel HalfCauchy "
            "HalfNormal InverseGamma Kumaraswamy LKJ LKJCholesky LKJCorrCholesky Laplace "
            "LogNormal Logistic LogisticNormal LowRankMultivariateNormal Multinomial "
            "MultivariateNormal MultivariateStudentT NegativeBinomial Normal OneHotCategorical "
            "OrderedLogistic Pareto Poisson SkewLogistic SoftAsymmetricLaplace SoftLaplace Stable "
            "StudentT Uniform VonMises Weibull Wishart ZeroInflatedNegativeBinomial "
            "ZeroInflatedPoisson"
        ).split()
    ),
    "torch.optim": tuple(
        ("ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD").split()
    ),
}

EXPORTING = {"hierfl.guides", "hierfl.methods"}
EXPORTING |= {"hierfl.models", "hierfl.models.families", "hierfl.models.likelihood"}

HAND_IN = "pass the method: load(..., method=...)"


class CannotRemake(ValueError):
    """A recipe that cannot be made again; the message says why, and what to pass instead."""


def public_name(name: str) -> str:
    """Return the public name of "module:qualname"; the name itself where it has none.

    >>> public_name("hierfl.models.bayesian_network:network"), public_name("pyro.distributions.torch:Normal")
    ('hierfl.models.network', 'pyro.distributions.Normal')
    >>> public_name("my_study:my_model")
    'my_study:my_model'
    """
    module, _, qualname = name.partition(":")
    for public in NAMES:
        room = ".".join(public.split(".")[:2])
        if f"{module}.".startswith(f"{room}."):
            value = exported(public, qualname)
            if value is not None and (
                value.__module__ == module or not public.startswith("hierfl")
            ):
                return f"{public}.{qualname}"
    return name


def exported(module: str, name: str) -> Any:
    """Return the function, class or guide family that a recipe may name; else None."""
    if module not in NAMES:
        return None
    room, is_listed = import_module(module), name in NAMES[module]
    value = getattr(room, name, None) if is_listed or name in getattr(room, "__all__", ()) else None
    # a decorator has made a builder of it, which only makes a value
    builder = isinstance(value, Family) or getattr(value, "__recorded__", False) is True
    return value if is_listed or (builder and module in EXPORTING) else None


def find(name: str) -> Any:
    """Return what a public name in a recipe stands for, such as "hierfl.models.regression"."""
    module, _, last = name.rpartition(".")
    value = exported(module, last)
    if value is None:
        short = name if len(name) <= 80 else f"{name[:77]}..."
        raise CannotRemake(f"'{short}' is not a public name of hierfl: {HAND_IN}")
    return value


Kind = Literal["model", "guide"]
F = TypeVar("F", bound=Callable[..., Any])

_MARKED: dict[tuple[Kind, str], Any] = {}  # (kind, name) -> what bears that name now


@overload
def model(function: F, /, *, name: str | None = None) -> F: ...
@overload
def model(*, name: str | None = None) -> Callable[[F], F]: ...
@spelled
def model(function: F | None = None, /, *, name: str | None = None) -> F | Callable[[F], F]:
    """Mark a model so that `hierfl.load` finds it: `@hierfl.model` or `(name="radon")`.

    The program that loads a fit marks the same model; `load` refuses another one of the same name.

    Args:
        function: the model, a function of a `ClientBatch`, which is returned.
        name: what it is recorded as. Default: the function's own name.

    Raises:
        TypeError: `function` cannot be called, or has no name of its own and none is given.
        ValueError: another model has this name.

    >>> @model
    ... def means(batch): ...
    >>> name_of(means, "model")
    'means'
    """
    return _marker("model", function, name)


@overload
def guide(function: F, /, *, name: str | None = None) -> F: ...
@overload
def guide(*, name: str | None = None) -> Callable[[F], F]: ...
@spelled
def guide(function: F | None = None, /, *, name: str | None = None) -> F | Callable[[F], F]:
    """Mark a guide or a guide family so that `hierfl.load` finds it, as `hierfl.model` does."""
    return _marker("guide", function, name)


def _marker(kind: Kind, function: F | None, name: str | None) -> F | Callable[[F], F]:
    """Mark a function, or return the decorator that does."""
    if function is None:
        return lambda given: _mark(kind, given, name)
    return _mark(kind, function, name)


def _mark(kind: Kind, function: F, name: str | None) -> F:
    if not callable(function):
        raise TypeError(
            f"{function!r} is not a {kind}: mark a function, or give the name as name=..."
        )
    name = name or getattr(function, "__name__", None)
    if not name or "<" in name:
        raise TypeError(
            f"this {kind} has no name of its own: give one, hierfl.{kind}(..., name=...)"
        )
    before = _MARKED.get((kind, name))
    if before is not None and not _is_redefinition(before, function):
        raise ValueError(
            f"{place_of(before)} is marked as the {kind} '{name}' already: give "
            f"{place_of(function)} a name of its own, hierfl.{kind}(name=...)"
        )
    _MARKED[kind, name] = function
    return function


def _is_redefinition(before: object, now: object) -> bool:
    """Return whether one function is the other, defined again in a notebook or an import."""
    if before is now or place_of(before) == place_of(now):
        return True
    files = [getattr(getattr(f, "__code__", None), "co_filename", None) for f in (before, now)]
    names = [getattr(f, "__qualname__", None) for f in (before, now)]
    return files[0] is not None and files[0] == files[1] and names[0] == names[1]


def place_of(function: object) -> str:
    """Return where a function, or the type of an object, is defined: "module:qualname"."""
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}"


def name_of(function: object, kind: Kind) -> str | None:
    """Return the name under which a function is marked; None where it is not."""
    return next((name for (k, name), f in _MARKED.items() if k == kind and f is function), None)


def marked(kind: Kind, name: str) -> Any:
    """Return what is marked as a model or guide."""
    value = _MARKED.get((kind, name))
    if value is not None:
        return value
    return next((f for (k, _), f in _MARKED.items() if k == kind and place_of(f) == name), None)
