"""Generative models: Pyro programs over a `ClientBatch`, one file each.

The likelihoods of a network are in `hierfl.models.likelihood`, priors by a Bregman divergence in `hierfl.models.bregman`.
"""

if __name__ != "hierfl.models":
    raise ImportError("import hierfl.models, not the folder models/")

from hierfl.models import bregman, likelihood
from hierfl.models.bayes_net import bayesian_network, network
from hierfl.models.bregman_net import bregman_network
from hierfl.models.linear import linear
from hierfl.models.logistic import logistic
from hierfl.models.poisson import poisson
from hierfl.models.softmax import softmax

__all__ = ["bayesian_network", "bregman", "bregman_network", "likelihood", "linear", "logistic", "network", "poisson", "softmax"]
