"""What work a server may cause at a node of Flower: as much as the node's policy allows."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from hierfl import guides, methods
from hierfl.flower import apps
from hierfl.flower.payloads import PAYLOAD, RECORD, WRONG
from hierfl.flower.secure import MOST, masked
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.messages import Refused
from hierfl.program.recipes import describe
from tests.flower.test_apps import NAMES, Grid, identity, made, run
from tests.nodes.one_process import rows
from tests.programs import logistic

__all__ = ["identity"]
node_module: Any = sys.modules["hierfl.nodes.node"]  # `hierfl.nodes.node` is a function too
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no copies elsewhere")


def with_policy(folder: Path, policy: str) -> None:
    """Give the node of north a policy."""
    (folder / "north").mkdir(parents=True)
    (folder / "north" / "policy.toml").write_text(policy)


def test_a_round_without_end_is_ended_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_policy(tmp_path, "seconds_a_request = 2\n")
    right = node_module.client_round

    def endless(federation: Any, *args: Any) -> Any:
        while federation.data.names == ("north",) and args[-1] == 1:
            pass
        return right(federation, *args)

    monkeypatch.setattr(node_module, "client_round", endless)
    done: list[FitOverNodes] = []
    pair = made(done)
    run(pair, Grid(pair.client, tmp_path))
    assert done[0].history["clients"].tolist() == [4, 3, 4]
    ((left_out,),) = [of for of in done[0].history["left_out"] if of]
    assert left_out["client"] == "north" and "seconds_a_request" in left_out["reason"]


def asked(pair: Any, grid: Grid, kind: str, payload: bytes) -> Any:
    """Return what north says to a request of the server's choice."""
    record: Any = {RECORD: ConfigRecord({PAYLOAD: payload})}
    message = Message(RecordDict(record), dst_node_id=12, message_type=kind)
    message.metadata.__dict__["_message_id"] = "1"
    return pair.client(message, grid.contexts[12]).content.config_records[RECORD]


def test_a_recipe_of_endless_steps_and_a_long_message_are_refused(tmp_path: Path) -> None:
    with_policy(tmp_path, f"bytes_a_request = {1 << 20}\n")
    parts = [rows().select([name]) for name in NAMES]
    pair = apps(
        logistic,
        lambda context: rows().select([str(context.node_config["client"])]),
        done=print,
        nodes=4,
    )
    grid = Grid(pair.client, tmp_path)
    assert PAYLOAD in asked(pair, grid, "query.introduce", b"")
    agreement = Agreement.between([Introduction.of(part) for part in parts])
    recipe = describe(methods.fedsvi(logistic, guides.mean_field, local_steps=10**7))
    begins = {"agreement": asdict(agreement), "seed": 0, "method": recipe}
    said = asked(pair, grid, "query.agree", json.dumps(begins).encode())[WRONG]
    assert "local_steps=10,000,000" in said and "steps_a_round" in said
    for kind in ("query.schema", "query.introduce", "query.agree", "train"):
        assert "(bytes_a_request)" in asked(pair, grid, kind, bytes(1 << 21))[WRONG]


@pytest.mark.parametrize("nodes, threshold", [(MOST + 1, MOST + 1), (10**9, 10**9), (4, 10**6)])
def test_shares_for_endlessly_many_nodes_are_refused(
    nodes: int, threshold: int, tmp_path: Path
) -> None:
    """A node would make as many, of polynomials of that degree, outside of what its policy limits."""
    setup: Any = {"stage": "setup", "sample_num": nodes, "share_num": nodes, "threshold": threshold}
    record: Any = {"secaggplus_configs": ConfigRecord(setup)}
    message = Message(RecordDict(record), dst_node_id=12, message_type="train")
    with pytest.raises(Refused, match=f"a sum of {nodes} nodes"):
        masked(message, Grid(None, tmp_path).contexts[12], lambda *_: message)
