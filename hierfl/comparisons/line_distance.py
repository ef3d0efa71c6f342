"""The weights of the lines that clients are served, read off their predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.posterior.prediction import Prediction


def probes(rows: ClientData) -> ClientData:
    """Return rows whose predictions give the weights: per client 0 and each unit vector."""
    x, names = rows.fields["x"], rows.names
    at = torch.cat([torch.zeros_like(x[:1]), torch.eye(x.shape[1], dtype=x.dtype)])
    ids = torch.arange(len(names)).repeat_interleave(len(at))
    return ClientData.from_arrays(ids, names=list(names), x=at.repeat(len(names), 1))


def weights(prediction: Prediction, *, bias: bool) -> Tensor:
    """Return each client's weights by its predictions of `probes`, (clients, weights)."""
    each = prediction.mean.double().unflatten(0, (prediction.data.num_clients, -1))
    slopes, intercept = each[:, 1:] - each[:, :1], each[:, :1]
    return torch.cat([slopes, intercept], 1) if bias else slopes
