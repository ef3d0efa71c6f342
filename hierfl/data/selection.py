"""Which clients, and which rows, a user selects: names, positions and masks, checked."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierfl.core import noise


def positions_of(names: Sequence[str], wanted: Iterable[Any]) -> Tensor:
    """Return the positions of the clients named, (len(wanted),) int64."""
    if isinstance(wanted, str):
        raise TypeError(f"the clients are given as the string '{wanted}': give a list of names")
    place = {name: i for i, name in enumerate(names)}
    listed = [str(n) for n in wanted]
    unknown = [n for n in listed if n not in place]
    if unknown:
        raise KeyError(
            f"unknown client '{unknown[0]}': the clients are {', '.join(names[:8])}"
            + (", ..." if len(place) > 8 else "")
        )
    return torch.tensor([place[n] for n in listed], dtype=torch.long)


def chosen_clients(clients: Any, names: Sequence[str]) -> Tensor:
    """Return the positions of clients chosen by names, positions or a mask, int64."""
    if isinstance(clients, str | int):
        raise TypeError(f"the clients are given as {clients!r}: give a list, [{clients!r}]")
    if isinstance(clients, Tensor | np.ndarray):
        clients = clients.tolist()
    listed = list(clients)
    if not listed:
        raise ValueError("no clients were chosen: give at least one name or position")
    if all(isinstance(i, bool | np.bool_) for i in listed):
        if len(listed) != len(names):
            raise ValueError(
                f"the mask has {len(listed)} entries for {len(names)} clients: give one for each"
            )
        return torch.tensor(listed).nonzero()[:, 0]
    if any(isinstance(i, str) for i in listed):
        if not all(isinstance(i, str) for i in listed):
            raise TypeError(
                "the clients are given by names and positions: give either all names or all "
                "positions"
            )
        return positions_of(names, listed)
    ids = torch.tensor([_whole(i) for i in listed], dtype=torch.long)
    if int(ids.min()) < 0 or int(ids.max()) >= len(names):
        raise KeyError(f"client position out of range: there are {len(names)} clients")
    return ids


def _whole(position: Any) -> int:
    try:
        return operator.index(position)
    except TypeError as error:
        raise TypeError(
            f"client position {position!r} is no integer: give names, positions or a boolean mask"
        ) from error


def rows_kept(keep: Any, num_rows: int) -> Tensor:
    """Return a mask of rows, (n,) bool, that keeps one at least."""
    mask = torch.as_tensor(keep)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"keep holds {str(mask.dtype).removeprefix('torch.')}, no booleans: give a condition "
            "on each row, such as x > 0"
        )
    if mask.shape != (num_rows,):
        raise ValueError(
            f"keep has shape {tuple(mask.shape)}, but there are {num_rows} rows: give one boolean "
            f"per row"
        )
    if not bool(mask.any()):
        raise ValueError("no row is kept: a federation needs at least one row")
    return mask


def checked_fraction(fraction: Any, seed: Any) -> None:
    """Refuse a share of rows outside (0, 1), and a seed that is no integer."""
    if not isinstance(fraction, float | int | np.floating):
        raise TypeError(f"fraction is {fraction!r}: it must be a number between 0 and 1")
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"fraction is {fraction}: it must lie between 0 and 1")
    if not isinstance(seed, int | np.integer):
        raise TypeError(f"seed is {seed!r}: it must be an integer")


def rows_of(starts: Tensor, counts: Tensor) -> Tensor:
    """Return the positions of rows, client by client, from their first rows and counts (C,)."""
    within = torch.arange(int(counts.sum())) - torch.repeat_interleave(
        counts.cumsum(0) - counts, counts
    )
    return torch.repeat_interleave(starts, counts) + within


def first_part(offsets: Tensor, keys: Tensor, fraction: float) -> Tensor:
    """Draw which rows, (n,) bool, are in the first part of a split of every client's rows."""
    counts = offsets.diff()
    if int(counts.max()) == 1:
        raise ValueError(
            "every client has a single row, so a split leaves the second part empty: split the "
            "clients, data.select(...)"
        )
    first = (counts * fraction).round().long().clamp(min=1)
    first = torch.minimum(first, (counts - 1).clamp(min=1))
    keep = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    for k, own in enumerate(offsets[:-1].tolist()):
        order = noise.permutations(keys[k : k + 1], counts[k : k + 1], int(counts[k]))[0]
        keep[own + order[: int(first[k])]] = True
    return keep
