"""The fields that a model reads: checks of labels inside their support, of scales; missing values."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.constraints import Constraint

from hierfl.core.user_warnings import warn
from hierfl.data.batch import ClientBatch, cut_ragged, full_batch, gather, keys_of, rows_along
from hierfl.data.clients import ClientData
from hierfl.data.consistency import RowsFault
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Program, ProgramError
from hierfl.program.sites import Model
from hierfl.program.supports import in_words, kind_of, support_of
from hierfl.program.traces import (
    Center,
    Near,
    Site,
    in_clients,
    is_deterministic,
    is_factor,
    observe_others,
    with_one_changed,
)


def label_fields(
    model: Model, trace: Any, batch: ClientBatch
) -> tuple[dict[str, str], frozenset[str]]:
    """Return site -> the field it observes, as it is or transformed, and the sites that observe none or several."""
    columns = {**batch.fields, **batch.client_fields}
    observing: dict[str, list[str]] = {}
    for name, site in trace.nodes.items():
        observed = site["type"] == "sample" and site["is_observed"] and not is_deterministic(site)
        if observed and in_clients(site) and not is_factor(site):
            observing[name] = [k for k, v in columns.items() if v is site["value"]]
    labels, computed = {}, set()
    for name, same in observing.items():
        fields = list(same)
        for changed, nodes in () if same else with_one_changed(model, batch):
            if observe_others(nodes[name], trace.nodes[name]):
                fields.append(changed)
        if same or len(fields) == 1:
            labels[name] = fields[0]
        else:  # or none, zeros for example, where its parameters may read fields
            computed.add(name)
    return labels, frozenset(computed)


class Recorded(UserDict[str, Any]):
    """Fields that record each access in `read`; the number of their rows is known without one."""

    def __init__(
        self, fields: Mapping[str, Any], read: set[str], num_rows: int | None = None
    ) -> None:
        super().__init__(fields)
        self.read, self.num_rows = read, num_rows

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.data[name]


def checked_labels(
    model: Model, trace: Any, labels: Mapping[str, str], data: ClientData, batch: ClientBatch
) -> dict[str, tuple[str, Constraint]]:
    """Return label field -> (site, common support); refuse labels that their site cannot score."""
    supports, by_rows = {}, []
    for site, name in labels.items():
        fn = trace.nodes[site]["fn"]
        base = getattr(fn, "base_dist", fn)
        # the support differs by row, as with a Binomial's trials
        by_row = isinstance(getattr(base, "total_count", None), Tensor) and not fn.event_shape
        if by_row:
            by_rows.append(site)
        elif _is_field(trace.nodes[site]["value"], batch.fields.get(name)) and not fn.event_shape:
            support = support_of(site, fn)
            if _moves(model, site, support, batch):
                continue
            if _ends_by_row(support):
                by_rows.append(site)
            else:
                supports[name] = (f"'{site}' ({type(base).__name__})", support)
    check_labels(supports, data)
    for site, name in labels.items():
        fn, value = trace.nodes[site]["fn"], trace.nodes[site]["value"]
        try:
            fn.log_prob(value)
        except (ValueError, RuntimeError, IndexError) as error:
            ends = _is_scored(model, site, batch)
            why = _beyond(site, fn) if ends else _unscored(site, fn, value, name)
            raise ProgramError(why) from error
    if by_rows:
        with untouched_store():
            _check_labels_by_row(model, data, by_rows)
    return supports


def _ends_by_row(support: Constraint) -> bool:
    return any(isinstance(end, Tensor) and end.numel() > 1 for end in vars(support).values())


def _moves(model: Model, site: str, support: Constraint, batch: ClientBatch) -> bool:
    """Return whether the ends of an observed site's support depend on latent sites."""
    ends = [end for end in vars(support).values() if isinstance(end, Tensor)]
    if not ends:
        return False
    with untouched_store(), unchecked(), Near(1.0, 0):
        node: Site = poutine.trace(model).get_trace(batch).nodes[site]
    others = [end for end in vars(node["fn"].support).values() if isinstance(end, Tensor)]
    return not all(map(torch.equal, ends, others))


def _is_field(value: Tensor, field: Tensor | None) -> bool:
    """Return whether an observed value is a field as it is, apart from its type and missing values."""
    if field is None or value.shape != field.shape:
        return False
    there = field.isfinite()
    return torch.equal(value.double()[there], field.double()[there])


def _check_labels_by_row(model: Model, data: ClientData, sites: list[str]) -> None:
    """Refuse labels outside a support that differs by row, as the model's distributions say."""
    for ids in cut_ragged(torch.arange(data.num_clients).split(256), data.counts, most=256):
        batch = full_batch(data, ids)
        with Center():
            nodes: dict[str, Any] = poutine.trace(model).get_trace(batch).nodes
        for site in sites:
            fn, value = nodes[site]["fn"], nodes[site]["value"]
            good = fn.support.check(value) | ~batch.mask() | value.isnan()
            if not bool(good.all()):
                client, row = (~good).nonzero()[0].tolist()
                raise RowsFault(
                    f"site '{site}' ({type(fn).__name__}) of client "
                    f"'{data.names[int(ids[client])]}' has the value "
                    f"{value[client, row].item():g}, outside the support of its row; "
                    f"{int((~good).sum())} rows are outside theirs",
                    f"a label of site '{site}' is outside its support",
                )


def check_labels(program_supports: Mapping[str, tuple[str, Constraint]], data: ClientData) -> None:
    """Refuse labels outside the support of their site (`supports_of`)."""
    for name, (site, support) in program_supports.items():
        if name not in data.fields:
            continue
        values = data.fields[name]
        if len(values) and values.stride(0) == 0:  # one number stands in for those of all rows
            values = values[:1]
        good = support.check(
            values.to(torch.get_default_dtype()) if values.dtype == torch.bool else values
        )
        if values.is_floating_point():
            good = good | ~values.isfinite()  # `check_missing` looks at these
        if not bool(good.all()):
            row = int((~good).nonzero()[0, 0])
            raise RowsFault(
                f"field '{name}' of client '{data.names[int(data.row_client[row])]}' has the value "
                f"{float(values[row].flatten()[0]):g}, outside the support {in_words(support)} of "
                f"site {site}; "
                f"{int((~good).sum())} rows are outside it: {_fix(name, values, support)}",
                f"field '{name}' has a value outside the support of its site",
            )


def _fix(name: str, values: Tensor, support: Constraint) -> str:
    high = getattr(support, "upper_bound", None)
    if isinstance(high, int) and int(values.min()) == 1 and int(values.max()) == high + 1:
        return f"code the classes from 0, data.with_fields({name}=data.fields['{name}'] - 1)"
    return "correct the labels, or choose a likelihood that allows them"


def _is_scored(model: Model, site: str, batch: ClientBatch) -> bool:
    """Return whether labels have a density, 0 or not a number beyond the ends of their site."""
    with untouched_store(), unchecked(), Center():
        node: Site = poutine.trace(model).get_trace(batch).nodes[site]
    try:
        return bool(node["fn"].log_prob(node["value"]).shape == batch.mask().shape)
    except (ValueError, RuntimeError, IndexError):
        return False


def _beyond(name: str, fn: Any) -> str:
    return (
        f"labels of site '{name}' ({kind_of(fn)}) lie beyond where it ends at the starting values of "
        "other sites: give these priors that end at the labels, as Uniform(0.0, least) of a shift, or "
        "largest + HalfNormal(1.0) of a limit"
    )


def _unscored(name: str, fn: Any, value: Tensor, label: str) -> str:
    kind = type(getattr(fn, "base_dist", fn)).__name__
    what = f"site '{name}' ({kind}) cannot score field '{label}', of dtype {value.dtype}"
    own, event = tuple(value.shape[2:]), tuple(fn.event_shape)
    if own != event:
        what = (
            f"site '{name}' ({kind}) observes shape {event} per row, but field '{label}' has {own}"
        )
    column = f"data.with_fields({label}=...)"
    return f"{what}: give one entry of that shape, of the model's dtype, per row, {column}"


def holes(data: ClientData) -> dict[str, Tensor]:
    """Return the fields with NaN or infinity: name -> whether each row (n,) or client (N,) has any."""
    missing = {}
    for name, values in {**data.fields, **data.client_fields}.items():
        # a sum tells in a tenth of the time; one of large values may be infinite itself
        rows = values if values.stride(0) else values[:1]  # of rows that are not there
        if values.is_floating_point() and not bool(rows.sum().isfinite()):
            bad = ~values.isfinite()
            bad = bad.flatten(1).any(1) if bad.dim() > 1 else bad
            if bool(bad.any()):
                missing[name] = bad
    return missing


FAR = 1000.0  # of mean or standard deviation; units such as years and kilograms stay below


def warn_of_unscaled(program: Program, data: ClientData) -> None:
    """Warn of number columns whose mean or sd exceeds `FAR`; only unbounded labels are looked at."""
    if hasattr(
        inspect.unwrap(program.model), "all_priors"
    ):  # a formula's priors are in the units of its columns
        return
    for name in sorted(program.reads.model & set(data.fields)):
        support = program.supports.get(name, ("", constraints.real))[1]
        if support is not constraints.real or data.fields[name].dim() > 2:
            continue
        far = list(_far(data, name))
        if far and _is_number(program, name):
            others = f", and {len(far) - 1} more columns" if len(far) > 1 else ""
            warn(
                f"{far[0]}{others}: default priors and step sizes are for columns of about unit "
                f"scale; scale it, hierfl.standardize(train, test, fields=('{name}',))",
            )


def _far(data: ClientData, name: str) -> Iterator[str]:
    values = data.fields[name]
    if values.dtype == torch.bool or len(values) < 2:
        return
    columns = values if values.dim() == 2 else values[:, None]
    low, high = columns.aminmax(dim=0)
    largest: Tensor = torch.maximum(low.double().abs(), high.double().abs())
    # the mean and sd of the others are smaller still
    for j in (largest > FAR).nonzero()[:, 0].tolist():
        column = columns[:, j].double()
        mean, sd = column.mean().item(), column.std().item()
        if max(abs(mean), sd) > FAR:
            labels = data.features.get(name)
            which = f"field '{name}'"
            if values.dim() == 2:
                which = f"column '{labels[j]}' of {which}" if labels else f"column {j} of {which}"
            yield f"{which} has mean {mean:,.6g} and sd {sd:,.6g}"


def _is_number(program: Program, name: str) -> bool:
    """Return whether the model runs on the field as floats, which cannot be an index."""
    batch: ClientBatch = program.prototype
    values = batch.fields[name]
    if values.is_floating_point():
        return True
    floats = replace(batch, fields={**batch.fields, name: values.to(batch.counts.dtype)})
    try:
        with untouched_store(), Center():
            poutine.trace(program.model).get_trace(floats)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True


PROTOTYPE_ROWS = 5  # neither 1 nor 2, so that the plates of rows and of clients differ in size


def codes_of(data: ClientData) -> dict[str, tuple[int, int]]:
    """Return the range of each integer field that may hold codes: of two dimensions at most."""
    ranges = {}
    for name, values in data.fields.items():
        if not values.is_floating_point() and values.dtype != torch.bool and values.dim() <= 2:
            rows = values if values.stride(0) else values[:1]  # of rows that are not there
            ranges[name] = int(rows.min()), int(rows.max())
    return ranges


def prototype_of(data: ClientData, ids: list[int]) -> ClientBatch:
    """Return rows from all along some clients, padded to `PROTOTYPE_ROWS`."""
    chosen = torch.tensor(ids)
    inside, index = rows_along(data, chosen, PROTOTYPE_ROWS)
    return gather(data, chosen, index, inside, keys_of(data, chosen, 0, 0))


def of_codes(data: ClientData, names: Iterable[str]) -> Iterator[ClientBatch]:
    """Yield a client of the rows with the least and the largest codes, and the client with the least of all."""
    for name in names:
        values = data.fields[name].reshape(data.num_rows, -1)
        index = torch.cat([values.argmin(0), values.argmax(0)]).unique()[None]
        first = data.row_client[index[0, :1]]
        yield gather(data, first, index, None, keys_of(data, first, 0, 0))
        largest = torch.full((data.num_clients,), -1, dtype=values.dtype)
        largest.scatter_reduce_(0, data.row_client, values.amax(1), "amax")
        yield full_batch(data, largest.argmin()[None])
