"""Tables of patients from the folder HIERFL_DATA; import them from `hierfl.datasets`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from hierfl.data.clients import ClientData
from hierfl.datasets.files import Source, columns, read_from

_TRAUMA = Source(
    "trauma.csv",
    "the trauma patients of the R package BFI 3.1.0 (MIT; Draaisma et al. 1989, Jonker et al. "
    "2024)",
    {
        "hospital": "1..3",
        "sex": "1 female, 0 male",
        "age": "years",
        "ISS": "injury severity score",
        "GCS": "Glasgow coma scale",
        "mortality": "1 died, 0 survived",
    },
)
_LUNG = Source(
    "lung.csv",
    "NCCTG lung cancer (Loprinzi 1994), as in the Python package lifelines (MIT)",
    {
        "inst": "number of the institution",
        "time": "days",
        "status": "1 died, 0 censored",
        "age": "years",
        "sex": "1 male, 2 female",
        "ph.ecog": "performance score by the physician, 0..4",
        "ph.karno": "Karnofsky score by the physician",
        "pat.karno": "Karnofsky score by the patient",
        "meal.cal": "calories at meals",
        "wt.loss": "pounds lost in six months",
    },
)
DAYS = 365.0  # that a patient of `lung_cancer` survives, or not


@read_from(_TRAUMA)
def trauma() -> ClientData:
    """Survival of 371 trauma patients at three hospitals, "hospital 1" to "hospital 3".

    Fields: `x` (n, 4) = sex (1: female), age in years, injury severity score, Glasgow coma scale;
    `y` (n,), 1.0 for a patient who died.

    Raises:
        FileNotFoundError: the file is missing; the message says how to get it. So does
            `lung_cancer`.
        ValueError: the file is damaged, or another one. So does `lung_cancer`.
    """
    frame = columns(_TRAUMA)
    return _patients(frame, "hospital", ["sex", "age", "ISS", "GCS"], frame["mortality"])


@read_from(_LUNG)
def lung_cancer() -> ClientData:
    """One-year survival of 184 patients with advanced lung cancer at 17 institutions.

    Left out: 42 patients who were censored within the year, one without an institution, and one who
    is the only one of hers. With their times, censored ones included, the table is a survival
    model: see `examples/recipes/frailty.py`.

    Fields: `x` (n, 7) = age in years, sex (1 male, 2 female), ECOG and Karnofsky scores by the
    physician, Karnofsky score by the patient, calories at meals, pounds lost in six months, with
    NaN where a value is missing (see `hierfl.data.preprocess.fill_missing`); `y` (n,), 1.0 for a
    patient who died within 365 days.
    """
    frame = columns(_LUNG).dropna(subset=["inst"])
    died = (frame["status"] == 1.0) & (frame["time"] < DAYS)
    frame = frame.assign(died=died.astype("float64"))[died | (frame["time"] >= DAYS)]
    frame = frame[frame.groupby("inst")["inst"].transform("size") > 1]
    x = ["age", "sex", "ph.ecog", "ph.karno", "pat.karno", "meal.cal", "wt.loss"]
    return _patients(frame.rename(columns={"inst": "institution"}), "institution", x, frame["died"])


def _patients(frame: pd.DataFrame, where: str, x: list[str], y: pd.Series) -> ClientData:
    """Return the rows of a table, by the number of the hospital."""
    numbers, ids = np.unique(frame[where].to_numpy().astype(np.int64), return_inverse=True)
    return ClientData.from_arrays(
        ids,
        names=[f"{where} {number}" for number in numbers],
        features={"x": x},
        x=frame[x].to_numpy(),
        y=y.to_numpy(),
    )
