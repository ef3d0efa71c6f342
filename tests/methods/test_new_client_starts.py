"""Where a new client of each method starts, `personalize(rows, rounds=0)`: where the server says.

Two properties, of every method and wrapper. A new client's params are a function of what the server
sends: module weights that no client trained do not reach it. And its model is the server's: the
slope that the clients' rows have, far from the module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import guides, methods, models
from hierfl.core.trees import named_leaves, tree_leaves
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.method import Method
from hierfl.methods.personalized.pfedhn import Mlp
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD, Adam
from tests.methods import cases
from tests.methods.cases import CASES, first_word
from tests.programs import federation, fit

UNTRAINED, TRUE = 0.1, 3.0
Make = Callable[[float], Method]  # slope that the module starts at -> method


def rows(seed: int, prefix: str) -> ClientData:
    """Return clients with y = 3 x + noise."""
    generator, parts = torch.Generator().manual_seed(seed), {}
    for k, n in enumerate((20, 12, 16)):
        x = torch.randn(n, 1, generator=generator)
        parts[f"{prefix}{k}"] = {
            "x": x,
            "y": TRUE * x[:, 0] + 0.1 * torch.randn(n, generator=generator),
        }
    return ClientData.from_clients(parts)


def net(slope: float) -> torch.nn.Module:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, slope)
    return module


def common(slope: float) -> Any:
    return models.network(net(slope), likelihood=normal(1.0))


def split(slope: float) -> Any:
    """Two layers, of which the last one is a head that starts at 1."""
    module = torch.nn.Sequential(net(slope), net(1.0 if slope == UNTRAINED else slope))
    return models.network(module, likelihood=normal(1.0))


def personal(slope: float, scale: Any = 1.0, **options: Any) -> Any:
    return models.bayesian_network(net(slope), likelihood=normal(1.0), prior_scale=scale, **options)


def sampled(slope: float) -> Any:
    return personal(slope, 0.3, prior_loc=dist.Normal(0.0, 5.0))


def mapped(slope: float) -> Any:
    return models.learned_prior_network(net(slope), likelihood=normal(1.0))


def embedded(slope: float) -> Any:
    return models.PersonalHeads(
        net(slope), outputs=1, features=1, local_features=0, likelihood=normal(1.0)
    )


def hierarchy(batch: ClientBatch) -> None:
    """A slope for each client about a common one: what `bfi`, `fedlaplace` and `pvi` integrate."""
    loc = pyro.sample("loc", dist.Normal(0.0, 5.0))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(loc, 0.3))
        with batch.data():
            pyro.sample("y", dist.Normal(batch.x[..., 0] * slope, 1.0), obs=batch.y)


FAST: dict[str, Any] = {
    "optimizer": SGD(0.3),
    "global_optimizer": SGD(0.3),
    "prox": 1.0,
    "inner_steps": 2,
    "steps": 4,
}
BAYES: dict[str, Any] = {
    "kl_weight": 0.1,
    "optimizer": Adam(0.3),
    "global_optimizer": Adam(0.3),
    "inner_steps": 1,
    "steps": 4,
}
SVI: dict[str, Any] = {
    "optimizer": Adam(0.4),
    "local_optimizer": Adam(0.4),
    "schedule": "constant",
    "average": 0.0,
}
FEW: dict[str, Any] = {"optimizer": SGD(0.3), "steps": 4}
STEPS: dict[str, Any] = {**FEW, "unit": "step", "batch_size": 10}
ABML: dict[str, Any] = {"optimizer": SGD(0.3), "steps": 3, "draws": 1}
MAP: dict[str, Any] = {"optimizer": Adam(0.3), "steps": 3}
LAST: dict[str, Any] = {"head": "1.", "batch_size": 20, "unit": "step"}
METHODS: dict[str, Make] = {
    "apfl": lambda s: methods.apfl(common(s), optimizer=SGD(0.3), steps=4),
    "bfi": lambda _: methods.bfi(hierarchy, steps=5),
    "clustered_fl": lambda s: methods.clustered_fl(common(s), **STEPS),
    "ditto": lambda s: methods.ditto(common(s), **FEW),
    "fedabml": lambda s: methods.fedabml(personal(s, "learned"), **ABML),
    "fedabml exact": lambda s: methods.fedabml(personal(s, "learned"), **ABML, server="exact"),
    "fedamp": lambda s: methods.fedamp(common(s), sigma=50.0, **STEPS),
    "fedavg": lambda s: methods.fedavg(common(s), **FEW),
    "fedem": lambda s: methods.fedem(common(s), components=1, **STEPS),
    "fedfomo": lambda s: methods.fedfomo(common(s), models=1, **STEPS),
    "fedbabu": lambda s: methods.fedbabu(split(s), optimizer=SGD(0.3), steps=4, **LAST),
    "fedlaplace": lambda _: methods.fedlaplace(hierarchy),
    "fedmap": lambda s: methods.fedmap(mapped(s), **MAP),
    "fedmap global": lambda s: methods.fedmap(mapped(s), **MAP, restart="global", init="client"),
    "fedrecon": lambda s: methods.fedrecon(
        split(s), **LAST, body_optimizer=SGD(0.3), head_steps=1, body_steps=4
    ),
    "fedrep": lambda s: methods.fedrep(
        split(s), **LAST, optimizer=SGD(0.1), head_steps=1, body_steps=8
    ),
    "fedep": lambda _: methods.fedep(hierarchy, draws=8, steps=2),
    "fedpa": lambda s: methods.fedpa(common(s), server_optimizer=SGD(2.0)),
    "fedpop": lambda s: methods.fedpop(
        personal(s), step_size=0.02, server_optimizer=Adam(1.0), temperature=0.0
    ),
    "fedsvi conditional": lambda _: methods.fedsvi(hierarchy, guides.conditional, **SVI),
    "fedsvi delta": lambda s: methods.fedsvi(personal(s), guides.delta, **SVI),
    "fedsvi low_rank": lambda s: methods.fedsvi(sampled(s), guides.low_rank, **SVI),
    "fedsvi mean_field": lambda s: methods.fedsvi(personal(s, "learned"), guides.mean_field, **SVI),
    "fedsvi structured": lambda s: methods.fedsvi(sampled(s), guides.structured, **SVI),
    "heur_fedamp": lambda s: methods.heur_fedamp(common(s), **STEPS),
    "ifca": lambda s: methods.ifca(common(s), clusters=1, **STEPS),
    "local_only": lambda s: methods.local_only(common(s), **FEW),
    "per_fedavg": lambda s: methods.per_fedavg(
        common(s), inner_optimizer=SGD(0.3), optimizer=SGD(0.3), steps=4
    ),
    "pfedbayes": lambda s: methods.pfedbayes(personal(s, "learned"), **BAYES),
    "pfedbayes init_scale": lambda s: methods.pfedbayes(
        personal(s, "learned"), **BAYES, init_scale=0.02
    ),
    "pfedbred": lambda s: methods.pfedbred(personal(s), "mh", **FAST),
    "pfedbred global": lambda s: methods.pfedbred(
        personal(s), "mh-code", inner_start="global", **FAST
    ),
    "pfedhn": lambda s: methods.pfedhn(
        common(s), hypernetwork=Mlp((4,)), **STEPS, server_optimizer=SGD(0.1)
    ),
    "pfedme": lambda s: methods.pfedme(personal(s), **FAST),
    "pvi": lambda _: methods.pvi(hierarchy, draws=8, steps=2),
    "scaffold": lambda s: methods.scaffold(common(s), optimizer=SGD(0.3), steps=4),
    "averaging_some": lambda s: methods.averaging_some(
        methods.pfedme(personal(s), **FAST), share=0.5
    ),
    "by_rows": lambda s: methods.by_rows(methods.pfedme(personal(s), **FAST)),
    "differentially_private": lambda s: methods.differentially_private(
        methods.ditto(common(s), **FEW), clipping_norm=1.0, noise_multiplier=1.0, secret=0
    ),
    "over_relaxed": lambda s: methods.over_relaxed(methods.ditto(common(s), **FEW), 1.5),
    "quantized": lambda s: methods.quantized(methods.ditto(common(s), **FEW)),
    "robust": lambda s: methods.robust(methods.ditto(common(s), **FEW), rule="median"),
    "server_optimized": lambda s: methods.server_optimized(
        methods.fedavg(common(s), **FEW), SGD(1.0, 0.3)
    ),
    "fine_tuned fedavg": lambda s: methods.fine_tuned(methods.fedavg(common(s), **FEW)),
    "fine_tuned ditto": lambda s: methods.fine_tuned(
        methods.ditto(common(s), **FEW), when="every round"
    ),
    "fine_tuned pfedme": lambda s: methods.fine_tuned(methods.pfedme(personal(s), **FAST)),
    "fine_tuned fedsvi": lambda s: methods.fine_tuned(
        methods.fedsvi(personal(s), guides.delta, **SVI)
    ),
}
# Of fedvi a new client's head is made from its rows; of fedbn the server has no layers of
# normalization; of two_stage a new client's factor is made from its rows, and draws without one
# come from the prior (test_two_stage.py); of knn_per and fedpac, which fit classes, see
# test_knn_per.py, test_fedpac.py; of batch_normed, test_batch_normed.py.
ELSEWHERE = {"batch_normed", "fedvi", "fedbn", "fedpac", "knn_per", "two_stage"}


def joined(fitted: hierfl.Fit) -> tuple[dict[str, Tensor], Tensor]:
    """Return every param of the new clients before they use a row, and the slope of their
    predictions.
    """
    data = rows(9, "new")
    new = fitted.personalize(data, rounds=0)
    client, table = new.federation.client, new.progress.table
    params: dict[str, Tensor] = {}
    for k in range(data.num_clients):
        own = torch.utils._pytree.tree_map(lambda v, k=k: v[k], table)
        found = client.params(new.message, own)
        params |= {f"{k} {name}": value for name, value in named_leaves(found).items()}
    mean, x = new.predict(data, draws=100).mean, data.fields["x"][:, 0]
    return params, (mean * x).sum() / x.square().sum()


@pytest.mark.parametrize("name", METHODS)
def test_new_clients_start_where_the_server_says(name: str) -> None:
    make = METHODS[name]
    fitted = fit(make(UNTRAINED), rows(0, "a"), rounds=12 if "fedsvi" in name else 5)
    params, slope = joined(fitted)
    # the server of "local_only" has the module's weights
    assert (float(slope) > 1.8) == (name != "local_only")

    # the same server, but a module with other weights
    other_start = federate(make(-7.0), rows(0, "a"))
    assert tree_leaves(other_start.client.own) or not tree_leaves(fitted.progress.table)
    before = replace(begin(other_start), server=fitted.progress.server, round=fitted.progress.round)
    other = hierfl.Fit(fitted.method, other_start, before, fitted.rounds)
    again, _ = joined(other)
    assert again.keys() == params.keys()
    for param, value in params.items():
        assert torch.equal(again[param], value), param


def test_a_client_that_was_in_no_round_is_served_the_same() -> None:
    """`fit` with cohorts of one: the clients that were never drawn are where new ones start."""
    for name in (
        "apfl",
        "ditto",
        "fedabml",
        "fedamp",
        "fedfomo",
        "fedmap",
        "fedpop",
        "fedrecon",
        "fedrep",
        "heur_fedamp",
        "ifca",
        "pfedbayes",
        "pfedbred",
        "pfedme",
    ):
        fitted = fit(METHODS[name](UNTRAINED), rows(0, "a"), rounds=1, cohort=1)
        client = fitted.federation.client
        assert client.seen is not None
        begun = torch.vmap(client.seen)(fitted.progress.table)
        assert begun.tolist().count(0.0) == 2
        k = int(begun.argmin())
        served, new = (
            client.params(
                fitted.message, torch.utils._pytree.tree_map(lambda v, k=k: v[k], f.progress.table)
            )
            for f in (fitted, fitted.personalize(rows(9, "new"), rounds=0))
        )
        for param, value in named_leaves(new).items():
            assert torch.equal(named_leaves(served)[param], value), (name, param)


def test_the_posterior_of_a_new_client_is_its_prior() -> None:
    """Of the methods whose clients begin at theta, means and scales."""
    for name in ("pfedbayes", "fedabml"):
        fitted = fit(METHODS[name](UNTRAINED), rows(0, "a"), rounds=5)
        new = fitted.personalize(rows(9, "new"), rounds=0)
        params, _ = joined(new)
        theta = fitted.message["theta.weight"]
        link = torch.nn.functional.softplus
        assert torch.equal(params["0 ['w.weight.loc']"].flatten(), theta.flatten())
        assert torch.allclose(
            link(params["0 ['w.weight.scale']"]).flatten(),
            link(fitted.message["scale.weight"]).flatten(),
        )


def test_fedbn_gives_new_clients_its_common_weights() -> None:
    """Its layers of normalization are the client's own, and start as the module has them."""
    module = torch.nn.Sequential(net(UNTRAINED), torch.nn.BatchNorm1d(1), net(UNTRAINED))
    method = methods.fedbn(models.batch_norm_network(module, likelihood=normal(1.0)))
    fitted = fit(method, rows(0, "a"), rounds=3)
    params, _ = joined(fitted)
    for param, value in named_leaves(fitted.message).items():
        assert torch.equal(params[f"0 {param}"], value)
        assert not torch.equal(value.flatten(), torch.tensor([UNTRAINED]))


def test_a_method_that_is_not_listed_here_serves_a_new_client_from_the_server_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first property, of a case in `CASES`: the second module has other weights."""
    held = {first_word(name) for name in METHODS} | ELSEWHERE
    for name, case in CASES.items():
        if first_word(name) in held:
            continue
        fitted = fit(case.make(), federation(), rounds=2)
        monkeypatch.setattr(cases, "SEED", 4)
        again = federate(case.make(), federation())
        before = replace(begin(again), server=fitted.progress.server, round=2)
        params = []
        for one in (fitted, hierfl.Fit(fitted.method, again, before, 2)):
            new = one.personalize(federation((4,), seed=8), rounds=0)
            own = torch.utils._pytree.tree_map(lambda v: v[0], new.progress.table)
            params.append(named_leaves(new.federation.client.params(new.message, own)))
        assert all(torch.equal(value, params[1][path]) for path, value in params[0].items()), name
        monkeypatch.undo()
