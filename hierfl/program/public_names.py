"""Names that a saved recipe may hold, and what each of them stands for.

A recipe records a public name, such as "hierfl.models.regression" or "pyro.distributions.Normal",
never the module that happens to define it: modules may move, and runs saved before can still be
loaded.

The list is explicit: `NAMES`, and the builders that rooms export. What it names makes a value and
does nothing else, whatever the arguments are: it reads and writes no file, starts no process and
runs no code that it is given. A user's own function has no public name (`hierfl.program.marked`).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from hierfl.program.sites import Family

# Public module -> what a recipe may hold of it. Of a module in `EXPORTING` also every exported
# builder: what `recorded`, `family` or a decorator made of them has decorated.
NAMES = {
    "hierfl": ("Formula", "Method", "Schema"),
    # not ResponseFamily: its likelihood is a text that is run
    "hierfl.formulas": ("Column", "Constants", "Grouping", "Margin"),
    "hierfl.guides": ("diagonal_normal", "full_normal", "low_rank_normal", "spline_flow"),
    "hierfl.methods": (),
    "hierfl.methods.hypernetworks": ("Mlp",),
    "hierfl.models": ("HeadedNetwork", "MemoryNetwork", "PersonalHeads"),
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

HAND_IN = "hand the method in: load(..., method=...)"


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
            found = exported(public, qualname)
            if found is not None and (
                found.__module__ == module or not public.startswith("hierfl")
            ):
                return f"{public}.{qualname}"
    return name


def exported(module: str, name: str) -> Any:
    """Return the function, class or guide family that a recipe may name; else None."""
    return getattr(import_module(module), name, None) if name in public_names(module) else None


@cache
def public_names(module: str) -> tuple[str, ...]:
    """Return the names of a module that a recipe may hold; () of a module that is not public."""
    if module not in EXPORTING:
        return NAMES.get(module, ())
    room = import_module(module)
    builders = (name for name in room.__all__ if is_builder(getattr(room, name)))
    return (*NAMES[module], *builders)


def is_builder(thing: object) -> bool:
    """Return whether a decorator has made something a builder, which only makes a value."""
    return isinstance(thing, Family) or getattr(thing, "__recorded__", False) is True


def find(name: str) -> Any:
    """Return what a public name in a recipe stands for, such as "hierfl.models.regression"."""
    module, _, last = name.rpartition(".")
    found = exported(module, last)
    if found is None:
        raise CannotRemake(f"'{_short(name)}' is not a public name of hierfl: {HAND_IN}")
    return found


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
