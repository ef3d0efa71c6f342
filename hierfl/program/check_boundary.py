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
from hierfl.program.program import ProgramError
from hierfl.program.traces import Site, in_clients


class _Marked(Messenger):
    """Marks values of local sites and params by `requires_grad`, which all that depends on them inherits."""

    def _pyro_post_sample(self, msg: Site) -> None:
        if in_clients(msg) and not msg["is_observed"]:
            msg["value"] = _marked(msg["value"])

    def _pyro_post_param(self, msg: Site) -> None:
        msg["value"] = _marked(msg["value"]) if in_clients(msg) else msg["value"].detach()


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
    marked = replace(
        batch,
        fields={name: _marked(v) for name, v in batch.fields.items()},
        client_fields={name: _marked(v) for name, v in batch.client_fields.items()},
        counts=_marked(batch.counts),
    )
    with untouched_store(), ExitStack() as stack, torch.enable_grad():
        for handler in (_Marked(), *handlers):
            stack.enter_context(handler)
        try:
            nodes: Any = poutine.trace(program).get_trace(marked).nodes
        except RuntimeError:
            return  # the program takes values out of autograd (`.numpy()`), and cannot be checked
        found = [
            name
            for name, site in nodes.items()
            if site["type"] == "sample" and not in_clients(site) and _is_marked(site)
        ]
    if found:
        raise ProgramError(
            f"site '{found[0]}' is outside the clients plate in the {what}, but depends on something inside "
            f"it (a client's rows, local sites or local params): move it inside `with batch.clients():`, or "
            f"remove the dependence"
        )


def _marked(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_() if value.is_floating_point() else value


def _is_marked(site: Site) -> bool:
    """Return whether the value of a site, or its log density, depends on a marked value."""
    value = site["value"]
    if isinstance(value, Tensor) and value.requires_grad:
        return True
    density = site["fn"].log_prob(value)
    return isinstance(density, Tensor) and density.requires_grad
