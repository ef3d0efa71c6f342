"""Leave-one-out predictive densities of rows or clients, without refitting.

By row it estimates p(y_i | all other rows), by client p(y_k | all other clients) with the client's
local sites integrated out. Both are ratios of evidences, means of importance weights of the guide's
draws (`hierfl.posterior.corrected`):

    p(y) = E[r],    p(y without i) = E[r / p_i],    r = p(z) / q(z) * prod_k W_k,

where p_i is the likelihood of row i at the draw, or client k's W_k. W_k is an unbiased estimate of
p(y_k | z), so r / W_k is free of it. The weights r / p_i are Pareto-smoothed.

Sources: Vehtari, Gelman and Gabry 2017, arXiv:1507.04544; for approximate posteriors, Magnusson et
al. 2019, arXiv:1904.10679; by group, Merkle, Furr and Rabe-Hesketh 2019, arXiv:1802.04452.
"""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from hierfl.core.arguments import expect, expect_count, shown
from hierfl.core.importance_sampling import K_HAT
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.user_warnings import warn
from hierfl.diagnostics.evidence import LeftOut, estimated, scored_clients, scored_rows
from hierfl.posterior.arviz_groups import rows_in_order
from hierfl.posterior.arviz_io import compared, elpd_of
from hierfl.posterior.corrected import LEAST_PROPOSALS
from hierfl.posterior.labels import observed
from hierfl.posterior.snapshot import Snapshot, expect_fit, lacks_rows, learned_params
from hierfl.posterior.weights import INNER, check_labeled

By = Literal["row", "client"]
WORST = 5  # rows or clients that are printed


@printed
@dataclass(frozen=True, eq=False)
class Loo:
    """A leave-one-out estimate.

    Args:
        by: what is left out, "row" or "client".
        elpd: expected log predictive density, summed over rows or clients, nats; higher is better.
        se: its standard error.
        p: the effective number of parameters.
        table: by row or client, `elpd`, its Monte Carlo standard error `mc_se`, and `k_hat` (from
            0.7 on trust neither: refit without that row or client); by row also `client`.
        arviz: the estimate as an ArviZ object.
        data: a hash of the labels, by which `compare` refuses fits of different data.
    """

    by: By
    elpd: float
    se: float
    p: float
    table: pd.DataFrame
    arviz: Any
    data: str

    def __tables__(self) -> Shown:
        k_hat = self.table["k_hat"]
        bad = f"{int((k_hat >= K_HAT).sum())} of {len(k_hat)} with k-hat above {K_HAT}"
        title = f"Loo(by {self.by}: elpd {self.elpd:.1f} ± {self.se:.1f}, p {self.p:.1f}, {bad})"
        worst = self.table.sort_values("k_hat", ascending=False, kind="stable").head(WORST)
        words = f"The {len(worst)} {self.by}s with the highest k-hat; .table holds all."
        return Shown(title, worst, words)


@one_at_a_time
def loo(
    fit: Snapshot,
    by: By = "row",
    *,
    site: str | None = None,
    draws: int = 2000,
    inner: int = INNER,
    correct: Literal["psis"] | None = "psis",
    seed: int = 0,
) -> Loo:
    """Estimate leave-one-out by Pareto-smoothed weights; warn where k-hat is 0.7 or more.

    Params without a prior are not refitted. By client, a model with such params is refused; by row,
    a warning says by about how much they flatter the fit.

    Args:
        fit: of labeled clients.
        by: what is left out, "row" or "client".
        site: by row, the observed site; None: the model's only one. By client, all observed sites
            count.
        draws: S draws of the guide in each round; up to three rounds are run while fewer than a
            quarter of S are effective. By client, a fit of `two_stage` uses its own draws, which
            the server stores with the clients' likelihoods: they are the same with and without
            rows.
        inner: the most draws of a client's local sites for each draw of the global ones in the
            first round; fewer if their weights hardly vary.
        correct: "psis": weight the guide's draws, so that the guide need not be the posterior.
            None: treat them as draws of the posterior, which is only as right as the guide. Draws
            of fedlaplace and two_stage are weighted already.
        seed: of the draws.

    Raises:
        ValueError: `draws` is below 100; `by` or `correct` is unknown; the rows have no labels; the
            guide has no density, or too many unknowns to weight; its draws do not vary; or, by
            client, the model learns params without a prior.
        KeyError: the model observes no such site.
    """
    expect_fit(fit)
    expect_count(inner, "inner")
    expect_count(draws, "draws", least=LEAST_PROPOSALS)  # a tail is fitted to the largest weights
    expect(by=(by, ("row", "client")), correct=(correct, ("psis", None)))
    check_labeled(fit)
    _check_learned(fit, by)
    if by == "client":
        scored = scored_clients(fit, draws, inner, correct, seed)
    else:
        scored = scored_rows(fit, fit.program.observed_site(site), draws, inner, correct, seed)
        order, _ = rows_in_order(fit.federation.data)
        weights = scored.log_weights
        weights = weights[:, order] if weights.shape[1] > 1 else weights
        scored = scored._replace(
            log_likelihood=scored.log_likelihood[:, order], log_weights=weights
        )
    likelihood = scored.log_likelihood
    if bool((likelihood == likelihood[:1]).all()):
        raise ValueError(
            f"all draws of '{fit.method.name}' are the same point, and a point estimate has no "
            f"posterior to leave a {by} out of: fit with a guide that has spread (guides.conditional, "
            f"structured, mean_field), or score held-out rows"
        )
    each = estimated(scored)
    p = each.lppd - each.elpd
    arviz = elpd_of(each.elpd, p=p, k_hat=each.k_hat, draws=len(likelihood))
    table = _table(fit, by, each)
    _warn_of_high(table, by)
    elpd, effective = float(each.elpd.sum()), float(p.sum())
    return Loo(by, elpd, float(arviz.se), effective, table, arviz, _hash(fit))


def _table(fit: Snapshot, by: By, left_out: LeftOut) -> pd.DataFrame:
    table = pd.DataFrame({"elpd": left_out.elpd, "mc_se": left_out.mc_se, "k_hat": left_out.k_hat})
    data = fit.federation.data
    if by == "client":
        table.index = pd.Index(fit.clients, name="client")
    else:
        order, labels = rows_in_order(data)
        table.index = pd.Index(labels, name="row", tupleize_cols=False)
        table.insert(0, "client", np.asarray(data.names)[data.row_client[order].numpy()])
    return table


def _check_learned(fit: Snapshot, by: By) -> None:
    """Refuse, or by row warn of, params that were fitted to what is left out."""
    specs = learned_params(fit)
    if not specs:
        return
    names = ", ".join(f"'{spec.name}'" for spec in specs[:3]) + (", ..." if len(specs) > 3 else "")
    if by == "client":
        raise ValueError(
            f"the model learns {names} from the rows of all clients and gives no prior for it, so "
            "weights cannot leave a client out: make it a latent site (pyro.sample), or "
            "refit without the client and score its rows with predict_from_prior"
        )
    count = sum(spec.start.numel() * (len(fit.clients) if spec.is_local else 1) for spec in specs)
    warn(
        f"the model learns {names} without a prior, also from the rows left out: elpd is too "
        f"high by about {count} nats, one for each scalar; make it a latent site (pyro.sample), "
        "or score held-out rows"
    )


def named_loo(name: str, fit: Snapshot, by: By, *, draws: int, seed: int) -> Loo:
    """Return `loo` of one model of several; its warnings name the model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimate = loo(fit, by, draws=draws, seed=seed)
    for warning in caught:
        warn(f"model '{name}': {warning.message}", warning.category)
    return estimate


def _warn_of_high(table: pd.DataFrame, by: By) -> None:
    bad = table.index[table["k_hat"] >= K_HAT]
    if len(bad):
        which = f"{by} '{bad[0]}'" if by == "client" else f"row {bad[0]}"
        warn(
            f"{len(bad)} of {len(table)} {by}s have a k-hat above {K_HAT} ({which}, ...): weights "
            "cannot turn draws of this guide into draws of the posterior without them; fit for "
            "more rounds or with a closer guide, or refit without them where it matters"
        )


def _hash(fit: Snapshot) -> str:
    if lacks_rows(fit):  # of the clients and their numbers of rows
        summary = repr((fit.clients, fit.federation.data.counts.tolist()))
        return hashlib.sha256(summary.encode()).hexdigest()
    labels = observed(fit, fit.federation.data)
    digest = hashlib.sha256(repr(fit.clients).encode())
    for site in sorted(labels):
        digest.update(labels[site].double().contiguous().numpy().tobytes())
    return digest.hexdigest()


def expect_named_fits(fits: Mapping[str, Any], call: str) -> None:
    """Refuse what is not a dict of two fits or more, by name."""
    if not isinstance(fits, Mapping) or len(fits) < 2:
        kind = ValueError if isinstance(fits, Mapping) else TypeError
        what = f"has {len(fits)} entries" if kind is ValueError else f"is {shown(fits)}"
        raise kind(f"fits {what}: it must be a dict of two or more, {call}({{name: fit, ...}})")


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
        By name: rank, elpd, p, elpd_diff (to the best), weight (stacking, Yao et al. 2018), se, dse
        (of the difference), and the largest k_hat: from 0.7 on trust none of the row.

    Raises:
        TypeError: `fits` is not a mapping.
        ValueError: there are fewer than two fits, they are of different data, or one leaves out
            rows and another clients; or as `loo`.
    """
    expect_named_fits(fits, "compare")
    estimates = {
        name: estimate
        if isinstance(estimate, Loo)
        else named_loo(name, estimate, by, draws=draws, seed=seed)
        for name, estimate in fits.items()
    }
    first, of_first = next(iter(estimates.items()))
    for name, estimate in estimates.items():
        if estimate.by != of_first.by:
            raise ValueError(
                f"'{first}' leaves out one {of_first.by} at a time, '{name}' one {estimate.by}: "
                f"they cannot be compared"
            )
        if estimate.data != of_first.data:
            raise ValueError(
                f"'{first}' and '{name}' are fitted to different rows: "
                f"leave-one-out compares fits of the same data"
            )
    table: pd.DataFrame = compared({name: estimate.arviz for name, estimate in estimates.items()})
    worst = {name: estimate.table["k_hat"].max() for name, estimate in estimates.items()}
    return table.assign(k_hat=[worst[name] for name in table.index])
