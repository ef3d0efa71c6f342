"""A round by Flower's secure aggregation, SecAgg+: an honest server learns only the sum of updates.

Source: Bell et al. 2020, arXiv:2001.01449, as `flwr.server.workflow.SecAggPlusWorkflow` has it.
Flower 1.41 seeds masks by 32 bits: a server that tries all of them may remove a mask.
"""

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
    MessageType,
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
from hierfl.flower.payloads import PAYLOAD, asked_for
from hierfl.nodes.messages import ROUND, Refused, from_bytes

MOST_BYTES = 1 << 31  # of a message to a node
FEWEST = 3  # nodes: of two, each knows the other's update from the sum
MOST = 1023  # nodes whose parts add up without leaving the range of the masks
PLAIN = "this node sends masked updates alone, and the server asks for a plain one"
SHARE = 2 / 3  # of the nodes that must stay for a round to be finished


def masked(message: Message, context: Context, answer: ClientAppCallable) -> Message:
    """Go through one stage of the protocol at a node; the third asks `answer` for the update."""
    kind = message.metadata.message_type
    configs = message.content.config_records.get(RECORD_KEY_CONFIGS)
    is_masked = configs is not None or asked_for(message) is not None
    if kind.partition(".")[0] != MessageType.TRAIN or not is_masked:
        return answer(message, context)
    # Flower masks no answer to a message of another type, such as train.default
    if configs is None or kind != MessageType.TRAIN:
        raise Refused(PLAIN)
    _check_stage(configs)
    reply: Message = secaggplus_mod(message, context, answer)
    return reply


def _check_stage(configs: Mapping[str, Any]) -> None:
    """Refuse sums of few or endlessly many nodes, and shares that would unmask one: Flower checks none."""
    if configs.get(Key.STAGE) == Stage.SETUP:
        keys = (Key.SAMPLE_NUMBER, Key.SHARE_NUMBER, Key.THRESHOLD)
        said: list[Any] = [configs.get(key) for key in keys]
        nodes, shares, threshold = said
        if not all(isinstance(number, int) for number in said):
            raise Refused("the server's set-up of secure aggregation names no numbers of nodes")
        right = FEWEST <= nodes <= MOST and shares == nodes
        if not right or not round(SHARE * nodes) <= threshold <= nodes:
            raise Refused(
                f"the server asks for a sum of {nodes} nodes that {threshold} of {shares} can unmask: "
                f"{FEWEST} to {MOST} nodes take part here, and two thirds of them must unmask"
            )
    elif configs.get(Key.STAGE) == Stage.UNMASK:
        lists = [configs.get(key) for key in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST)]
        numbers = [number for of in lists if isinstance(of, list) for number in of]
        if len({*numbers}) < len(numbers):
            raise Refused("the server names a node twice, or as both there and gone")


def check_masked(content: bytes) -> None:
    """Refuse a round that is asked for as it is; a node's policy decides on questions."""
    if from_bytes(content, most=MOST_BYTES).about.get("kind", ROUND) == ROUND:
        raise Refused(PLAIN)


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
