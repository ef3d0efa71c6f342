"""Clients work on the chosen device.

Without an accelerator, torch's fake tensors show on which device each tensor would be.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import hierfl
from hierfl import Clock, Method, full_batch, guides, models
from hierfl.core.process import device_of, on
from hierfl.core.trees import Tree, tree_leaves, tree_map
from hierfl.engine.chunks import local_step, one_slot, over_clients, slots_of
from hierfl.engine.federation import federate
from hierfl.engine.minibatches import steps
from tests.methods.cases import HARD, METHODS, one_of_each
from tests.programs import FAMILIES, federation, fit, regression

ELSEWHERE = torch.device("meta")  # a kind of device that every machine has


def networks(module: nn.Module, **options: Any) -> Method:
    """Return fedsvi of a network with weights of clients' own."""
    normal = models.likelihood.normal(1.0)
    model = models.bayesian_network(module, likelihood=normal, **options)
    return hierfl.methods.fedsvi(model, guides.mean_field)


PROGRAMS: dict[str, Callable[[], Method]] = {
    **METHODS,
    **{
        f"fedsvi {name}": partial(hierfl.methods.fedsvi, regression, FAMILIES[name])
        for name in FAMILIES
    },
    "fedsvi, batch norm": lambda: hierfl.methods.batch_normed(
        networks(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
    ),
    "module as prior": lambda: networks(nn.Linear(2, 1), prior_loc="module"),
}


class _Constants(TorchFunctionMode):
    """Lets `torch.tensor` work inside a gradient on the meta device, as it does on other devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.tensor:
            return func(*args, **(kwargs or {}))
        return func(*args, **{"dtype": None, **(kwargs or {}), "device": "cpu"}).to(ELSEWHERE)


def there(mode: FakeTensorMode, tree: Tree) -> Tree:
    """Return a tree of fake tensors on an accelerator: shapes and devices without numbers."""

    def fake(value: Tensor) -> Tensor:
        with mode:
            return torch.empty(value.shape, dtype=value.dtype, device=ELSEWHERE)

    return tree_map(fake, tree)


# two_stage packs rows: their number decides shapes, which fake tensors do not have; clients of
# fedep, pvi and fedlaplace do what those of bfi do, on the same marginals
LEFT_OUT = (*HARD, "pvi renyi", "differentially_private pvi")


@pytest.mark.slow("fedabml", "fedhb", "pfedbayes", "fedpop")
@pytest.mark.parametrize(
    "name", one_of_each(n for n in PROGRAMS if n == "bfi" or n not in LEFT_OUT)
)
def test_no_tensor_of_a_clients_round_stays_on_the_cpu(name: str) -> None:
    federation_ = federate(PROGRAMS[name](), federation())
    client, ids = federation_.client, torch.arange(4)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    message = federation_.server.down(federation_.server.state, Clock(0, 3))
    own = tree_map(lambda v: v.expand(4, *v.shape), client.own)
    phases = [
        (phase, next(steps(federation_.data, ids, phase, seed=0, at=(0, 0)))[0])
        for phase in client.phases
        if phase.count
    ]
    batch = full_batch(federation_.data, ids)
    slots, shared = there(mode, slots_of(batch))
    message, own, rows = there(mode, message), there(mode, own), there(mode, torch.ones(4))
    with mode, on(ELSEWHERE), _Constants(), pyro.validation_enabled(False):
        work = over_clients(partial(client.start, message), True, own, count=4)
        for phase, tensors in phases:
            work = local_step(phase, at_once=True)(work, message, there(mode, tensors), ())
        finish = partial(lambda work, own, n: client.finish(work, message, own, n))
        up, kept = over_clients(finish, True, work, own, rows, count=4)
        settled = kept
        if (settle := client.settle) is not None:
            settling = partial(
                lambda own, slot: settle(message, own, one_slot(slot, shared, batch))
            )
            settled = over_clients(settling, True, kept, slots, count=4)
    leaves = tree_leaves((work, up, kept, settled))
    assert {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)} == {"meta"}


def test_constants_of_a_program_move_to_the_device_where_they_are_used() -> None:
    held = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True), on(ELSEWHERE):
        value = torch.zeros(3)
        assert value.device.type == "meta"
        assert (value + held).device.type == torch.stack([held, value]).device.type == "meta"
        assert torch.where(value > 0, held, other=held).device.type == "meta"
        assert torch.vmap(lambda v: (v * held).sum())(value[None]).device.type == "meta"
        assert held.exp().device.type == "cpu", "alone, it stays on the CPU"


def test_on_the_cpu_no_function_mode_is_active() -> None:
    with on(torch.device("cpu")):
        assert not torch._C._len_torch_function_stack()


def test_a_missing_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    cuda = hierfl.Settings(device="cuda")
    with pytest.raises(ValueError, match=r"device='cuda' cannot be used here .*use device='cpu'"):
        hierfl.fit(PROGRAMS["fedavg"](), federation(), rounds=1, settings=cuda)
    with pytest.raises(ValueError, match="device='gpu' cannot be used here"):
        device_of("gpu")


@pytest.fixture
def cuda() -> Iterator[str]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield "cuda"


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers_on_an_accelerator(name: str, compile: bool, cuda: str) -> None:
    here, elsewhere = (
        fit(PROGRAMS[name](), federation(), rounds=3, seed=4, compile=compile, device=device)
        for device in ("cpu", cuda)
    )
    for one, two in zip(
        tree_leaves(here.progress.server), tree_leaves(elsewhere.progress.server), strict=True
    ):
        assert two.device.type == "cpu"
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
