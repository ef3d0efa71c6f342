"""The fit of a program whose discrete sites all clients share: a fit for each of their values.

    p(z | y) = sum_k p(k | y) p(z | k, y),    p(k | y) proportional to p(k, y)

The evidence p(k, y) of each joint value k is estimated from the draws of its fit
(`hierfl.diagnostics.log_evidence`), so that no more is asked of clients than by these fits.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyro import poutine
from scipy.special import softmax
from torch import Tensor

from hierfl.core.arguments import expect_count
from hierfl.core.tables import Shown, printed
from hierfl.diagnostics.evidence import log_evidence
from hierfl.diagnostics.summary import Summary, summary
from hierfl.posterior.arviz_groups import EXPAND, attributes, given_groups
from hierfl.posterior.draws import Draws, samples_of
from hierfl.posterior.site_table import frame_of_draws
from hierfl.program.global_labels import GlobalLabels
from hierfl.program.program import ProgramError
from hierfl.program.sites import Model, Values
from hierfl.runs.result import Fit

MOST = 64  # joint values
NEGLIGIBLE = 1e-3  # probability below which a value's fit is not judged
WORST_FIRST = (False, None, True)  # whether to trust a fit
IMPRECISE = 0.1  # nats of Monte Carlo error in the evidence of a value that counts


@printed
@dataclass(frozen=True, eq=False)
class MixedFit:
    """Fits of a program at each value of its discrete sites of all clients, and their probabilities.

    It answers what is asked of draws. Other questions are answered by one of `fits`.

    Args:
        fits: one a joint value, in the order of `probabilities`.
        values: site -> (M, *shape), its value in each fit.
        probabilities: a row a joint value: the sites' values, `probability` given the data,
            `log_evidence` in nats with `error`, the sd of its Monte Carlo error.
    """

    fits: tuple[Fit, ...]
    values: Mapping[str, Tensor]
    probabilities: pd.DataFrame

    def __tables__(self) -> Shown:
        note = "fit.summary() shows every site, and whether to trust it; fit.fits has each value's fit."
        title = f"MixedFit({len(self.fits)} values of discrete sites)"
        return Shown(title, self.probabilities, note)

    def __getattr__(self, name: str) -> Any:
        """Refuse what one fit alone can answer."""
        if hasattr(Fit, name):
            raise AttributeError(
                f"there is no fit.{name}, since each value of discrete site '{next(iter(self.values))}' "
                f"has its own fit: use one of them, fit.fits[0].{name}, or draws, fit.posterior()"
            )
        raise AttributeError(f"MixedFit has no attribute '{name}'")

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, in the order of the data."""
        return self.fits[0].clients

    def draws(self, draws: int = 1000, *, seed: int = 0) -> Draws:
        """Draw all latent sites: `shared` site -> (S, *shape), `own` site -> (S, N, *shape)."""
        expect_count(draws, "draws")
        order = torch.from_numpy(np.random.default_rng(seed).permutation(draws))
        numbers = self._numbers(draws)
        at = torch.repeat_interleave(torch.arange(len(self.fits)), torch.tensor(numbers))
        drawn = [fit.draws(n, seed=seed) for fit, n in zip(self.fits, numbers, strict=True) if n]
        shared, own = (
            {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
            for parts in ([d.shared for d in drawn], [d.own for d in drawn])
        )
        labels = {name: value[at][order] for name, value in self.values.items()}
        return Draws({**labels, **shared}, own)

    def get_samples(self, *, draws: int = 1000, seed: int = 0) -> Values:
        """Draw all latent sites, discrete ones too, in the shapes of the program. Arguments: `Fit.get_samples`."""
        return samples_of(self.fits[0].program, self.draws(draws, seed=seed))

    def posterior(
        self,
        draws: int = 1000,
        *,
        seed: int = 0,
        var_names: Collection[str] | None = None,
        expand: int = EXPAND,
    ) -> Any:
        """Draw all latent sites, discrete ones too, in ArviZ's form. Arguments: `Fit.posterior`."""
        first = self.fits[self._likeliest]
        drawn = self.draws(draws, seed=seed)
        groups = given_groups(first, "posterior", drawn, var_names=var_names, expand=expand)
        return groups.arviz(attributes(first, seed))

    def replicate(self, rows: Any, *, draws: int = 200, seed: int = 0) -> Tensor:
        """Draw labels of some rows from the posterior predictive distribution, (S, n)."""
        parts = [
            fit.replicate(rows, draws=n, seed=seed)
            for fit, n in zip(self.fits, self._numbers(draws), strict=True)
            if n
        ]
        return torch.cat(parts)

    def summary(self, *, draws: int = 1000, seed: int = 0) -> Summary:
        """Summarize all sites, and judge the fits that count. Arguments: `Fit.summary`."""
        frame = frame_of_draws(self.fits[self._likeliest], self.draws(draws, seed=seed))
        words, trustworthy = self._verdict
        count = f"{len(self.fits)} values of discrete sites"
        title = f"{count}: {len(self.clients)} clients, {draws} draws"
        tables = (("Posterior probabilities", self.probabilities), ("Posterior", frame))
        return Summary(title, frame, words, trustworthy, tables=tables)

    @property
    def _likeliest(self) -> int:
        return int(self.probabilities["probability"].argmax())

    def _numbers(self, draws: int) -> list[int]:
        """Return the number of draws from each fit, (M,), by largest remainders."""
        shares = self.probabilities["probability"].to_numpy() * draws
        numbers = np.floor(shares).astype(int)
        largest = np.argsort(numbers - shares, kind="stable")[: draws - numbers.sum()]
        numbers[largest] += 1
        counts: list[int] = numbers.tolist()
        return counts

    @cached_property
    def _verdict(self) -> tuple[str, bool | None]:
        """Return whether all fits that count can be trusted, and their probabilities."""
        table = self.probabilities
        counts = np.flatnonzero(table["probability"] >= NEGLIGIBLE).tolist()
        judged = {k: summary(self.fits[k]) for k in counts}
        worst = min(counts, key=lambda k: WORST_FIRST.index(judged[k].trustworthy))
        if not judged[worst].trustworthy:
            words = f"{judged[worst].verdict}\nNote: this is of the fit of {self._label(worst)}."
            return words, judged[worst].trustworthy
        error = float(table["error"].iloc[counts].max())
        if len(counts) > 1 and not error <= IMPRECISE:
            return (
                f"Check before you trust it. The log evidence of a value has a Monte Carlo error of "
                f"{error:.2f} nats, so the probabilities of values are rough: fit each with more draws, "
                "methods.two_stage(pyro.poutine.condition(model, ...), draws=20000).",
                None,
            )
        words = f"Trustworthy. So is the fit of each value of probability {NEGLIGIBLE} or more."
        return words, True

    def _label(self, k: int) -> str:
        return ", ".join(f"{name} = {self.probabilities[name].iloc[k]}" for name in self.values)


def mixed_fit(model: Model, labels: GlobalLabels, fit_one: Callable[[Model, str], Fit]) -> MixedFit:
    """Fit a program at each joint value of its discrete sites of all clients.

    Raises:
        ProgramError: there are more than 64 joint values.
    """
    count = labels.count
    if count > MOST:
        raise ProgramError(
            f"the discrete sites of all clients, {', '.join(labels.sites)}, have {count:,} joint "
            f"values, and {MOST} is the limit, since each takes a fit: sample them inside "
            "batch.clients(), or let only sites outside it depend on them"
        )
    points = [dict(zip(labels.sites, point, strict=True)) for point in product(*labels.each())]
    fits = tuple(
        fit_one(poutine.condition(model, point), f"value_{k}") for k, point in enumerate(points)
    )
    evidence = pd.DataFrame([log_evidence(fit) for fit in fits])  # value and error
    values = {name: torch.stack([point[name] for point in points]) for name in labels.sites}
    table = pd.DataFrame(
        {
            **{name: value.tolist() for name, value in values.items()},
            "probability": softmax(evidence["value"]),
            "log_evidence": evidence["value"],
            "error": evidence["error"],
        }
    )
    return MixedFit(fits, values, table)
