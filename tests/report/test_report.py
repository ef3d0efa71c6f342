"""The report is one self-contained page, and warns of real problems only."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientData, Fit, guides, methods
from hierfl.diagnostics.check import listed, number, share
from hierfl.diagnostics.convergence import convergence
from hierfl.diagnostics.verdict import run_of
from hierfl.methods import fedsvi
from hierfl.models import learned_prior_network, network
from hierfl.models import regression as regression_of
from hierfl.models.likelihood import normal
from hierfl.optimizers import Adam
from hierfl.report import Report, pictures
from hierfl.report.measure import Measured, SiteEntry
from tests.programs import federation, fit, logistic, regression
from tests.runs.test_fit import kinds


class Page(HTMLParser):
    """Elements, ids and text of an HTML page."""

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


def labeled(counts: tuple[int, ...] = (60, 50, 40, 30), *, seed: int = 1) -> ClientData:
    """Return clients whose labels follow `logistic`."""
    data = federation(counts, seed=seed)
    g = torch.Generator().manual_seed(seed)
    slope = torch.tensor([1.0, -1.0]) + 0.7 * torch.randn(len(counts), 2, generator=g)
    p = torch.sigmoid((data.fields["x"] * slope[data.row_client]).sum(-1))
    return data.with_fields(ill=(torch.rand(len(p), generator=g) < p).to(p.dtype))


@cache
def fitted(kind: str) -> tuple[Fit, ClientData]:
    if kind == "binary":
        train, test = labeled((120, 100, 80, 60)).split(0.5, seed=0)
        pace = Adam(0.05)  # with one draw, means are 0.3 sd off
        method = fedsvi(logistic, optimizer=pace, local_optimizer=pace, draws=8)
        return fit(method, train, rounds=120), test
    data = federation()
    data = data.with_fields(kind=(data.fields["visits"].long() % 3))
    return fit(fedsvi({"numeric": regression, "classes": kinds}[kind]), data, rounds=3), data


# ----------------------------------------------------------------------------------------- the page
judged = cache(run_of)


@pytest.fixture(autouse=True, scope="module")
def judged_once() -> Iterator[None]:
    """Judge the convergence of each fit once: it takes most of the time of a report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hierfl.diagnostics.verdict.run_of", judged)
        yield


def written_to(path: Path) -> Report:
    """Write a report of a fit with all that it may be given."""
    f, test = fitted("binary")
    alone = fit(fedsvi(logistic, guides.conditional(newton_steps=2)), f.federation.data, rounds=1)
    far = test.with_fields(x=6.0 * test.fields["x"]).without("ill")
    others: dict[str, Any] = {"held_out": test, "foreign": far, "local_only": alone}
    return f.report(path, title="Four <clients> & a page", draws=100, **others)


@pytest.fixture
def written(report: Report) -> tuple[Report, Page]:
    return report, Page(report.path.read_text(encoding="utf-8"))


def test_every_section_occurs_once_and_is_linked(written: tuple[Report, Page]) -> None:
    page = written[1]
    assert not page.open and page.all("html")[0]["lang"] == "en"
    ids = Counter(a["id"] for _, a in page.elements if "id" in a)
    assert max(ids.values()) == 1
    links = [a["href"] for a in page.all("a")]
    assert links[0] == "#main" and {link[1:] for link in links} <= set(ids)
    ids_of_parts = {"summary", "run", "convergence", "global", "clients", "shrinkage"}
    ids_of_parts |= {"predictions", "foreign", "checks"}
    assert ids_of_parts <= set(ids) and {f"#{part}" for part in ids_of_parts} <= set(links)
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("nav")) == 1
    assert "Four <clients> & a page" in page.text


def test_the_page_needs_no_network_and_runs_no_script(written: tuple[Report, Page]) -> None:
    report, page = written
    text = report.path.read_text(encoding="utf-8")
    assert not page.all("script", "iframe", "object")
    assert "@import" not in text and "url(" not in text
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value.startswith(("#", "data:")), value
    assert not re.search(r"https?://", re.sub(r'src="data:[^"]*"', "", text))


def test_pictures_have_alt_texts_and_tables_have_headers(written: tuple[Report, Page]) -> None:
    page = written[1]
    images = page.all("img")
    assert len(images) >= 8 and all(len(i["alt"]) > 20 and int(i["width"]) > 100 for i in images)
    assert len(page.all("figcaption")) == len(images)
    assert all("scope" in th for th in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table")) - 1
    scrolling = [a for tag, a in page.elements if a.get("class") == "scroll"]
    assert scrolling and all(a["aria-label"] for a in scrolling)
    assert {(a["tabindex"], a["role"]) for a in scrolling} == {("0", "region")}


def test_the_numbers_on_the_page_are_those_of_the_fit(written: tuple[Report, Page]) -> None:
    f, test = fitted("binary")
    page, draws = written[1], f.draws(100)
    loc = draws.shared["loc"][:, 0]
    mean, sd = number(float(loc.mean())), number(float(loc.std(correction=0)))
    assert f"loc[0] {mean} {sd}" in page.text
    north = f.predict(test, draws=100).scores().loc["north"]
    assert f"north {int(north['rows'])} {number(float(north['log_score']))}" in page.text
    assert f"{len(f.history)} rounds" in page.text
    assert f"{f.federation.data.num_rows} training rows" in page.text


@pytest.mark.slow
def test_the_same_fit_gives_the_same_page_but_for_the_date(
    written: tuple[Report, Page], tmp_path: Path
) -> None:
    reports = (written[0], written_to(tmp_path / "again.html"))
    one, other = (
        re.sub(r"<footer>.*</footer>", "", report.path.read_text(encoding="utf-8"))
        for report in reports
    )
    assert one == other


@pytest.fixture
def few_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge convergence by few weighted draws, where the answer does not matter."""
    quick = partial(convergence, proposals=100)
    monkeypatch.setattr("hierfl.diagnostics.verdict.convergence", quick)


@pytest.mark.slow("classes")
@pytest.mark.parametrize("kind", ["numeric", "classes"])
def test_every_kind_of_label_is_reported(kind: str, tmp_path: Path, few_proposals: None) -> None:
    f, data = fitted(kind)
    report = f.report(tmp_path / "r.html", held_out=data, foreign=data, draws=60)
    page = Page(report.path.read_text(encoding="utf-8"))
    assert "Sharpness" in page.text and (kind == "classes" or "CRPS" in page.text)
    assert any("in distribution" not in check.question for check in report.checks)


def on_a_line(model: Callable[..., Any]) -> Any:
    return model(torch.nn.Linear(2, 1), likelihood=normal(1.0))


OTHERS: dict[str, Callable[[ClientData], Fit]] = {
    "a prior that is a penalty": lambda d: fit(
        methods.fedmap(on_a_line(learned_prior_network), weights="mean-likelihood"), d, rounds=1
    ),
    "no latent site": lambda d: fit(methods.ditto(on_a_line(network)), d, rounds=1),
    "clients that joined": lambda d: fit(
        fedsvi(regression), federation((9, 9)), rounds=2
    ).personalize(d, rounds=2),
    "one client": lambda d: fit(fedsvi(regression), d.select([0]), rounds=2),
    "counts": lambda d: fit(fedsvi(regression_of("poisson", y="visits")), d, rounds=2),
}


@pytest.mark.slow
def test_a_formula_is_reported_by_its_names(tmp_path: Path, few_proposals: None) -> None:
    source = np.random.default_rng(0)
    frame = pd.DataFrame({"hospital": np.repeat(["va", "north", "east"], 60)})
    frame["ward"] = np.where(np.arange(180) % 60 < 20, "w1", "w2")
    frame["stage"] = pd.Categorical(source.choice(["I", "II"], 180))
    frame = frame[(frame["hospital"] != "va") | (frame["ward"] == "w2")]
    frame["y"] = (frame["stage"] == "II") + source.normal(size=len(frame))
    text = "y ~ stage + (1 + stage | hospital) + (1 | hospital:ward)"
    done = fit(hierfl.formula(text, clients="hospital"), frame)
    page = Page(done.report(tmp_path / "r.html", draws=60).path.read_text(encoding="utf-8"))
    assert f"Model {text}, gaussian with link identity" in page.text
    assert page.text.count("cor_hospital[Intercept, stage[II]]") == 1
    assert "stage[II] 0." in page.text and "hospital[stage[II]] of each client" in page.text
    assert "L_hospital" not in page.text and "hospital:ward[" not in page.text
    wards = dict(done.summary(draws=60).tables)["hospital:ward: deviations by client"]
    with_names = set(zip(wards["client"], wards["term"], strict=True))
    assert with_names == {("va", "w2"), *((h, w) for h in ("north", "east") for w in ("w1", "w2"))}


@pytest.mark.slow("clients that joined", "counts", "one client", "a prior that is a penalty")
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_fit_is_reported(name: str, tmp_path: Path, few_proposals: None) -> None:
    data = federation((12, 9, 21))
    f = OTHERS[name](data)
    rows = data.select(f.clients)
    report = f.report(tmp_path / "r.html", held_out=rows, foreign=rows, draws=60)
    page = Page(report.path.read_text(encoding="utf-8"))
    assert not page.open and f.method.name in page.text and len(report.checks) >= 8


def test_a_large_network_is_reported_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hierfl.report.measure.NUMBERS", 100)
    report = fitted("binary")[0].report(tmp_path / "r.html", draws=60)
    page = Page(report.path.read_text(encoding="utf-8"))
    assert "too large to hold enough of them (2 parameters per client)" in page.text
    assert all(a.get("id") != "clients" for _, a in page.elements)


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    f, test = fitted("binary")
    with pytest.raises(ValueError, match="no labels for site 'ill': pass labeled rows, or omit"):
        f.report(tmp_path / "r.html", held_out=test.without("ill"))
    with pytest.raises(ValueError, match="at least one must be in both"):
        f.report(tmp_path / "r.html", local_only=fitted("classes")[0], draws=60)
    others = replace(test, names=("north", "south", "east", "nobody"))
    with pytest.raises(KeyError, match="was not fitted"):
        f.report(tmp_path / "r.html", held_out=others)


def test_a_sound_fit_has_no_warnings(tmp_path: Path) -> None:
    f, test = fitted("binary")
    report = f.report(tmp_path / "r.html", held_out=test, draws=100)
    assert report.warnings == []
    assert " 0 warnings, " in Page(report.path.read_text(encoding="utf-8")).text
    assert sum(check.verdict == "good" for check in report.checks) >= 8


@pytest.mark.slow
def test_a_method_that_stops_automatically_has_no_warning_of_its_run(tmp_path: Path) -> None:
    """Its own weights answer whether it has converged; no number of rounds is too few for that."""
    data = labeled((30, 25, 20))
    done = fit(methods.fedlaplace(logistic, draws=512, target_ess=200), data, rounds=40)
    report = done.report(tmp_path / "r.html", draws=60)
    check = next(c for c in report.checks if c.question == "Has the run converged?")
    assert check.verdict == "good" and "by the weights of 'fedlaplace' itself" in check.answer
    assert not any("converged" in warning for warning in report.warnings)


def test_a_run_that_cannot_be_judged_is_no_warning(tmp_path: Path) -> None:
    point = fit(fedsvi(logistic, guides.delta), labeled(), rounds=3)
    report = point.report(tmp_path / "r.html", draws=60)
    check = next(c for c in report.checks if c.question == "Has the run converged?")
    assert check.verdict == "not asked"
    assert check.answer.startswith("Cannot be judged: the run has 3")


def test_every_warning_is_at_the_top_and_among_the_checks(written: tuple[Report, Page]) -> None:
    """Logistic regression is more certain of far rows, so foreign rows raise a warning."""
    report, page = written
    (warning,) = report.warnings
    assert "about as certain for foreign rows as for own rows" in warning
    assert page.text.count(warning) == 2


def test_the_page_and_the_console_count_checks_alike(written: tuple[Report, Page]) -> None:
    report, page = written
    count, good = len(report.checks), sum(check.verdict == "good" for check in report.checks)
    words = f"{count} checks: 1 warning, {good} good, {count - 1 - good} not checked"
    assert f"{words};" in page.text and f"{words}." in str(report)
    assert len(re.findall("✓ good|⚠ warning|\u2013 not checked", page.text)) == count


def test_the_caption_on_shrinkage_is_counted_from_its_picture(
    written: tuple[Report, Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "picture", lambda figure, alt, caption: (figure, caption))
    measured = Measured(None, None, None, None, {})  # type: ignore[arg-type]
    monkeypatch.setattr(Measured, "fit", fitted("binary")[0])
    for own, together in (
        ([-3.0, -1.0, 2.0, 5.0], [-1.0, -0.5, 2.5, 1.0]),  # three nearer to 0, one farther
        ([4.0, 4.5, 5.0, 5.5], [4.8, 4.8, 4.8, 4.8]),  # all far from the center
    ):
        draws = np.array(together)[None] + np.array([[-0.1], [0.1]])
        entry = SiteEntry("theta", draws, np.zeros((2, 4)), np.array(own))
        figure, caption = cast(Any, pictures.shrinkage(measured, entry))
        drawn.append(caption)
        ax = figure.axes[0]
        center = next(line for line in ax.lines if line.get_label() == "common center")
        x, y = abs(ax.collections[1].get_offsets().data.T - center.get_ydata()[0])
        assert f"of {int((y < x).sum())} of 4 clients are nearer" in caption
        assert (
            f"to it is {number(float(np.median(y)))}, and {number(float(np.median(x)))}" in caption
        )
    assert "of 3 of 4" in drawn[0] and "of 2 of 4" in drawn[1]


# -------------------------------------------------------------------------------------------- words
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: number(-0.000012), "\N{MINUS SIGN}1.20e\N{MINUS SIGN}05"),
        (lambda: number(0.999999), "1.000"),
        (lambda: number(123456.0), "123456"),
        (lambda: number(float("inf")), "infinite"),
        (lambda: number(0.0), "0"),
        (lambda: share(0.0), "0%"),
        (lambda: listed(["a"]), "a"),
        (lambda: listed(["a", "b", "c"], 2), "a, b and 1 more"),
    ],
)
def test_numbers_and_lists_in_words(call: Callable[[], str], text: str) -> None:
    assert call() == text


def test_rows_that_are_vectors_are_reported_by_entry(tmp_path: Path) -> None:
    """Also where client names have dollars, which are no mathematics in the figures."""

    def vectors(batch: Any) -> None:
        spread = pyro.sample("spread", dist.HalfNormal(2.0))
        with batch.clients():
            level = pyro.sample("level", dist.Normal(0.0, spread))
            with batch.data():
                mean = level[..., None].expand(*level.shape, 3)
                pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=batch.y)

    g = torch.Generator().manual_seed(0)
    names = [name for name in ("$\\frac$", "$x^$", "plain") for _ in range(8)]
    data = ClientData.from_arrays(names, y=torch.randn(24, 3, generator=g))
    found = fit(methods.two_stage(vectors, draws=200), data)
    page = found.report(tmp_path / "page.html", held_out=data)
    assert any("(by entry) lie in their 90%" in check.answer for check in page.checks)
    assert "plain" in page.path.read_text()
    prediction, replicates = found.predict(data), found.replicate(data)
    scores = hierfl.diagnostics.client_scores(prediction, replicates=replicates)
    assert bool(scores["coverage"].between(0.5, 1.0).all() and (scores["crps"] > 0.0).all())
    assert len(hierfl.diagnostics.client_scores(prediction)) == 3
