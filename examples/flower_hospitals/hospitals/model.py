"""The model, the same at the server and at every hospital."""

import pyro.distributions as dist

from hierfl import methods, models

model = models.logistic(prior_scale=dist.HalfNormal(0.5), centred=True)
METHODS = {
    "two_stage": lambda: methods.two_stage(model),
    "fedavg": lambda: methods.fedavg(models.logistic_point(27), steps=5, batch_size=32),
}
