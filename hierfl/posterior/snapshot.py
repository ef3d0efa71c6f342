"""What diagnostics read of a fit, its restriction to clients, and fits without rows."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from hierfl.core.arguments import NoSuchName, shown
from hierfl.core.trees import Tree
from hierfl.data.absent import is_absent, stand_in
from hierfl.data.batch import expect_client_data
from hierfl.data.clients import ClientData
from hierfl.data.preprocess import read_frame
from hierfl.engine.client_store import subset
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress
from hierfl.method import Method
from hierfl.program.check_dependence import check_labels_given, check_padding, is_ragged
from hierfl.program.handlers import Substitute, unchecked, untouched_store
from hierfl.program.labels import check_labels
from hierfl.program.missing import check_missing
from hierfl.program.program import Params, ParamSpec, Program
from hierfl.program.sites import COMMON
from hierfl.program.without_rows import WithoutRows, of_all_sites

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames


class Snapshot:
    """A run at some round: a `hierfl.Fit`, or its restriction to some clients."""

    method: Method
    federation: Federation
    progress: Progress
    message: Tree  # the server's last one: all that draws and predictions know of other clients

    @property
    def program(self) -> Program:
        """The checked program."""
        return self.federation.program

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, in the order of the data."""
        return self.federation.data.names

    @property
    def history(self) -> pd.DataFrame:
        """One row per round: clients, what the method logs, bytes down and up, seconds, score.

        With `on_client_error="skip"`, `left_out` lists the clients that were left out, with the
        reason. `far_out` lists updates far larger than the others': client, share, norm in medians.
        """
        return pd.DataFrame(list(self.progress.history))

    @property
    def params_at_first(self) -> Params:
        """The params of a client before its first round, at the last message."""
        client = self.federation.client
        return client.params(self.message, client.own)

    def _rows(self, rows: "ClientData | Frames", *, matched: bool = True) -> Any:
        """Return rows as the program reads them; frames are read as those that were fitted."""
        if isinstance(rows, ClientData):
            return rows
        fitted = self.federation.data
        if fitted.client_column:
            return read_frame(rows, fitted.client_column, fitted)
        from hierfl.formulas.formula import rows_of  # with pandas

        return rows_of(self.method.model, rows, self.clients, asked=matched)


@dataclass(frozen=True, eq=False)
class Restricted(Snapshot):
    """A snapshot restricted to some of its clients, with the message of the whole run."""

    method: Method
    federation: Federation
    progress: Progress
    message: Tree


def expect_fit(value: Any, what: str = "fit") -> None:
    """Refuse what is no fit, where one is expected as the argument `what`."""
    if not isinstance(getattr(value, "federation", None), Federation):
        raise TypeError(
            f"{what} is {shown(value)}: pass what hierfl.fit(method, data, ...) returned"
        )


def restricted(
    fit: Snapshot, rows: ClientData, *, fields: frozenset[str] | None = None
) -> Restricted:
    """Restrict a snapshot to the clients of some rows, in their order, and to `fields`."""
    expect_client_data(rows, "the rows to predict")
    unknown = [name for name in rows.names if name not in set(fit.clients)]
    if unknown:
        some = ", ".join(fit.clients[:4]) + ", ..." * (len(fit.clients) > 4)
        raise NoSuchName(
            f"client '{unknown[0]}' was not fitted, but {some}: correct the name, leave its rows "
            "out, infer it first, fit.personalize(its data).predict(...), or predict it from the "
            "level above the clients, hierfl.predict_from_prior(fit, rows)"
        )
    check_rows(fit, rows, fit.program.reads.model)
    check_labels_given(fit.program, rows)
    data = fit.federation.data
    own = data if fields is None else with_fields_alone(data, fields)
    return _of_clients(fit, own, data.index(rows.names))


def first_client(fit: Snapshot) -> Restricted:
    """Restrict a snapshot to its first client, for what does not depend on the client."""
    return _of_clients(fit, fit.federation.data, torch.tensor([0]))


def _of_clients(fit: Snapshot, data: ClientData, ids: Tensor) -> Restricted:
    federation = replace(fit.federation, data=data.select(ids))
    progress = replace(fit.progress, table=subset(fit.progress.table, ids))
    return Restricted(fit.method, federation, progress, fit.message)


def with_fields_alone(data: ClientData, names: frozenset[str]) -> ClientData:
    """Return clients with as many rows as they have, of these fields alone."""
    others = [name for name in data.fields if name not in names]
    if len(others) == len(data.fields):  # a row still counts: one field stays, without its values
        data = data.with_fields(**{others.pop(): torch.zeros(data.num_rows)})
    return data.without(*others)


def check_rows(fit: Snapshot, rows: ClientData, reads: frozenset[str]) -> None:
    """Refuse rows that the program cannot be run on; labels may be absent."""
    expect_client_data(rows, "data")
    missing = reads - {*fit.program.labels.values(), *rows.fields, *rows.client_fields}
    if missing:
        raise ValueError(
            f"the rows have no field '{min(missing)}', which the model or its guide reads: add it"
        )
    for name, values in rows.fields.items():
        like = fit.federation.data.fields.get(name)
        if like is not None and values.shape[1:] != like.shape[1:]:
            raise ValueError(
                f"a row of '{name}' has shape {tuple(values.shape[1:])}; "
                f"it was {tuple(like.shape[1:])} when fitted: give the same columns"
            )
    _check_levels(fit.federation.data, rows, reads | {*fit.program.labels.values()})
    check_missing(fit.program, rows)
    check_labels(fit.program.supports, rows)
    if not is_ragged(fit.federation.data):  # otherwise it was checked when it was read
        check_padding(fit.program, rows)


def _check_levels(fitted: ClientData, rows: ClientData, names: Collection[str]) -> None:
    """Refuse rows whose codes stand for other levels than those of the training rows."""
    for key in {*fitted.levels, *rows.levels}:
        name = key.partition("[")[0]
        if name not in names or name not in {**rows.fields, **rows.client_fields}:
            continue
        old, new = fitted.levels.get(key), rows.levels.get(key)
        if old != new:
            raise ValueError(
                f"the codes of '{key}' stand for {_listed(new)}, but for {_listed(old)} when "
                "fitted: code all rows in the same way, ClientData.from_frame(..., levels=train.levels)"
            )


def _listed(levels: tuple[str, ...] | None) -> str:
    if levels is None:
        return "numbers"
    return ", ".join(levels[:8]) + (", ..." if len(levels) > 8 else "")


def learned_params(fit: Snapshot) -> tuple[ParamSpec, ...]:
    """Return the params that the model itself declares; those of the guide alone are left out."""
    specs = {spec.name: spec for spec in fit.program.params}
    nodes = model_trace(fit).nodes
    return tuple(specs[name] for name, node in nodes.items() if node["type"] == "param")


def model_trace(fit: Snapshot) -> Trace:
    """Trace the model at draws of the guide: not every prior can be drawn from."""
    program, batch, params = fit.program, fit.program.prototype, fit.params_at_first
    with untouched_store(), torch.no_grad(), unchecked():
        values = of_all_sites(program.draw(params, batch), program.latents, program.model)
        conditioned = poutine.condition(program.model, data=values)
        with Substitute(params, batch):
            return poutine.trace(conditioned).get_trace(batch)


def lacks_rows(fit: Snapshot) -> bool:
    """Return whether the rows of a fit's clients are not there."""
    return is_absent(fit.federation.data) or isinstance(fit.program.guide, WithoutRows)


def by_state_alone(fit: Snapshot) -> Snapshot:
    """Return a fit that computes what depends on no missing rows; made-up ones stand in, which it cannot read."""
    if not is_absent(fit.federation.data):
        return fit
    old = fit.federation.program
    program = replace(old, model=WithoutRows(old.model), guide=WithoutRows(old.guide))
    data = stand_in(fit.federation.data, 0)
    federation = replace(fit.federation, data=data, program=program)
    return Restricted(fit.method, federation, fit.progress, fit.message)


def all_sites(program: Program) -> tuple[str, ...]:
    """Return the names of all sites, latent and deterministic."""
    names = (site.name for site in program.latents.sites if site.name != COMMON)
    return (*names, *program.derived)


def global_sites(program: Program) -> frozenset[str]:
    """Return the names of the global sites, latent and deterministic."""
    latent = {site.name for site in program.latents.sites if not site.is_local} - {COMMON}
    return frozenset(latent | {n for n, plates in program.derived.items() if plates is None})
