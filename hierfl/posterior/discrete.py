"""The discrete sites of a fitted program, which were summed out: their probabilities, and draws of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import spelled
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import Chunk
from hierfl.posterior.draws import at_draws, posterior_draws
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.elimination import Tables
from hierfl.program.enumerated import tables_of
from hierfl.program.program import Params
from hierfl.program.sites import Values

NEVER = -1e30  # log density of a value that a draw did not take


def _table(discrete_sites: DiscreteSites) -> Shown:
    return Shown("Posterior probabilities of discrete sites", discrete_sites.frame, "")


@shown_as(_table)
@dataclass(frozen=True, eq=False)
class DiscreteSites:
    """What a fit says of its discrete sites.

    Args:
        frame: `site`, `client`, `row` (its position among the client's rows; -1 of a site of the
            client), and the probability of each value, a column a value, NaN beyond the site's own.
        draws: site -> positions of the drawn values in its support, (S, n) of rows or (S, N) of
            clients; the sites of one draw belong together.
    """

    frame: pd.DataFrame
    draws: Mapping[str, Tensor]


@one_at_a_time
@spelled
def infer_discrete(fit: Snapshot, *, draws: int = 200, seed: int = 0) -> DiscreteSites:
    """Infer the discrete sites that a program has inside `batch.clients()`, as `pyro.infer.infer_discrete` does.

        p(k | y) = E[p(k | z, y)],    z the posterior draws of the continuous sites

    Given z the probabilities are exact, and draws of all labels of a row follow one after another,
    each given those before it. It needs the clients' rows: over nodes, ask it there.

    Args:
        fit: of a program with discrete sites.
        draws: S, of the posterior of the continuous sites.
        seed: of the draws.

    Raises:
        ValueError: the program has no discrete latent site.
        RowsNotSaved: the fit was loaded without its clients' rows.
    """
    program = fit.program

    def one(params: Params, values: Values, batch: ClientBatch) -> Tree:
        tables = tables_of(program, values, batch, params)
        return {name: leaf for each in tables for name, leaf in _inferred(each, batch).items()}

    chunks = list(at_draws(fit, posterior_draws(fit, draws=draws, seed=seed), one))
    if not chunks[0].found:
        raise ValueError(
            "the model has no discrete latent site: all that it samples is in fit.posterior()"
        )
    sites = [name for name in chunks[0].found]
    by_site = {name: [_of_rows(chunk, name) for chunk in chunks] for name in sites}
    names = fit.federation.data.names
    frames = [line for name in sites for line in _frames(name, chunks, by_site[name], names)]
    return DiscreteSites(
        pd.concat(frames, ignore_index=True),
        {name: torch.cat([draw for _, draw in by_site[name]], 1) for name in sites},
    )


def _inferred(tables: Tables, batch: ClientBatch) -> dict[str, Tree]:
    """Return each label's probabilities, (K, C, B or 1), and a draw of it, (C, B or 1)."""
    shifts = tables.no_shifts()
    probabilities, drawn = tables.probabilities(shifts), dict[str, Tensor]()
    for name in tables.component.labels:
        chances = tables.probabilities(shifts)[name] if drawn else probabilities[name]
        key = noise.fold(batch.key, noise.word(name))
        uniform = noise.uniforms(key, (chances.shape[2],), chances.dtype)  # (C, B or 1)
        up = chances.cumsum(0)
        drawn[name] = (up[:-1] <= uniform * up[-1]).sum(0)
        values = torch.arange(len(chances))[:, None, None]
        shifts[name] = torch.where(values == drawn[name], 0.0, NEVER)
    return {name: {"chances": probabilities[name], "draw": drawn[name]} for name in drawn}


def _of_rows(chunk: Chunk, name: str) -> tuple[Tensor, Tensor]:
    """Return the mean probabilities of a chunk's rows or clients, (n, K), and draws, (S, n)."""
    chances, draw = chunk.found[name]["chances"], chunk.found[name]["draw"]
    by_row = draw.shape[-1] > 1 or chunk.asked.num_rows == 1
    inside = chunk.asked.mask() if by_row else torch.ones(len(chunk.ids), 1, dtype=torch.bool)
    mean = chances.mean(1)[:, :, 0].movedim(1, -1)  # (C, S, K, 1, B) -> (C, B, K)
    return mean[inside], draw[:, :, 0].movedim(1, -1)[inside].T


def _frames(
    name: str, chunks: list[Chunk], of_chunks: list[tuple[Tensor, Tensor]], names: tuple[str, ...]
) -> Iterator[pd.DataFrame]:
    for chunk, (chances, _) in zip(chunks, of_chunks, strict=True):
        counts = chunk.asked.mask().sum(1).tolist()
        of_rows = len(chances) == sum(counts)
        rows = [range(n) if of_rows else [-1] for n in counts]
        clients = np.repeat([names[i] for i in chunk.ids.tolist()], [len(r) for r in rows])
        frame = pd.DataFrame({"site": name, "client": clients, "row": np.concatenate(rows)})
        yield frame.join(pd.DataFrame(chances.numpy()))
