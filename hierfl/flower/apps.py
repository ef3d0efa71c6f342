"""A run as a Flower ServerApp and ClientApp, for its simulation and for SuperNodes.

    query.schema      of a formula without a schema: counts and sums (`hierfl.nodes.agreed_schema`)
    query.introduce   a node describes its client: name, number of rows, form of the rows
    query.agree       the node gets what all agreed on, and returns what it starts from
    train             one round: the method's message, and the client's update

Payloads are those of `hierfl.nodes.messages`, bytes in a ConfigRecord.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from hierfl.data.clients import ClientData
from hierfl.engine.federation import Disclose
from hierfl.flower.at_node import Clients
from hierfl.method import Method
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import KEYS
from hierfl.program.sites import Model

if TYPE_CHECKING:
    import pandas as pd

    from hierfl.nodes.fit_over_nodes import FitOverNodes


@dataclass(frozen=True)
class Apps:
    """The two apps of a run: `server` runs where no rows are, `client` at each node."""

    server: ServerApp
    client: ClientApp


def apps(
    method: Method | Model,
    data_for_node: "Callable[[Context], ClientData | pd.DataFrame]",
    *,
    done: "Callable[[FitOverNodes], object]",
    nodes: int,
    rounds: int | None = None,
    seed: int = 0,
    cohort: int | float | None = None,
    fewest: int = 1,
    timeout: float = 600.0,
    folder_for_node: Callable[[Context], str | Path] | None = None,
    policy_for_node: Callable[[Context], str | Path | None] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    disclose: Disclose = "summaries",
    secure: bool = False,
) -> Apps:
    """Return the apps of one run.

    Args:
        method: that is run; both apps are made by the same code. Or a model, as in
            `hierfl.nodes.fit`: `FitOverNodes.chosen` names the method that is chosen for it.
        data_for_node: a node's context -> the rows of its one client; of such a formula a frame.
        done: called with the fit at the server, at the end.
        nodes: how many nodes the run waits for before its first round.
        rounds: as in `hierfl.fit`.
        seed: determines all randomness.
        cohort: clients per round, as in `hierfl.fit`.
        fewest: as in `hierfl.nodes.over`.
        timeout: seconds that the server waits for nodes, and for their answers in a round.
        folder_for_node: a node's context -> the private folder of its client state. Default None:
            the folder that the node's configuration names as `folder`.
        policy_for_node: a node's context -> the file of its owner's policy (`hierfl.nodes.policy`).
            Default None: the file that the node's configuration names as `policy`, else
            `policy.toml` in its folder.
        checkpoint: the server's folder for a checkpoint after each round.
        resume: continue from the newest checkpoint there.
        disclose: what the server may see, as in `hierfl.fit`.
        secure: rounds by Flower's secure aggregation, SecAgg+: the server learns only the sum of
            the updates, of three clients or more. It takes four messages per node and round, and
            single updates cannot be checked.

    Raises:
        ValueError: `disclose` or `secure` conflicts with what the method shows the server.
    """
    if secure and isinstance(method, Method) and method.discloses == "summaries":
        raise ValueError(
            f"secure is True, and method '{method.name}' needs a summary of each client by "
            "itself: use a method that discloses sums, or secure=False"
        )
    disclose = "sums" if secure else disclose
    folder, policy = folder_for_node or _folder_of, policy_for_node or _policy_of
    call = FitCall(method, rounds, seed, cohort, disclose, checkpoint, resume)
    clients = Clients(call, data_for_node, folder, policy, secure)
    server = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        # here, as a node needs nothing of it, and starts a process for every message
        from hierfl.flower.at_server import FlowerServer

        reached = FlowerServer(grid, timeout, nodes, fewest).reached(context if secure else None)
        done(reached.fit_over(call))

    server.main()(main)
    return Apps(server, clients.app())


def _policy_of(context: Context) -> str | None:
    for key in context.node_config:
        plain = key.lower().replace("-", "_")
        is_near = "polic" in plain or plain.startswith("hierfl")
        is_near |= bool(get_close_matches(plain, ["policy", *KEYS], cutoff=0.8))
        if key != "policy" and is_near:
            raise Refused(
                f"the node's configuration has '{key}': a policy is named as 'policy', and its keys "
                "stand in that file"
            )
    policy = context.node_config.get("policy")
    return None if policy is None else str(policy)


def _folder_of(context: Context) -> str:
    folder = context.node_config.get("folder")
    if not isinstance(folder, str):
        raise Refused(
            "the node's configuration names no folder for its client state: start it with "
            "--node-config 'folder=\"...\"', or pass folder_for_node"
        )
    return folder
