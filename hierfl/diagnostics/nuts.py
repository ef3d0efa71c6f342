"""NUTS on all clients' rows together, by Pyro, and a fit beside it: for data that may be pooled."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import split_gelman_rubin

from hierfl.core.arguments import expect_integer
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.user_warnings import warn
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.diagnostics.check import R_HAT
from hierfl.diagnostics.weighted_moments import by_site, compared, equal_weights, named
from hierfl.guides.delta import delta
from hierfl.posterior.corrected import corrected
from hierfl.posterior.draws import Draws, draws_of_samples, posterior_draws, sites_of
from hierfl.posterior.snapshot import Snapshot, expect_fit
from hierfl.program.check_dependence import check_apart
from hierfl.program.handlers import Substitute, unchecked, untouched_store
from hierfl.program.program import Program, ProgramError
from hierfl.program.read import read
from hierfl.program.sites import Model, Values
from hierfl.program.supports import kind_of
from hierfl.program.traces import Center, Site


@printed
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

    def __tables__(self) -> Shown:
        sites = sites_of(self.shared, self.own)
        rows = [(*site, self.r_hat.get(site[0], math.nan)) for site in sites]
        return Shown(
            f"{Draws(self.shared, self.own).count} draws of pooled NUTS, {self.seconds:.0f} s",
            pd.DataFrame(rows, columns=["site", "level", "shape", "r_hat"]),
            "diagnostics.against_nuts(fit, reference=...) compares a fit with them.",
        )


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
                    "NUTS found no draw from the priors with a finite density and gradient: "
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
                f"param '{params[0]}' of the model has no prior, and NUTS samples only sites: "
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
    stacked = {name: torch.stack([c[name] for c in chains]) for name in chains[0]}
    r_hat = {
        name: split_gelman_rubin(v).nan_to_num(nan=1.0).max().item() for name, v in stacked.items()
    }
    drawn = draws_of_samples(program, {name: v.flatten(0, 1) for name, v in stacked.items()})
    return Reference(drawn.shared, drawn.own, r_hat, seconds)


LEAST_DRAWS = 50  # for a standard deviation


@printed
@dataclass(frozen=True, eq=False)
class AgainstNuts:
    """Standardized differences between a fit and pooled NUTS.

    Args:
        table: one row per site, as `Convergence.sites` with NUTS' draws in place of weighted ones,
            and `r_hat`, the largest of NUTS.
        scalars: one row per scalar, as `Convergence.scalars`: `shift` is of means, in NUTS standard
            deviations, `ratio` the fit's standard deviation over NUTS'.
        reference: the NUTS draws, to compare another fit with.
    """

    table: pd.DataFrame
    scalars: pd.DataFrame
    reference: Reference

    def __tables__(self) -> Shown:
        return Shown("Against pooled NUTS, by site", self.table, self.verdict)

    @property
    def verdict(self) -> str:
        """The largest differences, in a sentence."""
        shift, ratio = self.scalars["shift"].abs(), self.scalars["ratio"]
        return (
            f"Means are within {shift.max():.2f} NUTS standard deviations (worst: "
            f"{named(self.scalars.loc[shift.idxmax()])}; median {shift.median():.2f}); "
            f"standard deviations are {ratio.min():.2f} to {ratio.max():.2f} times NUTS'."
        )


@one_at_a_time
def against_nuts(
    fit: Snapshot,
    *,
    draws: int = 500,
    warmup: int = 500,
    chains: int = 2,
    seed: int = 0,
    correct: Literal["psis"] | None = None,
    reference: Reference | None = None,
) -> AgainstNuts:
    """Compare every latent site with NUTS on all rows; learned params keep their values.

    Args:
        fit: of labeled clients.
        draws: of NUTS, for each chain.
        warmup: steps of NUTS before them, for each chain.
        chains: of NUTS.
        seed: of NUTS and of the fit's draws.
        correct: of the fit's draws, as in `Fit.posterior`.
        reference: NUTS draws of an earlier comparison; NUTS is then not run again.

    Raises:
        ValueError: `draws` is below 50, or `reference` has other sites than the fit.
        ProgramError: the model has params inside the clients plate, which NUTS cannot hold fixed.
    """
    expect_fit(fit)
    for name, value in (("draws", draws), ("warmup", warmup), ("chains", chains)):
        expect_integer(value, name)
    if draws < LEAST_DRAWS or chains < 1:
        raise ValueError(
            f"draws is {draws} and chains {chains}: standard deviations need at least "
            f"{LEAST_DRAWS} draws of at least one chain"
        )
    if reference is None:
        reference = _run(fit, draws=draws, warmup=warmup, chains=chains, seed=seed)
    count = max(2000, draws * chains)
    if correct is None:
        found = posterior_draws(fit, draws=count, seed=seed)
    else:
        found = corrected(fit, count, seed=seed).draws
    theirs = Draws(reference.shared, reference.own)
    for site in fit.program.latents.sites:
        shape = found.sites[site.name].shape[1:]
        if site.name not in theirs.sites or theirs.sites[site.name].shape[1:] != shape:
            what = f"the reference has no site '{site.name}' of shape {tuple(shape)}"
            raise ValueError(f"{what}: it is of another fit")
    scalars = compared(fit, found, theirs, equal_weights(theirs.count))
    table = by_site(scalars)
    return AgainstNuts(table.assign(r_hat=pd.Series(dict(reference.r_hat))), scalars, reference)


def _run(fit: Snapshot, *, draws: int, warmup: int, chains: int, seed: int) -> Reference:
    data = fit.federation.data
    found = nuts(_held(fit), data, draws=draws, warmup=warmup, chains=chains, seed=seed)
    worst = max(found.r_hat, key=lambda site: found.r_hat[site])
    if found.r_hat[worst] > R_HAT:
        warn(
            f"NUTS itself has not converged: R-hat of site '{worst}' is {found.r_hat[worst]:.2f}, "
            f"above {R_HAT}. Do not judge the fit by it; allow more warmup and draws, or write "
            f"the model non-centered",
        )
    return found


def _held(fit: Snapshot) -> Model:
    """Fix the params that the model learns at their fitted values, and hide them."""
    program, batch = fit.program, fit.program.prototype
    params = fit.params_at_first
    with untouched_store(), unchecked(), torch.no_grad(), Substitute(params, batch):
        nodes = poutine.trace(program.model).get_trace(batch).nodes
    learned = {name: site for name, site in nodes.items() if site["type"] == "param"}
    local = {spec.name for spec in program.params if spec.is_local}
    own = [name for name in learned if name in local]
    if own:
        raise ProgramError(
            f"param '{own[0]}' of the model is local, and NUTS would need every client's value: "
            f"give it a prior"
        )
    if not learned:
        return program.model
    values = {name: params[name].detach() for name in learned}

    def held(batch: ClientBatch) -> None:
        # block outside, so that only `Answer` meets the params
        with poutine.block(hide_types=["param"]), Substitute(values, None):
            program.model(batch)

    return held


ONE_BATCH = 1 << 34  # bytes of all clients in one batch


def check_padded(data: ClientData) -> None:
    """Refuse one batch of all clients that is over 16 GB and ten times the rows themselves."""
    longest, rows = int(data.counts.max()), data.num_rows
    row_bytes = sum(v[:1].nbytes for v in data.fields.values())
    wide = longest * data.num_clients
    if wide > 10 * rows and wide * row_bytes > ONE_BATCH:
        what = f"one batch of {data.num_clients} clients is padded to the longest, {longest} rows"
        size = f"{wide * row_bytes / 2**30:.0f} GB for {rows} rows"
        fix = "use hierfl.fit, or leave the longest clients out"
        raise ValueError(f"{what}: {size}; {fix}")
