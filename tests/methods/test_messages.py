"""What methods send whose clients keep models, layers or nothing; every method's messages are listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import models
from hierfl.core.trees import named_leaves
from hierfl.method import Method
from tests.methods.test_privacy import (
    CROSSES,
    METHODS,
    SUMMARIES,
    TEN_ROUNDS,
    THETA,
    Shapes,
    exchange,
    net,
    personal,
    shapes,
)
from tests.programs import FAMILIES, federation


def normed() -> Any:
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
    )
    return models.batch_norm_network(module, likelihood=models.likelihood.normal(1.0))


def embedded() -> Any:
    likelihood = models.likelihood.normal(1.0)
    return models.PersonalHeads(
        torch.nn.Linear(2, 7), outputs=1, features=7, local_features=2, likelihood=likelihood
    )


BODY = {
    "theta.0.weight": (3, 2),
    "theta.0.bias": (3,),
    "theta.2.weight": (1, 3),
    "theta.2.bias": (1,),
}
HEADS = {
    **{
        "embedding.weight": (7, 2),
        "embedding.bias": (7,),
        "head.weight": (5, 1),
        "head.bias": (1,),
    },
    **{
        "constructor.1.weight": (5, 4),
        "constructor.1.bias": (4,),
        "constructor.2.weight": (4, 4),
        "constructor.2.bias": (4,),
    },
    **{"constructor.last.weight": (4, 5), "constructor.last.bias": (5,)},
}
OTHERS: dict[
    str, tuple[Callable[[], Method], dict[str, Shapes]]
] = {  # the update of each, without scalars
    "ditto": (lambda: hierfl.methods.ditto(_common()), {"theta": THETA}),
    "fedbn": (lambda: hierfl.methods.fedbn(normed()), {"theta": BODY}),
    "fedmap": (
        lambda: hierfl.methods.fedmap(
            models.map_network(net(), likelihood=models.likelihood.normal(1.0))
        ),
        {"clients": THETA},
    ),
    "fedpa": (lambda: hierfl.methods.fedpa(_common()), {"moved": THETA}),
    "fedpa laplace": (
        lambda: hierfl.methods.fedpa(_common(), posterior="laplace"),
        {"moved": THETA},
    ),
    "fedpop": (
        lambda: hierfl.methods.fedpop(personal(prior_scale=1.0), lr=1e-4, kept=4),
        {"gradient": THETA},
    ),
    "fedvi": (lambda: hierfl.methods.fedvi(embedded(), hidden=4), {"move": HEADS}),
    "individual": (lambda: hierfl.methods.individual(_common()), {}),
    "per_fedavg": (lambda: hierfl.methods.per_fedavg(_common()), {"theta": THETA}),
    "scaffold": (
        lambda: hierfl.methods.scaffold(_common()),
        {"moved": THETA, "corrected": THETA, "joined": {"clients": (), "weight": ()}},
    ),
}


WRAPPERS = {"averaging_some", "by_rows", "fine_tuned", "over_relaxed"}  # see test_wrappers


def _common() -> Any:
    return models.network(net(), likelihood=models.likelihood.normal(1.0))


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_send_only_common_weights_and_scalars(name: str) -> None:
    make, expected = OTHERS[name]
    for counts in ((5, 3), (50, 30, 70)):
        _, up, _, program = exchange(make(), federation(counts))
        numbers = {
            share
            for share, sent in up.items()
            if isinstance(sent.value, Tensor) and sent.value.dim() == 1
        }
        assert {
            share: shapes(sent.value, skip=1) for share, sent in up.items() if share not in numbers
        } == expected
        assert numbers <= {"loss", "kl", "stiffness"}
        local = {spec.name for spec in program.params if spec.is_local} | {
            s.name for s in program.latents.local_block.sites
        }
        assert not [path for path in named_leaves(up) if any(f"'{own}'" in path for own in local)]


def test_every_method_and_guide_is_listed() -> None:
    assert {name.split()[0] for name in (*METHODS, *TEN_ROUNDS, *SUMMARIES, *OTHERS)} == (
        set(hierfl.methods.__all__) - WRAPPERS
    )
    assert set(CROSSES) | {"structured_flow"} == set(FAMILIES)
