"""Clients on their own machines: what they agree on, what crosses, and the server's rounds."""

from importlib import import_module
from typing import TYPE_CHECKING

from hierfl.nodes.node import answer, introduce, introduced, node

if TYPE_CHECKING:
    from hierfl.nodes.agreement import Agreement, Introduction
    from hierfl.nodes.asking import Answer
    from hierfl.nodes.call import fit
    from hierfl.nodes.client_state import Node, NodeFailed
    from hierfl.nodes.fit_over_nodes import FitOverNodes
    from hierfl.nodes.messages import Refused
    from hierfl.nodes.policy import Policy
    from hierfl.nodes.run import TooFewNodes, fit_nodes
    from hierfl.nodes.same_process import InProcess, in_process

__all__ = [
    "Agreement",
    "Answer",
    "FitOverNodes",
    "InProcess",
    "Introduction",
    "Node",
    "NodeFailed",
    "Policy",
    "Refused",
    "TooFewNodes",
    "answer",
    "fit",
    "fit_nodes",
    "in_process",
    "introduce",
    "introduced",
    "node",
]

# Public name -> its module, imported when the name is first used: a node, which starts a process
# for every
# message, needs none of what the server does.
_MODULE_OF = {
    "Agreement": "hierfl.nodes.agreement",
    "Answer": "hierfl.nodes.asking",
    "FitOverNodes": "hierfl.nodes.fit_over_nodes",
    "InProcess": "hierfl.nodes.same_process",
    "Introduction": "hierfl.nodes.agreement",
    "Node": "hierfl.nodes.client_state",
    "NodeFailed": "hierfl.nodes.client_state",
    "Policy": "hierfl.nodes.policy",
    "Refused": "hierfl.nodes.messages",
    "TooFewNodes": "hierfl.nodes.run",
    "fit": "hierfl.nodes.call",
    "fit_nodes": "hierfl.nodes.run",
    "in_process": "hierfl.nodes.same_process",
}

if not TYPE_CHECKING:  # hidden from type checkers, which would accept any misspelled name

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'hierfl.nodes' has no attribute '{name}'")
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
