"""What weighted draws know of each entry of the sites: distinct and effective draws, errors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hierfl.core.draw_quality import (
    END_OFF_BY_CHANCE,
    OFF_BY_CHANCE,
    DrawQuality,
    distinct_of,
    quality_of,
)
from hierfl.core.draw_quality import TAILS as TAILS_AT
from hierfl.core.importance_sampling import DOUBT, rests_on_few
from hierfl.diagnostics.check import LEAST_EFFECTIVE, OFF, Check, answered, listed
from hierfl.method import WeightedDraws
from hierfl.methods.stages.checks import UNSURE
from hierfl.posterior.draws import Draws
from hierfl.posterior.hidden_modes import may_hide_modes
from hierfl.posterior.site_table import entries_of
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.handlers import unchecked

TAILS = "Do the tails rest on enough draws?"
OF_CLIENTS = "Do the tails of the clients' own sites rest on enough draws?"
MOMENTS = "Do means and sds describe all parameters?"
# relative error of the sd of an unconstrained number, up to which its value may have a long tail:
# above it the few draws far out may be of another mode
WELL_KNOWN = 0.05
AT_ONCE = 10_000  # entries that are judged together
ERRORS_OF_ENDS = 3.0  # errors of a rough distance of draws about an end
OF_SEVERAL_MODES = (
    "and rows come from a mixture, or clients' likelihoods have no maximum of their own, or read "
    "several of a client's parameters without a linear predictor, so there may be several modes"
)
MORE_DRAWS = "methods.two_stage(model, draws=20000)"


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of sites, K in all, and what the draws know of them."""

    names: tuple[str, ...]  # (K,) with quotes, of a local site with its client
    quality: DrawQuality
    distinct: int  # the fewest values that an entry has, in single precision
    end_limit: float = END_OFF_BY_CHANCE  # largest error of an end, larger of a rough estimate
    # places of those with a long tail: the errors of their sds are no fault of the draws
    long_tailed: tuple[int, ...] = ()

    def too_few(self) -> str | None:
        """Return which draws are too few for a standard deviation, and the fix; None if none are."""
        least = int(self.quality.effective.argmin())
        effective = float(self.quality.effective[least])
        if self.distinct < LEAST_EFFECTIVE:
            return (
                f"only {self.distinct} of the draws differ: they have collapsed, and say nothing about "
                "the spread. Tighten the priors, or compare with NUTS, diagnostics.against_nuts(fit)."
            )
        if effective < LEAST_EFFECTIVE:
            return (
                f"{effective:.0f} draws are effective for {self.names[least]}, too few for a standard "
                f"deviation. Take more draws, {MORE_DRAWS}."
            )
        return None

    def _excess(self) -> torch.Tensor:
        """Return each entry's errors in units of their limits, (K,), of long tails those of the ends alone."""
        long = torch.tensor(self.long_tailed, dtype=torch.int64)
        judged = self.quality._replace(sd_error=self.quality.sd_error.index_fill(0, long, 0.0))
        return judged.excess(self.end_limit)

    def _errors(self) -> str:
        """Return the Monte Carlo errors of the entry whose tails rest on the fewest draws, in words."""
        sd, end = self.quality.sd_error, self.quality.end_error
        worst = int(self._excess().argmax())
        return (
            f"the Monte Carlo error of the sd of {self.names[worst]} is {float(sd[worst]):.0%}, "
            f"and that of its 5% and 95% points {float(end[worst]):.2f} sd"
        )

    def least_known(self) -> str:
        """Return which entry the draws know least of, as a sentence; "" where no error is finite."""
        finite = self.quality.sd_error.isfinite() & self.quality.end_error.isfinite()
        return f" At worst, {self._errors()}." if bool(finite.all()) else ""

    def tails(
        self,
        k_hat: float = 0.0,
        *,
        rest_on_few: bool = False,
        hidden: bool = False,
        question: str = TAILS,
    ) -> Check:
        """Judge the errors of sds and ends, which may rest on few draws by k-hat, or miss a `hidden` mode."""
        poor = bool((self._excess() > 1.0).any())
        if rest_on_few or hidden:
            why = (
                f"and from {DOUBT} on, tails rest on few draws" if rest_on_few else OF_SEVERAL_MODES
            )
            words = (
                f"Check the tails: k-hat is {k_hat:.2f}, {why}. At worst, {self._errors()}. A "
                "part of the posterior with little mass may be missed: "
                f"take more draws, {MORE_DRAWS}, or compare with NUTS, diagnostics.against_nuts(fit)."
            )
        elif poor:
            words = f"Check the tails: {self._errors()}. Take more draws, {MORE_DRAWS}."
        else:
            words = f"Yes: at worst, {self._errors()}."
        return answered(question, poor or rest_on_few or hidden, words, "doubt")

    def without_moments(self) -> Check:
        """Say which entries have tails so long that an sd rests on the few largest draws."""
        if not self.long_tailed:
            return Check(MOMENTS, "good", "Yes.")
        sd = self.quality.sd_error
        entries = [f"{self.names[k]} ({float(sd[k]):.0%})" for k in self.long_tailed]
        return Check(
            MOMENTS,
            "warning",
            f"A long tail: means and sds of {listed(entries)} rest on a few draws, and medians and "
            "intervals do not. In brackets is the Monte Carlo error of the sd.",
        )


def entries_of_draws(fit: Snapshot, own: WeightedDraws) -> Entries | None:
    """Judge the draws that a method has weighted, by entry as the model has them; None without draws."""
    if own.draws is None or own.log_weights is None:
        return None
    alive = own.log_weights.isfinite()
    draws, log_weights = own.draws[alive], own.log_weights[alive]
    block = fit.program.latents.global_block
    with unchecked(), torch.no_grad():
        sites = block.values_of(draws)
    names = tuple(
        f"'{name}{entry and f'[{entry}]'}'"
        for name, value in sites.items()
        for entry in entries_of(fit, name, value.shape[1:])
    )
    values = torch.cat([value.reshape(len(draws), -1) for value in sites.values()], 1)
    quality = quality_of(values, log_weights, own.share)
    known = quality_of(draws, log_weights, own.share).sd_error <= WELL_KNOWN
    sizes = torch.tensor([value[0].numel() for value in sites.values()])
    is_known = torch.stack([of.all() for of in known.split(block.sizes)]).repeat_interleave(sizes)
    is_long = is_known & (quality.sd_error > OFF_BY_CHANCE)
    long_tailed = tuple(is_long.nonzero().flatten().tolist())
    return Entries(names, quality, distinct_of(draws, log_weights), long_tailed=long_tailed)


def entries_of_clients(fit: Snapshot, drawn: Draws) -> Entries | None:
    """Judge clients' own sites by draws of equal weight, as many as the method's are effective, if it has any."""
    own = fit.federation.server.weighted(fit.progress.server)
    if own is None or not drawn.own:
        return None
    equal = torch.zeros(drawn.count, dtype=torch.float64)
    names, qualities = [], []
    for name, value in drawn.own.items():
        for client in fit.clients:
            entries = entries_of(fit, name, value.shape[2:])
            names += [f"'{name}'{entry and f', {entry},'} of {client}" for entry in entries]
        for values in value.reshape(drawn.count, -1).split(AT_ONCE, 1):
            qualities.append(quality_of(values, equal, own.effective / drawn.count))
    between = 2.0 * drawn.count * math.sqrt(TAILS_AT[0] * (1.0 - TAILS_AT[0]) / own.effective)
    limit = END_OFF_BY_CHANCE * (1.0 + ERRORS_OF_ENDS / math.sqrt(max(1.0, between)))
    quality = DrawQuality(*(torch.cat(of) for of in zip(*qualities, strict=True)))
    return Entries(tuple(names), quality, drawn.count, limit)


def too_far_apart(own: WeightedDraws) -> str | None:
    """Return that a second, wider set of draws gives another posterior; None if it gives the same."""
    if own.apart <= OFF:
        return None
    return (
        "draws from a second, wider start give another posterior: a mean or a spread differs by "
        f"{own.apart:.2f} posterior sds more than chance allows. It may have several modes: compare "
        "with NUTS, diagnostics.against_nuts(fit)."
    )


def too_unsure(own: WeightedDraws) -> str | None:
    """Return that the weights are inaccurate; None if they are accurate enough."""
    if own.error <= UNSURE:
        return None
    return (
        f"the weights are uncertain by a factor of {math.exp(own.error):.1f}: some clients' likelihoods "
        "are so far from Gaussian that integrals over their own sites are inaccurate. Give local "
        "sites tighter priors, or compare with NUTS, diagnostics.against_nuts(fit)."
    )


def checks_of_draws(fit: Snapshot) -> Iterator[Check]:
    """Check the tails of the draws that a method has weighted by itself."""
    own = fit.federation.server.weighted(fit.progress.server)
    if own is None:
        return
    entries = entries_of_draws(fit, own)
    if entries is not None and own.log_weights is not None:
        hidden = may_hide_modes(fit.program, fit.progress)
        rest_on_few = rests_on_few(own.log_weights, own.k_hat)
        yield entries.tails(own.k_hat, rest_on_few=rest_on_few, hidden=hidden)
        yield entries.without_moments()
    elif own.k_hat >= DOUBT:
        yield Check(
            TAILS,
            "warning",
            f"Check the tails: k-hat is {own.k_hat:.2f}, and from {DOUBT} on, tails rest on few draws. "
            "Allow more points, or compare with NUTS, diagnostics.against_nuts(fit).",
            "doubt",
        )
