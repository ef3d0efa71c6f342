"""Noise that nobody else can reproduce: from the operating system, or SHAKE-256 of a secret key."""

import hashlib
import os

import numpy as np
import torch
from torch import Tensor


def new_key(secret: int | None, *words: int) -> bytes:
    """Return the key of one draw, 32 bytes."""
    if secret is None:
        return os.urandom(32)
    return hashlib.sha256(repr((secret, *words)).encode()).digest()


def secret_seed(key: bytes) -> int:
    """Return a number of 63 bits from a key."""
    return int.from_bytes(hashlib.shake_256(b"seed" + key).digest(8), "little") >> 1


def secret_normals(key: bytes, count: int) -> Tensor:
    """Return standard normals from a key, (count,) float64: quantiles on a grid of 2^-52."""
    words = np.frombuffer(hashlib.shake_256(b"normals" + key).digest(8 * count), dtype="<u8")
    uniforms = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.special.ndtri(torch.from_numpy(uniforms))


@torch.library.custom_op("hierfl::secret_normals", mutates_args=())
def normals_at(key: Tensor, count: int, secret: str) -> Tensor:
    """Return normals (..., count) float64 from keys (..., 2) and a secret in hexadecimal."""
    flat = key.reshape(-1, 2).cpu().numpy()
    draws = [
        secret_normals(hashlib.sha256(bytes.fromhex(secret) + each.tobytes()).digest(), count)
        for each in flat
    ]
    return torch.stack(draws).reshape(*key.shape[:-1], count).to(key.device)


@normals_at.register_fake
def _(key: Tensor, count: int, secret: str) -> Tensor:
    return torch.empty(*key.shape[:-1], count, dtype=torch.float64, device=key.device)


@normals_at.register_vmap
def _(
    info: object, in_dims: tuple[int | None, ...], key: Tensor, count: int, secret: str
) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    return normals_at(key.movedim(in_dims[0], 0), count, secret), 0
