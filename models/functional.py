"""An `nn.Module` as a pure function of its weights: some a client's own, some shared."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from hierfl.core import noise
from hierfl.core.trees import tree_map
from hierfl.program.terms import posterior_of

Local = str | Sequence[str] | Callable[[str], bool]
RUNNING = ("running_mean", "running_var")


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy that a likelihood can be made of: each row's output a function of that row and the weights, and of nothing else.

    Raises:
        ValueError: lazy weights, none that require a gradient, statistics of other rows (BatchNorm), or dropout in training mode.
    """
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "the module is lazy, its shapes unknown: run it once on a few rows, or declare its sizes"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            "the module has no parameter that requires a gradient: there is nothing to infer"
        )
    for name, part in module.named_modules():
        label = f"'{name}' ({type(part).__name__})" if name else type(part).__name__
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or any(
            getattr(part, key, None) is not None for key in RUNNING
        ):
            raise ValueError(
                f"{label} normalises by statistics of other rows, which are no weights with a prior and which federated averages "
                f"have often spoilt: use nn.GroupNorm or nn.LayerNorm"
            )
        rate = (
            getattr(part, "p", 0.0)
            if isinstance(part, nn.modules.dropout._DropoutNd)
            else getattr(part, "dropout", 0.0)
        )
        if part.training and isinstance(rate, float) and rate > 0.0:
            raise ValueError(
                f"{label} drops units at random while training: call module.eval(), the posterior is noise enough"
            )
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
            raise ValueError(
                f"local: {what} matches none of the module's parameters: {', '.join(names)}"
            )
        chosen |= found
    return frozenset(chosen)


def _starts(prefix: str, name: str) -> bool:
    return name.startswith(prefix)


@dataclass(frozen=True, eq=False)
class Spread:
    """What clients' own tensors are Normal about, for layers that draw what comes out of them in place of their weights.

    Args:
        loc: (C, 1, *shape) each.
        scale: (C, 1, *shape) each.
        key: (C, 2), of the noise.
    """

    loc: Mapping[str, Tensor]
    scale: Mapping[str, Tensor]
    key: Tensor


class _Locally(TorchFunctionMode):
    """Dense layers of one client whose outputs are drawn, each row's apart: Kingma, Salimans and Welling 2015, Eq. (6)."""

    def __init__(self, tensors: Mapping[str, Tensor], spread: Spread) -> None:
        super().__init__()
        self._names = {id(value): name for name, value in tensors.items() if name in spread.loc}
        self._spread = spread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear or id(args[1]) not in self._names:
            return func(*args, **(kwargs or {}))
        x, weight, bias = args[0], self._names[id(args[1])], args[2] if len(args) > 2 else None
        of_bias = self._names.get(id(bias))
        loc, scale = self._spread.loc, self._spread.scale
        middle = func(x, loc[weight], bias if of_bias is None else loc[of_bias])
        variance = func(
            x.square(), scale[weight].square(), None if of_bias is None else scale[of_bias].square()
        )
        key = noise.fold(self._spread.key, noise.word(f"out of {weight}"))
        drawn = noise.normals(key, tuple(middle.shape), middle.dtype)
        # at 0, where no input is lit, a root has no slope
        return middle + variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt() * drawn


def apply(
    module: nn.Module,
    own: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    x: Tensor,
    spread: Spread | None = None,
) -> Tensor:
    """The outputs of all rows, (C, B, K).

    Args:
        module: whose parameters are replaced by name.
        own: (C, 1, *shape) each.
        shared: (*shape) each.
        x: (C, B, ...).
        spread: of own tensors; None: own tensors are taken as they are.
    """

    def of_client(own: Mapping[str, Tensor], spread: Any, rows: Tensor) -> Tensor:
        with nullcontext() if spread is None else _Locally(own, Spread(*spread)):
            output: Tensor = functional_call(module, {**shared, **own}, (rows,))
        return output

    if not own:
        output: Tensor = functional_call(module, dict(shared), (x.flatten(0, 1),)).unflatten(
            0, x.shape[:2]
        )
        return output if output.dim() > 2 else output[..., None]
    lanes = {name: value[:, 0] for name, value in own.items()}
    about = (
        None
        if spread is None
        else (
            *({n: v[:, 0] for n, v in of.items()} for of in (spread.loc, spread.scale)),
            spread.key,
        )
    )
    if (
        len(x) == 1
    ):  # a vmap inside the engine's would give the same numbers, 4 % later on a small network
        first = tree_map(lambda v: v[0], {"lanes": lanes, "about": about or ()})
        output = of_client(first["lanes"], first["about"] or None, x[0])[None]
    else:
        output = torch.vmap(of_client, in_dims=(0, None if about is None else 0, 0))(
            lanes, about, x
        )
    return output if output.dim() > 2 else output[..., None]


def spread_of(names: Iterable[str], site: str, key: Tensor) -> Spread | None:
    """The spread of the guide's own sites `site` + name, those that are Normal; None where there is no guide to ask, or none is."""
    found = {name: getattr(posterior_of(site + name), "base_dist", None) for name in names}
    normal = {name: fn for name, fn in found.items() if type(fn) is dist.Normal}
    return (
        Spread(
            {n: fn.loc for n, fn in normal.items()}, {n: fn.scale for n, fn in normal.items()}, key
        )
        if normal
        else None
    )
