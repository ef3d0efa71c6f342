"""Reading a user's program from eager, validated traces.

The traces show which sites and params are global and which local. A mistake is raised as one error, which
names it and its mend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch.distributions.constraints import Constraint

from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.data.batch import ClientBatch, gather, keys_of
from hierfl.data.clients import ClientData
from hierfl.program.check_boundary import check_boundary
from hierfl.program.check_data import (
    by_row,
    check_finite,
    check_labels,
    check_labels_by_row,
    check_names,
    check_scored,
    fields_read,
    label_fields,
    supports_of,
)
from hierfl.program.check_program import check_cover, check_plates, check_start
from hierfl.program.handlers import Answer, untouched_store
from hierfl.program.keyed_draws import NoKeyedDraw
from hierfl.program.prior_centre import Centre
from hierfl.program.program import Program, ProgramError, Reads
from hierfl.program.read_traces import closed_of, derived_of, is_keyed, latents_of, params_of
from hierfl.program.sites import Family, Guide, Model
from hierfl.program.traces import Site, is_deterministic, samples

PROTOTYPE_ROWS = 5  # neither 1 nor 2, so that the plates of rows and of clients differ in size


@one_at_a_time
def read(model: Model, guide: Guide | Family, data: ClientData, *, seed: int = 0) -> Program:
    """Read a program from eager, validated traces on one and on two of the clients.

    Args:
        model: the generative program.
        guide: a guide function, or a family to make one of.
        data: the federation it will run on.
        seed: of starting values that the program itself draws for its params.

    Raises:
        ValueError: NaN or infinity in a field, or labels outside the support of their site; the message names
            client and field.
        ProgramError: the program itself is wrong; the message names the site and the mend.
    """
    check_names(data)
    check_finite(data)
    one, two = _prototype(data, [0]), _prototype(data, [0, data.num_clients - 1])
    with pyro.validation_enabled(True):
        # two clients first: only with two does the shape of a local site read outside its plate give it away
        pair, single = (_trace(model, batch, "model", seed, _Start()) for batch in (two, one))
        latents = latents_of(single, pair)
        labels, supports = _labels(model, pair, two, data)
        built = guide.on(model, latents) if isinstance(guide, Family) else guide
        guided, guided_pair = (
            _trace(built, batch, "guide", seed, Answer({}, batch)) for batch in (one, two)
        )
        check_cover(latents, guided)
        check_boundary(model, one, "model", _Start())
        check_boundary(built, one, "guide", Answer({}, one))
        keyed = is_keyed(guided)  # before the guide runs again: it refuses one that cannot be drawn
        with untouched_store():
            of_model = fields_read(model, one, _Start())
            of_guide = fields_read(built, one, Answer({}, one))
        program = Program(
            model=model,
            guide=built,
            latents=latents,
            params=params_of([single, guided], [pair, guided_pair]),
            closed=closed_of(single, guided),
            derived=derived_of(single),
            labels=labels,
            supports=supports,
            reads=Reads(of_model, of_guide),
            num_clients=data.num_clients,
            prototype=one,
            keyed=keyed,
            reads_all_rows=_reads_all_rows(guide),
        )
        check_start(program, one)
    return program


def _prototype(data: ClientData, ids: list[int]) -> ClientBatch:
    """Return the first rows of some clients, padded to `PROTOTYPE_ROWS`."""
    chosen = torch.tensor(ids)
    place = torch.arange(PROTOTYPE_ROWS)[None]
    inside = place < data.counts[chosen][:, None]
    index = data.offsets[chosen][:, None] + torch.where(inside, place, 0)
    return gather(data, chosen, index, inside, keys_of(data, chosen, 0, 0))


class _Start(Centre):
    """Sets every latent site to the centre of its prior, and refuses a discrete one."""

    def _pyro_sample(self, msg: Site) -> None:
        free = not msg["done"] and not msg["is_observed"] and not isinstance(msg["fn"], _Subsample)
        if free and getattr(msg["fn"].support, "is_discrete", False):
            raise ProgramError(
                f"site '{msg['name']}' is discrete ({type(msg['fn']).__name__}) and latent, which no guide "
                f"of hierfl supports: sum it out in the likelihood (dist.MixtureSameFamily), or observe it"
            )
        super()._pyro_sample(msg)


def _trace(
    program: Callable[[ClientBatch], Any],
    batch: ClientBatch,
    what: str,
    seed: int,
    handler: Messenger,
) -> Any:
    """Return a trace of a model or guide whose plates are right; raise a `ProgramError` where it fails."""
    try:
        with untouched_store():
            # for params that start at random; the generator is restored afterwards
            torch.manual_seed(seed & 0x7FFFFFFF)
            try:
                with handler:
                    trace = poutine.trace(program).get_trace(batch)
            except NoKeyedDraw:
                # of two clients at once; only shapes matter here, and `is_keyed` checks the rest
                trace = poutine.trace(program).get_trace(batch)
    except ProgramError:
        raise
    except Exception as error:
        fields = {k: tuple(v.shape) for k, v in {**batch.fields, **batch.client_fields}.items()}
        dtypes = {k: str(v.dtype).removeprefix("torch.") for k, v in batch.fields.items()}
        raise ProgramError(
            f"the {what} fails on a batch of {batch.num_clients} client(s): {type(error).__name__}: "
            f"{error}\n"
            f"the batch's fields, [clients, rows, ...]: {fields}, of {dtypes}"
        ) from error
    for name, site in samples(trace):
        if not is_deterministic(site):
            check_plates(name, site, batch)
    return trace


def _labels(
    model: Model, trace: Any, batch: ClientBatch, data: ClientData
) -> tuple[dict[str, str], dict[str, tuple[str, Constraint]]]:
    """Return the label field of each observed site, and the labels' supports; refuse labels outside them."""
    with untouched_store():
        labels = label_fields(model, trace, batch)
    supports = supports_of(trace, labels, data)
    check_labels(supports, data)
    check_scored(trace, labels)
    with untouched_store():
        by_rows = [site for site in labels if by_row(trace.nodes[site]["fn"])]
        check_labels_by_row(model, data, by_rows)
    return labels, supports


def _reads_all_rows(guide: Guide | Family) -> bool:
    """Return whether a guide is of a family that needs every row of a client at each step."""
    return isinstance(guide, Family) and bool(getattr(guide.build, "reads_all_rows", False))
