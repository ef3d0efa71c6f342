from .clients import client_forest as client_forest
from .clients import client_map as client_map
from .clients import forest as forest
from .clients import prior_and_clients as prior_and_clients
from .clients import shrinkage as shrinkage
from .predictions import coverage as coverage
from .predictions import entropies as entropies
from .predictions import pit as pit
from .predictions import rates as rates
from .predictions import reliability as reliability
from .runs import convergence as convergence
from .runs import k_hats as k_hats
from .runs import messages as messages
from .runs import rank_ecdf as rank_ecdf
from .runs import sensitivity as sensitivity
from .style import COLORS as COLORS
from .style import MARKERS as MARKERS

__all__: list[str]
