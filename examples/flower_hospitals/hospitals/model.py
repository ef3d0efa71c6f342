"""The model and the methods, the same at the server and at every hospital."""

import pyro.distributions as dist
import torch

from hierfl import methods, models
from hierfl.method import Method

FEATURES = 27
hierarchy = models.regression(
    "bernoulli",
    prior_scale=dist.HalfNormal(0.5),
    intercept_scale=dist.HalfNormal(1.0),
    centered=True,
)


def method_of(name: str) -> Method:
    """Return a method by name: the posterior of the hierarchy, or one common logistic regression."""
    if name == "two_stage":
        return methods.two_stage(hierarchy)
    one = torch.nn.Linear(FEATURES, 1)
    torch.nn.init.zeros_(one.weight)
    torch.nn.init.zeros_(one.bias)
    common = models.network(one, likelihood=models.likelihood.bernoulli())
    return methods.fedavg(common, steps=5, batch_size=32)
