"""Classes of tensors as trees."""

import torch
from torch import Tensor

from hierfl.core.trees import named_leaves, tree_class, tree_map, with_leaves


@tree_class
class Moments:
    mean: Tensor
    by_name: dict[str, Tensor]
    square: Tensor | None = None


def test_a_field_that_is_none_is_no_part() -> None:
    whole = Moments(torch.ones(2), {"a": torch.zeros(1)}, square=torch.full((), 3.0))
    assert list(named_leaves(whole)) == ["['mean']", "['by_name']['a']", "['square']"]
    few = Moments(torch.ones(2), {"a": torch.zeros(2)})
    doubled = tree_map(lambda v: 2.0 * v, few)
    assert doubled.square is None and doubled.mean.tolist() == [2.0, 2.0]
    assert torch.vmap(lambda m: m.mean.sum())(few).tolist() == [1.0, 1.0]


def test_a_tree_is_read_back_from_its_leaves() -> None:
    whole = Moments(torch.ones(2), {}, square=torch.full((), 3.0))
    again = with_leaves(tree_map(torch.zeros_like, whole), named_leaves(whole))
    assert isinstance(again, Moments) and torch.equal(again.mean, whole.mean)
    assert again.square is not None and float(again.square) == 3.0
