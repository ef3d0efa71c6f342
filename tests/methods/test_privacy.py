"""What clients keep, and that a round of one client sees the rows of no other client."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, Clock, Phase, full_batch, guides, methods
from hierfl.core import noise
from hierfl.core.trees import named_leaves
from hierfl.data.batch import gather, keys_of
from hierfl.engine.chunks import client_round
from hierfl.engine.federation import federate
from hierfl.engine.minibatches import batch_of, steps
from hierfl.engine.rounds import begin
from hierfl.methods.stages.state import WEIGHT
from tests.methods.cases import CASES, CROSSES, METHODS
from tests.methods.test_messages import exchange, names_of_local_things, shapes
from tests.programs import alone, federation, logistic

FEW = ("fedavg", "pfedme", "fedabml", "pfedbred", "pfedbayes")


@pytest.mark.parametrize("name", [*FEW, *(f"fedsvi {guide}" for guide in CROSSES)])
def test_a_client_keeps_local_params_and_the_state_of_their_optimizer(name: str) -> None:
    message, up, kept, program = exchange(METHODS[name](), federation((5, 3, 6, 1)))
    listed = CASES[name].up or {}
    assert shapes(message["params"] if "fedsvi" in name else message) == (
        listed["gradient"] if "fedsvi" in name else listed["theta"]
    )
    if "fedsvi" in name:
        rest = {k: tuple(v.shape) for k, v in message.items() if k != "params"}
        assert rest == {"rate": (), "late": ()}
    own = set(shapes(kept)) - {"steps", "seen"}
    assert own <= names_of_local_things(program) | {"first", "second"}
    assert bool(own) == any(spec.is_local for spec in program.params)
    # a row per client: client code does not aggregate; the engine alone forms the sums
    assert all(leaf.shape[0] == 4 for leaf in named_leaves(up).values())


def test_weighting_sends_one_scalar_per_draw() -> None:
    run = federate(methods.two_stage(logistic, draws=100), federation())
    start = begin(run)
    message = run.server.down(start.server.at(WEIGHT), Clock(3, 60))
    assert shapes(message) == {"loc": (2,), "covariance": (2, 2), "draws": (100, 2)}
    up, _ = client_round(run, run.client.phases, message, start.table, torch.arange(4), 3)
    assert {name: tuple(of.value.shape) for name, of in up.items()} == {"log_ratios": (4, 100)}


@pytest.mark.slow("fedsvi conditional")
@pytest.mark.parametrize("name", [f"fedsvi {guide}" for guide in CROSSES])
def test_a_clients_update_does_not_depend_on_other_clients(name: str) -> None:
    data = federation()
    _, up, kept, _ = exchange(METHODS[name](), data)
    other = data.with_fields(y=torch.cat([data.fields["y"][:5], data.fields["y"][5:] + 3.0]))
    _, up_, kept_, _ = exchange(METHODS[name](), other)
    for tree, tree_ in ((up, up_), (kept, kept_)):
        for path, leaf in named_leaves(tree).items():
            assert torch.equal(leaf[0], named_leaves(tree_)[path][0]), path


def test_a_round_holds_no_other_clients_rows() -> None:
    """A model that records its batch sees the rows of one client, padded rows included."""
    seen: list[Tensor] = []

    def spy(batch: ClientBatch) -> None:
        seen.append(batch.x.detach().clone())
        alone(batch)

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
def test_padded_rows_repeat_the_clients_own(size: int | None, unit: Any, ids: list[int]) -> None:
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
