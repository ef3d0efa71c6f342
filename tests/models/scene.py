"""Shared by the tests of all models: three clients, random values of the sites, and densities by hand."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import halfnorm, norm
from torch import Tensor

from hierfl import ClientBatch, ClientData, Program, full_batch
from hierfl.engine.chunks import over_batch
from hierfl.program.handlers import log_joint
from hierfl.program.program import Params

Values = dict[str, Tensor]
Arrays = dict[str, NDArray[Any]]


def three_clients() -> ClientData:
    g = torch.Generator().manual_seed(1)
    counts = torch.tensor([5, 3, 7])
    n = int(counts.sum())
    return ClientData.from_arrays(
        torch.repeat_interleave(torch.arange(3), counts),
        names=["ann", "bob", "cy"],
        client_fields={"region": torch.randn(3, 2, generator=g)},
        x=torch.randn(n, 2, generator=g),
        one=torch.randn(n, generator=g),
        picture=torch.randn(n, 1, 4, 4, generator=g),
        y=torch.randn(n, generator=g),
        ill=torch.randint(0, 2, (n,), generator=g),
        kind=torch.randint(0, 3, (n,), generator=g),
        visits=torch.randint(0, 5, (n,), generator=g),
        years=torch.rand(n, generator=g) + 0.5,
    )


def everyone(data: ClientData) -> ClientBatch:
    return full_batch(data, torch.arange(data.num_clients))


def alone(data: ClientData, k: int) -> ClientBatch:
    return full_batch(data, torch.tensor([k]))


def rows_of(data: ClientData, k: int) -> Arrays:
    """One client's rows, without a batch and without padded rows."""
    return {name: value.numpy() for name, value in data.select([k]).fields.items()}


def values_at_random(program: Program, clients: int = 3, seed: int = 0) -> Values:
    """A random value of every latent site, away from where guides start: (C, 1, *event) for local ones."""
    g = torch.Generator().manual_seed(seed)
    values = {}
    for site in program.latents.sites:
        shape = list(site.free_start.shape)
        if site.is_local:
            shape[0] = clients
        values[site.name] = site.transform(0.7 * torch.randn(shape, generator=g))
    return values


def params_at_random(program: Program, seed: int = 0) -> Params:
    """Random unconstrained values of the model's own params."""
    g = torch.Generator().manual_seed(seed)
    specs = [
        spec
        for spec in program.params
        if spec.name.startswith(("theta.", "scale.")) and not spec.name.endswith(".at")
    ]
    return {
        spec.name: spec.start + 0.3 * torch.randn(spec.start.shape, generator=g) for spec in specs
    }


def of_client(program: Program, values: Values, k: int) -> Values:
    """The values that one client sees: the global ones and its own local ones."""
    local = {site.name for site in program.latents.local_block.sites}
    return {name: value[k : k + 1] if name in local else value for name, value in values.items()}


def numbers(values: Values, k: int, local: set[str]) -> Arrays:
    """The values of one client as NumPy arrays, without the dimensions of the plates."""
    return {
        name: (value[k, 0] if name in local else value).detach().numpy()
        for name, value in values.items()
    }


def densities(
    program: Program, values: Values, batch: ClientBatch, params: Params | None = None
) -> tuple[Tensor, Tensor]:
    """Log joint densities: the local part of each client (C,), and the global part ()."""
    return log_joint(program.model, values, batch, params or {})


def check_every_engine(
    program: Program, data: ClientData, values: Values, params: Params | None = None
) -> Tensor:
    """Check that each client's density is the same pooled, one by one and under vmap; return it, (C,)."""
    pooled, shared = densities(program, values, everyone(data), params)
    one_by_one = [
        densities(program, of_client(program, values, k), alone(data, k), params)
        for k in range(data.num_clients)
    ]
    torch.testing.assert_close(torch.cat([own for own, _ in one_by_one]), pooled)
    for _, again in one_by_one:
        torch.testing.assert_close(again, shared)
    local = {site.name for site in program.latents.local_block.sites}
    slots = {name: value[:, None] for name, value in values.items() if name in local}
    above = {name: value for name, value in values.items() if name not in local}

    def one(slot: Values, batch: ClientBatch) -> Tensor:
        return densities(program, {**above, **slot}, batch, params)[0]

    torch.testing.assert_close(over_batch(one, True, slots, everyone(data))[:, 0], pooled)
    return pooled


def normal(value: Any, loc: Any, scale: Any) -> float:
    return float(np.sum(norm.logpdf(value, loc, scale)))


def half_normal(value: Any, scale: float = 1.0) -> float:
    return float(np.sum(halfnorm.logpdf(value, scale=scale)))
