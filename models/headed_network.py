"""One network for all clients, whose features and last layer methods can separate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import pyro.distributions as dist
from torch import Tensor, nn

from hierfl.core.arguments import spelled
from hierfl.data.batch import ClientBatch
from hierfl.models.functional import (
    apply,
    frozen_copy,
    inputs_of,
    inputs_seen,
    known_layer,
    weights,
)
from hierfl.models.likelihood import field, observe
from hierfl.program.program import Params


@spelled
class HeadedNetwork:
    """A classifier of features phi(x; body), read by a head.

        y_kn ~ Categorical(softmax head(phi(x_kn; body)))

    An instance is a model, to be called on a batch. Its params are all global: `theta.<tensor>`
    (*shape), those of the head being `theta.<head>.<tensor>`.

    Args:
        module: maps rows (B, ...) to logits (B, classes).
        head: name in the module of its last layer, whose input are the features.
        x: name of the field of inputs.
        y: name of the field of labels, 0 to classes - 1.

    Raises:
        ValueError: the module has no layer of that name, or none with weights; all its weights are
            in that layer; or `network` does not accept the module.
    """

    def __init__(self, module: nn.Module, *, head: str, x: str = "x", y: str = "y") -> None:
        self.net = frozen_copy(module)
        self.head = known_layer(self.net, head, option="head")
        self.tensors = weights(self.net)
        mine = [name for name in self.tensors if self.in_head(f"theta.{name}")]
        if len(mine) in (0, len(self.tensors)):
            raise ValueError(
                f"head is '{head}', with {len(mine)} of the module's {len(self.tensors)} tensors: "
                "it needs some, and so does the body below it"
            )
        self.x, self.y = x, y
        self.__name__ = "headed_network"

    def in_head(self, name: str) -> bool:
        """Return whether a param is of the head."""
        return name.startswith(f"theta.{self.head}.")

    def features(self, theta: Params, batch: ClientBatch) -> Tensor:
        """Return phi of every row, (C, B, D)."""
        tensors = {name: theta[f"theta.{name}"] for name in self.tensors}
        return inputs_of(self.net, self.head, tensors, field(batch, self.x), mask=batch.rows)

    @contextmanager
    def features_seen(self) -> Iterator[list[Tensor]]:
        """Collect phi of every row, (C B, ...), for each run of the model in the context.

        A loss that reads both outputs and features then runs the network once.
        """
        with inputs_seen(self.net, self.head) as seen:
            yield seen

    def __call__(self, batch: ClientBatch) -> None:
        """Run the model on a batch."""
        theta = {name: pyro.param(f"theta.{name}", v.clone()) for name, v in self.tensors.items()}
        with batch.clients():
            logits = apply(self.net, {}, theta, field(batch, self.x), mask=batch.rows)
            with batch.data():
                observe(self.y, dist.Categorical(logits=logits), batch)
