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
FIRST = {
    "theta.0.weight": (3, 2),
    "theta.0.bias": (3,),
}  # the body, where the last layer is the head
LAST: Any = {"head": "theta.2"}
OTHERS: dict[
    str, tuple[Callable[[], Method], dict[str, Shapes]]
] = {  # the update of each, without scalars
    "clustered_fl": (
        lambda: hierfl.methods.clustered_fl(_common()),
        {"away": {**THETA, "rows": ()}},
    ),
    "fedamp": (lambda: hierfl.methods.fedamp(_common()), {"w": THETA}),
    "apfl": (lambda: hierfl.methods.apfl(_common()), {"theta": THETA}),
    "ditto": (lambda: hierfl.methods.ditto(_common()), {"theta": THETA}),
    "fedbabu": (lambda: hierfl.methods.fedbabu(_common(), **LAST), {"theta": FIRST}),
    "fedbn": (lambda: hierfl.methods.fedbn(normed()), {"theta": BODY}),
    "fedem": (
        lambda: hierfl.methods.fedem(_common(), components=2),
        {"theta": {f"{m}.{name}": shape for m in (0, 1) for name, shape in THETA.items()}},
    ),
    "fedfomo": (
        lambda: hierfl.methods.fedfomo(_common(), models=2),
        {"model": {**THETA, "scores": (2,)}},
    ),
    "fedmap": (
        lambda: hierfl.methods.fedmap(
            models.learned_prior_network(net(), likelihood=models.likelihood.normal(1.0))
        ),
        {"clients": THETA},
    ),
    "fedpac": (
        lambda: hierfl.methods.fedpac(
            models.HeadedNetwork(
                torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)),
                head="2",
                y="ill",
            )
        ),
        {
            "theta": {"theta.0.weight": (3, 2), "theta.0.bias": (3,)},
            "classes": {"total": (2, 3), "count": (2,)},
            "head": {"theta.2.weight": (2, 3), "theta.2.bias": (2,), "h": (2, 3), "v": ()},
        },
    ),
    "fedrecon": (lambda: hierfl.methods.fedrecon(_common(), **LAST), {"theta": FIRST}),
    "fedrep": (lambda: hierfl.methods.fedrep(_common(), **LAST), {"theta": FIRST}),
    "fedpa": (lambda: hierfl.methods.fedpa(_common()), {"moved": THETA}),
    "fedpa laplace": (
        lambda: hierfl.methods.fedpa(_common(), posterior="laplace"),
        {"moved": THETA},
    ),
    "fedpop": (
        lambda: hierfl.methods.fedpop(personal(prior_scale=1.0), step_size=1e-4, kept_draws=4),
        {"gradient": THETA},
    ),
    "fedvi": (lambda: hierfl.methods.fedvi(embedded(), hidden=4), {"move": HEADS}),
    "heur_fedamp": (lambda: hierfl.methods.heur_fedamp(_common()), {"w": THETA}),
    "ifca": (
        lambda: hierfl.methods.ifca(_common(), clusters=3),
        {"mine": {**{name: (3, *shape) for name, shape in THETA.items()}, "share": (3,)}},
    ),
    "local_only": (lambda: hierfl.methods.local_only(_common()), {}),
    "knn_per": (
        lambda: hierfl.methods.knn_per(
            models.MemoryNetwork(torch.nn.Sequential(torch.nn.Linear(2, 2)), features="0", y="ill")
        ),
        {"theta": {"theta.0.weight": (2, 2), "theta.0.bias": (2,)}},
    ),
    "pfedhn": (lambda: hierfl.methods.pfedhn(_common(), batch_size=2), {"away": THETA}),
    "per_fedavg": (lambda: hierfl.methods.per_fedavg(_common()), {"theta": THETA}),
    "scaffold": (
        lambda: hierfl.methods.scaffold(_common()),
        {"moved": THETA, "corrected": THETA, "joined": {"clients": (), "weight": ()}},
    ),
}


WRAPPERS = {
    "averaging_some",
    "batch_normed",
    "by_rows",
    "differentially_private",
    "fine_tuned",
    "over_relaxed",
    "quantized",
    "robust",
    "server_optimized",
}  # see test_wrappers


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
