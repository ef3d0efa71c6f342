"""What a PAC-Bayes bound is made of: the risk that a posterior shows, and how far it is from its prior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyro
import torch

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.engine.over_clients import one_slot, over_clients, slots_of
from hierfl.method import over_draws

if TYPE_CHECKING:
    from hierfl.runs.result import Fit


@dataclass(frozen=True)
class PacBayes:
    """The parts of Eq. (9) of Vedadi et al. 2023 (after Germain et al. 2016, Theorem 3).

    Args:
        empirical_risk: mean over all rows of E_q[-log p(y | x)], nats.
        kl: of all clients' posteriors from their priors, and of the global sites' once, nats.
        rows: that the risk is a mean of.
    """

    empirical_risk: float
    kl: float
    rows: int

    def bound(self, *, eta: float | None = None, delta: float = 0.05) -> float:
        """Empirical risk + (KL + log(1 / delta)) / eta: the right-hand side, its slack term apart.

        With probability 1 - delta the true risk is below this and slack / eta; the slack depends on the prior and the unknown
        distribution alone, and is finite only where the loss has exponential moments. With eta = rows the part that depends on q
        is the negative ELBO a row; the paper's eta = 1 / min(gamma, tau) for its own gamma = 0 is infinite, and says nothing.

        Args:
            eta: > 0; None: the number of rows.
            delta: in (0, 1].

        Raises:
            ValueError: either out of range.
        """
        eta = float(self.rows) if eta is None else eta
        if not eta > 0.0 or not 0.0 < delta <= 1.0:
            raise ValueError(f"eta is {eta} and delta {delta}: eta must be > 0, delta in (0, 1]")
        return self.empirical_risk + (self.kl - math.log(delta)) / eta


def pac_bayes(fit: Fit, *, draws: int = 20, seed: int = 0) -> PacBayes:
    """The parts of the bound of a fit, on the rows that it was fitted to: a client sends two numbers.

    Args:
        fit: with labels.
        draws: of the posterior, a mean over which each part is.
        seed: of the draws.
    """
    federation, message = fit.federation, fit.message
    program, data = federation.program, federation.data
    nll, kl, shared = 0.0, 0.0, 0.0
    for ids in torch.arange(data.num_clients).split(min(federation.slots, 64)):
        batch = full_batch(data, ids, seed=seed, at=(noise.word("pac_bayes"),))
        rows, common = slots_of(batch)

        def of_client(
            own: Tree, row: Tree, batch: ClientBatch = batch, common: Tree = common
        ) -> Tree:
            params, one = federation.client.params(message, own), one_slot(row, common, batch)

            def parts(b: ClientBatch) -> torch.Tensor:
                terms = program.terms(params, b)
                return torch.stack([terms.nll.sum(), terms.local_kl.sum(), terms.global_kl])

            return over_draws(parts, one, draws, keyed=program.keyed)

        own = tree_map(lambda v, ids=ids: v[ids], fit.progress.table)
        with pyro.validation_enabled(False), torch.no_grad():
            found = over_clients(of_client, federation.at_once)(own, rows, count=len(ids))
        nll, kl, shared = (
            nll + float(found[:, 0].sum()),
            kl + float(found[:, 1].sum()),
            float(found[0, 2]),
        )
    return PacBayes(nll / data.num_rows, kl + shared, data.num_rows)
