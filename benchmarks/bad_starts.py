"""Whether a method arrives at the posterior from bad starts, and with other random numbers."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

import hierfl
from benchmarks.course import accuracy, errors_of, last_of
from benchmarks.pooled_nuts import truth_of
from benchmarks.reference_models import Problem
from benchmarks.rounds import SELF_STOPPING, best_of, method_of
from benchmarks.rounds_table import Record
from hierfl.core.importance_sampling import K_HAT
from hierfl.data.batch import full_batch
from hierfl.method import Method, Server
from hierfl.program.program import Program

COUNT = 20
ARRIVED = 0.15  # largest error of a mean, in reference sd, from 4,000 draws
DRAWS = 4000
FAR = 3.0  # how much wider than the prior the starts are spread, on the scale where it is unbounded


def options(name: str, problem: Problem, number: int) -> dict[str, Any]:
    """Return the options that make a start bad: `start`, where the method has it."""
    known = inspect.signature(getattr(hierfl.methods, name)).parameters
    found: dict[str, Any] = {"start": far_values(problem, number)} if "start" in known else {}
    return found


def misled(method: Method, number: int) -> Method:
    """Return a method whose server first believes in a place far from the prior's, `FAR` of its sds away.

    It is for methods that start from the server's belief of any client's numbers: two_stage.
    """

    def server(program: Program) -> Server:
        plain = method.server(program)
        belief = getattr(plain.state, "belief", None)
        if belief is None:
            return plain
        g = torch.Generator().manual_seed(number)
        away = torch.randn(len(belief.loc), generator=g, dtype=belief.loc.dtype)
        far = belief.loc + FAR * torch.linalg.cholesky(belief.covariance) @ away
        return replace(plain, state=replace(plain.state, belief=replace(belief, loc=far)))

    return replace(method, server=server)


def far_values(problem: Problem, number: int) -> dict[str, Tensor]:
    """Return values of the global sites, three times as far from the middle of their priors as a draw is."""
    data = problem.data()
    batch = full_batch(data, torch.arange(data.num_clients), seed=0)
    model = best_of(problem).model
    program = hierfl.read(model, hierfl.guides.mean_field, data, seed=0)
    shared = {site.name for site in program.latents.sites if not site.is_local}
    pyro.set_rng_seed(number)
    nodes: Any = poutine.trace(model).get_trace(batch).nodes
    out = {}
    for site in shared:
        to = biject_to(nodes[site]["fn"].support)
        out[site] = to(FAR * to.inv(nodes[site]["value"]))
    return out


def arrival(name: str, problem: Problem, number: int) -> Record:
    """Fit from one bad start, and return the errors of the posterior."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of k-hat, which is kept
        try:
            method = method_of(name, best_of(problem).model, **options(name, problem, number))
            method = misled(method, number)
            fit = hierfl.fit(
                method, problem.data(), rounds=SELF_STOPPING[name], seed=number, progress=False
            )
            errors, _ = errors_of(fit, problem, truth_of(problem), draws=DRAWS, seed=number)
        except (RuntimeError, ValueError) as error:
            return {"start": number, "stops": str(error)}
    k_hat = last_of(fit.history, "k_hat")
    return {"start": number, **accuracy(errors), "k_hat": k_hat, "rounds": len(fit.history)}


def arrived(found: Record) -> bool:
    """Return whether a fit arrived at the posterior."""
    return bool(
        "stops" not in found
        and (found["k_hat"] or 0.0) < K_HAT
        and np.isfinite(found["max_mean_error_sd"])
        and found["max_mean_error_sd"] <= ARRIVED
    )
