"""The toy problems of FedABML and FedMAP: clients whose labels are about lines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hierfl.data.clients import ClientData

Both = tuple[ClientData, ClientData]  # training and test rows of the same clients
FEDABML_ROWS, FEDMAP_ROWS = (20, 30), (60, 1, 2, 3, 50)  # training rows of each client
WIDE, NARROW = 3.0, 0.5  # sds of x in the direction that a client sees well, and in the other
TEST_ROWS = 200  # of each client
TEST_SEEDS = 10_000  # apart from those of training rows


def fedabml_lines(seed: int) -> Both:
    """Draw FedABML's two clients (section 5.1): each sees one of two directions well.

        y ~ Normal(x . (1, -1), 1),    x = R z,    R a rotation,
        z ~ Normal(0, diag(3, 0.5)^2) or the reverse

    The paper states no sizes; ours are 20 and 30 training rows, and 200 test rows each.
    """
    tests = (TEST_ROWS,) * len(FEDABML_ROWS)
    return _fedabml(FEDABML_ROWS, seed), _fedabml(tests, seed + TEST_SEEDS)


def fedmap_lines(seed: int) -> Both:
    """Draw FedMAP's five clients (A.4) on parallel lines, three of them with one to three rows.

        y = -x + 4 (k - 1) + e,    x ~ Normal(k - 1, 1),  e ~ Normal(0, 0.8),  k = 1..5

    There are 60, 1, 2, 3 and 50 training rows, and 200 test rows each.
    """
    tests = (TEST_ROWS,) * len(FEDMAP_ROWS)
    return _fedmap(FEDMAP_ROWS, seed), _fedmap(tests, seed + TEST_SEEDS)


def least_squares(rows: ClientData, *, bias: bool) -> Tensor:
    """Return the least-squares weights of all clients' rows, (columns,), any intercept last."""
    x, y = rows.fields["x"].double(), rows.fields["y"].double()
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1) if bias else x
    return torch.linalg.lstsq(design, y[:, None]).solution.flatten()


def _fedabml(rows: tuple[int, ...], seed: int) -> ClientData:
    generator, parts = torch.Generator().manual_seed(seed), {}
    rotation = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    for k, n in enumerate(rows):
        sds = torch.tensor((WIDE, NARROW) if k == 0 else (NARROW, WIDE), dtype=torch.float64)
        x = torch.randn(n, 2, generator=generator, dtype=torch.float64) * sds @ rotation
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        parts[f"client {k + 1}"] = {"x": x, "y": x[:, 0] - x[:, 1] + noise}
    return ClientData.from_clients(parts)


def _fedmap(rows: tuple[int, ...], seed: int) -> ClientData:
    generator, parts = torch.Generator().manual_seed(seed), {}
    for k, n in enumerate(rows):
        x = k + torch.randn(n, generator=generator, dtype=torch.float64)
        noise = math.sqrt(0.8) * torch.randn(n, generator=generator, dtype=torch.float64)
        parts[f"client {k + 1}"] = {"x": x[:, None], "y": -x + 4.0 * k + noise}
    return ClientData.from_clients(parts)
