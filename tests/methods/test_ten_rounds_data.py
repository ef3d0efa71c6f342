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
from benchmarks.reference_models import RADON, SCHOOLS, Problem, all_sites
from hierfl.core.importance_sampling import normal_points
from hierfl.datasets import ReferenceSummary
from hierfl.methods import fedlaplace
from hierfl.program.read import read_model
from tests.methods.test_pvi import gaussian
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


CENTERED = replace(RADON, sampled=RADON.ways["conditional"].model)


def far() -> dict[str, Tensor]:
    """Return a draw of the prior; benchmarks/bad_starts.py begins at twenty."""
    program = read_model(CENTERED.sampled, CENTERED.data()).program
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        nodes: Any = pyro.poutine.trace(CENTERED.sampled).get_trace(program.prototype).nodes
    return {site.name: nodes[site.name]["value"] for site in program.latents.global_block.sites}


@pytest.mark.slow
def test_radon_converges_from_a_bad_start() -> None:
    few: dict[str, Any] = {"settle_draws": 16, "draws": 1024, "target_ess": 400}
    method = fedlaplace(CENTERED.sampled, start=far(), **few)
    errors = of_global_sites(fit(method, CENTERED.data(), rounds=30), truth_of(CENTERED))
    assert errors.of("mean").max() < 0.1 and np.abs(errors.of("sd") - 1.0).max() < 0.1, errors
