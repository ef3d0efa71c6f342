"""A mixture of several copies of a model, with shares of each client's own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model

SHARES = "mixture.logits"


class Mixed(dist.TorchDistribution):
    """A mixture of M distributions of one kind; `logits` (..., M), log shares, may differ by row."""

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, parts: list[Any], logits: Tensor, *, validate_args: bool | None = None
    ) -> None:
        shape, event = parts[0].batch_shape, parts[0].event_shape
        self._set(parts, logits, shape)
        super().__init__(shape, event, validate_args=validate_args)

    def _set(self, parts: list[Any], logits: Tensor, shape: torch.Size) -> None:
        self.parts = [part.expand(shape) for part in parts]
        self.log_shares = logits.log_softmax(-1).expand(*shape, len(parts))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Mixed:
        """Return the same mixture with a larger batch shape."""
        made: Any = self._get_checked_instance  # untyped in torch
        new: Mixed = made(Mixed, _instance)
        shape = torch.Size(batch_shape)
        new._set(self.parts, self.log_shares, shape)
        super(Mixed, new).__init__(shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def support(self) -> Any:
        """That of the first part."""
        return self.parts[0].support

    @property
    def base_dist(self) -> Any:
        """The same distribution as one Categorical or Bernoulli, or else the first part."""
        kind = type(getattr(self.parts[0], "base_dist", self.parts[0]))
        if kind in (dist.Categorical, dist.Bernoulli):
            return kind(probs=self.probs)
        return self.parts[0]

    @property
    def probs(self) -> Tensor:
        """Probabilities of the classes, or of 1, averaged over the parts."""
        return self._averaged([part.probs for part in self.parts])

    @property
    def mean(self) -> Tensor:
        """The mean, of the batch and event shape."""
        return self._averaged([part.mean for part in self.parts])

    @property
    def variance(self) -> Tensor:
        """The variance, of the batch and event shape."""
        squares = [part.variance + part.mean.square() for part in self.parts]
        return (self._averaged(squares) - self.mean.square()).clamp(min=0.0)

    def _averaged(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        shares = self.log_shares.exp().movedim(-1, 0)
        return (shares.view(*shares.shape, *[1] * (stacked.dim() - shares.dim())) * stacked).sum(0)

    def log_parts(self, value: Tensor) -> Tensor:
        """Return the log density of each part, (*batch_shape, M)."""
        return torch.stack([part.log_prob(value) for part in self.parts], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, of the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        return (self.log_shares + self.log_parts(value)).logsumexp(-1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw, (*sample_shape, *batch_shape, *event_shape)."""
        with torch.no_grad():
            label = torch.distributions.Categorical(logits=self.log_shares).sample(sample_shape)
            drawn = torch.stack([part.sample(sample_shape) for part in self.parts])
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
    if components < 1:
        raise ValueError(f"components is {components}: it must be 1 or more")

    def mixture(batch: ClientBatch) -> None:
        parts = []
        for m in range(components):
            with _Part(m) as part:
                model(batch)
            if len(part.observed) != 1:
                raise ValueError(
                    "a mixture's parts observe one site, and this model observes "
                    f"{len(part.observed)}"
                )
            parts.append(part.observed)
        name = next(iter(parts[0]))
        value, mask = parts[0][name][1:]
        with batch.clients(), ExitStack() as within:
            start = torch.zeros(batch.num_clients, 1, components)
            logits = pyro.param(SHARES, start)
            if mask is not None:
                within.enter_context(poutine.mask(mask=mask))
            within.enter_context(batch.data())
            pyro.sample(name, Mixed([part[name][0] for part in parts], logits), obs=value)

    return mixture
