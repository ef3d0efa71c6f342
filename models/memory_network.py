"""A common network with a head; and one with nearest neighbors among the features of a client's rows."""

from contextlib import AbstractContextManager
from contextvars import ContextVar

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from hierfl.core.arguments import expect, spelled
from hierfl.core.process import set_to
from hierfl.core.trees import Tree
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

_BLANK: ContextVar[bool] = ContextVar("blank", default=False)


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

    def features_seen(self) -> AbstractContextManager[list[Tensor]]:
        """Collect phi of every row, (C B, ...), for each run of the model in the context.

        A loss that reads both outputs and features then runs the network once.
        """
        return inputs_seen(self.net, self.head)

    def __call__(self, batch: ClientBatch) -> None:
        """Run the model on a batch."""
        theta = {name: pyro.param(f"theta.{name}", v.clone()) for name, v in self.tensors.items()}
        with batch.clients():
            logits = apply(self.net, {}, theta, field(batch, self.x), mask=batch.rows)
            with batch.data():
                observe(self.y, dist.Categorical(logits=logits), batch)


def without_memory() -> AbstractContextManager[None]:
    """Let memory networks predict by the network alone, at no cost for the memory."""
    return set_to(_BLANK, True)


def remembered(batch: ClientBatch, x: str, y: str, size: int) -> Tree:
    """Return `size` rows at most of the one client of a batch of all its rows, as its local params."""
    rows, labels = field(batch, x)[0], field(batch, y)[0]
    count = torch.as_tensor(len(rows)) if batch.rows is None else batch.rows[0].sum()
    place = torch.arange(size)
    spread = torch.where(count > size, place * count // size, place)
    at = torch.minimum(spread, count - 1)
    there = (place < count).to(batch.counts.dtype)
    memory = {"x": rows[at], "y": labels[at].to(batch.counts.dtype), "there": there}
    return {f"memory.{name}": value[None, None] for name, value in memory.items()}


def memory_of(clients: int, size: int, rows: Tensor) -> dict[str, Tensor]:
    """Declare the local params of a memory, inside the clients plate; return them, (C, M, ...) each."""
    mine = {
        "x": torch.zeros(clients, 1, size, *rows.shape[2:]),
        "y": torch.zeros(clients, 1, size),
        "there": torch.zeros(clients, 1, size),
    }
    return {name: pyro.param(f"memory.{name}", v)[:, 0] for name, v in mine.items()}


@spelled
class MemoryNetwork:
    """Classes by a network, mixed with those of a client's own rows whose features are nearest.

        y_kn ~ Categorical((1 - weight) softmax f(x_kn; theta) + weight p_k(x_kn))
        p_k(x)_c ~ sum of exp(-|phi(x) - phi(x_j)|^2 / (D s)) over the nearest rows j with y_j = c

    phi is what the layer `features` takes, with D entries. A client without memory has weight 0.

    An instance is a model, to be called on a batch. Params:

    * `theta.<tensor>` (*shape), global: the weights of the network.
    * `memory.x` (C, 1, M, *row), `memory.y` (C, 1, M), local: rows and their labels.
    * `memory.there` (C, 1, M), local: 1 where there is a row.

    Args:
        module: maps rows (B, ...) to logits (B, classes).
        features: name in the module of the layer whose input are the features, such as the last
            dense one.
        memory: M, rows that a client keeps at most, > 0. One with more keeps M of them, evenly
            spread.
        neighbors: k, > 0. Default: the authors'.
        scale: s, > 0. Default: that of the authors' code, which squares the distance; the paper
            does not.
        weight: of the memory, in [0, 1]. The authors tune it for each client on rows held out.
        x: name of the field of inputs.
        y: name of the field of labels.

    Raises:
        ValueError: a number is out of range, the module has no layer of that name, or `network`
            does not accept the module.

    Reference: Marfoq et al. 2022, arXiv:2111.09360, Eq. (8).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        features: str,
        memory: int = 500,
        neighbors: int = 10,
        scale: float = 1.0,
        weight: float = 0.5,
        x: str = "x",
        y: str = "y",
    ) -> None:
        expect(
            memory=(memory, "[1, inf)"),
            neighbors=(neighbors, "[1, inf)"),
            scale=(scale, "(0, inf)"),
            weight=(weight, "[0, 1]"),
        )
        self.net = frozen_copy(module)
        self.features = known_layer(self.net, features, option="features")
        self.memory, self.neighbors = memory, neighbors
        self.scale, self.weight, self.x, self.y = scale, weight, x, y
        self.tensors = weights(self.net)
        self.__name__ = "memory_network"

    def __call__(self, batch: ClientBatch) -> None:
        """Run the model on a batch."""
        theta = {name: pyro.param(f"theta.{name}", v.clone()) for name, v in self.tensors.items()}
        rows, count = field(batch, self.x), batch.num_clients
        with batch.clients():
            mine = memory_of(count, self.memory, rows)
            logits = apply(self.net, {}, theta, rows, mask=batch.rows)
            fn = dist.Categorical(logits=logits)
            if not _BLANK.get():
                share = self.weight * mine["there"].amax(1)[:, None, None]
                near = self._nearest(theta, batch, mine, logits.shape[-1])
                fn = dist.Categorical(probs=torch.lerp(fn.probs, near, share))
            with batch.data():
                observe(self.y, fn, batch)

    def _nearest(
        self, theta: dict[str, Tensor], batch: ClientBatch, mine: dict[str, Tensor], classes: int
    ) -> Tensor:
        """Return the probabilities of the classes by the memory, (C, B, classes)."""
        features, memory = (
            inputs_of(self.net, self.features, theta, x, mask=there)
            for x, there in ((field(batch, self.x), batch.rows), (mine["x"], mine["there"] > 0.0))
        )
        away = (features[:, :, None] - memory[:, None]).square().mean(-1) / self.scale  # (C, B, M)
        away = torch.where(mine["there"][:, None] > 0.0, away, torch.inf)
        far, at = away.topk(min(self.neighbors, self.memory), largest=False)
        # relative to the nearest: far from all rows every weight would underflow
        near = torch.exp(far[..., :1].nan_to_num(posinf=0.0) - far)
        label = mine["y"][:, None].expand(*away.shape).gather(2, at)
        hot = (label[..., None] == torch.arange(classes)).to(near.dtype)
        total = (near[..., None] * hot).sum(2)
        return total / total.sum(-1, keepdim=True).clamp(min=1e-30)
