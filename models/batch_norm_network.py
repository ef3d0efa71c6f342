"""A network with batch normalisation, each client's its own: weights and statistics never leave it (FedBN)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from hierfl.data.batch import ClientBatch
from hierfl.models.functional import frozen_copy
from hierfl.models.likelihood import Likelihood, categorical
from hierfl.models.observe import field, observe
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


class ClientNorm(nn.Module):
    """Batch normalisation as a pure function: its statistics come in, and those of the batch go out by `seen`.

    Args:
        of: the layer it stands for.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, of: _BatchNorm) -> None:
        super().__init__()
        size, self.eps = of.num_features, of.eps
        self.parts = (*(("weight", "bias") if of.affine else ()), "mean", "var")
        for name, start in (
            ("weight", of.weight),
            ("bias", of.bias),
            ("mean", of.running_mean),
            ("var", of.running_var),
        ):
            known = (
                torch.full((size,), float(name in ("weight", "var")))
                if start is None
                else start.detach().clone()
            )
            self.register_parameter(
                name, nn.Parameter(known.to(torch.get_default_dtype()), requires_grad=False)
            )
        self.learning = nn.Parameter(
            torch.zeros(()), requires_grad=False
        )  # 1: normalise by the batch
        self.there = nn.Parameter(torch.ones(1), requires_grad=False)  # (B,), 0 at padding
        self.seen: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows (B, F, ...)."""
        rest = (1,) * (x.dim() - 2)
        there = self.there.to(x.dtype).reshape(-1, 1, *rest)
        over = [d for d in range(x.dim()) if d != 1]
        total = (there * torch.ones_like(x)).sum(over)
        mean = (there * x).sum(over) / total
        var = (there * (x - mean.reshape(-1, *rest)).square()).sum(over) / total
        self.seen = (mean, var)
        by_batch = self.learning > 0.0
        m, v = torch.where(by_batch, mean, self.mean), torch.where(by_batch, var, self.var)
        shift, scale = (t.reshape(-1, *rest) for t in (m, self.weight * (v + self.eps).rsqrt()))
        return (x - shift) * scale + self.bias.reshape(-1, *rest)


@recorded
def batch_norm_network(
    module: nn.Module,
    *,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """y_kn ~ likelihood(f(x_kn; theta, b_k)): b_k, the batch normalisation of a client, a flat prior on it; theta common to all.

    Of a layer `1` the params are `norm.1.weight` and `.bias` (learned, where the layer has them), `norm.1.mean` and `.var` (set to
    those of all rows by `hierfl.methods.fedbn`), each (C, 1, F) inside the clients plate; `norm.learning` (C, 1) says which
    statistics normalise: the batch's, while steps are taken, or those kept. The batch's are recorded as `seen.1.mean` and
    `seen.1.var`, padding left out.

    Args:
        module: with or without nn.BatchNorm1d, 2d, 3d, found by their type; else as in `network`.
        likelihood: from `hierfl.models.likelihood`, or `(output (C, B, K)) -> distribution`. Default `categorical()`.
        x: the field that goes in.
        y: the field of labels.

    Raises:
        ValueError: dropout in training mode, lazy weights, or nothing to learn.

    >>> batch_norm_network(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))).__name__
    'batch_norm_network'
    """
    net = _replaced(module)
    layers = {name: part for name, part in net.named_modules() if isinstance(part, ClientNorm)}
    frozen_copy(net)  # its refusals
    inside = {
        f"{layer}.{part}" for layer, norm in layers.items() for part, _ in norm.named_parameters()
    }
    tensors = {
        name: p.detach()
        for name, p in net.named_parameters()
        if p.requires_grad and name not in inside
    }
    given_output = (
        likelihood
        if isinstance(likelihood, Likelihood)
        else Likelihood(likelihood)
        if likelihood
        else categorical()
    )

    def one(
        shared: dict[str, Tensor], own: dict[str, Tensor], rows: Tensor, there: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        masks = {f"{layer}.there": there for layer in layers}
        output: Tensor = functional_call(net, {**shared, **own, **masks}, (rows,))
        seen = [value for norm in layers.values() for value in norm.seen or ()]
        for norm in layers.values():
            norm.seen = None
        return output, seen

    def batch_norm_network(batch: ClientBatch) -> None:
        label, rows, clients = given_output(), field(batch, x), batch.num_clients
        shared = {
            name: pyro.param(f"theta.{name}", start.clone()) for name, start in tensors.items()
        }
        with batch.clients():
            own = {}
            for layer, norm in layers.items():
                for part in norm.parts:
                    start = getattr(norm, part).detach()
                    own[f"{layer}.{part}"] = pyro.param(
                        f"norm.{layer}.{part}", start.expand(clients, 1, *start.shape).clone()
                    )[:, 0]
            if layers:
                learning = pyro.param("norm.learning", torch.zeros(clients, 1))[:, 0]
                own |= {f"{layer}.learning": learning for layer in layers}
            there = batch.mask().to(batch.counts.dtype)
            if clients == 1:
                output, seen = one(
                    shared, {name: value[0] for name, value in own.items()}, rows[0], there[0]
                )
                output, seen = output[None], [value[None] for value in seen]
            else:
                output, seen = torch.vmap(lambda o, r, t: one(shared, o, r, t))(own, rows, there)
            parts = [f"{layer}.{part}" for layer in layers for part in ("mean", "var")]
            for part, value in zip(parts, seen, strict=True):
                pyro.deterministic(f"seen.{part}", value[:, None], event_dim=1)
            with batch.data():
                observe(y, label(output if output.dim() > 2 else output[..., None]), batch)

    return batch_norm_network


def _replaced(module: nn.Module) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return ClientNorm(module)
    module = copy.deepcopy(module)
    for name, part in list(module.named_modules()):
        if isinstance(part, _BatchNorm):
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, ClientNorm(part))
    return module
