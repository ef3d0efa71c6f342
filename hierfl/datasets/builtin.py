"""The data sets that ship with the package, and reference posteriors of some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hierfl.data.clients import ClientData
from hierfl.datasets.files import Arrays, Source, load, shipped

# Fixed clinical units, (value - centre) / unit: not computed from data, so that no hospital need tell another its statistics.
_UNITS = {
    "age": (50.0, 10.0),
    "trestbps": (130.0, 20.0),
    "chol": (240.0, 50.0),
    "thalach": (140.0, 25.0),
    "slope": (2.0, 1.0),
}
# Nominal codes: a column for each but the commonest, which is the reference (asymptomatic, normal, normal).
_CODES = {
    "cp": {1: "cp_typical", 2: "cp_atypical", 3: "cp_nonanginal"},
    "restecg": {1: "restecg_st_t", 2: "restecg_lvh"},
    "thal": {6: "thal_fixed", 7: "thal_reversible"},
}
_IMPOSSIBLE_ZERO = ("trestbps", "chol")  # nobody alive has a blood pressure or a cholesterol of 0: it was not measured


def heart_disease(missing: Literal["indicator", "nan", "raw"] = "indicator") -> ClientData:
    """UCI heart disease: 920 patients of 4 hospitals (cleveland, hungarian, switzerland, va), is a coronary artery narrowed?

    Fields `x` (n, D) and `y` (n,), 1.0 for the ill. With "indicator" nothing is dropped and `x` (D = 27) is finite: age in
    decades from 50; trestbps in 20 mm Hg from 130; chol in 50 mg/dl from 240; thalach in 25 beats a minute from 140; oldpeak
    in mm; ca in vessels (0-3); slope -1 rising, 0 flat, 1 falling; sex (1 = male), fbs and exang 0/1; and 0/1 columns for
    the nominal cp (reference: asymptomatic), restecg and thal (reference: normal). A missing value is 0 in these units, and
    each of the ten features that is ever missing has a 0/1 column `<feature>_missing`. The source's zeros for trestbps (1
    patient) and chol (172: all of switzerland, a quarter of va) are not measurements and count as missing.

    Args:
        missing: "indicator" as above; "nan": the 13 features in the source's units and codes, NaN where missing; "raw": the
            same with those zeros left in, as the source has them.

    Raises:
        ValueError: another word for `missing`.

    Reference: Detrano et al. 1989, American Journal of Cardiology 64; licence CC BY 4.0.

    >>> heart_disease().counts.tolist()
    [303, 294, 123, 200]
    """
    if missing not in ("indicator", "nan", "raw"):
        raise ValueError(f"missing is '{missing}'; it must be 'indicator', 'nan' or 'raw'")
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
    """The columns in clinical units and 0/1 codes, missing values 0, followed by the indicators of what is missing."""
    coded: dict[str, NDArray[Any]] = {}
    for name, values in columns.items():
        if name in _CODES:
            coded |= {label: (values == code).astype(np.float64) for code, label in _CODES[name].items()}
        else:
            centre, unit = _UNITS.get(name, (0.0, 1.0))
            coded[name] = np.nan_to_num((values - centre) / unit, nan=0.0)
    absent = {f"{name}_missing": np.isnan(values).astype(np.float64) for name, values in columns.items()}
    return coded | {name: values for name, values in absent.items() if values.any()}


def radon() -> ClientData:
    """Radon in 919 homes of the 85 counties of Minnesota; a county is a client.

    Fields: `x` (n, 3), columns log_uranium (of the county), floor (0 basement, 1 ground) and floor_mean (of the county's
    homes), the columns of `reference("radon")`'s slope; `y` (n,), log radon in pCi/L; `floor` (n,). Client fields
    `log_uranium` and `floor_mean`, (85,): what is the same for all homes of a county.

    Reference: Gelman and Hill 2007, chapter 12, by way of posteriordb (BSD-3).

    >>> radon()
    ClientData(85 clients, 919 rows, x: (3,), y: (), floor: (), log_uranium: (), floor_mean: ())
    """
    arrays = shipped("radon_gym_minnesota.npz")
    county, floor, uranium = arrays["county"], arrays["floor"].astype(np.float64), arrays["log_uranium"]
    homes = np.bincount(county)
    floor_mean = np.bincount(county, floor) / homes
    return ClientData.from_arrays(
        county,
        names=arrays["county_names"].tolist(),
        client_fields={"log_uranium": np.bincount(county, uranium) / homes, "floor_mean": floor_mean},
        features={"x": ["log_uranium", "floor", "floor_mean"]},
        x=np.stack([uranium, floor, floor_mean[county]], axis=1),
        y=arrays["log_radon"],
        floor=floor,
    )


def eight_schools() -> ClientData:
    """Coaching for the SAT in eight schools, "school A" to "school H", one row each.

    Fields: `y` (8,), the estimated effect in points; `sigma` (8,), its standard error, taken as known.

    Reference: Rubin 1981, Journal of Educational Statistics 6, by way of posteriordb (BSD-3).

    >>> eight_schools().fields["y"].tolist()
    [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]
    """
    arrays = shipped("eight_schools.npz")
    effects, errors = arrays["y"].astype(np.float64), arrays["sigma"].astype(np.float64)
    names = [f"school {letter}" for letter in "ABCDEFGH"]
    return ClientData.from_arrays(np.arange(len(effects)), names=names, y=effects, sigma=errors)


# ---------------------------------------------------------------------- reference posteriors
@dataclass(frozen=True)
class Summary:
    """What long runs of MCMC say of one site.

    Args:
        mean: posterior mean, of the site's shape; for a local site the clients come first.
        sd: posterior standard deviation, the same shape.
        mcse: Monte Carlo standard error of `mean`, the same shape; None where the source does not give it.
    """

    mean: NDArray[np.float64]
    sd: NDArray[np.float64]
    mcse: NDArray[np.float64] | None


_RADON = {
    "mu": "COUNTY_EFFECT_MEAN",
    "tau": "COUNTY_EFFECT_SCALE",
    "slope": "WEIGHT",
    "sigma": "LOG_RADON_SCALE",
    "a": "COUNTY_EFFECT",
}
_SCHOOLS = {"mu": "AVG_EFFECT", "log_tau": "LOG_STDDEV", "theta": "SCHOOL_EFFECTS"}
_GYM = {
    "radon": ("radon_contextual_effects_minnesota_halfnormal.npz", _RADON),
    "radon_uniform": ("radon_contextual_effects_minnesota.npz", _RADON),
    "eight_schools": ("eight_schools_reference.npz", _SCHOOLS),
}
_HOSPITALS = Source(
    "reference/hospitals_nuts.npz",
    "the means and sds of pooled NUTS on the logistic hierarchy of heart_disease",
    {f"{site}_{what}": f"{what} of {site}" for site in ("mu", "log_tau", "w") for what in ("mean", "sd")},
)
_HALF_CAUCHY = Source(
    "draws_eight_schools-eight_schools_noncentered.npz",
    "posteriordb's reference draws of eight_schools-eight_schools_noncentered (BSD-3)",
    {name: "(chains, draws)" for name in ("mu", "tau", *(f"theta_{j}" for j in range(1, 9)))},
)


def reference(name: str) -> dict[str, Summary]:
    """Posterior summaries, by site, to hold an approximation against.

    * "radon" (shipped): sites mu, tau, slope (3,), sigma, a (85,) of `y ~ Normal(a_j + x . slope, sigma)`,
      `a_j ~ Normal(mu, tau)`, `mu, slope ~ Normal(0, 1)`, `tau, sigma ~ HalfNormal(1)`, on `radon()`.
    * "radon_uniform" (shipped): the same with `tau, sigma ~ Uniform(0, 100)`.
    * "eight_schools" (shipped): mu, log_tau, theta (8,) of `theta_j ~ Normal(mu, exp(log_tau))`, `mu ~ Normal(0, 10)`,
      `log_tau ~ Normal(5, 1)`: inference-gym's priors, not the half-Cauchy ones that are better known.
    * "eight_schools_half_cauchy" (from HIERFL_DATA): mu, tau, theta (8,) with `mu ~ Normal(0, 5)`, `tau ~ HalfCauchy(5)`.
    * "hospitals" (from HIERFL_DATA): mu (9,), log_tau (9,), w (4, 9) of a logistic regression with `w_k ~ Normal(mu,
      exp(log_tau))`, `mu ~ Normal(0, 1)`, `log_tau ~ Normal(-1, 0.7)`, on an intercept and the columns 0-4 and 7-9 of
      `heart_disease("raw")`, standardised over all patients, missing values 0 after that.

    Raises:
        KeyError: another name.
        FileNotFoundError: one that is not shipped is not there.

    >>> summary = reference("radon")["tau"]
    >>> round(float(summary.mean), 3), round(float(summary.sd), 3)
    (0.145, 0.049)
    """
    if name in _GYM:
        file, sites = _GYM[name]
        arrays = shipped(file)
        return {site: _gym_summary(arrays, f"IDENTITY_{theirs}") for site, theirs in sites.items()}
    if name == "hospitals":
        arrays = load(_HOSPITALS)
        shapes = {"mu": (9,), "log_tau": (9,), "w": (4, 9)}
        return {s: Summary(arrays[f"{s}_mean"].reshape(n), arrays[f"{s}_sd"].reshape(n), None) for s, n in shapes.items()}
    if name == "eight_schools_half_cauchy":
        arrays = load(_HALF_CAUCHY)
        theta = np.stack([arrays[f"theta_{j}"] for j in range(1, 9)])
        return {site: _of_draws(draws) for site, draws in (("mu", arrays["mu"]), ("tau", arrays["tau"]), ("theta", theta))}
    known = ", ".join([*_GYM, "eight_schools_half_cauchy", "hospitals"])
    raise KeyError(f"there is no reference posterior '{name}'; there are {known}")


def _gym_summary(arrays: Arrays, theirs: str) -> Summary:
    mean, sd = arrays[f"{theirs}_MEAN"], arrays[f"{theirs}_STANDARD_DEVIATION"]
    return Summary(mean, sd, arrays[f"{theirs}_MEAN_STANDARD_ERROR"])


def _of_draws(draws: NDArray[np.float64]) -> Summary:
    """Moments over (..., chains, draws); posteriordb thins its draws until they are as good as independent."""
    sd = draws.std(axis=(-2, -1), ddof=1)
    return Summary(draws.mean(axis=(-2, -1)), sd, sd / np.sqrt(draws.shape[-2] * draws.shape[-1]))
