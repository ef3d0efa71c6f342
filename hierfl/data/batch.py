"""`ClientBatch`: the stacked and padded rows of a chunk of clients, as models receive them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.mask_messenger import MaskMessenger
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import spelled
from hierfl.core.tables import shapes
from hierfl.data.clients import ClientData
from hierfl.data.joint_normal import JointNormal

CLIENTS, DATA = "clients", "data"
MAKE = (
    "make it with ClientData.from_frame(frame, 'client', x=[...], y=...), from_clients({name: {'y': "
    "...}}) or from_arrays(client_id, y=...), or name the column, hierfl.fit(..., clients='client')"
)


@dataclass(frozen=True, eq=False)
class ClientBatch:
    """Rows of C clients, padded to B rows each. Fields are read as attributes, such as `batch.x`.

    Inside `batch.data()` padded rows count for nothing. What a program computes from several rows
    at once must leave them out itself:

    * `batch.sum(x)` and `batch.mean(x)` are sums and means over the rows of each client.
    * `batch.mask()` tells rows from padding.
    * `batch.packed(x)` makes all rows of a client one event, for a likelihood with one density a
    client. It is
      observed inside `batch.clients()` and outside `batch.data()`, and masked: either
      `fn.mask(batch.packed(batch.mask())).to_event(1)`, where rows are independent given the latent
      sites, or `batch.joint_normal(loc, covariance)`, where they are jointly Gaussian (a Gaussian
      process).

    Such a site is refused in a model that does not ask for the mask by one of these. Where clients
    differ in their numbers of rows, a program whose log density depends on padding is refused too.
    Likelihoods that need several rows of a client at once cannot run on mini-batches of its rows.

    Args:
        fields: name -> Tensor (C, B, ...). Padded rows repeat the client's own first row, so a slot
            never holds a row of another client.
        client_fields: name -> Tensor (C, 1, ...).
        rows: (C, B) bool, false at padded rows; None if there are none.
        counts: (C,) number of rows that each client has in all, in the dtype of the model.
        own_keys: (C, 2) int32, the clients' noise keys at this step.
        root: (2,) int32, the noise key that the clients share.
        words: words to fold into both, such as the number of the draw. They are folded only when a
            site is drawn, so a guide without noise does not pay for it.
        is_mini_batch: whether the rows are a sample of each client's rows, to be scaled up to all
            of them.
    """

    fields: Mapping[str, Tensor]
    client_fields: Mapping[str, Tensor]
    rows: Tensor | None
    counts: Tensor
    own_keys: Tensor
    root: Tensor
    words: tuple[int | Tensor, ...] = ()
    is_mini_batch: bool = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for kind in ("fields", "client_fields"):
            if name in (fields := object.__getattribute__(self, kind)):
                return fields[name]
        there = ", ".join(sorted([*self.fields, *self.client_fields]))
        fix = "correct the name, or add the field"
        raise AttributeError(f"the data have no field '{name}'; they have {there}: {fix}")

    @property
    def num_clients(self) -> int:
        """C, the number of clients in the batch."""
        return self.counts.shape[0]

    @property
    def num_rows(self) -> int:
        """B, the number of rows of each client, padded rows included."""
        # fields that record each access tell it themselves: counting rows reads no field
        rows: int | None = getattr(self.fields, "num_rows", None)
        return next(iter(self.fields.values())).shape[1] if rows is None else rows

    def plate(self, name: str, size: int, dim: int) -> pyro.plate:
        """Return the plate of a name, made at the first call.

        Pyro allows a plate to be made only once per trace; a program may open it any number of
        times.
        """
        plates: dict[str, pyro.plate] = self.__dict__.setdefault("_plates", {})
        if name not in plates:
            plates[name] = pyro.plate(name, size, dim=dim)
        return plates[name]

    def clients(self) -> pyro.plate:
        """Return the clients plate, dim -2: sites sampled inside it stay with their client."""
        return self.plate(CLIENTS, self.num_clients, -2)

    @property
    def row_scale(self) -> Tensor | float:
        """For how many rows each row of a mini-batch stands, (C, 1); else 1."""
        present = self.num_rows if self.rows is None else self.rows.sum(-1, keepdim=True)
        return (self.counts[:, None] / present) if self.is_mini_batch else 1.0

    @contextmanager
    def data(self) -> Iterator[object]:
        """Open the data plate, dim -1; it masks padded rows and scales mini-batches to all rows."""
        with self.plate(DATA, self.num_rows, -1) as index, poutine.scale(scale=self.row_scale):
            if self.rows is None:
                yield index
            else:
                mask: Any = self.rows
                with MaskMessenger(mask):
                    yield index

    @cached_property
    def key(self) -> Tensor:
        """Keys of all noise inside the clients plate, (C, 2) int32."""
        return noise.fold(self.own_keys, *self.words)

    @cached_property
    def shared_key(self) -> Tensor:
        """Key of all noise outside the clients plate, (2,) int32."""
        return noise.fold(self.root, *self.words)

    def __repr__(self) -> str:
        fields = shapes({**self.fields, **self.client_fields}.items())
        return f"ClientBatch({self.num_clients} clients of {self.num_rows} padded rows, {fields})"

    def redrawn(self, word: int | Tensor) -> "ClientBatch":
        """Return the same rows with other noise: `word` is folded into the keys."""
        return replace(self, words=(*self.words, word))

    def mask(self) -> Tensor:
        """Return which rows are not padding, (C, B) bool; all true in a batch without padding."""
        if self.rows is not None:
            return self.rows
        shape = self.num_clients, self.num_rows
        return torch.ones(shape, dtype=torch.bool, device=self.counts.device)

    def sum(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """Return the sum of x over the rows of each client, without padded rows.

        Args:
            x: one entry per row, (C, B, ...) as fields are.
            dim: dimension of the rows; the clients' is the one before it. With plates left of the
                clients, (..., C, B), it is -1.

        Returns:
            The sums, (C, 1, ...): of the shape of x, with size 1 in dimension `dim`.

        Raises:
            ValueError: dimension `dim` of x is not that of the rows.
        """
        mask = self._mask_along(x, dim)
        return torch.where(mask, x, x.new_zeros(())).sum(dim, keepdim=True)

    def mean(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """Return the mean of x over the rows of each client; arguments and error as of `sum`."""
        return self.sum(x, dim=dim) / self._mask_along(x, dim).sum(dim, keepdim=True)

    def _mask_along(self, x: Tensor, dim: int) -> Tensor:
        if not -x.dim() <= dim < x.dim() or x.shape[dim] not in (1, self.num_rows):
            what = f"x has shape {tuple(x.shape)}, and its dimension {dim} must have the"
            fix = "say which dimension has, dim="
            raise ValueError(f"{what} {self.num_rows} rows of the batch: {fix}")
        behind = x.dim() - 1 - dim % x.dim()
        return self.mask()[(..., *[None] * behind)]

    def packed(self, x: Tensor) -> Tensor:
        """Return all rows of each client as one event, (C, B, ...) -> (C, 1, B, ...).

        A distribution over them has the batch shape (C, 1) of `batch.clients()`.
        """
        return x[:, None]

    def joint_normal(self, loc: Tensor, covariance: Tensor) -> JointNormal:
        """Return a joint Normal distribution of the rows of each client, without padded rows.

            with batch.clients():
                length = pyro.sample("length", dist.LogNormal(0.0, 1.0))
                x = batch.packed(batch.x)  # (C, 1, B)
                apart = (x[..., :, None] - x[..., None, :]) / length[..., None, None]
                covariance = (-0.5 * apart**2).exp() + 0.1 * torch.eye(batch.num_rows)
                normal = batch.joint_normal(torch.zeros(()), covariance)
                pyro.sample("y", normal, obs=batch.packed(batch.y))

        The density is that of the client's own rows: entries of padded rows are ignored.

        Args:
            loc: means, to be broadcast to (C, 1, B).
            covariance: to be broadcast to (C, 1, B, B), positive definite over the rows of each
                client.
        """
        return JointNormal(loc, covariance, self.packed(self.mask()))


def expect_client_data(value: Any, what: str) -> ClientData:
    """Return `value`, which must be `ClientData`; the error names the constructors."""
    if isinstance(value, ClientData):
        return value
    raise TypeError(f"{what} is a {type(value).__name__}, not ClientData: {MAKE}")


@spelled
def full_batch(
    data: ClientData, ids: Tensor | None = None, *, seed: int = 0, at: tuple[int, ...] = (0,)
) -> ClientBatch:
    """Return all rows of some clients, padded to the largest number of rows among them.

    It is what a model is a function of: `pyro.render_model(model, (hierfl.full_batch(data),))`.

    Args:
        data: all clients.
        ids: (C,) int64, positions of the clients to take; None: all.
        seed: of the run.
        at: the time in the run. The noise keys depend on it, on the seed and on the client's name.
    """
    expect_client_data(data, "data")
    ids = torch.arange(data.num_clients) if ids is None else ids
    inside, index = rows_along(data, ids, int(data.counts[ids].max()))
    keys = keys_of(data, ids, seed, *at)
    return gather(data, ids, index, None if bool(inside.all()) else inside, keys)


def rows_along(data: ClientData, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return up to `width` rows from all along clients: which exist, and their positions, (C, width).

    Rows are often sorted by a covariate: the first ones alone may all take one branch.
    """
    counts, place = data.counts[ids][:, None], torch.arange(width)[None]
    inside = place < counts
    place = torch.where(counts > width, place * (counts - 1) // max(1, width - 1), place)
    return inside, data.offsets[ids][:, None] + torch.where(inside, place, 0)


class Keys(NamedTuple):
    """The noise keys of a step: (..., C, 2) int32 of the clients, and the shared (..., 2)."""

    own: Tensor
    shared: Tensor

    def folded(self, *words: int | Tensor) -> "Keys":
        """Return both kinds of key with words folded in, one after another."""
        return Keys(noise.fold_now(self.own, *words), noise.fold_now(self.shared, *words))

    def of_steps(self, first: int, last: int) -> "list[Keys]":
        """Return the keys of the steps `first`..`last` - 1, computed together."""
        step = torch.arange(first, last, dtype=torch.int32)
        own = noise.fold_now(self.own[None], step[:, None])
        return list(map(Keys, own.unbind(), noise.fold_now(self.shared[None], step).unbind()))


def keys_of(data: ClientData, ids: Tensor, seed: int, *at: int) -> Keys:
    """Return the keys of clients `ids` (C,), and the shared one, at a time (round, step)."""
    return Keys(noise.fold_now(data.keys[ids], seed, seed >> 32), noise.root_key(seed)).folded(*at)


def gather(
    data: ClientData,
    ids: Tensor,
    index: Tensor,
    inside: Tensor | None,
    keys: Keys,
    *,
    is_mini_batch: bool = False,
) -> ClientBatch:
    """Gather rows `index` (C, B) of clients `ids`; `inside` (C, B) is false at padded rows."""
    flat, fields = index.flatten(), {}
    for name, values in data.fields.items():
        # index_select takes a third of the time, but copies all rows of `stand_in` first
        chosen = values.index_select(0, flat) if values.stride(0) else values[flat]
        fields[name] = chosen.unflatten(0, index.shape)
    return ClientBatch(
        fields=fields,
        client_fields={name: values[ids][:, None] for name, values in data.client_fields.items()},
        rows=inside,
        counts=data.counts[ids].to(torch.get_default_dtype()),
        own_keys=keys.own,
        root=keys.shared,
        is_mini_batch=is_mini_batch,
    )


def mapped(batch: ClientBatch, change: Callable[[Tensor], Tensor]) -> ClientBatch:
    """Return a batch with a function of its fields and numbers of rows in place of them."""
    return replace(
        batch,
        fields={name: change(v) for name, v in batch.fields.items()},
        client_fields={name: change(v) for name, v in batch.client_fields.items()},
        counts=change(batch.counts),
    )


# ------------------------------------------------------------ clients of very different numbers of rows
FEW_ROWS = 1 << 16  # of a chunk of clients, padded ones included: too few to be worth cutting
MUCH_PADDING = 1 << 21  # padded rows of a chunk that predictions at 200 draws would take 16 GB for


def cut_ragged(
    chunks: Sequence[Tensor],
    *counts: Tensor,
    most: int,
    few: int = FEW_ROWS,
    padding: int = MUCH_PADDING,
) -> tuple[Tensor, ...]:
    """Cut chunks that hold more than `padding` padded rows, unless they have at most `few` rows in all."""
    padded = 0
    for chunk in chunks:
        for rows in counts:
            padded = max(padded, len(chunk) * int(rows[chunk].max()) - int(rows[chunk].sum()))
    if padded <= padding:
        return tuple(chunks)
    ids = torch.cat(tuple(chunks))
    lengths = _lengths(torch.stack([rows[ids] for rows in counts]).amax(0).tolist(), most, few)
    return ids.split(lengths)


def _lengths(rows: list[int], most: int, few: int) -> list[int]:
    """Return the lengths of runs of clients that, padded, have `few` rows or a fifth of padding."""
    lengths, largest, there = [0], 0, 0
    for own in rows:
        wide = (lengths[-1] + 1) * max(largest, own)
        if lengths[-1] == most or (lengths[-1] and wide > max(few, 5 * (there + own) // 4)):
            lengths.append(0)
            largest, there = 0, 0
        lengths[-1], largest, there = lengths[-1] + 1, max(largest, own), there + own
    return lengths


def in_dtype(batch: ClientBatch, dtype: torch.dtype) -> ClientBatch:
    """Return a batch with its floating fields in a dtype."""
    return mapped(batch, lambda v: v.to(dtype) if v.is_floating_point() else v)


in_double = partial(in_dtype, dtype=torch.float64)
