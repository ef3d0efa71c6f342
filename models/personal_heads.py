"""FedVI's model: a shared embedding and classifier, and a small classifier per client."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl.core import noise
from hierfl.core.arguments import expect, spelled
from hierfl.data.batch import ClientBatch
from hierfl.models.functional import apply, frozen_copy, weights
from hierfl.models.learned_priors import Penalized
from hierfl.models.likelihood import Likelihood, as_likelihood, field, observe

Merge = Callable[[Tensor, Tensor], Tensor]


@spelled
class PersonalHeads:
    """A network with a global embedding E and head G, and a local head for each client.

        y_kn ~ likelihood(G(r_g) + r_l beta_k + bias_k),    (r_g, r_l) = E(x_kn)
        beta_k ~ Normal(0, prior_scale^2)

    An instance is a model, to be called on a batch.

    Sites and params:

    * `embedding.<tensor>` (*shape), global params: the weights of E.
    * `head.weight` (features - local_features, outputs) and `head.bias` (outputs,), global params:
      the dense layer G.
    * `beta` (C, 1, local_features, outputs), a local site.
    * `bias` (C, 1, outputs), a local site under a flat prior, to be inferred as a point.
    * `global_prior`, a global factor, where `global_scale` is given.
    * the observed site, named after the field `y`, and the global sites of the likelihood, if any.

    Args:
        embedding: maps rows (B, ...) to (B, features). Dropout must be off: the posterior is
            already a source of noise.
        outputs: number of outputs: classes, or whatever the likelihood takes.
        features: number of features of the embedding. Default: the paper's.
        local_features: how many of them, the last ones, the local heads read. Default: the paper's.
        prior_scale: standard deviation of beta, > 0. Default None: Glorot's
            sqrt(2 / (local_features + outputs)), which the paper calls the initializer's.
        likelihood: from `hierfl.models.likelihood`, or a function `(output (C, B, outputs)) ->
            distribution` of batch shape (C, B). Default `categorical()`.
        merge: combines the outputs of G and of the local head. Default: their sum, as in the paper.
        global_scale: standard deviation of a Normal prior of the global params, for `gamma` > 0 in
            `hierfl.methods.fedvi`. Default None: a flat prior.
        x: name of the field of inputs.
        y: name of the field of labels.

    Raises:
        ValueError: `local_features` leaves no feature to G or to the local heads; or
            `bayesian_network` does not accept the embedding.

    Reference: Section 5 of Vedadi et al. 2023, arXiv:2305.13672.
    """

    def __init__(
        self,
        embedding: nn.Module,
        *,
        outputs: int,
        features: int = 128,
        local_features: int = 26,
        prior_scale: float | None = None,
        likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
        merge: Merge = torch.add,
        global_scale: float | None = None,
        x: str = "x",
        y: str = "y",
    ) -> None:
        # of the features each head needs some
        expect(local_features=(local_features, f"[1, {features - 1}]"))
        self.net = frozen_copy(embedding)
        self.tensors = weights(self.net)
        self.outputs, self.features, self.local_features = outputs, features, local_features
        he = (2.0 / (local_features + outputs)) ** 0.5
        self.prior_scale = he if prior_scale is None else prior_scale
        self.merge = merge
        self.likelihood = as_likelihood(likelihood)
        self.global_scale, self.x, self.y = global_scale, x, y
        self.__name__ = "personal_heads"

    def _embedded(self, batch: ClientBatch) -> Tensor:
        """Return the embedding of all rows, (C, B, features)."""
        start = self.tensors.items()
        params = {name: pyro.param(f"embedding.{name}", v.clone()) for name, v in start}
        with batch.clients():  # for what a client has of its own: statistics of batch norm
            features = apply(self.net, {}, params, field(batch, self.x), mask=batch.rows)
        if features.shape[2:] != (self.features,):
            raise ValueError(
                f"the embedding gives shape {tuple(features.shape[2:])} per row, "
                f"but features={self.features}: the two must agree"
            )
        return features

    def global_features(self, batch: ClientBatch) -> Tensor:
        """Return r_g of every row, (C, B, features - local_features): what a guide reads."""
        return self._embedded(batch)[..., : self.features - self.local_features]

    def __call__(self, batch: ClientBatch) -> None:
        """Run the model on a batch."""
        label, above = self.likelihood(), self.features - self.local_features
        key = noise.fold(noise.root_key(0), noise.word("head"))
        start = noise.normals(key, (above, self.outputs)) / above**0.5
        weight = pyro.param("head.weight", start)
        offset = pyro.param("head.bias", torch.zeros(self.outputs))
        rows = self._embedded(batch)
        if self.global_scale is not None:
            params = [weight, offset, *(pyro.param(f"embedding.{name}") for name in self.tensors)]
            prior = dist.Normal(0.0, self.global_scale)
            log_probs = torch.stack([prior.log_prob(p).sum() for p in params])
            pyro.factor("global_prior", log_probs.sum())
        with batch.clients():
            scale = torch.full((self.local_features, self.outputs), self.prior_scale)
            # (C, 1, local_features, outputs)
            beta = pyro.sample("beta", dist.Normal(torch.zeros_like(scale), scale).to_event(2))
            flat = Penalized(torch.zeros(self.outputs), lambda b: 0.0 * b.sum())
            bias = pyro.sample("bias", flat)
            common = rows[..., :above] @ weight + offset
            own = rows[..., above:] @ beta[:, 0] + bias
            with batch.data():
                observe(self.y, label(self.merge(common, own)), batch)
