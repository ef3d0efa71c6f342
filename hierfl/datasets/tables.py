"""Tables with clients from the folder HIERFL_DATA; import them from `hierfl.datasets`."""

import numpy as np
import pandas as pd

from hierfl.data.clients import ClientData
from hierfl.datasets.files import DataFile, columns, load, read_from

_SCHOOLS = DataFile(
    "school_ilea.npz",
    "the Inner London Education Authority's School data, as in MALSAR",
    {"x": "(15362, 28)", "y": "(15362,)", "client_id": "(15362,), 0..138"},
)
_WISDM = DataFile(
    "wisdm_har.npz",
    "WISDM activity recognition v1.1, transformed (Kwapisz, Weiss and Moore 2010)",
    {
        "x": "(5418, 42)",
        "y": "(5418,), 0..5",
        "client_id": "(5418,), 0..35",
        "classes": "(6,)",
        "features": "(42,)",
        "users": "(36,)",
    },
)
_RATS = DataFile(
    "rats_data.npz",
    "the rats data of Gelfand et al. 1990, as in posteriordb (BSD-3)",
    {"rat": "(150,), 1..30", "x": "(150,), days", "y": "(150,), grams"},
)
_ELECTION = DataFile(
    "election88.npz",
    "the 1988 election polls of Gelman and Hill, as in posteriordb (election88_full, BSD-3)",
    {
        "state": "(n,), 1..51",
        "y": "(n,), 0/1",
        "female": "(n,), 0/1",
        "black": "(n,), 0/1",
        "age": "(n,), 1..4",
        "edu": "(n,), 1..4",
        "age_edu": "(n,), 1..16",
        "region_full": "(n,), 1..5",
        "v_prev_full": "(n,)",
    },
)
_OFFICE = DataFile(
    "office_caltech10_surf.npz",
    "Office-Caltech10, SURF features (Gong et al. 2012)",
    {"x": "(2533, 800)", "y": "(2533,), 1..10", "client_id": "(2533,), 0..3", "domains": "(4,)"},
)

# the 50 states and the District of Columbia in alphabetical order, as numbered in the polls
_STATES = (
    "AL AK AZ AR CA CO CT DE DC FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH "
    "NJ NM NY NC ND OH OK OR PA RI SC SD TN TX UT VT VA WA WV WI WY"
).split()


@read_from(_SCHOOLS)
def school_ilea() -> ClientData:
    """Exam scores of 15,362 pupils at 139 London schools, "school 1" to "school 139".

    Fields: `x` (n, 28): 25 of the columns are 0/1, columns 3 and 4 are per cent, the last is an
    intercept; `y` (n,), the score, 1-70.

    Raises:
        FileNotFoundError: the file is missing; the message says how to get it. Every data set of
            this module raises this error.
        ValueError: the file is damaged, or another one. So does every data set of this module.
    """
    arrays = load(_SCHOOLS)
    names = [f"school {k}" for k in range(1, int(arrays["client_id"].max()) + 2)]
    return ClientData.from_arrays(arrays["client_id"], names=names, x=arrays["x"], y=arrays["y"])


@read_from(_WISDM)
def wisdm() -> ClientData:
    """Activities of 36 people by their phones' accelerometers: "user 1" to "user 36".

    Fields: `x` (n, 42), with NaN in the columns XPEAK, YPEAK and ZPEAK where no peak was found (see
    `hierfl.data.preprocess.fill_missing`); `y` (n,) int64: Downstairs, Jogging, Sitting, Standing,
    Upstairs, Walking.
    """
    arrays = load(_WISDM)
    names = [f"user {k}" for k in arrays["users"].tolist()]
    features = {"x": arrays["features"].tolist()}
    return ClientData.from_arrays(
        arrays["client_id"], names=names, features=features, x=arrays["x"], y=arrays["y"]
    )


@read_from(_RATS)
def rats() -> ClientData:
    """Thirty young rats weighed five times each, "rat 1" to "rat 30".

    Fields: `x` (n, 1), age in days (8, 15, 22, 29, 36; the classic model subtracts their mean, 22);
    `y` (n,), weight in grams.
    """
    arrays = load(_RATS)
    names = [f"rat {k}" for k in range(1, 31)]
    x, y = arrays["x"][:, None].astype(np.float64), arrays["y"].astype(np.float64)
    return ClientData.from_arrays(arrays["rat"] - 1, names=names, features={"x": ["age"]}, x=x, y=y)


@read_from(_ELECTION)
def election88() -> ClientData:
    """CBS polls of 1988: 11,566 voters in 48 states and the District of Columbia, by postal code.

    AK and HI were not polled. Fields: `x` (n, 2) = female, black, each 0/1; `age`, `edu` (n,)
    int64, 0..3; `age_edu` = 4 age + edu; `y` (n,), 1.0 for Bush. Client fields: `region` (49,)
    int64: Northeast, Midwest, South, West, DC; `v_prev` (49,), the Republican share of earlier
    votes.
    """
    arrays = load(_ELECTION)
    states, first = np.unique(arrays["state"], return_index=True)
    own = {"region": arrays["region_full"][first] - 1, "v_prev": arrays["v_prev_full"][first]}
    return ClientData.from_arrays(
        np.searchsorted(states, arrays["state"]),
        names=[_STATES[s - 1] for s in states],
        client_fields=own,
        features={"x": ["female", "black"]},
        x=np.stack([arrays["female"], arrays["black"]], axis=1).astype(np.float64),
        y=arrays["y"].astype(np.float64),
        **{name: arrays[name] - 1 for name in ("age", "edu", "age_edu")},
    )


@read_from(_OFFICE)
def office_caltech10() -> ClientData:
    """Objects of 10 classes in 4 image domains (amazon, caltech10, dslr, webcam), the clients.

    Fields: `x` (n, 800), counts of SURF words in an image, as floats; `y` (n,) int64, 0..9.
    """
    arrays = load(_OFFICE)
    ids, names, x = arrays["client_id"], arrays["domains"].tolist(), arrays["x"]
    y = arrays["y"].astype(np.int64) - 1
    return ClientData.from_arrays(ids, names=names, x=x.astype(np.float32), y=y)


_TRAUMA = DataFile(
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
_LUNG = DataFile(
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
    numbers, ids = np.unique(frame[where].to_numpy().astype(np.int64), return_inverse=True)
    return ClientData.from_arrays(
        ids,
        names=[f"{where} {number}" for number in numbers],
        features={"x": x},
        x=frame[x].to_numpy(),
        y=y.to_numpy(),
    )
