"""Means and standard deviations of a guide beside those of its weighted draws, number by number."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core.importance_sampling import K_HAT, Weights
from hierfl.diagnostics.check import ERRORS, LEAST_EFFECTIVE, OFF
from hierfl.posterior.corrected import LEAST_PROPOSALS, in_rounds, weights_of_rows
from hierfl.posterior.corrected import Corrected as Corrected  # hierfl.diagnostics exports both
from hierfl.posterior.corrected import corrected as corrected
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.snapshot import Snapshot
from hierfl.posterior.weights import check_density, check_labeled, weigh

Answer = Literal["good", "not good", "cannot be judged"]
INNER, MORE = 4, 2  # local draws at each global one; how many times as many in the second round
STRETCHED = 8  # local draws, of which one is kept, where they are judged given the global ones
CLIENT_DRAWS = 40_000  # clients x draws of a round, above which draws are fewer
ROUNDS = 2  # the guide's own draws, and points of a t fitted to them
FEWER = 250  # draws of a round, however many the clients
MOST_SCALARS = 5 * 10**7  # of all draws together
SMALL = 1e-9  # an sd below this share of the largest value, or of another sd, is rounding


@dataclass(frozen=True, eq=False)
class Moments:
    """A guide beside its weighted draws; without global sites, `k_hat` is the clients' worst."""

    scalars: pd.DataFrame
    k_hat: float
    effective: float
    proposals: int

    def answer(self) -> Answer:
        """Judge the guide: by k-hat, then by the effective draws, then by what is off."""
        if self.k_hat >= K_HAT:
            return "not good"
        if self.effective < LEAST_EFFECTIVE:
            return "cannot be judged"
        return "good" if self.worst() is None else "not good"

    def worst(self) -> str | None:
        """Return what is off by more than `OFF`, in words; None where nothing is."""
        n = self.scalars
        shift = n["shift"].abs()
        ratio = (n["ratio"] - 1.0).abs() + ERRORS * n["ratio"] * n["ratio_error"]
        if float(shift.max()) <= OFF and float(ratio.max()) <= OFF:
            return None
        if float(ratio.max()) >= float(shift.max()):
            row = n.loc[ratio.idxmax()]
            error = row["ratio"] * row["ratio_error"]
            return (
                f"the sd of {named(row)} is {row['ratio']:.2f} ± {error:.2f} times that of the "
                f"weighted draws"
            )
        row = n.loc[shift.idxmax()]
        return (
            f"the mean of {named(row)} is {row['shift']:+.2f} ± {row['shift_error']:.2f} sd "
            "from that of the weighted draws"
        )

    def agreement(self) -> str:
        """Return the range of the differences in words."""
        n = self.scalars
        return (
            f"means are within {n['shift'].abs().max():.2f} sd of the weighted draws', and sds are "
            f"{n['ratio'].min():.2f} to {n['ratio'].max():.2f} times theirs"
        )


def named(row: pd.Series) -> str:
    """Return a scalar as it is written in messages."""
    client = f" of client '{row['client']}'" if row["client"] else ""
    index = str(list(row["index"])) if row["index"] else ""
    return f"'{row['site']}{index}'{client}"


def without_weights(fit: Snapshot, resampled: list[str]) -> str | None:
    """Return why a guide's draws cannot be weighted, or None; `resampled` sites are at one of some points."""
    if resampled:
        return (
            f"site '{resampled[0]}' is drawn from points without a density, and the history has "
            "no k_hat or effective draws for them. Judge the fit that the points come from."
        )
    if fit.program.num_clients != len(fit.clients):
        return (
            "these clients joined after the fit, and the posterior of the global sites is that "
            "of the clients in the fit. Judge that fit."
        )
    try:
        check_labeled(fit)
        check_density(fit, shared=True)
    except ValueError as error:
        return f"{error}."
    return None


def moments_of(fit: Snapshot, proposals: int, *, seed: int) -> Moments | str:
    """Weight so many draws of a guide a round, or fewer, and compare moments; or say why not."""
    latents = fit.program.latents
    size = latents.global_block.size + latents.local_block.size * len(fit.clients)
    most = min(MOST_SCALARS // (3 * ROUNDS * size), max(CLIENT_DRAWS // len(fit.clients), FEWER))
    count = max(min(proposals, most), LEAST_PROPOSALS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the verdict says what they would
        try:
            times = ROUNDS if latents.global_block.size else 1
            how: dict[str, Any] = {"inner": INNER, "more": MORE, "rounds": times, "enough": count}
            found, weights, _, _ = in_rounds(fit, count, seed=seed, tail=-math.inf, **how)
            plain = posterior_draws(fit, draws=ROUNDS * count, seed=seed)
            given = []
            if latents.local_block.size:  # given the guide's global sites, by wider proposals
                how = {"inner": STRETCHED, "seed": seed, "stretch": True, "salt": "stretched"}
                drawn = weigh(fit, count, shared=False, **how).draws
                own = Draws({}, plain.own), Draws({}, drawn.own)
                given = [compared(fit, *own, equal_weights(count))]
        except (RuntimeError, ValueError) as error:
            return f"the draws cannot be weighted ({error})."
    total = len(found.log_shared)
    if latents.global_block.size:
        scalars = compared(fit, plain, found.draws, weights)
        scalars = pd.concat([scalars, *given], ignore_index=True)
        return Moments(scalars, weights.k_hat, weights.effective, total)
    _, k_hat, effective = weights_of_rows(found.log_own.mT)
    worst = float(k_hat.max()), float(effective.min())
    return Moments(pd.concat(given, ignore_index=True), *worst, total)


def equal_weights(count: int) -> Weights:
    """Return those of so many draws that need no correction."""
    return Weights(torch.full((count,), -math.log(count)), 0.0, float(count))


def compared(fit: Snapshot, plain: Draws, drawn: Draws, weights: Weights) -> pd.DataFrame:
    """Compare moments of the guide with weighted ones, in weighted sds, with Monte Carlo errors, by scalar."""
    share = weights.log.double().exp()
    tables = []
    for name, theirs in drawn.sites.items():
        if theirs.is_floating_point():
            names = fit.clients if name in drawn.own else None
            tables.append(_compared(name, plain.sites[name], theirs, share, names))
    return pd.concat(tables, ignore_index=True)


def _compared(
    name: str, mine: Tensor, theirs: Tensor, share: Tensor, clients: Sequence[str] | None
) -> pd.DataFrame:
    guide, target = (v.reshape(len(v), -1).double() for v in (mine, theirs))
    mean, square = share @ target, share.square()
    off = target - mean
    sd = (share @ off.square()).sqrt()
    varies = target.std(0) > SMALL * target.abs().amax(0)
    # sd is 0 if one draw has all weight
    unit = torch.maximum(sd, SMALL * target.std(0)).clamp(min=1e-300)
    z = off / unit
    own_error = guide.var(0) / unit.square() / len(guide)  # of a mean of equally weighted draws
    shift_error = (square @ z.square() + own_error).sqrt()
    own = (guide - guide.mean(0)) / guide.std(0).clamp(min=1e-300)
    of_guide = (own.square() - 1.0).square().mean(0) / len(guide)
    ratio_error = 0.5 * (square @ (z.square() - 1.0).square() + of_guide).sqrt()
    index = list(np.ndindex(tuple(theirs.shape[1:])))
    columns = {
        "site": name,
        "client": ["" if clients is None else clients[at[0]] for at in index],
        "index": [at if clients is None else at[1:] for at in index],
        "shift": ((guide.mean(0) - mean) / unit).numpy(),
        "shift_error": shift_error.numpy(),
        "ratio": (guide.std(0) / unit).numpy(),
        "ratio_error": ratio_error.numpy(),
    }
    return pd.DataFrame(columns)[varies.numpy()]


def by_site(scalars: pd.DataFrame) -> pd.DataFrame:
    """Summarize by site: how many scalars, the largest shift, the range of ratios."""
    grouped = scalars.assign(shift=scalars["shift"].abs()).groupby("site", sort=False)
    return pd.DataFrame(
        {
            "scalars": grouped.size(),
            "shift": grouped["shift"].max(),
            "ratio_min": grouped["ratio"].min(),
            "ratio_max": grouped["ratio"].max(),
            "error": grouped[["shift_error", "ratio_error"]].max().max(axis=1),
        }
    )
