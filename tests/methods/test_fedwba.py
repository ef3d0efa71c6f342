"""FedWBA: Stein's direction, the barycenter, FedAvg with one particle, and a planted mixture."""

import pytest
import torch
from torch import Tensor

from hierfl import models
from hierfl.methods import fedwba
from hierfl.methods.posteriors.fedwba import barycenter, stein
from hierfl.models.likelihood import normal
from hierfl.optimizers import Adam
from tests.methods.test_pfedvem import views
from tests.methods.test_pvi import close
from tests.programs import fit


def test_stein_s_direction_is_that_of_its_definition() -> None:
    """Sums over pairs, with the kernel's gradient by autograd."""
    generator = torch.Generator().manual_seed(0)
    w, slope = (torch.randn(5, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    distances = torch.stack([(a - b).square().sum() for a in w for b in w])
    width = distances.median() / torch.tensor(5.0).log()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-(a - b).square().sum() / width).exp()

    wanted = torch.zeros(5, 2, dtype=torch.float64)
    for i in range(5):
        for j in range(5):
            wanted[i] += kernel(w[j], w[i]) * slope[j]
            wanted[i] += torch.func.grad(kernel)(w[j], w[i])
    close(stein(w, slope), wanted / 5, 1e-8)


def test_the_barycenter_of_shifted_clouds() -> None:
    """Clouds of one shape, moved and in another order: the shape at the mean of the shifts.

    In one dimension it is the mean of sorted particles, whatever the shapes.
    """
    generator = torch.Generator().manual_seed(0)
    shape = torch.randn(12, 3, generator=generator)
    shifts = torch.tensor([[4.0, 0, 0], [0, -2, 0], [2, 5, 1]])
    clouds = torch.stack([(shape + s)[torch.randperm(12, generator=generator)] for s in shifts])
    found = barycenter(shape, clouds)
    close(found, shape + shifts.mean(0), 1e-5)
    lines = torch.randn(4, 9, 1, generator=generator).exp()
    start = torch.randn(9, 1, generator=generator)
    close(barycenter(start, lines).sort(0).values, lines.sort(1).values.mean(0), 1e-5)


@pytest.mark.slow
def test_particles_have_the_posterior_s_mean_and_spread() -> None:
    """One client of 4 rows: precision 4 + 1 / width^2 about prior particles at 0."""
    module = torch.nn.Linear(1, 1, bias=False)
    model = models.bayesian_network(
        module, likelihood=normal(1.0), prior_loc="zero", prior_scale=1.0
    )
    method = fedwba(model, particles=40, optimizer=Adam(0.05), steps=400)
    points = fit(method, views(1.5), rounds=1).progress.table.params["at"][0, :, 0]
    # the prior is a kernel estimate of 40 draws of N(0, 1), a little wider than that
    close(points.mean(), 1.5 * 4 / 5, 0.12)
    close(points.std(), (1 / 5) ** 0.5, 0.12)
