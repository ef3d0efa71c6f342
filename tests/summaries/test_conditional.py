"""Draws of a client's one scalar that is not Normal, given the global sites."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl import ClientBatch, ClientData
from hierfl.core.process import double_precision
from hierfl.methods.stages.two_stage import seen_in
from hierfl.program.read import read_model
from hierfl.summaries.conditional import NodeProposal, Proposal, proposals_at

MEASURES = [-1.2, 0.1, 0.2, 1.3]
LOCS, SHARES, NARROW, NOISE = torch.tensor([-1.0, 1.2]), torch.tensor([0.4, 0.6]), 0.2, 0.6


def kinds(batch: ClientBatch) -> None:
    shift = pyro.sample("shift", dist.Normal(0.0, 0.3))
    with batch.clients():
        parts = dist.Normal(shift + LOCS, NARROW)
        w = pyro.sample("w", dist.MixtureSameFamily(dist.Categorical(SHARES), parts))
        with batch.data():
            pyro.sample("y", dist.Normal(w, NOISE), obs=batch.y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_proposal_through_nodes_is_a_density_that_it_draws_from(dtype: torch.dtype) -> None:
    """Of a long left tail, with a fall by more nats than an exponential of float32 holds."""
    nodes = torch.linspace(-6.0, 4.0, 21, dtype=dtype)
    log = torch.stack([0.5 * nodes - nodes.exp(), -400.0 * (nodes - 1.0).abs()])
    proposal = NodeProposal.through(nodes.expand(2, -1), log)
    grid = torch.linspace(-6.0, 4.0, 40_001, dtype=dtype)[:, None, None].expand(-1, 2, 1)
    density = torch.vmap(proposal.log_prob)(grid).exp()
    integral = torch.trapezoid(density, grid[..., 0], dim=0)
    assert integral.tolist() == pytest.approx([1.0, 1.0], abs=2e-3)
    shares = (torch.arange(20_000, dtype=dtype) + 0.5) / 20_000
    e = torch.special.ndtri(shares)[:, None, None].expand(-1, 2, 1)
    drawn = torch.vmap(proposal.at)(e)[..., 0]
    assert bool(drawn.isfinite().all())
    for power in (1, 2):
        moment = torch.trapezoid(density * grid[..., 0] ** power, grid[..., 0], dim=0)
        assert (drawn**power).mean(0).tolist() == pytest.approx(moment.tolist(), rel=5e-3)


def test_proposals_of_a_client_of_either_kind_are_of_both_at_each_draw() -> None:
    """Given the shift and y, w is of two Normals in closed form; without y, as the prior has it."""
    y = torch.tensor(MEASURES).double()
    data = ClientData.from_arrays([f"c{k}" for k in range(len(y))], y=y.float())
    with double_precision():
        hierarchy = seen_in(read_model(kinds, data).program).hierarchy
        wide = Proposal(torch.zeros(len(y), 2, 1), torch.full((len(y), 2, 1, 1), 1.2))
        factor = torch.full((len(y), 1, 1), NOISE**-2), y[:, None] * NOISE**-2
        row = hierarchy.batch({}, len(y))
        grid = torch.linspace(-2.5, 2.5, 501)
        for shift in (-0.4, 0.3):
            proposal = proposals_at(hierarchy, torch.tensor([shift]), row, factor, wide)
            assert isinstance(proposal, NodeProposal)
            at = grid[:, None, None, None].expand(-1, 2, len(y), 1)
            levels = torch.vmap(proposal.log_prob)(at).exp().cumsum(0) * float(grid[1] - grid[0])
            assert (levels[:, 0] - _cdf(grid, y, shift, NOISE)).abs().max() < 0.06
            assert (levels[:, 1] - _cdf(grid, y, shift, 1e6)).abs().max() < 0.06


def _cdf(grid: Tensor, y: Tensor, shift: float, noise: float) -> Tensor:
    """Return P(w < grid | shift, y), (grid, N)."""
    locs, precision = shift + LOCS.double(), NARROW**-2 + noise**-2
    log = SHARES.double().log() - 0.5 * (y[:, None] - locs).square() / (NARROW**2 + noise**2)
    means = (locs * NARROW**-2 + y[:, None] * noise**-2) / precision
    below = torch.special.ndtr((grid[:, None, None] - means) * precision**0.5)
    return (log.softmax(-1) * below).sum(-1)
