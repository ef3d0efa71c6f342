"""kNN-Per: probabilities by hand, FedAvg at weight 0, memories larger and smaller than a client."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hierfl.data.clients import ClientData
from hierfl.methods import knn_per
from hierfl.models import MemoryNetwork
from hierfl.optimizers import SGD
from tests.programs import fit

NONE: dict[str, Any] = {"optimizer": SGD(0.0), "steps": 1, "unit": "step", "batch_size": None}


def linear() -> nn.Module:
    """Return a network whose features are the inputs, and whose logits are 0."""
    layer = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(layer)


def points(xs: list[tuple[float, float]], ys: list[int]) -> ClientData:
    return ClientData.from_clients({"a": {"x": torch.tensor(xs), "y": torch.tensor(ys)}})


def store() -> ClientData:
    return points([(0.0, 0.0), (1.0, 0.0), (0.0, 2.0)], [0, 1, 0])


@pytest.mark.parametrize(("k", "first"), [(3, 0.531689), (2, 0.5)])
def test_probabilities_by_hand(k: int, first: float) -> None:
    model = MemoryNetwork(linear(), features="0", memory=5, neighbors=k, weight=1.0)
    fitted = fit(knn_per(model, **NONE), store(), rounds=1)
    found = fitted.predict(points([(0.5, 0.0)], [0])).mean[0]
    assert found.tolist() == pytest.approx([first, 1.0 - first], abs=1e-6)
    half = MemoryNetwork(linear(), features="0", memory=5, neighbors=k, weight=0.5)
    mixed = fit(knn_per(half, **NONE), store(), rounds=1).predict(points([(0.5, 0.0)], [0])).mean[0]
    assert mixed.tolist() == pytest.approx([0.5 * first + 0.25, 0.75 - 0.5 * first], abs=1e-6)


def test_all_rows_at_a_wide_scale_give_the_shares_of_labels() -> None:
    model = MemoryNetwork(linear(), features="0", memory=9, neighbors=9, scale=1e9, weight=1.0)
    found = fit(knn_per(model, **NONE), store(), rounds=1).predict(points([(7.0, -3.0)], [0])).mean
    assert found[0].tolist() == pytest.approx([2.0 / 3.0, 1.0 / 3.0], abs=1e-6)


def labeled(seed: int = 0) -> ClientData:
    """Return clients of two kinds, whose labels are each other's opposite."""
    g, rows = torch.Generator().manual_seed(seed), {}
    for k, n in enumerate((30, 12, 21, 8)):
        x = torch.randn(n, 2, generator=g)
        rows[f"c{k}"] = {"x": x, "y": ((x.sum(1) > 0) ^ bool(k % 2)).long()}
    return ClientData.from_clients(rows)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))


HOW: dict[str, Any] = {"optimizer": SGD(0.2), "steps": 4, "batch_size": 5}


def test_the_nearest_row_of_its_own_is_itself() -> None:
    data = labeled()
    model = MemoryNetwork(net(), features="2", memory=40, neighbors=1, weight=1.0)
    found = fit(knn_per(model, unit="step", **HOW), data, rounds=2).predict(data)
    assert (found.scores()["accuracy"] == 1.0).all()


def test_a_small_memory_spreads_over_the_rows() -> None:
    def kept(memory: int) -> dict[str, Tensor]:
        model = MemoryNetwork(net(), features="2", memory=memory)
        found: dict[str, Tensor] = fit(knn_per(model, **NONE), labeled(), rounds=1).progress.table
        return found

    few, x = kept(10), labeled().fields["x"]
    assert torch.equal(few["memory.x"][0, 0, 0], x[:30:3])
    assert few["memory.there"][3, 0, 0].tolist() == [1.0] * 8 + [0.0] * 2
    assert torch.equal(kept(20)["memory.x"][3, 0, 0, :8], x[-8:])


def test_before_any_row_the_network_predicts_alone() -> None:
    model = MemoryNetwork(net(), features="2", weight=1.0, memory=10)
    fitted = fit(knn_per(model, **NONE), labeled(), rounds=1)
    blank = fitted.personalize(
        ClientData(labeled().fields, labeled().offsets, ("p", "q", "r", "s")), rounds=0
    )
    found = blank.predict(blank.federation.data).mean
    expected = net().double()(labeled().fields["x"].double()).softmax(-1)
    assert torch.allclose(found.double(), expected, atol=1e-6)
