"""Draws of missing covariates have the density that the program itself has on a grid; averages rest on them."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from hierfl import Formula, proportional_hazards, simulate
from hierfl.effects.comparisons import comparisons, predictions
from hierfl.effects.drawn import CoefficientDraws
from hierfl.effects.estimates import Estimates
from hierfl.effects.imputed import imputed
from hierfl.effects.profile import profile
from hierfl.effects.variance import r2
from tests.effects.made import repeated
from tests.formulas.small import refused
from tests.formulas.test_imputed import (
    DOSE,
    TERMS,
    TEXTS,
    conditioned,
    lacking,
    latent,
    made,
    on_a_grid,
)
from tests.sampled import sampled

MORE = {
    f"wins | trials(n) ~ {TERMS}; {DOSE}": "binomial",
    f"y | trunc(lb=-10) ~ mi(dose) + (1 | site); {DOSE}": "gaussian",
    f"days | event(died) ~ mi(dose) + (1 | site) + (1 | site:ward); {DOSE}": "weibull",
}


def at(
    formula: Formula, frame: pd.DataFrame, values: dict[str, Any], draws: int
) -> CoefficientDraws:
    """One value of every latent site, as draws."""
    data = formula.data(frame)
    own = {n for n in values if n.removeprefix("dose_") in ("site", "site:ward")}
    found = CoefficientDraws(
        formula,
        data.names,
        data,
        {n: v[None].double() for n, v in values.items() if n not in own},
        {n: values[n].squeeze(1)[None].double() for n in own},
    )
    return repeated(found, draws)


@pytest.mark.slow(
    "text3", "y | trunc(lb=-10) ~ mi(dose) + (1 | site); dose | mi() ~ beds + (1 | site)"
)
@pytest.mark.filterwarnings("ignore:column .* more than 8 sds")  # a grid's ends
@pytest.mark.parametrize("text", sampled([*TEXTS, *MORE], [*TEXTS, *MORE][1::2]))
def test_draws_have_the_density_given_the_response(text: str) -> None:
    frame = lacking(tuple(name for name in ("dose", "age") if f"mi({name})" in text))
    formula = made(text, {**TEXTS, **MORE}[text], frame)
    values = latent(conditioned(formula, frame, {}))
    found = imputed(at(formula, frame, values, 1500))
    gone = frame[[*formula.declared.imputed]].isna()
    assert len(found.frame) == gone.to_numpy().sum()
    line = found.frame.set_index(["column", "row"])
    assert (line["client"] == [frame["site"][i] for _, i in line.index]).all()
    for i in np.flatnonzero(gone.any(axis=1))[::10]:
        grid, logs = on_a_grid(formula, frame, values, i)
        share = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
        moments, drawn = [], []
        for k, (name, x) in enumerate(grid.items()):
            of_one = share.sum(axis=tuple(j for j in range(share.ndim) if j != k))
            mean, sd = of_one @ x, np.sqrt(of_one @ x**2 - (of_one @ x) ** 2)
            one = found.draws.to_numpy()[0, :, line.index.get_loc((name, i))]
            assert abs(one.mean() - mean) < 4.5 * sd / np.sqrt(1500.0)
            assert one.std() == pytest.approx(sd, rel=0.09)
            below = np.interp(np.sort(one), x, np.cumsum(of_one) - 0.5 * of_one)
            assert stats.kstest(below, "uniform").pvalue > 1e-4
            np.testing.assert_allclose(line.loc[(name, i), "mean"], one.mean(), rtol=1e-9)
            moments.append((x - mean) / sd)
            drawn.append((one - mean) / sd)
        if len(grid) == 2:  # what a row lacks is drawn together
            both = float(np.einsum("ij,i,j->", share, *moments))
            assert np.mean(drawn[0] * drawn[1]) == pytest.approx(both, abs=0.12)


def test_an_exact_draw_moves_with_the_response_and_not_with_what_else_is_asked() -> None:
    frame = lacking()
    formula = made(f"y ~ mi(dose) + (1 | site); {DOSE}", frame=frame)
    values = latent(conditioned(formula, frame, {}))
    found = at(formula, frame, values | {"mi(dose)": torch.tensor(0.8)}, 2000)
    one = imputed(found, frame)
    np.testing.assert_array_equal(one.draws, imputed(found).draws)
    kept = frame[frame["site"].isin(["s1", "s3"])]
    some = imputed(found, kept)  # a client's draws are its own
    both = one.frame["client"].isin(["s1", "s3"]).to_numpy()
    np.testing.assert_allclose(some.draws, one.draws[:, :, both])
    assert some.frame["row"].tolist() == one.frame["row"][both].tolist()
    larger = imputed(found, frame.assign(y=frame["y"] + 1.0)).frame["mean"]
    s, t = (float(values[n]) for n in ("sigma_dose", "sigma"))
    np.testing.assert_allclose(larger - one.frame["mean"], 0.8 * s**2 / (t**2 + 0.64 * s**2))
    # without a response the covariates alone say what it is
    plain = imputed(found, frame.drop(columns="y")).frame
    assert plain["sd"].to_numpy() == pytest.approx(np.full(len(plain), s), rel=0.06)
    other = imputed(replace(found, seed=1)).frame["mean"]
    assert not np.allclose(other, one.frame["mean"], rtol=1e-6)


OF_ROWS: dict[str, Any] = {
    "predictions": lambda found, frame: predictions(found, None, frame, by="sex").draws,
    "sex": lambda found, frame: predictions(found, "sex", frame).draws,
    "dose": lambda found, frame: predictions(found, "dose", frame, values=[1.0, 2.0]).draws,
    "step": lambda found, frame: comparisons(found, "dose", frame, values=1.0).draws,
    "slope": lambda found, frame: comparisons(found, "dose", frame, comparison="slope").draws,
    "rows": lambda found, frame: predictions(found, by="site").draws,
    "r2": lambda found, frame: r2(found).draws,
    "profile": lambda found, frame: profile(found).draws["ratio"],
}


@cache
def two_draws() -> tuple[CoefficientDraws, list[CoefficientDraws], Estimates]:
    """Two draws together, and each alone; and what rows lack."""
    frame = lacking()
    formula = made(f"visits ~ {TERMS}; {DOSE}", "poisson", frame)
    few = []
    for seed in range(2):
        values = latent(conditioned(formula, frame.assign(y=seed), {}))
        moved = {n: v + 0.1 * seed for n, v in values.items() if n in ("mi(dose)", "site")}
        few.append(at(formula, frame, values | moved, 1))
    found = replace(
        few[0],
        shared={n: torch.cat([one.shared[n] for one in few]) for n in few[0].shared},
        own={n: torch.cat([one.own[n] for one in few]) for n in few[0].own},
    )
    return found, few, imputed(found)


@pytest.mark.slow("predictions")
@pytest.mark.parametrize("what", sampled(OF_ROWS, 2))
def test_averages_are_those_of_frames_that_are_filled_with_the_draws(what: str) -> None:
    frame, ask = lacking(), OF_ROWS[what]
    found, few, missing = two_draws()
    every, rows = ask(found, frame).to_numpy()[0], missing.frame["row"].tolist()
    for k, one in enumerate(few):
        filled = frame.copy()
        filled.loc[rows, "dose"] = missing.draws.to_numpy()[0, k]
        whole = replace(repeated(one, 2), data=found.formula.data(filled))
        np.testing.assert_allclose(every[k], ask(whole, filled).to_numpy()[0, 0], rtol=1e-5)


def test_what_is_refused() -> None:
    frame = lacking()
    formula = made(f"y ~ mi(dose) + (1 | site); {DOSE}", frame=frame)
    found = at(formula, frame, latent(conditioned(formula, frame, {})), 20)
    refused(lambda: imputed(found, "all"), "newdata is 'all'")
    refused(lambda: imputed(found, frame.fillna({"dose": 1.0})), "all rows have dose")
    refused(
        lambda: imputed(found, frame.replace({"site": {"s1": "s99"}})), "'s99'", "was not fitted"
    )
    of_times = made(f"days | event(died) ~ mi(dose) + (1 | site); {DOSE}", "weibull", frame)
    times = at(of_times, frame, latent(conditioned(of_times, frame, {})), 20)
    refused(lambda: proportional_hazards(times), "rows lack 'dose'", "from their times")
    whole = frame.fillna({"dose": 1.0})
    assert proportional_hazards(replace(times, data=of_times.data(whole))).frame.notna().any().any()
    refused(
        lambda: simulate(formula, frame, clients=2, rows=9),
        "a drawn row has 'dose'",
        "in place of mi",
    )
    plain = made("y ~ age + (1 | site)", frame=frame)
    other = at(plain, frame, latent(conditioned(plain, frame, {})), 20)
    refused(lambda: imputed(other), "imputes nothing", "x | mi() ~ z")
