"""A program without its clients' rows: it computes what does not depend on them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hierfl.data.absent import Sites, Unknown, unknown
from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import NoKeyedDraw
from hierfl.program.sites import Latents, Values
from hierfl.program.traces import Site

# what a program raises that goes on by values it does not have
STOPS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True, eq=False)
class WithoutRows:
    """A model or guide to which every field of a batch is `Unknown`.

    Sites that depend on a row are unknown too. Where a value of a row decides how to go on, the
    trace ends: it has the sites before.
    """

    run: Callable[[ClientBatch], Any]

    @property
    def __wrapped__(self) -> Callable[[ClientBatch], Any]:
        """The model or guide itself, which says what its sites' entries are called."""
        return self.run

    def __call__(self, batch: ClientBatch) -> None:
        """Run on a batch of which only shapes can be read."""
        try:
            self.run(shape_alone(batch))
        except STOPS as error:
            if isinstance(error, NoKeyedDraw) or "vmap" in str(error):
                raise  # it is run again, one client and draw at a time


def shape_alone(batch: ClientBatch) -> ClientBatch:
    """Return a batch whose fields are `Unknown`."""
    fields, own = (
        {name: unknown(values) for name, values in of.items()}
        for of in (batch.fields, batch.client_fields)
    )
    return replace(batch, fields=fields, client_fields=own)


def values_of(nodes: Mapping[str, Site], names: Iterable[str]) -> Values:
    """Return the values of some sites of a trace; those that depend on missing rows are `Sites`' to refuse."""
    values = {name: nodes[name]["value"] if name in nodes else None for name in names}
    computed = {n: v for n, v in values.items() if v is not None and not is_unknown(v)}
    return computed if len(computed) == len(values) else Sites(computed)


def is_unknown(values: Tensor) -> bool:
    """Return whether a tensor has no values; `torch.vmap` makes plain ones of `Unknown` ones."""
    return isinstance(values, Unknown) or values.device.type == "meta"


def of_all_sites(values: Values, latents: Latents, model: Any) -> Values:
    """Return values of all latent sites: what could not be drawn is `Unknown` to a model without rows, else refused."""
    if not isinstance(values, Sites):
        return values
    if isinstance(model, WithoutRows):
        return {site.name: unknown(site.start) for site in latents.sites} | values
    return {site.name: values[site.name] for site in latents.sites}
