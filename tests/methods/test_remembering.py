"""kNN-Per and pFedGP: probabilities and kernels by hand, and memories of any size."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor, nn

from hierfl import ClientData
from hierfl.methods import knn_per, pfedgp
from hierfl.models import GaussianProcessNetwork, MemoryNetwork
from hierfl.models.gaussian_process_network import JITTER, conditioned
from hierfl.optimizers import SGD
from tests.methods.test_fedpac import net
from tests.methods.test_pvi import close
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


# of the stored rows, at a point: options, the point, and the probability of the first class
BY_HAND: list[tuple[dict[str, Any], tuple[float, float], float]] = [
    ({"neighbors": 3}, (0.5, 0.0), 0.531689),
    ({"neighbors": 2}, (0.5, 0.0), 0.5),
    ({"neighbors": 9, "scale": 1e9}, (7.0, -3.0), 2.0 / 3.0),  # the shares of labels
]


@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize(("options", "point", "first"), BY_HAND)
def test_probabilities_by_hand(
    options: dict[str, Any], point: tuple[float, float], first: float, weight: float
) -> None:
    """With half the weight, half comes from the network, whose logits are 0."""
    model = MemoryNetwork(linear(), features="0", memory=9, weight=weight, **options)
    found = fit(knn_per(model, **NONE), store(), rounds=1).predict(points([point], [0])).mean[0]
    mixed = weight * first + 0.5 * (1.0 - weight)
    assert found.tolist() == pytest.approx([mixed, 1.0 - mixed], abs=1e-6)


def labeled(seed: int = 0) -> ClientData:
    """Return clients of two kinds, whose labels are each other's opposite."""
    g, rows = torch.Generator().manual_seed(seed), {}
    for k, n in enumerate((30, 12, 21, 8)):
        x = torch.randn(n, 2, generator=g)
        rows[f"c{k}"] = {"x": x, "y": ((x.sum(1) > 0) ^ bool(k % 2)).long()}
    return ClientData.from_clients(rows)


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


STILL: dict[str, Any] = {"optimizer": SGD(0.0), "steps": 1}


def wavy(seed: int = 0, count: int = 3) -> ClientData:
    """Return clients whose labels are sines of one of two inputs, each with its own phase."""
    g, rows = torch.Generator().manual_seed(seed), {}
    for k in range(count):
        x = 2.0 * torch.randn(14 + 3 * k, 2, generator=g, dtype=torch.float64)
        y = torch.sin(2.0 * x[:, 0] + k) + 0.1 * torch.randn(
            len(x), generator=g, dtype=torch.float64
        )
        rows[f"c{k}"] = {"x": x, "y": y}
    return ClientData.from_clients(rows)


def test_with_its_embedding_fixed_it_is_each_client_s_own_process() -> None:
    """Means and standard deviations of scikit-learn, of clients of different numbers of rows."""
    data, asked = wavy(), wavy(1)
    model = identity(noise=0.3)
    predicted = fit(pfedgp(model, **STILL), data, rounds=1).predict(asked, draws=1)
    means: list[Tensor] = []
    for x, y, new in zip(
        *(data.fields[n].split(data.counts.tolist()) for n in "xy"),
        asked.fields["x"].split(asked.counts.tolist()),
        strict=True,
    ):
        kernel = ConstantKernel(8.0, "fixed") * RBF(2.0**0.5, "fixed")
        process = GaussianProcessRegressor(kernel, alpha=0.09 + JITTER * 8.0, optimizer=None)
        means.append(torch.as_tensor(process.fit(x.numpy(), y.numpy()).predict(new.numpy())))
    close(predicted.mean, torch.cat(means), 1e-6)


def identity(**options: Any) -> GaussianProcessNetwork:
    """Return a process on the two inputs themselves."""
    layer = nn.Linear(2, 2, bias=False)
    nn.init.eye_(layer.weight)
    return GaussianProcessNetwork(layer, **options)


def test_rows_that_are_not_there_count_for_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    kept, asked = (torch.randn(1, n, 2, generator=g, dtype=torch.float64) for n in (6, 4))
    y, noise = torch.randn(1, 6, 1, generator=g), torch.full((1, 6, 1), 0.2)
    scale, there = torch.tensor(1.5), torch.tensor([[True] * 4 + [False] * 2])
    whole = conditioned(scale, asked, kept, y, noise, there)
    some = conditioned(scale, asked, kept[:, :4], y[:, :4], noise[:, :4], there[:, :4])
    for a, b in zip(whole, some, strict=True):
        close(a, b, 1e-6)


def test_classes_by_hand() -> None:
    """One row of class 1 of two, at the row asked: a scalar process for each class."""
    module = nn.Linear(2, 2, bias=False)
    model = GaussianProcessNetwork(module, classes=2, scale=2.0, label_noise=0.1)
    one = ClientData.from_clients({"a": {"x": torch.ones(1, 2), "y": torch.tensor([1])}})
    found = fit(pfedgp(model, **STILL), one, rounds=1).predict(one, draws=1).mean[0]
    logits = []
    for a in (0.1, 1.1):
        t = np.log(1 + 1 / a)
        gain = 4.0 / (4.0 + t + JITTER * 4.0)
        mean, variance = gain * (np.log(a) - t / 2), 4.0 - gain * 4.0
        logits.append(mean / np.sqrt(1 + np.pi / 8 * variance))
    close(found, torch.tensor(logits).softmax(0).to(found), 1e-5)
