"""FedVI: personalization from inputs alone, special cases, and the objective against Pyro's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

import hierfl
from hierfl import ClientData, Method, Phase, full_batch
from hierfl.methods import fedvi
from hierfl.methods.fedvi import every_other, queried
from hierfl.models import PersonalHeads
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.programs import federation, fit, row_plan


def embedding(size: int = 6) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, size), nn.Tanh())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(0.7 * torch.randn(weight.shape, generator=generator))
    return module


def heads(**options: Any) -> PersonalHeads:
    sizes: dict[str, Any] = {"outputs": 1, "features": 6, "local_features": 2}
    return PersonalHeads(embedding(), **sizes, likelihood=normal(1.0), **options)


def method(model: PersonalHeads | None = None, **options: Any) -> Method:
    settings: dict[str, Any] = {"kl_weight": 0.1, "batch_size": 4, "steps": 2, "hidden": 5}
    settings |= {"optimizer": SGD(0.05), "server_optimizer": SGD(1.0, 0.5), **options}
    return fedvi(model or heads(), **settings)


@pytest.fixture(scope="module")
def fitted() -> hierfl.Fit:
    return fit(method(optimizer=SGD(0.2)), plain(federation((5, 3, 7, 4)), "x", "y"), rounds=6)


def plain(data: ClientData, *fields: str) -> ClientData:
    return ClientData({name: data.fields[name] for name in fields}, data.offsets, data.names)


def test_new_clients_are_personalized_from_inputs_alone(fitted: hierfl.Fit) -> None:
    labeled, bare = (plain(federation((6, 9), seed=3), *names) for names in ("xy", "x"))
    blind = fitted.personalize(bare).predict(bare, draws=7)
    seeing = fitted.personalize(labeled).predict(labeled, draws=7)
    assert blind.log_score is None
    assert torch.equal(blind.mean, seeing.mean), "labels are present but not read"
    other = fitted.personalize(bare.with_fields(x=-bare.fields["x"])).predict(bare, draws=7)
    assert not torch.allclose(other.mean, blind.mean), "it reads the support's inputs"


def test_the_order_of_the_support_does_not_matter(fitted: hierfl.Fit) -> None:
    new = plain(federation((6, 9), seed=3), "x")
    order = torch.cat([torch.arange(6).flip(0), 6 + torch.tensor([3, 1, 4, 0, 5, 8, 2, 6, 7])])
    mixed = ClientData({n: v[order] for n, v in new.fields.items()}, new.offsets, new.names)
    one, two = (fitted.personalize(support).predict(new, draws=7).mean for support in (new, mixed))
    assert torch.allclose(one, two, atol=1e-13)


def test_pooling_ignores_padded_rows() -> None:
    data = federation((3, 9))
    together = fit(method(), data, rounds=2)
    alone = replace(together, federation=replace(together.federation, data=data.select([0])))
    both, one = together.draws(5).own["beta"][:, 0], alone.draws(5).own["beta"][:, 0]
    assert torch.allclose(both, one, atol=1e-13)


def test_v1_without_local_heads_it_equals_fedavg_with_momentum_on_query_rows() -> None:
    data, lr, momentum = federation((6, 3, 7)), 0.05, 0.9
    model = heads(merge=lambda common, own: common + 0.0 * own)
    base = method(model, kl_weight=0.0, steps=1, server_optimizer=SGD(1.3, momentum))
    ours = fit(base, data, rounds=3, seed=2)
    net, head = embedding(), nn.Linear(4, 1)
    whole = nn.ModuleDict({"embedding": net, "head": head})
    start = ours.program.start()[0]
    with torch.no_grad():
        head.weight.copy_(start["head.weight"].T), head.bias.copy_(start["head.bias"])
    velocity = [torch.zeros_like(p) for p in whole.parameters()]
    phase = Phase(lambda lane, message, batch: lane, 1, "epoch", 4)
    for round_ in range(3):
        before = [p.detach().clone() for p in whole.parameters()]
        moves, total = [torch.zeros_like(p) for p in before], 0
        plan = row_plan(data, torch.arange(3), phase, seed=2, at=(round_, 0))
        for k in range(3):
            for p, value in zip(whole.parameters(), before, strict=True):
                p.data = value.clone()
            asked = 0
            for index, inside, active in zip(*plan, strict=True):
                rows = index[k][1::2][inside[k][1::2]]
                if active[k] and len(rows):
                    out = head(net(data.fields["x"][rows])[:, :4])[:, 0]
                    loss = 0.5 * (out - data.fields["y"][rows]).square().mean()
                    slopes = torch.autograd.grad(loss, list(whole.parameters()))
                    for p, g in zip(whole.parameters(), slopes, strict=True):
                        p.data -= lr * g
                    asked += len(rows)
            for m, p, b in zip(moves, whole.parameters(), before, strict=True):
                m += asked * (p.detach() - b)
            total += asked
        for i, p in enumerate(whole.parameters()):
            velocity[i] = momentum * velocity[i] - moves[i] / total
            p.data = before[i] - 1.3 * velocity[i]
    for name, value in net.named_parameters():
        assert torch.allclose(ours.message[f"embedding.{name}"], value, atol=1e-10), name
    assert torch.allclose(ours.message["head.weight"], head.weight.T, atol=1e-10)


def test_a_step_descends_the_summed_loss_with_tau_and_gamma() -> None:
    data, lr = federation((6, 4)), 0.01
    model = heads(global_scale=0.8)
    options: dict[str, Any] = {"loss": "sum", "kl_weight": 0.7, "prior_weight": 0.3}
    options |= {"steps": 1, "batch_size": None, "optimizer": SGD(lr)}
    fitted = fit(method(model, server_optimizer=SGD(1.0), **options), data, rounds=1, seed=2)
    theta, moves = fitted.program.start()[0], []
    for k in range(2):
        support, query = every_other(full_batch(data, torch.tensor([k]), seed=2, at=(0, 0, 0)))

        def loss(p: dict[str, Tensor], support: Any = support, query: Any = query) -> Tensor:
            terms = fitted.program.terms(p, query, support=support)
            return terms.nll.sum() + 0.7 * terms.local_kl.sum() + 0.3 / 2 * terms.global_kl

        moves.append(grad(loss)(theta))
    for name, value in fitted.message.items():
        wanted = theta[name] - lr * (3 * moves[0][name] + 2 * moves[1][name]) / 5
        assert torch.allclose(value, wanted, atol=1e-12), name


def test_the_halves_are_disjoint_and_cover_all_rows() -> None:
    data = federation((5, 3, 1))
    batch = full_batch(data, torch.arange(3))
    support, query = every_other(batch)
    for k, n in enumerate((5, 3, 1)):
        rows = [part.x[k][part.mask()[k]] for part in (support, query)]
        assert [len(r) for r in rows] == [(n + 1) // 2, n // 2]
        both = torch.cat(rows)
        assert torch.equal(both.sort(0).values, data.select([k]).fields["x"].sort(0).values)
    assert float(queried(query)) == 2 + 1 + 0
    lone = every_other(full_batch(data, torch.tensor([2])))[1]
    assert float(queried(lone)) == 0.0
