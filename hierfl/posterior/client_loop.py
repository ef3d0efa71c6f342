"""The one loop over clients: a function of one client, evaluated for all, chunk by chunk."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect_count, expect_integer
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch, cut_ragged, full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import one_slot, over_clients, slots_of
from hierfl.engine.client_store import taken
from hierfl.laplace.trials import first_row
from hierfl.posterior.snapshot import Snapshot, lacks_rows
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params, Program

CLIENTS_AT_ONCE, DRAWS_A_CLIENT = 64, 128  # clients at least, and more while each has so many draws
# clients x draws carried at once: few, and more where neither rows nor sites are many
CLIENT_DRAWS_AT_ONCE, MOST_CLIENT_DRAWS = 512, 1 << 17
MOST_NUMBERS, CACHED = 1 << 23, 1 << 20  # clients x draws x rows, where each has one scalar
CLIENT_DRAW_ROWS_AT_ONCE = 1 << 21  # clients x draws x rows, where the work of a draw is wide
LIKE_ROWS = 32  # rows that a draw of a client takes as long as, at least
# padded rows of a chunk from which clients of other sizes are carried apart, and rows of a chunk that
# cost no more than another chunk
PADDING, FEW_ROWS = 1 << 14, 1 << 12
Reads = Literal["rows", "guide", "none"]
MOST_RUNS = 16  # of clients that need rows and clients that do not, in one chunk


@dataclass(frozen=True, eq=False)
class Chunk:
    """What was `found` (C, ...) of the clients at positions `ids` (C,), about the rows `asked`."""

    ids: Tensor
    asked: ClientBatch
    found: Tree


def each_client(
    fit: Snapshot,
    function: Callable[..., Tree],
    *,
    rows: ClientData | None = None,
    new: bool = False,
    given: Tree | None = None,
    seed: int = 0,
    salt: str = "posterior",
    sized: bool = False,
    reads: Reads = "rows",
) -> Iterator[Chunk]:
    """Evaluate `function(params, own, asked[, given]) -> tree` for every client, if possible under vmap.

    If it is `sized`, `function` gets the number of clients that are carried at once before all others. It
    `reads` rows, or those that the guide reads alone, or none; what it does not read it does not get.
    """
    federation, message, seed = fit.federation, fit.message, expect_integer(seed, "seed")
    data = federation.data if rows is None else rows
    at = (noise.word(salt),)
    read = [data.counts] if new or rows is None else [data.counts, federation.data.counts]
    for ids, rowless in _without_rows(fit, _of_similar_sizes(fit, read), new=new):
        batch = full_batch(data, ids, seed=seed, at=at)
        if reads == "none" or (reads == "guide" and rowless is not None):
            batch = first_row(batch)
        asked = labeled(batch, federation.program)
        if new:
            own = asked
        else:
            own = batch if rows is None else full_batch(federation.data, ids, seed=seed, at=at)
        (own_slots, own_shared), (asked_slots, asked_shared) = slots_of(own), slots_of(asked)
        of = partial(function, len(ids)) if sized else function
        call = partial(_of_client, fit, message, of, (own_shared, own), (asked_shared, asked))
        if new:
            states = tree_map(
                lambda v, ids=ids: v.expand(len(ids), *v.shape), federation.client.own
            )
        else:
            states = taken(fit.progress.table, ids)
        if rowless is not None:
            states = rowless(states)[1]
        own_given = () if given is None else (tree_map(lambda v, ids=ids: v[ids], given),)
        trees = (states, own_slots, asked_slots, *own_given)
        with unchecked(), torch.no_grad():
            results = over_clients(call, federation.at_once, *trees, count=len(ids))
        yield Chunk(ids, asked, results)


Rowless = Callable[[Tree], tuple[Tensor, Tree]]


def _without_rows(
    fit: Snapshot, chunks: Sequence[Tensor], *, new: bool
) -> Iterator[tuple[Tensor, Rowless | None]]:
    """Yield chunks of clients, with `Client.rowless` where all of them need no rows."""
    rowless = None if new or lacks_rows(fit) else fit.federation.client.rowless
    for ids in chunks:
        if rowless is None:
            yield ids, None
            continue
        needless = rowless(taken(fit.progress.table, ids))[0] > 0.0
        runs, lengths = needless.unique_consecutive(return_counts=True)
        if len(runs) > MOST_RUNS:
            yield ids, None
            continue
        for some, is_needless in zip(ids.split(lengths.tolist()), runs.tolist(), strict=True):
            yield some, rowless if is_needless else None


def _of_client(
    fit: Snapshot,
    message: Tree,
    function: Callable[..., Tree],
    own: tuple[Tree, ClientBatch],
    asked: tuple[Tree, ClientBatch],
    state: Tree,
    own_slot: Tree,
    asked_slot: Tree,
    *given: Tree,
) -> Tree:
    """Call `function` for the client of one slot; a batch comes with what its slots share."""
    params = fit.federation.client.params(message, state)
    return function(params, one_slot(own_slot, *own), one_slot(asked_slot, *asked), *given)


def each_draw(
    fit: Snapshot,
    function: Callable[[Params, ClientBatch, ClientBatch], Tree],
    *,
    draws: int,
    seed: int,
    rows: ClientData | None = None,
    new: bool = False,
    width: int = 1,
    salt: str = "posterior",
    first: int = 0,
    reads: Reads = "rows",
) -> Iterator[Chunk]:
    """Evaluate a function of a client and a draw: trees (C, S, ...); draw d depends on the seed alone."""
    program, draws = fit.program, expect_count(draws, "draws")

    def all_draws(clients: int, params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
        def at_draw(d: Tensor) -> Tree:
            return function(params, own.redrawn(d), batch.redrawn(d))

        wide = wide_draws_at_once(batch.num_rows, program, width)
        pairs = wide or draws_at_once(batch.num_rows, program)
        return at_each_draw(at_draw, draws, program, at_once=max(1, pairs // clients), first=first)

    how: dict[str, Any] = {"rows": rows, "new": new, "seed": seed, "salt": salt, "reads": reads}
    yield from each_client(fit, all_draws, sized=True, **how)


def what_is_read(program: Program) -> Reads:
    """Return what draws of all sites read: rows, where a client's deterministic sites may."""
    return "guide" if set(program.derived.values()) <= {None} else "rows"


def _of_similar_sizes(fit: Snapshot, read: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return chunks of clients in their order, by the numbers of rows that are `read` of each, (N,)."""
    counts = torch.stack(list(read)).amax(0)
    kind = (counts.clamp(min=FEW_ROWS).log2() / 4.0).ceil()
    runs = kind.unique_consecutive(return_counts=True)[1].tolist()
    every = torch.arange(len(counts))
    chunks: list[Tensor] = []
    for run in every.split(runs if len(runs) <= MOST_RUNS else len(counts)):
        largest = max(1, int(read[0][run].max()))
        many = draws_at_once(largest, fit.program) // DRAWS_A_CLIENT
        most = min(fit.federation.slots_of(largest), max(CLIENTS_AT_ONCE, many), len(run))
        chunks += cut_ragged(run.split(most), *read, most=most, few=FEW_ROWS, padding=PADDING)
    return tuple(chunks)


def draws_at_once(rows: int, program: Program) -> int:
    """Return how many clients x draws are carried at once where each client has so many rows."""
    sites = sum(site.size for site in program.latents.sites)
    least, many = min(CLIENT_DRAWS_AT_ONCE, MOST_NUMBERS // rows), CACHED // max(rows, sites)
    return max(least, min(MOST_CLIENT_DRAWS, many))


def wide_draws_at_once(rows: int, program: Program, width: int = 1) -> int | None:
    """Return how many clients x draws of `width` values a row are carried at once; None: of one value."""
    wide = nodes_of_rows(program) * max(width, candidates_of(program))
    return None if wide == 1 else max(1, CLIENT_DRAW_ROWS_AT_ONCE // (wide * max(rows, LIKE_ROWS)))


def nodes_of_rows(program: Program) -> int:
    """Return at how many values of its latent sites a row is evaluated; 1 without such sites."""
    terms = {} if program.row_sites is None else program.row_sites.terms
    return max((term.order for term in terms.values()), default=1) or 1


def candidates_of(program: Program) -> int:
    """Return at how many candidates of a local draw the guide evaluates a client's rows."""
    return getattr(program.guide, "evaluated", 1)


def at_each_draw(
    function: Callable[[Tensor], Tree],
    draws: int,
    program: Program,
    *,
    at_once: int | None = None,
    first: int = 0,
) -> Tree:
    """Evaluate a function of a draw's index, () int32, at `draws` indices from `first`: a tree (S, ...)."""
    index = torch.arange(first, first + draws, dtype=torch.int32)
    if program.in_vmap:
        stacked: Tree = torch.vmap(function, chunk_size=at_once)(index)
        return stacked
    return tree_map(lambda *v: torch.stack(v), *[function(d) for d in index])


def labeled(batch: ClientBatch, program: Program) -> ClientBatch:
    """Fill in missing labels with zeros; a model then gives the distribution of its labels."""
    like = {name: program.prototype.fields.get(name) for name in program.labels.values()}
    missing = {
        name: value.new_zeros(batch.num_clients, batch.num_rows, *value.shape[2:])
        for name, value in like.items()
        if value is not None
    }
    return replace(batch, fields={**missing, **batch.fields})
