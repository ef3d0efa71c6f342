"""A network whose batch normalization, weights and statistics, stays on each client (FedBN)."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.func import functional_call

from hierfl.data.batch import ClientBatch
from hierfl.models.client_norm import norms_of, with_client_norms
from hierfl.models.functional import frozen_copy
from hierfl.models.likelihood import Likelihood, as_likelihood, field, observe
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


@recorded
def batch_norm_network(
    module: nn.Module,
    *,
    likelihood: Likelihood | Callable[[Tensor], TorchDistributionMixin] | None = None,
    x: str = "x",
    y: str = "y",
) -> Model:
    """Build a network whose batch normalization is local to each client.

        y_kn ~ likelihood(f(x_kn; theta, b_k))

    b_k is the batch normalization of client k, under a flat prior; theta, all other weights, is
    common to all clients. Both are point estimates.

    Params, where `1` is a batch-normalization layer with F features:

    * `theta.<tensor>` (*shape), global: the weights of the other layers.
    * `norm.1.weight`, `norm.1.bias` (C, 1, F), local: the affine weights, where the layer has them.
    * `norm.1.mean`, `norm.1.var` (C, 1, F), local: the stored statistics, which
      `hierfl.methods.fedbn` sets to those of all rows of the client.
    * `norm.learning` (C, 1), local: which statistics normalize. 1 is the batch's, as in gradient
      steps; 0 is the stored ones.

    Sites:

    * `seen.1.mean`, `seen.1.var` (C, 1, F), local and deterministic: the batch's statistics,
      without padded rows.
    * the observed site, named after the field `y`, and the global sites of the likelihood, if any.

    Args:
        module: the network. Layers nn.BatchNorm1d, 2d and 3d are found by their type; it need not
            have any. All else is as for `network`.
        likelihood: from `hierfl.models.likelihood`, or a function `(output (C, B, outputs)) ->
            distribution` of batch shape (C, B). Default `categorical()`.
        x: name of the field of inputs.
        y: name of the field of labels.

    Raises:
        ValueError: the module has dropout in training mode, another layer that normalizes by
            statistics of other rows, lazy parameters, or no parameter outside batch normalization
            that requires a gradient.

    Reference: Li et al. 2021, arXiv:2102.07623.

    >>> batch_norm_network(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))).__name__
    'batch_norm_network'
    """
    net = with_client_norms(module)
    layers = norms_of(net)
    for norm in layers.values():  # they are params of each client, and no weights of the network
        norm.requires_grad_(False)
    frozen_copy(net)  # for its checks alone: `net` is a copy already
    norm_tensors = {
        f"{layer}.{part}" for layer, norm in layers.items() for part, _ in norm.named_parameters()
    }
    tensors = {
        name: p.detach()
        for name, p in net.named_parameters()
        if p.requires_grad and name not in norm_tensors
    }
    given_output = as_likelihood(likelihood)

    def run_client(
        shared: dict[str, Tensor], own: dict[str, Tensor], rows: Tensor, mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        for norm in layers.values():
            norm.seen = None  # of a run that failed
        masks = {f"{layer}.there": mask for layer in layers}
        output: Tensor = functional_call(net, {**shared, **own, **masks}, (rows,))
        seen = [value for norm in layers.values() for value in norm.seen or ()]
        for norm in layers.values():
            norm.seen = None
        return output, seen

    def batch_norm_network(batch: ClientBatch) -> None:
        label, rows, clients = given_output(), field(batch, x), batch.num_clients
        shared = {name: pyro.param(f"theta.{name}", v.clone()) for name, v in tensors.items()}
        with batch.clients():
            own = {}
            for layer, norm in layers.items():
                for part in norm.parts:
                    start = getattr(norm, part).detach()
                    whole = start.expand(clients, 1, *start.shape).clone()
                    own[f"{layer}.{part}"] = pyro.param(f"norm.{layer}.{part}", whole)[:, 0]
            if layers:
                learning = pyro.param("norm.learning", torch.zeros(clients, 1))[:, 0]
                own |= {f"{layer}.learning": learning for layer in layers}
            mask = batch.mask().to(batch.counts.dtype)
            if clients == 1:
                mine = {name: value[0] for name, value in own.items()}
                output, seen = run_client(shared, mine, rows[0], mask[0])
                output, seen = output[None], [value[None] for value in seen]
            else:
                of_clients = torch.vmap(lambda o, r, t: run_client(shared, o, r, t))
                output, seen = of_clients(own, rows, mask)
            names = [f"{layer}.{part}" for layer in layers for part in ("mean", "var")]
            for part, value in zip(names, seen, strict=True):
                pyro.deterministic(f"seen.{part}", value[:, None], event_dim=1)
            with batch.data():
                observe(y, label(output if output.dim() > 2 else output[..., None]), batch)

    if layers:  # in training, by the rows of the mini-batch: `hierfl.program.check_dependence`
        batch_norm_network.normalizes_by_batch = True  # type: ignore[attr-defined]
    return batch_norm_network
