"""Workloads on which frameworks are timed, and hand-written code for them.

A loop, and compiled torch.vmap.

In one round, a cohort is sampled, each of its clients gets the global weights and takes `steps` SGD
steps on mini-batches of `batch` rows, and the results are averaged. W4 is pFedMe, which takes
`inner` proximal steps on each mini-batch. W5 is radon: every county takes part in every round with
all its rows, and the posterior is structured. The data of W1 to W4 are random numbers of realistic
shapes, since only speed is compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import hierfl

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """Sizes of one workload.

    Args:
        clients: clients in all, N.
        cohort: clients in a round.
        rows: rows of each client.
        steps: mini-batches in a round.
        net: "mlp": 784-100-10; "cnn": FEMNIST's, two convolutions followed by dense layers of 1.2
            million weights.
        batch: rows of a mini-batch.
        lr: step size.
        inner: steps on each mini-batch (pFedMe's K).
        lam: weight of the proximal term (pFedMe's lambda).
    """

    clients: int
    cohort: int
    rows: int
    steps: int
    net: Literal["mlp", "cnn"] = "mlp"
    batch: int = 20
    lr: float = 0.01
    inner: int = 1
    lam: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return (784,) if self.net == "mlp" else (1, 28, 28)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return 10 if self.net == "mlp" else 62

    def module(self) -> nn.Module:
        """Return the network, always with the same initial weights."""
        torch.manual_seed(0)
        if self.net == "mlp":
            return nn.Sequential(nn.Linear(784, 100), nn.LeakyReLU(), nn.Linear(100, 10))
        convolutions = (
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        return nn.Sequential(*convolutions, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 62))

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Return x (N, rows, *shape) float32 and y (N, rows) int64.

        x is mapped from a file that all processes of a benchmark share.
        """
        folder = Path(tempfile.gettempdir()) / "hierfl-workloads"
        folder.mkdir(exist_ok=True)
        path = folder / f"{self.net}-{self.clients}-{self.rows}.npy"
        if not path.exists():
            made = np.random.default_rng(0).standard_normal(
                (self.clients, self.rows, *self.shape), dtype=np.float32
            )
            np.save(path.with_suffix(".part.npy"), made)
            path.with_suffix(".part.npy").replace(path)
        y = np.random.default_rng(1).integers(0, self.classes, (self.clients, self.rows))
        return torch.from_numpy(np.load(path, mmap_mode="c")), torch.from_numpy(y)

    def data(self) -> hierfl.ClientData:
        """Return the same rows as the data of a federation."""
        x, y = self.arrays()
        ids = torch.arange(self.clients).repeat_interleave(self.rows)
        return hierfl.ClientData.from_arrays(ids, x=x.flatten(0, 1), y=y.flatten())


WORKLOADS = {
    "W1": Workload(clients=100, cohort=20, rows=600, steps=20),
    "W2": Workload(clients=1000, cohort=100, rows=600, steps=20),
    "W3": Workload(clients=200, cohort=10, rows=200, steps=10, net="cnn"),
    "W4": Workload(clients=100, cohort=20, rows=600, steps=20, inner=5, lam=15.0),
}


# ------------------------------------------------------------------------------------------------
# by hand
def plain_loop(work: Workload) -> Iterator[None]:
    """Run FedAvg (pFedMe if `inner` > 1) as most frameworks do; yield after each round.

    Clients run one after another, with one module and one optimizer.
    """
    x, y = work.arrays()
    net = work.module()
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=work.lr)
    server = [p.detach().clone() for p in params]

    def put(values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(params, values, strict=True):
                p.copy_(value)

    def averaging(client: int) -> list[Tensor]:
        for rows in torch.randperm(work.rows)[: work.steps * work.batch].view(
            work.steps, work.batch
        ):
            optimizer.zero_grad()
            F.cross_entropy(net(x[client][rows]), y[client][rows]).backward()
            optimizer.step()
        return [p.detach() for p in params]

    def proximal(client: int) -> list[Tensor]:
        local = [value.clone() for value in server]
        for rows in torch.randperm(work.rows)[: work.steps * work.batch].view(
            work.steps, work.batch
        ):
            for _ in range(work.inner):
                optimizer.zero_grad()
                F.cross_entropy(net(x[client][rows]), y[client][rows]).backward()
                for p, near in zip(params, local, strict=True):
                    p.grad.add_(p.detach() - near, alpha=work.lam)  # type: ignore[union-attr]
                optimizer.step()
            with torch.no_grad():
                for p, near in zip(params, local, strict=True):
                    near.lerp_(p, work.lam * work.lr)
        return local

    one = averaging if work.inner == 1 else proximal
    while True:
        total = [torch.zeros_like(value) for value in server]
        for client in torch.randperm(work.clients)[: work.cohort].tolist():
            put(server)
            for t, value in zip(total, one(client), strict=True):
                t.add_(value, alpha=1 / work.cohort)
        server = total
        yield


def vmapped(work: Workload, chunk: int = 20) -> Iterator[None]:
    """Run the same by compiled torch.vmap, over chunks that fit the cache; yield after each round.

    Only the loop is hand-written.
    """
    x, y = work.arrays()
    net = work.module()
    server = {name: p.detach().clone() for name, p in net.named_parameters()}

    def loss(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, w, (x,)), y)

    gradient = vmap(grad(loss))

    def sgd(w: Weights, x: Tensor, y: Tensor) -> Weights:
        found = gradient(w, x, y)
        return {k: v - work.lr * found[k] for k, v in w.items()}

    def prox(w: Weights, near: Weights, x: Tensor, y: Tensor) -> Weights:
        found = gradient(w, x, y)
        return {k: v - work.lr * (found[k] + work.lam * (v - near[k])) for k, v in w.items()}

    def pull(w: Weights, near: Weights) -> Weights:
        return {k: torch.lerp(v, w[k], work.lam * work.lr) for k, v in near.items()}

    sgd, prox, pull = (torch.compile(f, dynamic=False, fullgraph=True) for f in (sgd, prox, pull))

    def train(clients: Tensor) -> Weights:
        w = near = {k: v.expand(len(clients), *v.shape).clone() for k, v in server.items()}
        picked = [
            torch.randperm(work.rows)[: work.steps * work.batch].view(work.steps, work.batch)
            for _ in clients
        ]
        for rows in torch.stack(picked, 1):
            batch = x[clients[:, None], rows], y[clients[:, None], rows]
            if work.inner == 1:
                w = near = sgd(w, *batch)
                continue
            for _ in range(work.inner):
                w = prox(w, near, *batch)
            near = pull(w, near)
        return near

    while True:
        parts = [
            train(part)
            for part in torch.randperm(work.clients)[: work.cohort].split(min(chunk, work.cohort))
        ]
        server = {k: torch.cat([p[k] for p in parts]).mean(0) for k in server}
        yield


def radon_loop() -> Iterator[None]:
    """Run W5 as a user would write it by hand; yield after each round.

    Counties run one after another, each with one forward and one backward pass. Then Adam takes one
    step on all params.

    The model is y ~ Normal(mu + tau e_j + x . slope, sigma), e_j ~ Normal(0, 1). The posterior is
    the structured guide's: with z = (mu, slope, log tau, log sigma), q(z) is a full Normal and
    q(e_j | z) a Normal whose mean is linear in z.
    """
    data = hierfl.datasets.radon()
    bounds = list(zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True))
    counties = [(data.fields["x"][a:b], data.fields["y"][a:b]) for a, b in bounds]
    n, size = len(counties), 6
    loc, tril = torch.zeros(size).requires_grad_(), (0.1 * torch.eye(size)).requires_grad_()
    middle, slope = torch.zeros(n).requires_grad_(), torch.zeros(n, size).requires_grad_()
    log_scale = torch.full((n,), -2.0).requires_grad_()
    optimizer = torch.optim.Adam([loc, tril, middle, slope, log_scale], lr=0.05)
    while True:
        optimizer.zero_grad()
        for j, (x, y) in enumerate(counties):
            z = loc + tril.tril() @ torch.randn(size)
            e = middle[j] + slope[j] @ z + log_scale[j].exp() * torch.randn(())
            tau, sigma = z[4].exp(), z[5].exp()
            own = (
                0.5 * ((y - z[0] - tau * e - x @ z[1:4]) / sigma).square().sum()
                + len(y) * z[5]
                + 0.5 * e.square()
                - log_scale[j]
            )
            above = (
                0.5 * (z[:4] / 10.0).square().sum()
                + 0.5 * (tau.square() + sigma.square())
                - z[4]
                - z[5]
            )
            (own + (above - tril.diagonal().abs().log().sum()) / n).backward()
        optimizer.step()
        yield
