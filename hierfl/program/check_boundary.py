"""The check that the clients plate is a privacy boundary: global sites depend on nothing local."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import untouched_store
from hierfl.program.held_tensors import leaves
from hierfl.program.module_weights import ModuleWeights
from hierfl.program.program import ProgramError
from hierfl.program.traces import Site, in_clients


class _Marked(Messenger):
    """Marks values of local sites and params by `requires_grad`, which all that depends on them inherits."""

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
    """Refuse a program with a global site that depends on a client's rows, local sites or local params.

    Aggregates over clients, such as means, are refused too: each client would see another value of the global
    site, and numbers would depend on which clients are in the plate together.

    Args:
        program: model or guide.
        batch: a few rows of some clients.
        what: "model" or "guide".
        *handlers: effect handlers that give values to its sites and params.

    Raises:
        ProgramError: a global site depends on something local; the message names the site.
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
            f"site '{found[0]}' is outside the clients plate in the {what}, but depends on something inside "
            f"it (a client's rows, local sites or local params): move it inside `with batch.clients():`, or "
            f"remove the dependence"
        )
