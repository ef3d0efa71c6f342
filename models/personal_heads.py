"""FedVI's model: one embedding for all, and on top of a common classifier a small one of each client's own."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.models.functional import apply, frozen_copy, weights
from hierfl.models.likelihood import Likelihood, categorical
from hierfl.models.map_priors import Penalised
from hierfl.models.observe import field, observe

Merge = Callable[[Tensor, Tensor], Tensor]


class PersonalHeads:
    """y_kn ~ likelihood(G(r_g) + r_l beta_k + bias_k),  (r_g, r_l) = E(x_kn),  beta_k ~ Normal(0, prior_scale^2).

    E, the `embedding`, and G, one dense layer, are global params. A client's own are the sites `beta` (features_local, K) and
    `bias` (K,), a point under a flat prior. A model to be called on a batch; `global_features` is what a guide reads of its rows.

    Args:
        embedding: rows (B, ...) -> (B, features), of images or of tables; dropout off (the posterior is noise enough).
        outputs: K, classes or whatever the likelihood takes.
        features: of the embedding. Default: the paper's, as is `local_features`.
        local_features: how many of them, the last, the clients' own heads read.
        prior_scale: of beta; None: Glorot's, sqrt(2 / (local_features + K)), "the initialiser's" of the paper.
        likelihood: from `hierfl.models.likelihood`, or `(output (C, B, K)) -> distribution`. Default `categorical()`.
        merge: of the outputs of G and of the client's own head. Default: their sum, the paper's.
        global_scale: standard deviation of a Normal prior of the global params, for `gamma` > 0; None: flat.
        x: the field that goes in.
        y: the field of labels.

    Raises:
        ValueError: no feature left for G or for the clients; a module that `bayesian_network` refuses.

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
        if not 0 < local_features < features:
            raise ValueError(
                f"local_features is {local_features}; of {features} features some go to each head: 1 to {features - 1}"
            )
        self.net = frozen_copy(embedding)
        self.tensors = weights(self.net)
        self.outputs, self.features, self.local_features = outputs, features, local_features
        self.prior_scale = (
            (2.0 / (local_features + outputs)) ** 0.5 if prior_scale is None else prior_scale
        )
        self.merge = merge
        self.likelihood = (
            likelihood
            if isinstance(likelihood, Likelihood)
            else Likelihood(likelihood)
            if likelihood
            else categorical()
        )
        self.global_scale, self.x, self.y = global_scale, x, y
        self.__name__ = "personal_heads"

    def _embedded(self, batch: ClientBatch) -> Tensor:
        own = {
            name: pyro.param(f"embedding.{name}", start.clone())
            for name, start in self.tensors.items()
        }
        found = apply(self.net, {}, own, field(batch, self.x))
        if found.shape[2:] != (self.features,):
            raise ValueError(
                f"the embedding gives {tuple(found.shape[2:])} a row; features={self.features} are asked for"
            )
        return found

    def global_features(self, batch: ClientBatch) -> Tensor:
        """R_g of every row, (C, B, features - local_features)."""
        return self._embedded(batch)[..., : self.features - self.local_features]

    def __call__(self, batch: ClientBatch) -> None:
        """The generative program."""
        label, above = self.likelihood(), self.features - self.local_features
        start = (
            noise.normals(noise.fold(noise.root_key(0), noise.word("head")), (above, self.outputs))
            / above**0.5
        )
        weight, offset = (
            pyro.param("head.weight", start),
            pyro.param("head.bias", torch.zeros(self.outputs)),
        )
        rows = self._embedded(batch)
        if self.global_scale is not None:
            params = [weight, offset, *(pyro.param(f"embedding.{name}") for name in self.tensors)]
            each = torch.stack(
                [dist.Normal(0.0, self.global_scale).log_prob(p).sum() for p in params]
            )
            pyro.factor("global_prior", each.sum())
        with batch.clients():
            scale = torch.full((self.local_features, self.outputs), self.prior_scale)
            beta = pyro.sample(
                "beta", dist.Normal(torch.zeros_like(scale), scale).to_event(2)
            )  # (C, 1, features, K)
            flat = Penalised(torch.zeros(self.outputs), lambda b: 0.0 * b.sum())
            bias = pyro.sample("bias", flat)
            common = rows[..., :above] @ weight + offset
            own = rows[..., above:] @ beta[:, 0] + bias
            with batch.data():
                observe(self.y, label(self.merge(common, own)), batch)
