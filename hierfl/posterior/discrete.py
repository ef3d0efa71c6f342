"""The discrete sites of a fitted program, which were summed out: their probabilities, and draws of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import spelled
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.trees import Tree
from hierfl.data.batch import CLIENTS, ClientBatch
from hierfl.posterior.client_loop import Chunk
from hierfl.posterior.draws import at_draws, posterior_draws
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.elimination import Tables
from hierfl.program.enumerated import tables_of
from hierfl.program.program import Params
from hierfl.program.sites import Values

NEVER = -1e30  # log density of a value that a draw did not take


@printed
@dataclass(frozen=True, eq=False)
class DiscreteSites:
    """What a fit says of its discrete sites.

    Args:
        frame: `site`, `client` ("" of a global site), `row` (its position among the client's rows;
            -1 of a site of the client), `entry` where a site is in further plates, and the
            probability of each value, a column a value, NaN beyond the site's own.
        draws: site -> positions of the drawn values in its support, (S, n), in the order of the
            site's lines in `frame`; the sites of one draw belong together.
    """

    frame: pd.DataFrame
    draws: Mapping[str, Tensor]

    def __tables__(self) -> Shown:
        return Shown("Posterior probabilities of discrete sites", self.frame, "")


@one_at_a_time
@spelled
def infer_discrete(fit: Snapshot, *, draws: int = 200, seed: int = 0) -> DiscreteSites:
    """Infer the discrete sites that were summed out of a program, as `pyro.infer.infer_discrete` does.

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
        inferred: dict[str, Tree] = {"shared": {}, "own": {}}
        for tables in tables_of(program, values, batch, params):
            level = "own" if CLIENTS in tables.component.plates else "shared"
            inferred[level] |= _inferred(tables, batch)
        return inferred

    chunks = list(at_draws(fit, posterior_draws(fit, draws=draws, seed=seed), one))
    shared, own = chunks[0].found["shared"], chunks[0].found["own"]
    if not (shared or own):
        raise ValueError(
            "the model has no discrete latent site: everything it samples is in fit.posterior()"
        )
    names = fit.federation.data.names
    sites = {name: _of_all(leaf) for name, leaf in shared.items()}
    sites |= {name: _of_clients(chunks, name, names) for name in own}
    frames = pd.concat([site.assign(site=name) for name, (site, _) in sites.items()])
    is_plain = (frames["entry"] == 0).all()
    first = ["site", "client", "row", *([] if is_plain else ["entry"])]
    order = [*first, *range(max(column for column in frames if isinstance(column, int)) + 1)]
    return DiscreteSites(
        frames[order].reset_index(drop=True), {name: draws for name, (_, draws) in sites.items()}
    )


def _inferred(tables: Tables, batch: ClientBatch) -> dict[str, Tree]:
    """Return each label's probabilities, (K, *plates, C, B or 1), and a draw of it."""
    shifts = tables.no_shifts()
    probabilities, drawn = tables.probabilities(shifts), dict[str, Tensor]()
    for name in tables.component.labels:
        chances = tables.probabilities(shifts)[name] if drawn else probabilities[name]
        *plates, clients, rows = chances.shape[1:]
        word, count = noise.word(name), math.prod(plates) * rows
        if CLIENTS in tables.component.plates:
            uniform = noise.uniforms(noise.fold(batch.key, word), (count,), chances.dtype)
            uniform = uniform.reshape(clients, *plates, rows).movedim(0, -2)
        else:  # the same at every client
            uniform = noise.uniforms(noise.fold(batch.shared_key, word), (count,), chances.dtype)
            uniform = uniform.reshape(*plates, clients, rows)
        up = chances.cumsum(0)
        drawn[name] = (up[:-1] <= uniform * up[-1]).sum(0)
        values = torch.arange(len(chances)).reshape(-1, *[1] * drawn[name].dim())
        shifts[name] = torch.where(values == drawn[name], 0.0, NEVER)
    return {name: {"chances": probabilities[name], "draw": drawn[name]} for name in drawn}


def _of_all(leaf: Tree) -> tuple[pd.DataFrame, Tensor]:
    """Return the mean probabilities of a global site, and its draws (S, entries)."""
    chances = leaf["chances"][0].mean(0).flatten(1).T  # the same at every client
    frame = pd.DataFrame(chances.numpy()).assign(client="", row=-1, entry=range(len(chances)))
    return frame, leaf["draw"][0].flatten(1)


def _of_clients(
    chunks: Sequence[Chunk], name: str, names: Sequence[str]
) -> tuple[pd.DataFrame, Tensor]:
    """Return the mean probabilities of a site of clients or rows, and its draws (S, n entries)."""
    frames, draws = [], []
    for chunk in chunks:
        leaf = chunk.found["own"][name]
        # (C, S, K, *plates, 1, B) -> (C, B, entries, K), and (C, S, *plates, 1, B) -> (C, B, entries, S)
        mean = leaf["chances"].mean(1)
        width = mean.shape[-1]
        mean = mean.reshape(*mean.shape[:2], -1, width).permute(0, 3, 2, 1)
        draw = leaf["draw"].reshape(*leaf["draw"].shape[:2], -1, width).permute(0, 3, 2, 1)
        by_row = width > 1 or chunk.asked.num_rows == 1
        inside = chunk.asked.mask() if by_row else torch.ones(len(chunk.ids), 1, dtype=torch.bool)
        who, row = inside.nonzero().T
        entries = mean.shape[2]
        frame = pd.DataFrame(mean[inside].flatten(0, 1).numpy()).assign(
            client=np.repeat([names[k] for k in chunk.ids[who].tolist()], entries),
            row=np.repeat(row.numpy(), entries) if by_row else -1,
            entry=np.tile(range(entries), len(who)),
        )
        frames.append(frame)
        draws.append(draw[inside].flatten(0, 1).T)
    return pd.concat(frames), torch.cat(draws, 1)
