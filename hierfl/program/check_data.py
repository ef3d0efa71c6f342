"""What fields may hold: finite numbers, and labels that their site can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions.constraints import Constraint

from hierfl.data.batch import ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.program.prior_centre import Centre
from hierfl.program.program import ProgramError
from hierfl.program.sites import Model
from hierfl.program.traces import in_clients, is_deterministic


def check_names(data: ClientData) -> None:
    """Refuse a field of the name of something else that every batch has: `batch.counts` would be another thing than was meant."""
    taken = {*dir(ClientBatch), *ClientBatch.__dataclass_fields__}
    for name in [*data.fields, *data.client_fields]:
        if name in taken:
            raise ValueError(
                f"a field cannot be named '{name}': batch.{name} is a part of every batch; rename it ('{name}_')"
            )


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


def label_fields(model: Model, trace: Any, batch: ClientBatch) -> dict[str, str]:
    """Observed site -> the field that it observes, as it is (`obs=batch.y`) or changed (`obs=batch.y.float()`).

    Args:
        model: that was traced.
        trace: of the batch.
        batch: of a few rows.

    Raises:
        ProgramError: a site observes what is made of several fields, or the model observes nothing.
    """
    values = {}
    for name, site in trace.nodes.items():
        observed = site["type"] == "sample" and site["is_observed"] and not is_deterministic(site)
        if observed and in_clients(site) and not isinstance(site["fn"], dist.Unit):
            values[name] = site["value"]
    known = {**batch.fields, **batch.client_fields}
    found = {name: [k for k, v in known.items() if v is value] for name, value in values.items()}
    if not all(found.values()):
        found = {
            name: fields or _made_of(model, name, values[name], batch)
            for name, fields in found.items()
        }
    for name, fields in found.items():
        if len(fields) > 1 and not any(known[k] is values[name] for k in fields):
            raise ProgramError(
                f"site '{name}' observes what is made of the fields {', '.join(fields)}: which of them is unknown when it is "
                f"predicted cannot be told; make it a field of its own, data.with_fields({name}=...)"
            )
    labels = {
        name: fields[0] for name, fields in found.items() if fields
    }  # one that observes no field (zeros, say) is no label
    if not labels:
        raise ProgramError(
            "the model observes no field inside the clients plate: give a likelihood, pyro.sample(..., obs=batch.y)"
        )
    return labels


def _made_of(model: Model, site: str, value: Tensor, batch: ClientBatch) -> list[str]:
    """Fields that an observed value changes with, by changing one at a time."""
    found = []
    for name, field in batch.fields.items():
        other = ~field if field.dtype == torch.bool else field + 1
        try:
            with Centre():
                nodes = (
                    poutine.trace(model)
                    .get_trace(replace(batch, fields={**batch.fields, name: other}))
                    .nodes
                )
        except (RuntimeError, ValueError, IndexError):
            continue  # a field that the model cannot take otherwise, an index say, is no label
        if not torch.equal(torch.as_tensor(nodes[site]["value"]), value):
            found.append(name)
    return found


def fields_read(program: Model, batch: ClientBatch, handler: Messenger) -> frozenset[str]:
    """Fields that a model or guide reads, found by running it on fields that tell."""
    read: set[str] = set()
    telling = replace(
        batch,
        fields=_Telling(batch.fields, read),
        client_fields=_Telling(batch.client_fields, read),
    )
    with handler:
        poutine.trace(program).get_trace(telling)
    return frozenset(read)


class _Telling(Mapping[str, Any]):
    """Fields that write down which of them is asked for."""

    def __init__(self, fields: Mapping[str, Any], read: set[str]) -> None:
        self.fields, self.read = fields, read

    def __getitem__(self, name: str) -> Any:
        value = self.fields[name]
        self.read.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def supports_of(
    trace: Any, labels: Mapping[str, str], data: ClientData
) -> dict[str, tuple[str, Constraint]]:
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
