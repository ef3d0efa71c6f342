"""The clients plate is the privacy boundary: what stands outside it may depend on nothing that is one client's."""

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
    """Marks the values of local sites and params, as `requires_grad`; what is made of them then bears the mark."""

    def _pyro_post_sample(self, msg: Site) -> None:
        if in_clients(msg) and not msg["is_observed"]:
            msg["value"] = _marked(msg["value"])

    def _pyro_post_param(self, msg: Site) -> None:
        msg["value"] = _marked(msg["value"]) if in_clients(msg) else msg["value"].detach()


def check_boundary(
    program: Callable[[ClientBatch], Any], batch: ClientBatch, what: str, *handlers: Messenger
) -> None:
    """Refuse a program of which a global site is made of a client's rows, local sites or local params, however it is summed up.

    Each client would see a global site of its own, and the numbers would depend on who else is in the plate.

    Args:
        program: model or guide.
        batch: a few rows of some clients.
        what: "model" or "guide".
        *handlers: that give it values.

    Raises:
        ProgramError: naming the site.
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
        except (
            RuntimeError
        ):  # a program that takes values out of autograd's sight cannot be looked through
            return
        found = [
            name
            for name, site in nodes.items()
            if site["type"] == "sample" and not in_clients(site) and _bears(site)
        ]
    if found:
        raise ProgramError(
            f"site '{found[0]}' stands outside the clients plate in the {what}, but is made of what stands inside (a client's rows, "
            f"local sites or local params): move it inside `with batch.clients():`, or leave out what is a client's own"
        )


def _marked(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_() if value.is_floating_point() else value


def _bears(site: Site) -> bool:
    value = site["value"]
    if isinstance(value, Tensor) and value.requires_grad:
        return True
    density = site["fn"].log_prob(value)
    return isinstance(density, Tensor) and density.requires_grad
