"""FedMAP's synthetic clients (appendix B.1): a blob in a shell, seen through each client's own map.

    class 0: z ~ Normal(0, 2 I_4)
    class 1: z in 4 dimensions on a sphere whose radius ~ Normal(8, 2)
    x = A_k Q [z, nuisance] + b_k,    26 nuisance dimensions of variance 9,    k = 1..10
    Q a rotation common to all,  A_k a 30 x 30 matrix of standard normals,
    b_k ~ Normal(0, (5 k)^2 I)

As in the authors' generator, all three skews use these maps. "feature": 2000 rows for every client.
"quantity": 5 clients with 2000 rows and 5 with 500. "label": 5 clients with 85 % of their rows in
class 0. Each client standardizes its features by its own training rows.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.data.preprocess import client_moments

Skew = Literal["feature", "quantity", "label"]
FEATURES, INSIDE, CLIENTS = 30, 4, 10


def synthetic_clients(skew: Skew, *, seed: int, rows: int = 2000) -> tuple[ClientData, ClientData]:
    """Draw training rows (70 %) and test rows of all ten clients; a large one has `rows` rows."""
    if skew not in ("feature", "quantity", "label"):
        raise ValueError(f"skew is {skew!r}; it must be 'feature', 'quantity' or 'label'")
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
