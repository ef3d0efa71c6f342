"""Log ratios carried over to other draws: polynomials exactly, others with an error that is no smaller than it is."""

import math

import torch
from torch import Tensor

from hierfl.summaries.carried import carried_over
from hierfl.summaries.conditional import terms_of_clients
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.reading import read_likelihood
from hierfl.summaries.seen_hierarchy import seen_hierarchy
from tests.summaries import programs
from tests.summaries.programs import program_of


def draws(count: int, size: int = 3, *, seed: int = 0, scale: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, size, generator=g, dtype=torch.float64)


def cubic(z: Tensor) -> Tensor:
    """Two clients."""
    one = 0.3 * z[:, 0] - 0.2 * z[:, 0] * z[:, 1] + 0.05 * z[:, 2] ** 3
    return torch.stack([one, 2.0 + 0.1 * z[:, 1] ** 2 * z[:, 2]], 1)


def test_a_cubic_is_carried_over_exactly() -> None:
    z, to = draws(500), draws(300, seed=1, scale=1.2)
    found = carried_over(cubic(z), z, torch.zeros(500), to)
    torch.testing.assert_close(found.ratios, cubic(to), atol=1e-8, rtol=0.0)
    assert found.error < 1e-6


def test_the_error_is_about_what_is_off() -> None:
    def bent(z: Tensor) -> Tensor:
        return 0.3 * torch.sin(2.0 * z[:, :1] + z[:, 1:2])

    z, to = draws(1000), draws(400, seed=1)
    found = carried_over(bent(z), z, torch.zeros(1000), to)
    off = float((found.ratios - bent(to)).std())
    assert 0.5 * off < found.error < 3.0 * off


def test_draws_beyond_all_known_ones_are_said_to_be_unsure() -> None:
    z, far = draws(500), draws(300, seed=1) + 6.0
    g = torch.Generator().manual_seed(3)
    rough = cubic(z) + 0.05 * torch.randn(500, 2, generator=g)
    near = carried_over(rough, z, torch.zeros(500), draws(300, seed=1))
    assert near.error < 0.15
    assert carried_over(rough, z, torch.zeros(500), far).error > 1.0


def test_ratios_that_are_constant_have_no_error_and_few_draws_have_no_fit() -> None:
    z = draws(12, 5)
    same = carried_over(torch.full((12, 2), 3.0), z, torch.zeros(12), draws(4, 5))
    assert same.error == 0.0 and bool((same.ratios == 3.0).all())
    few = carried_over(draws(12, 2), z, torch.zeros(12), draws(4, 5))
    assert math.isinf(few.error)


def test_terms_that_depend_on_each_other_do_not_enlarge_rounding() -> None:
    g = torch.Generator().manual_seed(0)
    z, to = (torch.randn(200, 3, generator=g, dtype=torch.float64) for _ in range(2))
    z, to = (torch.cat([of, of.sum(1, keepdim=True)], 1) for of in (z, to))
    noise = torch.randn(200, 2, generator=g, dtype=torch.float64)
    ratios = 0.1 * z[:, :2] ** 3 + 0.01 * noise
    rounded = z * (1.0 + 1e-15 * torch.randn(z.shape, generator=g, dtype=torch.float64))
    carried = [carried_over(ratios, of, -ratios.sum(1), to).ratios for of in (z, rounded)]
    torch.testing.assert_close(*carried, atol=1e-9, rtol=0.0)


def test_terms_of_a_client_hold_what_no_cubic_of_all_parameters_does() -> None:
    """A ratio that no longer moves with a scale once it is large: a cubic of the scale diverges."""

    def own(i: int, z: Tensor) -> Tensor:
        return torch.stack([torch.sigmoid(3.0 * z[:, 0]), z[:, 1 + i]], 1)

    def ratios(z: Tensor) -> Tensor:
        terms = [own(i, z) for i in range(2)]
        return torch.stack([2.0 * t[:, 0] ** 2 * t[:, 1] - 0.3 * t[:, 1] for t in terms], 1)

    z, to = draws(1000), draws(400, seed=1, scale=1.5)
    shared = carried_over(ratios(z), z, torch.zeros(1000), to)
    found = carried_over(ratios(z), z, torch.zeros(1000), to, own)
    assert shared.error > 0.1 and float((shared.ratios - ratios(to)).sum(1).std()) > 0.3
    torch.testing.assert_close(found.ratios, ratios(to), atol=1e-6, rtol=0.0)
    assert found.error < 1e-3


def test_terms_of_a_client_are_moments_in_closed_form() -> None:
    """A random intercept: Normal(mu, tau) times exp(shift a - precision a^2 / 2)."""
    precision, shift = torch.tensor([[[2.0]], [[0.5]]]), torch.tensor([[1.0], [-0.3]])
    hierarchy = seen_hierarchy(read_likelihood(program_of(programs.binary)))
    of = terms_of_clients(hierarchy, Factors(precision, shift, {}), torch.arange(2))
    assert of is not None
    z = draws(20, 2)  # mu, log tau
    for k in range(2):
        within = (-2.0 * z[:, 1]).exp()
        variance = 1.0 / (within + precision[k, 0, 0])
        mean = variance * (within * z[:, 0] + shift[k, 0])
        torch.testing.assert_close(of(k, z), torch.stack([mean, variance], 1))
