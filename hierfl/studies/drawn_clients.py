"""Drawn clients: the lines of FedABML and FedMAP, and FedMAP's synthetic clients."""

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.data.clients import ClientData
from hierfl.data.preprocess import client_moments
from hierfl.posterior.prediction import Prediction

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


def exact_posterior(rows: ClientData, *, bias: bool) -> tuple[Tensor, Tensor]:
    """Return mean (d,) and covariance (d, d) of weights that all rows share; any intercept is last.

        Normal(least squares, (X'X)^-1)

    The noise of y has sd 1, as `fedabml_lines` draws it, and the prior is flat.
    """
    x, y = rows.fields["x"].double(), rows.fields["y"].double()
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1) if bias else x
    mean = torch.linalg.pinv(design) @ y
    return mean, torch.linalg.pinv(design.T @ design)


def least_squares(rows: ClientData, *, bias: bool) -> Tensor:
    """Return the least-squares weights of all clients' rows, (columns,), any intercept last."""
    return exact_posterior(rows, bias=bias)[0]


def probes_of(rows: ClientData) -> ClientData:
    """Return rows whose predictions give the weights: per client 0 and each unit vector."""
    x, names = rows.fields["x"], rows.names
    at = torch.cat([torch.zeros_like(x[:1]), torch.eye(x.shape[1], dtype=x.dtype)])
    ids = torch.arange(len(names)).repeat_interleave(len(at))
    return ClientData.from_arrays(ids, names=list(names), x=at.repeat(len(names), 1))


def served_weights(prediction: Prediction, *, bias: bool) -> Tensor:
    """Return each client's weights by its predictions of `probes_of`, (clients, weights)."""
    by_probe = prediction.mean.double().unflatten(0, (prediction.data.num_clients, -1))
    slopes, intercept = by_probe[:, 1:] - by_probe[:, :1], by_probe[:, :1]
    return torch.cat([slopes, intercept], 1) if bias else slopes


def _fedabml(rows: tuple[int, ...], seed: int) -> ClientData:
    generator, clients = torch.Generator().manual_seed(seed), {}
    rotation = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    for k, n in enumerate(rows):
        sds = torch.tensor((WIDE, NARROW) if k == 0 else (NARROW, WIDE), dtype=torch.float64)
        x = torch.randn(n, 2, generator=generator, dtype=torch.float64) * sds @ rotation
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        clients[f"client {k + 1}"] = {"x": x, "y": x[:, 0] - x[:, 1] + noise}
    return ClientData.from_clients(clients)


def _fedmap(rows: tuple[int, ...], seed: int) -> ClientData:
    generator, clients = torch.Generator().manual_seed(seed), {}
    for k, n in enumerate(rows):
        x = k + torch.randn(n, generator=generator, dtype=torch.float64)
        noise = math.sqrt(0.8) * torch.randn(n, generator=generator, dtype=torch.float64)
        clients[f"client {k + 1}"] = {"x": x[:, None], "y": -x + 4.0 * k + noise}
    return ClientData.from_clients(clients)


Skew = Literal["feature", "quantity", "label"]
FEATURES, INSIDE, CLIENTS = 30, 4, 10


def synthetic_clients(skew: Skew, *, seed: int, rows: int = 2000) -> tuple[ClientData, ClientData]:
    """Draw FedMAP's synthetic clients (appendix B.1): a blob in a shell, by client's own map.

        class 0: z ~ Normal(0, 2 I_4)
        class 1: z in 4 dimensions on a sphere whose radius ~ Normal(8, 2)
        x = A_k Q [z, nuisance] + b_k,    26 nuisance dimensions of variance 9,    k = 1..10
        Q a rotation common to all,  A_k a 30 x 30 matrix of standard normals,
        b_k ~ Normal(0, (5 k)^2 I)

    As in the authors' generator, all three skews use these maps. "feature": `rows` rows for every
    client. "quantity": 5 clients with a quarter of them. "label": 5 clients with 85% of their rows
    in class 0. Each client standardizes its features by its own training rows, 70% of all.
    """
    expect(skew=(skew, ("feature", "quantity", "label")))
    generator = np.random.Generator(np.random.Philox(seed))
    rotation = np.linalg.qr(generator.standard_normal((FEATURES, FEATURES)))[0]
    clients = {}
    for k in range(CLIENTS):
        n = rows // 4 if skew == "quantity" and k >= 5 else rows
        y = (np.arange(n) >= round(n * (0.85 if skew == "label" and k >= 5 else 0.5))).astype(float)
        x = _rows(y, generator) @ rotation @ generator.standard_normal((FEATURES, FEATURES))
        x = x + 5.0 * (k + 1) * generator.standard_normal(FEATURES)
        clients[f"client {k + 1}"] = {"x": x, "y": y}
    train, test = ClientData.from_clients(clients).split(0.7, seed=seed)
    moments = client_moments(train)
    sd = (moments.square / moments.count).sqrt()
    return _scaled(train, moments.mean, sd), _scaled(test, moments.mean, sd)


def _scaled(data: ClientData, mean: Tensor, sd: Tensor) -> ClientData:
    client = data.row_client
    return data.with_fields(
        x=((data.fields["x"].double() - mean[client]) / sd[client]).to(torch.get_default_dtype())
    )


def _rows(y: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw rows of the classes y (n,) before any map is applied, (n, 30)."""
    inside = generator.standard_normal((len(y), INSIDE))
    radius = 8.0 + np.sqrt(2.0) * generator.standard_normal((len(y), 1))
    shell = radius * inside / np.linalg.norm(inside, axis=1, keepdims=True)
    nuisance = 3.0 * generator.standard_normal((len(y), FEATURES - INSIDE))
    return np.concatenate([np.where(y[:, None] > 0.5, shell, np.sqrt(2.0) * inside), nuisance], 1)
