"""Reductions over the rows of each client, and joint Normals: padded rows count for nothing."""

from collections.abc import Sequence

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl import ClientBatch, ClientData, full_batch
from hierfl.data.joint_normal import JointNormal
from hierfl.engine.chunks import one_slot, over_clients, slots_of

COUNTS = (6, 1, 3)


def ragged(counts: Sequence[int] = COUNTS) -> ClientData:
    g = torch.Generator().manual_seed(0)
    n = sum(counts)
    return ClientData.from_arrays(
        torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        names=[f"c{k}" for k in range(len(counts))],
        y=torch.randn(n, generator=g),
        x=torch.randn(n, 2, 3, generator=g),
        times=torch.randint(0, 9, (n,), generator=g),
        on=torch.rand(n, generator=g) < 0.5,
    )


def whole(data: ClientData) -> ClientBatch:
    return full_batch(data, torch.arange(data.num_clients))


def own(data: ClientData, field: str) -> list[Tensor]:
    """The rows of each client, without any batch."""
    return list(data.fields[field].split(data.counts.tolist()))


@pytest.mark.parametrize("counts", [COUNTS, (4, 4), (1, 1)])
@pytest.mark.parametrize("field", ["y", "x", "times", "on"])
def test_sums_and_means_are_those_of_a_loop(field: str, counts: tuple[int, ...]) -> None:
    data = ragged(counts)
    batch = whole(data)
    x, each = getattr(batch, field), own(data, field)
    assert batch.sum(x).shape == (len(counts), 1, *x.shape[2:])
    torch.testing.assert_close(batch.sum(x), torch.stack([v.sum(0) for v in each])[:, None])
    torch.testing.assert_close(
        batch.mean(x), torch.stack([v.to(torch.get_default_dtype()).mean(0) for v in each])[:, None]
    )


@pytest.mark.parametrize("at_once", [True, False])
def test_reductions_of_one_slot_at_a_time(at_once: bool) -> None:
    """As an engine carries them: every client in a slot of its own, under vmap or not."""
    batch = whole(ragged())
    slots, shared = slots_of(batch)

    def one(slot: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = one_slot(slot, shared, batch)
        return {"sum": mine.sum(mine.x), "mean": mine.mean(mine.y)}

    found = over_clients(one, at_once, slots, count=batch.num_clients)
    torch.testing.assert_close(found["sum"][:, 0], batch.sum(batch.x))
    torch.testing.assert_close(found["mean"][:, 0], batch.mean(batch.y))


def test_plates_left_of_the_clients() -> None:
    batch = whole(ragged())
    x = torch.stack([batch.y, 2.0 * batch.y])  # (2, C, B)
    torch.testing.assert_close(batch.mean(x, dim=-1)[1], 2.0 * batch.mean(batch.y))


def test_what_is_the_same_in_every_row_counts_once_a_row() -> None:
    batch = whole(ragged())
    torch.testing.assert_close(batch.sum(torch.ones(3, 1))[:, 0], batch.counts)
    torch.testing.assert_close(batch.mean(torch.full((3, 1), 5.0)), torch.full((3, 1), 5.0))


def test_padded_rows_have_no_gradient_and_no_nan() -> None:
    batch = whole(ragged())
    x = torch.where(batch.mask(), batch.y, torch.nan).requires_grad_()
    (batch.sum(x) + batch.mean(x)).sum().backward()
    assert x.grad is not None
    assert bool((x.grad[~batch.mask()] == 0.0).all()) and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("verb", ["sum", "mean"])
def test_another_dimension_than_that_of_the_rows_is_refused(verb: str) -> None:
    batch = whole(ragged())
    for x, dim in ((batch.x, 2), (batch.x, 7), (batch.y.T, 1)):
        with pytest.raises(ValueError, match=r"x has shape .* the 6 rows .*dim="):
            getattr(batch, verb)(x, dim=dim)


# ---------------------------------------------------------------------------------------- joint
# Normals
def covariance(x: Tensor) -> Tensor:
    """A kernel over rows with features (..., B, D)."""
    apart = (x[..., :, None, :] - x[..., None, :, :]).square().sum(-1)
    return (-0.5 * apart).exp() + 0.1 * torch.eye(x.shape[-2])


def test_a_joint_normal_is_the_normal_of_each_clients_own_rows() -> None:
    data = ragged()
    batch = whole(data)
    loc = batch.packed(0.3 * batch.y + 1.0)
    joint = batch.joint_normal(loc, covariance(batch.packed(batch.x.flatten(2))))
    assert joint.batch_shape == (3, 1) and joint.event_shape == (6,)
    found = joint.log_prob(batch.packed(batch.y))
    wanted = [
        dist.MultivariateNormal(0.3 * y + 1.0, covariance(x.flatten(1))).log_prob(y)
        for x, y in zip(own(data, "x"), own(data, "y"), strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(wanted)[:, None], rtol=1e-12, atol=1e-12)


def test_padded_rows_of_a_joint_normal_may_hold_anything() -> None:
    inside = torch.tensor([True, True, False])
    matrix = torch.tensor([[2.0, 0.5, torch.nan], [0.5, 1.0, 9.0], [torch.nan, 9.0, -4.0]])
    joint = JointNormal(torch.tensor([0.0, 1.0, torch.nan]), matrix, inside)
    alone = dist.MultivariateNormal(torch.tensor([0.0, 1.0]), matrix[:2, :2])
    value = torch.tensor([0.4, -0.2, torch.inf])
    torch.testing.assert_close(joint.log_prob(value), alone.log_prob(value[:2]))
    larger = joint.expand(torch.Size([4]))
    assert isinstance(larger, JointNormal) and larger.sample().shape == (4, 3)
    torch.testing.assert_close(larger.log_prob(value), alone.log_prob(value[:2]).expand(4))
