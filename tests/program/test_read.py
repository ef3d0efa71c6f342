"""Mistakes in a program: one error each, which names the mistake and its mend."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientBatch, ProgramError, guides
from tests.programs import alone, federation, means, normal_rows, read

Fn = Callable[[ClientBatch], Any]


def model(*, outside: Fn | None = None, inside: Fn | None = None) -> Fn:
    """Return a correct model with a mistake outside the plates or inside the clients plate."""

    def built(batch: ClientBatch) -> None:
        pyro.sample("g", dist.Normal(0.0, 1.0))
        if outside:
            outside(batch)
        with batch.clients():
            own = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            if inside:
                inside(batch)
            with batch.data():
                normal_rows(batch, (batch.x * own).sum(-1))

    return built


def guide(*, g: Fn | None = None, w: Fn | None = None, extra: Fn | None = None) -> Fn:
    """Return a correct guide of that model, with a mistake in place of a site or in addition."""

    def built(batch: ClientBatch) -> None:
        (g or (lambda batch: pyro.sample("g", dist.Normal(0.0, 1.0))))(batch)
        if extra:
            extra(batch)
        with batch.clients():
            (w or (lambda batch: pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))))(
                batch
            )

    return built


def nothing(batch: ClientBatch) -> None:
    pass


def test_a_correct_program_is_read() -> None:
    program = read(model(), guide(), federation())
    assert {site.name: site.is_local for site in program.latents.sites} == {"g": False, "w": True}
    assert program.labels == {"y": "y"}


# ------------------------------------------------------------------ the model
def no_clients(batch: ClientBatch) -> None:
    with batch.data():
        normal_rows(batch, torch.zeros(()))


def no_labels(batch: ClientBatch) -> None:
    with batch.clients():
        pyro.sample("w", dist.Normal(0.0, 1.0))


def read_outside(batch: ClientBatch) -> None:
    with batch.clients():
        own = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("leak", dist.Normal(own, 1.0))
    with batch.clients(), batch.data():
        normal_rows(batch, own)


def impossible(batch: ClientBatch) -> None:
    g = pyro.sample("g", dist.Normal(0.0, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("visits", dist.Poisson(0.0 * g.exp()), obs=batch.visits)


def own_plate(batch: ClientBatch) -> None:
    with batch.plate("items", 3, dim=-1):
        pyro.sample("v", dist.Normal(0.0, 1.0))


def param_of_clients(batch: ClientBatch) -> None:
    pyro.param("own", torch.zeros(batch.num_clients, 1))


WRONG_MODELS: dict[str, tuple[Fn, str]] = {
    "likelihood outside all plates": (
        lambda batch: normal_rows(batch, batch.x[..., 0]),
        r"'y' .*outside the clients plate.*batch\.clients\(\)",
    ),
    "data plate without the clients plate": (
        no_clients,
        r"'y' is in the data plate but not in the clients plate",
    ),
    "nothing observed": (no_labels, r"observes no field inside the clients plate.*obs=batch\.y"),
    "local site read outside its plate": (
        read_outside,
        r"'leak' is outside the clients plate.*reads a local site",
    ),
    "a plate in the clients' place": (model(inside=own_plate), r"'v'.*dim -3 and below"),
    "zero density at the start": (
        impossible,
        r"log-density of the log-likelihood is -?inf where the guide starts",
    ),
    "zero density of a factor": (
        model(inside=lambda batch: pyro.factor("f", -torch.inf * torch.ones(batch.num_clients, 1))),
        r"log-density of the local sites is -?inf where the guide starts",
    ),
    "zero density of a global factor": (
        model(outside=lambda batch: pyro.factor("f", torch.tensor(-torch.inf))),
        r"log-density of the global sites is -?inf where the guide starts",
    ),
    "param in the plate without clients": (
        model(inside=lambda batch: pyro.param("shared", torch.zeros(2))),
        r"'shared' is inside the clients plate.*\(num_clients, 1",
    ),
    "param of clients outside the plate": (
        model(outside=param_of_clients),
        r"'own' is outside the clients plate.*must not depend",
    ),
}


@pytest.mark.parametrize("what", WRONG_MODELS)
def test_models_that_cannot_be_run(what: str) -> None:
    wrong, message = WRONG_MODELS[what]
    with pytest.raises(ProgramError, match=message):
        read(wrong, guides.mean_field, federation())


def test_a_param_is_local_or_global_not_both() -> None:
    outside = guide(extra=lambda batch: pyro.param("own", torch.zeros(1, 1)))
    words = "'own' is declared both inside and outside the clients plate: give them two names"
    with pytest.raises(ProgramError, match=words):
        read(model(inside=param_of_clients), outside, federation())


# ------------------------------------------------------------------ the guide
def inside(batch: ClientBatch) -> None:
    with batch.clients():
        pyro.sample("g", dist.Normal(0.0, 1.0))


WRONG_GUIDES: dict[str, tuple[Fn, str]] = {
    "lacks a local site": (guide(w=nothing), r"site 'w' is in the model but not in the guide"),
    "has a site of its own": (
        guide(extra=lambda batch: pyro.sample("z", dist.Normal(0.0, 1.0))),
        r"site 'z' is in the guide but not in the model: rename it, or mark it "
        r"infer=\{'is_auxiliary': True\}",
    ),
    "another event shape": (
        guide(w=lambda batch: pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))),
        r"site 'w' has shape \(1, 1, 1\) in the guide, \(1, 1, 2\) in the model",
    ),
    "another side of the plate": (
        guide(g=inside),
        r"site 'g' .*(shape|inside the clients plate in the guide)",
    ),
    "no event": (
        guide(w=lambda batch: pyro.sample("w", dist.Normal(torch.zeros(2), 1.0))),
        r"'w' has batch shape.*\.to_event\(1\)",
    ),
    "no such field": (guide(extra=lambda batch: batch.age), r"the guide fails.*no field 'age'"),
}


@pytest.mark.parametrize("what", WRONG_GUIDES)
def test_guides_that_do_not_fit(what: str) -> None:
    wrong, message = WRONG_GUIDES[what]
    with pytest.raises(ProgramError, match=message):
        read(model(), wrong, federation())


def test_a_guide_outside_the_support() -> None:
    def spread(batch: ClientBatch) -> None:
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(0.0, s), obs=batch.y)

    def negative(batch: ClientBatch) -> None:
        pyro.sample("s", dist.Normal(pyro.param("at", torch.tensor(-5.0)), 0.01))

    with pytest.raises(ProgramError, match=r"(?s)where the guide starts"):
        read(spread, negative, federation())


@pytest.mark.parametrize("family", [guides.structured, guides.conditional, guides.low_rank])
def test_a_site_named_as_a_guides_own(family: Any) -> None:
    def clash(batch: ClientBatch) -> None:
        pyro.sample("_shared", dist.Normal(0.0, 1.0))
        alone(batch)

    with pytest.raises(ProgramError, match=r"the guide fails.*two sites are named '_shared'"):
        read(clash, family, federation())


def test_counting_rows_reads_no_field() -> None:
    """Rows to predict need the fields that the model reads, not the first of all fields."""
    data = federation()
    assert next(iter(data.fields)) != "y"
    for family in (guides.delta, guides.conditional):
        program = read(means, family, data)
        assert program.reads.model == {"y"} and program.reads.guide <= {"y"}


def test_a_density_that_is_no_number_at_the_priors_center_starts_beside_it() -> None:
    def of_shape(batch: ClientBatch) -> None:
        shape = pyro.sample("shape", dist.Normal(0.0, 0.2))
        with batch.clients(), batch.data():
            pyro.factor("y", -0.5 * ((1.0 + shape * batch.y).abs().log() / shape) ** 2)

    others = federation()
    others = others.with_fields(y=torch.full((others.num_rows,), 3.0))
    starts = [
        read(of_shape, guides.delta, of).latents.global_block.start for of in (federation(), others)
    ]
    assert bool(starts[0].isfinite().all()) and float(starts[0].abs()) > 0.0
    # rows do not decide where
    torch.testing.assert_close(starts[0], starts[1], rtol=0.0, atol=0.0)
