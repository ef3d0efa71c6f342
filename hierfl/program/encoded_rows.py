"""Latent sites of rows that a guide encodes, as in a variational autoencoder: a term of the likelihood.

    E_q[log p(y | e, z)] - KL(q(e | y, z) || p(e | z)),    e the sites of a row

q is the guide's distribution of the sites in its data plate. They are drawn by the client's keys, and
what is left of model and guide has no site of rows; the encoder's params are learned with the others.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import wraps
from typing import Any

import pyro
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import Substitute, keyed_draw, untouched_store
from hierfl.program.row_runs import At, RowTerm, isolated
from hierfl.program.sites import Guide, Model, Values
from hierfl.program.traces import (
    AtSites,
    Middle,
    Site,
    divergence,
    in_data,
    is_latent,
    middle,
    samples,
)
from hierfl.program.wrapped import under

NO_TERM = RowTerm("", (), ())


def with_encoded_rows(model: Model, guide: Guide, batch: ClientBatch) -> tuple[Model, Guide]:
    """Return a model and a guide without the sites that the guide has in the data plate."""
    try:
        with untouched_store(), Substitute({}, batch):
            trace = poutine.trace(guide).get_trace(batch)
    except Exception:  # whatever a guide raises; it is read later, which says what is wrong
        return model, guide
    names = frozenset(n for n, site in samples(trace) if is_latent(site) and in_data(site))
    if not names:
        return model, guide

    @wraps(model, updated=())
    def encoding(batch: ClientBatch) -> Any:
        rows = _Encoding(guide, names, batch)
        with rows:
            rows.declare()
            return model(batch)

    def hide(site: Site) -> None:
        if site["name"] in names:
            site["stop"] = True
            site["value"], site["done"] = middle(site["fn"]), True

    return encoding, under(guide, lambda _: AtSites(hide))


class _Encoding(Messenger):
    """Draws sites of a model's rows from its guide, and counts their divergence."""

    def __init__(self, guide: Guide, names: Collection[str], batch: ClientBatch) -> None:
        super().__init__()
        self.guide, self.names, self.batch = guide, names, batch
        self.params: Values = {}
        self.values: Values = {}
        self.latent: set[str] = set()
        self.encoded: dict[str, Site] = {}

    def declare(self) -> None:
        """Declare the guide's params, before the plates of the model are open."""
        with poutine.block(hide_types=["sample"]), Middle():
            self.guide(self.batch)

    def _pyro_post_param(self, msg: Site) -> None:
        self.params[msg["name"]] = msg["value"]

    def _pyro_sample(self, msg: Site) -> None:
        name = msg["name"]
        if name not in self.names:
            if is_latent(msg):  # handlers outside may condition it
                self.latent.add(name)
            return
        if not self.encoded:
            self.encoded = self._run()
        site = self.encoded[name]
        msg["stop"], msg["value"], msg["done"] = True, site["value"], True
        pyro.factor(f"{name}_encoded", _minus_divergence(site, msg["fn"]))

    def _pyro_post_sample(self, msg: Site) -> None:
        if msg["name"] in self.latent:
            self.values[msg["name"]] = msg["value"]

    def _run(self) -> dict[str, Site]:
        """Return the sites of the guide at the model's values of the others."""
        at = At(self.values, self.params, lambda site: keyed_draw(site, self.batch), NO_TERM)
        with isolated(), poutine.trace() as tracer, at:
            self.guide(self.batch)
        return dict(tracer.trace.nodes)


def _minus_divergence(site: Site, prior: Any) -> Tensor:
    """Return log p(e) - log q(e) of each row, or its mean over q."""
    try:
        return -divergence(site["fn"], prior)
    except NotImplementedError:
        log: Tensor = prior.log_prob(site["value"]) - site["fn"].log_prob(site["value"])
        return log
