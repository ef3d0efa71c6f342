"""Robust means: what honest clients give, how far wrong ones move them, and what cannot be wrapped."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import hierfl
from hierfl import Client, Method, Program, ProgramError, Share
from hierfl.core.trees import Tree, tree_map
from hierfl.method import Reports, Up
from hierfl.methods import averaging_some, fedavg, fedsvi, pfedme, robust
from hierfl.methods.wrappers.robust import RULES, Rule, _checked, _mean
from hierfl.optimizers import SGD
from tests.methods.cases import THETA, shared, units
from tests.programs import federation, fit, regression

SMALL: dict[str, Any] = {"optimizer": SGD(0.05), "steps": 2, "unit": "step", "batch_size": 2}


def attacked(method: Method, wrong: int, times: float) -> Method:
    """Return the method with clients of `wrong` rows that send what they received less `times` their change."""

    def client(program: Program) -> Client:
        plain = method.client(program)

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up, kept = plain.finish(work, message, own, rows)
            factor = torch.where(rows == wrong, -times, 1.0)
            share = up["theta"]
            assert isinstance(share, Share)
            value = tree_map(lambda v, w: w + factor * (v - w), share.value, message)
            return {**up, "theta": Share(value, share.weight)}, kept

        return replace(plain, finish=finish)

    return replace(method, client=client)


def test_each_rule_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    v = torch.randn(7, 4, generator=g)
    assert torch.allclose(_mean("median", 0.2, {"v": v})["v"], v.median(0).values)
    even = _mean("median", 0.0, {"v": v[:6]})["v"]
    assert torch.allclose(even, torch.tensor(stats.scoreatpercentile(v[:6].numpy(), 50, axis=0)))
    cut = _mean("trimmed", 0.3, {"v": v})["v"]
    assert torch.allclose(cut, torch.tensor(stats.trim_mean(v.numpy(), 2 / 7 + 1e-9, axis=0)))
    far = torch.cat([v[:6], torch.full((1, 4), 100.0)])
    scores = []
    for i in range(7):
        near = sorted(float((far[i] - far[j]).square().sum()) for j in range(7) if j != i)
        scores.append(sum(near[: 7 - 1 - 2]))
    best = torch.tensor(scores).argsort()[:6]
    assert torch.allclose(_mean("krum", 0.15, {"v": far})["v"], far[best].mean(0))
    middle = v.median(0).values
    distance = (v - middle).norm(dim=1)
    factor = (distance.median() / distance).clamp(max=1.0)
    wanted = middle + (factor[:, None] * (v - middle)).mean(0)
    assert torch.allclose(_mean("clipped", 0.2, {"v": v})["v"], wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [100.0, 1e12])
def test_wrong_clients_move_it_no_further_than_honest_ones_lie(rule: Rule, size: float) -> None:
    """Two of eleven send anything: the mean stays among the others, in every coordinate or in distance."""
    g = torch.Generator().manual_seed(1)
    honest = torch.randn(9, 5, generator=g)
    wrong = size * torch.tensor([[1.0, -1.0, 1.0, 1.0, 0.5], [1.0, -1.0, 1.0, 1.0, 0.4]])
    found = _mean(rule, 0.2, {"v": torch.cat([honest, wrong])})["v"]
    middle = honest.median(0).values
    assert float((found - middle).norm()) < float((honest - middle).norm(dim=1).max())
    plain = torch.cat([honest, wrong]).mean(0)
    assert float((plain - middle).norm()) > float((honest - middle).norm(dim=1).max())


def digits() -> tuple[hierfl.ClientData, hierfl.ClientData]:
    """Return twenty clients of scikit-learn's digits; four of them, those of the attack, have one row more."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16.0)[order], torch.tensor(y)[order]
    counts = [60] * 16 + [61] * 4
    who = torch.arange(20).repeat_interleave(torch.tensor(counts))
    used = len(who)
    train = hierfl.ClientData.from_arrays(who, x=x[:used], y=y[:used])
    test = hierfl.ClientData.from_arrays(["all"] * (len(y) - used), x=x[used:], y=y[used:])
    return train, test


def test_how_many_may_be_wrong_is_not_lost_to_rounding() -> None:
    v = torch.arange(100.0)[:, None].square()
    assert float(_mean("trimmed", 0.29, {"v": v})["v"]) == pytest.approx(float(v[29:71].mean()))


def test_a_client_without_a_report_is_refused() -> None:
    some = averaging_some(fedavg(shared(), **SMALL), share=0.3)
    with pytest.raises(ProgramError, match="some have nothing to say of theta"):
        fit(robust(some), federation((5, 3, 7)), rounds=3)
    tree = {"value": torch.ones(2, 3), "weight": torch.tensor([1.0, 0.0])}
    with pytest.raises(ProgramError, match="some have nothing to say of theta"):
        _checked("theta", Reports(tree, torch.arange(2)))


def test_a_posterior_keeps_its_form() -> None:
    data = federation((8, 6, 7, 9, 5))
    fitted = fit(robust(fedsvi(regression), rule="clipped"), data, rounds=3)
    drawn: Any = fitted.posterior(draws=10)
    assert drawn.posterior["loc"].shape[1] == 10
    assert fit(robust(pfedme(units(), steps=2)), data, rounds=1).message.keys() == THETA.keys()
