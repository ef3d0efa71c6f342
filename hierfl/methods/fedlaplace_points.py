"""The quasi-random points at which FedLaplace evaluates the posterior of the global sites."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hierfl.core.importance_sampling import Split, heavy_points, normal_points
from hierfl.core.trees import Tree

PARTS = 16  # settling rounds with different points; after them the points repeat
# points of the first weighting round, with each of which a client sends a number: 512 make most
# posteriors whose k-hat is small (radon: 0.04), and 4,096, as every round had before, took up to
# half of a run's time
FIRST = 512
FREEDOM = 15.0  # degrees of freedom of the Student t in the weighting stage
FAR = 3.0  # sds of q at which its sides are measured; beyond, the tail of the t is wide enough


@dataclass(frozen=True, eq=False)
class Points:
    """Standard points that the server and the clients both compute, so that no message holds them."""

    settling: Tensor  # (PARTS, M, K), standard normal
    weighting: Tensor  # (S, K), standard normal, of one weighting round after another
    stretch: Tensor  # (S, 1), makes rows of `weighting` those of a Student t
    sizes: tuple[int, ...]  # of the weighting rounds
    seed: int

    def at(self, message: Tree) -> Tensor:
        """Return the points z (M, K) that a message asks for."""
        loc: Tensor = message["loc"]
        if "tril" not in message:
            return loc[None]
        if "right" in message:
            first = self._firsts.index_select(0, message["part"][None])
            rows = first + torch.arange(message["points"].shape[0])
            return split_of(message).points(
                self.weighting.index_select(0, rows), self.stretch.index_select(0, rows)
            )
        return loc + self.settling.index_select(0, message["part"][None])[0] @ message["tril"].T

    def weighted(self, part: int) -> tuple[Tensor, Tensor]:
        """Return the rows of `weighting` and `stretch` of one weighting round."""
        first = int(self._firsts[part])
        rows = slice(first, first + self.sizes[part])
        return self.weighting[rows], self.stretch[rows]

    @cached_property
    def _firsts(self) -> Tensor:
        """The row of `weighting` at which each weighting round begins, (rounds,)."""
        return torch.tensor([sum(self.sizes[:a]) for a in range(len(self.sizes))])

    def along(self, message: Tree) -> Tensor:
        """Return q's center and points on both sides along `tril`, (1 + 2 K, K); (0, K) if none weigh."""
        loc, size = message["loc"], self.weighting.shape[-1]
        if not self.sizes:
            return torch.zeros(0, size, dtype=loc.dtype)
        columns = FAR * message["tril"].T
        return loc + torch.cat([torch.zeros(1, size, dtype=loc.dtype), columns, -columns])


def standard_points(size: int, *, settle: int, weigh: int, rounds: int, seed: int) -> Points:
    """Return points in K = `size` dimensions; weighting rounds grow from `FIRST` points to `weigh`."""
    halves = normal_points(PARTS * settle, size, seed=seed).view(2, PARTS, settle // 2, size)
    sizes = tuple(min(weigh, FIRST << a) for a in range(rounds))
    heavy = [
        heavy_points(count, size, freedom=FREEDOM, seed=seed + 1 + a)
        for a, count in enumerate(sizes)
    ]
    weighting, stretch = (
        (torch.cat(v) for v in zip(*heavy, strict=True))
        if heavy
        else (torch.zeros(0, d) for d in (size, 1))
    )
    settling = halves.transpose(0, 1).reshape(PARTS, settle, size)
    return Points(settling, weighting, stretch, sizes, seed)


def split_of(message: Tree) -> Split:
    """Return the two-sided Gaussian that a message describes."""
    return Split(message["loc"], message["tril"], message["right"], message["left"])
