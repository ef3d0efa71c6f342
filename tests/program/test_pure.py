"""A program is a function of its params, rows and noise keys: anything else is refused, on every
engine.
"""

import random
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

import hierfl
from hierfl import ClientBatch, ProgramError, guides
from hierfl.diagnostics import nuts
from hierfl.program.sites import Model
from tests.programs import federation, fit, read

Shift = Callable[[ClientBatch], Any]


def shifted(by: Shift) -> Model:
    """Return a right model whose likelihood is shifted by a function of the batch."""

    def model(batch: ClientBatch) -> None:
        shift = by(batch)
        s = pyro.sample("s", dist.Normal(0.0, 1.0))
        with batch.clients():
            w = pyro.sample("w", dist.Normal(s, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(w + shift, 1.0), obs=batch.y)

    return model


def engines(model: Model) -> dict[str, Callable[[], object]]:
    """Return what runs a model on each engine."""
    data = federation()
    fits: dict[str, Callable[[], object]] = {
        engine: partial(fit, hierfl.methods.fedsvi(model), data, rounds=1, engine=engine)
        for engine in ("vectorized", "sequential", "pooled")
    }
    return fits | {"nuts": lambda: nuts(model, data, draws=2, warmup=30)}


RNG = np.random.default_rng(0)
GENERATOR = torch.Generator().manual_seed(0)
CALLS = [0.0]
SLOPE = torch.zeros(2, requires_grad=True)


def counted(batch: ClientBatch) -> float:
    CALLS[0] += 1.0
    return CALLS[0]


def seeded(batch: ClientBatch) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(())


IMPURE: dict[str, tuple[Shift, str]] = {
    "np.random": (lambda b: float(np.random.normal()), r"NumPy's global generator"),  # noqa: NPY002
    "random": (lambda b: random.random(), r"Python's global generator \(random\)"),
    "torch.randn": (lambda b: torch.randn(b.y.shape), r"torch's global generator"),
    "torch.bernoulli": (lambda b: torch.bernoulli(0.5 + 0.0 * b.y), r"torch's global generator"),
    "dropout": (lambda b: dropout(torch.ones_like(b.y)), r"torch's global generator"),
    "default_rng": (
        lambda b: float(RNG.normal()),
        "site 'y' of the model differs between two runs",
    ),
    "torch.Generator": (
        lambda b: torch.randn(b.y.shape, generator=GENERATOR),
        "site 'y' of the model differs between two runs",
    ),
    "a counter": (counted, "site 'y' of the model differs between two runs"),
    "a seed of its own": (seeded, "torch's global generator"),
    "a start drawn at each run": (
        lambda b: pyro.param("p", torch.randn(())),
        r"torch's global generator.*pyro\.param\(name, lambda: ",
    ),
    "a start that no seed sets": (
        lambda b: pyro.param("p", lambda: torch.tensor(np.random.normal())),  # noqa: NPY002
        "NumPy's global generator",
    ),
    "a tensor that nothing learns": (
        lambda b: b.x @ SLOPE,
        r"a tensor of shape \(2,\), which requires",
    ),
}


@pytest.mark.parametrize("what", IMPURE)
def test_what_no_site_declares_is_refused_by_name(what: str) -> None:
    shift, message = IMPURE[what]
    with pytest.raises(ProgramError, match=message):
        read(shifted(shift), guides.mean_field, federation())


@pytest.mark.parametrize("engine", ["vectorized", "sequential", "pooled", "nuts"])
def test_every_engine_reads_the_program_first(engine: str) -> None:
    with pytest.raises(ProgramError, match="torch's global generator"):
        engines(shifted(IMPURE["torch.randn"][0]))[engine]()


def test_draws_of_other_threads_are_not_the_models() -> None:
    """Flower's threads draw from Python's generator, at any time."""

    def another(batch: ClientBatch) -> float:
        thread = Thread(target=random.random)
        thread.start()
        thread.join()
        return 0.0

    read(shifted(another), guides.mean_field, federation())
    with pytest.raises(ProgramError, match="Python's global generator"):
        read(shifted(lambda b: another(b) + random.random()), guides.mean_field, federation())


def test_a_guide_that_draws_from_a_generator_is_refused() -> None:
    def guide(batch: ClientBatch) -> None:
        pyro.sample("s", dist.Normal(torch.randn(()), 1.0))
        with batch.clients():
            pyro.sample("w", dist.Normal(torch.zeros(batch.num_clients, 1), 1.0))

    with pytest.raises(ProgramError, match="the guide draws from torch's global generator"):
        read(shifted(lambda b: 0.0), guide, federation())


def test_starts_of_params_may_be_drawn_by_a_function() -> None:
    """They are functions of the seed."""
    model = shifted(lambda b: b.x @ pyro.param("slope", lambda: torch.randn(2)))
    starts = [
        read(model, guides.mean_field, federation(), seed=seed).start()[0]["slope"]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_the_check_moves_no_generator() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    read(shifted(lambda b: 0.0), guides.mean_field, federation())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


# ------------------------------------------------------------------ modules
def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


def test_a_module_that_nothing_learns_is_refused_by_name() -> None:
    module = net()
    words = (
        r"site 'y' of the model depends on a tensor of shape \(\d.*\), which requires a gradient "
        r"and is not a param.*pyro\.module.*requires_grad_\(False\)"
    )
    with pytest.raises(ProgramError, match=words):
        read(shifted(lambda b: module(b.x)[..., 0]), guides.mean_field, federation())


def test_a_tensor_in_a_deterministic_site_or_a_guide_is_found_too() -> None:
    slope = torch.zeros(2, requires_grad=True)

    def model(batch: ClientBatch) -> None:
        s = pyro.sample("s", dist.Normal(0.0, 1.0))
        pyro.deterministic("twice", s * slope.sum())
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(s, 1.0), obs=batch.y)

    def guide(batch: ClientBatch) -> None:
        pyro.sample("s", dist.Normal(slope.sum(), 1.0))

    with pytest.raises(ProgramError, match="site 'twice' of the model depends on a tensor"):
        read(model, guides.mean_field, federation())
    with pytest.raises(ProgramError, match="site 's' of the guide depends on a tensor"):
        read(model, guide, federation())


def by_hand(batch: ClientBatch, module: nn.Module) -> Tensor:
    """Return the module's output with every weight a `pyro.param`, as a user would write it out."""
    w = {name: pyro.param(name, value.detach()) for name, value in module.named_parameters()}
    hidden = torch.tanh(linear(batch.x, w["0.weight"], w["0.bias"]))
    return linear(hidden, w["2.weight"], w["2.bias"])[..., 0]


@pytest.mark.parametrize(
    ("how", "engine"),
    [("pyro.module", "vectorized"), ("pyro.module", "pooled"), ("PyroModule", "sequential")],
)
def test_a_registered_module_is_learned_as_params_are(how: str, engine: Any) -> None:
    """And the user's module keeps its weights."""
    module = net()
    before = [weight.detach().clone() for weight in module.parameters()]
    if how == "PyroModule":
        pyro.nn.module.to_pyro_module_(module)
    registered = shifted(
        (lambda b: module(b.x)[..., 0])
        if how == "PyroModule"
        else (lambda b: pyro.module("net", module)(b.x)[..., 0])
    )
    same = net()
    models = [registered, shifted(lambda b: by_hand(b, same))]
    fits = [
        fit(hierfl.methods.fedsvi(model), federation(), rounds=2, engine=engine) for model in models
    ]
    pyro.clear_param_store()
    assert fits[0].history["elbo"].tolist() == pytest.approx(fits[1].history["elbo"].tolist())
    weights = [{k: v for k, v in f.message["params"].items() if "weight" in k} for f in fits]
    for learned, expected in zip(weights[0].values(), weights[1].values(), strict=True):
        assert torch.allclose(learned, expected)
    assert not torch.allclose(next(iter(weights[0].values())), before[0]), "nothing was learned"
    for weight, was in zip(module.parameters(), before, strict=True):
        assert torch.equal(weight, was)


def test_a_global_site_may_read_a_registered_module() -> None:
    """The check of the privacy boundary must not take its weights for a client's."""
    module = net()

    def model(batch: ClientBatch) -> None:
        s = pyro.sample("s", dist.Normal(pyro.module("net", module)(torch.zeros(2))[0], 1.0))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(s, 1.0), obs=batch.y)

    read(model, guides.mean_field, federation())


def test_a_frozen_module_is_used_as_it_is() -> None:
    module = net().requires_grad_(False)
    values = federation().fields["x"]
    fits = [
        fit(hierfl.methods.fedsvi(shifted(by)), federation(), rounds=3).history["elbo"].iloc[-1]
        for by in (lambda b: module(b.x)[..., 0], lambda b: 0.0)
    ]
    assert fits[0] != fits[1]
    assert module(values).shape == (16, 1)


def test_nuts_refuses_what_has_no_prior() -> None:
    model = shifted(lambda b: pyro.param("p", torch.tensor(0.0)))
    with pytest.raises(ProgramError, match="param 'p' of the model has no prior"):
        nuts(model, federation(), draws=2, warmup=30)
