"""The params that a model learns without a prior."""

from __future__ import annotations

import torch
from pyro import poutine

from hierfl.posterior.snapshot import Snapshot
from hierfl.program.handlers import Answer, unchecked, untouched_store
from hierfl.program.program import ParamSpec


def learned_params(fit: Snapshot) -> tuple[ParamSpec, ...]:
    """Return the params that the model itself declares; those of the guide alone are left out."""
    program, batch = fit.program, fit.program.prototype
    params = fit.federation.client.params(fit.message, fit.federation.client.own)
    with untouched_store(), torch.no_grad(), unchecked():
        # conditioned on draws of the guide: not every prior can be drawn from
        given = poutine.condition(program.model, data=program.draw(params, batch))
        with Answer(params, batch):
            nodes = poutine.trace(given).get_trace(batch).nodes
    known = {spec.name: spec for spec in program.params}
    return tuple(known[name] for name, node in nodes.items() if node["type"] == "param")
