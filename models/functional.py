"""An `nn.Module` as a pure function of its weights, some of them local and some global."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from hierfl.models.client_norm import say_what_was_seen, tensors_of_norms, with_client_norms

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
                "prior, and averaging over clients often spoils them: use nn.GroupNorm or nn.LayerNorm"
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


def apply(
    module: nn.Module,
    own: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    x: Tensor,
    *,
    mask: Tensor | None,
) -> Tensor:
    """Return outputs (C, B, outputs) at params `own` (C, 1, *shape) and `shared`."""

    def of_client(own: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        output: Tensor = functional_call(module, {**shared, **own}, (rows,))
        return output

    own = {**own, **tensors_of_norms(module, x, mask)}
    if own:
        output = _of_each(of_client, own, x)
        say_what_was_seen(module)
    else:
        output = of_client({}, x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return output if output.dim() > 2 else output[..., None]


def _of_each(of_client: Callable[..., Tensor], own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return a function of one client's local tensors and rows for C clients, (C, ...)."""
    slots = {name: value[:, 0] for name, value in own.items()}
    if len(x) > 1:
        return torch.vmap(of_client)(slots, x)
    # a vmap nested in the engine's gives the same numbers, but takes 4% longer on a small network
    return of_client({name: value[0] for name, value in slots.items()}, x[0])[None]


def known_layer(module: nn.Module, layer: str, *, option: str) -> str:
    """Return the name of a layer, refusing one that the module does not have."""
    names = [name for name, _ in module.named_modules() if name]
    if layer not in names:
        raise ValueError(
            f"{option} is '{layer}', and the module's layers are {', '.join(names)}: name one of these"
        )
    return layer


def inputs_of(
    module: nn.Module, layer: str, tensors: Mapping[str, Tensor], x: Tensor, *, mask: Tensor | None
) -> Tensor:
    """Return what a layer takes of each row, flat: (C, B, D); `tensors` are global."""

    def of_rows(own: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        with inputs_seen(module, layer) as seen:
            functional_call(module, {**tensors, **own}, (rows,))
        return seen[0].flatten(1)

    own = tensors_of_norms(module, x, mask)
    if not own:
        return of_rows({}, x.flatten(0, 1)).unflatten(0, x.shape[:2])
    inputs = _of_each(of_rows, own, x)
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
