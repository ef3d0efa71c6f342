"""Mistakes in a program: one error each, which names the mistake and its mend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import guides
from hierfl.data.batch import ClientBatch
from hierfl.program.program import ProgramError
from tests.programs import federation, read

Fn = Callable[[ClientBatch], Any]


def model(*, outside: Fn | None = None, inside: Fn | None = None, rows: Fn | None = None) -> Fn:
    """Return a correct model with a mistake outside the plates, inside the clients plate or in
    the rows.
    """

    def built(batch: ClientBatch) -> None:
        pyro.sample("g", dist.Normal(0.0, 1.0))
        if outside:
            outside(batch)
        with batch.clients():
            own = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            if inside:
                inside(batch)
            with batch.data():
                if rows:
                    rows(batch)
                pyro.sample("y", dist.Normal((batch.x * own).sum(-1), 1.0), obs=batch.y)

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
    assert [(site.name, site.is_local) for site in program.latents.sites] == [
        ("g", False),
        ("w", True),
    ]
    assert program.labels == {"y": "y"}


# ------------------------------------------------------------------ the model
def no_clients(batch: ClientBatch) -> None:
    with batch.data():
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=batch.y)


def no_plates(batch: ClientBatch) -> None:
    pyro.sample("y", dist.Normal(batch.x[..., 0], 1.0), obs=batch.y)


def no_labels(batch: ClientBatch) -> None:
    with batch.clients():
        pyro.sample("w", dist.Normal(0.0, 1.0))


def read_outside(batch: ClientBatch) -> None:
    with batch.clients():
        own = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("leak", dist.Normal(own, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)


def impossible(batch: ClientBatch) -> None:
    g = pyro.sample("g", dist.Normal(0.0, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("visits", dist.Poisson(0.0 * g.exp()), obs=batch.visits)


def minus_infinity(batch: ClientBatch) -> None:
    pyro.factor("f", torch.tensor(-torch.inf).expand(batch.num_clients, 1))


def twice(batch: ClientBatch) -> None:
    pyro.sample("g", dist.Normal(0.0, 1.0))


def own_plate(batch: ClientBatch) -> None:
    with batch.plate("items", 3, dim=-1):
        pyro.sample("v", dist.Normal(0.0, 1.0))


def shared_in_plate(batch: ClientBatch) -> None:
    pyro.param("shared", torch.zeros(2))


def own_outside(batch: ClientBatch) -> None:
    pyro.param("own", torch.zeros(batch.num_clients, 1))


def once_each(batch: ClientBatch) -> None:
    pyro.param("p", torch.zeros(batch.num_clients, 1))


WRONG_MODELS: dict[str, tuple[Fn, str]] = {
    "likelihood outside all plates": (
        no_plates,
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
    "a latent number a row": (
        model(rows=lambda batch: pyro.sample("z", dist.Normal(0.0, 1.0))),
        r"'z' is latent in the data plate, and no observed site depends on it",
    ),
    "discrete": (
        model(inside=lambda batch: pyro.sample("k", dist.Poisson(3.0))),
        r"'k' is discrete \(Poisson\).*no finite support",
    ),
    "a plate in the clients' place": (model(inside=own_plate), r"'v'.*dim -3 and below"),
    "zero density at the start": (
        impossible,
        r"log-density of the log-likelihood is -?inf where the guide starts",
    ),
    "zero density of a factor": (
        model(inside=minus_infinity),
        r"log-density of the local sites is -?inf where the guide starts",
    ),
    "zero density of a global factor": (
        model(outside=lambda batch: pyro.factor("f", torch.tensor(-torch.inf))),
        r"log-density of the global sites is -?inf where the guide starts",
    ),
    "param in the plate without clients": (
        model(inside=shared_in_plate),
        r"'shared' is inside the clients plate.*\(num_clients, 1",
    ),
    "param of clients outside the plate": (
        model(outside=own_outside),
        r"'own' is outside the clients plate.*must not depend",
    ),
}


@pytest.mark.parametrize("what", WRONG_MODELS)
def test_models_that_cannot_be_run(what: str) -> None:
    wrong, message = WRONG_MODELS[what]
    with pytest.raises(ProgramError, match=message):
        read(wrong, guides.mean_field, federation())


def test_a_param_is_local_or_global_not_both() -> None:
    with pytest.raises(
        ProgramError,
        match="param 'p' is declared both inside and outside the clients plate: give them two names",
    ):
        read(
            model(inside=once_each),
            guide(extra=lambda batch: pyro.param("p", torch.zeros(1, 1))),
            federation(),
        )


# ------------------------------------------------------------------ the guide
def narrow(batch: ClientBatch) -> None:
    pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))


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
        guide(w=narrow),
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
        with batch.clients():
            own = pyro.sample("_local", dist.Normal(0.0, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)

    with pytest.raises(ProgramError, match=r"the guide fails.*two sites are named '_shared'"):
        read(clash, family, federation())


def test_counting_rows_reads_no_field() -> None:
    """Rows that are predicted or personalized need the fields that the model reads, not the
    first of all fields.
    """

    def level(batch: ClientBatch) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(loc, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)

    data = federation()
    assert next(iter(data.fields)) != "y"
    for family in (guides.delta, guides.conditional):
        program = read(level, family, data)
        assert program.reads.model == {"y"} and program.reads.guide <= {"y"}
