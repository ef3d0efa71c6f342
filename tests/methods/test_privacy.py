"""Messages and updates listed by name and shape for every method and guide; nothing local is in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import guides, models
from hierfl.core import noise
from hierfl.core.trees import named_leaves
from hierfl.data.batch import ClientBatch, full_batch, gather, keys_of
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import client_round
from hierfl.engine.federation import federate
from hierfl.engine.minibatches import batch_of, steps
from hierfl.engine.rounds import begin
from hierfl.method import Clock, Each, Method, Phase, Share
from hierfl.methods.two_stage_stages import WEIGH
from tests.programs import FAMILIES, federation, regression

Shapes = dict[str, tuple[int, ...]]
LOC, GUIDE = {"_shared.loc": (4,), "_shared.scale": (4,)}, {"_shared.lower": (4, 4)}
SITES = {"loc": (2,), "spread": (), "lift": ()}
ENCODER = {
    "_encoder.row1.weight": (5, 4),
    "_encoder.row1.bias": (4,),
    "_encoder.row2.weight": (4, 4),
    "_encoder.row2.bias": (4,),
    "_encoder.set.weight": (5, 4),
    "_encoder.set.bias": (4,),
    "_encoder.last.weight": (4, 4),
    "_encoder.last.bias": (4,),
}
CROSSES: dict[
    str, Shapes
] = {  # `regression`, K = 4 and D = 2: every tensor that fedsvi sends, in either direction
    "delta": {f"{site}.at": shape for site, shape in SITES.items()},
    "mean_field": {f"{site}.{p}": shape for site, shape in SITES.items() for p in ("loc", "scale")},
    "low_rank": {**LOC, "_shared.factor": (4, 2)},
    "structured": {**LOC, **GUIDE},
    "conditional": {**LOC, **GUIDE},
    "amortized": {**LOC, **GUIDE, **ENCODER},
    "unrolled": {**LOC, **GUIDE, "_local.log_scale": (2,)},
}


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def personal(**options: Any) -> Any:
    return models.bayesian_network(
        net(), likelihood=models.likelihood.normal(1.0), prior_loc="learned", **options
    )


THETA = {
    "theta.0.weight": (3, 2),
    "theta.0.bias": (3,),
    "theta.2.weight": (1, 3),
    "theta.2.bias": (1,),
}
SCALE = {name.replace("theta", "scale"): shape for name, shape in THETA.items()}
METHODS: dict[str, tuple[Callable[[], Method], Shapes]] = {
    "fedavg": (
        lambda: hierfl.methods.fedavg(
            models.network(net(), likelihood=models.likelihood.normal(1.0)), steps=2, batch_size=2
        ),
        THETA,
    ),
    "pfedme": (
        lambda: hierfl.methods.pfedme(personal(prior_scale=1.0), steps=2, batch_size=2),
        THETA,
    ),
    "fedabml": (
        lambda: hierfl.methods.fedabml(personal(prior_scale="learned"), steps=2, batch_size=2),
        {**THETA, **SCALE},
    ),
    "pfedbred": (
        lambda: hierfl.methods.pfedbred(personal(prior_scale=1.0), steps=2, batch_size=2),
        THETA,
    ),
    "pfedbayes": (
        lambda: hierfl.methods.pfedbayes(personal(prior_scale="learned"), steps=2, batch_size=2),
        {**THETA, **SCALE},
    ),
    **{
        f"fedsvi {name}": (
            partial(hierfl.methods.fedsvi, regression, FAMILIES[name]),
            CROSSES[name],
        )
        for name in CROSSES
    },
}


def exchange(method: Method, data: ClientData) -> tuple[Any, dict[str, Any], Any, hierfl.Program]:
    """Return the message, the update, the new client state and the program of a first round."""
    federation_ = federate(method, data)
    start = begin(federation_)
    message = federation_.server.down(start.server, Clock(0, 1))
    ids = torch.arange(data.num_clients)
    up, kept = client_round(federation_, federation_.client.phases, message, start.table, ids, 0)
    return message, up, kept, federation_.program


def shapes(tree: Any, *, skip: int = 0) -> Shapes:
    """Return shapes by the last key of each tensor's path, without the leading `skip` dimensions."""
    return {
        name.rsplit("'", 2)[-2]: tuple(leaf.shape[skip:])
        for name, leaf in named_leaves(tree).items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_the_tensors_sent(name: str) -> None:
    make, expected = METHODS[name]
    message, up, *_ = exchange(make(), federation())
    svi = name.startswith("fedsvi")
    if svi:
        assert shapes(message["params"]) == expected
        assert {k: tuple(v.shape) for k, v in message.items() if k != "params"} == {
            "rate": (),
            "late": (),
        }
        assert set(up) == {"gradient", "elbo"}
        assert shapes(up["gradient"].value, skip=1) == expected
        assert up["elbo"].value.shape == (4,)
    else:
        assert shapes(message) == expected
        assert set(up) == {"theta", "loss"}
        assert shapes(up["theta"].value, skip=1) == expected
        assert up["loss"].value.shape == (4,)
    assert all(share.weight.shape == (4,) for share in up.values()), (
        "each share has one weight per client"
    )


@pytest.mark.parametrize("name", METHODS)
def test_nothing_local_is_sent(name: str) -> None:
    data = federation((5, 3, 6, 1))
    message, up, kept, program = exchange(METHODS[name][0](), data)
    local = {spec.name for spec in program.params if spec.is_local} | {
        s.name for s in program.latents.local_block.sites
    }
    paths = [*named_leaves(message), *named_leaves(up)]
    assert not [path for path in paths if any(f"'{name}'" in path for name in local)]
    own = {path.rsplit("'", 2)[-2] for path in named_leaves(kept)} - {"steps", "seen"}
    assert own <= local | {"first", "second"}
    if any(spec.is_local for spec in program.params):
        assert own
    else:
        assert own == set(), "a stateless client keeps nothing either"
    # a row per client: client code does not aggregate; the engine alone forms the sums
    assert all(leaf.shape[0] == 4 for leaf in named_leaves(up).values())


@pytest.mark.parametrize("name", METHODS)
def test_sizes_do_not_depend_on_rows_or_clients(name: str) -> None:
    make = METHODS[name][0]
    few, many = federation((5, 3)), federation((50, 30, 70))
    torch.manual_seed(0)
    (down, up, *_), (down_, up_, *_) = exchange(make(), few), exchange(make(), many)
    assert shapes(down) == shapes(down_)
    assert shapes(up, skip=1) == shapes(up_, skip=1)
    sizes = {11, 13, 37, *(n for n in few.counts.tolist()), *many.counts.tolist()} - {5, 3}
    assert not sizes & {d for shape in shapes(up, skip=1).values() for d in shape}, (
        "no dimension depends on the number of rows"
    )


TEN_ROUNDS: dict[
    str, tuple[Callable[[], Method], Shapes, set[str]]
] = {  # the update for K = 4; the client state
    "bfi": (
        lambda: hierfl.methods.bfi(regression, steps=1),
        {"shift": (4,), "precision": (4, 4)},
        set(),
    ),
    "fedep": (
        lambda: hierfl.methods.fedep(regression, draws=2, steps=1),
        {"shift": (4,), "precision": (4, 4), "improper": (), "effective": ()},
        {"shift", "precision", "mode", "slope", "loc"},
    ),
    "fedep shared": (
        lambda: hierfl.methods.fedep(regression, draws=2, steps=1, shared_factor=True),
        {"shift": (4,), "precision": (4, 4), "improper": (), "effective": ()},
        set(),
    ),
    "fedlaplace": (
        lambda: hierfl.methods.fedlaplace(
            regression, settle_draws=8, draws=64, target_ess=8, weighting_rounds=1
        ),
        {"log_marginal": (), "gradient": (4,), "hessian": (4, 4), "lost": ()},
        {"mode", "slope", "loc"},
    ),
    "pvi": (
        lambda: hierfl.methods.pvi(regression, draws=2, steps=1),
        {"shift": (4,), "precision": (4, 4), "improper": ()},
        {"shift", "precision", "mode", "slope", "loc"},
    ),
}


@pytest.mark.parametrize("name", TEN_ROUNDS)
def test_methods_of_few_rounds_send_gradients_and_hessians_in_global_sites(name: str) -> None:
    """The update holds values, gradients and Hessians in the K = 4 global unknowns.

    Its size is the same for 3 rows as for 70, and nothing in it belongs to a local site.
    """
    make, expected, stays = TEN_ROUNDS[name]
    (down, up, kept, program), (down_, up_, *_) = (
        exchange(make(), federation(n)) for n in ((5, 3), (50, 30, 70))
    )
    for sent in (up, up_):
        assert {share: tuple(of.value.shape[1:]) for share, of in sent.items()} == expected
    assert {path.rsplit("'", 2)[-2] for path in named_leaves(kept)} == stays
    local = {s.name for s in program.latents.local_block.sites}
    assert not [
        path
        for path in (*named_leaves(down), *named_leaves(up))
        if any(f"'{site}'" in path for site in local)
    ]
    assert shapes(down) == shapes(down_)


def two_stage() -> Method:
    return hierfl.methods.two_stage(regression, draws=100)


SUMMARIES: dict[
    str, tuple[Callable[[], Method], Shapes]
] = {  # a client's own numbers, for D = 2 and U = 0
    "two_stage": (two_stage, {"precision": (2, 2), "shift": (2,), "height": ()}),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_methods_that_disclose_summaries_send_only_what_they_declare(name: str) -> None:
    """A factor of the client's likelihood, and the client fields that the prior reads; not one number by row."""
    make, expected = SUMMARIES[name]
    for counts in ((5, 3), (50, 30, 70)):
        down, up, kept, program = exchange(make(), federation(counts))
        assert shapes(down) == {"loc": (2,), "covariance": (2, 2)}, "one Gaussian, the same for all"
        assert set(up) == {"factor", "raised", "misread"}
        assert isinstance(up["factor"], Each) and isinstance(up["raised"], Share)
        assert shapes(up["factor"].value, skip=1) == expected
        assert up["raised"].value.shape == (len(counts),)
        assert isinstance(up["misread"], Share) and up["misread"].value.shape == (len(counts),)
        own = {path.rsplit("'", 2)[-2] for path in named_leaves(kept)}
        assert own <= {"precision", "shift", "seen"}, "a client keeps its own factor, at most"
        local = {s.name for s in program.latents.local_block.sites}
        assert not [path for path in named_leaves(up) if any(f"'{site}'" in path for site in local)]


@pytest.mark.parametrize("name", SUMMARIES)
def test_weighing_sends_one_number_a_draw(name: str) -> None:
    run = federate(SUMMARIES[name][0](), federation())
    start = begin(run)
    message = run.server.down({**start.server, "stage": torch.tensor(WEIGH)}, Clock(3, 60))
    assert shapes(message) == {"loc": (2,), "covariance": (2, 2), "draws": (100, 4)}
    up, _ = client_round(run, run.client.phases, message, start.table, torch.arange(4), 3)
    assert {name: tuple(of.value.shape) for name, of in up.items()} == {"log_ratios": (4, 100)}


@pytest.mark.parametrize("name", [*METHODS, *TEN_ROUNDS, *SUMMARIES])
def test_a_method_discloses_what_it_declares(name: str) -> None:
    every: dict[str, Any] = {**METHODS, **TEN_ROUNDS, **SUMMARIES}
    method = every[name][0]()
    _, up, *_ = exchange(method, federation())
    alone = any(isinstance(of, Each) for of in up.values())
    assert method.discloses == ("summaries" if alone else "sums")


@pytest.mark.parametrize("name", [n for n in METHODS if n.startswith("fedsvi")])
def test_a_clients_update_does_not_depend_on_other_clients(name: str) -> None:
    data = federation()
    _, up, kept, _ = exchange(METHODS[name][0](), data)
    other = data.with_fields(y=torch.cat([data.fields["y"][:5], data.fields["y"][5:] + 3.0]))
    _, up_, kept_, _ = exchange(METHODS[name][0](), other)
    for tree, tree_ in ((up, up_), (kept, kept_)):
        for path, leaf in named_leaves(tree).items():
            assert torch.equal(leaf[0], named_leaves(tree_)[path][0]), path


def test_a_round_holds_no_other_clients_rows() -> None:
    """A model that records its batch sees the rows of one client, padded rows included."""
    seen: list[Tensor] = []

    def spy(batch: ClientBatch) -> None:
        seen.append(batch.x.detach().clone())
        with batch.clients():
            own = pyro.sample("own", dist.Normal(0.0, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)

    data = labeled()
    method = hierfl.methods.fedsvi(spy, guides.delta, batch_size=4, local_steps=2)
    run = federate(method, data, settings=hierfl.Settings(engine="sequential"))
    start = begin(run)
    seen.clear()
    for k in range(4):
        client_round(
            run,
            run.client.phases,
            run.server.down(start.server, Clock(0, 1)),
            _row(start.table, k),
            torch.tensor([k]),
            0,
        )
        assert seen
        assert {float(v) for x in seen for v in x.flatten()} == {float(k)}
        seen.clear()


def _row(table: Any, k: int) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v[k : k + 1], table)


def labeled() -> ClientData:
    """Return data in which every value of a row is its client's position."""
    data = federation((5, 3, 7, 1))
    x = data.row_client.to(torch.get_default_dtype())
    return data.with_fields(x=x[:, None].expand(-1, 2), y=x)


@pytest.mark.parametrize("size", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [3, 2], [3], [1, 3, 0]])
def test_padded_rows_repeat_the_clients_own_rows(
    size: int | None, unit: Any, ids: list[int]
) -> None:
    data, chosen = labeled(), torch.tensor(ids)
    phase = Phase(lambda lane, message, batch: lane, 3, unit, size)
    for tensors, _ in steps(data, chosen, phase, seed=1, at=(0, 0)):
        batch = batch_of(tensors, phase)
        owner = chosen[:, None].expand(-1, batch.num_rows).to(torch.get_default_dtype())
        assert torch.equal(batch.fields["y"], owner)
        assert torch.equal(batch.fields["x"][..., 1], owner)
        assert torch.equal(
            batch.client_fields["height"][:, 0], data.client_fields["height"][chosen]
        )
    whole = full_batch(data, chosen)
    assert whole.rows is None or bool((whole.rows.sum(1) == data.counts[chosen]).all())


def test_keys_of_a_batch_depend_only_on_its_clients() -> None:
    data = federation()
    one = gather(
        data,
        torch.tensor([2]),
        torch.tensor([[8, 9]]),
        None,
        keys_of(data, torch.tensor([2]), 7, 1, 2),
    )
    among = full_batch(data, torch.arange(4), seed=7, at=(1, 2))
    assert torch.equal(one.key[0], among.key[2])
    assert torch.equal(one.shared_key, among.shared_key)
    assert not torch.equal(among.key[0], among.key[1])
    assert torch.equal(one.key, noise.fold(noise.client_keys(["east"]), 7, 0, 1, 2))
