"""The terms of a PAC-Bayes bound: the empirical risk of a posterior, and its KL divergence from the prior."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.data.batch import ClientBatch
from hierfl.method import over_draws
from hierfl.posterior.client_loop import each_client
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.program import Params


@dataclass(frozen=True)
class PacBayes:
    """The terms of Eq. (9) of Vedadi et al. 2023 (after Germain et al. 2016, Theorem 3).

    Args:
        empirical_risk: mean over all rows of E_q[-log p(y | x)], nats.
        kl: of all clients' posteriors from their priors, plus that of the global sites, nats.
        rows: number of rows in the mean.
    """

    empirical_risk: float
    kl: float
    rows: int

    def bound(self, *, eta: float | None = None, delta: float = 0.05) -> float:
        """Return the right-hand side without its slack term: empirical risk + (KL + log(1 / delta)) / eta.

        With probability 1 - delta the true risk is below this plus slack / eta. The slack depends on the
        prior and the unknown distribution alone, and is finite only where the loss has exponential moments.
        With eta = rows, the part that depends on q is the negative ELBO a row. The paper's eta = 1 /
        min(gamma, tau) is infinite for its gamma = 0.

        Args:
            eta: > 0; None: the number of rows.
            delta: in (0, 1].

        Raises:
            ValueError: `eta` or `delta` is out of range.
        """
        eta = float(self.rows) if eta is None else eta
        if not eta > 0.0 or not 0.0 < delta <= 1.0:
            raise ValueError(f"eta is {eta} and delta {delta}: eta must be > 0, delta in (0, 1]")
        return self.empirical_risk + (self.kl - math.log(delta)) / eta


@one_at_a_time
def pac_bayes(fit: Snapshot, *, draws: int = 20, seed: int = 0) -> PacBayes:
    """Estimate the terms of the bound of a fit on its training rows. Each client returns two numbers.

    Args:
        fit: of labelled clients.
        draws: of the posterior to average over.
        seed: of the draws.
    """
    program, rows = fit.program, fit.federation.data.num_rows
    nll, kl, shared = 0.0, 0.0, 0.0

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Tensor:
        def terms_at(batch: ClientBatch) -> Tensor:
            terms = program.terms(params, batch)
            return torch.stack([terms.nll.sum(), terms.local_kl.sum(), terms.global_kl])

        return over_draws(terms_at, own, draws, keyed=program.keyed)

    for chunk in each_client(fit, one, seed=seed, salt="pac_bayes"):
        nll, kl = nll + float(chunk.found[:, 0].sum()), kl + float(chunk.found[:, 1].sum())
        shared = float(chunk.found[0, 2])  # the same for every client
    return PacBayes(nll / rows, kl + shared, rows)
