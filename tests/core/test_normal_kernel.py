"""Kernels of keyed noise: the same keys, the same normals to rounding, and right moments and tails."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from hierfl.core import noise, normal_kernel

KEYS = noise.client_keys(map(str, range(10)))
MASK = 0xFFFFFFFF


@pytest.fixture
def kernels() -> Iterator[None]:
    """Let noise call the kernels, as a step that is compiled does."""
    with normal_kernel.in_graph():
        assert noise.GRAPH_OPS.get() is not None, "the kernels were not compiled"
        yield


def hashed(x: int) -> int:
    """Mix a word with lowbias32, by Python's integers."""
    x = ((x ^ x >> 16) * 0x21F0AAAD) & MASK
    x = ((x ^ x >> 15) * 0xD35A2D97) & MASK
    return x ^ x >> 15


def by_hand(key: Tensor, count: int) -> np.ndarray:
    """Draw normals by Box-Muller in float64 from words made by Python's integers."""
    first, second = (int(word) & MASK for word in key)
    pairs = (count + 1) // 2

    def units(stream: int) -> np.ndarray:
        words = [hashed((hashed((4 * i + stream) ^ first) + second) & MASK) for i in range(pairs)]
        return np.array([((word >> 9) + 0.5) * 2.0**-23 for word in words])

    radius, angle = np.sqrt(-2.0 * np.log(units(0))), 2.0 * np.pi * units(1)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


@pytest.mark.parametrize("count", [1, 2, 7, 32, 1001])
def test_normals_are_box_muller_draws(count: int, kernels: None) -> None:
    drawn = noise.normals(KEYS, (count,), torch.float32)
    for found, key in zip(drawn, KEYS, strict=True):
        np.testing.assert_allclose(found.numpy(), by_hand(key, count), rtol=2e-6, atol=1e-6)


def test_compiled_and_eager_normals_agree_to_rounding() -> None:
    eager = noise.normals(KEYS, (100, 784), torch.float32)
    with normal_kernel.in_graph():
        drawn = noise.normals(KEYS, (100, 784), torch.float32)
    assert not torch.equal(drawn, eager), "another code"
    assert float((drawn - eager).abs().max()) < 3e-6


def test_moments_and_tails_are_those_of_a_normal(kernels: None) -> None:
    z = noise.normals(KEYS, (300_000,), torch.float32).double()
    assert stats.kstest(z[0].numpy(), "norm").pvalue > 1e-3
    n = z.numel()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(float((z**power).mean()) - expected) < 4.0 * (variance / n) ** 0.5, power
    for bound in (2.0, 3.0, 4.0, 4.5):
        expected = 2.0 * stats.norm.sf(bound)
        away = float((z.abs() > bound).double().mean()) - expected
        assert abs(away) < 4.0 * (expected / n) ** 0.5, bound
    assert float(z.abs().max()) < 5.8  # the least uniform is 2^-24


def test_keys_are_equal_bit_for_bit() -> None:
    words = torch.arange(3, dtype=torch.int32)

    def keys() -> list[Tensor]:
        return [
            noise.fold(KEYS, 5, -7, 1 << 31),
            noise.fold(KEYS, words[:1], 9),
            torch.vmap(lambda d: torch.vmap(lambda k: noise.fold(k, 3, d, 5))(KEYS))(words),
        ]

    eager = keys()
    with normal_kernel.in_graph():
        assert all(map(torch.equal, keys(), eager))


def test_draws_are_mapped_and_differentiated_through(kernels: None) -> None:
    def spread(scale: Tensor, key: Tensor) -> Tensor:
        return (scale * noise.normals(noise.fold(key, 3), (4,), torch.float32)).sum()

    slopes = torch.vmap(torch.func.grad(spread))(torch.ones(10, dtype=torch.float32), KEYS)
    whole = noise.normals(noise.fold(KEYS, 3), (4,), torch.float32)
    torch.testing.assert_close(slopes, whole.sum(1))


def test_without_the_kernel_normals_are_torchs(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = noise.normals(KEYS, (5,), torch.float64)

    def fail() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(normal_kernel, "_kernels", fail)
    token = noise.GRAPH_OPS.set(None)
    with normal_kernel.in_graph():
        assert noise.GRAPH_OPS.get() is None
        assert torch.equal(noise.normals(KEYS, (5,), torch.float64), a)
    noise.GRAPH_OPS.reset(token)
