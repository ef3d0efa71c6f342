"""What fields may hold: finite numbers, and labels that their site can take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions.constraints import Constraint

from hierfl.batch import ClientBatch, full_batch
from hierfl.data import ClientData
from hierfl.program import ProgramError, in_clients, is_deterministic
from hierfl.sites import Model
from hierfl.start import Centre


def check_names(data: ClientData) -> None:
    """Refuse a field of the name of something else that every batch has: `batch.counts` would be another thing than was meant."""
    taken = {*dir(ClientBatch), *ClientBatch.__dataclass_fields__}
    for name in [*data.fields, *data.client_fields]:
        if name in taken:
            raise ValueError(f"a field cannot be named '{name}': batch.{name} is a part of every batch; rename it ('{name}_')")


def check_finite(data: ClientData) -> None:
    """Refuse NaN and infinity, naming the field, the client and how many there are."""
    for name, values in {**data.fields, **data.client_fields}.items():
        if values.is_floating_point():
            bad = ~values.isfinite().flatten(1).all(1) if values.dim() > 1 else ~values.isfinite()
            if bool(bad.any()):
                row = int(bad.nonzero()[0])
                client = data.names[int(data.row_client[row]) if name in data.fields else row]
                raise ValueError(
                    f"field '{name}' has NaN or infinity in {int(bad.sum())} rows, the first of client '{client}': "
                    f"fill it (hierfl.fill_missing adds indicators of what was missing), or model it"
                )


def label_fields(trace: Any, batch: ClientBatch) -> dict[str, str]:
    """Observed site -> the field that it observes."""
    found = {}
    for name, site in trace.nodes.items():
        observed = site["type"] == "sample" and site["is_observed"] and not is_deterministic(site)
        if observed and in_clients(site) and not isinstance(site["fn"], dist.Unit):
            fields = [k for k, v in {**batch.fields, **batch.client_fields}.items() if v is site["value"]]
            found[name] = fields[0] if fields else ""
    if not found:
        raise ProgramError(
            "the model observes nothing inside the clients plate: give a likelihood, pyro.sample(..., obs=batch.y)"
        )
    return found


def supports_of(trace: Any, labels: Mapping[str, str], data: ClientData) -> dict[str, tuple[str, Constraint]]:
    """Label field -> (its site, the values it can take), where these are the same for every row."""
    supports = {}
    for site, name in labels.items():
        fn = trace.nodes[site]["fn"]
        base = getattr(fn, "base_dist", fn)
        if name in data.fields and not fn.event_shape and not by_row(fn):
            supports[name] = (f"'{site}' ({type(base).__name__})", fn.support)
    return supports


def by_row(fn: Any) -> bool:
    """Whether what a site can take differs from row to row: a Binomial's number of trials."""
    return isinstance(getattr(getattr(fn, "base_dist", fn), "total_count", None), Tensor)


def check_labels_by_row(model: Model, data: ClientData, sites: Iterable[str]) -> None:
    """Refuse labels that their row cannot take, by the model's own distributions, some clients at a time."""
    sites = list(sites)
    for ids in torch.arange(data.num_clients).split(256) if sites else ():
        batch = full_batch(data, ids)
        with Centre():
            nodes: dict[str, Any] = poutine.trace(model).get_trace(batch).nodes
        for site in sites:
            good = nodes[site]["fn"].support.check(nodes[site]["value"]) | ~batch.mask()
            if not bool(good.all()):
                client, row = (~good).nonzero()[0].tolist()
                raise ValueError(
                    f"site '{site}' ({type(nodes[site]['fn']).__name__}) of client '{data.names[int(ids[client])]}' has the value "
                    f"{nodes[site]['value'][client, row].item():g}, outside the support of its row; {int((~good).sum())} rows are"
                )


def check_labels(program_supports: Mapping[str, tuple[str, Constraint]], data: ClientData) -> None:
    """Refuse labels that their site cannot take, naming the client, the value and the site."""
    for name, (site, support) in program_supports.items():
        if name not in data.fields:
            continue
        good = support.check(data.fields[name])
        if not bool(good.all()):
            row = int((~good).nonzero()[0, 0])
            raise ValueError(
                f"field '{name}' of client '{data.names[int(data.row_client[row])]}' has the value "
                f"{data.fields[name][row].item():g}, outside the support {support} of site {site}; {int((~good).sum())} rows are"
            )


def check_scored(trace: Any, labels: Mapping[str, str]) -> None:
    """Refuse labels of a kind that their site cannot score (integers under torch's Bernoulli), naming field and site."""
    for name, label in labels.items():
        site = trace.nodes[name]
        try:
            site["fn"].log_prob(site["value"])
        except (ValueError, RuntimeError) as error:
            kind, dtype = (
                type(getattr(site["fn"], "base_dist", site["fn"])).__name__,
                str(site["value"].dtype).removeprefix("torch."),
            )
            raise ProgramError(
                f"site '{name}' ({kind}) cannot score field '{label}', of dtype {dtype} and shape {tuple(site['value'].shape)}: {error}; "
                f"labels of another dtype: data.with_fields({label}=data.fields['{label}'].to(torch.get_default_dtype()))"
            ) from error
