"""What `fit` and a `Fit` refuse: bad data, bad arguments, bad rows to predict."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, guides
from hierfl.core.trees import tree_leaves
from hierfl.program.sites import Model
from tests.programs import (
    FAMILIES,
    alone,
    federation,
    fit,
    leveled,
    logistic,
    normal_rows,
    read,
    regression,
    three,
)


@pytest.fixture
def data() -> ClientData:
    """North has 5 rows, south 3, east 7, west 1."""
    return federation()


def changed(field: str, row: int, value: float) -> ClientData:
    data = federation()
    values = data.fields[field].clone()
    values[row] = value
    return data.with_fields(**{field: values})


# ------------------------------------------------------------------ data
def of(field: str, fn: Callable[[], Any]) -> Model:
    """Return a model whose rows have that distribution, whatever the client."""
    return leveled(lambda batch, w: pyro.sample(field, fn(), obs=getattr(batch, field)))


CLASSES = of("ill", lambda: dist.Categorical(logits=torch.zeros(3)))
COUNTS = of("visits", lambda: dist.Poisson(1.0))
TEN_TRIALS = of("visits", lambda: dist.Binomial(10, torch.tensor(0.3)))
OUTSIDE: list[tuple[Model, str, float, str]] = [
    (logistic, "ill", 2.0, "Bernoulli"),
    (logistic, "ill", 0.5, "Bernoulli"),
    (CLASSES, "ill", 3.0, "Categorical"),
    (CLASSES, "ill", -1.0, "Categorical"),
    (COUNTS, "visits", -1.0, "Poisson"),
]


@pytest.mark.parametrize(("model", "field", "value", "kind"), OUTSIDE)
def test_labels_out_of_range_are_refused_by_value_and_client(
    model: Model, field: str, value: float, kind: str
) -> None:
    said = rf"of client 'south' has the value {value:g}, outside .*'{field}' \({kind}\).*1 rows"
    with pytest.raises(ValueError, match=f"field '{field}' {said} are outside it"):
        read(model, guides.delta, changed(field, 6, value))


def test_labels_out_of_the_range_of_their_trials_are_refused() -> None:
    words = (
        r"'visits' \(Binomial\) of client 'south' has the value 11, outside the support of its row"
    )
    with pytest.raises(ValueError, match=words):
        read(TEN_TRIALS, guides.delta, changed("visits", 6, 11.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integer_and_boolean_labels_of_a_bernoulli_site(
    dtype: torch.dtype, data: ClientData
) -> None:
    """The same numbers as with floats, which alone torch's Bernoulli takes, from the fit to the scores."""
    method = hierfl.methods.fedsvi(logistic)
    other = data.with_fields(ill=data.fields["ill"].to(dtype))
    fits = [fit(method, d, rounds=3, validation=d, eval_every=3) for d in (data, other)]
    leaves = [tree_leaves(f.message) for f in fits]
    assert all(torch.equal(first, second) for first, second in zip(*leaves, strict=True))
    assert fits[0].history["validation_log_score"].equals(fits[1].history["validation_log_score"])
    pairs = ((fits[0], data), (fits[1], other), (fits[0], other))  # at last, fitted to floats
    scores = [f.predict(d, draws=20).scores() for f, d in pairs]
    assert scores[0].equals(scores[1]) and scores[0].equals(scores[2])


@pytest.mark.parametrize("name", ["counts", "rows", "key", "data", "clients", "fields", "num_rows"])
def test_a_field_named_as_a_part_of_every_batch(name: str, data: ClientData) -> None:
    """batch.counts is the number of rows of a client: a model would not read a field of that name."""
    words = f"field '{name}' has the name of a part of a batch, batch.{name}: rename it"
    with pytest.raises(ValueError, match=words):
        read(regression, guides.delta, data.with_fields(**{name: data.fields["visits"]}))


# ------------------------------------------------------------------ cohorts
@pytest.mark.parametrize(
    ("cohort", "size"), [(None, 4), (1, 1), (4, 4), (1.0, 4), (0.5, 2), (0.01, 1)]
)
def test_cohorts_that_can_be_drawn(cohort: float | None, size: int, data: ClientData) -> None:
    fitted = fit(hierfl.methods.fedsvi(alone, guides.delta), data, rounds=1, cohort=cohort)
    assert fitted.history["clients"].tolist() == [size]


# ------------------------------------------------------------------ methods and arguments
svi = hierfl.methods.fedsvi


def network() -> Any:
    likelihood = hierfl.models.likelihood.normal(1.0)
    return hierfl.models.network(torch.nn.Linear(2, 1), y="y", likelihood=likelihood)


gamma_model = leveled(normal_rows, lambda batch: dist.Gamma(2.0, 1.0))


def asked(**options: Any) -> Callable[[ClientData], Any]:
    return lambda d: fit(svi(regression), d, **{"rounds": 1, **options})


FITS: dict[str, tuple[Callable[[ClientData], Any], str]] = {
    "cohort larger than the federation": (
        asked(cohort=5),
        "a cohort of 5 cannot be drawn from 4 clients",
    ),
    "no cohort": (asked(cohort=0), "a cohort of 0 cannot be drawn from 4 clients"),
    "share above 1": (asked(cohort=1.5), r"cohort is 1\.5: a share .* lies in \(0, 1\]"),
    "share of nothing": (asked(cohort=0.0), r"cohort is 0\.0: a share"),
    "unknown engine": (
        asked(engine="ray"),
        "engine is 'ray': it must be one of 'vectorized', 'sequential'",
    ),
    "no chunk": (asked(chunk=0), "chunk is 0: it must be 1 or more"),
    "no rounds": (asked(rounds=0), r"rounds is 0: it must be in \[1, inf\)"),
    "no checkpoints": (
        asked(checkpoint_every=0),
        r"checkpoint_every is 0: it must be in \[1, inf\)",
    ),
    "no scores": (asked(eval_every=0), r"eval_every is 0: it must be in \[1, inf\)"),
    "patience without rows": (asked(patience=2), "patience needs rows to score: pass validation="),
    "held-out rows without labels": (
        asked(validation=federation().without("y"), eval_every=1),
        "validation has no labels",
    ),
    "pfedme without learned params": (
        lambda d: fit(hierfl.methods.pfedme(alone), d, rounds=1),
        "local sites, and a learned prior",
    ),
    "conditional on mini-batches": (
        lambda d: fit(svi(regression, guides.conditional, batch_size=2), d, rounds=1),
        "reads every row of a client at each step",
    ),
    "no rows a batch": (
        lambda d: fit(svi(regression, batch_size=0), d, rounds=1),
        "batch_size is 0: it must be 1 or more",
    ),
    "no rank": (lambda d: fit(svi(regression, guides.low_rank(rank=0)), d, rounds=1), "rank is 0"),
    "draws of one client, pooled": (
        lambda d: fit(svi(gamma_model, gamma_guide), d, rounds=1, engine="pooled"),
        r"fit_pooled draws for all clients at once.*use hierfl\.fit",
    ),
    "fedavg, pooled": (
        lambda d: fit(hierfl.methods.fedavg(network()), d, rounds=1, engine="pooled"),
        "method 'fedavg' has no pooled form: use",
    ),
    "local steps, pooled": (
        lambda d: fit(svi(regression, local_steps=1), d, rounds=1, engine="pooled"),
        "local_steps is 1: pooled rows take one joint step",
    ),
}


def gamma_guide(batch: ClientBatch) -> None:
    positive = dist.constraints.positive
    with batch.clients():
        rate = pyro.param("rate", torch.ones(batch.num_clients, 1), constraint=positive)
        pyro.sample("w", dist.Gamma(2.0, rate))


@pytest.mark.filterwarnings("ignore:site 'w' is drawn from Gamma")
@pytest.mark.parametrize("what", FITS)
def test_methods_and_arguments_that_do_not_fit(what: str, data: ClientData) -> None:
    call, message = FITS[what]
    with pytest.raises(ValueError, match=message):
        call(data)


@pytest.mark.filterwarnings("ignore:field 'y' has mean")
def test_what_is_not_finite_is_traced_to_its_client_and_round() -> None:
    method = hierfl.methods.fedavg(network(), optimizer=hierfl.optimizers.SGD(1e3), steps=5)
    words = (
        r"round \d+: .*update of client 'south' is not finite .*1 of 4 clients\): lower the "
        r"learning rate \(optimizer\)"
    )
    with pytest.raises(hierfl.ClientError, match=words):
        fit(method, changed("y", 6, 1e200), rounds=3)


# ------------------------------------------------------------------ rows to predict, new clients
@pytest.fixture
def fitted(data: ClientData) -> hierfl.Fit:
    return fit(hierfl.methods.fedsvi(regression), data.without("ill", "visits"), rounds=1)


def newcomer() -> ClientData:
    return ClientData.from_clients(
        {"new": {"x": torch.zeros(2, 2), "y": torch.zeros(2)}}, client_fields={"height": [0.0]}
    )


ROWS: dict[str, tuple[Callable[[ClientData], ClientData], type[Exception], str]] = {
    "unknown client": (
        lambda d: newcomer(),
        KeyError,
        r"client 'new' was not fitted, but north, .*infer it first, fit\.personalize",
    ),
    "missing field": (
        lambda d: d.without("x"),
        ValueError,
        "the rows have no field 'x', which the model or its guide reads",
    ),
    "wrong shape": (
        lambda d: d.with_fields(x=torch.zeros(16, 3)),
        ValueError,
        r"a row of 'x' has shape \(3,\); it was \(2,\) when fitted",
    ),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_cannot_be_predicted(what: str, fitted: hierfl.Fit, data: ClientData) -> None:
    change, kind, message = ROWS[what]
    with pytest.raises(kind, match=message):
        fitted.predict(change(data))


def test_rows_that_cannot_be_learned_from(fitted: hierfl.Fit) -> None:
    new = newcomer()
    wrong = [new.with_fields(x=x) for x in (torch.full((2, 2), torch.nan), torch.zeros(2, 1))]
    for rows in (new.without("x"), *wrong):
        with pytest.raises(ValueError, match="'x'"):
            fitted.personalize(rows)


@pytest.mark.parametrize("family", ["structured", "conditional", "amortized"])
def test_new_clients_need_the_labels_that_their_guide_reads(family: str, data: ClientData) -> None:
    fitted = fit(svi(regression, FAMILIES[family]), data.without("ill", "visits"), rounds=1)
    with pytest.raises(ValueError, match=r"'y'"):
        fitted.personalize(newcomer().without("y"), rounds=1)


def test_scores_need_labels(fitted: hierfl.Fit, data: ClientData) -> None:
    with pytest.raises(ValueError, match="no labels for site 'y': nothing to score"):
        fitted.predict(data.without("y"), draws=2).scores()


def test_checking_a_program_leaves_the_data_as_they_were() -> None:
    data = three()
    before = {name: value.clone() for name, value in data.fields.items()}
    with pytest.raises(ProgramError):
        read(regression, guides.delta, data)
    assert all(torch.equal(before[name], value) for name, value in data.fields.items())
