"""Mixed models on real data, as formulas: the problems of `benchmarks.formulas`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

import hierfl
from benchmarks.rounds_models import PUPILS


@dataclass(frozen=True)
class Problem:
    """A formula on real rows.

    Args:
        formula: the text.
        family: of the response.
        clients: the column that names the clients.
        frame: reads the rows.
        levels: groups that are agreed beforehand.
    """

    formula: str
    family: str
    clients: str
    frame: Callable[[], pd.DataFrame]
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def model(self, frame: pd.DataFrame) -> hierfl.Formula:
        """Return the formula and its schema; rows that miss a value are left out."""
        made = hierfl.formula(self.formula, self.family, clients=self.clients, missing="drop")
        return made.on(frame, levels=self.levels)


def csv(name: str) -> pd.DataFrame:
    """Return a table from the folder named by HIERFL_DATA."""
    return pd.read_csv(Path(os.environ["HIERFL_DATA"]) / name)


def lung() -> pd.DataFrame:
    """Return patients with lung cancer of institutions with two patients or more.

    Time is in years.
    """
    frame = csv("lung.csv").dropna(subset=["inst"])
    frame = frame[frame.groupby("inst")["inst"].transform("size") > 1]
    return frame.assign(time=frame["time"] / 365.25, inst=frame["inst"].astype(int))


def heart() -> pd.DataFrame:
    """Return patients with suspected heart disease of four hospitals."""
    raw = hierfl.datasets.heart_disease()
    frame = pd.DataFrame(raw.fields["x"].numpy(), columns=list(raw.features["x"]))
    names = np.array(raw.names)[raw.row_client.numpy()]
    return frame.assign(ill=raw.fields["y"].numpy(), hospital=names)


def radon() -> pd.DataFrame:
    """Return houses in the counties of Minnesota."""
    raw = hierfl.datasets.radon()
    county = raw.row_client.numpy()
    return pd.DataFrame(
        {
            "log_radon": raw.fields["y"].numpy(),
            "floor": raw.fields["floor"].numpy(),
            "log_uranium": raw.client_fields["log_uranium"].numpy()[county],
            "county": np.array(raw.names)[county],
        }
    )


def ilea() -> pd.DataFrame:
    """Return the pupils of every third school, with eight columns and the standardized score."""
    raw = hierfl.datasets.school_ilea()
    raw = raw.select(list(range(0, raw.num_clients, 3)))
    x = raw.fields["x"].double().numpy()[:, PUPILS]
    names = ["year2", "year3", "meals", "vr1", "girl", "band1", "band2", "origin"]
    y = raw.fields["y"].double().numpy()
    frame = pd.DataFrame(x, columns=names)
    return frame.assign(
        y=(y - y.mean()) / y.std(), school=np.array(raw.names)[raw.row_client.numpy()]
    )


def election() -> pd.DataFrame:
    """Return voters of 1988 as counts.

    A row for those of one state, sex, race, age and schooling.
    """
    raw = hierfl.datasets.election88()
    state = raw.row_client.numpy()
    female, black = raw.fields["x"].numpy().astype(int).T
    frame = pd.DataFrame(
        {
            "state": np.array(raw.names)[state],
            "region": raw.client_fields["region"].reshape(-1).numpy()[state],
            "v_prev": 10.0
            * (raw.client_fields["v_prev"].reshape(-1).double().numpy()[state] - 0.54),
            "female": female,
            "black": black,
            "age": raw.fields["age"].numpy(),
            "edu": raw.fields["edu"].numpy(),
            "bush": raw.fields["y"].numpy().astype(int),
        }
    )
    kinds = [name for name in frame if name != "bush"]
    counts = frame.groupby(kinds, as_index=False)["bush"].agg(["sum", "size"])
    return counts.rename(columns={"sum": "bush", "size": "voters"})


PROBLEMS = {
    "trauma": Problem(
        "mortality ~ age + sex + ISS * GCS + (1 + age | hospital)",
        "bernoulli",
        "hospital",
        lambda: csv("trauma.csv"),
    ),
    "nurses": Problem(
        "stress ~ age + gender + experien + hospsize + wardtype + (1 + wardtype | hospital)",
        "gaussian",
        "hospital",
        lambda: csv("nurses.csv"),
    ),
    "lung": Problem(
        "time | event(died) ~ scale(age) + female + `ph.ecog` + (1 | inst)",
        "weibull",
        "inst",
        lambda: lung().assign(died=lambda f: f["status"], female=lambda f: f["sex"] - 1),
    ),
    "heart": Problem(
        "ill ~ scale(age) + sex + cp_typical + cp_atypical + cp_nonanginal + (1 + sex | hospital)",
        "bernoulli",
        "hospital",
        heart,
    ),
    "radon": Problem(
        "log_radon ~ floor + log_uranium + (1 + floor | county)", "gaussian", "county", radon
    ),
    "ilea": Problem(
        "y ~ year2 + year3 + meals + vr1 + girl + band1 + band2 + origin + (1 | school)",
        "gaussian",
        "school",
        ilea,
    ),
    "election88": Problem(
        "bush | trials(voters) ~ female * black + v_prev + (1 | age) + (1 | edu) + (1 | region) + "
        "(1 | state)",
        "binomial",
        "state",
        election,
        levels={"age": ["0", "1", "2", "3"], "edu": ["0", "1", "2", "3"]},
    ),
}
