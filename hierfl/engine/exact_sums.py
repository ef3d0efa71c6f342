"""Updates that a server sees in a sum alone, as numbers on a grid that add up without an error.

To be masked, x = largest (a + 2^-21 b + 2^-42 c), each in [-1, 1] on a grid of 2^-21: the sum is that of
the numbers to 2^-64 of the largest.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.trees import Tree, has_rounded, tree_leaves, tree_map
from hierfl.engine.aggregate import Sums
from hierfl.method import Share, Up

GRID = 1 << 21
PARTS = 3
LARGEST = float(1 << 30)  # of a client's numbers times its weight
Numbers = NDArray[np.float64]


class Summed(NamedTuple):
    """The sum of some clients' parts, (3 n,), as `parts_of` orders them, and why the others are not in it."""

    clients: tuple[str, ...]
    parts: Numbers
    reasons: Mapping[str, str]


# (client -> bytes, parts of an update) -> the sum of what the clients answer
AskSum = Callable[[Mapping[str, bytes], int], Summed]


def check_sums(method: str, up: Up) -> None:
    """Refuse an update that is not of plain sums (ValueError)."""
    for name, share in up.items():
        if not isinstance(share, Share):
            kind = "individually" if type(share).__name__ == "Each" else "with a log weight"
            raise ValueError(
                f"{method} sends {name} {kind}, and secure aggregation gives the server sums "
                "alone: use a method of plain sums, or run it without secure aggregation"
            )
        if has_rounded(share.value):
            raise ValueError(
                f"{method} sends {name} as whole numbers with a scale of each client's own, and "
                "secure aggregation adds up plain numbers: run the method that is in `quantized`, "
                "or run it without secure aggregation"
            )


def size_of(up: Up) -> int:
    """Return how many parts an update is written in."""
    return PARTS * sum(leaf.numel() for leaf in tree_leaves(up))


def parts_of(tree: Tree) -> Numbers:
    """Return the numbers of an update, values times weights and weights, in parts, (3 n,)."""
    flat = torch.cat([leaf.reshape(-1).double() for leaf in tree_leaves(tree)]).numpy()
    if not np.isfinite(flat).all() or np.abs(flat).max(initial=0.0) >= LARGEST:
        raise ValueError(
            f"an update has a number that is not finite, or not below {LARGEST:.0e}, and cannot be "
            "masked: scale the rows"
        )
    left, parts = flat / LARGEST, []
    for _ in range(PARTS):
        part = np.round(left * GRID) / GRID
        parts.append(part)
        left = (left - part) * GRID
    return np.concatenate(parts)


def sums_of(parts: Numbers, template: Up) -> Sums:
    """Return the sums of shares from the sum of their parts (3 n,), by one client's update."""
    if parts.shape != (size_of(template),):
        expected = size_of(template)
        raise ValueError(f"the sum has {parts.shape[0]} parts, and {expected} were expected")
    # the grid is exact; what summed it may not be
    whole = np.round(parts.reshape(PARTS, -1) * GRID) / GRID
    flat = torch.from_numpy(LARGEST * (whole[0] + (whole[1] + whole[2] / GRID) / GRID))
    places = iter(flat.split([leaf.numel() for leaf in tree_leaves(template)]))

    def of(leaf: Tensor) -> Tensor:
        return next(places).reshape(leaf.shape[1:]).to(leaf.dtype)

    sums: Sums = tree_map(of, template)
    return sums
