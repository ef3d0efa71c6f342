from .fit_over_nodes import FitOverNodes as FitOverNodes
from .gathering import fit as fit
from .messages import Answer as Answer
from .messages import Refused as Refused
from .policy import Policy as Policy
from .reached import Reached as Reached
from .reached import load as load
from .reached import over as over
from .request_files import by_files as by_files
from .run import TooFewNodes as TooFewNodes
from .same_process import InProcess as InProcess
from .same_process import in_process as in_process
from .stations import Station as Station
from .stations import station as station

__all__: list[str]
