"""What moves when the prior, or one client, counts more or less: power scaling, without refitting.

The posterior in which a part p counts alpha times,

    p_alpha(z | y)  ~  p(z | y) part(z)^(alpha - 1),

is that of all with the importance weights part(z)^(alpha - 1). Parts are the prior of the global
sites, and the likelihood of each client with its local sites integrated out. The derivative of a
posterior mean with respect to alpha is its covariance with log part(z), which needs no weights.

Source: Kallioinen, Paananen, Buerkner and Vehtari 2024, Statistics and Computing 34:57,
arXiv:2107.14054; of a hierarchy, they too scale the prior of the upper level alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core.importance_sampling import K_HAT
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.methods.stages.kept import Densities, Kept, rounds_of
from hierfl.posterior.site_table import entries_of
from hierfl.posterior.snapshot import Snapshot, expect_fit
from hierfl.summaries.weights import moments, smoothed

ALPHAS = (0.8, 1.25)  # as priorsense
PERCENT = 0.01
PRIOR = "prior"
SHOWN = 12  # rows that are printed


@printed
@dataclass(frozen=True, eq=False)
class Sensitivity:
    """How far posterior means of the global sites move.

    Args:
        table: by `parameter` and `part` ("prior" or a client), in posterior sds of the fit:
            `per_percent`, by how much the mean moves if the part counts 1% more, and its Monte
            Carlo standard error `error`; `at_0.8` and `at_1.25`, the same if it counts 0.8 and 1.25
            times, `sd_0.8` and `sd_1.25`, the sd in units of the fit's; `k_hat`, the larger of
            these two scalings. Of a client also `left_out`, the move without it, and `k_hat_out`.
            If a k-hat is 0.7 or more, the weights cannot tell, and the numbers are NaN: use
            `Fit.without`, or fit with the other prior. `hierfl.plots.sensitivity` draws it.
    """

    table: pd.DataFrame

    def __tables__(self) -> Shown:
        table = self.table
        far = table["per_percent"].abs()
        largest = table.loc[far.sort_values(ascending=False, kind="stable").index[:SHOWN]]
        bad = int((table["k_hat"] >= K_HAT).sum())
        note = (
            f"Posterior sds by which a mean moves. The {len(largest)} largest of {len(table)} rows; "
            f".table holds all; {bad} have a k-hat of {K_HAT} or more, and no scaled means."
        )
        return Shown("Sensitivity to the prior and to each client", largest.reset_index(), note)


@one_at_a_time
def sensitivity(fit: Snapshot) -> Sensitivity:
    """Tell which global parameter moves when the prior or a client counts more or less.

    It is computed from what the server of two_stage has stored, over nodes too: no round is run,
    and no row is read.

    Args:
        fit: a fit of `hierfl.methods.two_stage`, which `hierfl.fit` chooses for most hierarchies.
            If clients have local sites that are not Normal, only the prior is scaled.

    Raises:
        ValueError: the fit is of another method, or is not done.
        AnotherRound: there are so many clients that their log ratios are not stored one by one.
    """
    if not hasattr(fit, "federation"):  # over nodes it is no `Snapshot`
        expect_fit(fit)
    federation = fit.federation
    kept = Kept(rounds_of(fit.method, federation.program, "sensitivity"), fit.progress.server)
    found = kept.densities()
    names, values = _numbers(fit, found)
    parts = {PRIOR: found.log_prior}
    if found.log_likelihood is not None:
        places = federation.program.ranks.tolist()  # the server's order is that of names
        parts |= {n: found.log_likelihood[:, places[k]] for k, n in enumerate(fit.clients)}
    tables = [
        pd.DataFrame(_of_part(values, found.log_weights, log_p, out=part != PRIOR)).assign(
            parameter=names, part=part
        )
        for part, log_p in parts.items()
    ]
    return Sensitivity(pd.concat(tables).set_index(["parameter", "part"]))


def _numbers(fit: Snapshot, densities: Densities) -> tuple[list[str], Tensor]:
    """Return the names of the global sites' numbers, and their draws (S, P)."""
    names: list[str] = []
    columns = []
    for site in fit.federation.program.latents.global_block.sites:
        value = densities.values[site.name]
        columns.append(value.reshape(len(value), -1).double())
        entries = entries_of(fit, site.name, value.shape[1:])
        names += [f"{site.name}[{entry}]" if entry else site.name for entry in entries]
    return names, torch.cat(columns, 1)


def _of_part(
    values: Tensor, log_weights: Tensor, log_p: Tensor, *, out: bool
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns of a part whose log density is (S,), of draws (S, P)."""
    share = log_weights.exp()
    mean, sd = moments(values, log_weights)
    unit = sd.clamp(min=1e-300)
    z, away = (values - mean) / unit, (log_p - share @ log_p)[:, None]
    slope = share @ (z * away)
    error = (share.square() @ (z * away - slope).square()).sqrt()
    columns = {"per_percent": PERCENT * slope, "error": PERCENT * error}
    worst = torch.full_like(slope, -torch.inf)
    for alpha in ALPHAS:
        moved, ratio, k_hat = _scaled(values, log_weights + (alpha - 1.0) * log_p, mean, unit)
        columns |= {f"at_{alpha}": moved, f"sd_{alpha}": ratio}
        worst = worst.clamp(min=k_hat)
    columns["k_hat"] = worst
    if out:
        moved, _, k_hat = _scaled(values, log_weights - log_p, mean, unit)
        columns |= {"left_out": moved, "k_hat_out": torch.full_like(slope, k_hat)}
    return {name: column.numpy() for name, column in columns.items()}


def _scaled(
    values: Tensor, log_ratios: Tensor, mean: Tensor, unit: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Return by how many sds weighted means move, ratios of sds, and k-hat; NaN where it is high."""
    weights = smoothed(log_ratios)
    moved, sd = moments(values, weights.log)
    if weights.k_hat >= K_HAT:
        none = torch.full_like(mean, torch.nan)
        return none, none, weights.k_hat
    return (moved - mean) / unit, sd / unit, weights.k_hat
