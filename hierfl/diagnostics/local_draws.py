"""Whether draws of clients' own sites, given the global ones, are those of their posterior.

A method that weights its draws of the global sites z draws a client's own sites w_k from a guide
q(w_k | z). At a few z many such draws are weighted, each by an unbiased estimate of
p(y_k, w_k | z) / q(w_k | z); where the guide is right, weighted and unweighted ones have the same
means and sds. Scalars are unconstrained ones, so that a long tail does not decide.
"""

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.diagnostics.check import OWN_OFF, OWN_SHIFT, listed
from hierfl.posterior.client_loop import candidates_of, each_draw, nodes_of_rows
from hierfl.posterior.snapshot import Snapshot, lacks_rows
from hierfl.posterior.weights import already_weighted, check_density, check_labeled, over_own
from hierfl.program.program import Params
from hierfl.summaries.weights import k_hats_of

POINTS, DRAWS, FEWEST = 5, 400, 100  # draws of z; of w at each, at most and at least
ROW_DRAWS = 20_000_000  # rows x candidates of draws that are weighted, at most: a second
ERRORS = 3.0  # Monte Carlo errors by which a difference must exceed the limits


@dataclass(frozen=True, eq=False)
class LocalDraws:
    """What is known of clients' local draws."""

    k_hats: pd.Series  # by client, Pareto shape of its draws' weights, a mean over draws of z
    # site, client, `ratio` of sds and `shift` of means to weighted ones, and these by `chance`
    scalars: pd.DataFrame

    def off(self) -> str:
        """Return which clients' sites are off, and by how much, in words; "" where none is."""
        s = self.scalars
        of_sd = (s["ratio"] - 1.0).abs() - OWN_OFF
        beyond = of_sd.clip(lower=s["shift"].abs() - OWN_SHIFT) - s["chance"]
        worst = s.assign(beyond=beyond)[beyond > 0.0].sort_values("beyond", ascending=False)
        rows = worst.drop_duplicates(["client", "site"]).itertuples()
        names = [
            f"'{row.site}' of {row.client} (sd {row.ratio:.2f} times theirs, mean {row.shift:+.2f} sd)"
            for row in rows
        ]
        return listed(names) if names else ""


def local_draws(fit: Snapshot, seed: int) -> LocalDraws | None:
    """Judge the local draws of a method that weights its own; None of others, or where it takes long."""
    count = draws_of(fit)
    if not count:
        return None
    program, block = fit.program, fit.program.latents.local_block
    try:
        check_labeled(fit)
        check_density(fit, shared=False)
    except ValueError:
        return None

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
        values, _, log, *_ = over_own(program, params, own, count)
        local = {site.name: values[site.name] for site in block.sites}
        free = torch.vmap(block.flatten)(local).reshape(count, -1).double()
        share = log.double().softmax(0)
        mean = share @ free
        return {
            "log": log,
            "mean": mean,
            "variance": share @ (free - mean).square(),
            "own_mean": free.mean(0),
            "own_variance": free.var(0, correction=0),
        }

    width = count * candidates_of(program)
    chunks = each_draw(fit, one, draws=POINTS, seed=seed, width=width, salt="local")
    joined = tree_map(lambda *parts: torch.cat(parts), *[chunk.found for chunk in chunks])
    log = joined.pop("log")  # (N, P, M)
    flat = log.flatten(0, 1).double()
    effective = 1.0 / flat.softmax(1).square().sum(1)
    # where no candidate is possible, a weight is no number
    k_hats = torch.where(flat.isnan().any(1), torch.inf, k_hats_of(flat.mT))
    k_hats, effective = (v.view(log.shape[:2]).mean(1) for v in (k_hats, effective))
    index = pd.Index(fit.clients, name="client")
    by_client = pd.Series(k_hats.numpy(), index, name="k_hat")
    return LocalDraws(by_client, _scalars(fit, joined, effective))


def draws_of(fit: Snapshot) -> int:
    """Return how many local draws are weighted at each z; 0: local draws are not judged."""
    if not fit.program.latents.local_block.size or not already_weighted(fit) or lacks_rows(fit):
        return 0
    rows = POINTS * max(1, fit.federation.data.num_rows) * candidates_of(fit.program)
    count = min(DRAWS, ROW_DRAWS // rows)
    return max(FEWEST, count // nodes_of_rows(fit.program)) if count >= FEWEST else 0


def _scalars(fit: Snapshot, moments: dict[str, Tensor], effective: Tensor) -> pd.DataFrame:
    """Return the ratios of sds and the shifts of means by client and scalar."""
    sd, own_sd = (moments[name].mean(1).sqrt() for name in ("variance", "own_variance"))
    shift = (moments["own_mean"] - moments["mean"]).mean(1) / sd
    sites = [site.name for site in fit.program.latents.local_block.sites for _ in range(site.size)]
    chance = ERRORS * (POINTS * effective).rsqrt()[:, None].expand_as(sd)
    return pd.DataFrame(
        {
            "site": sites * len(fit.clients),
            "client": [name for name in fit.clients for _ in sites],
            "ratio": (own_sd / sd).flatten().numpy(),
            "shift": shift.flatten().numpy(),
            "chance": chance.flatten().numpy(),
        }
    )
