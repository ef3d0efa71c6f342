"""Hypernetworks of pFedHN's server: a client's params as a function of its embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import spelled
from hierfl.core.trees import Tree
from hierfl.program.program import Params


class Hypernetwork(Protocol):
    """Two functions: the first weights, and a client's params at weights and an embedding."""

    def start(self, like: Params, size: int, key: Tensor) -> Tree:
        """Return the first weights, for params like `like` and embeddings (size,)."""

    def params(self, weights: Tree, embedding: Tensor, like: Params) -> Params:
        """Return the params at an embedding (D,)."""


@spelled
@dataclass(frozen=True)
class Mlp:
    """Dense layers of rectified units, and a dense layer for each tensor that comes out.

    At first the heads' biases are the model's own starting values, and their weights are small: all
    clients start near the model as it is. (The paper's code starts them at random.)

    Args:
        hidden: units of each hidden layer. Default: the authors', three of 100.
        spread: sd of what the embedding adds at first to a param, as a share of that tensor's own
            sd.
    """

    hidden: tuple[int, ...] = (100, 100, 100)
    spread: float = 0.1

    def start(self, like: Params, size: int, key: Tensor) -> Tree:
        """Return the first weights: `layers` and `heads`."""
        widths, layers = (size, *self.hidden), {}
        for i, (n, m) in enumerate(pairwise(widths)):
            drawn = noise.normals(noise.fold(key, noise.word(f"layer {i}")), (m, n))
            layers[f"{i}"] = {"weight": math.sqrt(2.0 / n) * drawn, "bias": torch.zeros(m)}
        heads = {}
        for name, v in like.items():
            drawn = noise.normals(
                noise.fold(key, noise.word(f"head {name}")), (v.numel(), widths[-1])
            )
            sd = v.std(correction=0) if v.numel() > 1 else torch.zeros(())
            wide = self.spread * torch.where(sd > 0.0, sd, 0.01) / math.sqrt(widths[-1])
            heads[name] = {"weight": wide * drawn, "bias": v.flatten().clone()}
        return {"layers": layers, "heads": heads}

    def params(self, weights: Tree, embedding: Tensor, like: Params) -> Params:
        """Return the params at an embedding (D,)."""
        z = embedding
        for layer in weights["layers"].values():
            z = torch.relu(layer["weight"] @ z + layer["bias"])
        heads = weights["heads"]
        return {
            name: (heads[name]["weight"] @ z + heads[name]["bias"]).view(v.shape)
            for name, v in like.items()
        }
