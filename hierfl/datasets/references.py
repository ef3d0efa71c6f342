"""Reference posteriors: published or long NUTS runs, summarized by site."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hierfl.core.arguments import NoSuchName
from hierfl.datasets.files import Arrays, DataFile, load, located, reading, shipped


@dataclass(frozen=True)
class ReferenceSummary:
    """Posterior summary of one site from long MCMC runs.

    Args:
        mean: posterior mean, of the site's shape; for a local site the clients come first.
        sd: posterior standard deviation, of the same shape.
        mcse: Monte Carlo standard error of `mean`, of the same shape; None where the source does
            not give it.
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

Shapes = dict[str, tuple[int, ...]]


def _nuts(file: str, program: str, shapes: Shapes) -> tuple[DataFile, Shapes]:
    """Return where the means and sds of a NUTS run are, and the shapes of its sites."""
    held = {f"{site}_{what}": f"{what} of {site}" for site in shapes for what in ("mean", "sd")}
    return DataFile(file, f"the means and sds of pooled NUTS on {program}", held), shapes


_NUTS = {
    "hospitals": _nuts(
        "reference/hospitals_nuts.npz",
        "the logistic hierarchy of heart_disease",
        {"mu": (9,), "log_tau": (9,), "w": (4, 9)},
    ),
    "demo_hierarchy": _nuts(
        "reference/demo_hierarchy_nuts.npz",
        "the demo's hierarchy",
        {"alpha": (), "beta": (27,), "s": (), "t": (27,), "intercept": (4,), "slope": (4, 27)},
    ),
}

_HALF_CAUCHY = DataFile(
    "draws_eight_schools-eight_schools_noncentered.npz",
    "posteriordb's reference draws of eight_schools-eight_schools_noncentered (BSD-3)",
    {name: "(chains, draws)" for name in ("mu", "tau", *(f"theta_{j}" for j in range(1, 9)))},
)


def reference(name: str) -> dict[str, ReferenceSummary]:
    """Return the posterior summary of each site, to compare an approximation with.

    * "radon" (shipped): sites mu, tau, slope (3,), sigma, a (85,) of `y ~ Normal(a_j + x . slope, sigma)`,
      `a_j ~ Normal(mu, tau)`, `mu, slope ~ Normal(0, 1)`, `tau, sigma ~ HalfNormal(1)`, on `radon()`.
    * "radon_uniform" (shipped): the same with `tau, sigma ~ Uniform(0, 100)`.
    * "eight_schools" (shipped): mu, log_tau, theta (8,) of `theta_j ~ Normal(mu, exp(log_tau))`, `mu ~
      Normal(0, 10)`, `log_tau ~ Normal(5, 1)`: the priors of inference-gym, not the better-known half-Cauchy
      ones.
    * "eight_schools_half_cauchy" (from HIERFL_DATA): mu, tau, theta (8,) with `mu ~ Normal(0, 5)`, `tau ~
      HalfCauchy(5)`.
    * "hospitals" (from HIERFL_DATA): mu (9,), log_tau (9,), w (4, 9) of a logistic regression with `w_k ~
      Normal(mu, exp(log_tau))`, `mu ~ Normal(0, 1)`, `log_tau ~ Normal(-1, 0.7)`, on an intercept and the
      columns 0-4 and 7-9 of `heart_disease("raw")`, standardized over all patients, with missing values set
      to 0 after that.
    * "demo_hierarchy" (from HIERFL_DATA): alpha, beta (27,), s, t (27,), intercept (4,), slope (4, 27) of a
      logistic regression with `intercept_k ~ Normal(alpha, s)`, `slope_k ~ Normal(beta, t)`, `alpha, beta ~
      Normal(0, 2.5)`, `s ~ HalfNormal(1)`, `t ~ HalfNormal(0.5)`, on the demo's training rows,
      `heart_disease().split(0.7, seed=0)[0]`.

    Args:
        name: one of the names above.

    Raises:
        KeyError: there is no reference posterior of that name.
        FileNotFoundError: the reference is not shipped, and its file is missing.
        ValueError: the file is damaged, or another one.

    >>> summary = reference("radon")["tau"]
    >>> round(float(summary.mean), 3), round(float(summary.sd), 3)
    (0.145, 0.049)
    """
    if name in _GYM:
        file, sites = _GYM[name]
        arrays = shipped(file)
        return {site: _gym_summary(arrays, f"IDENTITY_{theirs}") for site, theirs in sites.items()}
    if name in _NUTS:
        source, shapes = _NUTS[name]
        with reading(located(source)):
            arrays, summaries = load(source), {}
            for site, shape in shapes.items():
                mean, sd = arrays[f"{site}_mean"], arrays[f"{site}_sd"]
                summaries[site] = ReferenceSummary(mean.reshape(shape), sd.reshape(shape), None)
            return summaries
    if name == "eight_schools_half_cauchy":
        with reading(located(_HALF_CAUCHY)):
            draws = dict(load(_HALF_CAUCHY))
            draws["theta"] = np.stack([draws.pop(f"theta_{j}") for j in range(1, 9)])
            return {site: _of_draws(values) for site, values in draws.items()}
    columns = ", ".join([*_GYM, "eight_schools_half_cauchy", *_NUTS])
    raise NoSuchName(f"there is no reference posterior '{name}': the names are {columns}")


def _gym_summary(arrays: Arrays, theirs: str) -> ReferenceSummary:
    mean, sd = arrays[f"{theirs}_MEAN"], arrays[f"{theirs}_STANDARD_DEVIATION"]
    return ReferenceSummary(mean, sd, arrays[f"{theirs}_MEAN_STANDARD_ERROR"])


def _of_draws(draws: NDArray[np.float64]) -> ReferenceSummary:
    """Return the moments over (..., chains, draws) of draws that posteriordb has thinned."""
    sd = draws.std(axis=(-2, -1), ddof=1)
    return ReferenceSummary(
        draws.mean(axis=(-2, -1)), sd, sd / np.sqrt(draws.shape[-2] * draws.shape[-1])
    )
