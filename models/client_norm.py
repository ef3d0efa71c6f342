"""Batch normalization as a pure function of weights, statistics and rows."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal, TypeVar

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hierfl.core.process import set_to
from hierfl.program.program import ProgramError

Found = TypeVar("Found")
By = Literal["client", "mini-batch", "looking"]
STATISTICS = "statistics."  # in the name of each param that holds a statistic

_BY: ContextVar[By | None] = ContextVar("normalized_by", default=None)


class ClientNorm(nn.Module):
    """Batch normalization as a pure function of its parameters, for `torch.func.functional_call`.

        y = weight (x - mean) / sqrt(var + eps) + bias

    Where `learning` > 0 the batch normalizes, otherwise the stored `mean` and `var`. A call stores
    its batch's (mean, variance, count of values a feature) in `seen`, to be set to None before the next.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, of: _BatchNorm) -> None:
        super().__init__()
        size, self.eps = of.num_features, of.eps
        for name, start in (
            ("weight", of.weight),
            ("bias", of.bias),
            ("mean", None),
            ("var", None),
        ):
            value = torch.full((size,), float(name in ("weight", "var")))
            if start is not None:
                value = start.detach().clone().to(value.dtype)
            learned = start is not None and start.requires_grad
            self.register_parameter(name, nn.Parameter(value, requires_grad=learned))
        # 1: normalize by the batch, 0: by the stored statistics
        self.learning = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.there = nn.Parameter(torch.ones(1), requires_grad=False)  # (B,), 0 at padded rows
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each feature of rows (B, F, ...), by statistics without padded rows."""
        if self.seen is not None:
            raise ProgramError(
                "the network runs one layer of batch norm twice, and its statistics are of one "
                "place: give each place a layer of its own"
            )
        trailing = (1,) * (x.dim() - 2)
        mask = self.there.to(x.dtype).reshape(-1, 1, *trailing)
        dims = [d for d in range(x.dim()) if d != 1]
        total = mask.sum() * x[0, 0].numel()
        mean = (mask * x).sum(dims) / total
        var = (mask * (x - mean.reshape(-1, *trailing)).square()).sum(dims) / total
        self.seen = mean, var, total
        use_batch = self.learning > 0.0
        m, v = torch.where(use_batch, mean, self.mean), torch.where(use_batch, var, self.var)
        shift, scale = (t.reshape(-1, *trailing) for t in (m, self.weight * (v + self.eps).rsqrt()))
        return (x - shift) * scale + self.bias.reshape(-1, *trailing)


def with_client_norms(module: nn.Module) -> nn.Module:
    """Return a copy of a module with a `ClientNorm` in place of every batch-normalization layer."""
    if isinstance(module, _BatchNorm):
        return ClientNorm(module)
    module = copy.deepcopy(module)
    for name, part in list(module.named_modules()):
        if isinstance(part, _BatchNorm):
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, ClientNorm(part))
    return module


def norms_of(module: nn.Module) -> dict[str, ClientNorm]:
    """Return the layers of a module that normalize by statistics of rows, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, ClientNorm)}


# --------------------------------------------------------------------------------- which statistics
def normalized(by: By) -> AbstractContextManager[None]:
    """Choose batch norm's statistics: "client", "mini-batch" or "looking"; an outer choice stands."""
    return set_to(_BY, _BY.get() or by)


def normalizing(function: Callable[..., Found], by: By) -> Callable[..., Found]:
    """Return a function, such as a model, run inside `normalized(by)`."""

    @wraps(function, updated=())
    def run(*args: Any, **options: Any) -> Found:
        with normalized(by):
            return function(*args, **options)

    return run


class Looked(Messenger):
    """Collects the statistics that a model's layers see: param -> value of one client."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def _pyro_param(self, msg: Any) -> None:
        if STATISTICS in msg["name"] and not msg["done"]:
            value = msg["args"][1]
            self.found[msg["name"]] = msg["value"] = value
            msg["done"] = True


def tensors_of_norms(module: nn.Module, x: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors that batch norm needs of each client, (C, 1, ...) each."""
    layers, by, count = norms_of(module), _BY.get(), len(x)
    if not layers:
        return {}
    if by is None:
        raise ProgramError(
            f"layer '{next(iter(layers))}' is batch norm, which normalizes by statistics of other "
            "rows: wrap the method, hierfl.methods.batch_normed(method), use hierfl.methods.fedbn, "
            "or use nn.GroupNorm or nn.LayerNorm"
        )
    for norm in layers.values():
        norm.seen = None  # of a run that failed
    there = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    tensors = {f"{layer}.there": there[:, None] for layer in layers}
    if by != "client":
        return {**tensors, **{f"{layer}.learning": torch.ones(count, 1) for layer in layers}}
    for layer, norm in layers.items():
        for part in ("mean", "var"):
            start = getattr(norm, part).detach()
            start = start.expand(count, 1, *start.shape).clone()
            tensors[f"{layer}.{part}"] = pyro.param(f"{STATISTICS}{layer}.{part}", start)
    return tensors


def say_what_was_seen(module: nn.Module) -> None:
    """Declare the statistics of a network's last run on one client as params, for a method."""
    for layer, norm in norms_of(module).items():
        seen, norm.seen = norm.seen, None
        if _BY.get() == "looking" and seen is not None:
            mean, var, count = seen
            # of one value there is no variance: 0 would blow up every other one
            statistics = {"mean": mean, "var": torch.where(count > 1.0, var, torch.nan)}
            for part, value in statistics.items():
                pyro.param(f"{STATISTICS}{layer}.{part}", value[None, None])
