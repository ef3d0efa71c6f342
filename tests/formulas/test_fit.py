"""Fits of formulas: frames in, named dimensions out, and the same fit after it was saved."""

from pathlib import Path

import pandas as pd
import pytest
import torch

import hierfl
from hierfl import guides, methods
from hierfl.program.read import read_model
from hierfl.summaries.reading import read_likelihood
from tests.formulas.frames import SITES, patients
from tests.summaries.programs import years


@pytest.fixture(scope="module")
def fitted() -> tuple[hierfl.Fit, pd.DataFrame]:
    """Return a fit by two_stage."""
    frame = patients(rows=12)
    made = hierfl.formula(
        "ill ~ scale(age) + (1 + scale(age) || site)", "bernoulli", clients="site"
    )
    return hierfl.fit(made, frame, seed=0, progress=False), frame


def test_a_formula_and_frames_are_all_to_write(fitted: tuple[hierfl.Fit, pd.DataFrame]) -> None:
    fit, frame = fitted
    assert fit.chosen is not None and fit.chosen.startswith("two_stage")
    assert fit.clients == tuple(f"s{k}" for k in range(SITES))
    posterior = fit.posterior(50)["posterior"]
    assert posterior["site"].dims == ("chain", "draw", "client", "site_term")
    assert list(posterior["site_term"].values) == ["Intercept", "scale(age)"]
    table = fit.summary(draws=50).frame
    assert set(table[table["site"] == "sd_site"]["entry"]) == {"Intercept", "scale(age)"}
    scores = fit.predict(frame).scores()
    assert list(scores["rows"]) == [12] * SITES


def test_rows_without_a_response_are_predicted(fitted: tuple[hierfl.Fit, pd.DataFrame]) -> None:
    fit, frame = fitted
    known, unknown = (fit.predict(f).mean for f in (frame, frame.drop(columns="ill")))
    assert torch.equal(known, unknown)
    with pytest.raises(ValueError, match="no labels"):
        fit.predict(frame.drop(columns="ill")).scores()


def test_new_clients_are_personalized_from_frames(fitted: tuple[hierfl.Fit, pd.DataFrame]) -> None:
    fit, _ = fitted
    new = patients(rows=30, seed=9).query("site == 's0'").assign(site="new")
    joined = fit.personalize(new)
    assert joined.clients == ("new",)
    assert joined.predict(new).mean.shape == (30,)
    with pytest.raises(KeyError, match="'new' was not fitted"):
        fit.predict(new)


def test_a_saved_fit_knows_its_formula(
    fitted: tuple[hierfl.Fit, pd.DataFrame], tmp_path: Path
) -> None:
    fit, frame = fitted
    fit.save(tmp_path, with_data=True)
    again = hierfl.load(tmp_path)
    assert torch.equal(again.predict(frame).mean, fit.predict(frame).mean)
    model = again.method.model
    assert isinstance(model, hierfl.Formula) and isinstance(fit.method.model, hierfl.Formula)
    assert model.agreed == fit.method.model.agreed
    assert model.program() == fit.method.model.program()


def test_frames_are_handed_in_where_a_fit_was_saved_without_rows(tmp_path: Path) -> None:
    """They also say which ward is which, as the frames of the fit did."""
    frame = patients(rows=12)
    made = hierfl.formula("y ~ age + (1 | site/ward)", clients="site").on(frame)
    fit = hierfl.fit(methods.fedsvi(made, guides.structured), frame, rounds=1, progress=False)
    fit.save(tmp_path)
    again = hierfl.load(tmp_path, data=frame)
    assert torch.equal(again.predict(frame).mean, fit.predict(frame).mean)
    assert again.r2(draws=50).frame.equals(fit.r2(draws=50).frame)
    parts = {str(site): part for site, part in frame.groupby("site")}
    assert hierfl.load(tmp_path, data=parts).r2(draws=50).frame.equals(again.r2(draws=50).frame)
    with pytest.raises(hierfl.CheckpointError, match="rows"):
        hierfl.load(tmp_path, data=frame.assign(age=frame["age"] + 1.0))
    with pytest.raises(TypeError, match="frames is a list"):
        hierfl.load(tmp_path, data=[frame])


def test_effects_of_codes_are_read_where_a_client_s_first_rows_have_one_code() -> None:
    """Sorted rows have one year first; its effect would look like the client's intercept, and be absorbed by it."""
    frame = patients().sort_values(["site", "year"]).assign(year=lambda f: f["year"] - 2020)
    data = hierfl.ClientData.from_frame(frame, "site", y="y", year="year")
    reading = read_likelihood(read_model(years, data).program)
    names = [s.name for s in reading.program.latents.global_block.sites for _ in range(s.size)]
    assert [names[j] for j in reading.shared.tolist()] == ["effect"] * 4
    assert reading.effects is None


def test_groups_within_clients_keep_their_numbers_in_other_rows() -> None:
    frame = patients(rows=12)
    made = hierfl.formula("y ~ age + (1 | site/ward)", clients="site")
    method = methods.fedsvi(made.on(frame, min_count=1), guides.structured)
    ready = method.model
    assert isinstance(ready, hierfl.Formula)
    whole = ready.data(frame).fields["g_site_ward"]
    kept = torch.tensor((frame["ward"] != "w0").to_list())
    few = frame[frame["ward"] != "w0"]
    assert torch.equal(ready.data(few).fields["g_site_ward"], whole[kept])
    fit = hierfl.fit(method, ready.data(frame), rounds=2, progress=False)
    torch.testing.assert_close(fit.predict(few).mean, fit.predict(frame).mean[kept])
    with pytest.raises(ValueError, match="'w9' of 'site:ward' in row 1"):
        fit.predict(frame.assign(ward=frame["ward"].where(frame["ward"] != "w1", "w9")))


def test_numbers_of_groups_that_are_lost_are_not_guessed(tmp_path: Path) -> None:
    frame = patients(rows=12)
    made = hierfl.formula("y ~ age + (1 | site/ward)", clients="site").on(frame, min_count=1)
    fit = hierfl.fit(methods.fedsvi(made, guides.structured), made.data(frame), rounds=1)
    fit.save(tmp_path, with_data=True)
    assert "w1" not in "".join(p.read_text() for p in tmp_path.rglob("*.json"))
    again = hierfl.load(tmp_path)
    with pytest.raises(ValueError, match="does not know the groups 'site:ward' of client 's0'"):
        again.predict(frame)
    model = again.method.model
    assert isinstance(model, hierfl.Formula)
    model.data(frame)
    assert torch.equal(again.predict(frame).mean, fit.predict(frame).mean)


@pytest.mark.slow
def test_a_column_in_any_unit_may_vary_by_client_under_a_log_link() -> None:
    """Years near 50 in a slope of counts: the fit is that of centuries, and by the same method."""
    torch.set_default_dtype(torch.float32)  # in which exp(100) is infinite
    formula = hierfl.formula("visits ~ age + (1 + age || site)", "poisson", clients="site")
    slopes = []
    for unit in (1.0, 100.0):
        frame = patients(rows=12)
        frame["age"] /= unit
        fit = hierfl.fit(formula, frame, seed=0, progress=False)
        assert fit.chosen is not None and fit.chosen.startswith("two_stage")
        drawn = fit.draws(2000).own["site"][..., 1] / unit
        slopes.append((drawn.mean(0), drawn.std(0)))
    (mean, spread), (wanted, sds) = slopes
    assert float(((mean - wanted) / sds).abs().max()) < 0.15
    assert float((spread / sds - 1.0).abs().max()) < 0.1
