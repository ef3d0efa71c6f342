"""Mixed models on real data, as formulas: the problems of `benchmarks.formulas`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
        data2: matrices that the formula names.
        priors: of sites, in brms's words.
        apart: NUTS draws groups and curves as standard Normal ones, as rows say little of each.
    """

    formula: str
    family: str
    clients: str
    frame: Callable[[], pd.DataFrame]
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    data2: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    priors: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False

    def model(self, frame: pd.DataFrame) -> hierfl.Formula:
        """Return the formula and its schema; rows that miss a value are left out."""
        made = hierfl.formula(
            self.formula,
            self.family,
            clients=self.clients,
            missing="drop",
            data2=dict(self.data2) or None,
            priors=dict(self.priors),
        )
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


def schooling(*by: str, states: int | None = None) -> pd.DataFrame:
    """Return voters of 1988 by state, sex and race: their number, and those of each schooling.

    Args:
        *by: what voters are divided by as well: "age".
        states: how many of those with the most voters. Default: all.
    """
    raw = hierfl.datasets.election88()
    female, black = raw.fields["x"].numpy().astype(int).T
    state = np.array(raw.names)[raw.row_client.numpy()]
    columns = {"state": state, "female": female, "black": black, "bush": raw.fields["y"].numpy()}
    frame = pd.DataFrame({**columns, **{name: raw.fields[name].numpy() for name in by}})
    largest = frame["state"].value_counts().index[:states]
    edu = raw.fields["edu"].numpy()
    counts = frame.assign(**{f"edu{k}": (edu == k).astype(int) for k in range(4)})
    counts = counts[counts["state"].isin(largest)]
    found = counts.groupby(["state", "female", "black", *by], as_index=False).sum()
    names = [f"edu{k}" for k in range(4)]
    total = found[names].sum(axis=1)
    shares = (found[names] + 0.5).div(total + 2.0, axis=0).add_prefix("share_")
    return pd.concat([found.assign(voters=total), shares], axis=1)


def stress() -> pd.DataFrame:
    """Return nurses, whose levels of stress are four: few have the lowest and the highest of seven."""
    return csv("nurses.csv").assign(stress=lambda f: f["stress"].clip(3, 6))


def tilt() -> pd.DataFrame:
    """Return windows of people who stand or walk with a phone in a pocket: the direction of gravity."""
    with np.load(Path(os.environ["HIERFL_DATA"]) / "wisdm_har.npz") as kept:
        features, classes = kept["features"].tolist(), kept["classes"].tolist()
        x, user, y = kept["x"].astype(float), kept["client_id"], kept["y"]
    up, out = (x[:, features.index(name)] for name in ("YAVG", "ZAVG"))
    walking = y == classes.index("Walking")
    every = np.arange(len(y)) % 5 == 0
    keep = (y == classes.index("Standing")) | (walking & every)
    frame = pd.DataFrame(
        {"user": user, "walking": walking.astype(int), "tilt": np.arctan2(out, up)}
    )
    return frame[keep]


def depression() -> pd.DataFrame:
    """Return patients of four hospitals whose ST depression is 0 or more."""
    frame = hierfl.datasets.heart_disease("nan").frame("hospital")
    return frame[frame["oldpeak"] >= 0.0]


# Of the 48 states that touch others and DC, each with the neighbors that come after it.
BORDERS = """
AL FL GA MS TN|AZ CA NM NV UT|AR LA MO MS OK TN TX|CA NV OR|CO KS NE NM OK UT WY|CT MA NY RI|DE MD NJ PA|DC MD VA|FL GA|
GA NC SC TN|ID MT NV OR UT WA WY|IL IN IA KY MO WI|IN KY MI OH|IA MN MO NE SD WI|KS MO NE OK|KY MO OH TN VA WV|LA MS TX|
ME NH|MD PA VA WV|MA NH NY RI VT|MI OH WI|MN ND SD WI|MS TN|MO NE OK TN|MT ND SD WY|NE SD WY|NV OR UT|NH VT|NJ NY PA|
NM OK TX|NY PA VT|NC SC TN VA|ND SD|OH PA WV|OK TX|OR WA|PA WV|SD WY|TN VA|UT WY|VA WV
"""


def neighbors() -> pd.DataFrame:
    """Return which states of the USA are neighbors, 0 or 1."""
    states = [line.split() for line in BORDERS.replace("\n", "").split("|")]
    names = sorted({name for line in states for name in line})
    found = pd.DataFrame(0.0, index=names, columns=names)
    for first, *others in states:
        found.loc[first, others] = 1.0
        found.loc[others, first] = 1.0
    return found


PLACES = ["cleveland", "hungarian", "switzerland", "va"]
KM = [[0, 7600, 6900, 3300], [7600, 0, 800, 9900], [6900, 800, 0, 9500], [3300, 9900, 9500, 0]]
NEAR = pd.DataFrame(np.exp(np.array(KM) / -3000.0), index=PLACES, columns=PLACES)

NURSES = "stress ~ {} + scale(age) + (1 | hospital)"
HEART = "oldpeak ~ scale(age) + sex + (1 | hospital)"
# of the sd of a log mean: by default few hospitals leave a tail open, which a chain seldom reaches
FEW_HOSPITALS = {"sd": "normal(0, 0.5)"}
STATES = "edu0 ~ female + black + (1 | state)"
# Problems of one term each, and of one family each.
OF_TERMS = {
    "mo": Problem(
        "time | event(died) ~ mo(ecog) + scale(age) + female + (1 | inst)",
        "weibull",
        "inst",
        lambda: (
            lung()
            .dropna(subset=["ph.ecog"])
            .assign(
                died=lambda f: f["status"],
                female=lambda f: f["sex"] - 1,
                ecog=lambda f: f["ph.ecog"].astype(int),
            )
        ),
    ),
    "s": Problem(
        "ill ~ s(age) + sex + (1 | hospital)",
        "bernoulli",
        "hospital",
        heart,
        priors={"sd": "normal(0, 1)", "sds_s(age)": "normal(0, 1)"},
        apart=True,
    ),
    "gp": Problem(
        "stress ~ gp(age, k=8) + (1 | hospital)", "gaussian", "hospital", lambda: csv("nurses.csv")
    ),
    "gr": Problem(
        "ill ~ scale(age) + sex + (1 | gr(hospital, cov=near))",
        "bernoulli",
        "hospital",
        heart,
        data2={"near": NEAR},
    ),
    "car": Problem(
        "edu0 | trials(voters) ~ female + black + car(borders, gr=state)",
        "binomial",
        "state",
        schooling,
        data2={"borders": neighbors()},
    ),
}
OF_FAMILIES = {
    "acat": Problem(NURSES.format("cs(wardtype)"), "acat", "hospital", stress),
    "sratio": Problem(NURSES.format("cs(wardtype)"), "sratio", "hospital", stress),
    "skew_normal": Problem(
        NURSES.format("wardtype"), "skew_normal", "hospital", lambda: csv("nurses.csv")
    ),
    "trunc": Problem(
        "ISS | trunc(lb=18) ~ scale(age) + sex + (1 | hospital)",
        "negative_binomial",
        "hospital",
        lambda: csv("trauma.csv"),
        priors=FEW_HOSPITALS,
    ),
    "multinomial": Problem(
        "cbind(edu0, edu1, edu2, edu3) | trials(voters) ~ female + black + (1 | state)",
        "multinomial",
        "state",
        schooling,
    ),
    "hurdle_gamma": Problem(
        HEART, "hurdle_gamma", "hospital", depression, priors=FEW_HOSPITALS, apart=True
    ),
    "hurdle_lognormal": Problem(HEART, "hurdle_lognormal", "hospital", depression),
    "hurdle_poisson": Problem(STATES, "hurdle_poisson", "state", schooling),
    "hurdle_negative_binomial": Problem(STATES, "hurdle_negative_binomial", "state", schooling),
    "zero_inflated_negative_binomial": Problem(
        STATES, "zero_inflated_negative_binomial", "state", schooling
    ),
    "ordered_beta": Problem(
        "share ~ female + black + (1 | state)",
        "ordered_beta",
        "state",
        lambda: schooling("age").assign(share=lambda f: f["bush"] / f["voters"]),
    ),
    "von_mises": Problem("tilt ~ walking + (1 | user)", "von_mises", "user", tilt),
    "dirichlet": Problem(
        "cbind(share_edu0, share_edu1, share_edu2, share_edu3) ~ female + black + (1 | state)",
        "dirichlet",
        "state",
        partial(schooling, "age", states=15),
        apart=True,
    ),
}
