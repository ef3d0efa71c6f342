"""FOLA and FedIvon, products of clients' independent Gaussians, against closed forms and FedAvg."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl import ClientBatch, ClientData, Fit
from hierfl.methods import fedivon, fola
from hierfl.methods.posteriors.fedivon import new_curvature
from hierfl.optimizers import SGD
from tests.methods.test_pvi import close
from tests.programs import fit


def apart(batch: ClientBatch) -> None:
    """A line whose unknowns are independent given designs of one nonzero entry a row."""
    w = pyro.sample("w", dist.Normal(torch.tensor([0.5, 0.0]), 2.0).to_event(1))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def clients() -> ClientData:
    """Return three clients, of which one sees mostly the first unknown, another the second."""
    g = torch.Generator().manual_seed(3)
    found = {}
    for name, ones, twos in (("a", 9, 1), ("b", 2, 12), ("c", 4, 4)):
        x = torch.zeros(ones + twos, 2, dtype=torch.float64)
        x[:ones, 0] = 1.0
        x[ones:, 1] = 2.0
        y = x @ torch.tensor([2.0, -1.0], dtype=torch.float64)
        y = y + torch.randn(len(x), generator=g, dtype=torch.float64)
        found[name] = {"x": x, "y": y}
    return ClientData.from_clients(found)


def pooled() -> tuple[Tensor, Tensor]:
    """Return mean and precision of the posterior of `apart`."""
    data = clients()
    x, y = data.fields["x"], data.fields["y"]
    precision = (x * x).sum(0) + 0.25
    start = torch.tensor([0.5, 0.0], dtype=x.dtype)
    return (x.T @ y + 0.25 * start) / precision, precision


def gaussian(fitted: Fit, site: str = "w") -> tuple[Tensor, Tensor]:
    """Return mean and precision of the posterior as it is served."""
    params = fitted.federation.client.params(fitted.message, {})
    scale = torch.nn.functional.softplus(params[f"{site}.scale"])
    return params[f"{site}.loc"], scale**-2


@pytest.mark.slow
def test_fedivon_is_exact_where_clients_converge() -> None:
    """Independent Gaussian unknowns: one round of Newton's steps finds each client's own mode.

    Curvature is learned from draws, without bias where it is constant; its noise averages out.
    """
    method = fedivon(
        apart, lr=1.0, betas=(0.0, 0.95), steps=60, batch_size=None, draws=6, curvature_start=1.0
    )
    (loc, precision), (mean, wanted) = gaussian(fit(method, clients(), rounds=2)), pooled()
    close(loc, mean, 0.1)
    close(precision / wanted, torch.ones(2), 0.15)


def test_the_curvature_of_fedivon_is_updated_as_published() -> None:
    """h 1 and d 0.1 with b2 = 0.9: numbers of methods_bayesian.md, section 10."""
    hat = torch.tensor([-50.0, -1.0, 1.0, 20.0])
    found = new_curvature(0.9, torch.ones(4), hat, torch.full((4,), 1.1))
    close(found + 0.1, [7.722727 + 0.1, 0.818182 + 0.1, 1.1, 4.540909 + 0.1], 1e-5)
    assert bool((found + 0.1 > 0.0).all())


def test_one_round_of_fola_by_hand() -> None:
    """Clients of one step each: their moves, squared gradients of each row, and their product."""
    data, lr, trust = clients(), 0.3, 0.7
    method = fola(apart, trust=trust, optimizer=SGD(lr), steps=1, batch_size=None)
    start = torch.tensor([0.5, 0.0], dtype=torch.float64)
    weights, shifts, precisions = [], [], []
    for x, y in zip(*(data.fields[n].split(data.counts.tolist()) for n in "xy"), strict=True):
        moved = -lr * (-x.T @ (y - x @ start)) / len(y)  # no pull at the server's own point
        each = -x * (y - x @ (start + moved))[:, None]
        precision = each.square().sum(0) + 0.25 / 3
        held = trust * len(y) * 0.25 / 3
        weights.append(precision + held)
        shifts.append(weights[-1] * moved)
        precisions.append(precision)
    loc, precision = gaussian(fit(method, data, rounds=1))
    close(loc, start + sum(shifts) / sum(weights), 1e-10)
    close(precision, sum(precisions), 1e-8)
