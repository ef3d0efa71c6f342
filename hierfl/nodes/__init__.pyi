from .agreement import Agreement as Agreement
from .agreement import Introduction as Introduction
from .asking import Answer as Answer
from .call import fit as fit
from .client_state import Node as Node
from .client_state import NodeFailed as NodeFailed
from .fit_over_nodes import FitOverNodes as FitOverNodes
from .messages import Refused as Refused
from .node import answer as answer
from .node import introduce as introduce
from .node import introduced as introduced
from .node import node as node
from .policy import Policy as Policy
from .run import TooFewNodes as TooFewNodes
from .run import fit_nodes as fit_nodes
from .same_process import InProcess as InProcess
from .same_process import in_process as in_process

__all__: list[str]
