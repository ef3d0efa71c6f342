"""A model in lines of text: its sites with their distributions, plates and parents, and its source."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.inspect import get_model_relations

from hierfl.data.batch import CLIENTS, ClientBatch
from hierfl.program.traces import Site

WRAPPERS = (dist.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)
SHOWN = 8  # numbers of an argument that are written out


def relations_of(model: Any, batch: ClientBatch) -> dict[str, Any] | None:
    """Return the model's sites and what each depends on, and a trace; None where it cannot run alone."""
    try:
        with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
            relations: dict[str, Any] = get_model_relations(model, (batch,))
            return {**relations, "trace": poutine.trace(model).get_trace(batch)}
    except (RuntimeError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
        return None


def site_lines(graph: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each site of `relations_of`."""
    plates, trace = graph["plate_sample"], graph["trace"]
    local = set(plates.get(CLIENTS, ()))
    for name, above in graph["sample_sample"].items():
        site = trace.nodes[name]
        what = ["observed"] if name in graph["observed"] else []
        what += ["of each client" if name in local else "global"]
        what += [
            f"plate {plate}" for plate, of in plates.items() if name in of and plate != CLIENTS
        ]
        what += [f"given {', '.join(above)}"] if above else []
        kind = graph["sample_dist"][name]
        shown = kind if above or name in local else _written(kind, site)
        yield f"  {name} ~ {shown}  ({'; '.join(what)}; shape {tuple(site['value'].shape)})"


def _written(kind: str, site: Site) -> str:
    """Return a distribution with its short arguments."""
    fn = site["fn"]
    while isinstance(fn, WRAPPERS):
        fn = fn.base_dist
    arguments = []
    for name in getattr(fn, "arg_constraints", {}):
        # a distribution that holds logits may compute probabilities, which are not written again
        value = vars(fn).get(name, getattr(fn, name) if hasattr(fn, "transforms") else None)
        if isinstance(value, torch.Tensor):
            values = value.unique() if value.numel() > 1 else value.flatten()
            some = ", ".join(f"{float(v):.6g}" for v in values[:SHOWN])
            arguments.append(f"{name} {some if len(values) <= SHOWN else f'{some}, ...'}")
    return f"{kind}({', '.join(arguments)})" if arguments else kind


def source_lines(model: Any) -> list[str]:
    """Return the source of a model."""
    try:
        return inspect.getsource(model).rstrip().splitlines()
    except (OSError, TypeError):
        return [f"  not in a file: {type(model).__name__}; see the settings"]
