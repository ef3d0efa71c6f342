"""Nodes that are late, twice, gone, wrong or hostile: the round goes on without them, and its log says so."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientBatch, ClientData, Fit, methods
from hierfl.core.trees import named_leaves, tree_leaves
from hierfl.methods.stages import weighting
from hierfl.methods.stages.checks import refused_message
from hierfl.methods.stages.state import LEAST, Belief, is_definite
from hierfl.nodes.client_state import kept
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.messages import Answer, Refused, from_bytes, to_bytes
from hierfl.nodes.node import answer, node
from hierfl.nodes.run import TooFewNodes, fit_nodes
from hierfl.optimizers import SGD
from tests.methods.cases import CASES
from tests.methods.cases import shared as _shared
from tests.nodes.one_process import Machines, machines, rows
from tests.programs import assert_close, fit, regression

Asked = Callable[[Mapping[str, bytes]], Iterable[Answer]]


def plain() -> Any:
    return methods.fedavg(_shared(), optimizer=SGD(0.05), steps=3, batch_size=5)


def stateful() -> Any:
    return methods.local_only(_shared(), optimizer=SGD(0.05), steps=3, batch_size=5)


@pytest.fixture
def around(tmp_path: Path) -> Machines:
    return machines(plain(), rows(), tmp_path)


def over(around: Machines, ask: Asked, **options: Any) -> FitOverNodes:
    return fit_nodes(plain(), around.agreement, ask, **{"rounds": 3, **options})


def assert_same(one: FitOverNodes, two: Fit) -> None:
    assert_close(one.progress.server, two.progress.server, 1e-12)


def test_answers_in_another_order_twice_late_and_from_strangers_change_nothing(
    around: Machines,
) -> None:
    late: list[Answer] = []

    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        given = list(around.ask(contents))
        yield from late  # of the round before
        late[:] = given
        for one in reversed(given):
            yield one
            yield one
        yield Answer("stranger", given[0].content)
        yield Answer("east", given[1].content)  # of north

    found = over(around, ask)
    assert_same(found, fit(plain(), rows(), rounds=3))
    assert found.history["clients"].tolist() == [4, 4, 4]


def test_a_client_that_is_asked_again_gives_the_same_answer_and_moves_once(tmp_path: Path) -> None:
    around = machines(stateful(), rows(), tmp_path)
    fit_nodes(stateful(), around.agreement, around.ask, rounds=2)
    name, content = around.asked[-1]
    after = kept(around.nodes[name])
    assert answer(around.nodes[name], content) == around.sent[-1][1]
    assert_close(kept(around.nodes[name]).after, after.after, 0.0)
    with pytest.raises(Refused, match="cannot go back to its state after round -1"):
        answer(around.nodes[name], around.asked[0][1])


def test_a_round_goes_on_without_nodes_that_do_not_answer(around: Machines) -> None:
    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        for one in around.ask({k: v for k, v in contents.items() if k != "north"}):
            gone = one.client == "south" and len(around.sent) > 3
            yield Answer("south", None, "no answer in 9 s") if gone else one

    found = over(around, ask, fewest=2)
    assert found.history["clients"].tolist() == [3, 2, 2]
    left_out = [
        {one["client"]: one["reason"] for one in record} for record in found.history["left_out"]
    ]
    assert left_out[0] == {"north": "it did not answer"}
    assert left_out[2] == {"north": "it did not answer", "south": "no answer in 9 s"}
    without = fit(plain(), rows().select(["east", "south", "west"]), rounds=1)
    assert found.history["loss"][0] == pytest.approx(without.history["loss"][0])


def test_a_silent_node_of_many_rows_ends_no_round(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    counts = (("a", 20), ("b", 20), ("c", 60_000))
    data = ClientData.from_clients(
        {name: {"x": torch.randn(n, 2, generator=g), "y": torch.zeros(n)} for name, n in counts},
        client_fields={"height": torch.zeros(3)},
    )
    method = methods.fedsvi(regression, batch_size=5)
    around = machines(method, data, tmp_path)

    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        return around.ask({name: of for name, of in contents.items() if name != "c"})

    found = fit_nodes(method, around.agreement, ask, rounds=1, fewest=2)
    assert found.history["clients"].tolist() == [2]


def test_too_few_nodes_end_the_run_and_it_goes_on_from_its_checkpoint(
    around: Machines, tmp_path: Path
) -> None:
    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        return around.ask(contents if len(around.sent) < 8 else {})

    run = tmp_path / "run"
    with pytest.raises(
        TooFewNodes, match=r"round 2: 0 clients answered, and 1 are needed \('east'"
    ):
        over(around, ask, checkpoint=run)
    with pytest.raises(ValueError, match="already holds a run"):
        over(around, around.ask, checkpoint=run)
    found = over(around, around.ask, checkpoint=run, resume=True)
    assert_same(found, fit(plain(), rows(), rounds=3))
    assert len(found.history) == 3


def test_a_method_that_needs_every_client_does_not_go_on_without_one(tmp_path: Path) -> None:
    method = CASES["clustered_fl"].make()
    around = machines(method, rows(), tmp_path)
    with pytest.raises(TooFewNodes, match="needs every client in each round"):
        fit_nodes(
            method,
            around.agreement,
            lambda contents: around.ask({k: v for k, v in contents.items() if k != "west"}),
            rounds=1,
        )


def test_a_node_that_was_stopped_goes_on_from_its_folder(tmp_path: Path) -> None:
    around = machines(stateful(), rows(), tmp_path)

    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        for k, (name, content) in enumerate(contents.items()):
            part = rows().select([name])
            anew = node(stateful(), part, around.agreement, tmp_path / str(k))
            yield Answer(name, answer(anew, content))

    fit_nodes(stateful(), around.agreement, ask, rounds=3)
    here = named_leaves(fit(stateful(), rows(), rounds=3).progress.table)
    for position, name in enumerate(rows().names):
        for key, value in named_leaves(kept(around.nodes[name]).after).items():
            torch.testing.assert_close(value, here[key][position], rtol=0.0, atol=1e-12)


Change = Callable[[Any], Any]


def remade(change: Change = lambda up: up, **about: Any) -> Callable[[bytes], bytes]:
    """Return what sends another update, or says something else of it."""

    def lied(content: bytes) -> bytes:
        found = from_bytes(content, most=1 << 20)
        return to_bytes(change(found.tree), {**found.about, **about})

    return lied


def of_theta(values: Change, weights: Change = lambda w: w) -> Callable[[bytes], bytes]:
    """Return what sends other values and weights of theta."""

    def change(up: Any) -> Any:
        theta, weight = up["theta"]
        return {**up, "theta": ({k: values(v) for k, v in theta.items()}, weights(weight))}

    return remade(change)


def same(value: Any) -> Any:
    return value


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "NaN": (of_theta(lambda v: v * torch.nan), "is not finite"),
    "1e30": (of_theta(lambda v: v * 1e30), "above 1e"),
    "a negative weight": (of_theta(same, lambda w: -w), "the weight of theta is -5"),
    "a huge weight": (of_theta(same, lambda w: 1e20 * w), "above 1e"),
    "a name too many": (remade(lambda up: {**up, "more": torch.ones(1)}), "nobody asked for"),
    "a name too few": (remade(lambda up: {"theta": up["theta"]}), "lacks"),
    "another dtype": (of_theta(lambda v: v.float()), "float32"),
    "another round": (remade(round=99), "round 99"),
    "another client": (remade(client="east"), "client east"),
    "another run": (remade(run="x"), "of run x"),
    "a gigabyte": (lambda c: c + bytes(1 << 22), "bytes"),
    "no message": (lambda c: b"\x80\x04.", "not a message"),
}


def test_a_node_that_fails_keeps_its_state(tmp_path: Path) -> None:
    wild = methods.local_only(_shared(), optimizer=SGD(1e200), steps=3, batch_size=5)
    around = machines(wild, rows(), tmp_path)
    with pytest.raises(TooFewNodes, match="client 'east'") as error:
        fit_nodes(wild, around.agreement, around.ask, rounds=1)
    assert "round 0" in str(error.value)
    assert kept(around.nodes["east"]).round == -1


def test_no_row_no_label_and_no_client_state_crosses(tmp_path: Path) -> None:
    around = machines(methods.ditto(_shared(), steps=2, batch_size=None), rows(), tmp_path)
    method = methods.ditto(_shared(), steps=2, batch_size=None)
    fit_nodes(method, around.agreement, around.ask, rounds=2)
    for name, content in around.sent:
        sent, held, own = (
            {float(v) for leaf in tree_leaves(tree) for v in leaf.flatten()}
            for tree in (
                from_bytes(content, most=1 << 20).tree,
                rows().select([name]).fields,
                kept(around.nodes[name]).after,
            )
        )
        marks = {v for v in held | own if v not in (0.0, 1.0)}
        assert marks and not sent & marks


def test_a_run_goes_on_where_the_servers_draws_have_collapsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weight on one draw gives no covariance, which every node refused while one process went on."""
    sampled = weighting.sample  # type: ignore[attr-defined]
    collapsed: list[int] = []

    def on_one_draw(*of: Any, **how: Any) -> Any:
        drawn = sampled(*of, **how)
        if how["final"] or collapsed:
            return drawn
        collapsed.append(len(drawn.draws))
        one = torch.arange(len(drawn.draws)) == 0
        return drawn._replace(log_weights=torch.where(one, 0.0, -torch.inf))

    def pooled(batch: ClientBatch) -> None:
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Poisson(level.exp()), obs=batch.y)

    monkeypatch.setattr(weighting, "sample", on_one_draw)
    method = methods.two_stage(pooled, draws=200)
    counts = {name: {"y": torch.arange(12.0) % 4 + k} for k, name in enumerate(("a", "b", "c"))}
    around = machines(method, ClientData.from_clients(counts), tmp_path)
    fitted = fit_nodes(method, around.agreement, around.ask)
    assert collapsed and fitted.progress.server.is_done
    assert not any(record["left_out"] for record in fitted.progress.history)


@pytest.mark.parametrize("rank", [0, 1, 3, 8])
@pytest.mark.parametrize("units", [1.0, 1e8])
def test_a_node_takes_every_belief_that_a_server_makes(rank: int, units: float) -> None:
    g = torch.Generator().manual_seed(rank)
    unit = units ** (torch.rand(8, generator=g, dtype=torch.float64) - 0.5)
    draws = torch.randn(rank, 8, generator=g, dtype=torch.float64) * unit
    belief = dict(vars(Belief.of(torch.zeros(8), draws.mT @ draws)))
    assert refused_message(belief, belief, 0, 8) is None
    assert (rank == 8) == is_definite(draws.mT @ draws, LEAST)
    negative = {**belief, "covariance": -belief["covariance"]}
    assert "positive definite" in str(refused_message(negative, belief, 0, 8))
