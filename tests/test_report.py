"""The page opens by itself, says what was measured, and warns of what is so and of nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import guides, methods
from hierfl.batch import ClientBatch
from hierfl.data import ClientData
from hierfl.fitted import Fit
from hierfl.methods import fedsvi
from hierfl.models import bayesian_network, network
from hierfl.optimisers import Adam
from hierfl.report import Report
from hierfl.report.blocks import Check, listed, number, share
from hierfl.report.checks import checks
from hierfl.report.measured import Measured, measure
from tests.programs import federation, fit, logistic, regression
from tests.test_fit import kinds


class Page(HTMLParser):
    """Elements, ids and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag in tags]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def labelled(counts: tuple[int, ...] = (60, 50, 40, 30), *, seed: int = 1) -> ClientData:
    """Rows whose labels follow `logistic`."""
    data = federation(counts, seed=seed)
    g = torch.Generator().manual_seed(seed)
    slope = torch.tensor([1.0, -1.0]) + 0.7 * torch.randn(len(counts), 2, generator=g)
    p = torch.sigmoid((data.fields["x"] * slope[data.row_client]).sum(-1))
    return data.with_fields(ill=(torch.rand(len(p), generator=g) < p).to(p.dtype))


@cache
def fitted(kind: str) -> tuple[Fit, ClientData]:
    if kind == "binary":
        train, test = labelled((120, 100, 80, 60)).split(0.5, seed=0)
        return fit(fedsvi(logistic, guides.structured, optimiser=Adam(0.05), local_optimiser=Adam(0.05)), train, rounds=120), test
    data = federation()
    data = data.with_fields(kind=(data.fields["visits"].long() % 3))
    return fit(fedsvi({"numeric": regression, "classes": kinds}[kind]), data, rounds=3), data


def warned(found: list[Check]) -> set[str]:
    return {check.question for check in found if check.verdict == "warning"}


def measured(f: Fit, **given: Any) -> Measured:
    options: dict[str, Any] = {"held_out": None, "foreign": None, "alone": None, "site": None, "draws": 60, "seed": 0}
    return measure(f, **{**options, **given})


# ------------------------------------------------------------------------------------------------ the page
@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Page]:
    torch.set_default_dtype(torch.float64)
    f, test = fitted("binary")
    alone = fit(fedsvi(logistic, guides.conditional(newton_steps=2)), f.federation.data, rounds=1)
    far = test.with_fields(x=6.0 * test.fields["x"]).without("ill")
    path = tmp_path_factory.mktemp("report") / "report.html"
    report = f.report(path, held_out=test, foreign=far, alone=alone, title="Four <clients> & a page", draws=100)
    return report, Page(path.read_text(encoding="utf-8"))


def test_every_part_is_there_once_and_can_be_reached(written: tuple[Report, Page]) -> None:
    page = written[1]
    assert not page.open and page.all("html")[0]["lang"] == "en"
    ids = Counter(a["id"] for _, a in page.elements if "id" in a)
    assert max(ids.values()) == 1
    links = [a["href"] for a in page.all("a")]
    assert links[0] == "#main" and {link[1:] for link in links} <= set(ids)
    parts = {"summary", "run", "convergence", "global", "clients", "shrinkage", "predictions", "foreign", "checks"}
    assert parts <= set(ids) and {f"#{part}" for part in parts} <= set(links)
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("nav")) == 1
    assert "Four <clients> & a page" in page.text


def test_it_needs_no_network_and_runs_nothing(written: tuple[Report, Page]) -> None:
    report, page = written
    text = report.path.read_text(encoding="utf-8")
    assert not page.all("script", "iframe", "object") and "@import" not in text and "url(" not in text
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value.startswith(("#", "data:")), value
    assert not re.search(r"https?://", re.sub(r'src="data:[^"]*"', "", text))


def test_pictures_have_words_and_tables_have_heads(written: tuple[Report, Page]) -> None:
    page = written[1]
    images = page.all("img")
    assert len(images) >= 8 and all(len(i["alt"]) > 20 and int(i["width"]) > 100 for i in images)
    assert len(page.all("figcaption")) == len(images)
    assert all("scope" in th for th in page.all("th")) and len(page.all("caption")) == len(page.all("table")) - 1
    scrolling = [a for tag, a in page.elements if a.get("class") == "scroll"]
    assert scrolling and all(a["tabindex"] == "0" and a["aria-label"] and a["role"] == "region" for a in scrolling)


def test_its_numbers_are_those_of_the_fit(written: tuple[Report, Page]) -> None:
    f, test = fitted("binary")
    page, draws = written[1], f.draws(100)
    loc = draws.shared["loc"]
    assert f"loc[0] {number(float(loc[:, 0].mean()))} {number(float(loc[:, 0].std(correction=0)))}" in page.text
    scores = f.predict(test, draws=100).scores()
    assert f"north {int(scores['rows']['north'])} {number(float(scores['log_score']['north']))}" in page.text
    assert f"{len(f.history)} rounds" in page.text and f"{f.federation.data.num_rows} training rows" in page.text


def test_the_same_fit_gives_the_same_page_but_for_the_date(tmp_path: Path) -> None:
    f, test = fitted("binary")
    texts = []
    for name in ("one.html", "two.html"):
        f.report(tmp_path / name, held_out=test, draws=60)
        texts.append(re.sub(r"<footer>.*</footer>", "", (tmp_path / name).read_text(encoding="utf-8")))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["numeric", "classes"])
def test_every_kind_of_label_is_reported(kind: str, tmp_path: Path) -> None:
    f, data = fitted(kind)
    report = f.report(tmp_path / "r.html", held_out=data, foreign=data, draws=60)
    page = Page(report.path.read_text(encoding="utf-8"))
    assert "Sharpness" in page.text and (kind == "classes" or "CRPS" in page.text)
    assert any("in distribution" not in check.question for check in report.checks)


def test_a_network_too_large_to_draw_is_reported_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hierfl.report.measured.NUMBERS", 100)
    report = fitted("binary")[0].report(tmp_path / "r.html", draws=60)
    page = Page(report.path.read_text(encoding="utf-8"))
    assert "too many to draw and hold here" in page.text and not any(a.get("id") == "clients" for _, a in page.elements)


def test_what_has_no_page_is_refused(tmp_path: Path) -> None:
    f, test = fitted("binary")
    with pytest.raises(ValueError, match="no labels for site 'ill': nothing to score"):
        f.report(tmp_path / "r.html", held_out=test.without("ill"))
    with pytest.raises(ValueError, match="none is the same"):
        f.report(tmp_path / "r.html", alone=fitted("classes")[0], draws=60)
    with pytest.raises(KeyError, match="was not fitted"):
        f.report(tmp_path / "r.html", held_out=replace(test, names=("north", "south", "east", "nobody")))


# ------------------------------------------------------------------------------------------------ warnings
def test_a_sound_fit_is_warned_of_nothing(tmp_path: Path) -> None:
    f, test = fitted("binary")
    report = f.report(tmp_path / "r.html", held_out=test, draws=100)
    assert report.warnings == [] and "No warnings." in Page(report.path.read_text(encoding="utf-8")).text
    assert sum(check.verdict == "good" for check in report.checks) >= 8


def test_every_warning_stands_at_the_top_and_among_the_answers(written: tuple[Report, Page]) -> None:
    """A logistic regression is the surer of rows the further out they lie: the page says so."""
    report, page = written
    assert len(report.warnings) == 1 and "as sure of foreign rows as of its own" in report.warnings[0]
    assert page.text.count(report.warnings[0]) == 2 and "1 warning of " in page.text


def test_training_rows_and_few_rows_are_told() -> None:
    f = fit(fedsvi(logistic, guides.conditional(newton_steps=2)), federation((30, 4, 25, 3)), rounds=5)
    found = checks(measured(f))
    told = {check.question: check.answer for check in found if check.verdict == "warning"}
    assert "training rows" in told["Are predictions scored on rows that the fit has not seen?"]
    assert "2 of 4 clients have fewer than 20 rows (south: 4 and west: 3)" in told["Has every client rows enough?"]


def test_points_are_told() -> None:
    f = fit(fedsvi(regression, guides.delta), federation((30, 30, 30)), rounds=3)
    assert "Does every number have an uncertainty?" in warned(checks(measured(f)))
    net = torch.nn.Linear(2, 1)
    model = network(net, likelihood=lambda out: dist.Normal(out[..., 0], 1.0))
    learned = fit(methods.fedavg(model), federation((30, 30, 30)), rounds=2)
    told = [c.answer for c in checks(measured(learned)) if c.question == "Does every number have an uncertainty?"]
    assert told[0].startswith("No: theta.weight and theta.bias are point estimates")
    kept = bayesian_network(net, likelihood=lambda out: dist.Normal(out[..., 0], 1.0), prior_loc=dist.Normal(0.0, 1.0))
    whole = fit(fedsvi(kept), federation((30, 30, 30)), rounds=2)
    assert "Does every number have an uncertainty?" not in warned(checks(measured(whole)))


def test_a_mean_field_guide_is_told_only_where_there_are_scales() -> None:
    question = "May the scales above the clients depend on the clients?"
    data = federation((30, 30, 30))
    for family, bad in ((guides.mean_field, True), (guides.structured, False)):
        assert (question in warned(checks(measured(fit(fedsvi(regression, family), data, rounds=2))))) == bad
    asked = {c.question for c in checks(measured(fit(fedsvi(logistic, guides.mean_field), data, rounds=2)))}
    assert question not in asked


def sharpened(found: Measured, by: float) -> Measured:
    """The same rows with log odds `by` times as large."""
    assert found.prediction is not None and found.prediction.label is not None
    p, y = torch.sigmoid(by * torch.logit(found.prediction.mean)), found.prediction.label
    log_score = torch.where(y > 0.5, p, 1 - p).log()
    return replace(found, prediction=replace(found.prediction, mean=p, log_score=log_score))


def test_probabilities_that_do_not_come_true_are_told() -> None:
    f, test = fitted("binary")
    found, question = measured(f, held_out=test), "Do predicted probabilities come true?"
    assert question not in warned(checks(found))
    assert question in warned(checks(sharpened(found, 8.0)))
    served = "Is every client served better than by its event rate alone?"
    assert served not in warned(checks(found)) and served in warned(checks(sharpened(found, -3.0)))


def test_intervals_of_rates_that_do_not_cover_are_told() -> None:
    f, test = fitted("binary")
    found, question = measured(f, held_out=test), "Do intervals of clients' event rates cover?"
    assert question not in warned(checks(found))
    off = replace(found, replicates=torch.ones_like(found.replicates))  # type: ignore[arg-type]
    told = [c.answer for c in checks(off) if c.question == question and c.verdict == "warning"]
    assert told and told[0].startswith("0 of 4 clients' event rates")


def test_intervals_of_numbers_that_do_not_cover_are_told() -> None:
    def narrow(batch: ClientBatch) -> None:
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(a, batch.said), obs=batch.y)

    g = torch.Generator().manual_seed(0)
    n, question = 300, "Do intervals of single rows cover?"
    for said, bad in ((1.0, False), (0.5, True), (2.5, True)):
        data = ClientData.from_arrays(np.arange(n) % 3, y=torch.randn(n, generator=g), said=torch.full((n,), said))
        f = fit(fedsvi(narrow, guides.conditional(newton_steps=1)), data, rounds=1)
        told = [c for c in checks(measured(f, draws=200)) if c.question == question]
        assert (told[0].verdict == "warning") == bad, told
        if bad:
            assert ("too narrow" in told[0].answer) == (said < 1.0)


def test_strangers_that_pass_for_own_rows_are_told() -> None:
    f, data = fitted("numeric")
    question = "Does the model know foreign rows when it sees them?"
    assert question in warned(checks(measured(f, foreign=data.without("y"))))
    far = data.with_fields(x=30.0 * data.fields["x"]).without("y")
    assert question not in warned(checks(measured(f, foreign=far)))


def vague(batch: ClientBatch) -> None:
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a, batch.sd), obs=batch.y)


def test_clients_whose_rows_tell_little_are_told() -> None:
    g = torch.Generator().manual_seed(0)
    sd = torch.tensor([1.0, 30.0, 1.0]).repeat(25)
    data = ClientData.from_arrays(np.arange(75) % 3, y=torch.randn(75, generator=g), sd=sd)
    f = fit(fedsvi(vague, guides.conditional(newton_steps=1)), data, rounds=1)
    found = measured(f, draws=300)
    assert found.told is not None
    precision = 25.0 / np.array([1.0, 900.0, 1.0])
    np.testing.assert_allclose(found.told["narrower"], 1.0 - 1.0 / (1.0 + precision), atol=0.2)
    means = f.draws(300).own["a"].mean(0).numpy()
    exact = 0.5 * (1.0 / (1.0 + precision) - 1.0 + np.log1p(precision) + means**2)
    np.testing.assert_allclose(found.told["nats"], exact, atol=0.25)
    told = [c.answer for c in checks(found) if c.question == "Do clients' own rows say much about them?"]
    assert told[0].startswith("1 of 3 clients (1) tell less than 0.1 nats")


def test_a_client_that_stands_elsewhere_is_not_silent_though_its_spread_is_that_of_all() -> None:
    """As under a few steps of a mean-field guide, which move means and leave spreads."""
    data = ClientData.from_arrays(
        np.arange(75) % 3, names=["north", "south", "east"], y=torch.zeros(75), sd=torch.full((75,), 1e3)
    )
    found = measured(fit(fedsvi(vague, guides.conditional(newton_steps=1)), data, rounds=1), draws=300)
    assert found.told is not None and found.draws is not None
    assert (found.told["nats"] < 0.1).all() and (found.told["narrower"] < 0.2).all()
    own = {"a": found.draws.own["a"] + torch.tensor([0.0, 2.0, 0.0])}
    moved = replace(found, draws=replace(found.draws, own=own))
    told = [c.answer for c in checks(moved) if c.question == "Do clients' own rows say much about them?"]
    assert told[0].startswith("2 of 3 clients (north and east)")


@pytest.mark.parametrize(
    ("column", "values", "question"),
    [
        ("clients", [1, 0, 0, 1, 0, 0], "Was every client asked often enough?"),
        ("held_out_log_score", [-1.0, -0.5, -0.4, -0.42, -0.5, -0.6], "Did the held-out score go on rising?"),
        ("effective_clients", [3.0, 2.0, 1.4, 1.1, 1.0, 1.0], "Do all clients count?"),
    ],
)
def test_what_the_history_shows_is_told(column: str, values: list[float], question: str) -> None:
    f, test = fitted("binary")
    base = [{"round": r, "clients": 4, "held_out_log_score": -1.0 / (r + 1), "effective_clients": 3.5} for r in range(6)]
    good = replace(f, progress=replace(f.progress, history=tuple(base)))
    assert question not in warned(checks(measured(good, held_out=test)))
    history = tuple({**record, column: value} for record, value in zip(base, values, strict=True))
    assert question in warned(checks(measured(replace(f, progress=replace(f.progress, history=history)), held_out=test)))


# ------------------------------------------------------------------------------------------------ words
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: number(-0.000012), "\N{MINUS SIGN}1.20e\N{MINUS SIGN}05"),
        (lambda: number(0.999999), "1.000"),
        (lambda: number(123456.0), "123456"),
        (lambda: number(float("inf")), "infinite"),
        (lambda: number(0.0), "0"),
        (lambda: share(0.0), "0 %"),
        (lambda: listed(["a"]), "a"),
        (lambda: listed(["a", "b", "c"], 2), "a, b and 1 more"),
    ],
)
def test_numbers_and_lists_in_words(call: Callable[[], str], text: str) -> None:
    assert call() == text
