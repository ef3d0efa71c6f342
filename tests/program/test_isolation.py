"""No global state: Pyro's param store and torch's generator are untouched, and two fits are
independent.

Params belong to where they are declared, and global sites depend on nothing local.
"""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import transform_to

import hierfl
from hierfl import ClientBatch, ProgramError, full_batch
from hierfl.core.trees import named_leaves
from hierfl.program.handlers import Substitute
from tests.programs import FAMILIES, federation, fit, logistic, read, regression

constraints = dist.constraints


@pytest.mark.slow("conditional")
@pytest.mark.usefixtures("global_generator_untouched")
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left_in_pyro_or_torch(family: str) -> None:
    data = federation()
    fitted = fit(hierfl.methods.fedsvi(regression, FAMILIES[family]), data, rounds=2)
    fitted.posterior(draws=3)
    fitted.predict(data, draws=3)
    fitted.personalize(federation((2,), seed=5), rounds=2)
    assert not pyro.get_param_store().keys()


@pytest.mark.usefixtures("global_generator_untouched")
def test_what_the_user_has_in_the_store_is_neither_read_nor_changed() -> None:
    data = federation()
    method = hierfl.methods.fedsvi(regression, FAMILIES["mean_field"])
    clean = fit(method, data, rounds=2)
    pyro.param("loc.loc", torch.full((2,), 77.0))
    pyro.param("slope.scale", torch.full((4, 1, 2), 77.0), constraint=constraints.positive)
    again = fit(method, data, rounds=2)
    same(clean.progress.server, again.progress.server)
    assert torch.equal(pyro.param("loc.loc"), torch.full((2,), 77.0))
    assert set(pyro.get_param_store().keys()) == {"loc.loc", "slope.scale"}
    pyro.clear_param_store()


def same(a: object, b: object) -> None:
    first, right = named_leaves(a), named_leaves(b)
    assert first.keys() == right.keys()
    assert all(torch.equal(first[k], right[k]) for k in first)


def test_two_fits_of_one_model_do_not_touch_each_other() -> None:
    one, two = federation((5, 3)), federation((4, 6), seed=9)
    method = hierfl.methods.fedsvi(logistic)
    alone = fit(method, one, rounds=2)
    first = fit(method, one, rounds=2)
    second = fit(method, two, rounds=2)
    same(alone.progress.server, first.progress.server)
    same(alone.progress.table, first.progress.table)
    assert not torch.equal(
        first.message["params"]["_shared.loc"], second.message["params"]["_shared.loc"]
    )
    program = read(logistic, FAMILIES["structured"], one)
    before = program.start()
    fit(method, two, rounds=1)
    same(before, program.start())


# ------------------------------------------------------------------ params
def constrained(batch: ClientBatch) -> None:
    base = pyro.param("base", torch.tensor([0.2, 0.3, 0.5]), constraint=constraints.simplex)
    share = pyro.param("share", torch.tensor(0.25), constraint=constraints.unit_interval)
    noise = pyro.param("noise", lambda: torch.rand(()) + 1.0, constraint=constraints.positive)
    with batch.clients():
        own = pyro.param(
            "own",
            lambda: torch.full((2, batch.num_clients, 1, 3), 0.5),
            constraint=constraints.interval(0.0, 2.0),
        )
        with batch.data():
            loc = own.sum((0, -1)) + base.sum() + share + batch.x[..., 0]
            pyro.sample("y", dist.Normal(loc, noise), obs=batch.y)


def no_guide(batch: ClientBatch) -> None:
    pass


def test_params_are_read_with_their_owner_shape_and_constraint() -> None:
    program = read(constrained, no_guide, federation((5, 3, 2)))
    specs = {spec.name: spec for spec in program.params}
    assert {name for name, spec in specs.items() if spec.is_local} == {"own"}
    assert specs["own"].start.shape == (2, 1, 1, 3) and specs["own"].axis == -3
    shared, own = program.start()
    back = {
        name: transform_to(specs[name].constraint)(value)
        for name, value in {**shared, **own}.items()
    }
    assert torch.allclose(back["base"], torch.tensor([0.2, 0.3, 0.5]))
    assert back["share"].item() == pytest.approx(0.25)
    assert 1.0 < back["noise"].item() < 2.0
    assert torch.allclose(back["own"], torch.tensor(0.5))


def test_params_stay_in_their_constraint_and_are_learned() -> None:
    data = federation((5, 3, 2))
    method = hierfl.methods.fedsvi(
        constrained,
        no_guide,
        optimizer=hierfl.optimizers.Adam(0.3),
        average=0.0,
        schedule="constant",
    )
    fitted = fit(method, data, rounds=30)
    assert fitted.history["elbo"].iloc[-1] > fitted.history["elbo"].iloc[0] + 1.0
    own: Tensor = fitted.progress.table.at.params["own"]
    assert own.shape == (3, 2, 1, 1, 3)
    batch = full_batch(data, torch.tensor([0]))
    with Substitute({**fitted.message["params"], "own": own[0]}, batch):
        trace = pyro.poutine.trace(constrained).get_trace(batch)
    for name in ("base", "share", "noise", "own"):
        site = trace.nodes[name]
        assert bool(site["kwargs"]["constraint"].check(site["value"]).all()), name


# ------------------------------------------------------------------ the boundary
def summed_up(batch: ClientBatch) -> None:
    with batch.clients():
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
    pyro.sample("leak", dist.Normal(own.mean(), 1.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)


def centered_on_rows(batch: ClientBatch) -> None:
    level = pyro.sample("leak", dist.Normal(batch.x.mean(), 1.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(level, 1.0), obs=batch.y)


def factor_of_a_local_param(batch: ClientBatch) -> None:
    with batch.clients():
        own = pyro.param("own", lambda: torch.zeros(batch.num_clients, 1))
        with batch.data():
            pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)
    pyro.factor("leak", -(own**2).sum())


@pytest.mark.parametrize("model", [summed_up, centered_on_rows, factor_of_a_local_param])
def test_a_models_global_site_depends_on_nothing_local_even_aggregated(model: Any) -> None:
    with pytest.raises(
        ProgramError,
        match="'leak' is outside the clients plate in the model, but depends on something inside it",
    ):
        read(model, FAMILIES["mean_field"], federation())


def test_a_guides_global_site_depends_on_nothing_local() -> None:
    def backwards(batch: ClientBatch) -> None:
        with batch.clients():
            own = pyro.param("own", lambda: torch.zeros(batch.num_clients, 1, 2))
            slope = pyro.sample("slope", dist.Normal(own, 1.0).to_event(1))
        pyro.sample("loc", dist.Normal(slope.mean((0, 1)), 0.1).to_event(1))

    with pytest.raises(
        ProgramError,
        match="'loc' is outside the clients plate in the guide, but depends on something inside it",
    ):
        read(logistic, backwards, federation())
