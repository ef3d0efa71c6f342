from . import bregman as bregman
from . import families as families
from . import learned_priors as learned_priors
from . import likelihood as likelihood
from .bayesian_network import batch_norm_network as batch_norm_network
from .bayesian_network import bayesian_network as bayesian_network
from .bayesian_network import network as network
from .bregman_network import bregman_network as bregman_network
from .gaussian_process_network import GaussianProcessNetwork as GaussianProcessNetwork
from .learned_prior_network import learned_prior_network as learned_prior_network
from .memory_network import HeadedNetwork as HeadedNetwork
from .memory_network import MemoryNetwork as MemoryNetwork
from .mixture import mixture as mixture
from .personal_heads import PersonalHeads as PersonalHeads
from .regression import regression as regression

__all__: list[str]
