"""Noise as a function of a key: whoever computes it, in whatever order, draws the same numbers.

A key is a pair of int32 words, `Tensor (..., 2)`. A client's key is a hash of its name; folding in the seed, the step and the
site makes the key of one draw. Counter -> integer hash -> Box-Muller is tensor arithmetic alone: it runs under `torch.vmap`,
is traced into a graph, and needs no generator whose state would have to be kept, sent or resumed.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Word = TypeVar("Word", bound=Any)


def hashed(x: Word) -> Word:
    """Mix int32 words, a tensor or an array, by the 32-bit hash "lowbias32" (C. Wellons, 2018, constants of its 2020 revision)."""
    x = (x ^ _shifted(x, 16)) * 0x21F0AAAD
    x = (x ^ _shifted(x, 15)) * (0xD35A2D97 - (1 << 32))
    return x ^ _shifted(x, 15)


def _shifted(x: Word, by: int) -> Word:
    """Shift right without the sign: int32 has no unsigned shift."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def word(name: str) -> int:
    """Hash a name to an int32 word, the same in every process."""
    return _signed(zlib.crc32(name.encode()))


def _signed(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


def client_keys(names: Iterable[str]) -> Tensor:
    """Keys of clients, (N, 2) int32, from their names: 64 bits, so that two of a million clients share one with odds 3e-8."""
    digests = b"".join(
        hashlib.blake2b(str(name).encode(), digest_size=8).digest() for name in names
    )
    return torch.from_numpy(np.frombuffer(digests, dtype="<i4").astype(np.int32).reshape(-1, 2))


def fold(key: Tensor, *words: int | Tensor) -> Tensor:
    """Fold words into keys (..., 2), one after another; integers outside int32 wrap around."""
    mixed = (item.to(torch.int32) if isinstance(item, Tensor) else _signed(item) for item in words)
    first, second = key.unbind(-1)
    return torch.stack(torch.broadcast_tensors(*_mixed(first, second, mixed)), -1)


def fold_now(key: Tensor, *words: int | Tensor) -> Tensor:
    """The same as `fold`, of tensors that are no part of a graph: NumPy starts a small operation in a third of torch's time."""
    if (
        torch._C._functorch.peek_interpreter_stack() is not None
    ):  # inside vmap or grad, where no tensor is an array
        return fold(key, *words)
    pair: Any = key.cpu().numpy()
    mixed = (
        item.to(torch.int32).cpu().numpy() if isinstance(item, Tensor) else np.int32(_signed(item))
        for item in words
    )
    with np.errstate(over="ignore"):  # of single numbers; arrays wrap around without a word
        both = _mixed(pair[..., 0], pair[..., 1], mixed)
    return torch.from_numpy(np.stack(np.broadcast_arrays(*both), -1)).to(key.device)


def _mixed(first: Word, second: Word, words: Iterable[Any]) -> tuple[Word, Word]:
    for item in words:
        first = hashed(first ^ item)
        second = hashed(second + first)
    return first, second


def root_key(seed: int) -> Tensor:
    """The key that all clients share, (2,) int32: that of the draws outside the clients plate."""
    return fold(
        torch.tensor([_signed(0x9E3779B9), _signed(0x85EBCA6B)], dtype=torch.int32),
        seed,
        seed >> 32,
    )


def _words(key: Tensor, count: int, stream: int) -> Tensor:
    """`count` words of each key, (..., count); streams of one key are unrelated."""
    counter = torch.arange(count, dtype=torch.int32, device=key.device)
    return hashed(hashed((counter * 4 + stream) ^ key[..., :1]) + key[..., 1:])


def _units(key: Tensor, count: int, stream: int, dtype: torch.dtype) -> Tensor:
    """Uniforms inside (0, 1), (..., count), on a grid of 2^-23, or 2^-48 in float64: as fine as arithmetic near 1 can use."""
    words = _words(key, count, stream)
    if dtype != torch.float64:
        return (
            _shifted(words, 9).to(dtype) + 0.5
        ) * 2.0**-23  # one bit more, and the largest would round to 1
    high = _shifted(words, 8).to(dtype)
    low = (_shifted(_words(key, count, stream + 2), 8)).to(dtype)
    return high * 2.0**-24 + (low + 0.5) * 2.0**-48


def uniforms(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Draw uniforms inside (0, 1) as a function of keys (..., 2): Tensor (..., *shape)."""
    units = _units(key, math.prod(shape), 0, dtype or torch.get_default_dtype())
    return units.reshape((*key.shape[:-1], *shape))


def normals(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Draw standard normals as a function of keys (..., 2): Tensor (..., *shape), by Box and Muller's transform."""
    dtype = dtype or torch.get_default_dtype()
    size = math.prod(shape)
    pairs = (size + 1) // 2
    radius = torch.sqrt(-2.0 * torch.log(_units(key, pairs, 0, dtype)))
    angle = 2.0 * math.pi * _units(key, pairs, 1, dtype)
    both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
    return both[..., :size].reshape((*key.shape[:-1], *shape))


def permutations(key: Tensor, counts: Tensor, width: int) -> Tensor:
    """Shuffle the first `counts` of `width` places, a row a key: Tensor (C, width) int64; places past the count come last.

    Args:
        key: (C, 2) int32.
        counts: (C,) int64, each <= width. The order of the first `counts` does not depend on `width`.
        width: columns of the answer.
    """
    place = torch.arange(width, device=key.device)
    rank = _words(key, width, 0).long().masked_fill(place >= counts[:, None], 1 << 40)
    return torch.argsort(rank, dim=1, stable=True)


def cohort(seed: int, round_: int, population: int, size: int) -> Tensor:
    """Choose `size` of `population` without replacement for a round: Tensor (size,) int64, sorted, in time O(size)."""
    if size == population:
        return torch.arange(population)
    generator = np.random.Generator(
        np.random.Philox(key=np.array([seed & 0xFFFFFFFFFFFFFFFF, round_], np.uint64))
    )
    return torch.from_numpy(
        np.sort(generator.choice(population, size, replace=False, shuffle=False))
    )
