"""Rounded updates: a round by hand, near the method itself, as small as they say, at nodes too."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hierfl
from hierfl import ClientError, Method
from hierfl.core.trees import named_leaves, tree_leaves
from hierfl.methods import ditto, fedavg, quantized
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.nodes.client_state import kept
from hierfl.nodes.messages import Answer, from_bytes, to_bytes
from hierfl.nodes.run import fit_nodes
from hierfl.optimizers import SGD
from tests.methods.cases import shared as _shared
from tests.methods.test_robust import attacked, digits
from tests.nodes.one_process import machines
from tests.programs import assert_close, federation, fit

SMALL: dict[str, Any] = {"optimizer": SGD(0.05), "steps": 2, "unit": "step", "batch_size": 2}
STEP: dict[str, Any] = {"optimizer": SGD(0.1), "steps": 1, "unit": "step", "batch_size": None}


def wide() -> Any:
    """Return a linear regression on 40 features."""
    module = nn.Linear(40, 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).reshape(parameter.shape))
    return network(module, likelihood=normal(1.0))


def rows(counts: tuple[int, ...] = (5, 3)) -> hierfl.ClientData:
    g = torch.Generator().manual_seed(0)
    who = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x, y = torch.randn(len(who), 40, generator=g), torch.randn(len(who), generator=g)
    return hierfl.ClientData.from_arrays(who, x=x, y=y)


def test_two_rounds_by_hand() -> None:
    """The gradients of a linear regression, rounded in the order of the module's docstring."""
    data = rows()
    fitted = fit(quantized(fedavg(wide(), **STEP)), data, rounds=2)
    theta = {k: v.clone() for k, v in fitted.federation.server.state.items()}
    unsent = [{k: torch.zeros_like(v) for k, v in theta.items()} for _ in range(2)]
    for _ in range(2):
        total = {k: torch.zeros_like(v) for k, v in theta.items()}
        for k, count in enumerate((5, 3)):
            part = slice(0, 5) if k == 0 else slice(5, 8)
            x, y = data.fields["x"][part], data.fields["y"][part]
            off = x @ theta["theta.weight"][0] + theta["theta.bias"] - y
            slopes = {"theta.weight": off[None] @ x / count, "theta.bias": off.mean()[None]}
            for name, slope in slopes.items():
                p = -0.1 * slope + unsent[k][name]
                s = p.abs().max() / 127
                sent = p if name == "theta.bias" else s * (p / s).round()
                unsent[k][name] = p - sent
                total[name] += count * sent / 8
        theta = {name: v + total[name] for name, v in theta.items()}
    for name, value in theta.items():
        torch.testing.assert_close(fitted.message[name], value, rtol=0.0, atol=1e-13)
    for path, found in named_leaves(fitted.progress.table.extra["theta"]).items():
        for k in range(2):
            torch.testing.assert_close(found[k], unsent[k][path[2:-2]], rtol=0.0, atol=1e-13)
    assert max(float(v.abs().max()) for one in unsent for v in one.values()) > 1e-6


def test_with_feedback_it_ends_where_the_method_ends() -> None:
    """Real images, a convex loss: without feedback each client's rounding pulls to one side in every round."""
    train, _ = digits()
    plain = fedavg(network(nn.Linear(64, 10)), **{**STEP, "optimizer": SGD(0.5)})

    def end(method: Method) -> Tensor:
        torch.manual_seed(0)
        return torch.cat([v.reshape(-1) for v in fit(method, train, rounds=30).message.values()])

    wanted = end(plain)
    near, far = (
        float((end(quantized(plain, feedback=how)) - wanted).norm() / wanted.norm())
        for how in (True, False)
    )
    assert near < 1e-4 and far > 10.0 * near


@pytest.mark.parametrize("bits", [8, 16])
def test_bytes_are_those_that_cross(bits: Any) -> None:
    data = rows((5, 3, 4))
    plain, found = (
        fit(method, data, rounds=2).history["bytes_up"].tolist()
        for method in (fedavg(wide(), **STEP), quantized(fedavg(wide(), **STEP), bits=bits))
    )
    rest = 8 + 2 * 8  # the loss, and the weights of two shares
    assert plain == [3 * (41 * 8 + rest)] * 2
    assert found == [3 * (40 * bits // 8 + 8 + 8 + rest)] * 2  # a scale, and the intercept as it is


def test_a_new_client_starts_with_nothing_unsent() -> None:
    data = federation((5, 3, 7))
    for method in (fedavg(_shared(), **SMALL), ditto(_shared())):
        new = fit(quantized(method), data, rounds=2).personalize(federation((4,)), rounds=0)
        assert not any(bool(v.any()) for v in tree_leaves(new.progress.table.extra))


def test_integers_are_sent_and_the_error_stays(tmp_path: Path) -> None:
    method, data = quantized(fedavg(wide(), **STEP)), rows((5, 3, 4))
    around = machines(method, data, tmp_path)
    over = fit_nodes(method, around.agreement, around.ask, rounds=3)
    here = fit(method, data, rounds=3)
    assert_close(over.progress.server, here.progress.server, 1e-12)
    assert over.history["bytes_up"].tolist() == here.history["bytes_up"].tolist()
    for _, content in around.sent:
        tree = from_bytes(content, most=9999).tree
        numbers, scale = tree["theta"][0]["theta.weight"]
        assert tree.keys() == {"theta", "loss"}  # no client state
        assert numbers.dtype == torch.int8 and numbers.numel() == 40 and scale.shape == (1,)
        assert len(content) - sum(v.nbytes for v in tree_leaves(tree)) < 1500  # names
    for k, client in enumerate(here.clients):
        for name, value in named_leaves(kept(around.nodes[client]).after.extra).items():
            there = named_leaves(here.progress.table.extra)[name][k]
            torch.testing.assert_close(value, there, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda n, s: (n.to(torch.int16), s), r"is of torch\.int16, and torch\.int8 was expected"),
        (lambda n, s: (n, s * torch.nan), "is not finite"),
        (lambda n, s: (n, s * 0.0 + 1e14), "has a number of"),
        (lambda n, s: (n.double(), s), r"is of torch\.float64"),
    ],
)
def test_wrong_ones_are_left_out(
    wrong: Callable[[Tensor, Tensor], Any], why: str, tmp_path: Path
) -> None:
    method, data = quantized(fedavg(wide(), **STEP)), rows((5, 3, 4))
    around = machines(method, data, tmp_path)

    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        for one in around.ask(contents):
            if one.client != "1" or one.content is None:
                yield one
                continue
            tree, about = from_bytes(one.content, most=1 << 20)
            value, weight = tree["theta"]
            numbers, scale = value["theta.weight"]
            value = {**value, "theta.weight": wrong(torch.full_like(numbers, 100), scale)}
            yield Answer("1", to_bytes({**tree, "theta": (value, weight)}, about))

    over = fit_nodes(method, around.agreement, ask, rounds=1)
    (left,) = over.history["left_out"].iloc[0]
    assert left["client"] == "1" and re.search(why, left["reason"])


def test_what_is_not_finite_is_refused_as_without_it() -> None:
    data = rows((5, 3, 4))
    method = quantized(attacked(fedavg(wide(), **STEP), 3, torch.inf))
    with pytest.raises(ClientError, match=r"client '1' is not finite"):
        fit(method, data, rounds=1)
    some = fit(method, data, rounds=2, on_client_error="skip")
    assert [one["client"] for one in some.history["left_out"].iloc[1]] == ["1"]
    assert all(bool(v.isfinite().all()) for v in tree_leaves(some.progress.table))


def test_whole_numbers_are_in_no_secure_sum(tmp_path: Path) -> None:
    method = quantized(fedavg(wide(), **STEP))
    around = machines(method, rows(), tmp_path)
    never: Any = lambda contents, size: None  # noqa: E731
    with pytest.raises(ValueError, match=r"fedavg 8 bits sends theta as whole numbers .* secure"):
        fit_nodes(method, around.agreement, around.ask, rounds=1, ask_sum=never)
