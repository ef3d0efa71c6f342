"""The demo: scores are complete and agree with predictions, files open, errors are clear."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

import hierfl
from hierfl import cli, datasets, fit
from hierfl.demo import patient_scores as demo_report
from hierfl.demo import run as demo

HOSPITALS = ["cleveland", "hungarian", "switzerland", "va"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """Run `hierfl demo --quick` once for all tests; yield its folder and its result."""
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float32)  # as users have it
    out = tmp_path_factory.mktemp("demo") / "made" / "here"
    yield out, run("demo", "--out", str(out), "--quick", "--seed", "3")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(threads)


def test_demo_succeeds_and_lists_the_files_it_wrote(job: tuple[Path, Any]) -> None:
    out, result = job
    assert result.exit_code == 0, result.output
    written = re.findall(r"^Wrote (\S+): ", result.stdout, re.MULTILINE)
    assert [Path(p).name for p in written] == [
        "posterior.nc",
        "scores.csv",
        "coefficients.png",
        "calibration.png",
        "report.html",
    ]
    # a hidden list of what it wrote lets the next run replace these files and no others
    assert sorted(Path(p) for p in written) == sorted(p for p in out.iterdir() if p.name[0] != ".")


def test_scores_cover_every_setting_method_hospital_and_metric(job: tuple[Path, Any]) -> None:
    scores = pd.read_csv(job[0] / "scores.csv")
    assert list(scores.columns) == ["setting", "method", "hospital", "metric", "value", "rows"]
    keys = ["setting", "method", "hospital", "metric"]
    assert not scores.duplicated(keys).any()
    held_out = datasets.heart_disease().split(0.7, seed=3)[1]
    rows = dict(zip(held_out.names, held_out.counts.tolist(), strict=True))
    expected = {
        (setting, method, hospital, metric): sum(
            rows[h] for h in hospitals if hospital in (h, "all")
        )
        for setting, hospitals in {
            "trained": HOSPITALS,
            "unseen": demo.NEW,
            "joined": demo.NEW,
        }.items()
        for method in demo_report.METHODS
        for hospital in (*hospitals, "all")
        for metric in demo_report.METRICS
    }
    scored = scores.set_index(keys)
    assert scored["rows"].to_dict() == expected
    assert np.isfinite(scored["value"]).all()


def test_all_is_the_mean_over_patients(job: tuple[Path, Any]) -> None:
    scores = pd.read_csv(job[0] / "scores.csv")
    for _, group in scores.groupby(["setting", "method", "metric"]):
        each = group[group.hospital != "all"]
        assert np.average(each.value, weights=each.rows) == pytest.approx(
            group.value[group.hospital == "all"].item()
        )


def test_printed_table_agrees_with_the_csv(job: tuple[Path, Any]) -> None:
    scores = (
        pd.read_csv(job[0] / "scores.csv")
        .set_index(["metric", "setting", "hospital", "method"])
        .sort_index()
    )
    lines = job[1].stdout.splitlines()
    places = [
        ("new hospital, no rows", "unseen", "all"),
        ("new hospital, own rows", "joined", "all"),
        ("all patients", "trained", "all"),
    ]
    for label, setting, hospital in [*((h, "trained", h) for h in HOSPITALS), *places]:
        found = [
            re.findall(r"-?\d\.\d{3}(\*?)", line) and line.split(label)[1].split()
            for line in lines
            if line.startswith(f"   {label} ")
        ]
        assert len(found) == 3, label
        for metric, cells in zip(demo_report.METRICS, found, strict=True):
            values = [
                float(scores.loc[(metric, setting, hospital, m), "value"])
                for m in demo_report.METHODS
            ]
            assert [float(c.rstrip("*")) for c in cells] == [round(v, 3) for v in values]
            best = min if metric == "brier" else max
            assert best(float(c.rstrip("*")) for c in cells) in [
                float(c[:-1]) for c in cells if c.endswith("*")
            ]


def test_saved_posterior_opens_with_named_dimensions(job: tuple[Path, Any]) -> None:
    posterior: Any = az.from_netcdf(str(job[0] / "posterior.nc"))["posterior"]  # type: ignore[no-untyped-call]
    assert posterior["slope"].dims == ("chain", "draw", "client", "x")
    assert posterior["client"].values.tolist() == HOSPITALS
    assert posterior["x"].values.tolist() == list(demo.QUICK.columns or ())
    assert {"intercept", "intercept_loc", "intercept_scale", "slope_loc", "slope_scale"} <= set(
        posterior.data_vars
    )
    assert bool(np.isfinite(posterior["slope"]).all())


@pytest.mark.parametrize("name", ["coefficients.png", "calibration.png"])
def test_pictures_are_wide_enough_and_not_blank(job: tuple[Path, Any], name: str) -> None:
    picture = imread(job[0] / name)
    assert picture.shape[1] >= 600
    assert picture[..., :3].std() > 0.05


def test_report_is_written_with_its_warnings(job: tuple[Path, Any]) -> None:
    text = (job[0] / "report.html").read_text(encoding="utf-8")
    assert "Heart disease at four hospitals" in text and "switzerland" in text
    counted = re.search(r"(\d+) of its (\d+) checks gave a warning", job[1].stdout)
    assert counted and f"Warnings ({counted[1]})" in text
    assert "276 held-out rows" in text


# ------------------------------------------------------------------------------------------- scores
def test_scores_of_patients_agree_with_those_of_the_prediction() -> None:
    train, test = datasets.heart_disease().split(0.7, seed=0)
    prediction = fit(
        demo.alone(), train, rounds=1, settings=hierfl.Settings(compile=False)
    ).predict(test, draws=20)
    own = demo_report.summary(demo_report.patients(prediction, "trained", "local-only"))
    wide = own.pivot_table("value", "hospital", "metric").loc[HOSPITALS]
    pd.testing.assert_frame_equal(wide, prediction.scores()[wide.columns], check_names=False)


def test_as_one_keeps_all_rows_as_one_hospital() -> None:
    train, _ = datasets.heart_disease().split(0.7, seed=0)
    one = demo.as_one(train)
    assert (one.num_clients, one.num_rows) == (1, train.num_rows)
    assert torch.equal(one.fields["x"], train.fields["x"])


def test_one_fit_serves_the_hospitals_and_their_pooled_rows() -> None:
    train, test = demo.hospitals(demo.QUICK.columns).split(0.7, seed=0)
    settings = hierfl.Settings(compile=False)
    joint = fit(demo.alone(), demo.with_pools(train), rounds=1, settings=settings)
    assert joint.clients[-1] == "all hospitals but va"
    others = demo.as_one(train.select(["cleveland", "hungarian", "switzerland"]))
    alone = fit(demo.alone(), others, rounds=1, settings=settings)
    new = test.select(["va"])
    apart = [
        fitted.predict(replace(new, names=(fitted.clients[-1],)), draws=2000).mean
        for fitted in (joint, alone)
    ]
    # the names differ, and with them the draws
    torch.testing.assert_close(*apart, rtol=0.0, atol=0.01)


def patients(gaps: dict[str, list[float]]) -> pd.DataFrame:
    """Return patients with log score 0 under the posterior, as given under the others."""
    rows = [
        {"setting": s, "method": m, "hospital": "h", "patient": i, "log_score": v}
        for s in demo_report.SETTINGS
        for m, values in {**gaps, demo_report.POSTERIOR: [0.0] * 4}.items()
        for i, v in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_the_reading_follows_the_numbers() -> None:
    found = patients(
        {
            "local-only": [-1.0, -1.1, -0.9, -1.0],
            "pooled": [0.5, -0.5, 0.4, -0.8],
            "hierarchical MAP": [1.0, 1.1, 0.9, 1.0],
        }
    )
    mean, error = demo_report.difference(found, "trained", "local-only")
    assert mean == pytest.approx(1.0)
    assert error == pytest.approx(np.std([1.0, 1.1, 0.9, 1.0], ddof=1) / 2)
    first, second = demo_report.reading(found)
    words = (
        "better than local-only (+1.000 ± 0.041); on par with pooled (+0.100 ± 0.324); "
        "worse than hierarchical MAP (-1.000"
    )
    assert first.startswith("Four hospitals, 4 held-out patients")
    assert first.endswith(f"the hierarchical posterior is {words} ± 0.041).")
    assert second.count(words) == 2


def test_scores_of_one_patient_are_averaged_over_lending_hospitals() -> None:
    rows = [
        {
            "setting": "unseen",
            "method": "local-only",
            "hospital": "h",
            "patient": 0,
            "log_score": v,
            "accuracy": a,
            "brier": 0.1,
        }
        for v, a in ((-1.0, 1.0), (-2.0, 0.0), (-3.0, 0.0), (-2.0, 1.0))
    ]
    found = demo_report.summary(pd.DataFrame(rows)).set_index(["metric", "hospital"])
    assert found.loc[("log_score", "h"), "value"] == -2.0
    assert found.loc[("accuracy", "all"), "value"] == 0.5
    assert (found["rows"] == 1).all()


# --------------------------------------------------------------------------------- the command line
def test_version_and_help() -> None:
    assert re.fullmatch(r"hierfl \d+\.\d+\.\d+\n", run("--version").stdout)
    assert "demo" in run("--help").stdout


def test_folder_that_cannot_be_written_to_is_an_error_before_any_fit(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("demo", "--out", str(tmp_path / "file" / "demo"))
    assert result.exit_code == 2
    assert "cannot write to" in result.output
    assert "fitting" not in result.output
    with pytest.raises(NotADirectoryError):
        demo.run(tmp_path / "file" / "demo")
