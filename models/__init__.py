"""Generative models: Pyro programs over a `ClientBatch`, one file per model.

Likelihoods for networks are in `hierfl.models.likelihood`, response families of formulas in
`hierfl.models.families`, priors that use a Bregman divergence in
`hierfl.models.bregman`, and the learned priors of FedMAP in `hierfl.models.learned_priors`.
"""

if __name__ != "hierfl.models":
    raise ImportError("import hierfl.models, not the folder models/")

from hierfl.models import bregman, families, learned_priors, likelihood
from hierfl.models.batch_norm_network import batch_norm_network
from hierfl.models.bayesian_network import bayesian_network, network
from hierfl.models.bregman_network import bregman_network
from hierfl.models.headed_network import HeadedNetwork
from hierfl.models.learned_prior_network import learned_prior_network
from hierfl.models.memory_network import MemoryNetwork
from hierfl.models.mixture import mixture
from hierfl.models.personal_heads import PersonalHeads
from hierfl.models.regression import regression

__all__ = [
    "HeadedNetwork",
    "MemoryNetwork",
    "PersonalHeads",
    "batch_norm_network",
    "bayesian_network",
    "bregman",
    "bregman_network",
    "families",
    "learned_prior_network",
    "learned_priors",
    "likelihood",
    "mixture",
    "network",
    "regression",
]
