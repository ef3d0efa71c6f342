"""The params that a model learns without a prior."""

from __future__ import annotations

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace

from hierfl.posterior.snapshot import Snapshot
from hierfl.program.handlers import Answer, unchecked, untouched_store
from hierfl.program.program import ParamSpec


def learned_params(fit: Snapshot) -> tuple[ParamSpec, ...]:
    """Return the params that the model itself declares; those of the guide alone are left out."""
    known = {spec.name: spec for spec in fit.program.params}
    nodes = model_trace(fit).nodes
    return tuple(known[name] for name, node in nodes.items() if node["type"] == "param")


def model_trace(fit: Snapshot) -> Trace:
    """Trace the model at draws of the guide: not every prior can be drawn from."""
    program, batch = fit.program, fit.program.prototype
    params = fit.federation.client.params(fit.message, fit.federation.client.own)
    with untouched_store(), torch.no_grad(), unchecked():
        given = poutine.condition(program.model, data=program.draw(params, batch))
        with Answer(params, batch):
            return poutine.trace(given).get_trace(batch)
