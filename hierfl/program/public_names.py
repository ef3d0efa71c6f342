"""Names that a saved recipe may hold, and what each of them stands for.

A recipe records a public name, such as "hierfl.models.logistic" or "pyro.distributions.Normal", never the
module that happens to define it: modules may move, and runs saved before can still be loaded. A user's own
function has no public name. It is recorded as "module:qualname", and found only in a module that the caller
has already imported.

In hierfl, torch, pyro, numpy and Python's own library, only the public names below are looked up, so a
crafted file cannot reach a function such as `os.system`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

# The modules whose `__all__` a recipe may name. Of Pyro only distributions count, of torch only optimisers.
PUBLIC = (
    "hierfl",
    "hierfl.guides",
    "hierfl.methods",
    "hierfl.models",
    "hierfl.models.bregman",
    "hierfl.models.likelihood",
    "hierfl.models.map_priors",
    "hierfl.optimisers",
    "pyro.distributions",
    "torch.optim",
)

# Runs written by hierfl 0.1.0 name the defining module instead: public module -> the modules that defined its
# names in that release.
MODULES_OF_0_1_0 = {
    "hierfl": ("hierfl.method",),
    "hierfl.guides": tuple(
        f"hierfl.guides.{name}"
        for name in (
            "amortised conditional constructed delta low_rank mean_field shared structured unrolled"
        ).split()
    ),
    "hierfl.methods": tuple(
        f"hierfl.methods.{name}"
        for name in (
            "bfi ditto fedabml fedavg fedbn fedlaplace fedmap fedsvi fedvi pfedbayes pfedbred pfedme pvi"
        ).split()
    ),
    "hierfl.models": tuple(
        f"hierfl.models.{name}"
        for name in (
            "batch_norm bayes_net bregman_net linear logistic map_network personal_heads poisson softmax"
        ).split()
    ),
    "hierfl.models.bregman": ("hierfl.models.bregman",),
    "hierfl.models.likelihood": ("hierfl.models.likelihood",),
    "hierfl.models.map_priors": ("hierfl.models.map_priors",),
    "hierfl.optimisers": ("hierfl.optimisers",),
}
PUBLIC_OF = {old: public for public, olds in MODULES_OF_0_1_0.items() for old in olds}

# Packages of which nothing but the public names above is ever looked up.
CLOSED = frozenset(sys.stdlib_module_names) | {"hierfl", "numpy", "pyro", "torch"}
HAND_IN = "hand the method in: load(..., method=...)"


class CannotRemake(ValueError):
    """A recipe from which nothing can be made again. The message says why, and what to pass instead."""


def public_name(name: str) -> str:
    """Return the public name of "module:qualname"; the name itself where it has none.

    >>> public_name("hierfl.models.bayes_net:network"), public_name("pyro.distributions.torch:Normal")
    ('hierfl.models.network', 'pyro.distributions.Normal')
    >>> public_name("my_study:my_model")
    'my_study:my_model'
    """
    module, _, qualname = name.partition(":")
    if module in PUBLIC_OF:
        public = PUBLIC_OF[module]
        return f"{public}.{qualname}" if exported(public, qualname) is not None else name
    for public in PUBLIC:
        if f"{module}.".startswith(f"{public}."):
            found = exported(public, qualname)
            if found is not None and (
                found.__module__ == module or not public.startswith("hierfl")
            ):
                return f"{public}.{qualname}"
    return name


def exported(module: str, name: str) -> Any:
    """Return the function, class or guide family that a public module exports; None where there is none.

    Of `pyro.distributions` that is distributions alone, of `torch.optim` optimisers.
    """
    if module not in PUBLIC:
        return None
    public = import_module(module)
    if name not in public.__all__:
        return None
    found = getattr(public, name)
    if module.startswith("hierfl"):
        return found if callable(found) else None
    kinds = (torch.distributions.Distribution, torch.optim.Optimizer)
    return found if isinstance(found, type) and issubclass(found, kinds) else None


def find(name: str) -> Any:
    """Return what a name in a recipe stands for.

    Args:
        name: a public name; or "module:qualname", of hierfl 0.1.0 or of the user.

    Raises:
        CannotRemake: the name is not public, or the user's module is not imported or does not define it.
    """
    name = public_name(name)
    if ":" not in name:
        module, _, last = name.rpartition(".")
        found = exported(module, last)
        if found is None:
            raise CannotRemake(f"'{name}' is not a public name of hierfl: {HAND_IN}")
        return found
    module, _, qualname = name.partition(":")
    if module.split(".")[0] in CLOSED:
        raise CannotRemake(f"'{name}' is not a public name of hierfl: {HAND_IN}")
    if module not in sys.modules:
        raise CannotRemake(
            f"'{qualname}' of module '{module}' is not imported: import it, or {HAND_IN}"
        )
    return _defined_in(module, qualname)


def _defined_in(module: str, qualname: str) -> Any:
    """A function or class that an imported module itself defines: what it has only imported is refused."""
    first, *rest = qualname.split(".")
    found: Any = vars(sys.modules[module]).get(first)
    for part in rest:
        found = getattr(found, part, None) if isinstance(found, type) else None
    if found is None:
        raise CannotRemake(f"module '{module}' has no '{qualname}': {HAND_IN}")
    if (getattr(found, "__module__", None), getattr(found, "__qualname__", None)) != (
        module,
        qualname,
    ):
        raise CannotRemake(f"module '{module}' does not define '{qualname}' itself: {HAND_IN}")
    return found
