"""The summary: the statistics of the draws, shrinkage in closed form, one verdict."""

import html
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, Method, guides, methods
from hierfl.core.trees import tree_map
from hierfl.diagnostics.convergence import convergence, judged_by_history
from hierfl.diagnostics.entries import entries_of_draws
from hierfl.posterior.shrinkage import shrinkage
from hierfl.posterior.site_table import site_table
from tests.methods.cases import METHODS, first_word
from tests.programs import exact, federation, fit, logistic, means, regression, slopes, three
from tests.sampled import sampled


@cache
def spread_fit() -> hierfl.Fit:
    return fit(methods.fedsvi(regression, guide=guides.structured), federation(), rounds=3)


def test_numbers_are_those_of_the_draws() -> None:
    """Also where clients are carried in several chunks."""
    fitted = spread_fit()
    chunked = replace(
        fitted, federation=replace(fitted.federation, settings=hierfl.Settings(chunk=2))
    )
    drawn = fitted.draws(200, seed=3)
    for one in (fitted, chunked):
        frame = site_table(one, draws=200, seed=3).frame.set_index(["site", "entry", "client"])
        assert len(frame) == 2 + 1 + 1 + 2 * 4
        values = {
            ("loc", "1", ""): drawn.shared["loc"][:, 1],
            ("spread", "", ""): drawn.shared["spread"],
            ("slope", "0", "east"): drawn.own["slope"][:, 2, 0],
            ("slope", "1", "west"): drawn.own["slope"][:, 3, 1],
        }
        for place, value in values.items():
            v = value.double().numpy()
            wanted = [v.mean(), v.std(ddof=1), *np.quantile(v, [0.05, 0.95])]
            found = frame.loc[place, ["mean", "sd", "low", "high"]]
            np.testing.assert_allclose(found.to_numpy(float), wanted, rtol=1e-5)
    assert frame["shrinkage"].isna().to_numpy().tolist() == [True] * 4 + [False] * 8


def conjugate(data: ClientData, name: str) -> hierfl.Fit:
    model = {"means": means, "slopes": slopes}[name]
    return fit(methods.fedlaplace(model, weighting_rounds=0), data, rounds=10)


def test_shrinkage_of_means_is_the_closed_form() -> None:
    """B = (1 / n_k) / (1 / n_k + 1): 1/3, 1/2 and 1/4."""
    fitted = conjugate(three(), "means")
    frame = fitted.summary(draws=50).frame.query("site == 'b'")
    wanted = exact(three(), "means").given_cov.flatten().numpy()
    np.testing.assert_allclose(wanted, [1 / 3, 1 / 2, 1 / 4])
    np.testing.assert_allclose(frame["shrinkage"], wanted, rtol=0.2)
    found = shrinkage(fitted, ["b"], points=400, draws=32)["b"].value
    np.testing.assert_allclose(found, wanted, rtol=0.04)
    # the posterior mean lies so far between the client's own mean and that of all
    loc = exact(three(), "means").loc.item()
    own = np.array([1.5, 0.0, 4.0])
    np.testing.assert_allclose(
        exact(three(), "means").own_loc.flatten(), wanted * loc + (1.0 - wanted) * own, rtol=1e-5
    )


def test_shrinkage_of_a_student_t_sums_over_its_mixing_parameter() -> None:
    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1e-3))
        with batch.clients():
            own = pyro.sample("own", dist.StudentT(3.0, mu, 2.0))
            with batch.data():
                pyro.sample("y", dist.Normal(own, 3.0), obs=batch.y)

    y = {"near": 0.5, "far": 12.0}
    data = ClientData.from_clients({name: {"y": [value]} for name, value in y.items()})
    fitted = fit(methods.two_stage(model, draws=200), data, rounds=2)
    at = torch.linspace(-400.0, 400.0, 400_001, dtype=torch.float64)
    log_p = dist.StudentT(3.0, 0.0, 2.0).log_prob(at)
    for found, value in zip(shrinkage(fitted, ["own"])["own"].value, y.values(), strict=True):
        share = (log_p + dist.Normal(at, 3.0).log_prob(torch.tensor(value))).softmax(0)
        spread = share @ at.square() - (share @ at).square()
        assert float(found) == pytest.approx(float(spread) / 12.0, rel=0.02)


@pytest.mark.slow
def test_shrinkage_of_a_vector_of_student_ts_beside_other_sites() -> None:
    """By draws it had an error of 10%, which 2,000 draws of the posterior do not have."""

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1e-3))
        scale = torch.tensor([2.0, 1.0])
        with batch.clients():
            pair = pyro.sample("pair", dist.StudentT(3.0, mu, scale).to_event(1))
            plain = pyro.sample("plain", dist.Normal(mu, 2.0))
            wild = pyro.sample("wild", dist.Cauchy(mu, 1.0))
            own = torch.cat([pair, torch.stack([plain, wild], -1)], -1)
            with batch.data():
                pyro.sample("y", dist.Normal(own, 3.0).to_event(1), obs=batch.y)

    rows = {"near": torch.full((1, 4), 0.5), "far": torch.tensor([[12.0, 6.0, 12.0, 12.0]])}
    data = ClientData.from_clients({name: {"y": y} for name, y in rows.items()})
    found = shrinkage(fit(methods.two_stage(model), data, rounds=12), ["pair", "plain", "wild"])
    at = torch.linspace(-400.0, 400.0, 400_001, dtype=torch.float64)
    for client, y in enumerate(rows.values()):
        for entry, scale in enumerate((2.0, 1.0)):
            log_p = dist.StudentT(3.0, 0.0, scale).log_prob(at)
            share = (log_p + dist.Normal(at, 3.0).log_prob(y[0, entry])).softmax(0)
            wanted = (share @ at.square() - (share @ at).square()) / (3.0 * scale**2)
            assert float(found["pair"].value[client, entry]) == pytest.approx(
                float(wanted), rel=0.05
            )
    torch.testing.assert_close(found["plain"].value, torch.full((2,), 9.0 / 13.0))
    assert found["wild"].value.isnan().all()


def test_shrinkage_is_one_without_information_and_absent_where_undefined() -> None:
    def model(batch: ClientBatch) -> None:
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, batch.scale))
            b = pyro.sample("b", dist.Normal(a, 1.0))  # its prior depends on a local site
            c = pyro.sample("c", dist.Cauchy(0.0, 1.0))  # no variance
            with batch.data():
                pyro.sample("y", dist.Normal(b + c, 1.0), obs=batch.y)

    data = ClientData.from_clients(
        {"u": {"y": [0.0, 0.1]}, "v": {"y": [0.2]}}, client_fields={"scale": [1.0, 10.0]}
    )
    optimizer = hierfl.optimizers.Adam(0.0)
    fitted = fit(
        methods.fedsvi(model, guide=guides.mean_field, optimizer=optimizer), data, rounds=1
    )
    frame = fitted.summary().frame.set_index(["site", "client"])
    assert frame.loc[["b", "c"], "shrinkage"].isna().all()
    # the prior of each client is at its own client field; the guide of both is the same
    pulled = frame.loc["a", "shrinkage"]
    assert pulled["u"] / pulled["v"] == pytest.approx(100.0, rel=0.5)


EACH = {first_word(name): name for name in METHODS}  # one case of each method
NEVER = ("fedep", "bfi", "fedlaplace", "differentially_private")


@pytest.mark.parametrize(
    "name", sampled([name for word, name in EACH.items() if word not in NEVER], 2)
)
@pytest.mark.filterwarnings("ignore")
def test_every_method_is_summarized(name: str) -> None:
    """Convergence is left out: tests/diagnostics/test_convergence.py judges methods of every kind."""
    data = federation((3, 2, 4))
    fitted = hierfl.fit(
        METHODS[name](), data, rounds=2, settings=hierfl.Settings(compile=False), progress=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hierfl.diagnostics.verdict.run_of", lambda *_: "it was not asked")
        found = fitted.summary(draws=50)
    assert all(kind.kind == "f" for kind in found.frame.dtypes[3:])
    assert (
        list(found.frame) == "site entry client mean sd low high shrinkage shrinkage_error".split()
    )
    assert found.frame["mean"].notna().all() and len(found.frame)
    known = found.frame.dropna(subset=["sd"])
    assert (known["low"] <= known["high"]).all() and (known["sd"] > 0).all()
    assert found.frame["sd"].isna().equals(found.frame["low"].isna())
    assert found.frame["shrinkage"].dropna().between(0.0, 5.0).all()
    assert found.verdict.endswith(".") and found.trustworthy in (True, False, None)
    text = repr(found)
    assert "tensor(" not in text and len(text.splitlines()) <= 60


def test_point_estimates_have_no_sd_and_the_verdict_says_so() -> None:
    found = fit(methods.fedsvi(regression, guide=guides.delta), federation(), rounds=2).summary()
    assert found.frame[["sd", "low", "high", "shrinkage"]].isna().all(axis=None)
    assert found.trustworthy is False and "point estimates" in found.verdict
    assert any("'slope'" in remark for remark in found.remarks)


# ------------------------------------------------------------------------------------------ verdict
def with_history(fitted: hierfl.Fit, **last: Any) -> hierfl.Fit:
    """Change the last row of the history."""
    history = (*fitted.progress.history[:-1], {**fitted.progress.history[-1], **last})
    return replace(fitted, progress=replace(fitted.progress, history=history))


def with_server(fitted: hierfl.Fit, **state: float) -> hierfl.Fit:
    """Change numbers of the server's state."""
    server = replace(fitted.progress.server, **{n: torch.tensor(v) for n, v in state.items()})
    return replace(fitted, progress=replace(fitted.progress, server=server))


@cache
def weighted() -> hierfl.Fit:
    return fit(methods.fedlaplace(means, draws=128, target_ess=60), three(), rounds=15)


VERDICTS: dict[str, tuple[Callable[[], hierfl.Fit], bool | None, str]] = {
    "weights that are right": (
        weighted,
        True,
        r"Trustworthy\. Good: .*k-hat is .*draws are effective",
    ),
    "weights by Laplace's integrals, which are not exact": (
        lambda: fit(
            methods.fedlaplace(logistic, draws=512, target_ess=200), federation((3, 2)), rounds=15
        ),
        None,
        r"Check before you trust it\. .*k-hat .*do not include the error of Laplace.*two_stage",
    ),
    "a high k-hat": (
        lambda: with_server(weighted(), k_hat=0.9),
        False,
        r"k-hat is 0\.90.*Use fedsvi",
    ),
    "a k-hat that says to check": (
        lambda: with_server(weighted(), k_hat=0.6),
        None,
        r"Check before you trust it\. .*Check the tails: k-hat is 0\.60.*Allow more points",
    ),
    "few effective": (
        lambda: with_server(weighted(), effective=7.0),
        False,
        "7 draws are effective",
    ),
    "too few rounds": (
        lambda: fit(methods.fedlaplace(means), three(), rounds=1),
        False,
        "the 1 rounds ended before 'fedlaplace' had finished. Allow more",
    ),
    "a client left out": (
        lambda: with_history(
            spread_fit(), left_out=({"client": "east", "reason": "it fails"},), round=2
        ),
        False,
        r"left out: east \(in 1 of 3 rounds, first in round 3: it fails\)\..*Fix their rows",
    ),
    "a client that was never there": (
        lambda: fit(
            methods.fedsvi(regression, guide=guides.structured), federation(), rounds=1, cohort=3
        ),
        False,
        r"1 of 4 clients \(\w+\) have never taken part",
    ),
    "a learned scale": (
        lambda: fit(METHODS["pfedbayes"](), federation(), rounds=1),
        False,
        "Intervals do not include the uncertainty of point estimates: .* Give the model a prior there",
    ),
    "not judged": (spread_fit, None, "is not known.* Fit for more rounds"),
}


@pytest.mark.slow(
    "weights by Laplace's integrals, which are not exact",
    "weights that are right",
    "too few rounds",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_names_the_reason_and_the_fix(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_trend(fit: Any, **options: Any) -> Any:
        if judged_by_history(fit):
            return convergence(fit, **options)
        raise ValueError("a trend needs more rounds")

    monkeypatch.setattr("hierfl.diagnostics.verdict.convergence", no_trend)
    make, trustworthy, words = VERDICTS[case]
    found = make().summary(draws=20)
    assert found.trustworthy is trustworthy
    assert pd.Series([found.verdict]).str.contains(words).all(), found.verdict
    page = html.unescape(found._repr_html_())  # type: ignore[attr-defined]
    assert all(line in page for line in found.verdict.split("\n"))


def test_draws_that_are_not_finite_are_not_trusted() -> None:
    fitted = spread_fit()
    server = tree_map(
        lambda v: v * torch.nan if v.is_floating_point() else v, fitted.progress.server
    )
    found = replace(fitted, progress=replace(fitted.progress, server=server)).summary(draws=20)
    assert found.trustworthy is False and "not finite" in found.verdict


@pytest.mark.slow
def test_without_rows_the_global_sites_are_left(tmp_path: Any) -> None:
    for guide, rows in ((guides.conditional, 4), (guides.mean_field, 12)):
        method: Method = methods.fedsvi(regression, guide=guide)
        fitted = fit(method, federation(), rounds=1)
        fitted.save(tmp_path / guide.__name__)  # type: ignore[attr-defined]
        loaded = hierfl.load(tmp_path / guide.__name__, method=method)  # type: ignore[attr-defined]
        found = loaded.summary(draws=20)
        assert len(found.frame) == rows and found.trustworthy is not True
        assert any("rows" in remark for remark in found.remarks)
        np.testing.assert_allclose(
            found.frame["mean"], fitted.summary(draws=20).frame["mean"][:rows]
        )


def test_few_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="draws is 5: a 90% interval needs an integer of 20"):
        spread_fit().summary(draws=5)


def test_checks_name_entries_as_the_table_does() -> None:
    g = np.random.default_rng(0)
    frame = pd.DataFrame(g.normal(size=(40, 3)), columns=["age", "dose", "y"])
    data = ClientData.from_frame(
        frame.assign(place=[*"abcd"] * 10), "place", x=["age", "dose"], y="y"
    )
    fitted = hierfl.fit(methods.two_stage(slopes), data, seed=0)
    own = fitted.federation.server.weighted(fitted.progress.server)
    table = fitted.summary().frame.query("client == ''")
    names = [f"'{row.site}{row.entry and f'[{row.entry}]'}'" for row in table.itertuples()]
    assert own is not None
    entries = entries_of_draws(fitted, own)
    assert entries is not None and entries.names == tuple(names)
    assert any("[age]" in name for name in names)
