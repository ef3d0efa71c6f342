"""Tensors in few bits: how far off they are, what is left as it is, and clients in front."""

import pytest
import torch

from hierfl.core.trees import Rounded, has_rounded, restored, rounded, times


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.int8), (16, torch.int16)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_numbers_are_off_by_half_a_step_at_most(bits: int, dtype: torch.dtype, size: float) -> None:
    v = size * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    found = rounded({"v": v}, bits)["v"]
    assert isinstance(found, Rounded) and found.numbers.dtype == dtype and found.scale.shape == ()
    assert int(found.numbers.abs().max()) == 2 ** (bits - 1) - 1
    off = (restored(found) - v).abs()
    assert float(off.max()) <= float(found.scale) * (0.5 + 1e-9)
    assert float(off.max()) > float(found.scale) * 0.4
    assert restored(found).abs().max() == pytest.approx(float(v.abs().max()), rel=1e-14)


def test_halves_go_to_the_even_number_and_nothing_stays_nothing() -> None:
    v = torch.tensor([127.0, 0.5, 1.5, -0.5, -2.5, 0.0])
    assert rounded(v, 8).numbers.tolist() == [127, 0, 2, 0, -2, 0]
    nothing = rounded(torch.zeros(9), 8)
    assert restored(nothing).tolist() == [0.0] * 9 and not has_rounded(torch.zeros(9))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_of_a_tensor_that_is_not_finite_neither_is_the_scale(bad: float) -> None:
    v = torch.arange(9.0)
    v[3] = bad
    assert not rounded(v, 8).scale.isfinite() and not restored(rounded(v, 8)).isfinite().all()


def test_tensors_that_would_not_become_smaller_stay_as_they_are() -> None:
    for value in (
        torch.ones(()),
        torch.ones(1),
        torch.arange(50),
        torch.ones(1, dtype=torch.float),
    ):
        assert rounded(value, 8) is value
    assert has_rounded(rounded((torch.ones(2), {"v": torch.ones(1)}), 8))
    assert rounded(torch.ones(4, dtype=torch.float32), 8).scale.dtype == torch.float32


def test_clients_in_front() -> None:
    v = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(1))
    weight = torch.tensor([1.0, 2.0, 0.0, 5.0])
    sent = torch.vmap(lambda v, w: times(rounded(v, 8), w))(v, weight)
    assert sent.scale.shape == (4,)
    for k in range(4):
        one = weight[k] * restored(rounded(v[k], 8))
        torch.testing.assert_close(restored(sent)[k], one, rtol=1e-14, atol=0.0)
