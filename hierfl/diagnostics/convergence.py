"""Has a run converged to the posterior? Importance weights decide; the ELBO's trend advises.

A guide is good if k-hat is low, enough draws are effective, and its moments agree with weighted
ones. The limits were tuned on random fits of known posteriors: benchmarks/CONVERGENCE.md.
"""

import math
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad, jacrev

from hierfl.core.arguments import expect_count, expect_integer
from hierfl.core.importance_sampling import K_HAT
from hierfl.core.process import double_precision, one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.data.absent import RowsNotSaved
from hierfl.data.batch import in_double
from hierfl.diagnostics.check import LEAST_EFFECTIVE, R_HAT
from hierfl.diagnostics.entries import entries_of_draws, too_far_apart, too_unsure
from hierfl.diagnostics.trend import COLUMNS, Course, course_of
from hierfl.diagnostics.weighted_moments import (
    Answer,
    Moments,
    by_site,
    moments_of,
    without_weights,
)
from hierfl.laplace.mode import client_density
from hierfl.laplace.trials import nearly_equal
from hierfl.method import WeightedDraws
from hierfl.posterior.corrected import LEAST_PROPOSALS
from hierfl.posterior.draws import posterior_draws
from hierfl.posterior.snapshot import Snapshot, expect_fit, learned_params
from hierfl.posterior.weights import ended_early, spread_levels
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Program

LOOKS = 4  # draws that show which sites the guide places at points
CLOSER = (
    "A closer guide (guides.conditional, or structured with a non-centered model) or "
    "methods.fedlaplace may do better"
)


@printed
@dataclass(frozen=True, eq=False)
class Convergence:
    """Whether a run has converged to the posterior; printed with a table of sites.

    Args:
        answer: "good", "not good" or "cannot be judged".
        verdict: why, and what to do if it is not good, in a sentence or two.
        rise: of the ELBO, or fall of the loss, from the third quarter of the rounds to the last, in
            its own units; NaN where the history shows no trend.
        error: standard error of the rise, allowing for correlation between rounds.
        noise: standard deviation of one round's estimate about the trend.
        gradient: one row per global param: `size`, the norm of the mean gradient of the negative ELBO
            at the end; `error`, its standard error; `ratio` of the two, about 1 where only noise is
            left, NaN for point estimates; `still`, whether it is below 3. Empty without a trend.
        k_hat: Pareto shape of the weights, also of those of the method itself; NaN without any.
        effective: effective number of weighted draws; NaN without weights.
        scalars: one row per scalar of a site: site, client, index, shift (signed), shift_error, ratio
            and ratio_error (relative). Empty where nothing was weighted.
    """

    answer: Answer
    verdict: str
    rise: float = math.nan
    error: float = math.nan
    noise: float = math.nan
    gradient: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=COLUMNS))
    k_hat: float = math.nan
    effective: float = math.nan
    scalars: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __tables__(self) -> Shown:
        return Shown(f"Convergence: {self.answer}", self.sites, self.verdict)

    @property
    def converged(self) -> bool:
        """Whether `answer` is "good"."""
        return self.answer == "good"

    @property
    def sites(self) -> pd.DataFrame:
        """The guide beside its weighted draws, one row per site; empty where nothing was weighted.

        `scalars` are counted; `shift` is the largest difference of means, in weighted standard
        deviations; `ratio_min` and `ratio_max` the range of the guide's standard deviation over the
        weighted one; `error` the largest Monte Carlo standard error of these.
        """
        return self.scalars if self.scalars.empty else by_site(self.scalars)


@one_at_a_time
def convergence(
    fit: Snapshot, *, draws: int = 64, seed: int = 0, proposals: int = 1000
) -> Convergence:
    """Judge a run by importance weights: from two more rounds, or those of the method itself.

    A point guide has no posterior to judge; for it, the trend of the ELBO or loss decides.

    Args:
        fit: a run of any method and length.
        draws: draws of the guide, each an estimate of the gradient at the end; 0: skip the
            gradient.
        seed: of the draws.
        proposals: draws weighted in each of two rounds, 100 or more; fewer if there are more than
            40 clients.

    Raises:
        TypeError: `fit` is not a fit, or a count is not an integer.
        ValueError: `draws` is 1 or negative, or `proposals` is below 100.
        RowsNotSaved: the rows that would be weighted were not saved with the fit.
    """
    expect_fit(fit)
    expect_integer(draws, "draws")
    expect_count(proposals, "proposals", least=LEAST_PROPOSALS)
    if draws < 0 or draws == 1:
        raise ValueError(
            f"draws is {draws}: it must be 2 or more to estimate the noise of a gradient, "
            f"or 0 to leave the gradient out"
        )
    if ended_early(fit):
        verdict = (
            f"Not good: the {fit.progress.round} rounds ended before '{fit.method.name}' had "
            f"finished. {_after_rounds(fit)}"
        )
        return Convergence("not good", verdict)
    own = _own_weights(fit)
    if own is not None:
        return Convergence(*_of_own(fit, own), k_hat=own.k_hat, effective=own.effective)
    course = course_of(fit, draws=draws, seed=seed)
    fixed, resampled = _at_points(fit)
    if fixed or not fit.program.latents.sites:
        return Convergence(*_of_point(fit, fixed, course), *course.trend)
    moments = without_weights(fit, resampled) or moments_of(fit, proposals, seed=seed)
    if isinstance(moments, str):
        verdict = f"Cannot be judged: {moments}{_advice(course)}"
        return Convergence("cannot be judged", verdict, *course.trend)
    answer, verdict = _of_weights(moments, course, corrected=fit.progress.corrected)
    learned = [spec.name for spec in learned_params(fit)]
    if learned and answer == "good":
        answer, verdict = _of_learned(learned, verdict, course)
    weights = (moments.k_hat, moments.effective, moments.scalars)
    return Convergence(answer, verdict, *course.trend, *weights)


def _after_rounds(fit: Snapshot) -> str:
    """Say what helps where rounds ended before the method had finished."""
    most = fit.method.most_rounds
    if most is None or fit.progress.round < most:
        return "Allow more rounds; it stops automatically."
    return (
        "More rounds do not help: hierfl.fit(model, data) on rows in one process switches to chains; over "
        "nodes use hierfl.methods.fedsvi(model, hierfl.guides.structured)."
    )


def judged_by_history(fit: Snapshot) -> bool:
    """Return whether the history alone decides, so that `convergence` weights no draws."""
    return ended_early(fit) or _own_weights(fit) is not None


def _own_weights(fit: Snapshot) -> WeightedDraws | None:
    """Return the draws that the method itself has weighted; None without weights."""
    return fit.federation.server.weighted(fit.progress.server)


def _at_points(fit: Snapshot) -> tuple[list[str], list[str]]:
    """Return sites that the guide places at one point, and those at one of several points."""
    if not fit.program.latents.sites:
        return [], []
    drawn, spread = posterior_draws(fit, draws=LOOKS), spread_levels(fit)
    fixed, several = [], []
    for site in fit.program.latents.sites:
        if drawn.is_fixed(site):
            fixed.append(site.name)
        elif site.is_local not in spread:
            several.append(site.name)
    return fixed, several


def _of_own(fit: Snapshot, own: WeightedDraws) -> tuple[Answer, str]:
    facts = f"k-hat is {own.k_hat:.2f}, and {own.effective:.0f} draws are effective"
    entries = entries_of_draws(fit, own)
    too_few = None if entries is None else entries.too_few()
    if fit.progress.ended is not None:
        r_hat = float(fit.progress.history[-1].get("r_hat", math.nan))
        return _of_chains(fit.progress.ended, r_hat, own.effective, too_few)
    if not own.k_hat < K_HAT:
        least = "" if entries is None else entries.least_known()
        return "not good", (
            f"Not good: by the weights of '{fit.method.name}' itself, {facts}: its approximation "
            f"misses a part of the posterior.{least} Use fedsvi with "
            "guides.conditional(shared=guides.spline_flow)."
        )
    if own.effective < LEAST_EFFECTIVE:
        return "not good", (
            f"Not good: by the weights of '{fit.method.name}' itself, {facts}, too few for a "
            "standard deviation. Allow more points or more rounds."
        )
    why = too_few or (None if entries is None else too_far_apart(own) or too_unsure(own))
    if why:
        return "not good", f"Not good: {facts}, but {why}"
    return (
        "good",
        f"Good: by the weights of '{fit.method.name}' itself, {facts}. {unseen_error(fit)}".rstrip(),
    )


def _of_chains(
    ended: str, r_hat: float, effective: float, too_few: str | None
) -> tuple[Answer, str]:
    mixing = (
        f"split R-hat is {r_hat:.2f}"
        if math.isfinite(r_hat)
        else "some chains are stuck or left a mode"
    )
    facts = f"{ended}: {mixing}, and {effective:.0f} draws are effective"
    if too_few and r_hat <= R_HAT:
        return "not good", f"Not good: by {facts}, but {too_few}"
    if r_hat <= R_HAT and effective >= LEAST_EFFECTIVE:
        return "good", f"Good: by {facts}."
    return "not good", (
        f"Not good: by {facts}: the chains have not mixed, so do not trust standard deviations and "
        "intervals. Tighten the priors, or compare with NUTS, diagnostics.against_nuts(fit)."
    )


def _of_point(fit: Snapshot, fixed: list[str], course: Course) -> tuple[Answer, str]:
    names = ", ".join(f"'{name}'" for name in fixed)
    point = (
        f"The guide places {names} at points: there is no spread, and no posterior to judge."
        if fixed
        else "The model has no latent site: there is no posterior to judge."
    )
    words = f"{course.words}. {course.fix}".rstrip()
    if course.state in ("level", "moving"):
        start = "Converged" if course.state == "level" else "Nearly converged"
        return "good", f"{start}: {words} {point}"
    if course.state == "unknown":
        return "cannot be judged", f"Cannot be judged: {words} {point}"
    if course.state == "hidden":
        return "cannot be judged", f"Undecided: {words} {point}"
    return "not good", f"Not converged: {words} {point}"


def _of_weights(moments: Moments, course: Course, *, corrected: bool) -> tuple[Answer, str]:
    answer, worst = moments.answer(), moments.worst()
    facts = (
        f"k-hat {moments.k_hat:.2f}, {moments.effective:.0f} of {moments.proposals} draws effective"
    )
    if answer == "good":
        return answer, f"Good: {moments.agreement()} ({facts}).{_more(course)}"
    if answer == "cannot be judged":
        return answer, (
            f"Cannot be judged: too few weighted draws are effective ({facts}): the guide is far "
            f"from the posterior, or there are too many unknowns for weights{_fix(course)}."
        )
    if moments.k_hat >= K_HAT or worst is None:
        why = f"Not good: the guide misses a part of the posterior ({facts})"
        return answer, f"{why}{_fix(course)}."
    if corrected:
        return "good", f"Good: the guide's draws are resampled by importance weights ({facts})."
    return answer, f"Not good: {worst} ({facts}){_fix(course, weights=True)}."


def _of_learned(learned: list[str], verdict: str, course: Course) -> tuple[Answer, str]:
    names = ", ".join(f"'{name}'" for name in learned)
    if course.state in ("level", "moving"):
        return "good", f"{verdict} This is the posterior given the learned {names}."
    answer: Answer = "cannot be judged" if course.state in ("unknown", "hidden") else "not good"
    return answer, (
        f"{answer.capitalize()}: the guide agrees with the posterior given the learned {names}, "
        "but "
        f"{course.words}. {course.fix}".rstrip()
    )


def _fix(course: Course, *, weights: bool = False) -> str:
    """Return a fix, after a semicolon; `weights`: importance weights correct the guide."""
    correct = "; fit.posterior(correct='psis') corrects the draws" if weights else ""
    if course.state in ("rising", "falling", "not finite", "hidden", "steep", "moving"):
        return f"; {course.words}. {course.fix.removesuffix('.')}{correct}"
    if course.state == "level":
        return f"; {course.words}, so more rounds will not help. {CLOSER}{correct}"
    return f". {f'{course.fix} ' if course.fix else ''}{CLOSER}{correct}"


def _advice(course: Course) -> str:
    if course.state == "unknown":
        return ""
    return f" {course.words[0].upper()}{course.words[1:]}. {course.fix}".rstrip()


def _more(course: Course) -> str:
    if course.state not in ("rising", "falling", "steep"):
        return ""
    fix = course.fix[0].lower() + course.fix[1:]
    return f" That is close enough, although {course.words}; to come closer, {fix}"


# what a program may raise that is differentiated twice, or whose rows were not saved
FAILS = (RowsNotSaved, RuntimeError, ValueError, TypeError, AttributeError, IndexError)
TRIES = 3  # random points at which the curvature must be the same
UNSEEN = (
    "These weights do not include the error of Laplace's approximation of each client's integral "
    "over its local sites, which was not checked: methods.two_stage(model) avoids it, and "
    "diagnostics.against_nuts(fit) measures it if rows may be pooled."
)


def unseen_error(fit: Snapshot) -> str:
    """Return what the weights of a method do not see, in words; "" where they see all."""
    if fit.method.name != "fedlaplace":
        return ""
    try:
        return "" if is_quadratic(fit.program) else UNSEEN
    except FAILS:
        return UNSEEN


def is_quadratic(program: Program) -> bool:
    """Test, at random points on a few rows, whether the log joint is quadratic in local sites."""
    latents = program.latents
    if not latents.local_block.size:
        return True
    with untouched_store(), unchecked(), double_precision():
        g = torch.Generator().manual_seed(0)
        batch = in_double(program.prototype)
        z = latents.global_block.start.double()
        z = z + 0.5 * torch.randn(z.shape, generator=g)
        shared = latents.global_block.unflatten(z)[0]
        density = client_density(program.model, latents.local_block, shared, batch)
        shape = (batch.num_clients, 1, latents.local_block.size)

        def total(w: Tensor) -> Tensor:
            return density(w.view(shape)).sum()

        curvature = jacrev(grad(total))
        start = latents.local_block.start.double().expand(shape).flatten()
        points = [start + torch.randn(start.shape, generator=g) for _ in range(TRIES)]
        known = curvature(start)
        return all(nearly_equal(known, curvature(w), exact=1e-6) for w in points)
