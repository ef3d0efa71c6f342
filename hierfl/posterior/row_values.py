"""Values of the latent sites of rows, which were integrated out: draws at the clients, given all else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import spelled
from hierfl.core.intervals import check_prob, tails
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import Chunk
from hierfl.posterior.draws import at_draws, posterior_draws
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.program import Params
from hierfl.program.quadrature import CANDIDATES
from hierfl.program.row_sites import RowSites, rows_of
from hierfl.program.sites import Values

DRAWS = 5  # of the posterior, at which integrals over rows are compared


@printed
@dataclass(frozen=True, eq=False)
class RowValues:
    """What a fit says of the latent sites of its rows.

    Args:
        frame: `site`, `client`, `row` (its position among the client's rows), `entry` of a site with
            several values, and the posterior `mean`, `sd`, `low` and `high`.
        draws: site -> (S, n, *event); the sites of one draw belong together.
    """

    frame: pd.DataFrame
    draws: Mapping[str, Tensor]

    def __tables__(self) -> Shown:
        return Shown("Posterior of the latent sites of rows", self.frame, "")


@one_at_a_time
@spelled
def infer_rows(fit: Snapshot, *, draws: int = 200, prob: float = 0.9, seed: int = 0) -> RowValues:
    """Draw the latent sites that a program has in `batch.data()`, given the rows and all other sites.

        p(e | y) = E[p(e | z, y)],    z the posterior draws of the other sites

    Given z, all sites of a row are drawn together, from weighted candidates of a Normal at their mode:
    exact where they are Normal given the row. It needs the clients' rows: over nodes, ask it there.

    Args:
        fit: of a program with continuous latent sites of rows.
        draws: S, of the posterior.
        prob: of the intervals.
        seed: of the draws.

    Raises:
        ValueError: the program has no such site.
        RowsNotSaved: the fit was loaded without its clients' rows.
    """
    program, prob = fit.program, check_prob(prob)

    def drawn(params: Params, values: Values, batch: ClientBatch) -> Tree:
        rows = rows_of(program, values, batch, params)
        return {} if rows is None else _drawn(rows, batch)

    chunks = list(at_draws(fit, posterior_draws(fit, draws=draws, seed=seed), drawn))
    if not chunks[0].found:
        raise ValueError(
            "the model has no continuous latent site in batch.data(): everything it samples is in "
            "fit.posterior()"
        )
    names = fit.federation.data.names
    values = {name: [_of_rows(chunk, name) for chunk in chunks] for name in chunks[0].found}
    frames = [
        _frame(name, chunk, draw, names, prob)
        for name, of in values.items()
        for chunk, draw in zip(chunks, of, strict=True)
    ]
    whole = {name: torch.cat(of, 1) for name, of in values.items()}
    return RowValues(pd.concat(frames, ignore_index=True), whole)


def _drawn(rows: RowSites, batch: ClientBatch) -> dict[str, Tree]:
    """Return a draw of each site of rows, (C, B, *event)."""
    shape = torch.Size((batch.num_clients, batch.num_rows))
    drawn: dict[str, Tree] = {}
    for term in rows.last_terms():
        key = noise.fold(batch.key, noise.word(term.name))
        size = rows.center(term, shape).shape[-1]
        dtype = batch.counts.dtype
        z = noise.normals(key, (CANDIDATES, batch.num_rows, size), dtype)
        chances = noise.uniforms(noise.fold(key, 1), (batch.num_rows,), dtype)
        free = rows.drawn_given(term, shape, z.movedim(1, 0), chances, last=True)
        drawn |= rows.constrained(free, term)[1]
    return drawn


def _of_rows(chunk: Chunk, name: str) -> Tensor:
    """Return the draws of the rows of a chunk, (S, n, *event)."""
    draw = chunk.found[name]  # (C, S, 1, B, *event)
    inside: Tensor = draw[:, :, 0].movedim(1, 2)[chunk.asked.mask()]
    return inside.movedim(1, 0)


def _frame(
    name: str, chunk: Chunk, draw: Tensor, names: tuple[str, ...], prob: float
) -> pd.DataFrame:
    counts = chunk.asked.mask().sum(1).tolist()
    flat = draw.reshape(*draw.shape[:2], -1)
    entries, values = flat.shape[-1], flat.reshape(len(flat), -1).double().numpy()
    low, high = np.quantile(values, tails(prob), axis=0)
    clients = np.repeat([names[i] for i in chunk.ids.tolist()], counts)
    rows = np.concatenate([np.arange(count) for count in counts])
    return pd.DataFrame(
        {
            "site": name,
            "client": np.repeat(clients, entries),
            "row": np.repeat(rows, entries),
            "entry": np.tile(np.arange(entries), len(rows)),
            "mean": values.mean(0),
            "sd": values.std(0, ddof=1),
            "low": low,
            "high": high,
        }
    )


def error_of_rows(fit: Snapshot) -> float:
    """Return by how much an integral over a row's sites is off at most, in nats, at a few posterior draws."""
    program = fit.program

    def off(params: Params, values: Values, batch: ClientBatch) -> Tree:
        rows = rows_of(program, values, batch, params)
        assert rows is not None
        shape = torch.Size((batch.num_clients, batch.num_rows))
        errors = [rows.error(term, shape).abs() for term in rows.last_terms()]
        largest = torch.where(batch.mask(), torch.stack(errors).amax(0), 0.0)
        return {"largest": largest.amax(1)}

    chunks = at_draws(fit, posterior_draws(fit, draws=DRAWS, seed=0), off)
    return max(float(chunk.found["largest"].max()) for chunk in chunks)
