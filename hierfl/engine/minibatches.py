"""The rows a client works on at each local step: passes over its rows, shuffled by its key."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch, Keys, gather, keys_of
from hierfl.data.clients import ClientData
from hierfl.method import Phase

FEW_PLACES = 1 << 16  # clients x largest count: a table of so few is made at once, padding and all


@dataclass(eq=False)
class _Table:
    """Orders of the clients `members`: `rows` (epochs, M, most), of epochs first to last `asked` (M,)."""

    members: Tensor
    keys: Tensor
    counts: Tensor
    asked: tuple[Tensor, Tensor] | None = None
    rows: Tensor | None = None

    def at(self, epoch: Tensor, place: Tensor) -> Tensor:
        """Return which row of its client lies at a place (K, M, B) in an epoch (K, M)."""
        first, last = epoch[0], epoch[-1]
        orders = [self._begun(first)]
        for later in range(1, int((last - first).max()) + 1):
            orders.append(self._shuffled(first + later, slice(None)))
        self.rows, self.asked = torch.stack(orders), (first, last)
        client = torch.arange(len(self.members))[None, :, None]
        return self.rows[(epoch - first)[..., None], client, place]

    def _begun(self, epoch: Tensor) -> Tensor:
        if self.asked is None or self.rows is None:
            return self._shuffled(epoch, slice(None))
        first, last = self.asked
        rows = self.rows[last - first, torch.arange(len(first))]
        stale = last != epoch
        if bool(stale.any()):
            rows[stale] = self._shuffled(epoch, stale)
        return rows

    def _shuffled(self, epoch: Tensor, some: Tensor | slice) -> Tensor:
        keys = noise.fold_now(self.keys[some], epoch[some])
        return noise.permutations(keys, self.counts[some], int(self.counts.max()))


@dataclass(frozen=True, eq=False)
class Orders:
    """The order of each client's rows in an epoch, a function of its key and the epoch."""

    tables: tuple[_Table, ...]

    @staticmethod
    def of(keys: Tensor, counts: Tensor) -> "Orders":
        """Return the orders of clients, in tables of similar lengths unless all are short."""
        in_table = len(counts) * int(counts.max()) <= FEW_PLACES
        kind = torch.zeros_like(counts) if in_table else counts.double().log2().floor().long()
        tables = []
        for k in kind.unique():
            members = (kind == k).nonzero()[:, 0]
            tables.append(_Table(members, keys[members], counts[members]))
        return Orders(tuple(tables))

    def at(self, epoch: Tensor, place: Tensor) -> Tensor:
        """Return which row of its client lies at a place (K, C, B) in an epoch (K, C)."""
        if not len(epoch):
            return place
        if len(self.tables) == 1:
            return self.tables[0].at(epoch, place)
        at_place = torch.empty_like(place)
        for table in self.tables:
            at_place[:, table.members] = table.at(epoch[:, table.members], place[:, table.members])
        return at_place


@dataclass(frozen=True, eq=False)
class Half:
    """One half of the rows of C clients: `counts` (C,), from place `first` of their orders on."""

    counts: Tensor
    first: Tensor
    orders: Orders

    def within(self, place: Tensor) -> Tensor:
        """Return which row of its client lies at a place in the half, (K, C, B) int64 both."""
        epoch = torch.zeros(place.shape[:2], dtype=torch.int64, device=place.device)
        return self.orders.at(epoch, place + self.first[:, None])


def half_of(
    data: ClientData, ids: Tensor, rows: Literal["support", "query"], *, seed: int, round_: int
) -> Half:
    """Return the support or query half of clients' rows in a round; the support gets the odd row."""
    counts = data.counts[ids]
    support = (counts + 1) // 2
    keys = noise.fold_now(data.keys[ids], seed, seed >> 32, noise.word("halves"), round_)
    orders = Orders.of(keys, counts)
    if rows == "support":
        return Half(support, torch.zeros_like(counts), orders)
    query = (counts - support).clamp(min=1)
    return Half(query, counts - query, orders)


Rows = tuple[dict[str, Tensor], dict[str, Tensor]]  # fields (C B, ...); {"rows": mask (C, B)} or {}
Active = tuple[Tensor, ...]  # (which clients still work (C,),), or () where all do
PLANNED = 1 << 21  # rows that are planned ahead: steps x clients x rows of a batch, 16 MB


def steps(
    data: ClientData,
    ids: Tensor,
    phase: Phase,
    *,
    seed: int,
    at: tuple[int, ...],
    few_widths: bool = False,
) -> Iterator[tuple[Tree, Active]]:
    """Yield the tensors of each local step, and who works (C,) or (); `few_widths` limits the graphs."""
    half = None if phase.rows == "all" else half_of(data, ids, phase.rows, seed=seed, round_=at[0])
    keys, done = keys_of(data, ids, seed, *at), 0
    if phase.batch_size is None:
        blocks = _all_rows(data, ids, phase.count, keys, half, few_widths=few_widths)
    else:
        blocks = _mini_batches(data, ids, phase, seed=seed, at=at)
    counts = data.counts[ids] if half is None else half.counts
    own = {name: values[ids][:, None] for name, values in data.client_fields.items()}
    fixed = {"client_fields": own, "counts": counts.to(torch.get_default_dtype())}
    for rows, active in blocks:
        own_keys = keys.of_steps(done, done + len(active))
        for (fields, mask), working, (key, root) in zip(rows, active, own_keys, strict=True):
            yield {**fixed, "fields": fields, "rows": mask, "keys": key, "root": root}, working
        done += len(active)


def batch_of(tensors: Tree, phase: Phase) -> ClientBatch:
    """Return the batch of a step's tensors, as `steps` yields them."""
    shape = (len(tensors["counts"]), -1)
    return ClientBatch(
        fields={name: values.unflatten(0, shape) for name, values in tensors["fields"].items()},
        client_fields=tensors["client_fields"],
        rows=tensors["rows"].get("rows"),
        counts=tensors["counts"],
        own_keys=tensors["keys"],
        root=tensors["root"],
        is_mini_batch=phase.batch_size is not None,
    )


def _all_rows(
    data: ClientData, ids: Tensor, count: int, keys: Keys, half: Half | None, *, few_widths: bool
) -> Iterator[tuple[Iterable[Rows], list[Active]]]:
    """Yield all rows of the clients, or a half, gathered once, for each of `count` steps."""
    counts = data.counts[ids] if half is None else half.counts
    longest = int(counts.max())
    if few_widths:
        # to the next number with three bits, at most a quarter more
        every, unit = int(data.counts.max()), 1 << max(0, longest.bit_length() - 3)
        longest = min(-(-longest // unit) * unit, every if half is None else (every + 1) // 2)
    place = torch.arange(longest, device=ids.device)[None].expand(len(ids), -1)
    inside = place < counts[:, None]
    within = torch.where(inside, place, 0)
    if half is not None:
        within = torch.where(inside, half.within(within[None])[0], 0)
    index = data.offsets[ids][:, None] + within
    whole = gather(data, ids, index, None if bool(inside.all()) else inside, keys)
    fields = {name: values.flatten(0, 1) for name, values in whole.fields.items()}
    mask = {} if whole.rows is None else {"rows": whole.rows}
    yield repeat((fields, mask), count), [()] * count


def _mini_batches(
    data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
) -> Iterator[tuple[Iterable[Rows], list[Active]]]:
    """Yield the rows of each step in blocks; they are gathered when they are asked for."""
    plan = _Plan.of(data, ids, phase, seed=seed, at=at)
    by_step, counts = plan.epochs is None, plan.counts
    short = counts < plan.size if by_step else counts % plan.size != 0  # some rows are padding
    is_full = not bool(short.any())
    all_work = by_step or bool((plan.passes == plan.passes[0]).all())
    for index, inside, active in plan.blocks(max(1, PLANNED // (len(ids) * plan.size))):
        working: list[Active] = [()] * len(index) if all_work else [(on,) for on in active.unbind()]
        yield _gathered(data, index.flatten(1), None if is_full else inside), working


def _gathered(data: ClientData, index: Tensor, inside: Tensor | None) -> Iterator[Rows]:
    for k, rows in enumerate(index.unbind()):
        # index_select copies row by row: a third of the time of values[rows]
        fields = {name: values.index_select(0, rows) for name, values in data.fields.items()}
        yield fields, {} if inside is None else {"rows": inside[k]}


@dataclass(frozen=True, eq=False)
class _Plan:
    """Which rows a chunk's clients (C,) work on; `epochs` None: as many passes as `steps` need."""

    offsets: Tensor
    counts: Tensor
    size: int
    passes: Tensor
    steps: int
    epochs: int | None
    orders: Orders | None
    half: Half | None

    @staticmethod
    def of(
        data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
    ) -> "_Plan":
        if phase.batch_size is None:
            raise ValueError("a phase on all rows has no row plan")
        half = None
        if phase.rows != "all":
            half = half_of(data, ids, phase.rows, seed=seed, round_=at[0])
        counts = data.counts[ids] if half is None else half.counts
        size = min(phase.batch_size, int(counts.max()))
        by_epoch = phase.unit == "epoch"
        passes = (counts + size - 1) // size if by_epoch else (counts // size).clamp(min=1)
        keys = noise.fold_now(data.keys[ids], seed, seed >> 32, noise.word("rows"), *at)
        return _Plan(
            offsets=data.offsets[ids],
            counts=counts,
            size=size,
            passes=passes,
            steps=int((passes * phase.count).max()) if by_epoch else phase.count,
            epochs=phase.count if by_epoch else None,
            # any row will do for a step that scores none
            orders=Orders.of(keys, counts) if phase.scores_rows else None,
            half=half,
        )

    def blocks(self, length: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield positions and padding (K, C, B) and who works (K, C), `length` steps at a time."""
        for k in torch.arange(self.steps).split(length):
            epoch, part = k[:, None] // self.passes, k[:, None] % self.passes  # (K, C)
            active = torch.ones_like(epoch, dtype=torch.bool)
            if self.epochs is not None:  # who is done early needs no orders of further epochs
                active, epoch = epoch < self.epochs, epoch.clamp(max=self.epochs - 1)
            place = part[..., None] * self.size + torch.arange(self.size)  # (K, C, B)
            inside = place < self.counts[:, None]
            within = torch.where(inside, place, 0)
            if self.orders is not None:
                within = self.orders.at(epoch, within)
            if self.half is not None:
                within = self.half.within(within)
            index = self.offsets[:, None] + torch.where(inside, within, 0)
            yield index, inside, active
