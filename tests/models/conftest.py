"""Three ragged clients with a field for every model, and densities of a model at random values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hierfl.batch import ClientBatch, full_batch
from hierfl.data import ClientData
from hierfl.program import Params, Program


@pytest.fixture
def data() -> ClientData:
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


@pytest.fixture
def pooled(data: ClientData) -> ClientBatch:
    return full_batch(data, torch.arange(3))


@pytest.fixture
def singles(data: ClientData) -> list[ClientBatch]:
    return [full_batch(data, torch.tensor([k])) for k in range(3)]


@pytest.fixture
def rows(data: ClientData) -> list[dict[str, Tensor]]:
    """Each client's own rows, without batch or padding."""
    return [data.select([k]).fields | {} for k in range(3)]  # type: ignore[operator]


def values_at_random(program: Program, clients: int, seed: int = 0) -> dict[str, Tensor]:
    """A value of every latent site, away from where guides start: (C, 1, *event) for local ones."""
    g = torch.Generator().manual_seed(seed)
    values = {}
    for site in program.latents.sites:
        shape = list(site.free_start.shape)
        if site.is_local:
            shape[0] = clients
        values[site.name] = site.transform(0.7 * torch.randn(shape, generator=g))
    return values


def params_at_random(program: Program, seed: int = 0) -> Params:
    """Unconstrained values of the model's own params."""
    g = torch.Generator().manual_seed(seed)
    start, _ = program.start()
    return {name: value + 0.3 * torch.randn(value.shape, generator=g) for name, value in start.items() if name.startswith(("theta", "scale"))}


def of_client(values: dict[str, Tensor], program: Program, k: int) -> dict[str, Tensor]:
    """What of the values one client sees."""
    local = {site.name for site in program.latents.local_block.sites}
    return {name: value[k : k + 1] if name in local else value for name, value in values.items()}
