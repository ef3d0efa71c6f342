"""The tensors that a result depends on, and what they are called where a user's function holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

DEPTH = 4  # functions within functions that are searched


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a tensor's graph, which require a gradient."""
    if tensor.requires_grad and tensor.grad_fn is None:
        yield tensor
    seen: set[Any] = set()
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead.extend(following for following, _ in node.next_functions)


def named(tensor: Tensor, *functions: Callable[..., Any]) -> str:
    """Return a tensor's name in words: the weight of a module, or the variable that holds it.

    Args:
        tensor: that a run of the functions reached.
        *functions: whose closures, globals, defaults and attributes are searched.
    """
    shape = tuple(tensor.shape)
    for function in functions:
        for name, value in _held(function, DEPTH):
            if value is tensor:
                return f"tensor '{name}' of shape {shape}"
            if isinstance(value, nn.Module):
                for weight, own in value.named_parameters():
                    if own is tensor:
                        return f"weight '{weight}' of module '{name}' ({type(value).__name__})"
    return f"a tensor of shape {shape}"


def _held(function: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what a function holds, and of what the functions among those hold."""
    if isinstance(function, nn.Module):
        yield type(function).__name__, function
        return
    if isinstance(function, partial):
        found = {
            "the function": function.func,
            **{str(i): v for i, v in enumerate(function.args)},
            **function.keywords,
        }
    elif hasattr(function, "__code__"):
        found = _of_function(function)
    elif hasattr(function, "__self__"):
        found = {"self": function.__self__, "the function": function.__func__}
    else:
        found = dict(getattr(function, "__dict__", {}))
    for name, value in found.items():
        yield name, value
        if (
            depth
            and (callable(value) or name == "self")
            and not isinstance(value, type | nn.Module)
        ):
            yield from _held(value, depth - 1)


def _of_function(function: Any) -> dict[str, Any]:
    """Return the closure, the globals in use, and the defaults of a function, by name."""
    code, held = function.__code__, {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # the variable is not set yet
            continue
    held |= {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    count = len(function.__defaults__ or ())
    arguments = code.co_varnames[: code.co_argcount]
    held |= dict(zip(arguments[len(arguments) - count :], function.__defaults__ or (), strict=True))
    return held | dict(function.__kwdefaults__ or {})
