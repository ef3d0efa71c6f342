"""The quasi-random points at which FedLaplace evaluates the posterior of the global sites."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.core.importance_sampling import Split, heavy_points, normal_points
from hierfl.core.trees import Tree

PARTS = 16  # settling rounds with different points; after them the points repeat
FREEDOM = 15.0  # degrees of freedom of the Student t in the weighing stage
FAR = 3.0  # standard deviations of q at which its two sides are measured; beyond, the tail of the t is wide enough


@dataclass(frozen=True, eq=False)
class Points:
    """Standard points that the server and the clients both compute, so that no message holds them.

    Args:
        settling: (PARTS, M, K), standard normal.
        weighing: (corrections, S, K), standard normal.
        stretch: (corrections, S, 1), factors that turn the rows of `weighing` into those of a Student t.
        seed: of all points.
    """

    settling: Tensor
    weighing: Tensor
    stretch: Tensor
    seed: int

    def at(self, message: Tree) -> Tensor:
        """Return the points z (M, K) that a message asks for."""
        loc: Tensor = message["loc"]
        if "tril" not in message:
            return loc[None]
        if "right" in message:
            return split_of(message).points(
                *(
                    v.index_select(0, message["part"][None])[0]
                    for v in (self.weighing, self.stretch)
                )
            )
        return loc + self.settling.index_select(0, message["part"][None])[0] @ message["tril"].T

    def along(self, message: Tree) -> Tensor:
        """Return the centre of q and points on both sides of it along the columns of `tril`, (1 + 2 K, K).

        Without a weighing stage there are none, (0, K).
        """
        loc, size = message["loc"], self.weighing.shape[-1]
        if not len(self.weighing):
            return torch.zeros(0, size, dtype=loc.dtype)
        columns = FAR * message["tril"].T
        return loc + torch.cat([torch.zeros(1, size, dtype=loc.dtype), columns, -columns])


def standard_points(size: int, *, settle: int, weigh: int, corrections: int, seed: int) -> Points:
    """Return points in K = `size` dimensions.

    Args:
        size: K, the number of global unknowns.
        settle: points of a settling round.
        weigh: points of a weighing round.
        corrections: number of weighing rounds.
        seed: of all points.
    """
    halves = normal_points(PARTS * settle, size, seed=seed).view(2, PARTS, settle // 2, size)
    heavy = [
        heavy_points(weigh, size, freedom=FREEDOM, seed=seed + 1 + a) for a in range(corrections)
    ]
    weighing, stretch = (
        (torch.stack(v) for v in zip(*heavy, strict=True))
        if heavy
        else (torch.zeros(0, weigh, d) for d in (size, 1))
    )
    return Points(halves.transpose(0, 1).reshape(PARTS, settle, size), weighing, stretch, seed)


def split_of(message: Tree) -> Split:
    """Return the two-sided Gaussian that a message describes."""
    return Split(message["loc"], message["tril"], message["right"], message["left"])
