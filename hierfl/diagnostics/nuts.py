"""The pooled reference: NUTS on all clients' rows together, by Pyro."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, shown_as
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.data.ragged import check_padded
from hierfl.guides.delta import delta
from hierfl.posterior.draws import sites_of
from hierfl.program.check_data import kind_of
from hierfl.program.check_padding import check_apart
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Program, ProgramError
from hierfl.program.read import read
from hierfl.program.sites import Model, Values
from hierfl.program.traces import Center, Site


def _shown(found: Reference) -> Shown:
    sites = sites_of(found.shared, found.own)
    rows = [(*site, found.r_hat.get(site[0], math.nan)) for site in sites]
    count = next((len(v) for v in {**found.shared, **found.own}.values()), 0)
    return Shown(
        f"{count} draws of pooled NUTS, {found.seconds:.0f} s",
        pd.DataFrame(rows, columns=["site", "level", "shape", "r_hat"]),
        "diagnostics.against_nuts(fit, reference=...) compares a fit with them.",
    )


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class Reference:
    """Draws of a model's posterior by NUTS on all clients' rows together.

    Args:
        shared: global site -> (S, *shape).
        own: local site -> (S, N, *shape).
        r_hat: site -> the largest split R-hat of its entries.
        seconds: wall time of sampling.
    """

    shared: Values
    own: Values
    r_hat: Mapping[str, float]
    seconds: float


@one_at_a_time
def nuts(
    model: Model,
    data: ClientData,
    *,
    draws: int = 1000,
    warmup: int = 500,
    chains: int = 1,
    seed: int = 0,
    dense: Sequence[str] = (),
) -> Reference:
    """Sample a model's posterior from all clients' rows by the No-U-Turn Sampler.

    Args:
        model: the generative program, without params to be learned.
        data: all clients' rows.
        draws: kept from each chain.
        warmup: discarded from each chain.
        chains: how many, run one after another.
        seed: of the first chain; chain c has seed + c.
        dense: sites whose joint covariance the mass matrix adapts to; for the others it adapts to
            variances only.

    Raises:
        ProgramError: the model cannot be run as it is written, has a param, which has no posterior,
            or a prior without a sampler; or no start with a finite density is found.
    """
    program = sampled_program(model, data, seed=seed)
    check_padded(data)
    check_apart(program, data)
    batch = full_batch(data, torch.arange(data.num_clients), seed=seed)
    began = time.perf_counter()
    found: list[Values] = []
    with untouched_store(), unchecked():
        for chain in range(chains):
            pyro.set_rng_seed(seed + chain)
            mass = [tuple(dense)] if dense else False
            kernel = NUTS(lambda: program.model(batch), jit_compile=False, full_mass=mass)
            steps = {"num_samples": draws, "warmup_steps": warmup}
            sampler = MCMC(kernel, **steps, disable_progbar=True)
            try:
                sampler.run()
            except ValueError as error:
                if "valid initial params" not in str(error):
                    raise
                raise ProgramError(
                    "NUTS finds no draw of the priors where density and gradient are finite: "
                    "check the scales of the priors, and what the model computes from their draws"
                ) from error
            found.append(sampler.get_samples())
    return _reference(program, found, time.perf_counter() - began)


def sampled_program(model: Model, data: ClientData, *, seed: int = 0) -> Program:
    """Read a model, and refuse what NUTS cannot sample."""
    program = read(model, delta, data, seed=seed, learn=False)
    with untouched_store(), Center():
        trace = poutine.trace(program.model).get_trace(program.prototype)
        nodes: dict[str, Site] = trace.nodes
        params = [name for name, node in nodes.items() if node["type"] == "param"]
        if params:
            raise ProgramError(
                f"param '{params[0]}' of the model has no prior, and NUTS samples sites alone: "
                "give it a prior, pyro.sample, or fit a method first and call "
                "diagnostics.against_nuts(fit)"
            )
        for site in program.latents.sites:
            fn = nodes[site.name]["fn"]
            try:
                fn.sample()
            except NotImplementedError as error:
                raise ProgramError(
                    f"site '{site.name}' ({kind_of(fn)}) cannot be drawn from, and NUTS starts "
                    "from draws of the prior: give it a prior that has a sampler"
                ) from error
    return program


def _reference(program: Program, chains: list[Values], seconds: float) -> Reference:
    local = {
        site.name: len(site.batch_shape) - 2 for site in program.latents.sites if site.is_local
    }
    together = {name: torch.cat([c[name] for c in chains]) for name in chains[0]}
    shared = {name: value for name, value in together.items() if name not in local}
    own = {
        name: together[name].movedim(1 + inner, 1).squeeze(2 + inner)
        for name, inner in local.items()
    }
    return Reference(
        shared, own, {name: _r_hat([c[name] for c in chains]) for name in chains[0]}, seconds
    )


def _r_hat(chains: list[Tensor]) -> float:
    worst: float = split_gelman_rubin(torch.stack(chains)).nan_to_num(nan=1.0).max().item()
    return worst
