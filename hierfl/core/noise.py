"""Keyed noise: a function of a key, int32 (..., 2), the same in any process and order, also by vmap.

Also whether anything draws from a global generator in its place.
"""

import hashlib
import math
import pickle
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Word = TypeVar("Word", bound=Any)
# operations `fold(key, word)` and `normals(key, count)` for a step that is traced to be compiled
GRAPH_OPS: ContextVar[Any] = ContextVar("graph_ops", default=None)


def hashed(x: Word) -> Word:
    """Mix int32 words with the hash "lowbias32" (C. Wellons 2018, constants of the 2020 revision)."""
    x = (x ^ _shifted(x, 16)) * 0x21F0AAAD
    x = (x ^ _shifted(x, 15)) * (0xD35A2D97 - (1 << 32))
    return x ^ _shifted(x, 15)


def _shifted(x: Word, by: int) -> Word:
    """Shift right without sign extension: int32 has no unsigned shift."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def word(name: str) -> int:
    """Hash a name to an int32 word that is the same in every process."""
    return _signed(zlib.crc32(name.encode()))


def _signed(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


def client_keys(names: Iterable[str]) -> Tensor:
    """Hash the clients' names to keys (N, 2) int32; two of a million agree with 3e-8."""
    digests = bytearray()
    for name in names:
        digests += hashlib.blake2b(str(name).encode(), digest_size=8).digest()
    return torch.from_numpy(np.frombuffer(digests, dtype="<i4").astype(np.int32).reshape(-1, 2))


def fold(key: Tensor, *words: int | Tensor) -> Tensor:
    """Fold words into keys (..., 2), in order: integers, wrapped to int32, or tensors."""
    ops = GRAPH_OPS.get()
    if ops is not None and key.device.type == "cpu":
        while words and not isinstance(words[0], Tensor):
            key, words = ops.fold(key, _signed(words[0])), words[1:]
        if not words:
            return key
    mixed = (item.to(torch.int32) if isinstance(item, Tensor) else _signed(item) for item in words)
    first, second = key.unbind(-1)
    return torch.stack(torch.broadcast_tensors(*_mixed(first, second, mixed)), -1)


def fold_now(key: Tensor, *words: int | Tensor) -> Tensor:
    """Return the same keys as `fold` outside any graph, by NumPy, which takes a third of torch's time."""
    # Inside vmap or grad a tensor cannot be read as a NumPy array.
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return fold(key, *words)
    pair: Any = key.cpu().numpy()
    mixed: list[Any] = []
    for item in words:
        if isinstance(item, Tensor):
            mixed.append(item.to(torch.int32).cpu().numpy())
        else:
            mixed.append(np.int32(_signed(item)))
    # NumPy warns when a scalar wraps around, though not when an array does.
    with np.errstate(over="ignore"):
        mixed_pair = _mixed(pair[..., 0], pair[..., 1], mixed)
    return torch.from_numpy(np.stack(np.broadcast_arrays(*mixed_pair), -1)).to(key.device)


def _mixed(first: Word, second: Word, words: Iterable[Any]) -> tuple[Word, Word]:
    for item in words:
        first = hashed(first ^ item)
        second = hashed(second + first)
    return first, second


def root_key(seed: int) -> Tensor:
    """Return the key that all clients share, (2,) int32: draws outside the clients plate use it."""
    start = torch.tensor([_signed(0x9E3779B9), _signed(0x85EBCA6B)], dtype=torch.int32)
    return fold(start, seed, seed >> 32)


def seed_torch(seed: int) -> None:
    """Seed torch's global generators, faster than `torch.manual_seed` by a millisecond without CUDA."""
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _words(key: Tensor, count: int, stream: int) -> Tensor:
    """Return `count` hashed words for each key, (..., count); streams of one key are unrelated."""
    counter = torch.arange(count, dtype=torch.int32, device=key.device)
    return hashed(hashed((counter * 4 + stream) ^ key[..., :1]) + key[..., 1:])


def _units(key: Tensor, count: int, stream: int, dtype: torch.dtype) -> Tensor:
    """Return uniforms inside (0, 1), (..., count), on the finest grid near 1, 2^-23 (2^-48 in float64)."""
    words = _words(key, count, stream)
    if dtype != torch.float64:
        # With one more bit the largest value would round to 1.
        return (_shifted(words, 9).to(dtype) + 0.5) * 2.0**-23
    high = _shifted(words, 8).to(dtype)
    low = (_shifted(_words(key, count, stream + 2), 8)).to(dtype)
    return high * 2.0**-24 + (low + 0.5) * 2.0**-48


def uniforms(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Draw uniforms inside (0, 1), (..., *shape); the first ones are those of a shorter draw."""
    units = _units(key, math.prod(shape), 0, dtype or torch.get_default_dtype())
    return units.reshape((*key.shape[:-1], *shape))


def normals(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Draw standard normals, (..., *shape), by the Box-Muller transform."""
    dtype = dtype or torch.get_default_dtype()
    size = math.prod(shape)
    ops = GRAPH_OPS.get()
    if ops is not None and dtype == torch.float32 and key.device.type == "cpu":
        drawn: Tensor = ops.normals(key, size)
        return drawn.reshape((*key.shape[:-1], *shape))
    pairs = (size + 1) // 2
    radius = torch.sqrt(-2.0 * torch.log(_units(key, pairs, 0, dtype)))
    angle = 2.0 * math.pi * _units(key, pairs, 1, dtype)
    both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
    return both[..., :size].reshape((*key.shape[:-1], *shape))


def permutations(key: Tensor, counts: Tensor, width: int) -> Tensor:
    """Shuffle the first `counts` (C,) of `width` places by key (C, 2), in an order free of `width`."""
    place = torch.arange(width, device=key.device)
    rank = _words(key, width, 0).long().masked_fill(place >= counts[:, None], 1 << 40)
    return torch.argsort(rank, dim=1, stable=True)


def cohort(seed: int, round_: int, population: int, size: int) -> Tensor:
    """Draw a round's clients without replacement, in O(size): ascending positions (size,)."""
    if size == population:
        return torch.arange(population)
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, round_], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    drawn = generator.choice(population, size, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(drawn))


NUMPY = "NumPy's global generator (np.random)"
PYTHON = "Python's global generator (random)"
TORCH = "torch's global generator (torch.randn, torch.bernoulli, dropout, ...)"
# a seed that no model sets itself: a generator seeded and drawn from has moved too
UNUSUAL = 1_618_033_988


class Generator(NamedTuple):
    """How a global generator is seeded, read and restored."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]

    def as_bytes(self) -> bytes:
        """Return the state, to compare it with a later one."""
        state = self.state()
        return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


GENERATORS: Mapping[str, Generator] = {
    NUMPY: Generator(np.random.seed, np.random.get_state, np.random.set_state),
    PYTHON: Generator(random.seed, random.getstate, random.setstate),
    TORCH: Generator(seed_torch, torch.random.get_rng_state, torch.random.set_rng_state),
}


@contextmanager
def _drawn_here() -> Iterator[list[str]]:
    """Note this thread's calls of Python's global generator; other threads draw too."""
    calls: list[str] = []

    def note(frame: object, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is random.random.__self__:  # type: ignore[attr-defined]
            calls.append(called.__name__)

    if sys.getprofile() is not None:  # a profiler is at work, and there can be one only
        yield ["unknown"]
        return
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextmanager
def global_draws(*, of_torch: bool = True) -> Iterator[list[str]]:
    """Seed the global generators, and name those that are moved in this context when it ends; restore all."""
    moved: list[str] = []
    before = {}
    with ExitStack() as stack:
        for name, generator in GENERATORS.items():
            if of_torch or name != TORCH:
                stack.callback(generator.restore, generator.state())
                generator.seed(UNUSUAL)
                before[name] = generator.as_bytes()
        with _drawn_here() as drawn:
            yield moved
        names = [name for name, state in before.items() if GENERATORS[name].as_bytes() != state]
        if names != [PYTHON] or drawn:
            moved += names
