"""A fit against pooled NUTS of the same program: the check that needs all rows in one place, so for data that may be brought together."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
import pyro
import torch
from pyro import poutine
from torch.distributions import transform_to

from hierfl.posterior.corrected import corrected
from hierfl.posterior.nuts import Reference, nuts
from hierfl.program.handlers import Answer, untouched_store
from hierfl.program.program import ProgramError
from hierfl.program.sites import Model
from hierfl.program.traces import in_clients

if TYPE_CHECKING:
    from hierfl.runs.result import Fit

R_HAT = 1.05  # above it NUTS has not settled itself
FEWEST = 50  # draws that a standard deviation is taken of


@dataclass(frozen=True, eq=False)
class AgainstNuts:
    """Standardised differences between a fit and pooled NUTS.

    Args:
        table: a row a site: `numbers` in it, `mean_off` the largest and `mean_off_median` the median |difference of means| in NUTS'
            standard deviations, `sd_ratio_min` and `sd_ratio_max` of the fit's standard deviation to NUTS', NUTS' worst `r_hat`.
        entries: a row a number: site, client, index, mean, sd, nuts_mean, nuts_sd, difference (signed, in NUTS' standard
            deviations), sd_ratio.
        reference: NUTS' draws, to check another fit against.
    """

    table: pd.DataFrame
    entries: pd.DataFrame
    reference: Reference

    @property
    def verdict(self) -> str:
        """How far off, in a sentence."""
        worst = self.entries.loc[self.entries["difference"].abs().idxmax()]
        client = f" of client '{worst['client']}'" if worst["client"] else ""
        ratio = self.entries["sd_ratio"]
        return (
            f"Means are within {abs(worst['difference']):.2f} of NUTS' standard deviations (worst: '{worst['site']}'{client}; median "
            f"{self.entries['difference'].abs().median():.2f}); standard deviations are {ratio.min():.2f} to {ratio.max():.2f} of NUTS'."
        )


def against_nuts(
    fit: Fit,
    *,
    draws: int = 500,
    warmup: int = 500,
    chains: int = 2,
    seed: int = 0,
    correct: Literal["psis"] | None = None,
    reference: Reference | None = None,
) -> AgainstNuts:
    """Run NUTS on all rows together, and compare every latent site; params that the model learns are held where the fit has them.

    Args:
        fit: of labelled clients, whose rows are all here.
        draws: NUTS', a chain.
        warmup: NUTS', a chain.
        chains: NUTS'.
        seed: of both.
        correct: of the fit's draws, as `Fit.posterior`'s.
        reference: NUTS' draws of an earlier check, so that it is not run again.

    Raises:
        ValueError: fewer than 50 draws, or a reference of other sites.
        ProgramError: the model has params inside the clients plate, which no pooled program without a guide can hold.
    """
    if draws < FEWEST or chains < 1:
        raise ValueError(
            f"draws is {draws} and chains {chains}: standard deviations take {FEWEST} draws or more, of a chain or more"
        )
    federation = fit.federation
    if reference is None:
        model = _held(fit)
        reference = nuts(
            model, federation.data, draws=draws, warmup=warmup, chains=chains, seed=seed
        )
        worst = max(reference.r_hat, key=lambda site: reference.r_hat[site])
        if reference.r_hat[worst] > R_HAT:
            warnings.warn(
                f"NUTS itself has not settled: R-hat of site '{worst}' is {reference.r_hat[worst]:.2f}, above {R_HAT}. Do not judge the "
                f"fit by it; allow more warmup and draws, or write the model non-centred",
                stacklevel=2,
            )
    count = max(2000, draws * chains)
    found = (
        fit.draws(count, seed=seed) if correct is None else corrected(fit, count, seed=seed).draws
    )
    parts = []
    for site in fit.program.latents.sites:
        mine, theirs = (d.own if site.is_local else d.shared for d in (found, reference))
        if site.name not in theirs or theirs[site.name].shape[1:] != mine[site.name].shape[1:]:
            raise ValueError(
                f"the reference has no site '{site.name}' of shape {tuple(mine[site.name].shape[1:])}: it is of another fit"
            )
        values, nuts_values = mine[site.name].double().numpy(), theirs[site.name].double().numpy()
        index = list(np.ndindex(values.shape[1:]))
        mean, nuts_mean = values.mean(0).reshape(-1), nuts_values.mean(0).reshape(-1)
        sd, nuts_sd = values.std(0).reshape(-1), nuts_values.std(0).reshape(-1)
        parts.append(
            pd.DataFrame(
                {
                    "site": site.name,
                    "client": [fit.clients[at[0]] if site.is_local else "" for at in index],
                    "index": [at[1:] if site.is_local else at for at in index],
                    "mean": mean,
                    "sd": sd,
                    "nuts_mean": nuts_mean,
                    "nuts_sd": nuts_sd,
                    "difference": (mean - nuts_mean) / nuts_sd,
                    "sd_ratio": sd / nuts_sd,
                }
            )
        )
    entries = pd.concat(parts, ignore_index=True)
    by_site = entries.assign(off=entries["difference"].abs()).groupby("site", sort=False)
    table = pd.DataFrame(
        {
            "numbers": by_site.size(),
            "mean_off": by_site["off"].max(),
            "mean_off_median": by_site["off"].median(),
            "sd_ratio_min": by_site["sd_ratio"].min(),
            "sd_ratio_max": by_site["sd_ratio"].max(),
            "r_hat": pd.Series(dict(reference.r_hat)),
        }
    ).loc[[site.name for site in fit.program.latents.sites]]
    return AgainstNuts(table, entries, reference)


def _held(fit: Fit) -> Model:
    """The model with the params that it learns where the fit has them."""
    program, batch = fit.program, fit.program.prototype
    params = fit.federation.client.params(fit.message, fit.federation.client.own)
    with untouched_store(), pyro.validation_enabled(False), torch.no_grad(), Answer(params, batch):
        nodes = poutine.trace(program.model).get_trace(batch).nodes
    learned = {name: site for name, site in nodes.items() if site["type"] == "param"}
    own = [name for name, site in learned.items() if in_clients(site)]
    if own:
        raise ProgramError(
            f"param '{own[0]}' of the model is each client's own: NUTS would have to know them all; give it a prior"
        )
    if not learned:
        return program.model
    values = {}
    for name, site in learned.items():
        values[name] = transform_to(
            site["kwargs"].get("constraint", torch.distributions.constraints.real)
        )(params[name]).detach()
    held: Model = poutine.substitute(program.model, data=values)
    return held
