"""Which modules can make a likelihood, and the errors for those that cannot."""

from typing import Any

import pytest
import torch
from torch import nn

from hierfl import models
from hierfl.core.arguments import names_by_rule
from hierfl.models.functional import apply, frozen_copy

NAMES = ["0.weight", "0.bias"]
NORMALIZES = r"'1' \(InstanceNorm1d\) normalizes by .* other rows.*: use nn.GroupNorm or nn.Layer"


def after_a_line(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), layer)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (after_a_line(nn.InstanceNorm1d(4, track_running_stats=True)), NORMALIZES),
        (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), "InstanceNorm2d normalizes"),
        (after_a_line(nn.Dropout(0.5)), r"'1' \(Dropout\) drops .* mode: call module.eval"),
        (nn.LSTM(2, 3, num_layers=2, dropout=0.1), "LSTM drops units"),
        (nn.LazyLinear(3), "the module is lazy, so the shapes of its weights are unknown"),
        (nn.ReLU(), "no parameter that requires a gradient"),
        (nn.Linear(2, 3).requires_grad_(False), "no parameter that requires a gradient"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_unsuitable_modules_raise(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.network(module)


@pytest.mark.parametrize(
    "module",
    [
        after_a_line(nn.Dropout(0.5)).eval(),
        after_a_line(nn.Dropout(0.0)),
        after_a_line(nn.LayerNorm(4)),
        nn.TransformerEncoderLayer(4, 2).eval(),
    ],
    ids=["in evaluation", "of nothing", "of a row", "attention"],
)
def test_suitable_modules_are_accepted(module: nn.Module) -> None:
    assert callable(models.network(module))


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ("head", "the pattern 'head' matches none of the module's parameters: 0.weight, 0.bias"),
        (["0.", "1."], "local: the prefix '1.' matches none"),
        (lambda name: False, "local: the predicate matches none"),
    ],
)
def test_local_that_matches_no_name_raises(local: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        names_by_rule(NAMES, local, option="local")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_loc": "mean"}, "prior_loc is 'mean': it must be 'zero', 'module', 'learned'"),
        (
            {"prior_scale": "free"},
            "prior_scale is 'free': it must be 'learned', 'client', a number",
        ),
        ({"prior_scale": -0.1}, "prior_scale is -0.1, but a scale must be > 0"),
        ({"scale_start": 0.0}, "scale_start is 0.0, but a scale must be > 0"),
    ],
)
def test_invalid_priors_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.bayesian_network(nn.Linear(2, 3), **options)


def test_each_client_has_its_own_weights() -> None:
    net, x = nn.Linear(2, 3), torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(4, 1, 3, 2, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(3, generator=torch.Generator().manual_seed(2))
    expected = torch.einsum("cbd,ckd->cbk", x, weight[:, 0]) + bias
    together = apply(frozen_copy(net), {"weight": weight}, {"bias": bias}, x, mask=None)
    torch.testing.assert_close(together, expected)
    for k in range(4):
        own = {"weight": weight[k : k + 1]}
        alone = apply(net, own, {"bias": bias}, x[k : k + 1], mask=None)
        torch.testing.assert_close(alone, expected[k : k + 1])
