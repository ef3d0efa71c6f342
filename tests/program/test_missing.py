"""Missing values in the data: refused by field and client, unless the model deals with them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, guides
from hierfl.program.sites import Model
from tests.programs import federation, fit, leveled, normal_rows, read

ROWS = (1, 6, 15)  # of north, south and west


def with_holes(field: str = "x", value: float = torch.nan) -> ClientData:
    data = federation()
    values = data.fields[field].clone()
    values[list(ROWS)] = value
    return data.with_fields(**{field: values})


def slopes(use: Callable[[ClientBatch, Tensor], Tensor]) -> Model:
    return leveled(
        lambda batch, w: normal_rows(batch, use(batch, w)),
        lambda batch: dist.Normal(torch.zeros(2), 1.0).to_event(1),
    )


filled = slopes(lambda batch, w: (batch.x.nan_to_num() * w).sum(-1))
plain = slopes(lambda batch, w: (batch.x * w).sum(-1))
# right in value, and NaN in the gradient: 0 * NaN
too_late = slopes(
    lambda batch, w: torch.where(batch.x.isnan(), torch.zeros(()), batch.x * w).sum(-1)
)


@pytest.mark.parametrize("engine", ["vectorized", "pooled"])
def test_a_model_that_fills_missing_values_sees_zeros(engine: Any) -> None:
    """The same numbers as of data that were filled beforehand."""
    data = with_holes()
    beforehand = data.with_fields(x=data.fields["x"].nan_to_num())
    method = hierfl.methods.fedsvi(filled, guides.mean_field)
    fits = [fit(method, d, rounds=3, engine=engine) for d in (data, beforehand)]
    assert fits[0].history["elbo"].tolist() == fits[1].history["elbo"].tolist()
    scores = [f.predict(d).scores() for f, d in zip(fits, (data, beforehand), strict=True)]
    assert scores[0].equals(scores[1])


@pytest.mark.parametrize("model", [plain, too_late])
def test_a_model_that_does_not_is_refused_by_field_and_client(model: Model) -> None:
    with pytest.raises(
        ValueError,
        match=r"field 'x' has NaN or infinity in 3 rows, the first of client 'north': fill it "
        r".*batch\.x\.nan_to_num\(\) before it is used",
    ):
        fit(hierfl.methods.fedsvi(model), with_holes(), rounds=1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_missing_labels_are_refused_even_where_the_model_fills_them(value: float) -> None:
    """A prediction would be scored on the number that fills them."""

    def rows(batch: ClientBatch, w: Tensor) -> None:
        pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y.nan_to_num())

    with pytest.raises(ValueError, match="field 'y' has NaN or infinity in 3 rows"):
        read(leveled(rows), guides.mean_field, with_holes("y", value))


def test_a_factor_may_leave_rows_without_a_label_out() -> None:
    def rows(batch: ClientBatch, w: Tensor) -> None:
        density = dist.Normal(w, 1.0).log_prob(batch.y.nan_to_num())
        pyro.factor("y", density * batch.y.isfinite())

    data = with_holes("y")
    whole = [i for i in range(data.num_rows) if i not in ROWS]
    labeled = ClientData.from_arrays(data.row_client[whole], y=data.fields["y"][whole])
    elbo = [
        fit(hierfl.methods.fedsvi(leveled(rows), guides.delta), d, rounds=1).history["elbo"].iloc[0]
        for d in (data.select([0, 1, 2]), labeled)
    ]
    assert elbo[0] == pytest.approx(elbo[1])


def test_missing_values_in_rows_to_predict_and_of_new_clients() -> None:
    good, bad = (
        fit(hierfl.methods.fedsvi(m, guides.mean_field), federation(), rounds=1)
        for m in (filled, plain)
    )
    rows = with_holes()
    assert bool(good.predict(rows).mean.isfinite().all())
    assert bool(good.predict(rows.without("y")).mean.isfinite().all())
    good.personalize(rows, rounds=1)
    for ask in (bad.predict, lambda r: bad.predict(r.without("y")), bad.personalize):
        with pytest.raises(ValueError, match="field 'x' has NaN or infinity in 3 rows"):
            ask(rows)


def test_missing_values_of_clients() -> None:
    height = torch.tensor([0.3, float("nan"), 0.1, -0.2])
    holed = replace(federation(), client_fields={"height": height})
    careful = leveled(normal_rows, lambda batch: dist.Normal(batch.height.nan_to_num(), 1.0))
    fit(hierfl.methods.fedsvi(careful), holed, rounds=1)
    careless = leveled(normal_rows, lambda batch: dist.Normal(0.0 * batch.height, 1.0))
    with pytest.raises(ValueError, match=r"field 'height' has NaN or infinity in 1 .*'south'"):
        read(careless, guides.mean_field, holed)


def test_another_mistake_is_named_before_the_missing_values() -> None:
    def wrong(batch: ClientBatch) -> None:
        with batch.clients():
            pyro.sample("k", dist.Poisson(0.5))
        plain(batch)

    with pytest.raises(ProgramError, match="'k' is discrete"):
        read(wrong, guides.mean_field, with_holes())
