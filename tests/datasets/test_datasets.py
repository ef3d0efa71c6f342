"""The data sets agree with their sources; a missing file's error says how to get it."""

import io
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from hierfl import ClientData, datasets
from hierfl.datasets import images, tables
from hierfl.datasets.files import DataFile, load

ROOT = Path(__file__).parents[2]
needs_files = pytest.mark.skipif(
    not os.environ.get("HIERFL_DATA"), reason="HIERFL_DATA is not set: no data set files to read"
)


# ------------------------------------------------------------------------------------------ shipped
def test_heart_disease_keeps_every_patient_in_fixed_units() -> None:
    data, raw = datasets.heart_disease(), datasets.heart_disease("raw")
    assert data.names == ("cleveland", "hungarian", "switzerland", "va")
    assert data.counts.tolist() == [303, 294, 123, 200]
    assert data.fields["x"].isfinite().all()
    assert set(data.fields["y"].tolist()) == {0.0, 1.0}
    assert float(data.select(["switzerland"]).fields["y"].mean()) > 0.9
    # The units are fixed, so that a hospital's values do not depend on the others; each column is of order 1.
    assert float(data.fields["x"].abs().max()) < 8.0
    age = raw.features["x"].index("age")
    assert data.features["x"][0] == "age"
    torch.testing.assert_close(data.fields["x"][:, 0], (raw.fields["x"][:, age] - 50.0) / 10.0)


def test_heart_disease_indicates_missing_values() -> None:
    data, nan = datasets.heart_disease(), datasets.heart_disease("nan")
    columns = {name: data.fields["x"][:, j] for j, name in enumerate(data.features["x"])}
    flags = {name for name in columns if name.endswith("_missing")}
    absent = nan.fields["x"].isnan()
    assert flags == {
        f"{name}_missing" for j, name in enumerate(nan.features["x"]) if absent[:, j].any()
    }
    for j, name in enumerate(nan.features["x"]):
        if f"{name}_missing" in flags:
            assert torch.equal(columns[f"{name}_missing"], absent[:, j].double())
        for derived in (
            c for c in columns if c == name or (c.startswith(f"{name}_") and c not in flags)
        ):
            assert (columns[derived][absent[:, j]] == 0.0).all(), derived
    assert nan.fields["x"].shape == (920, 13)


def test_zero_cholesterol_counts_as_missing() -> None:
    raw, nan = datasets.heart_disease("raw"), datasets.heart_disease("nan")
    impossible = (raw.fields["x"] == 0.0) & nan.fields["x"].isnan()
    counts = dict(zip(raw.features["x"], impossible.sum(0).tolist(), strict=True))
    assert {name: n for name, n in counts.items() if n} == {"trestbps": 1, "chol": 172}
    j = data_column(datasets.heart_disease(), "chol_missing")
    assert float(datasets.heart_disease().select(["switzerland"]).fields["x"][:, j].mean()) == 1.0


def data_column(data: ClientData, name: str) -> int:
    return data.features["x"].index(name)


def test_nominal_codes_become_columns_of_their_own() -> None:
    data, nan = datasets.heart_disease(), datasets.heart_disease("nan")
    for name, levels in (("cp", 3), ("restecg", 2), ("thal", 2)):
        members = [
            c for c in data.features["x"] if c.startswith(f"{name}_") and not c.endswith("_missing")
        ]
        assert len(members) == levels
        one_hot = data.fields["x"][:, [data_column(data, c) for c in members]]
        assert one_hot.sum(1).max() == 1.0
        codes = nan.fields["x"][:, data_column(nan, name)]
        kept = ~codes.isnan()
        hot = map(tuple, one_hot[kept].tolist())
        assert len(set(zip(codes[kept].tolist(), hot, strict=True))) == levels + 1


def test_heart_disease_raises_for_an_unknown_treatment() -> None:
    with pytest.raises(ValueError, match="missing is 'drop': it must be one of 'indicator',"):
        datasets.heart_disease("drop")  # type: ignore[arg-type]


def test_radon_is_85_counties() -> None:
    data = datasets.radon()
    assert (data.num_clients, data.num_rows) == (85, 919)
    assert data.names[0] == "AITKIN"
    x, county = data.fields["x"], data.row_client
    for j, name in ((0, "log_uranium"), (2, "floor_mean")):
        torch.testing.assert_close(x[:, j], data.client_fields[name][county])
    assert torch.equal(x[:, 1], data.fields["floor"])
    for k in (0, 17, 84):
        assert float(data.client_fields["floor_mean"][k]) == pytest.approx(
            float(data.fields["floor"][county == k].mean())
        )


@pytest.mark.parametrize("name", ["radon", "radon_uniform"])
def test_the_radon_reference_fits_the_radon_data(name: str) -> None:
    """Given tau and sigma the rest is Gaussian; integrate both on a grid."""
    data, known = datasets.radon(), datasets.reference(name)
    tau, sigma = torch.cartesian_prod(
        torch.linspace(0.002, 0.45, 60), torch.linspace(0.68, 0.85, 12)
    ).T
    a = torch.nn.functional.one_hot(data.row_client, 85).double()
    # The columns of mu, of the slopes and of a_j - mu.
    design = torch.cat([torch.ones(919, 1), data.fields["x"], a], 1)
    prior = torch.cat([torch.ones(len(tau), 4), tau[:, None].expand(-1, 85) ** -2], 1)
    noise = sigma**-2
    cov = torch.linalg.inv(prior.diag_embed() + noise[:, None, None] * (design.T @ design))
    pull = noise[:, None] * (design.T @ data.fields["y"])
    mean = (cov @ pull[..., None])[..., 0]
    log_weight = 0.5 * (
        cov.logdet()
        + prior.log().sum(1)
        + (pull * mean).sum(1)
        - noise * (data.fields["y"] ** 2).sum()
    )
    log_weight = (
        log_weight - 919 * sigma.log() - (0.5 * (tau**2 + sigma**2) if name == "radon" else 0.0)
    )
    weight = torch.softmax(log_weight, 0)
    mix = torch.eye(89)
    mix[4:, 0] = 1.0  # a_j = mu + (a_j - mu)
    means, variances = mean @ mix.T, (mix @ cov @ mix.T).diagonal(dim1=1, dim2=2)
    found = {
        "mu": means[:, 0],
        "slope": means[:, 1:4],
        "a": means[:, 4:],
        "tau": tau,
        "sigma": sigma,
    }
    within = {"mu": variances[:, 0], "slope": variances[:, 1:4], "a": variances[:, 4:]}
    for site, values in found.items():
        exact = torch.tensordot(weight, values, 1)
        spread = torch.tensordot(
            weight, (values - exact) ** 2 + within.get(site, torch.zeros(())), 1
        )
        mcse = known[site].mcse
        assert mcse is not None
        assert known[site].mean.shape == exact.shape
        np.testing.assert_array_less(
            np.abs(exact.numpy() - known[site].mean), 4.5 * mcse + 0.01 * known[site].sd
        )
        np.testing.assert_allclose(spread.sqrt(), known[site].sd, rtol=0.04)


def test_the_schools_reference_fits_the_schools() -> None:
    """The posterior is integrated on a grid over (mu, log tau), under the documented priors."""
    data, known = datasets.eight_schools(), datasets.reference("eight_schools")
    assert data.names == tuple(f"school {letter}" for letter in "ABCDEFGH")
    mu, log_tau = torch.linspace(-40, 60, 401)[:, None], torch.linspace(-4, 8, 401)
    tau2, y, s2 = (2 * log_tau).exp(), data.fields["y"], data.fields["sigma"] ** 2
    log_weight = -0.5 * (mu / 10) ** 2 - 0.5 * (log_tau - 5) ** 2
    for k in range(8):
        log_weight = (
            log_weight - 0.5 * (s2[k] + tau2).log() - 0.5 * (y[k] - mu) ** 2 / (s2[k] + tau2)
        )
    weight = (log_weight - log_weight.max()).exp()
    weight = weight / weight.sum()
    theta = torch.stack(
        [((mu / tau2 + y[k] / s2[k]) / (1 / tau2 + 1 / s2[k]) * weight).sum() for k in range(8)]
    )
    means = {"mu": (mu * weight).sum(), "log_tau": (log_tau * weight).sum(), "theta": theta}
    for site, mean in means.items():
        assert known[site].mcse is not None
        np.testing.assert_array_less(
            np.abs(mean.numpy() - known[site].mean), 4.5 * np.asarray(known[site].mcse)
        )


def test_an_unknown_reference_raises() -> None:
    with pytest.raises(KeyError, match="no reference posterior 'rats': the names are radon, "):
        datasets.reference("rats")


def test_the_five_hospitals_are_those_that_the_example_simulates() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "simulate_hospitals.py"))
    rows = pd.read_csv(io.StringIO(example["simulated"]().to_csv(index=False)))
    pd.testing.assert_frame_equal(rows, datasets.five_hospitals())
    assert rows["sex"].str.endswith(" ").sum() == 12 and rows["lactate"].isna().sum() == 40
    assert rows.groupby("hospital").size().min() == 3


# --------------------------------------------------------------------------------------- from files
SHIPPED = ("heart_disease", "radon", "eight_schools")
READERS: dict[str, Callable[[], Any]] = {
    name: getattr(datasets, name)
    for name in datasets.__all__
    if name not in ("Labeled", "ReferenceSummary", "reference", "five_hospitals", *SHIPPED)
}


@pytest.mark.parametrize("name", READERS)
def test_a_missing_file_is_said_with_the_fix(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HIERFL_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError,
        match=r"HIERFL_DATA is not set: get .+, save it as '.+\.(npz' \(a NumPy archive|csv' \(a CSV file) with \w+: ",
    ):
        READERS[name]()
    monkeypatch.setenv("HIERFL_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"'.+\.(npz|csv)' is not in the folder named by"):
        READERS[name]()


@pytest.mark.slow("emnist_byclass_test-rows3-62")
@needs_files
@pytest.mark.parametrize(
    ("name", "rows", "classes"),
    [
        ("mnist", (60_000, 10_000), 10),
        ("fashion_mnist", (60_000, 10_000), 10),
        ("notmnist", (10_000,), 10),
        ("emnist_byclass_test", (116_323,), 62),
    ],
)
def test_images_are_from_0_to_1(name: str, rows: tuple[int, ...], classes: int) -> None:
    found = READERS[name]()
    parts = found if isinstance(found, tuple) else (found,)
    assert tuple(len(part) for part in parts) == rows
    for part in parts:
        assert part.x.shape == (len(part), 1, 28, 28)
        assert part.x.dtype == torch.float32
        assert part.y.dtype == torch.int64
        assert (float(part.x.min()), float(part.x.max())) == (0.0, 1.0)
        assert part.y.unique().tolist() == list(range(classes))
        assert len(set(part.classes)) == classes


@needs_files
def test_cifar10_is_decoded_in_color_and_shuffled() -> None:
    """Of its test part: decoding the other takes five times as long."""
    names = ("header0", "body_test", "len_test", "y_test")
    test = images._decoded(load(images._CIFAR10, names), "test", tuple("0123456789"))
    assert test.x.shape == (10_000, 3, 32, 32)
    assert torch.bincount(test.y).tolist() == [1000] * 10
    assert len(test.y[:100].unique()) == 10
    means = [test.x[test.y == c].mean((0, 2, 3)) for c in (0, 6)]
    assert means[0][2] > means[0][0], "the sky behind aeroplanes is blue"
    assert means[1][1] > means[1][2], "frogs are greener than they are blue"


@needs_files
def test_femnist_has_the_same_writers_in_train_and_test_and_others_in_extra() -> None:
    train, test, extra = datasets.femnist()
    assert train.names == test.names
    assert (train.num_clients, extra.num_clients) == (105, 79)
    assert not set(train.names) & set(extra.names)
    assert (train.num_rows, test.num_rows, extra.num_rows) == (14_708, 1_685, 2_403)
    assert float(train.fields["x"].max()) == 1.0
    assert int(train.fields["y"].max()) <= 61


@needs_files
@pytest.mark.parametrize(
    ("name", "clients", "rows", "first"),
    [
        ("school_ilea", 139, 15_362, "school 1"),
        ("wisdm", 36, 5418, "user 1"),
        ("rats", 30, 150, "rat 1"),
        ("election88", 49, 11_566, "AL"),
        ("office_caltech10", 4, 2533, "amazon"),
        ("trauma", 3, 371, "hospital 1"),
        ("lung_cancer", 17, 184, "institution 1"),
    ],
)
def test_tables_have_the_published_sizes(name: str, clients: int, rows: int, first: str) -> None:
    data = READERS[name]()
    assert (data.num_clients, data.num_rows, data.names[0]) == (clients, rows, first)
    assert set(data.fields) >= {"x", "y"}
    assert name in ("wisdm", "lung_cancer") or all(v.isfinite().all() for v in data.fields.values())


@needs_files
def test_labels_and_codes_start_at_zero() -> None:
    assert datasets.office_caltech10().fields["y"].unique().tolist() == list(range(10))
    assert datasets.wisdm().fields["y"].unique().tolist() == list(range(6))
    polls = datasets.election88()
    assert torch.equal(polls.fields["age_edu"], 4 * polls.fields["age"] + polls.fields["edu"])
    assert polls.client_fields["region"][polls.names.index("DC")] == 4
    shares = dict(zip(polls.names, polls.client_fields["v_prev"].tolist(), strict=True))
    assert min(shares, key=lambda s: shares[s]) == "DC"
    assert max(shares, key=lambda s: shares[s]) == "UT"
    rat = datasets.rats().select(["rat 9"])
    assert rat.fields["y"].tolist() == [177.0, 236.0, 285.0, 350.0, 376.0]


@needs_files
def test_patients_are_labeled_by_death() -> None:
    lung = datasets.lung_cancer()
    assert set(lung.fields["y"].tolist()) == {0.0, 1.0} and int(lung.fields["y"].sum()) == 119
    x = dict(zip(lung.features["x"], lung.fields["x"].T, strict=True))
    assert int(x["meal.cal"].isnan().sum()) == 35 and not bool(x["age"].isnan().any())
    assert datasets.trauma().select(["hospital 1"]).num_rows == 49
    assert int(datasets.trauma().fields["y"].sum()) == 110


def test_a_damaged_table_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIERFL_DATA", str(tmp_path))
    head, row = "sex,age,hospital,ISS,GCS", "1,20,3,24,15"
    (tmp_path / "trauma.csv").write_text(f"{head}\n{row}\n")
    with pytest.raises(ValueError, match=r"trauma.csv' is not the file .*no column 'mortality'"):
        datasets.trauma()
    (tmp_path / "trauma.csv").write_text(f"{head},mortality\n{row},yes\n")
    with pytest.raises(ValueError, match=r"trauma.csv' is not the file .*'yes'"):
        datasets.trauma()


@needs_files
def test_references_from_files() -> None:
    hospitals = datasets.reference("hospitals")
    assert {site: summary.mean.shape for site, summary in hospitals.items()} == {
        "mu": (9,),
        "log_tau": (9,),
        "w": (4, 9),
    }
    demo = datasets.reference("demo_hierarchy")
    assert {site: summary.sd.shape for site, summary in demo.items()} == {
        "alpha": (),
        "beta": (27,),
        "s": (),
        "t": (27,),
        "intercept": (4,),
        "slope": (4, 27),
    }
    assert all((summary.sd > 0.0).all() for summary in demo.values())
    schools = datasets.reference("eight_schools_half_cauchy")
    # Published: mu 4.4 (3.3), tau 3.6 (3.2).
    assert float(schools["mu"].mean) == pytest.approx(4.4, abs=0.1)
    assert float(schools["tau"].mean) == pytest.approx(3.6, abs=0.15)
    assert schools["theta"].mean.shape == (8,)


def test_the_docs_say_what_every_file_holds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    sources = [v for m in (images, tables) for v in vars(m).values() if isinstance(v, DataFile)]
    assert len(sources) == 13
    for source in sources:
        arrays = "; ".join(f"`{name}` {what}" for name, what in source.arrays.items())
        assert f"| `{source.file}` | {source.origin} | {arrays} |" in page
