"""Keys and normals of compiled steps by kernels in C: `noise.fold`, and `noise.normals` to rounding."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import SubprocessError, run
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hierfl.core.noise import GRAPH_OPS
from hierfl.core.process import set_to

# The counters, the hash and the pairs are those of `noise.normals`, in float32. GCC turns the loops
# into vector instructions. Sine and cosine are the polynomials of Cephes (S. Moshier,
# single/sinf.c); that of the logarithm, fitted here, errs by 1.3e-7. An angle is cut into
# quarter turns before pi comes in. There are no branches, and signs are set by their bits.
SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t hashed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0xD35A2D97u;
  return x ^ (x >> 15);
}

static inline float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static inline float word(uint32_t counter, uint32_t first, uint32_t second) {
  return (float)(int32_t)(hashed(hashed(counter ^ first) + second) >> 9);
}

static inline float minus_2_log(float u) {
  uint32_t bits = as_bits(u);
  // the mantissa 1 + x lies in [sqrt(1/2), sqrt(2))
  int32_t exponent = (int32_t)(bits - 0x3F3504F3u) >> 23;
  float x = as_float(bits - ((uint32_t)exponent << 23)) - 1.0f, z = x * x;
  float p = fma_(0.204483911f, x, -0.322823465f);
  p = fma_(p, x, 0.343338132f);
  p = fma_(p, x, -0.398204774f);
  p = fma_(p, x, 0.499611467f);
  p = fma_(p, x, -0.666693807f);
  p = fma_(p, x * z, fma_(-2.0f, x, z));
  return fma_((float)exponent, -1.38629436f, p);
}

static inline void pair(uint32_t i, uint32_t first, uint32_t second, float *a, float *b) {
  float radius = sqrtf(minus_2_log(fma_(word(4 * i, first, second), 0x1p-23f, 0x1p-24f)));
  float quarters = fma_(word(4 * i + 1, first, second), 0x1p-21f, 0x1p-22f);
  float shifted = quarters + 0x1.8p23f;  // its last bits are the nearest quarter turn
  uint32_t turn = as_bits(shifted);
  float x = (quarters - (shifted - 0x1.8p23f)) * 1.57079632679489662f, z = x * x;
  float s = fma_(fma_(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f);
  float c = fma_(fma_(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
  s = fma_(s * z, x, x);
  c = fma_(fma_(c, z, -0.5f), z, 1.0f);
  uint32_t swapped = (as_bits(s) ^ as_bits(c)) & -(turn & 1);
  uint32_t sine = as_bits(s) ^ swapped, cosine = as_bits(c) ^ swapped;
  *a = radius * as_float(cosine ^ ((turn + 1) << 30 & 0x80000000u));
  *b = radius * as_float(sine ^ (turn << 30 & 0x80000000u));
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
    for (uint32_t i = 0; i < (uint32_t)half; i++) pair(i, first, second, a + i, b + i);
    if (pairs > half) pair(half, first, second, a + half, &spare);
  }
}
"""

ARGUMENTS: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
NO_KERNELS = (OSError, RuntimeError, SubprocessError)  # no compiler, or one that fails
# GCC turns the loops into vector instructions where square roots set no errno and nothing traps
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


@cache
def _kernels() -> Any:
    """Compile the kernels, in less than a second."""
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        source.write_text(SOURCE)
        compiler = os.environ.get("CXX", "c++")
        run([compiler, *FLAGS, str(source), "-o", str(library)], check=True, capture_output=True)
        kernels: Any = ctypes.CDLL(str(library))
    for kernel in (kernels.fold, kernels.normals):
        kernel.argtypes = ARGUMENTS
        kernel.restype = None
    return kernels


@contextmanager
def in_graph() -> Iterator[None]:
    """Let keyed noise on the CPU call the kernels, where they can be compiled."""
    try:
        _kernels()
    except NO_KERNELS:
        yield
        return
    with set_to(GRAPH_OPS, torch.ops.hierfl):
        yield


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
