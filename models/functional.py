"""An `nn.Module` as a pure function of its weights, some of them local and some global."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from hierfl.core import noise
from hierfl.core.trees import tree_map
from hierfl.models.client_norm import say_what_was_seen, tensors_of_norms, with_client_norms
from hierfl.program.terms import posterior_of

RUNNING = ("running_mean", "running_var")


def frozen_copy(module: nn.Module) -> nn.Module:
    """Copy a module, after checking that each row's output depends on it alone; replace batch norm."""
    lazy = any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))
    net = module if lazy else with_client_norms(module)
    if problem := next(_problems(net, lazy=lazy), None):
        raise ValueError(problem)
    return net


def _problems(net: nn.Module, *, lazy: bool) -> Iterator[str]:
    """Yield why a module is no function of its weights and each row."""
    if lazy:
        yield (
            "the module is lazy, so the shapes of its weights are unknown: "
            "run it once on a few rows, or declare its sizes"
        )
    if not any(p.requires_grad for p in net.parameters()):
        yield "the module has no parameter that requires a gradient: there is nothing to infer"
    for name, part in net.named_modules():
        label = f"'{name}' ({type(part).__name__})" if name else type(part).__name__
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            yield (
                f"{label} is in the module in two places, each of which has statistics of its own: "
                "give each place a layer of its own"
            )
        if any(getattr(part, key, None) is not None for key in RUNNING):
            yield (
                f"{label} normalizes by statistics of other rows, which are not weights with a "
                "prior, and averaging over clients often spoils them: use nn.GroupNorm or "
                "nn.LayerNorm"
            )
        is_dropout = isinstance(part, nn.modules.dropout._DropoutNd)
        rate = getattr(part, "p" if is_dropout else "dropout", 0.0)
        if part.training and isinstance(rate, float) and rate > 0.0:
            yield (
                f"{label} drops units at random in training mode: "
                "call module.eval(), since the posterior is already a source of noise"
            )


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to infer, by name: parameters with a gradient, tied ones once."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@dataclass(frozen=True, eq=False)
class WeightSpread:
    """The Normals of local tensors, for layers that sample outputs instead of weights."""

    loc: Mapping[str, Tensor]  # name -> (C, 1, *shape)
    scale: Mapping[str, Tensor]  # name -> (C, 1, *shape), > 0
    key: Tensor  # (C, 2) int32, of the noise


class _SampledOutputs(TorchFunctionMode):
    """A mode in which dense layers sample outputs, not weights: Eq. (6), Kingma et al. 2015, arXiv:1506.02557."""

    def __init__(self, tensors: Mapping[str, Tensor], spread: WeightSpread) -> None:
        super().__init__()
        self._names = {id(value): name for name, value in tensors.items() if name in spread.loc}
        self._spread = spread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear or id(args[1]) not in self._names:
            return func(*args, **(kwargs or {}))
        x, weight_name, bias = args[0], self._names[id(args[1])], args[2] if len(args) > 2 else None
        bias_name = self._names.get(id(bias))
        loc, scale = self._spread.loc, self._spread.scale
        mean = func(x, loc[weight_name], bias if bias_name is None else loc[bias_name])
        variance = func(
            x.square(),
            scale[weight_name].square(),
            None if bias_name is None else scale[bias_name].square(),
        )
        key = noise.fold(self._spread.key, noise.word(f"out of {weight_name}"))
        drawn = noise.normals(key, tuple(mean.shape), mean.dtype)
        # the variance is 0 where all inputs are 0, and there the square root has no finite gradient
        return mean + variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt() * drawn


def apply(
    module: nn.Module,
    own: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    x: Tensor,
    spread: WeightSpread | None = None,
    *,
    mask: Tensor | None,
) -> Tensor:
    """Return outputs (C, B, outputs) at `own` (C, 1, *shape) and `shared` params; `spread`: local Normals."""

    def of_client(own: Mapping[str, Tensor], spread: Any, rows: Tensor) -> Tensor:
        with nullcontext() if spread is None else _SampledOutputs(own, WeightSpread(*spread)):
            output: Tensor = functional_call(module, {**shared, **own}, (rows,))
        return output

    own = {**own, **tensors_of_norms(module, x, mask)}
    if not own:
        output: Tensor = functional_call(module, dict(shared), (x.flatten(0, 1),))
        output = output.unflatten(0, x.shape[:2])
        return output if output.dim() > 2 else output[..., None]
    normals = None
    if spread is not None:
        of_client_slots = ({n: v[:, 0] for n, v in of.items()} for of in (spread.loc, spread.scale))
        normals = (*of_client_slots, spread.key)
    output = _of_each(of_client, own, normals, x)
    say_what_was_seen(module)
    return output if output.dim() > 2 else output[..., None]


def _of_each(
    of_client: Callable[..., Tensor], own: Mapping[str, Tensor], normals: Any, x: Tensor
) -> Tensor:
    """Return a function of one client's local tensors, Normals and rows for C clients, (C, ...)."""
    slots = {name: value[:, 0] for name, value in own.items()}
    if len(x) > 1:
        return torch.vmap(of_client, in_dims=(0, None if normals is None else 0, 0))(
            slots, normals, x
        )
    # a vmap nested in the engine's gives the same numbers, but takes 4 % longer on a small network
    first = tree_map(lambda v: v[0], {"slots": slots, "normals": normals or ()})
    return of_client(first["slots"], first["normals"] or None, x[0])[None]


def known_layer(module: nn.Module, layer: str, *, option: str) -> str:
    """Return the name of a layer, refusing one that the module does not have."""
    names = [name for name, _ in module.named_modules() if name]
    if layer not in names:
        raise ValueError(
            f"{option} is '{layer}', and the module's layers are {', '.join(names)}: name one of "
            "these"
        )
    return layer


def inputs_of(
    module: nn.Module, layer: str, tensors: Mapping[str, Tensor], x: Tensor, *, mask: Tensor | None
) -> Tensor:
    """Return what a layer takes of each row, flat: (C, B, D); `tensors` are global."""

    def of_rows(own: Mapping[str, Tensor], _: Any, rows: Tensor) -> Tensor:
        with inputs_seen(module, layer) as seen:
            functional_call(module, {**tensors, **own}, (rows,))
        return seen[0].flatten(1)

    own = tensors_of_norms(module, x, mask)
    if not own:
        return of_rows({}, None, x.flatten(0, 1)).unflatten(0, x.shape[:2])
    inputs = _of_each(of_rows, own, None, x)
    say_what_was_seen(module)
    return inputs


@contextmanager
def inputs_seen(module: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """Collect what a layer takes, one tensor for each run of the module in the context."""
    seen: list[Tensor] = []
    hook = module.get_submodule(layer).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    try:
        yield seen
    finally:
        hook.remove()


def spread_of(names: Iterable[str], site: str, key: Tensor) -> WeightSpread | None:
    """Return the guide's Normals of the sites `site` + name; None without any."""
    posteriors = {name: getattr(posterior_of(site + name), "base_dist", None) for name in names}
    normal = {name: fn for name, fn in posteriors.items() if type(fn) is dist.Normal}
    loc, scale = ({n: getattr(fn, of) for n, fn in normal.items()} for of in ("loc", "scale"))
    return WeightSpread(loc, scale, key) if normal else None
