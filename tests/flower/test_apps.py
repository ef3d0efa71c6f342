"""The apps of a run on Flower, with a grid in this process; deployments are run by scripts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr import app as flwr

from hierfl import Settings, methods
from hierfl.flower import Apps, apps
from hierfl.flower.payloads import PAYLOAD, RECORD, WRONG
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.run import TooFewNodes
from hierfl.optimizers import SGD
from hierfl.runs.choice import choose
from tests.methods.cases import shared as _shared
from tests.nodes.one_process import rows
from tests.programs import assert_close, fit, logistic, regression

pytestmark = pytest.mark.usefixtures("without_copies")

NAMES = ("east", "north", "south", "west")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process what Flower gives to a process of an app."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def method() -> Any:
    return methods.apfl(_shared(), optimizer=SGD(0.05), steps=3, batch_size=5)


class Grid:
    """Hands messages to the client app, one context a node; nodes in `gone` do not answer."""

    def __init__(self, app: Any, folder: Path, gone: Iterable[int] = ()) -> None:
        self.app, self.gone, self.count = app, set(gone), 0
        self.waits: dict[str, Any] = {}
        self.contexts = {
            number: flwr.Context(
                run_id=1,
                node_id=number,
                node_config={"client": name, "folder": str(folder / name)},
                state=flwr.RecordDict(),
                run_config={},
            )
            for number, name in enumerate(NAMES, start=11)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = str(self.count)
            self.waits[str(self.count)] = message
            yield str(self.count)

    def pull_messages(self, ids: Iterable[str]) -> Iterable[Any]:
        for name in sorted(set(ids) & self.waits.keys(), key=int):
            message = self.waits.pop(name)
            number = message.metadata.dst_node_id
            if number not in self.gone or not message.metadata.message_type.startswith("train"):
                yield self.app(message, self.contexts[number])


def made(done: list[FitOverNodes], **options: Any) -> Apps:
    return apps(
        method(),
        lambda context: rows().select([str(context.node_config["client"])]),
        done=done.append,
        **{"nodes": 4, "rounds": 3, "timeout": 0.1, **options},
    )


def run(made_: Apps, grid: Any) -> None:
    made_.server(grid, next(iter(grid.contexts.values())))


@pytest.mark.parametrize("renew", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_on_flower_is_a_run_here(renew: bool, tmp_path: Path) -> None:
    """Also in a new process at each message, Flower's default: what a node has agreed on is in its folder."""
    done: list[FitOverNodes] = []
    pair = made(done)
    client = (lambda message, context: made([]).client(message, context)) if renew else pair.client
    run(pair, Grid(client, tmp_path))
    here = fit(method(), rows(), rounds=3)
    assert_close(done[0].progress.server, here.progress.server, 1e-12)
    assert done[0].history["clients"].tolist() == [4, 4, 4]


def test_nodes_that_do_not_answer_are_named(tmp_path: Path) -> None:
    done: list[FitOverNodes] = []
    pair = made(done)
    run(pair, Grid(pair.client, tmp_path, gone=[12]))
    left_out = done[0].history["left_out"]
    assert [one["client"] for record in left_out for one in record] == ["north"] * 3
    assert done[0].history["clients"].tolist() == [3, 3, 3]


def test_what_a_node_cannot_do_is_said_at_the_server(tmp_path: Path) -> None:
    pair = made([], fewest=4)
    grid = Grid(pair.client, tmp_path)
    grid.contexts[13].node_config.pop("folder")
    with pytest.raises(
        TooFewNodes, match=r"3 nodes introduce .* 4 are needed \(node 13: .*names no folder"
    ):
        run(pair, grid)
    with pytest.raises(TooFewNodes, match=r"4 nodes are connected after 0\.1 s, and 5 are needed"):
        run(made([], nodes=5), grid)


def test_an_introduction_tells_no_row(tmp_path: Path) -> None:
    pair = made([])
    grid = Grid(pair.client, tmp_path)
    message = flwr.Message(
        flwr.RecordDict({"hierfl": flwr.ConfigRecord({"payload": b""})}),
        dst_node_id=11,
        message_type="query.introduce",
    )
    (reply,) = grid.pull_messages(grid.push_messages([message]))
    told = json.loads(reply.content.config_records["hierfl"]["payload"])
    assert told["client"] == "east" and told["rows"] == 7
    values = {
        float(v) for field in rows().select(["east"]).fields.values() for v in field.flatten()
    }
    numbers = {v for v in values if v not in (0.0, 1.0)}
    assert numbers and not any(f"{v}" in json.dumps(told["form"]) for v in numbers)


def test_a_model_runs_by_the_method_that_fit_chooses(tmp_path: Path) -> None:
    done: list[FitOverNodes] = []
    data = rows()
    pair = apps(
        logistic,
        lambda context: data.select([str(context.node_config["client"])]),
        done=done.append,
        nodes=4,
        rounds=2,
        disclose="sums",
    )
    run(pair, Grid(pair.client, tmp_path))
    expected = choose(logistic, data, settings=Settings(disclose="sums", on_client_error="skip"))
    assert done[0].chosen == expected.why
    here = fit(expected.method, data, rounds=2)
    assert_close(done[0].progress.server, here.progress.server)


def test_a_method_that_discloses_more_is_refused() -> None:
    with pytest.raises(ValueError, match="disclose is 'sums', and method 'two_stage' shows"):
        apps(
            methods.two_stage(regression),
            lambda context: rows(),
            done=print,
            nodes=4,
            disclose="sums",
        )


@pytest.mark.parametrize(
    "key", ["polcy", "Policy", "min_rows", "min-rows", "min_cuont", "aprove", "HIERFL_MIN_COUNT"]
)
def test_a_misspelled_key_in_a_nodes_configuration_stops_it(key: str, tmp_path: Path) -> None:
    """It would else go unread, and the default policy hold."""
    pair = made([])
    grid = Grid(pair.client, tmp_path)
    for number, more in ((11, {}), (12, {key: "ask"})):
        message = flwr.Message(
            flwr.RecordDict({RECORD: flwr.ConfigRecord({PAYLOAD: b""})}),
            dst_node_id=number,
            message_type="query.introduce",
        )
        message.metadata.__dict__["_message_id"] = "1"
        grid.contexts[number].node_config.update(more)
        record = pair.client(message, grid.contexts[number]).content.config_records[RECORD]
        assert (PAYLOAD in record) is (number == 11)
    assert f"has '{key}': a policy is named as 'policy'" in str(record[WRONG])


@pytest.mark.slow
def test_nodes_with_policies_are_asked_over_flower(tmp_path: Path) -> None:
    found: list[Any] = []

    def done(fit: FitOverNodes) -> None:
        found.append(fit.predict(draws=1))

    pair = apps(
        method(),
        lambda context: rows().select([str(context.node_config["client"])]),
        done=done,
        nodes=4,
        rounds=2,
    )
    grid = Grid(pair.client, tmp_path)
    (tmp_path / "west.toml").write_text('may_leave = ["predictions", "rows"]\nmin_count = 2\n')
    grid.contexts[14].node_config["policy"] = str(tmp_path / "west.toml")
    run(pair, grid)
    assert list(found[0].given) == ["west"]
    assert (
        found[0].withheld["east"]
        == "the node's policy lets no predictions leave: may_leave lacks 'predictions'"
    )
    grid.contexts[14].node_config["policy"] = str(tmp_path / "other.toml")
    (tmp_path / "other.toml").write_text('methods = ["two_stage"]\n')
    with pytest.warns(UserWarning, match=r"node 14 is left out: .* does not allow method 'apfl'"):
        run(pair, grid)
    assert found[1].withheld.keys() == {"east", "north", "south"}
    (tmp_path / "small.toml").write_text("bytes_a_request = 1\n")
    grid = Grid(pair.client, tmp_path / "small")
    grid.contexts[14].node_config["policy"] = str(tmp_path / "small.toml")
    with pytest.warns(UserWarning, match="is left out: .*allows 1 .bytes_a_request"):
        run(pair, grid)
