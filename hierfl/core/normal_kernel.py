"""Keys and normals of compiled steps by kernels in C: `noise.fold`, and `noise.normals` to rounding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from hierfl.core.noise import GRAPH_OPS

# The counters, the hash and the pairs are those of `noise.normals`, in float32. GCC turns the loop
# into vector instructions: the logarithm, sine and cosine are the polynomials of Cephes (S. Moshier,
# single/logf.c and sinf.c), without branches. An angle is cut into quarter turns before pi comes in.
SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t hashed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0xD35A2D97u;
  return x ^ (x >> 15);
}

static inline float unit(uint32_t counter, uint32_t first, uint32_t second) {
  uint32_t word = hashed(hashed(counter ^ first) + second);
  return ((float)(int32_t)(word >> 9) + 0.5f) * 0x1p-23f;
}

static inline float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

static inline float logarithm(float u) {
  int32_t bits;
  memcpy(&bits, &u, 4);
  int32_t exponent = (bits - 0x3F3504F3) >> 23;  // the mantissa lies in [sqrt(1/2), sqrt(2))
  bits -= exponent << 23;
  float mantissa;
  memcpy(&mantissa, &bits, 4);
  float x = mantissa - 1.0f, z = x * x, e = (float)exponent;
  float p = fma_(7.0376836292e-2f, x, -1.1514610310e-1f);
  p = fma_(p, x, 1.1676998740e-1f);
  p = fma_(p, x, -1.2420140846e-1f);
  p = fma_(p, x, 1.4249322787e-1f);
  p = fma_(p, x, -1.6668057665e-1f);
  p = fma_(p, x, 2.0000714765e-1f);
  p = fma_(p, x, -2.4999993993e-1f);
  p = fma_(p, x, 3.3333331174e-1f) * x * z;
  p = fma_(e, -2.12194440e-4f, p);
  return fma_(e, 0.693359375f, x + fma_(-0.5f, z, p));
}

static inline void pair(int64_t i, uint32_t first, uint32_t second, float *a, float *b) {
  float radius = sqrtf(-2.0f * logarithm(unit(4 * (uint32_t)i, first, second)));
  float quarters = 4.0f * unit(4 * (uint32_t)i + 1, first, second);
  int32_t turn = (int32_t)(quarters + 0.5f);
  float x = (quarters - (float)turn) * 1.57079632679489662f, z = x * x;
  float s = fma_(fma_(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f);
  float c = fma_(fma_(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
  s = fma_(s * z, x, x);
  c = fma_(c * z, z, fma_(-0.5f, z, 1.0f));
  float cosine = turn & 1 ? s : c, sine = turn & 1 ? c : s;
  *a = radius * ((turn + 1) & 2 ? -cosine : cosine);
  *b = radius * (turn & 2 ? -sine : sine);
}

extern "C" void fold(const uint32_t *keys, int64_t many, int64_t word, uint32_t *out) {
  for (int64_t k = 0; k < 2 * many; k += 2) {
    out[k] = hashed(keys[k] ^ (uint32_t)word);
    out[k + 1] = hashed(keys[k + 1] + out[k]);
  }
}

extern "C" void normals(const uint32_t *keys, int64_t many, int64_t count, float *out) {
  int64_t half = count / 2, pairs = count - half;
  for (int64_t k = 0; k < many; k++) {
    uint32_t first = keys[2 * k], second = keys[2 * k + 1];
    float *__restrict a = out + k * count, *__restrict b = a + pairs, spare;
    for (int64_t i = 0; i < half; i++) pair(i, first, second, a + i, b + i);
    if (pairs > half) pair(half, first, second, a + half, &spare);
  }
}
"""


# no compiler, or one that fails; another release of torch
NO_KERNELS = (OSError, RuntimeError, SubprocessError, ImportError, AttributeError, TypeError)


@cache
def _kernels() -> Any:
    """Compile the kernels, or take them from inductor's cache on disk."""
    from torch._inductor.codecache import CppCodeCache

    # inductor lets GCC vectorize no loop, and square roots set errno
    flags = ("-ftree-loop-vectorize", "-fno-math-errno")
    library: Any = CppCodeCache.load(SOURCE, device_type="cpu", extra_flags=flags)
    for kernel in (library.fold, library.normals):
        kernel.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
        kernel.restype = None
    return library


@contextmanager
def in_graph() -> Iterator[None]:
    """Let keyed noise on the CPU call the kernels, where they can be compiled."""
    try:
        _kernels()
    except NO_KERNELS:
        yield
        return
    token = GRAPH_OPS.set(torch.ops.hierfl)
    try:
        yield
    finally:
        GRAPH_OPS.reset(token)


def _fold(key: Tensor, word: int) -> Tensor:
    keys = key.contiguous()
    out = torch.empty_like(keys)
    _kernels().fold(keys.data_ptr(), keys.numel() // 2, word, out.data_ptr())
    return out


def _normals(key: Tensor, count: int) -> Tensor:
    keys = key.contiguous()
    out = torch.empty((*key.shape[:-1], count), dtype=torch.float32)
    _kernels().normals(keys.data_ptr(), keys.numel() // 2, count, out.data_ptr())
    return out


def _vmapped(op: Callable[[Tensor, int], Tensor]) -> Callable[..., tuple[Tensor, int]]:
    def of_many(
        info: object, in_dims: tuple[int | None, ...], key: Tensor, number: int
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return op(key.movedim(in_dims[0], 0), number), 0

    return of_many


def _define(name: str, run: Callable[[Tensor, int], Tensor], fake: Any) -> None:
    """Register an operation (key, number) -> tensor that a graph holds as it is."""
    _library.define(f"{name}(Tensor key, int number) -> Tensor")
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"hierfl::{name}", fake, lib=_library)
    vmapped = _vmapped(getattr(torch.ops.hierfl, name))
    torch.library.register_vmap(f"hierfl::{name}", vmapped, lib=_library)


def _undrawn(key: Tensor, count: int) -> Tensor:
    return key.new_empty((*key.shape[:-1], count), dtype=torch.float32)


_library = torch.library.Library("hierfl", "FRAGMENT")
_define("fold", _fold, lambda key, word: key.new_empty(key.shape))
_define("normals", _normals, _undrawn)
_library.define("normals_of(Tensor[] keys, int[] counts) -> Tensor[]")
_library.impl("normals_of", lambda keys, counts: list(map(_normals, keys, counts)), "CPU")
torch.library.register_fake(
    "hierfl::normals_of", lambda keys, counts: list(map(_undrawn, keys, counts)), lib=_library
)
