"""pFedGP: the process against scikit-learn's and by hand, and a planted embedding."""

from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor, nn

from hierfl.data.clients import ClientData
from hierfl.methods import pfedgp
from hierfl.models import GaussianProcessNetwork
from hierfl.models.gaussian_process_network import JITTER, conditioned
from hierfl.optimizers import SGD
from tests.methods.test_pvi import close
from tests.programs import fit

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
