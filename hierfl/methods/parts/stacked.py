"""Models stacked along a first dimension: of components, or of single clients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_leaves, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.program.program import Params, Program, ProgramError


def starts_of(start: Params, count: int, seed: int, starts: Sequence[Params] | None) -> Params:
    """Return K sets of params (K, ...): `given`, or `start` and shuffles of each of its tensors."""
    sets = list(starts) if starts is not None else [_in_order(start, m, seed) for m in range(count)]
    like = {name: value.shape for name, value in start.items()}
    if len(sets) != count or any({k: v.shape for k, v in own.items()} != like for own in sets):
        raise ProgramError(f"starts is not {count} sets of params, with the shapes {like}")
    stacked = {name: torch.stack([params[name] for params in sets]) for name in start}
    for a in range(count):
        for b in range(a):
            if all(torch.equal(v[a], v[b]) for v in stacked.values()):
                raise ProgramError(
                    f"components {b} and {a} start equal, and would stay equal: give starts=, "
                    f"{count} different sets of params"
                )
    return stacked


def _in_order(start: Params, m: int, seed: int) -> Params:
    if not m:
        return {name: v.clone() for name, v in start.items()}

    def shuffled(name: str, v: Tensor) -> Tensor:
        key = noise.fold(noise.root_key(seed), noise.word(f"component {m} {name}"))
        order = noise.uniforms(key, (v.numel(),), torch.float64).argsort()
        return v.flatten()[order].view(v.shape)

    return {name: shuffled(name, v) for name, v in start.items()}


def of_each(program: Program, function: Callable[[Params], Tensor], components: Params) -> Tensor:
    """Return a function's value at each component (K, ...), at once if the program allows."""
    if program.in_vmap:
        return torch.vmap(function)(components)
    count = len(next(iter(components.values())))
    return torch.stack([function(part(components, k)) for k in range(count)])


def part(components: Tree, k: int) -> Tree:
    """Return component k of K."""
    return tree_map(lambda v: v[k], components)


def of_least_loss(program: Program, components: Params, batch: ClientBatch) -> Tensor:
    """Return a mask (K,) of the first component with the least loss on a batch."""
    losses = of_each(program, lambda theta: program.mean_loss(theta, batch), components)
    return (torch.arange(len(losses)) == losses.argmin()).to(torch.get_default_dtype())


def mixed(weights: Tensor, components: Tree) -> Tree:
    """Return sums of components (K, ...) by weights (..., K); a mask of one 1 and zeros picks one."""
    return tree_map(lambda v: torch.tensordot(weights.to(v.dtype), v, 1), components)


def along(mask: Tensor, value: Tree) -> Tree:
    """Return a tree times each entry of a mask (K,), (K, ...) each leaf."""
    return tree_map(lambda v: mask.view(-1, *[1] * v.dim()).to(v.dtype) * v, value)


def at_each(value: Tree, clients: int) -> Tree:
    """Return a tree for each of N clients, all equal: N in front of every leaf."""
    return tree_map(lambda v: v.expand(clients, *v.shape).clone(), value)


def mean_of(models: Tree, seen: Tensor) -> Tree:
    """Return the mean of the models of clients that were seen, (N,) bool, or of all if none was."""
    share = torch.where(seen.any(), seen, torch.ones_like(seen)).double()
    return mixed(share / share.sum(), models)


def flat(models: Tree) -> Tensor:
    """Return each client's params as one vector, (N, P)."""
    return torch.cat([v.reshape(len(v), -1) for v in tree_leaves(models)], 1)


def distances(vectors: Tensor) -> Tensor:
    """Return the squared distances of vectors (N, P), (N, N)."""
    # by differences: the expanded square loses all digits where models are similar and large
    count = len(vectors)
    squares = torch.zeros(count, count, dtype=vectors.dtype)
    row, other = torch.triu_indices(count, count, offset=1)
    squares[row, other] = torch.pdist(vectors).square()
    return squares + squares.T
