"""A round by Flower's secure aggregation, SecAgg+: an honest server learns only the sum of updates.

Source: Bell et al. 2020, arXiv:2001.01449, as `flwr.server.workflow.SecAggPlusWorkflow` has it.
Flower 1.41 seeds masks by 32 bits: a server that tries all of them may remove a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as Workflow
from flwr.serverapp import Grid

from hierfl.engine.exact_sums import GRID, Numbers, Summed, parts_of
from hierfl.nodes.messages import ROUND, Refused, from_bytes

PAYLOAD, INS = "payload", "fitins.config"
MOST_BYTES = 1 << 31  # of a message to a node
FEWEST = 3  # nodes: of two, each knows the other's update from the sum
MOST = 1023  # nodes whose parts add up without leaving the range of the masks
SHARE = 2 / 3  # of the nodes that must stay for a round to be finished


def masked(message: Message, context: Context, answer: ClientAppCallable) -> Message:
    """Go through one stage of the protocol at a node; the third asks `answer` for the update."""
    if message.metadata.message_type.partition(".")[0] != "train":
        return answer(message, context)
    configs = message.content.config_records.get(RECORD_KEY_CONFIGS)
    if configs is None and _is_question(message):
        return answer(message, context)
    if configs is None:
        raise Refused("this node sends masked updates alone, and the server asks for a plain one")
    if configs.get(Key.STAGE) == Stage.SETUP:
        nodes, threshold = configs.get(Key.SAMPLE_NUMBER), configs.get(Key.THRESHOLD)
        if not (isinstance(nodes, int) and isinstance(threshold, int)):
            raise Refused("the server's set-up of secure aggregation names no numbers of nodes")
        if nodes < FEWEST or 2 * threshold <= nodes:
            raise Refused(
                f"the server asks for a sum of {nodes} nodes that {threshold} can unmask: "
                f"{FEWEST} nodes or more take part here, and more than half of them must unmask"
            )
    reply: Message = secaggplus_mod(message, context, answer)
    return reply


def _is_question(message: Message) -> bool:
    """Return whether a message asks for draws or predictions, which a node's policy decides on."""
    records = message.content.config_records.values()
    content = next((record[PAYLOAD] for record in records if PAYLOAD in record), None)
    try:
        return from_bytes(content, most=MOST_BYTES).about.get("kind", ROUND) != ROUND
    except Refused:
        return False


def asked_for(message: Message) -> bytes | None:
    """Return the server's payload in a message of the protocol; None: it holds none."""
    record: Mapping[str, Any] = message.content.config_records.get(INS, ConfigRecord())
    content = record.get(PAYLOAD)
    return content if isinstance(content, bytes) else None


def in_parts(update: bytes) -> RecordDict:
    """Return an update as Flower masks it: the parts of its values, and nothing else."""
    numbers = parts_of(from_bytes(update, most=len(update)).tree)
    sent = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([numbers]), 1, {})
    return fitres_to_recorddict(sent, keep_input=False)


@dataclass(frozen=True)
class _Proxy:
    """A node, as Flower's strategies know it."""

    node_id: int


class _OneRound(FedAvg):
    """What is asked of the nodes in one round, and the mean of what they answer."""

    def __init__(self, contents: Mapping[int, bytes]) -> None:
        super().__init__()
        self.contents = contents
        self.clients: tuple[int, ...] = ()
        self.mean: Numbers | None = None

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Return what each node is asked."""
        return [
            (_Proxy(number), FitIns(Parameters([], ""), {PAYLOAD: content}))
            for number, content in self.contents.items()
        ]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Keep the mean, and whose it is."""
        self.clients = tuple(proxy.node_id for proxy, _ in results)
        if results:
            self.mean = np.asarray(parameters_to_ndarrays(results[0][1].parameters)[0])
        return None, {}


def sum_of(
    grid: Grid,
    context: Context,
    contents: Mapping[str, bytes],
    ids: Mapping[str, int],
    size: int,
    timeout: float,
) -> Summed:
    """Return the sum of what nodes answer in a round; `timeout` is of each of the four stages."""
    if not FEWEST <= len(contents) <= MOST:
        raise ValueError(
            f"a round of {len(contents)} clients: secure aggregation takes {FEWEST} to {MOST}; "
            "choose another cohort"
        )
    there = set(grid.get_node_ids())
    reasons = {name: "its node is not connected" for name in contents if ids[name] not in there}
    names = {ids[name]: name for name in contents if ids[name] in there}
    nothing = Summed((), np.zeros(size), reasons)
    if len(names) < FEWEST:
        return nothing
    strategy = _OneRound({number: contents[name] for number, name in names.items()})
    legacy = LegacyContext(context=context, strategy=strategy)
    legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Workflow.CURRENT_ROUND: 1})
    legacy.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
    workflow = SecAggPlusWorkflow(
        1.0, SHARE, max_weight=1.0, clipping_range=1.0, quantization_range=2 * GRID, timeout=timeout
    )
    workflow(grid, legacy)
    if strategy.mean is None:
        lost = "too few nodes were left to unmask the round's sum"
        return nothing._replace(reasons={**dict.fromkeys(names.values(), lost), **reasons})
    numbers = np.round(strategy.mean * len(strategy.clients) * GRID) / GRID
    return Summed(tuple(names[number] for number in strategy.clients), numbers, reasons)
