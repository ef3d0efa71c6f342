"""The data sets that ship with the package: heart disease, radon and eight schools."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.core.arguments import expect
from hierfl.data.clients import ClientData
from hierfl.datasets.files import shipped

# Fixed clinical units, (value - center) / unit: no hospital has to share its statistics.
_UNITS = {
    "age": (50.0, 10.0),
    "trestbps": (130.0, 20.0),
    "chol": (240.0, 50.0),
    "thalach": (140.0, 25.0),
    "slope": (2.0, 1.0),
}
# One column per nominal code but the most common (asymptomatic, normal, normal).
_CODES = {
    "cp": {1: "cp_typical", 2: "cp_atypical", 3: "cp_nonanginal"},
    "restecg": {1: "restecg_st_t", 2: "restecg_lvh"},
    "thal": {6: "thal_fixed", 7: "thal_reversible"},
}
# No living patient has a blood pressure or a cholesterol of 0: these were not measured.
_IMPOSSIBLE_ZERO = ("trestbps", "chol")


def five_hospitals() -> pd.DataFrame:
    """Simulated patients of five hospitals, with the faults of real tables: what the tutorial analyzes.

    613 rows of `hospital` (north, south, east, west, and island with 3 rows), `patient`, `age`,
    `sex`, `ward`, `lactate` in mmol/L, `admitted`, `arm` (early or usual mobilization) and
    `readmitted` within 30 days, 0/1. Twelve cells of sex end in a blank, 40 of lactate are missing
    and one is in mg/dL, and two patients have a ward of their own. `examples/simulate_hospitals.py`
    has the seed and the true coefficients.
    """
    return pd.read_csv(Path(__file__).with_name("shipped") / "five_hospitals.csv")


def heart_disease(missing: Literal["indicator", "nan", "raw"] = "indicator") -> ClientData:
    """UCI heart disease: 920 patients of 4 hospitals, with or without a narrowed coronary artery.

    The hospitals cleveland, hungarian, switzerland and va are the clients. Fields: `x` (n, F), the
    features, and `y` (n,), 1.0 for patients with the disease.

    With `missing="indicator"` no patient and no feature is dropped, and `x` (F = 27) is finite. Its
    columns are

    * age in decades from 50; trestbps in 20 mm Hg from 130; chol in 50 mg/dl from 240; thalach in 25 beats a
      minute from 140; oldpeak in mm; ca in vessels (0-3);
    * slope, -1 rising, 0 flat, 1 falling; sex (1 = male), fbs and exang, each 0/1;
    * 0/1 columns for the nominal cp (reference: asymptomatic), restecg and thal (reference: normal);
    * a 0/1 column `<feature>_missing` for each of the ten features that is ever missing.

    A missing value is 0 in these units. Zeros of trestbps (1 patient) and chol (172 patients: all
    of switzerland, a quarter of va) in the source are not measurements and count as missing.

    Args:
        missing: "indicator": as above. "nan": the 13 features in the source's units and codes, with
            NaN where missing. "raw": the same as "nan", but with those zeros left in, as in the
            source.

    Raises:
        ValueError: `missing` is neither 'indicator', 'nan' nor 'raw'.

    Reference: Detrano et al. 1989, American Journal of Cardiology 64; license CC BY 4.0.

    >>> heart_disease().counts.tolist()
    [303, 294, 123, 200]
    """
    expect(missing=(missing, ("indicator", "nan", "raw")))
    arrays = shipped("heart_disease.npz")
    names = [str(name) for name in arrays["features"]]
    columns = {name: arrays["x"][:, j].astype(np.float64) for j, name in enumerate(names)}
    if missing != "raw":
        for name in _IMPOSSIBLE_ZERO:
            columns[name][columns[name] == 0.0] = np.nan
    if missing == "indicator":
        columns = _clinical(columns)
    return ClientData.from_arrays(
        arrays["client_id"],
        names=arrays["sites"].tolist(),
        features={"x": list(columns)},
        x=np.stack(list(columns.values()), axis=1),
        y=arrays["y"].astype(np.float64),
    )


def _clinical(columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return columns in clinical units and 0/1 codes, 0 for missing values, then the indicators."""
    coded: dict[str, NDArray[Any]] = {}
    for name, values in columns.items():
        if name in _CODES:
            coded |= {
                label: (values == code).astype(np.float64) for code, label in _CODES[name].items()
            }
        else:
            center, unit = _UNITS.get(name, (0.0, 1.0))
            coded[name] = np.nan_to_num((values - center) / unit, nan=0.0)
    absent = {
        f"{name}_missing": np.isnan(values).astype(np.float64) for name, values in columns.items()
    }
    return coded | {name: values for name, values in absent.items() if values.any()}


def radon() -> ClientData:
    """Radon in 919 homes in the 85 counties of Minnesota; each county is a client.

    Fields: `x` (n, 3), with the columns log_uranium (of the county), floor (0 basement, 1 ground
    floor) and floor_mean (over the county's homes), in the order of the slope in
    `reference("radon")`; `y` (n,), log radon in pCi/L; `floor` (n,). Client fields: `log_uranium`
    and `floor_mean`, each (85,), which are the same for all homes of a county.

    Reference: Gelman and Hill 2007, chapter 12, by way of posteriordb (BSD-3).

    >>> radon()
    ClientData(85 clients, 919 rows, x: (3,), y: (), floor: (), log_uranium: (), floor_mean: ())
    """
    arrays = shipped("radon_gym_minnesota.npz")
    county, uranium = arrays["county"], arrays["log_uranium"]
    floor, homes = arrays["floor"].astype(np.float64), np.bincount(county)
    own = {
        "log_uranium": np.bincount(county, uranium) / homes,
        "floor_mean": np.bincount(county, floor) / homes,
    }
    return ClientData.from_arrays(
        county,
        names=arrays["county_names"].tolist(),
        client_fields=own,
        features={"x": ["log_uranium", "floor", "floor_mean"]},
        x=np.stack([uranium, floor, own["floor_mean"][county]], axis=1),
        y=arrays["log_radon"],
        floor=floor,
    )


def eight_schools() -> ClientData:
    """Coaching for the SAT in eight schools, "school A" to "school H", with one row each.

    Fields: `y` (8,), the estimated effect in points; `sigma` (8,), its standard error, taken as
    known.

    Reference: Rubin 1981, Journal of Educational Statistics 6, by way of posteriordb (BSD-3).

    >>> eight_schools().fields["y"].tolist()
    [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]
    """
    arrays = shipped("eight_schools.npz")
    effects, errors = arrays["y"].astype(np.float64), arrays["sigma"].astype(np.float64)
    names = [f"school {letter}" for letter in "ABCDEFGH"]
    return ClientData.from_arrays(np.arange(len(effects)), names=names, y=effects, sigma=errors)
