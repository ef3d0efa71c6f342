"""SFVI-Avg, `fedsvi(merge=)`, against closed forms, and FedAvg, which it is with points."""

from typing import Any

import pytest
import torch

from hierfl import guides
from hierfl.guides.global_sites import diagonal_normal
from hierfl.methods import fedsvi
from hierfl.optimizers import Adam
from tests.methods.test_pvi import close
from tests.programs import federation, fit, means, read, slopes, three

LONG: dict[str, Any] = {"schedule": "constant", "average": 0.0, "global_steps": 1000, "draws": 16}


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

    def moved(v: torch.Tensor) -> torch.Tensor:
        return v + 0.3 * torch.randn(v.shape, generator=generator, dtype=v.dtype)

    copies = [{name: moved(v) for name, v in start.items()} for _ in range(3)]

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
