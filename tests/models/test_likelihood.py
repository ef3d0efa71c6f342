"""Likelihoods of networks: built-in and user-defined."""

import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from hierfl import ClientData, ProgramError, guides, models, read
from hierfl.models.likelihood import Likelihood, bernoulli, categorical, normal, poisson
from tests.models.scene import (
    check_every_engine,
    densities,
    everyone,
    half_normal,
    values_at_random,
)

OUTPUT = torch.tensor([[[0.3], [-1.2]]])


def test_built_in_likelihoods_by_hand() -> None:
    y = torch.tensor([[1.0, 0.0]])
    expected = torch.log(
        torch.stack([torch.sigmoid(OUTPUT[0, 0, 0]), torch.sigmoid(-OUTPUT[0, 1, 0])])
    )[None]
    torch.testing.assert_close(bernoulli()()(OUTPUT).log_prob(y), expected)
    rate = OUTPUT[..., 0].exp()
    torch.testing.assert_close(poisson()()(OUTPUT).log_prob(y), y * rate.log() - rate)
    torch.testing.assert_close(
        normal(2.0)()(OUTPUT).log_prob(y),
        torch.distributions.Normal(OUTPUT[..., 0], 2.0).log_prob(y),
    )
    two = torch.cat([torch.zeros_like(OUTPUT), OUTPUT], -1)
    torch.testing.assert_close(
        categorical()()(two).log_prob(y.long()), bernoulli()()(OUTPUT).log_prob(y)
    )


def test_noise_scale_is_a_global_site(data: ClientData) -> None:
    program = read(
        models.network(nn.Linear(2, 1), likelihood=normal(dist.HalfNormal(2.0))),
        guides.mean_field,
        data,
    )
    assert [(site.name, site.is_local) for site in program.latents.sites] == [
        ("noise_scale", False)
    ]
    values, params = values_at_random(program), program.start()[0]
    own = densities(program, values, everyone(data), params)[1]
    assert own.item() == pytest.approx(half_normal(values["noise_scale"].numpy(), 2.0))


def test_plain_function_as_likelihood(data: ClientData) -> None:
    def laplace(output: Tensor) -> TorchDistributionMixin:
        fn: TorchDistributionMixin = dist.Laplace(output[..., 0], output[..., 1].exp())
        return fn

    program = read(models.bayesian_network(nn.Linear(2, 2), likelihood=laplace), guides.delta, data)
    check_every_engine(
        program,
        data,
        values_at_random(program),
        {k: v for k, v in program.start()[0].items() if "theta" in k},
    )


def test_user_likelihood_with_global_parameters(data: ClientData) -> None:
    def student(output: Tensor, df: Tensor, width: Tensor) -> TorchDistributionMixin:
        fn: TorchDistributionMixin = dist.StudentT(df, output[..., 0], width)
        return fn

    likelihood = Likelihood(student, {"df": dist.LogNormal(1.0, 1.0), "width": 0.5})
    program = read(models.network(nn.Linear(2, 1), likelihood=likelihood), guides.delta, data)
    assert [site.name for site in program.latents.sites] == ["df"]


def test_vector_labels(data: ClientData) -> None:
    model = models.network(
        nn.Linear(2, 2), likelihood=lambda output: dist.Normal(output, 1.0).to_event(1), y="x"
    )
    assert read(model, guides.delta, data).labels == {"x": "x"}


@pytest.mark.parametrize(
    ("outputs", "likelihood", "label", "message"),
    [
        (1, categorical(), "ill", r"at least 2; for 0/1 labels use bernoulli\(\)"),
        (
            3,
            bernoulli(),
            "ill",
            "the network gives 3 outputs per row: this likelihood takes exactly 1",
        ),
        (
            1,
            normal(1.0),
            "x",
            r"field 'x' has shape \(2,\) per row, but its likelihood \(Normal\) needs \(\)",
        ),
    ],
)
def test_wrong_number_of_outputs_or_label_shape_raises(
    outputs: int, likelihood: Likelihood, label: str, message: str, data: ClientData
) -> None:
    with pytest.raises(ProgramError, match=message):
        read(
            models.network(nn.Linear(2, outputs), likelihood=likelihood, y=label),
            guides.delta,
            data,
        )


def test_scale_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"scale is 0.0, but a scale must be > 0"):
        normal(0.0)
