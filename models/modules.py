"""An `nn.Module` as a pure function of its weights: some a client's own, some shared."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

Local = str | Sequence[str] | Callable[[str], bool]
RUNNING = ("running_mean", "running_var")


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy that a likelihood can be made of: each row's output a function of that row and the weights, and of nothing else.

    Raises:
        ValueError: lazy weights, none that require a gradient, statistics of other rows (BatchNorm), or dropout in training mode.
    """
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError("the module is lazy, its shapes unknown: run it once on a few rows, or declare its sizes")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the module has no parameter that requires a gradient: there is nothing to infer")
    for name, part in module.named_modules():
        label = f"'{name}' ({type(part).__name__})" if name else type(part).__name__
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or any(getattr(part, key, None) is not None for key in RUNNING):
            raise ValueError(
                f"{label} normalises by statistics of other rows, which are no weights with a prior and which federated averages "
                f"have often spoilt: use nn.GroupNorm or nn.LayerNorm"
            )
        rate = getattr(part, "p", 0.0) if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
        if part.training and isinstance(rate, float) and rate > 0.0:
            raise ValueError(f"{label} drops units at random while training: call module.eval(), the posterior is noise enough")
    return copy.deepcopy(module)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The tensors to infer, by name: those that require a gradient, a tied one once."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def own_names(names: Sequence[str], local: Local) -> frozenset[str]:
    """Which of the names are a client's own: "all", "none", a regular expression, prefixes, or a predicate.

    Raises:
        ValueError: a pattern or prefix that matches none.
    """
    if local in ("all", "none"):
        return frozenset(names if local == "all" else ())
    tests: dict[str, Callable[[str], object]]
    if callable(local):
        tests = {"the predicate": local}
    elif isinstance(local, str):
        tests = {f"the pattern '{local}'": re.compile(local).search}
    else:
        tests = {f"the prefix '{prefix}'": partial(_starts, prefix) for prefix in local}
    chosen: set[str] = set()
    for what, test in tests.items():
        found = {name for name in names if test(name)}
        if not found:
            raise ValueError(f"local: {what} matches none of the module's parameters: {', '.join(names)}")
        chosen |= found
    return frozenset(chosen)


def _starts(prefix: str, name: str) -> bool:
    return name.startswith(prefix)


def apply(module: nn.Module, own: Mapping[str, Tensor], shared: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The outputs of all rows, (C, B, K).

    Args:
        module: whose parameters are replaced by name.
        own: (C, 1, *shape) each.
        shared: (*shape) each.
        x: (C, B, ...).
    """
    if not own:
        output: Tensor = functional_call(module, dict(shared), (x.flatten(0, 1),)).unflatten(0, x.shape[:2])
    elif len(x) == 1:  # a vmap inside the engine's would give the same numbers, 4 % later on a small network
        output = functional_call(module, {**shared, **{name: value[0, 0] for name, value in own.items()}}, (x[0],))[None]
    else:
        lanes = {name: value[:, 0] for name, value in own.items()}
        output = torch.vmap(lambda w, rows: functional_call(module, {**shared, **w}, (rows,)))(lanes, x)
    return output if output.dim() > 2 else output[..., None]
