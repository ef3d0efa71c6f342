"""Secure aggregation by Flower's SecAgg+: the same numbers, and a server that sees masked updates alone."""

import io
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.error import Error
from scipy.stats import kstest

from hierfl import Method, Share, methods
from hierfl.core.trees import named_leaves
from hierfl.engine.exact_sums import parts_of, size_of, sums_of
from hierfl.flower import apps
from hierfl.flower.secure import masked
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.messages import Refused, from_bytes, to_bytes
from hierfl.nodes.run import TooFewNodes
from hierfl.optimizers import SGD
from tests.flower.test_apps import Grid, identity
from tests.flower.test_apps import method as apfl
from tests.methods.cases import shared as _shared
from tests.nodes.one_process import rows
from tests.programs import assert_close, fit, logistic, regression

pytestmark = pytest.mark.usefixtures("without_copies")

__all__ = ["identity"]  # a fixture


class Watching(Grid):
    """Keeps what nodes answer; nodes in `gone` are lost when they are asked for their masked updates."""

    def __init__(self, app: Any, folder: Path, gone: Iterable[int] = ()) -> None:
        super().__init__(app, folder, gone)
        self.said: list[Message] = []

    def pull_messages(self, ids: Iterable[str]) -> Iterable[Any]:
        answers = list(super().pull_messages(ids))
        self.said += answers
        return answers

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float) -> Iterable[Any]:
        answers = []
        for sent in messages:
            message = deepcopy(sent)  # each node gets bytes of its own
            self.count += 1
            number = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(self.count)
            if number in self.gone and "fitins.config" in message.content.config_records:
                continue
            try:
                answer = self.app(message, self.contexts[number])
            except Exception as error:  # as Flower's processes do
                answer = Message(Error(code=2, reason=str(error)), reply_to=message)
            answers.append(answer)
        self.said += answers
        return answers


def run(
    method: Method,
    folder: Path,
    *,
    gone: Iterable[int] = (),
    made_grid: Any = None,
    **options: Any,
) -> Any:
    done: list[FitOverNodes] = []
    made = apps(
        method,
        lambda context: rows().select([str(context.node_config["client"])]),
        done=done.append,
        nodes=4,
        timeout=0.1,
        secure=True,
        **options,
    )
    grid: Any = Watching(made.client, folder, gone)
    if made_grid is not None:
        made_grid(grid)
    made.server(grid, next(iter(grid.contexts.values())))
    return done[0], grid


def ways() -> dict[str, Method]:
    return {
        "apfl": apfl(),
        "fedsvi": methods.fedsvi(regression),
        "scaffold": methods.scaffold(_shared(), optimizer=SGD(0.05), steps=3),
        "pvi": methods.pvi(logistic, draws=2, steps=1),
    }


@pytest.mark.slow("fedsvi", "scaffold")
@pytest.mark.parametrize(
    "name", ["apfl", "fedsvi", "scaffold", pytest.param("pvi", marks=pytest.mark.slow)]
)
def test_the_numbers_are_those_of_a_run_without_it(name: str, tmp_path: Path) -> None:
    method = ways()[name]
    fitted, _ = run(method, tmp_path, rounds=2)
    here = fit(method, rows(), rounds=2)
    assert fitted.history["clients"].tolist() == [4, 4]
    assert_close(fitted.progress.server, here.progress.server, 1e-7)


def test_no_update_is_in_what_nodes_send(tmp_path: Path) -> None:
    """Masked, the numbers are spread over their whole range; the plain parts lie in half a percent of it."""
    _, grid = run(apfl(), tmp_path, rounds=1)
    sent = masked_numbers(grid)
    assert len(sent) == 4 and is_masked(np.concatenate(sent))
    records = [m.content.config_records for m in grid.said]
    plain = [found["hierfl"]["payload"] for found in records if "hierfl" in found]
    assert len(plain) == 12  # who they are, what they start from, and that the run has ended
    assert not any(b"theta" in payload for payload in plain)


def test_a_lost_node_is_named_and_the_sum_is_that_of_the_others(tmp_path: Path) -> None:
    method = methods.fedavg(_shared(), optimizer=SGD(0.05), steps=3, batch_size=5)
    fitted, _ = run(method, tmp_path, gone=[12], rounds=1)
    others = rows().select(["east", "south", "west"])
    here = fit(method, others, rounds=1)
    assert [one["client"] for one in fitted.history["left_out"][0]] == ["north"]
    assert_close(fitted.message, here.message)


def test_too_few_to_unmask(tmp_path: Path) -> None:
    with pytest.raises(TooFewNodes, match="too few nodes were left to unmask"):
        run(apfl(), tmp_path, gone=[12, 13], rounds=1)


def masked_numbers(grid: Any) -> list[np.ndarray]:
    """Return the masked updates that nodes have sent, as shares of the range of the masks."""
    records = [m.content.config_records.get("secaggplus_configs", {}) for m in grid.said]
    return [
        np.concatenate(
            [np.load(io.BytesIO(part)).ravel()[1:] for part in record["masked_params"]]
        ).astype(np.float64)
        / 2.0**32
        for record in records
        if "masked_params" in record
    ]


def is_masked(sent: np.ndarray) -> bool:
    """Return whether numbers look uniform; masks differ in each run, and one in a million is unlucky."""
    return bool(kstest(sent, "uniform").pvalue > 1e-6)


def test_a_server_learns_nothing_of_the_last_node_that_is_left(tmp_path: Path) -> None:
    """Three of four are gone once the fourth has sent its masked update: no node unmasks it."""
    grids: list[Any] = []
    with pytest.raises(TooFewNodes, match="too few nodes were left to unmask"):
        run(apfl(), tmp_path, gone=[11, 12, 13], rounds=1, made_grid=grids.append)
    (sent,) = masked_numbers(grids[0])
    assert is_masked(sent) and not is_masked(0.5 + 0.01 * (sent - 0.5))
    plain = [m.content.config_records.get("hierfl", {}).get("payload", b"") for m in grids[0].said]
    assert not any(b"theta" in payload for payload in plain)


def test_a_server_that_is_all_other_nodes_learns_the_update(tmp_path: Path) -> None:
    """What secure aggregation does not prevent: the sum less what the others sent is the last one's."""
    method = methods.fedavg(_shared(), optimizer=SGD(0.05), steps=3, batch_size=5)
    fitted, _ = run(method, tmp_path, rounds=1)
    alone, _ = run(method, tmp_path / "others", gone=[12], rounds=1)
    north = fit(method, rows().select(["north"]), rounds=1)
    counts = rows().select(["east", "south", "west"]).num_rows, rows().select(["north"]).num_rows
    for leaf, value in named_leaves(north.message).items():
        every, others = (named_leaves(one.message)[leaf] for one in (fitted, alone))
        read = (sum(counts) * every - counts[0] * others) / counts[1]
        torch.testing.assert_close(read, value, rtol=0.0, atol=1e-8)


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'two_stage' needs a summary of each client by itself"):
        run(methods.two_stage(regression), tmp_path)
    with pytest.raises(ValueError, match="with a log weight, and secure aggregation gives"):
        run(methods.fedmap(_map(), optimizer=SGD(0.01)), tmp_path, rounds=1)
    with pytest.raises(
        ValueError, match="a round of 2 clients: secure aggregation takes 3 to 1023"
    ):
        run(apfl(), tmp_path, cohort=2, rounds=1)


def _map() -> Any:
    from hierfl.models import learned_prior_network
    from hierfl.models.likelihood import normal

    return learned_prior_network(torch.nn.Linear(2, 1), likelihood=normal(1.0))


def message(**configs: Any) -> Message:
    record: Any = {"secaggplus_configs": ConfigRecord(configs)} if configs else {}
    return Message(RecordDict(record), dst_node_id=1, message_type="train")


def test_a_node_refuses_a_server_that_would_see_it_by_itself(tmp_path: Path) -> None:
    grid = Grid(None, tmp_path)
    context = next(iter(grid.contexts.values()))
    node = apps(apfl(), lambda _: rows(), done=print, nodes=4, secure=True).client

    def never(message: Message, context: Any) -> Message:
        raise AssertionError("the node was asked for its update")

    for kind in ({}, {"kind": "round"}):  # a round, however it says so
        about = {"run": "r", "round": 0, "counted": -1, **kind}
        payload = to_bytes({"message": {}, "mail": {}}, about)
        record: Any = {"fitins.config": ConfigRecord({"payload": payload})}
        masking = Message(RecordDict(record), dst_node_id=1, message_type="train")
        with pytest.raises(Refused, match="the server asks for a plain one"):
            masked(masking, context, never)
        question = to_bytes({}, {**about, "kind": "draws"})
        beside: Any = {"another": ConfigRecord({"payload": question})}  # which no node reads
        for others in (dict[str, Any](), beside):
            record = {**others, "hierfl": ConfigRecord({"payload": payload})}
            plain = Message(RecordDict(record), dst_node_id=1, message_type="train")
            plain.metadata.__dict__["_message_id"] = "1"
            wrong = node(plain, context).content.config_records["hierfl"]["wrong"]
            assert "the server asks for a plain one" in str(wrong)
    unmasked = message(stage="collect_masked_vectors")
    unmasked.metadata.message_type = "train.default"  # which Flower's nodes answer as they are
    with pytest.raises(Refused, match="the server asks for a plain one"):
        masked(unmasked, context, never)
    for nodes, threshold, shares in ((2, 2, 2), (4, 2, 4), (6, 3, 6), (4, 3, 6)):
        of = {"sample_num": nodes, "share_num": shares, "threshold": threshold}
        with pytest.raises(Refused, match=f"a sum of {nodes} nodes that {threshold} of {shares}"):
            masked(message(stage="setup", **of), context, never)
    with pytest.raises(Refused, match="names no numbers of nodes"):
        masked(message(stage="setup", sample_num=4, threshold=3), context, never)


@pytest.mark.parametrize(
    ("active", "dead"),
    [([12, 12, 12], [11, 13, 14]), ([11, 12, 13, 14], [12]), ([11, 12, 13], [14, 14])],
)
def test_a_server_that_lies_about_who_is_gone_unmasks_nobody(
    active: list[int], dead: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's nodes send shares of both of a node's masks, and of one node alone that is named three times."""
    made = Watching.send_and_receive

    def hostile(self: Any, messages: Iterable[Any], *, timeout: float) -> Iterable[Any]:
        sent = list(messages)
        for configs in (of.content.config_records.get("secaggplus_configs", {}) for of in sent):
            if configs.get("stage") == "unmask":
                configs["active_nids"], configs["dead_nids"] = active, dead
        return made(self, sent, timeout=timeout)

    monkeypatch.setattr(Watching, "send_and_receive", hostile)
    grids: list[Any] = []
    with pytest.raises(TooFewNodes, match="too few nodes were left to unmask"):
        run(apfl(), tmp_path, rounds=1, made_grid=grids.append)
    answers = [m.content.config_records for m in grids[0].said if not m.has_error()]
    assert not any("share_list" in of.get("secaggplus_configs", {}) for of in answers)


def test_parts_add_up_to_the_sum_of_the_numbers() -> None:
    """Also of numbers far apart in size; largest and smallest in one update."""
    g = torch.Generator().manual_seed(0)
    ups = []
    for _ in range(5):
        a, b = (torch.randn(1, n, generator=g).double() for n in (3, 2))
        value = {"a": 1e8 * a, "b": 1e-4 * b}
        ups.append({"x": Share(value, torch.rand(1, generator=g).double())})
    read = [from_bytes(to_bytes(up, {}), most=1 << 20).tree for up in ups]
    summed = sums_of(np.sum([parts_of(tree) for tree in read], 0), ups[0])
    assert size_of(ups[0]) == 3 * 6
    for name, leaf in named_leaves(summed).items():
        wanted = sum(named_leaves(up)[name][0] for up in ups)
        torch.testing.assert_close(leaf, wanted, rtol=1e-12, atol=1e-9)
    for bad in (float("nan"), 2.0e9):
        with pytest.raises(ValueError, match="cannot be masked"):
            parts_of({"x": torch.tensor([bad])})


def test_questions_after_the_rounds_are_answered_as_ever(tmp_path: Path) -> None:
    """No policy lets draws leave: each node says that they stay."""
    fitted, _ = run(methods.fedsvi(regression), tmp_path, rounds=1)
    found = fitted.local_summary(draws=5)
    assert sorted(found.withheld) == ["east", "north", "south", "west"]
