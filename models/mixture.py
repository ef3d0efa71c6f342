"""A mixture of several copies of a model, with shares of each client's own."""

from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.data.batch import ClientBatch
from hierfl.models.families.rows import RowDistribution
from hierfl.program.sites import Model, recorded

SHARES = "mixture.logits"


class Mixed(RowDistribution):
    """A mixture of M distributions of one kind; `logits` (..., M), log shares, may differ by row."""

    FIELDS = ("components", "log_shares")

    def __init__(self, components: list[Any], logits: Tensor) -> None:
        shape, event = components[0].batch_shape, components[0].event_shape
        self.components = [part.expand(shape) for part in components]
        self.log_shares = logits.log_softmax(-1).expand(*shape, len(components))
        super().__init__(shape, event)

    @property
    def support(self) -> Any:
        """That of the first part."""
        return self.components[0].support

    @property
    def base_dist(self) -> Any:
        """The same distribution as one Categorical or Bernoulli, or else the first part."""
        kind = type(getattr(self.components[0], "base_dist", self.components[0]))
        if kind in (dist.Categorical, dist.Bernoulli):
            return kind(probs=self.probs)
        return self.components[0]

    @property
    def probs(self) -> Tensor:
        """Probabilities of the classes, or of 1, averaged over the parts."""
        return self._averaged([part.probs for part in self.components])

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, of the batch and event shape."""
        mean = self._averaged([part.mean for part in self.components])
        squares = [part.variance + part.mean.square() for part in self.components]
        return mean, (self._averaged(squares) - mean.square()).clamp(min=0.0)

    def _averaged(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        shares = self.log_shares.exp().movedim(-1, 0)
        return (shares.view(*shares.shape, *[1] * (stacked.dim() - shares.dim())) * stacked).sum(0)

    def log_parts(self, value: Tensor) -> Tensor:
        """Return the log density of each part, (*batch_shape, M)."""
        return torch.stack([part.log_prob(value) for part in self.components], -1)

    def _log_prob(self, value: Tensor) -> Tensor:
        return (self.log_shares + self.log_parts(value)).logsumexp(-1)

    def _draw(self) -> Tensor:
        label = torch.distributions.Categorical(logits=self.log_shares).sample()
        drawn = torch.stack([part.sample() for part in self.components])
        label = label.view(1, *label.shape, *[1] * len(self.event_shape))
        return drawn.gather(0, label.expand(1, *drawn.shape[1:]))[0]


class _Part(Messenger):
    """Runs one copy of a model: its params get a number; observations are kept, not scored."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.observed = number, {}  # type: ignore[var-annotated]

    def _pyro_param(self, msg: Any) -> None:
        msg["name"] = f"{self.number}.{msg['name']}"
        msg["args"] = (msg["name"], *msg["args"][1:])

    def _pyro_sample(self, msg: Any) -> None:
        if msg["infer"].get("_deterministic"):
            msg["stop"] = True
        elif msg["is_observed"]:
            self.observed[msg["name"]] = (msg["fn"], msg["value"], msg["mask"])
            msg["stop"] = True
        elif type(msg["fn"]).__name__ != "_Subsample":
            raise ValueError(
                "a mixture's parts are models of params alone, and this one has the latent site "
                f"'{msg['name']}': take models.network"
            )


@recorded
def mixture(model: Model, *, components: int = 3) -> Model:
    """Build a mixture of copies of a model, each with global params of its own.

        y_kn ~ sum_m pi_km p(y_kn | x_kn; theta_m)

    Params:

    * `0.<name>`, `1.<name>`, ..., global: the params of each copy.
    * `mixture.logits` (C, 1, M), local: log pi_k up to a constant, under a flat prior.

    All copies start equal: methods that fit them start them apart (`hierfl.methods.fedem`).

    Args:
        model: of global params alone, with one observed site, such as `hierfl.models.network`.
        components: M, 1 or more. Default: that of the authors of FedEM.

    Raises:
        ValueError: `components` is below 1. (When it runs) the model has a latent site, or observes
            another number of sites than one.

    Reference: Marfoq et al. 2021, arXiv:2108.10252.
    """
    expect(components=(components, "[1, inf)"))

    def mixture(batch: ClientBatch) -> None:
        observed = []
        for m in range(components):
            with _Part(m) as part:
                model(batch)
            if len(part.observed) != 1:
                raise ValueError(
                    f"a mixture's parts observe one site, and this model observes {len(part.observed)}"
                )
            observed.append(part.observed)
        name = next(iter(observed[0]))
        value, mask = observed[0][name][1:]
        with batch.clients(), ExitStack() as within:
            start = torch.zeros(batch.num_clients, 1, components)
            logits = pyro.param(SHARES, start)
            if mask is not None:
                within.enter_context(poutine.mask(mask=mask))
            within.enter_context(batch.data())
            pyro.sample(name, Mixed([sites[name][0] for sites in observed], logits), obs=value)

    return mixture
