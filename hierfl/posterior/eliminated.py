"""Sites that a program sums out or integrates out: draws of them at the clients, given all else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from hierfl.data.batch import CLIENTS, ClientBatch
from hierfl.posterior.client_loop import Chunk
from hierfl.posterior.draws import at_draws, posterior_draws
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.elimination import Tables
from hierfl.program.enumerated import tables_of
from hierfl.program.program import Params
from hierfl.program.quadrature import CANDIDATES
from hierfl.program.row_sites import RowSites, rows_of
from hierfl.program.sites import Values

NEVER = -1e30  # log density of a value that a draw did not take
DRAWS = 5  # of the posterior, at which integrals over rows are compared


# ------------------------------------------------------------ discrete sites
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

    Given z, the probabilities are exact. All labels of a row are drawn one after another, each
    given those before it. This needs the clients' rows: over nodes, call it there.

    Args:
        fit: a fit of a program with discrete sites.
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
        places = _places(chunk, inside, names, mean.shape[2])
        frame = pd.DataFrame(mean[inside].flatten(0, 1).numpy()).assign(**places)
        frames.append(frame if by_row else frame.assign(row=-1))
        draws.append(draw[inside].flatten(0, 1).T)
    return pd.concat(frames), torch.cat(draws, 1)


def _places(chunk: Chunk, inside: Tensor, names: Sequence[str], entries: int) -> dict[str, Any]:
    """Return the columns that say where values of some rows, (n, entries), are."""
    who, row = inside.nonzero().T
    return {
        "client": np.repeat([names[k] for k in chunk.ids[who].tolist()], entries),
        "row": np.repeat(row.numpy(), entries),
        "entry": np.tile(range(entries), len(who)),
    }


# ------------------------------------------------------------ continuous sites of rows
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

    Given z, all sites of a row are drawn together, from weighted candidates of a Normal at their
    mode: exact if they are Normal given the row. This needs the clients' rows: over nodes, call it
    there.

    Args:
        fit: a fit of a program with continuous latent sites of rows.
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
    flat = draw.reshape(*draw.shape[:2], -1)
    entries, values = flat.shape[-1], flat.reshape(len(flat), -1).double().numpy()
    low, high = np.quantile(values, tails(prob), axis=0)
    places = _places(chunk, chunk.asked.mask(), names, entries)
    moments = {"mean": values.mean(0), "sd": values.std(0, ddof=1), "low": low, "high": high}
    return pd.DataFrame({"site": name, **places, **moments})


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
