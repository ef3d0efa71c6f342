"""SFVI-Avg, `fedsvi(merge=)`, against closed forms, and FedAvg, which it is with points."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hierfl import guides, methods
from hierfl.guides.global_sites import diagonal_normal, low_rank_normal
from hierfl.methods import fedsvi
from hierfl.optimizers import SGD, Adam
from hierfl.program.program import ProgramError
from tests.methods.cases import shared
from tests.methods.test_pvi import MEAN, PRECISION, close, e1, gaussian, line
from tests.programs import federation, fit, means, read, regression, slopes, three

LONG: dict[str, Any] = {
    "schedule": "constant",
    "average": 0.0,
    "global_steps": 1000,
    "draws": 16,
}


def moments(fitted: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of the only global site, under mean field."""
    params = fitted.message["params"]
    return params["g.loc"], torch.nn.functional.softplus(params["g.scale"]) ** 2


@pytest.mark.slow  # a minute
@pytest.mark.parametrize(
    ("merge", "mean", "variance"),
    [("natural", 1.846154, 0.461538), ("wasserstein", 1.587302, 0.434411)],
)
def test_one_round_of_clients_at_their_optima(merge: Any, mean: float, variance: float) -> None:
    """A hierarchy whose local sites a Laplace guide integrates out exactly, with 3 clients.

    Client k's optimum has N times its factor: N(4/3, 4/9), N(0, 4/13), N(24/7, 4/7).
    """
    guide = guides.conditional(shared=diagonal_normal, newton_steps=0)
    method = fedsvi(means, guide, merge=merge, global_optimizer=Adam(0.01), **LONG)
    params = fit(method, three(), rounds=1).message["params"]
    close(params["_shared.loc"], [mean], 0.1)
    close(torch.nn.functional.softplus(params["_shared.scale"]) ** 2, [variance], 0.1)


def test_natural_parameters_of_dense_gaussians_are_averaged() -> None:
    """The mean of natural parameters of three given Gaussians, by linear algebra of their own."""
    from hierfl.methods.posteriors.merging import averaged_by

    program = read(slopes, guides.structured, federation())
    merge = averaged_by(program, "natural")
    assert merge is not None
    start = {n: v.double() for n, v in program.start()[0].items()}
    generator = torch.Generator().manual_seed(0)
    copies = [
        {
            n: v + 0.3 * torch.randn(v.shape, generator=generator, dtype=v.dtype)
            for n, v in start.items()
        }
        for _ in range(3)
    ]

    def natural(params: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.nn.functional.softplus(params["_shared.scale"])
        tril = scale[:, None] * (params["_shared.lower"].tril(-1) + torch.eye(2))
        precision = torch.linalg.inv(tril @ tril.T)
        return precision @ params["_shared.loc"], precision

    sent = [merge.sent(copy) for copy in copies]
    mean = {n: torch.stack([s[n] for s in sent]).mean(0) for n in sent[0]}
    found = natural(merge.merged(mean))
    wanted = [torch.stack(parts).mean(0) for parts in zip(*map(natural, copies), strict=True)]
    close(found[0], wanted[0], 1e-6)
    close(found[1], wanted[1], 1e-6)
    back = merge.merged(merge.sent(copies[0]))
    for name, value in merge.merged(merge.sent(back)).items():
        close(value, back[name], 1e-6)


def test_points_are_averaged_as_by_fedavg() -> None:
    data = federation((4, 4, 4))
    method = fedsvi(
        shared(),
        guides.delta,
        merge="natural",
        global_optimizer=SGD(0.05 / (3 * 4)),
        global_steps=4,
        schedule="constant",
        average=0.0,
    )
    one = fit(method, data, rounds=3, seed=1)
    plain = methods.fedavg(shared(), optimizer=SGD(0.05), steps=4, batch_size=None)
    two = fit(plain, data, rounds=3, seed=1)
    for name, value in two.message.items():
        close(one.message["params"][name], value, 1e-10)


def test_one_client_and_one_step_are_fedsvi() -> None:
    data = federation((5,))
    how: dict[str, Any] = {"schedule": "constant", "average": 0.0}
    one = fedsvi(regression, merge="natural", global_optimizer=SGD(1e-3), **how)
    two = fedsvi(regression, optimizer=SGD(1e-3), **how)
    a, b = (fit(m, data, rounds=4, seed=2).message["params"] for m in (one, two))
    for name, value in b.items():
        wanted = value.tril(-1) if name == "_shared.lower" else value
        close(a[name], wanted, 1e-8)


def test_fewer_rounds_reach_the_pooled_posterior() -> None:
    """Natural parameters of a Gaussian model: the pooled posterior, in 12 rounds of 30 steps."""
    guide = guides.structured
    method = fedsvi(
        line, guide, merge="natural", global_optimizer=Adam(0.02), global_steps=30, draws=2,
        average=0.5,
    )  # fmt: skip
    loc, precision = gaussian(fit(method, e1(), rounds=12))
    close(loc, MEAN, 0.12)
    close(precision / PRECISION, torch.ones(2, 2), 0.5)


def test_refused() -> None:
    with pytest.raises(ProgramError, match="is no mean over clients"):
        fit(fedsvi(regression, merge="wasserstein"), federation(), rounds=1)
    low = guides.structured(shared=low_rank_normal)
    with pytest.raises(ProgramError, match="averages Gaussians"):
        fit(fedsvi(regression, low, merge="natural"), federation(), rounds=1)
    with pytest.raises(ValueError, match="merge is 'mean'"):
        fedsvi(regression, merge="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave it"):
        fit(fedsvi(regression, merge="natural"), federation(), rounds=1, engine="pooled")
