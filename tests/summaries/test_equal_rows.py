"""Rows that are equal, or differ in their label alone, are counted together: the same sums in less time."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientBatch, ClientData, full_batch
from hierfl.summaries.packed_rows import packed
from hierfl.summaries.reading import read_likelihood, seen_line
from hierfl.summaries.units import UnitScore
from tests.programs import assert_close
from tests.summaries.programs import program_of

ARMS, ROWS = 3, 60


def arms(*, is_binary: bool = False) -> ClientData:
    """Two clients of 60 and 40 rows in three arms."""
    g = torch.Generator().manual_seed(0)
    arm = torch.randint(ARMS, (ROWS + 40,), generator=g)
    y = arm + torch.randn(len(arm), generator=g)
    y = (y > 1.0).to(y.dtype) if is_binary else y
    return ClientData.from_arrays(["a"] * ROWS + ["b"] * 40, arm=arm, y=y)


def program(noise: Any) -> Any:
    """Levels of arms that are no linear predictor, and a scale of each arm."""

    def model(batch: ClientBatch) -> None:
        steps = pyro.sample("steps", dist.Dirichlet(torch.ones(ARMS)))
        scale = pyro.sample("scale", dist.HalfNormal(torch.ones(ARMS)).to_event(1))
        with batch.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with batch.data():
                loc = w + (w + 2.0) * steps.cumsum(-1)[..., batch.arm]
                pyro.sample("y", noise(loc, scale[..., batch.arm]), obs=batch.y)

    return model


def two_levels(loc: torch.Tensor, scale: torch.Tensor) -> Any:
    """Return a mixture of which one component alone counts far away."""
    which = dist.Categorical(torch.ones(*loc.shape, 2))
    levels = torch.stack([loc + 500.0, loc + 540.0], -1)
    return dist.MixtureSameFamily(which, dist.Normal(levels, scale[..., None].expand_as(levels)))


@pytest.mark.parametrize(
    ("noise", "is_binary", "units"),
    [
        (dist.Normal, False, 2 * 2 * ARMS),
        (lambda loc, scale: dist.Bernoulli(logits=loc * scale), True, 2 * 2 * ARMS),
        # clients as they are
        (lambda loc, scale: dist.StudentT(4.0, loc, scale), False, 2),
        # far from the labels one component is nearly all of the density
        (two_levels, False, 2),
    ],
    ids=["Normal", "Bernoulli", "StudentT", "mixture"],
)
def test_fewer_rows_have_the_same_sums(noise: Any, is_binary: bool, units: int) -> None:
    data = arms(is_binary=is_binary)
    score = UnitScore(seen_line(read_likelihood(program_of(program(noise), data))))
    every, few = (packed(score, full_batch(data), distinct=d) for d in (False, True))
    assert len(few.client) == units
    g = torch.Generator().manual_seed(1)
    v = (score.start + 0.5 * torch.randn(3, len(score.start), generator=g)).expand(2, -1, -1)
    assert_close(few.values(v), every.values(v), 1e-10)
    mean, eye = v[:, 0], torch.eye(v.shape[-1]).expand(2, -1, -1)
    for fewer, whole in zip(few.at_mean(mean, eye), every.at_mean(mean, eye), strict=True):
        assert_close(fewer, whole, 1e-8)
