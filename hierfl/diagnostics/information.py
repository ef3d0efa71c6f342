"""How much each client's own rows add to what the global level alone says of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.posterior.draws import Draws
from hierfl.posterior.snapshot import Snapshot


def same_for_all(fit: Snapshot) -> bool:
    """Return whether all clients have the same global prior, with no client field read."""
    return not fit.program.reads.model & set(fit.federation.data.client_fields)


def named_own(draws: Draws) -> list[str]:
    """Return the local sites, without a site `x_offset` from which the site `x` is made."""
    own = draws.own
    return [n for n in own if not (n.endswith("_offset") and n.removesuffix("_offset") in own)]


def information(fit: Snapshot, draws: Draws, expected: Mapping[str, Tensor]) -> pd.DataFrame | None:
    """Compare each client's posterior with S draws of the global prior, as independent Normals.

    Returns:
        A row a client. `nats`: KL(posterior || global prior) minus what sampling error alone
        contributes, about 0 if they are equal. `narrower`: 1 - Var posterior / Var global prior,
        mean over the client's scalars. None where no scalar of the global prior varies.
    """
    pooled, clients = same_for_all(fit), len(fit.clients)
    over = (0, 1) if pooled else 0
    nats, ratios = torch.zeros(clients, dtype=torch.float64), []
    for name in named_own(draws):
        mine, prior = (
            value.double().reshape(len(value), clients, -1)
            for value in (draws.own[name], expected[name])
        )
        varies = (prior.var(0, correction=0) > 0.0).all(0)
        if not bool(varies.any()):
            continue
        mine, prior = mine[..., varies], prior[..., varies]
        middle, wide = prior.mean(over), prior.var(over, correction=0)
        ratio = (mine.var(0, correction=0) / wide).clamp(min=1e-12)
        away = (mine.mean(0) - middle).square() / wide
        nats += 0.5 * (ratio - 1.0 - ratio.log() + away).sum(1)
        ratios.append(ratio)
    scalars = sum(ratio.shape[1] for ratio in ratios)
    if not scalars:
        return None
    # sampling error of S draws adds about 1 / S per scalar for the posterior, and as much for the
    # global prior unless its draws are pooled over clients
    nats -= scalars / len(mine) * (1.0 if pooled else 2.0)
    columns = {
        "nats": nats.clamp(min=0.0).numpy(),
        "narrower": np.clip(1.0 - torch.cat(ratios, 1).mean(1).numpy(), 0.0, 1.0),
    }
    return pd.DataFrame(columns, index=pd.Index(fit.clients, name="client"))
