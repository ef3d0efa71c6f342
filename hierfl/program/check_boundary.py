"""The check that the clients plate is a privacy boundary, by what autograd reaches from a site."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import ModuleWeights, untouched_store
from hierfl.program.program import ProgramError
from hierfl.program.traces import Site, in_clients

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
    """Return a tensor's name in words: the weight of a module, or the variable that holds it."""
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


class _Marked(Messenger):
    """Marks values of local sites and params by `requires_grad`, which dependents inherit."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: set[Tensor] = set()
        self._weights = ModuleWeights()

    def __exit__(self, *error: Any) -> None:
        self._weights.leave()
        super().__exit__(*error)

    def marked(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor that carries a mark, if its dtype can."""
        if not value.is_floating_point():
            return value
        copy = value.detach().clone().requires_grad_()
        self.marks.add(copy)
        return copy

    def is_marked(self, site: Site) -> bool:
        """Return whether the value of a site, or its log density, depends on a marked value."""
        value = site["value"]
        density = site["fn"].log_prob(value)
        both = (found for found in (value, density) if isinstance(found, Tensor))
        return any(leaf in self.marks for tensor in both for leaf in leaves(tensor))

    def _pyro_post_sample(self, msg: Site) -> None:
        if in_clients(msg) and not msg["is_observed"]:
            msg["value"] = self.marked(msg["value"])

    def _pyro_post_param(self, msg: Site) -> None:
        msg["value"] = self.marked(msg["value"]) if in_clients(msg) else msg["value"].detach()
        self._weights.take(msg)


def check_boundary(
    program: Callable[[ClientBatch], Any], batch: ClientBatch, what: str, *handlers: Messenger
) -> None:
    """Refuse a global site that depends on a client's rows, local sites or local params.

    Means over clients are refused too: they depend on which clients are in the plate together.
    """
    handler = _Marked()
    marked = replace(
        batch,
        fields={name: handler.marked(v) for name, v in batch.fields.items()},
        client_fields={name: handler.marked(v) for name, v in batch.client_fields.items()},
        counts=handler.marked(batch.counts),
    )
    with untouched_store(), ExitStack() as stack, torch.enable_grad():
        for each in (handler, *handlers):
            stack.enter_context(each)
        try:
            nodes: Any = poutine.trace(program).get_trace(marked).nodes
        except RuntimeError:
            return  # the program takes values out of autograd (`.numpy()`), and cannot be checked
        found = [
            name
            for name, site in nodes.items()
            if site["type"] == "sample" and not in_clients(site) and handler.is_marked(site)
        ]
    if found:
        raise ProgramError(
            f"site '{found[0]}' is outside the clients plate in the {what}, but depends on "
            "something inside it (a client's rows, local sites or local params): move it inside "
            "`with batch.clients():`, or remove the dependence"
        )
