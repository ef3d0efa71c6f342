"""Leave-one-out: how well a fit would predict a row, or a client, that it had not seen, without refitting.

By row it estimates p(y_i | all other rows). By client it estimates p(y_k | all other clients) = E[p(y_k |
z)], over the posterior of the global sites z without client k, whose local sites are integrated out:

    p(y_k | z) = integral p(y_k, w | z) dw,

estimated as the mean of p(y_k, w | z) / q(w | z) over draws of the guide. Either way, draws given all data
are weighted by one over the likelihood of what is left out, and the weights are smoothed.

Sources: Vehtari, Gelman and Gabry 2017, arXiv:1507.04544; by group with the group's own effects integrated
out, Merkle, Furr and Rabe-Hesketh 2019, arXiv:1802.04452.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from torch import Tensor

from hierfl.core.importance_sampling import K_HAT, chosen
from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.posterior.arviz_io import Elpd, compared, elpd_of
from hierfl.posterior.corrected import LEAST_PROPOSALS, ROUNDS, corrected, in_rounds
from hierfl.posterior.draws import posterior_draws
from hierfl.posterior.rows import log_likelihoods, observed
from hierfl.posterior.snapshot import Snapshot
from hierfl.posterior.weights import INNER, check_labelled, weigh

By = Literal["row", "client"]


@dataclass(frozen=True, eq=False)
class Loo:
    """A leave-one-out estimate.

    Args:
        by: what is left out, "row" or "client".
        elpd: expected log predictive density, summed over rows or clients, nats; higher is better.
        se: its standard error.
        p: the effective number of parameters.
        table: by row or client, `elpd` and `k_hat` (at 0.7 or more do not trust it: refit without that row or
            client); by row also `client`.
        arviz: the estimate as an ArviZ object.
        data: a hash of the labels, by which `compare` refuses fits of different data.
    """

    by: By
    elpd: float
    se: float
    p: float
    table: pd.DataFrame
    arviz: Elpd
    data: str

    def __repr__(self) -> str:
        """The estimate, and how many k-hats are too high."""
        bad = f"{int((self.table['k_hat'] >= K_HAT).sum())} of {len(self.table)} with k-hat above {K_HAT}"
        return f"Loo(by {self.by}: elpd {self.elpd:.1f} ± {self.se:.1f}, p {self.p:.1f}, {bad})"


@one_at_a_time
def loo(
    fit: Snapshot,
    by: By = "row",
    *,
    site: str | None = None,
    draws: int = 2000,
    inner: int = INNER,
    correct: Literal["psis"] | None = None,
    seed: int = 0,
) -> Loo:
    """Estimate leave-one-out by Pareto-smoothed weights; warn where k-hat is 0.7 or more.

    Args:
        fit: of labelled clients.
        by: what is left out, "row" or "client".
        site: by row, the observed site; None: the model's only one. By client, all observed sites count.
        draws: S, of the posterior.
        inner: by client, draws of its local sites that its likelihood is averaged over.
        correct: "psis": first weight the guide's draws until they are the posterior's; None: use the guide's
            draws.
        seed: of the draws.

    Raises:
        ValueError: `draws` is below 100; `by` is neither "row" nor "client"; the rows have no labels; the
            guide's draws do not vary; or, by client, the guide's local sites have no density.
        KeyError: the model observes no such site.
    """
    if draws < LEAST_PROPOSALS:
        raise ValueError(
            f"draws is {draws}: it must be {LEAST_PROPOSALS} or more, "
            f"since a tail is fitted to the largest weights"
        )
    if by not in ("row", "client"):
        raise ValueError(f"by is {by!r}: it must be 'row' or 'client'")
    check_labelled(fit)
    likelihood = (
        _of_clients(fit, draws, inner, correct, seed)
        if by == "client"
        else _of_rows(fit, site, draws, correct, seed)
    )
    if bool((likelihood == likelihood[:1]).all()):
        raise ValueError(
            f"all draws of '{fit.method.name}' are the same point, and a point estimate has no "
            f"posterior to leave a {by} out of: fit with a guide that spreads (guides.conditional, "
            f"structured, mean_field), or score held-out rows"
        )
    found = elpd_of(likelihood.detach().double().numpy())
    table = pd.DataFrame(
        {"elpd": found.each, "k_hat": found.k_hat}, index=pd.RangeIndex(len(found.each), name="row")
    )
    data = fit.federation.data
    if by == "client":
        table.index = pd.Index(fit.clients, name="client")
    else:
        table.insert(0, "client", np.asarray(data.names)[data.row_client.numpy()])
    bad = table.index[table["k_hat"] >= K_HAT]
    if len(bad):
        which = f"{by} '{bad[0]}'" if by == "client" else f"row {bad[0]}"
        warnings.warn(
            f"{len(bad)} of {len(table)} {by}s have a k-hat above {K_HAT} ({which}, ...): without "
            f"them the posterior would differ too much for weights to follow; refit without them "
            f"where it matters",
            stacklevel=2,
        )
    return Loo(by, found.elpd, found.se, found.p, table, found, _hash(fit))


def _of_rows(fit: Snapshot, site: str | None, draws: int, correct: str | None, seed: int) -> Tensor:
    site = fit.program.observed_site(site)
    drawn = (
        posterior_draws(fit, draws=draws, seed=seed)
        if correct is None
        else corrected(fit, draws, seed=seed).draws
    )
    return log_likelihoods(fit, drawn)[site]


def _of_clients(fit: Snapshot, draws: int, inner: int, correct: str | None, seed: int) -> Tensor:
    """Estimate log p(y_k | z) at draws of z, (S, N)."""
    if correct is None:
        return weigh(fit, draws, inner=inner, seed=seed, shared=False).log_own
    found, weights, _, _ = in_rounds(
        fit, max(2 * draws, 4000), inner=inner, rounds=ROUNDS, enough=draws, seed=seed
    )
    return found.log_own[chosen(weights.log, draws)]


def _hash(fit: Snapshot) -> str:
    labels = observed(fit, fit.federation.data)
    found = hashlib.sha256(repr(fit.clients).encode())
    for site in sorted(labels):
        found.update(labels[site].double().contiguous().numpy().tobytes())
    return found.hexdigest()


def compare(
    fits: Mapping[str, Snapshot | Loo], by: By = "row", *, draws: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Compare fits of the same data by leave-one-out, the best first: `az.compare`.

    Args:
        fits: name -> a fit, or its `Loo`.
        by: what is left out, "row" or "client".
        draws: S, of each posterior.
        seed: of the draws.

    Returns:
        By name: rank, elpd, p, elpd_diff (to the best), weight (stacking, Yao et al. 2018), se, dse (of the
        difference).

    Raises:
        ValueError: there are fewer than two fits, they are of different data, or one leaves out rows and
            another clients; or as `loo`.
    """
    if len(fits) < 2:
        raise ValueError(
            f"fits has {len(fits)} entries: it must have two or more, compare({{name: fit, ...}})"
        )
    found = {
        name: one if isinstance(one, Loo) else loo(one, by, draws=draws, seed=seed)
        for name, one in fits.items()
    }
    first, of_first = next(iter(found.items()))
    for name, one in found.items():
        if one.by != of_first.by:
            raise ValueError(
                f"'{first}' leaves out one {of_first.by} at a time, '{name}' one {one.by}: "
                f"they cannot be compared"
            )
        if one.data != of_first.data:
            raise ValueError(
                f"'{first}' and '{name}' are fitted to different rows: "
                f"leave-one-out compares fits of the same data"
            )
    table: pd.DataFrame = compared({name: one.arviz for name, one in found.items()})
    return table
