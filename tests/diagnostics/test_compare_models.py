"""Models compared by client and by row: the evidence in closed form, ArviZ's tables, fits without rows."""

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, Fit, compare_models
from hierfl.diagnostics import Compared, log_evidence, loo
from hierfl.diagnostics.evidence import kept_densities, precise
from hierfl.nodes import in_process
from hierfl.posterior.arviz_io import DATA_TREE, arviz_of
from tests.programs import (
    NOISE,
    PRIOR_LOC,
    PRIOR_TRIL,
    SPREAD_TRIL,
    exact,
    federation,
    fit,
    slopes,
)
from tests.summaries import programs
from tests.summaries.programs import people

COUNTS = (5, 3, 7, 2)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* have a k-hat above"),
    pytest.mark.filterwarnings("ignore:The inplace keyword"),  # within ArviZ
]


def level(batch: ClientBatch) -> None:
    """No slopes: worse on rows that have some."""
    g = pyro.sample("g", dist.Normal(0.0, 2.0))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(g, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(b, NOISE), obs=batch.y)


def free(model: Any) -> Any:
    """Return `level` or `slopes` with a noise scale that is inferred."""

    def made(batch: ClientBatch) -> None:
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        if model is level:
            g = pyro.sample("g", dist.Normal(0.0, 2.0))
        else:
            g = pyro.sample("g", dist.MultivariateNormal(PRIOR_LOC, scale_tril=PRIOR_TRIL))
        with batch.clients():
            if model is level:
                mean = pyro.sample("b", dist.Normal(g, 1.0))
            else:
                b = pyro.sample("b", dist.MultivariateNormal(g, scale_tril=SPREAD_TRIL))
                mean = (batch.x * b).sum(-1)
            with batch.data():
                pyro.sample("y", dist.Normal(mean, sigma), obs=batch.y)

    return made


@cache
def fits() -> dict[str, Fit]:
    data = federation(COUNTS)
    return {m.__name__: fit(hierfl.methods.two_stage(m), data) for m in (level, slopes)}


@cache
def found() -> Compared:
    return compare_models(fits())


def test_elpd_by_client_is_the_evidence_of_all_less_that_of_the_others() -> None:
    data = federation(COUNTS)
    whole = float(exact(data, "slopes").log_evidence)
    for name in data.names:
        rest = data.select([other for other in data.names if other != name])
        expected = whole - float(exact(rest, "slopes").log_evidence)
        if found().clients.loc[name, "k_hat"] < 0.5:
            assert found().clients.loc[name, "slopes"] == pytest.approx(expected, abs=0.15)
    assert (found().clients["k_hat"] < 0.5).sum() >= 2


def test_arviz_accepts_what_is_returned() -> None:
    table = az.compare(dict(found().loo))
    assert list(table.index) == list(found().by_client.index) == ["slopes", "level"]
    rows, table = found().loo_rows, found().by_row
    assert rows is not None and table is not None
    assert list(az.compare(dict(rows)).index) == list(table.index)
    assert found().by_client["weight"].sum() == pytest.approx(1.0)
    assert found().by_client["elpd_diff"].iloc[0] == 0.0
    total = found().clients.drop(columns="k_hat").sum()
    assert found().by_client["elpd"].to_dict() == pytest.approx(total.to_dict())
    assert "By row" in repr(found())


def compared_by_arviz(estimates: Mapping[str, Any]) -> pd.DataFrame:
    """Return ArviZ's table, in the columns of ArviZ 0 and without rounding."""
    unrounded: dict[str, Any] = {"round_to": "none"} if DATA_TREE else {}
    table = az.compare(dict(estimates), **unrounded)
    table["elpd_diff"] = table["elpd_diff"].abs()
    return table.rename(columns={"elpd_loo": "elpd", "p_loo": "p"})


def log_likelihoods(model: Any, data: ClientData, count: int = 10_000) -> Any:
    """Return log p(y_k | g) at draws of the exact posterior of g, (S, N)."""
    xs, ys = (data.fields[n].double().split(data.counts.tolist()) for n in ("x", "y"))
    if model is level:
        xs = tuple(torch.ones(len(y), 1).double() for y in ys)
        prior, tril, spread = torch.zeros(1), 2.0 * torch.eye(1), torch.eye(1)
    else:
        prior, tril, spread = PRIOR_LOC, PRIOR_TRIL, SPREAD_TRIL @ SPREAD_TRIL.T
    precision = (tril @ tril.T).double().inverse()
    shift, covs = precision @ prior.double(), []
    for x, y in zip(xs, ys, strict=True):
        covs.append(NOISE**2 * torch.eye(len(y)).double() + x @ spread.double() @ x.T)
        precision = precision + x.T @ covs[-1].inverse() @ x
        shift = shift + x.T @ covs[-1].inverse() @ y
    torch.manual_seed(0)
    normal = torch.distributions.MultivariateNormal
    g = normal(precision.inverse() @ shift, precision_matrix=precision).sample((count,))
    each = zip(xs, ys, covs, strict=True)
    return torch.stack([normal(g @ x.T, cov).log_prob(y) for x, y, cov in each], 1).numpy()


def test_numbers_are_those_of_arviz_at_draws_of_the_exact_posterior() -> None:
    data = federation((16, 5, 8, 14, 9))
    models = {"level": level, "slopes": slopes}
    told = compare_models({n: fit(hierfl.methods.two_stage(m), data) for n, m in models.items()})
    given = {}
    for name, model in models.items():
        groups = {"posterior": {"at": np.zeros(10_000)}}
        groups |= {"log_likelihood": {"y": log_likelihoods(model, data)}}
        given[name] = arviz_of(groups, {"y": ["client"]}, {})
    known, again = compared_by_arviz(given), compared_by_arviz(told.loo)
    for name in models:
        for column in ("rank", "elpd", "p", "elpd_diff", "weight", "se", "dse"):
            value = told.by_client.loc[name, column]
            assert value == pytest.approx(again.loc[name, column], abs=1e-9), column
            assert value == pytest.approx(known.loc[name, column], abs=0.15), column


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaussian", "binary"])
def test_without_rows_the_server_tells_what_the_rows_tell(kind: str, tmp_path: Path) -> None:
    data = federation(COUNTS) if kind == "gaussian" else people((9, 12, 6, 8))
    model = free(slopes) if kind == "gaussian" else programs.binary
    method = hierfl.methods.two_stage(model, draws=2000)
    here = fit(method, data)
    over = hierfl.nodes.fit(method, in_process(data, tmp_path))
    one, other = loo(here, "client").table, loo(over, "client").table
    good = (one["k_hat"] < 0.5) & (other["k_hat"].loc[one.index] < 0.5)
    assert good.sum() >= 2
    apart = (one["elpd"] - other["elpd"].loc[one.index])[good].abs()
    assert float(apart.max()) < 0.1


@pytest.mark.slow
def test_over_nodes_clients_are_compared_alone(tmp_path: Path) -> None:
    here, over = {}, {}
    for name, model in (("level", level), ("slopes", slopes)):
        method = hierfl.methods.two_stage(free(model))
        here[name] = fit(method, federation(COUNTS))
        nodes = in_process(federation(COUNTS), tmp_path / name)
        over[name] = hierfl.nodes.fit(method, nodes)
    told, known = compare_models(over), compare_models(here)
    assert told.by_row is None and "Rows are not compared" in repr(told)
    assert list(told.by_client.index) == list(known.by_client.index) == ["slopes", "level"]
    accepted = compared_by_arviz(told.loo)
    for column in ("elpd_diff", "weight", "se", "dse"):
        assert list(told.by_client[column]) == pytest.approx(list(accepted[column]), abs=1e-9)
    ours, theirs = (one.by_client["elpd_diff"].iloc[1] for one in (told, known))
    assert ours == pytest.approx(theirs, abs=0.5)


NORMAL = {
    "one noise scale": ("y ~ x + (1 | h)", "gaussian"),
    "a noise scale of each client": (["y ~ x + (1 | h)", "sigma ~ 1 + (1 | h)"], "gaussian"),
    "weights": ("y | weights(w) ~ x + (1 | h)", "gaussian"),
    "tails": ("y ~ x + (1 | h)", "student"),
}


@cache
def patients() -> pd.DataFrame:
    rng = np.random.default_rng(8)
    h, x = np.resize(list("abcd"), 60), rng.normal(size=60)
    y = pd.Series(h).map({"a": -1.0, "b": 0.0, "c": 1.0, "d": 0.5}) + x + rng.normal(size=60)
    return pd.DataFrame({"h": h, "x": x, "y": y, "time": np.exp(y), "w": np.resize([1.0, 2.0], 60)})


@pytest.mark.slow("tails", "one noise scale")
@pytest.mark.parametrize("kind", NORMAL)
def test_clients_densities_are_those_of_the_rows(kind: str, tmp_path: Path) -> None:
    """With a noise scale of each client they lacked 21 nats a client, with rows and without."""
    text, family = NORMAL[kind]
    fitted = hierfl.fit(hierfl.formula(text, family, clients="h"), patients(), seed=0)
    by_rows = precise(fitted, 400, 64, 0).log_own.double().logsumexp(0) - np.log(400)
    kept, log_own = kept_densities(fitted)
    by_server = (log_own + kept.log_weights[:, None]).logsumexp(0)
    assert float((by_rows - by_server).abs().max()) < 0.25
    fitted.save(tmp_path)
    loaded = hierfl.load(tmp_path)
    pd.testing.assert_frame_equal(loo(fitted, "client").table, loo(loaded, "client").table)
    assert log_evidence(fitted) == log_evidence(loaded)


def test_the_evidence_of_a_lognormal_counts_the_units_of_its_rows(tmp_path: Path) -> None:
    """p(t) = p(log t) / t. It was 28 nats off, and without rows it was answered as well."""
    priors = {"Intercept": dist.Normal(0.0, 2.0), "sd": dist.HalfNormal(1.0)}
    priors |= {"sigma": dist.HalfNormal(1.0), "b": dist.Normal(0.0, 1.0)}
    found = {}
    for response, family in (("time", "lognormal"), ("y", "gaussian")):
        text = f"{response} ~ x + (1 | h)"
        formula = hierfl.formula(text, family, clients="h", priors=priors)
        found[family] = hierfl.fit(formula, patients(), seed=0)
    one, other = (log_evidence(found[family]) for family in ("lognormal", "gaussian"))
    units = float(patients()["y"].sum())
    assert one.value == pytest.approx(other.value - units, abs=4.0 * (one.error + other.error))
    found["by row"] = hierfl.fit(of_known_ratios, patients(), clients="h", seed=0)
    for kind, model in (("lognormal", None), ("by row", of_known_ratios)):
        found[kind].save(tmp_path / kind)
        loaded = hierfl.load(tmp_path / kind, model=model)
        for asked in (log_evidence, lambda fitted: loo(fitted, "client")):
            with pytest.raises(hierfl.RowsNotSaved, match="noise scales differ by row"):
                asked(loaded)


def of_known_ratios(batch: ClientBatch) -> None:
    sigma, tau = (pyro.sample(name, dist.HalfNormal(1.0)) for name in ("sigma", "tau"))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(0.0, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(own, sigma * batch.w), obs=batch.y)


def test_sums_without_squares_are_refused(tmp_path: Path) -> None:
    """Of a fixed noise scale clients send no sum of squares, on which elpd rests."""
    method = hierfl.methods.two_stage(slopes)
    over = hierfl.nodes.fit(method, in_process(federation(COUNTS), tmp_path))
    with pytest.raises(hierfl.RowsNotSaved, match="the noise scale is fixed"):
        loo(over, "client")


def test_refusals() -> None:
    with pytest.raises(TypeError, match="it must be a dict"):
        compare_models([fits()["slopes"]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two or more"):
        compare_models({"one": fits()["slopes"]})
    other = fit(hierfl.methods.two_stage(slopes), federation((5, 3)))
    with pytest.raises(ValueError, match="different rows"):
        compare_models({"one": fits()["slopes"], "two": other})


@pytest.mark.filterwarnings("default")
def test_the_model_with_a_high_k_hat_is_named() -> None:
    """In each warning, and in a column of the tables."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tables = compare_models(fits(), draws=400)
    assert tables.by_row is not None
    high = {name for name, k_hat in tables.by_row["k_hat"].items() if k_hat >= 0.7}
    high |= {name for name, k_hat in tables.by_client["k_hat"].items() if k_hat >= 0.7}
    named = {name for name in fits() for w in caught if f"model '{name}': " in str(w.message)}
    assert high and named == high
    assert "k_hat" in str(tables)
