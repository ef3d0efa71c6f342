"""FedLaplace on real data: the posteriors of long MCMC runs in about ten rounds.

Fits begin from a cold start and from bad ones.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from torch import Tensor

import hierfl
from benchmarks.reference import Errors, compare, truth_of
from benchmarks.reference_models import HOSPITALS, RADON, SCHOOLS, Problem, all_sites
from hierfl import guides
from hierfl.core.importance_sampling import normal_points
from hierfl.core.trees import named_leaves
from hierfl.datasets import ReferenceSummary
from hierfl.methods import fedlaplace
from tests.methods.test_pvi import close, gaussian
from tests.programs import fit

needs_files = pytest.mark.skipif(
    not os.environ.get("HIERFL_DATA"), reason="HIERFL_DATA is not set: no reference posterior"
)


def of_global_sites(fitted: hierfl.Fit, truth: Mapping[str, ReferenceSummary]) -> Errors:
    """Return the errors of the global sites, from the points that make up their posterior."""
    block, params = fitted.program.latents.global_block, fitted.message["params"]
    if "_shared.points" in params:
        points = params["_shared.points"]
    else:
        loc, precision = gaussian(fitted)
        points = (
            loc
            + normal_points(4096, len(loc)) @ torch.linalg.cholesky(torch.linalg.inv(precision)).T
        )
    with pyro.validation_enabled(False):
        draws = torch.vmap(lambda z: block.unflatten(z)[0])(points)
    return compare(draws, {site.name: truth[site.name] for site in block.sites})


def of_all_sites(fitted: hierfl.Fit, problem: Problem) -> Errors:
    drawn = fitted.draws(4000)
    return compare(problem.effects(all_sites(drawn.shared, drawn.own)), truth_of(problem))


def weights(fitted: hierfl.Fit) -> tuple[float, float]:
    """Return k-hat and the effective number of points."""
    last = fitted.history.iloc[-1]
    return float(last["k_hat"]), float(last["effective"])


@needs_files
def test_eight_schools_in_nine_rounds() -> None:
    fitted = fit(fedlaplace(SCHOOLS.sampled), SCHOOLS.data(), rounds=9)
    errors, (k_hat, effective) = of_all_sites(fitted, SCHOOLS), weights(fitted)
    assert errors.of("mean").max() < 0.06 and np.abs(errors.of("sd") - 1.0).max() < 0.06, errors
    assert k_hat < 0.7 and effective >= 400


def test_the_global_sites_of_radon_in_twelve_rounds() -> None:
    """A quarter of the points is used."""
    fitted = fit(
        fedlaplace(RADON.ways["conditional"].model, settle_draws=16, draws=1024, target_ess=500),
        RADON.data(),
        rounds=12,
    )
    errors, (k_hat, effective) = of_global_sites(fitted, truth_of(RADON)), weights(fitted)
    assert errors.of("mean").max() < 0.06 and np.abs(errors.of("sd") - 1.0).max() < 0.06, errors
    assert k_hat < 0.7 and effective >= 500


@needs_files
@pytest.mark.slow
def test_hospitals_in_twelve_rounds_on_either_engine() -> None:
    fitted = fit(fedlaplace(HOSPITALS.sampled), HOSPITALS.data(), rounds=12)
    errors, (k_hat, effective) = of_all_sites(fitted, HOSPITALS), weights(fitted)
    assert errors.of("mean").max() < 0.15 and np.median(errors.of("mean")) < 0.06, errors
    assert k_hat < 0.7 and effective >= 400
    other = fit(fedlaplace(HOSPITALS.sampled), HOSPITALS.data(), rounds=12, engine="sequential")
    for name, value in named_leaves(fitted.progress.server).items():
        close(named_leaves(other.progress.server)[name].double(), value.double(), 1e-6)


# ------------------------------------------------------------ bad starts
def bad_start(problem: Problem, seed: int) -> dict[str, Tensor]:
    """Return a draw of the prior; for seed 0, the value of every site whose unconstrained value is 0."""
    program = hierfl.read(problem.sampled, guides.conditional, problem.data())
    sites = program.latents.global_block.sites
    if seed == 0:
        return {site.name: site.transform(torch.zeros_like(site.free_start)) for site in sites}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        nodes: Any = pyro.poutine.trace(problem.sampled).get_trace(program.prototype).nodes
    return {site.name: nodes[site.name]["value"] for site in sites}


CENTERED = replace(RADON, sampled=RADON.ways["conditional"].model)
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(21)]
STARTS = [4, *(one for one in SLOW if one.values != (4,))]


@pytest.mark.parametrize("seed", STARTS)
def test_radon_converges_from_a_bad_start(seed: int) -> None:
    method = fedlaplace(
        CENTERED.sampled,
        start=bad_start(CENTERED, seed),
        settle_draws=16,
        draws=1024,
        target_ess=400,
    )
    errors = of_global_sites(fit(method, CENTERED.data(), rounds=30), truth_of(CENTERED))
    assert errors.of("mean").max() < 0.1 and np.abs(errors.of("sd") - 1.0).max() < 0.1, errors


@needs_files
@pytest.mark.parametrize("seed", SLOW)
def test_the_hospitals_converge_from_a_bad_start(seed: int) -> None:
    """The fit stops at q, without the importance weights.

    q is about 0.2 sd from the posterior; the weights would correct it.
    """
    method = fedlaplace(
        HOSPITALS.sampled, start=bad_start(HOSPITALS, seed), weighting_rounds=0, settle_draws=16
    )
    errors = of_global_sites(fit(method, HOSPITALS.data(), rounds=30), truth_of(HOSPITALS))
    assert errors.of("mean").max() < 0.3, errors


def test_too_few_rounds_give_a_warning() -> None:
    with pytest.warns(UserWarning, match="the rounds ended while climbing"):
        fit(
            fedlaplace(CENTERED.sampled, start=bad_start(CENTERED, 4), weighting_rounds=0),
            CENTERED.data(),
            rounds=3,
        )
