"""One node of four that fails, lies or is silent before the rounds: it is named, and the run goes on without it."""

import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from flwr import app as flwr

import hierfl
from hierfl import methods
from hierfl.engine.rounds import absent_from
from hierfl.flower import apps
from hierfl.formulas.odd_answers import odd_answers
from hierfl.nodes import FitOverNodes, TooFewNodes, agreement, in_process
from hierfl.nodes.messages import Refused
from hierfl.nodes.node import node
from hierfl.optimizers import SGD
from hierfl.program.labels import codes_of
from tests.flower.test_apps import NAMES, Grid, identity
from tests.formulas.frames import patients
from tests.methods.cases import CASES, shared
from tests.nodes.one_process import rows
from tests.programs import assert_close, regression

pytestmark = pytest.mark.usefixtures("without_copies")

__all__ = ["identity"]  # a fixture of every test here

TEXT = "y ~ scale(age) + sex + (1 | site) + (1 | region)"
Change = Callable[[Any], Any]  # of the JSON that a node answers; None: it does not answer


class Bad(Grid):
    """Changes what north answers to messages of a kind."""

    def __init__(self, app: Any, folder: Path, kind: str, change: Change) -> None:
        super().__init__(app, folder)
        self.kind, self.change = kind, change

    def pull_messages(self, ids: Iterable[str]) -> Iterable[Any]:
        kinds = {name: message.metadata.message_type for name, message in self.waits.items()}
        for reply in super().pull_messages(ids):
            kind = kinds[reply.metadata.reply_to_message_id]
            if reply.metadata.src_node_id == 12 and kind == f"query.{self.kind}":
                record = reply.content.config_records["hierfl"]
                said = self.change(json.loads(record["payload"]))
                if said is None:
                    continue
                content = said if isinstance(said, bytes) else json.dumps(said).encode()
                reply.content.config_records["hierfl"] = flwr.ConfigRecord({"payload": content})
            yield reply


def over(grid: Any, made: Any) -> None:
    made.server(grid, next(iter(grid.contexts.values())))


ANSWERS: dict[tuple[str, str], Change] = {
    ("introduce", "silent"): lambda said: None,
    ("introduce", "deep"): lambda said: b"[" * 100_000,
    ("introduce", "another dtype"): lambda said: {
        **said,
        "form": {**said["form"], "dtype": "torch.float32"},
    },
    ("agree", "silent"): lambda said: None,
    ("agree", "another start"): lambda said: {**said, "start": "0" * 64},
}


@pytest.mark.slow("agree-silent-apfl")
@pytest.mark.parametrize(
    ("kind", "what", "name"),
    [*((*key, "apfl") for key in ANSWERS), ("agree", "silent", "clustered_fl")],
)
def test_a_run_goes_on_without_a_node_that_fails_before_it(
    kind: str, what: str, name: str, tmp_path: Path
) -> None:
    """`clustered_fl` needs every client of a run, and agrees on one of three."""
    done: list[FitOverNodes] = []
    made = apps(
        CASES[name].make(),
        lambda context: rows().select([str(context.node_config["client"])]),
        done=done.append,
        nodes=4,
        rounds=2,
        timeout=0.1,
    )
    change = ANSWERS[kind, what]
    with pytest.warns(UserWarning, match=r"(node 12|client 'north'|client 'a) "):
        over(Bad(made.client, tmp_path, kind, change), made)
    others = hierfl.fit(
        CASES[name].make(),
        rows().select([name for name in NAMES if name != "north"]),
        rounds=2,
        settings=hierfl.Settings(compile=False),
        progress=False,
    )
    counted = done[0].history["clients"].tolist()
    if "north" not in done[0].clients:
        assert counted == [3, 3]
        assert_close(done[0].message, others.message)
    else:  # it has agreed, and its answer to that was lost
        assert name == "apfl" and counted in ([3, 3], [4, 4])


def four() -> dict[str, pd.DataFrame]:
    parts = (part for _, part in patients(rows=60).groupby("site"))
    return dict(zip(NAMES, parts, strict=False))


@pytest.mark.filterwarnings("ignore:k-hat")
def test_a_formula_over_flower_without_a_node_of_another_kind(tmp_path: Path) -> None:
    parts, done = four(), list[FitOverNodes]()
    sums = {"count": 60, "total": 1.0, "squares": 1.0}
    number: dict[str, Any] = {
        "kind": "number",
        "unit": "",
        "counts": None,
        "declared": [],
        "sums": sums,
    }

    def change(said: Any) -> Any:
        if isinstance(said.get("answer"), dict) and "sex" in said["answer"]:
            said["answer"]["sex"].update(number)
        return said

    made = apps(
        hierfl.formula(TEXT, clients="site"),
        lambda context: {(name := str(context.node_config["client"])): parts[name]},
        done=done.append,
        nodes=4,
        rounds=1,
        timeout=0.1,
        disclose="sums",
    )
    with pytest.warns(UserWarning, match=r"node 12 is left out: the kind of column 'sex' is 'num"):
        over(Bad(made.client, tmp_path, "schema", change), made)
    assert done[0].clients == ("east", "south", "west")


def test_without_a_majority_nobody_is_left_out() -> None:
    from hierfl.formulas.answers import OfColumn
    from hierfl.formulas.columns import ColumnSums
    from hierfl.formulas.questions import Question

    names = {"x": OfColumn("category", counts={"1": 9})}
    numbers = {"x": OfColumn("number", sums=ColumnSums(9, 9.0, 9.0))}
    assert odd_answers(Question("columns"), {"a": names, "b": numbers}) == {}
    found = odd_answers(Question("columns"), {"a": names, "b": numbers, "c": names})
    assert found == {"b": "the kind of column 'x' is 'number', and 'category' at most others"}


def test_a_rehearsal_goes_on_without_a_node_whose_policy_forbids_it(tmp_path: Path) -> None:
    (tmp_path / "north").mkdir()
    (tmp_path / "north" / "policy.toml").write_text('methods = ["pvi"]')
    method = methods.fedavg(shared(), optimizer=SGD(0.05), steps=3, batch_size=5)
    with pytest.warns(UserWarning, match=r"client 'north' is left out: .* does not allow method"):
        fit = hierfl.nodes.fit(method, in_process(rows(), tmp_path), rounds=2)
    assert fit.clients == ("east", "south", "west")
    with pytest.warns(UserWarning, match="client 'north' is left out"):
        again = hierfl.nodes.fit(
            regression, in_process(rows(), tmp_path), disclose="sums", rounds=1
        )
    assert [one["client"] for one in again.history["left_out"][0]] == ["north"]
    with pytest.raises(TooFewNodes, match="3 nodes introduce a client, and 4 are needed"):
        hierfl.nodes.fit(method, in_process(rows(), tmp_path, fewest=4), rounds=2)


def by_region(batch: Any) -> None:
    """A hierarchy with an effect of each of four regions, which rows name by their codes."""
    center = pyro.sample("center", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(center, spread))
        with batch.data():
            pyro.sample("y", dist.Normal(level + effect[batch.region], 1.0), obs=batch.y)


@pytest.mark.slow("below 0")
@pytest.mark.parametrize(
    ("codes", "model"),
    [
        ((-(1 << 31), 3), by_region),
        ((0, 10), methods.two_stage(by_region, draws=200)),
    ],
    ids=["below 0", "above"],
)
def test_one_nodes_codes_neither_end_a_run_nor_choose_its_method(
    codes: tuple[int, int], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    regions, y = torch.arange(80) % 4, torch.randn(80, generator=g)
    data = hierfl.ClientData.from_arrays(list(np.repeat(NAMES, 20)), y=y, region=regions)

    def lied(of: hierfl.ClientData) -> dict[str, tuple[int, int]]:
        return {"region": codes} if of.names == ("north",) else codes_of(of)

    monkeypatch.setattr(agreement, "codes_of", lied)
    with pytest.warns(UserWarning, match="client 'north' is left out: no other client has its"):
        fit = hierfl.nodes.fit(model, in_process(data, tmp_path))
    assert fit.clients == ("east", "south", "west") and fit.method.name == "two_stage"


def test_codes_for_which_a_model_has_no_place_are_refused(tmp_path: Path) -> None:
    """A server may say that others have them."""
    data = hierfl.ClientData.from_arrays(["a"] * 20, y=torch.zeros(20), region=torch.arange(20) % 4)
    honest = agreement.Agreement.between([agreement.Introduction.of(data)])
    lied, method = replace(honest, codes={"region": (0, 1 << 31)}), methods.two_stage(by_region)
    with pytest.raises(Refused, match="no place for codes"):
        node(method, data, lied, tmp_path)
    node(method, data, honest, tmp_path)


def test_a_method_that_needs_every_client_begins_again_without_one_that_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hierfl.nodes import stations

    asked: Any = stations.answer  # type: ignore[attr-defined]

    def lied(one: Any, content: bytes) -> bytes:
        if one.client == "west":
            raise Refused("it is away")
        return b"no message" if one.client == "north" else asked(one, content)

    monkeypatch.setattr(stations, "answer", lied)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit = hierfl.nodes.fit(CASES["clustered_fl"].make(), in_process(rows(), tmp_path), rounds=2)
    assert fit.clients == ("east", "south") and len(fit.history) == 2
    for name, why in (("north", "it is not a message"), ("west", "it is away")):
        begins = f"client '{name}' is left out, and the run begins again: {why}"
        assert sum(begins in str(one.message) for one in seen) == 1
        assert absent_from(fit.progress.history)[name].startswith(why)
    three = rows().select(["east", "south"])
    here = hierfl.fit(
        CASES["clustered_fl"].make(), three, rounds=2, settings=hierfl.Settings(compile=False)
    )
    assert_close(fit.message, here.message)
    with pytest.raises(
        TooFewNodes, match=r"clustered_fl needs every client .*'north': it is not a message"
    ):
        hierfl.nodes.fit(
            CASES["clustered_fl"].make(),
            in_process(rows(), tmp_path / "other"),
            rounds=2,
            checkpoint=tmp_path / "server",
        )
