"""FedBN: statistics against torch's own layers, FedAvg without batch norm, and local layers not sent."""

import torch
from torch import nn
from torch.func import functional_call

import hierfl
from hierfl.methods import fedbn
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.programs import federation, fit


def net(*, normalized: bool = True) -> nn.Module:
    layers = [
        nn.BatchNorm1d(2),
        nn.Linear(2, 3),
        nn.BatchNorm1d(3, affine=False),
        nn.Tanh(),
        nn.Linear(3, 1),
    ]
    module = nn.Sequential(
        *[layer for layer in layers if normalized or not isinstance(layer, nn.BatchNorm1d)]
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return module


def test_a_step_and_the_predictions_equal_torchs_own_layers() -> None:
    """One client, all rows: one step in training mode equals torch's.

    Afterwards the statistics are those of all rows, and predictions use them.
    """
    data, module, lr = federation((9,)), net(), 0.1
    fitted = fit(
        fedbn(network(module, likelihood=normal(1.0)), optimizer=SGD(lr), batch_size=None),
        data,
        rounds=1,
    )
    x, y = data.fields["x"], data.fields["y"]
    module.train()
    loss = 0.5 * (module(x)[:, 0] - y).square().mean()
    for weight, slope in zip(
        module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
    ):
        weight.data -= lr * slope
    for name in ("1.weight", "1.bias", "4.weight", "4.bias"):
        assert torch.allclose(
            fitted.message[f"theta.{name}"], module.get_parameter(name), atol=1e-12
        ), name
    own = fitted.progress.table
    assert torch.allclose(own["head"]["theta.0.weight"][0], module[0].weight, atol=1e-12)  # type: ignore[index]
    seen = {name: value.flatten() for name, value in own["statistics"].items()}
    assert torch.allclose(seen["statistics.0.mean"], x.mean(0), atol=1e-12)
    assert torch.allclose(seen["statistics.0.var"], x.var(0, unbiased=False), atol=1e-12)
    with torch.no_grad():
        wanted = functional_call(module, dict(module.named_parameters()), (x,))[
            :, 0
        ]  # training mode: the statistics of x
    assert torch.allclose(fitted.predict(data).mean, wanted, atol=1e-9)
    few = data.where(torch.arange(9) < 2)
    assert torch.allclose(fitted.predict(few).mean, wanted[:2], atol=1e-9), (
        "a row's prediction does not depend on other rows"
    )


def test_padded_rows_do_not_enter_the_statistics() -> None:
    method = fedbn(network(net(), likelihood=normal(1.0)), batch_size=None, optimizer=SGD(0.1))
    data = federation((5, 9))
    together = fit(method, data, rounds=1).progress.table
    mean = together["statistics"]["statistics.0.mean"][0].flatten()
    assert torch.allclose(mean, data.fields["x"][:5].mean(0), atol=1e-12)


def test_a_client_in_no_round_predicts_by_statistics_of_its_rows() -> None:
    """At the common weights: as torch's layers do, with the client's rows as one batch in training mode."""
    data, module = federation((9, 4, 6)), net()
    method = fedbn(network(module, likelihood=normal(1.0)), optimizer=SGD(0.1))
    joined = hierfl.ClientData.from_arrays(
        ["new"] * 4, x=data.fields["x"][9:13], y=data.fields["y"][9:13]
    )
    fitted = fit(method, data, rounds=2, cohort=1)
    absent = [k for k in range(3) if not fitted.progress.table["seen"][k]]
    assert absent
    common = {name.removeprefix("theta."): value for name, value in fitted.message.items()}
    module.train()

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return functional_call(module, common, (x,))[:, 0]

    found = fitted.predict(data).mean
    for k in absent:
        its = data.row_client == k
        assert torch.allclose(found[its], by_torch(data.fields["x"][its]), atol=1e-9)
    new = fitted.personalize(joined, rounds=0).predict(joined).mean
    assert torch.allclose(new, by_torch(joined.fields["x"]), atol=1e-9)
