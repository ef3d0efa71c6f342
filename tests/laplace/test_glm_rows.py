"""Linear predictors are found where they exist and nowhere else, with the numbers of the general method."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.func import grad

import hierfl
from hierfl import ClientBatch, ClientData, datasets, full_batch
from hierfl.laplace.glm_rows import Linear, seen_linear
from hierfl.laplace.links import softplus, times
from hierfl.laplace.marginal import Marginal
from hierfl.program.read import read_model
from tests.methods.test_pvi import close
from tests.programs import doubled, federation, logistic, means, regression, slopes


def visits(batch: ClientBatch) -> None:
    """Poisson counts with non-centered slopes of unknown spread: the design depends on the global sites."""
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        e = pyro.sample("e", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            pyro.sample(
                "visits",
                dist.Poisson((0.3 + spread * (batch.x * e).sum(-1)).exp()),
                obs=batch.visits,
            )


def counted(batch: ClientBatch) -> None:
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(loc, 0.7).to_event(1))
        with batch.data():
            pyro.sample(
                "visits", dist.Binomial(9, logits=(batch.x * slope).sum(-1)), obs=batch.visits
            )


def robust(batch: ClientBatch) -> None:
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", dist.StudentT(5.0, (batch.x * slope).sum(-1), scale), obs=batch.y)


def clamped(batch: ClientBatch) -> None:
    """A predictor that is linear near 0 only."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(loc, 0.7).to_event(1))
        with batch.data():
            pyro.sample(
                "ill",
                dist.Bernoulli(logits=(batch.x * slope).sum(-1).clamp(-6.0, 6.0)),
                obs=batch.ill,
            )


def noisy(batch: ClientBatch) -> None:
    """A local spread: the mean is linear in the local sites, but the likelihood depends on the spread too."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(loc, 1.0))
        width = pyro.sample("width", dist.LogNormal(0.0, 0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(own, width), obs=batch.y)


def contextual(batch: ClientBatch) -> None:
    """The prior of a client's local site depends on its rows."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(loc + batch.sum(batch.x[..., 0]), 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)


# Model, observed site, whether its design is fixed.
ALL_LINEAR: dict[str, tuple[Any, str, bool]] = {
    "Normal": (regression, "y", True),
    "Bernoulli": (logistic, "ill", True),
    "Poisson, not centered": (visits, "visits", False),
    "Binomial": (counted, "visits", True),
    "StudentT": (robust, "y", True),
    "correlated": (slopes, "y", True),
}


def read(model: Any) -> hierfl.Program:
    return read_model(model, federation()).program


@pytest.mark.slow("Normal", "Bernoulli", "Binomial", "StudentT", "Poisson, not centered")
@pytest.mark.parametrize("name", ALL_LINEAR)
def test_rows_and_the_general_method_agree(name: str) -> None:
    model, site, fixed = ALL_LINEAR[name]
    program = read(model)
    assert seen_linear(program) == Linear(frozenset([site]), fixed=fixed, prior_alone=True)
    fast, general = Marginal(program, seen_linear(program)), Marginal(program)
    batch, z = full_batch(federation(), torch.tensor([2])), torch.full((fast.shared.size,), 0.2)
    with pyro.validation_enabled(False):
        (one, inner), (other, its) = (
            m.expand(z, m.start(z, batch), batch, 12) for m in (fast, general)
        )
        value, lost = fast.value(z, inner.mode + 0.1, batch)
    for a, b in zip(
        (*one, *inner[:2], inner.precision), (*other, *its[:2], its.precision), strict=True
    ):
        close(a, b, 1e-8)
    assert not bool(inner.lost) and not bool(its.lost) and not bool(lost)
    close(value, one.value, 1e-5)


def test_nonlinear_predictors_are_not_taken_for_linear() -> None:
    assert seen_linear(read(clamped)) == Linear()
    assert seen_linear(read(noisy)) == Linear()


def test_a_prior_that_reads_rows_is_given_all_of_them() -> None:
    program = read(contextual)
    assert seen_linear(program) == Linear(frozenset(["y"]), fixed=True, prior_alone=False)
    z, batch = torch.tensor([0.4]), full_batch(federation(), torch.tensor([2]))
    fast, general = Marginal(program, seen_linear(program)), Marginal(program)
    close(
        fast.value(z, fast.start(z, batch), batch)[0],
        general.value(z, general.start(z, batch), batch)[0],
    )


def test_the_mode_of_a_predictor_wrongly_taken_for_linear_counts_as_lost() -> None:
    """Every mode is checked against the program itself."""
    data = ClientData.from_clients(
        {"a": {"x": torch.tensor([[2000.0, 0.0], [2500.0, 1.0]]), "ill": torch.ones(2)}}
    )
    program = read_model(clamped, data).program
    wrong = Marginal(program, Linear(frozenset(["ill"]), fixed=True, prior_alone=True))
    batch, z = full_batch(data, torch.tensor([0])), torch.tensor([-0.7, 0.0])
    with pyro.validation_enabled(False):
        assert bool(wrong.mode(z, wrong.start(z, batch), batch, 12)[2])
        assert not bool(Marginal(program).mode(z, wrong.start(z, batch), batch, 12)[2])


def test_linear_predictors_of_real_programs_are_found() -> None:
    for model, data in ((means, datasets.eight_schools()), (logistic, federation())):
        assert seen_linear(read_model(model, data).program).sites


@pytest.mark.slow
def test_a_likelihood_derived_from_one_with_a_predictor_is_found() -> None:
    """hierfl's own logistic regression observes a Bernoulli of its own, which takes labels of any dtype."""
    made, program = (
        hierfl.models.regression("bernoulli", "x", "ill", prior_scale=dist.HalfNormal(1.0)),
        {},
    )
    for dtype in (torch.get_default_dtype(), torch.int64):
        data = federation()
        data = data.with_fields(ill=data.fields["ill"].to(dtype))
        program[dtype] = read_model(made, data).program
        assert seen_linear(program[dtype]).sites == {"ill"}


def test_a_derived_likelihood_with_another_density_is_not_taken_for_its_parent() -> None:
    assert seen_linear(read(doubled)) == Linear()


def test_times_and_its_derivatives_under_nested_vmaps() -> None:
    g = torch.Generator().manual_seed(0)
    matrix, v = torch.randn(3, 4, 5, generator=g), torch.randn(3, 6, 4, generator=g)

    def energy(product: Any) -> Any:
        def of(v: Tensor, m: Tensor) -> Tensor:
            return product(v, m).sin().sum() + product(product(v, m), m.T).square().sum()

        return of

    def plain(v: Tensor, m: Tensor) -> Tensor:
        return v @ m

    for order in (lambda f: f, grad, lambda f: grad(lambda v, m: grad(f)(v, m).cos().sum())):
        found, known = (
            torch.vmap(torch.vmap(order(energy(p)), (0, None)))(v, matrix) for p in (times, plain)
        )
        close(found, known, 1e-10)
    with torch.no_grad():
        close(
            torch.vmap(torch.vmap(grad(energy(times)), (0, None)))(v, matrix),
            torch.vmap(torch.vmap(grad(energy(plain)), (0, None)))(v, matrix),
        )


def test_softplus_and_four_derivatives() -> None:
    x = torch.linspace(-30.0, 30.0, 61)
    mine: Any = softplus
    theirs: Any = torch.nn.functional.softplus
    for _ in range(5):
        close(torch.vmap(mine)(x), torch.vmap(theirs)(x), 1e-8)
        mine, theirs = grad(mine), grad(theirs)
