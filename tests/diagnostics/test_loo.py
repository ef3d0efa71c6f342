"""Leave-one-out against exact refits: evidences of conjugate hierarchies, and radon fits without a county."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import hierfl
from benchmarks.reference_models import RADON, radon_centred
from hierfl import guides
from hierfl.data.clients import ClientData
from hierfl.diagnostics import compare, loo
from hierfl.methods import fedlaplace, fedsvi
from hierfl.posterior.weights import weigh
from hierfl.runs.result import Fit
from tests.programs import exact, federation, fit, logistic, slopes

COUNTS = (5, 3, 7, 2)


@cache
def gaussian() -> Fit:
    """Return the exact posterior of `slopes`."""
    return fit(
        fedlaplace(slopes, corrections=0, radius=10.0, points=4), federation(COUNTS), rounds=4
    )


def without(data: ClientData, row: int) -> ClientData:
    kept = torch.arange(data.num_rows) != row
    fields = {name: data.fields[name][kept] for name in ("x", "y")}
    return ClientData.from_arrays(
        data.row_client[kept], names=data.names, x=fields["x"], y=fields["y"]
    )


# ------------------------------------------------------------------ closed form
@pytest.mark.filterwarnings("ignore:.* have a k-hat above")
@pytest.mark.parametrize("inner", [1, 4])
def test_leaving_a_client_out_gives_the_ratio_of_evidences(inner: int) -> None:
    data, found = federation(COUNTS), loo(gaussian(), "client", draws=4000, inner=inner)
    whole = exact(data, "slopes").log_evidence
    for name in data.names:
        rest = exact(data.select([n for n in data.names if n != name]), "slopes").log_evidence
        if found.table.loc[name, "k_hat"] < 0.7:
            assert found.table.loc[name, "elpd"] == pytest.approx(whole - rest, abs=0.15)
    assert (found.table["k_hat"] < 0.7).sum() >= 3
    assert found.elpd == pytest.approx(found.table["elpd"].sum())
    assert "by client: elpd" in repr(found)


@pytest.mark.filterwarnings("ignore:.* have a k-hat above")
def test_leaving_a_row_out_gives_the_ratio_of_evidences() -> None:
    data, found = federation(COUNTS), loo(gaussian(), draws=4000)
    whole = exact(data, "slopes").log_evidence
    assert found.table["client"].tolist() == [data.names[k] for k in data.row_client]
    checked = 0
    for row in range(data.num_rows):
        if found.table.loc[row, "k_hat"] < 0.6:
            rest = exact(without(data, row), "slopes").log_evidence
            assert found.table.loc[row, "elpd"] == pytest.approx(whole - rest, abs=0.12)
            checked += 1
    assert checked >= 10


@pytest.mark.filterwarnings("ignore:.* have a k-hat above")
def test_weights_correct_an_inexact_guide() -> None:
    """Corrected by weights, a shifted and too wide guide gives the leave-one-out of the exact posterior."""
    from tests.posterior.test_corrected import planted

    data, off = federation(), planted(shift=0.6, wide=1.2)
    whole = exact(data, "slopes").log_evidence
    wanted = np.array(
        [
            whole - exact(data.select([n for n in data.names if n != k]), "slopes").log_evidence
            for k in data.names
        ]
    )
    plain, mended = (loo(off, "client", draws=4000, correct=how).table for how in (None, "psis"))
    good = (mended["k_hat"] < 0.6).to_numpy()
    assert good.sum() >= 2
    assert np.abs(mended["elpd"].to_numpy() - wanted)[good].max() < 0.15
    assert (
        np.abs(mended["elpd"].to_numpy() - wanted)[good].sum()
        < np.abs(plain["elpd"].to_numpy() - wanted)[good].sum()
    )


# ------------------------------------------------------------------ comparison
@pytest.mark.filterwarnings("ignore:.* have a k-hat above")
def test_the_better_model_comes_first() -> None:
    data, g = federation((20, 20, 20)), torch.Generator().manual_seed(1)
    ill = (torch.rand(60, generator=g) < torch.sigmoid(3.0 * data.fields["x"].sum(-1))).double()
    noise = torch.randn(60, 2, generator=g)
    data = data.with_fields(ill=ill)
    fast = hierfl.optimisers.Adam(0.1)
    method = fedsvi(logistic, guides.conditional(newton_steps=3), optimiser=fast)
    right = fit(method, data, rounds=30)
    table = compare(
        {"noise": loo(fit(method, data.with_fields(x=noise), rounds=30)), "right": loo(right)}
    )
    assert list(table.index) == ["right", "noise"] and table.loc["noise", "elpd_diff"] > 0.0
    assert list(table.columns) == ["rank", "elpd", "p", "elpd_diff", "weight", "se", "dse"]
    with pytest.raises(ValueError, match="leaves out one row at a time, 'b' one client"):
        compare({"a": loo(right, draws=200), "b": loo(right, "client", draws=200)})
    with pytest.raises(ValueError, match="'a' and 'b' are fitted to different rows"):
        compare(
            {"a": right, "b": fit(method, data.with_fields(ill=1.0 - ill), rounds=2)}, draws=200
        )
    with pytest.raises(ValueError, match="fits has 1 entries"):
        compare({"a": right})


# ------------------------------------------------------------------ refusals and warnings
def test_invalid_arguments_are_refused() -> None:
    fitted = gaussian()
    with pytest.raises(
        ValueError, match="draws is 10: it must be 100 or more, since a tail is fitted"
    ):
        loo(fitted, draws=10)
    with pytest.raises(ValueError, match="by is 'hospital': it must be 'row' or 'client'"):
        loo(fitted, "hospital")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="the model observes no site 'z'"):
        loo(fitted, site="z")
    point = fit(fedsvi(slopes, guides.delta), federation(), rounds=1)
    with pytest.raises(ValueError, match="all draws of 'fedsvi' are the same point"):
        loo(point, draws=100)
    with pytest.raises(ValueError, match="places site 'b' at points"):
        loo(point, "client", draws=100)
    unlabelled = replace(
        fitted, federation=replace(fitted.federation, data=federation(COUNTS).without("y"))
    )
    sides: tuple[Any, ...] = ("row", "client")
    for by in sides:
        with pytest.raises(ValueError, match="the clients' rows have no"):
            loo(unlabelled, by, draws=100)


def test_an_outlying_client_raises_a_warning() -> None:
    data = federation((20, 20, 20, 20))
    y = data.fields["y"].clone()
    y[:20] += 40.0 * data.fields["x"][:20, 0]
    fitted = fit(
        fedlaplace(slopes, corrections=0, radius=100.0, points=4), data.with_fields(y=y), rounds=8
    )
    with pytest.warns(UserWarning, match="of 4 clients have a k-hat above 0.7"):
        found = loo(fitted, "client", draws=2000)
    assert found.table["k_hat"].idxmax() == "north"


# ------------------------------------------------------------------ radon
@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("HIERFL_SLOW"), reason="HIERFL_SLOW is not set: runs of minutes are left out"
)
def test_leaving_a_county_out_agrees_with_a_refit_without_it() -> None:
    """Twenty counties, from the largest to the smallest, are each left out of a fit from scratch."""
    data = RADON.data()
    method: Any = fedlaplace(radon_centred)
    found = loo(hierfl.fit(method, data, rounds=20, compile=False), "client", draws=2000).table
    order = data.counts.argsort(descending=True)
    off = []
    for k in order[torch.linspace(0, data.num_clients - 1, 20).round().long()].tolist():
        name = data.names[k]
        rest = hierfl.fit(
            method, data.select([n for n in data.names if n != name]), rounds=20, compile=False
        )
        given = weigh(rest.personalise(data.select([name])), 2000, inner=1, shared=False).log_own[
            :, 0
        ]
        off.append(float(given.logsumexp(0)) - np.log(2000) - found.loc[name, "elpd"])
    assert np.abs(off).max() < 0.5 and abs(sum(off)) < 0.5
