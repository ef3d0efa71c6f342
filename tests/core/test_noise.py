"""Statistics of keyed noise, and its invariance to padding, to the order of clients and to batching."""

import math
import warnings
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from hierfl.core import noise

SIZE = 1_000_000
DTYPES = [torch.float32, torch.float64]
KEY = noise.fold(noise.root_key(5), noise.word("site"))
SEEDS = [0, 1, -1, 2**31, 2**32, -(2**32), 2**63 - 1, -(2**63), 2**63]


def correlated(a: Tensor, b: Tensor) -> float:
    """Correlation of two series of unit-scale noise, in standard errors."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * math.sqrt(a.numel())


# ------------------------------------------------------------------ one key
@pytest.mark.parametrize("dtype", DTYPES)
def test_normals_are_normal(dtype: torch.dtype) -> None:
    z = noise.normals(KEY, (SIZE,), dtype)
    assert z.dtype == dtype
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    z = z.double()
    moments = {1: (0.0, 1.0), 2: (1.0, 2.0), 3: (0.0, 15.0), 4: (3.0, 96.0), 6: (15.0, 10170.0)}
    for power, (expected, variance) in moments.items():
        assert abs(float((z**power).mean()) - expected) < 4.0 * math.sqrt(variance / SIZE), power
    assert 4.3 < float(z.abs().max()) < 6.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniforms_are_uniform(dtype: torch.dtype) -> None:
    u = noise.uniforms(KEY, (SIZE,), dtype)
    assert u.dtype == dtype
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    cells = (u[:-1] * 64).long() * 64 + (u[1:] * 64).long()
    assert stats.chisquare(torch.bincount(cells, minlength=4096).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniforms_lie_inside_the_unit_interval_whatever_the_words(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A uniform of exactly 0 or 1, one in ten million, would make a Cauchy or Exponential draw infinite."""
    extreme = torch.tensor([-1, 0, 1 << 30, -(1 << 31), -256, 255], dtype=torch.int32)
    monkeypatch.setattr(noise, "_words", lambda key, count, stream: extreme.clone())
    u = noise.uniforms(KEY, (6,), dtype)
    assert bool(((u > 0) & (u < 1)).all()), u


@pytest.mark.parametrize("draw", [noise.normals, noise.uniforms])
@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_is_uncorrelated_at_every_lag(draw: type, dtype: torch.dtype) -> None:
    x = draw(KEY, (SIZE,), dtype)
    x = x - x.mean()
    half = SIZE // 2  # the two halves of a Box-Muller draw share their radii
    for lag in (1, 2, 3, 4, 8, 64, 1000, 65536, half - 1, half, half + 1):
        assert abs(correlated(x[:-lag], x[lag:])) < 4.5, lag
        assert abs(correlated(x[:-lag] ** 2, x[lag:] ** 2)) < 4.5, lag


def test_float64_uses_more_than_24_bits() -> None:
    u = noise.uniforms(KEY, (1000,), torch.float64)
    assert bool(((u * 2**24).frac() > 0).all())
    assert stats.kstest((u * 2**24).frac().numpy(), "uniform").pvalue > 1e-3


# ------------------------------------------------------------------ many keys
N = torch.arange(4096, dtype=torch.int32)
HOSPITAL = noise.client_keys(["a hospital"])[0]
NEIGHBORS = {  # (4096, 2) keys that differ in one thing only
    "clients": noise.client_keys(map(str, N.tolist())),
    "clients at a later step": noise.fold(noise.client_keys(map(str, N.tolist())), 7, 1, 3),
    "steps": noise.fold(HOSPITAL, N),
    "rounds": noise.fold(noise.fold(HOSPITAL, N), 1, 0),
    "sites": noise.fold(HOSPITAL, torch.tensor([noise.word(f"site{i}") for i in N.tolist()])),
    "seeds": noise.fold(noise.root_key(0), N),
    "draws": noise.fold(noise.fold(noise.root_key(0), noise.word("w")), N),
}


@pytest.mark.parametrize("what", NEIGHBORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_neighboring_keys_are_unrelated(what: str, dtype: torch.dtype) -> None:
    z = noise.normals(NEIGHBORS[what], (64,), dtype)  # (keys, 64)
    assert stats.kstest(z[:, 0].numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(z.mean(1).numpy() * 8.0, "norm").pvalue > 1e-3
    for apart in (1, 2, 3, 4, 256, 2048):
        assert abs(correlated(z[:-apart], z[apart:])) < 4.5, apart
        assert abs(correlated(z[:-apart] ** 2, z[apart:] ** 2)) < 4.5, apart
        assert abs(correlated(z[:-apart, :-1], z[apart:, 1:])) < 4.5, apart


def test_a_key_and_the_keys_folded_from_it_are_unrelated() -> None:
    keys = noise.client_keys(map(str, range(4096)))
    folded = (noise.fold(keys, *words) for words in ((0,), (1,), (0, 0)))
    z = [noise.normals(k, (64,)) for k in (keys, *folded)]
    for i, a in enumerate(z):
        for b in z[:i]:
            assert abs(correlated(a, b)) < 4.5


def test_order_of_words_matters_and_integers_wrap() -> None:
    assert not torch.equal(noise.fold(KEY, 1, 2), noise.fold(KEY, 2, 1))
    assert not torch.equal(noise.fold(KEY, 0), KEY)
    assert torch.equal(noise.fold(KEY, 1, 2), noise.fold(noise.fold(KEY, 1), 2))
    assert torch.equal(noise.fold(KEY, 5 - 2**32), noise.fold(KEY, 5))
    assert torch.equal(noise.fold(KEY, torch.tensor(-7)), noise.fold(KEY, -7))
    assert torch.equal(noise.fold(KEY, torch.tensor([3, 4]))[1], noise.fold(KEY, 4))


def test_different_seeds_give_different_keys() -> None:
    keys = torch.stack([noise.root_key(s) for s in SEEDS])
    assert len(keys.unique(dim=0)) == len(SEEDS) - 1, (
        "2^63 and -2^63 are one seed, all others differ"
    )
    assert torch.equal(noise.root_key(7), noise.root_key(7))
    drawn = {tuple(noise.cohort(s, 0, 10**6, 5).tolist()) for s in SEEDS}
    assert len(drawn) == len(SEEDS) - 1


# ------------------------------------------------------------------ shapes
@pytest.mark.parametrize("draw", [noise.normals, noise.uniforms])
def test_the_shape_only_arranges_the_draw(draw: type) -> None:
    keys = noise.client_keys(["a", "b", "c"])
    flat = draw(keys, (30,))
    assert torch.equal(draw(keys, (2, 3, 5)), flat.view(3, 2, 3, 5))
    assert draw(KEY, ()).shape == ()
    assert draw(keys, (4, 0)).shape == (3, 4, 0)
    for k, key in enumerate(keys):
        assert torch.equal(draw(key, (30,)), flat[k])
    assert torch.equal(torch.vmap(lambda key: draw(key, (30,)))(keys), flat)


def test_a_longer_draw_of_uniforms_starts_with_the_shorter_one() -> None:
    assert torch.equal(noise.uniforms(KEY, (100,)), noise.uniforms(KEY, (1000,))[:100])


def test_odd_numbers_of_normals() -> None:
    for n in (1, 3, 7):
        z = noise.normals(noise.client_keys(map(str, range(2000))), (n,))
        assert z.shape == (2000, n)
        assert stats.kstest(z[:, -1].numpy(), "norm").pvalue > 1e-3


# ------------------------------------------------------------------ clients, rows, cohorts
def test_client_keys_depend_on_the_name_alone() -> None:
    names = ["", "a", "A", "Zürich", "0", "00", "a" * 500]
    keys = noise.client_keys(names)
    assert torch.equal(noise.client_keys(names[::-1]), keys.flip(0))
    assert len(keys.unique(dim=0)) == len(names)
    assert len(noise.client_keys(map(str, range(100_000))).unique(dim=0)) == 100_000
    assert noise.client_keys(["a"]).tolist() == [[966719552, 792880731]], (
        "a key must not change between processes or releases"
    )


def test_permutations_permute_and_leave_padding_last() -> None:
    counts = torch.tensor([1, 2, 5, 8, 13])
    keys = noise.client_keys(map(str, range(5)))
    orders = noise.permutations(keys, counts, 13)
    for order, count in zip(orders, counts.tolist(), strict=True):
        assert sorted(order[:count].tolist()) == list(range(count))
        assert order[count:].tolist() == list(range(count, 13))
    wider = noise.permutations(keys, counts, 40)
    for k, count in enumerate(counts.tolist()):
        alone = noise.permutations(keys[k : k + 1], counts[k : k + 1], count)[0]
        assert torch.equal(wider[k, :count], orders[k, :count])
        assert torch.equal(alone, orders[k, :count])


def test_all_permutations_are_equally_likely() -> None:
    keys = noise.fold(KEY, torch.arange(24_000, dtype=torch.int32))
    orders = noise.permutations(keys, torch.full((24_000,), 4), 4)
    seen = torch.bincount((orders * torch.tensor([64, 16, 4, 1])).sum(1), minlength=256)
    assert int((seen > 0).sum()) == 24
    assert stats.chisquare(seen[seen > 0].numpy()).pvalue > 1e-3
    steps = torch.stack(
        [noise.permutations(noise.fold(keys, e), torch.full((24_000,), 4), 4)[:, 0] for e in (0, 1)]
    )
    both = torch.bincount(steps[0] * 4 + steps[1], minlength=16)
    assert stats.chisquare(both.numpy()).pvalue > 1e-3, "two passes over the rows are unrelated"


@pytest.mark.parametrize(("population", "size"), [(10, 3), (10, 9), (7, 1), (20_000, 5)])
def test_cohorts(population: int, size: int) -> None:
    chosen = torch.stack([noise.cohort(3, r, population, size) for r in range(2000)])
    assert chosen.shape == (2000, size)
    assert bool((chosen.diff(dim=1) > 0).all()), "strictly ascending, so no client twice"
    assert int(chosen.min()) >= 0 and int(chosen.max()) < population
    cells = torch.bincount(
        chosen.flatten() * 10 // population if population > 10 else chosen.flatten()
    )
    expected = torch.full((len(cells),), chosen.numel() / len(cells), dtype=torch.float64)
    # Without replacement, counts vary less than multinomial ones: only the upper tail is a failure.
    assert stats.chisquare(cells.numpy(), expected.numpy()).pvalue > 1e-3
    assert torch.equal(noise.cohort(3, 11, population, size), chosen[11])
    assert len(chosen.unique(dim=0)) > min(6, population // 2)


def test_a_full_cohort_has_every_client() -> None:
    assert noise.cohort(0, 4, 6, 6).tolist() == list(range(6))


@pytest.mark.parametrize(
    "words", [(), (0,), (7, -1, 1 << 40), (torch.arange(3, dtype=torch.int32)[:, None], 5)]
)
@pytest.mark.parametrize("shape", [(2,), (4, 2)])
def test_fold_now_equals_fold(shape: tuple[int, ...], words: Any) -> None:
    g = torch.Generator().manual_seed(0)
    key = torch.randint(-(1 << 31), (1 << 31) - 1, shape, generator=g).to(torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now = noise.fold_now(key, *words)
    assert now.dtype == torch.int32
    assert torch.equal(now, noise.fold(key, *words))


def test_fold_now_works_under_vmap() -> None:
    steps = torch.arange(3, dtype=torch.int32)
    assert torch.equal(
        torch.vmap(lambda step: noise.fold_now(KEY, step))(steps), noise.fold(KEY[None], steps)
    )
