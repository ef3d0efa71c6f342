"""The papers' splits of images, their toy problems and FedMAP's synthetic clients."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hierfl.datasets import Labeled
from hierfl.studies import drawn_clients
from hierfl.studies import image_splits as images
from hierfl.studies.drawn_clients import Skew, _rows, synthetic_clients


def labels(rows: int = 700) -> torch.Tensor:
    return torch.arange(10).repeat_interleave(rows)


# ------------------------------------------------------------------------------------------- splits
def test_half_of_all_classes_at_each_of_many_clients_are_dealt() -> None:
    y = torch.arange(10).repeat(300)
    train, _ = images.equal_classes(y, clients=100, classes=5, train=4, test=1, seed=0)
    assert all(len(set(y[torch.as_tensor(own)].tolist())) == 5 for own in train)
    with pytest.raises(ValueError, match="use at most 10"):
        images.equal_classes(y, clients=4, classes=11, train=4, test=1, seed=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_classes_uses_each_row_once_and_gives_each_client_two_classes(seed: int) -> None:
    y = labels(70)
    train, test = images.equal_classes(y, clients=20, classes=2, train=12, test=5, seed=seed)
    dealt = np.concatenate([*train, *test])
    assert len(set(dealt.tolist())) == len(dealt) == 20 * 2 * 17
    for here, held in zip(train, test, strict=True):
        assert np.bincount(y[here]).max() == 12 and np.bincount(y[held]).max() == 5
        assert set(y[here].tolist()) == set(y[held].tolist()) and len(set(y[here].tolist())) == 2
    assert np.bincount(np.concatenate([np.unique(y[h]) for h in train])).tolist() == [4] * 10
    with pytest.raises(ValueError, match=r"70 rows; 80 are needed"):
        images.equal_classes(y, clients=20, classes=2, train=15, test=5, seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_shared_classes_gives_the_clients_of_a_class_equally_many_of_its_rows(seed: int) -> None:
    sizes = torch.tensor([400, 100, 50, 60, 900])
    y = torch.repeat_interleave(torch.arange(5), sizes)[torch.randperm(int(sizes.sum()))]
    train, test = images.shared_classes(y, clients=10, classes=2, share=0.6, seed=seed)
    used = np.concatenate([*train, *test])
    assert len(set(used)) == len(used)
    for own, held in zip(train, test, strict=True):
        assert len(set(y[own].tolist())) == 2
        for c in set(y[own].tolist()):
            each = int(0.6 * sizes[c] / 4)  # 20 places, 4 of each class
            assert int((y[held] == c).sum()) == each // 7
            assert int((y[own] == c).sum()) == each - each // 7
    with pytest.raises(ValueError, match=r"class 2 has 50 rows, and 4 clients share 0\.5"):
        images.shared_classes(y, clients=10, classes=2, share=0.5, seed=seed)


def test_power_law_has_the_classes_of_the_paper_and_unequal_sizes() -> None:
    y = labels(7000)
    train, test = images.power_law(y, clients=100, classes=3, seed=0)
    dealt = np.concatenate([*train, *test])
    assert len(set(dealt.tolist())) == len(dealt)
    sizes = np.array([len(h) for h in train])
    assert sizes.min() >= 22 and sizes.max() > 5 * np.median(sizes)
    for u, (here, held) in enumerate(zip(train, test, strict=True)):
        assert set(y[np.concatenate([here, held])].tolist()) == {(u + j) % 10 for j in range(3)}, (
            "every client has exactly its own classes"
        )
        assert len(here) == int(0.75 * (len(here) + len(held)))


def test_the_authors_labels_are_wrong_where_their_script_is() -> None:
    y = labels(7000)
    train, test = images.power_law(y, clients=100, classes=3, seed=0)
    wrong = images.authors_labels(y, clients=100, classes=3, seed=0)
    for u, own in enumerate(np.concatenate(both) for both in zip(train, test, strict=True)):
        for j in range(3):
            rows = own[y[own].numpy() == (u + j) % 10]
            count = int((wrong[rows] != y[rows]).sum())
            assert count == (0 if (u + j) % 10 == j else 10)
            assert set(wrong[rows].tolist()) <= {j, (u + j) % 10}


@pytest.mark.parametrize("kind", ["pixel", "one", "none"])
def test_pixels_are_scaled_by_training_rows_alone(kind: Any) -> None:
    y = labels(40)
    noise = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    x = noise * torch.arange(1.0, 7.0) + 3.0
    rows = images.equal_classes(y, clients=10, classes=2, train=10, test=5, seed=0)
    train, test = images.dealt(Labeled(x, y, ()), *rows)
    assert train.num_rows == 200 and test.num_rows == 100
    scaling = images.scaling_of(train, kind)
    values = scaling.apply(train).fields["x"]
    if kind == "none":
        assert torch.equal(values, train.fields["x"])
        return
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(values.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    assert (float(scaling.sd.std()) > 0.1) == (kind == "pixel")
    assert float(scaling.apply(test).fields["x"].mean()) != pytest.approx(0.0, abs=1e-6)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    a, b, c = (
        images.started(partial(nn.Linear, 4, 3), s).get_parameter("weight") for s in (1, 1, 2)
    )
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------------------------- toy problems
def test_fedabmls_clients_see_one_direction_well_each() -> None:
    train, test = drawn_clients.fedabml_lines(0)
    assert train.counts.tolist() == [20, 30] and test.counts.tolist() == [200, 200]
    for k in range(2):
        x = test.select([k]).fields["x"]
        spread = torch.linalg.svdvals(x - x.mean(0)) / 200**0.5
        assert spread.tolist() == pytest.approx(
            [drawn_clients.WIDE, drawn_clients.NARROW], rel=0.15
        )
    y = test.fields["y"] - test.fields["x"] @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert float(y.std()) == pytest.approx(1.0, rel=0.1)
    assert not torch.equal(drawn_clients.fedabml_lines(1)[0].fields["x"], train.fields["x"])


def test_fedmaps_lines_are_parallel_and_least_squares_on_all_rows_is_not() -> None:
    train, test = drawn_clients.fedmap_lines(0)
    assert train.counts.tolist() == [60, 1, 2, 3, 50] and set(test.counts.tolist()) == {200}
    for k in range(5):
        slope, intercept = drawn_clients.least_squares(test.select([k]), bias=True).tolist()
        assert slope == pytest.approx(-1.0, abs=0.2)
        assert intercept == pytest.approx(4.0 * k, abs=1.0)
    assert float(drawn_clients.least_squares(train, bias=True)[0]) > 1.0
    x, y = train.fields["x"][:, 0], train.fields["y"]
    expected = float((x @ y) / (x @ x))
    assert float(drawn_clients.least_squares(train, bias=False)[0]) == pytest.approx(expected)


@pytest.mark.parametrize("skew", ["feature", "quantity", "label"])
def test_synthetic_clients_have_the_published_sizes_and_skews(skew: Skew) -> None:
    train, test = synthetic_clients(skew, seed=1, rows=400)
    counts = train.counts + test.counts
    assert counts.tolist() == [400] * 5 + [100 if skew == "quantity" else 400] * 5
    assert torch.allclose(train.counts / counts, torch.full((10,), 0.7), atol=0.01)
    for k in range(10):
        own = [rows.select([k]) for rows in (train, test)]
        ones = torch.cat([part.fields["y"] for part in own]).mean()
        assert float(ones) == pytest.approx(0.15 if skew == "label" and k >= 5 else 0.5)
        x = own[0].fields["x"]
        assert torch.allclose(x.mean(0), torch.zeros(30), atol=1e-10) and torch.allclose(
            x.std(0, unbiased=False), torch.ones(30)
        )
    again = synthetic_clients(skew, seed=1, rows=400)[0].fields["x"]
    assert torch.equal(again, train.fields["x"])
    assert not torch.equal(synthetic_clients(skew, seed=2, rows=400)[0].fields["x"], again)


def test_classes_are_a_blob_and_a_shell_in_four_dimensions() -> None:
    x = _rows(np.repeat([0.0, 1.0], 20_000), np.random.Generator(np.random.Philox(0)))
    blob, shell = np.linalg.norm(x[:20_000, :4], axis=1), np.linalg.norm(x[20_000:, :4], axis=1)
    assert (blob**2).mean() == pytest.approx(8.0, rel=0.03)
    assert (shell.mean(), shell.var()) == (
        pytest.approx(8.0, rel=0.01),
        pytest.approx(2.0, rel=0.05),
    )
    assert x[:, 4:].var() == pytest.approx(9.0, rel=0.02)
    with pytest.raises(ValueError, match="skew is 'rows'"):
        synthetic_clients("rows", seed=0)  # type: ignore[arg-type]
