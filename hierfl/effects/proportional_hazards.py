"""Are hazards proportional? A score test of effects that change with time, and their course.

Source: Grambsch and Therneau 1994, Biometrika 81:515, doi:10.1093/biomet/81.3.515.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from hierfl.core.arguments import NoSuchName, expect, spelled
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.effects.drawn import CoefficientDraws, drawn
from hierfl.effects.predictor import distribution, predictor
from hierfl.effects.predictor_rows import has_covariate, in_turn, rows_of_client
from hierfl.models.families.survival import hazards
from hierfl.posterior.snapshot import Snapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
Transform = Literal["km", "rank", "log", "identity"]
PROPORTIONAL = ("exponential", "weibull", "piecewise_exponential")  # families
SMALL = 0.05  # p below which hazards are said not to be proportional
ALL = "all"


@printed
@dataclass(frozen=True, eq=False)
class ProportionalHazards:
    """Whether effects on the hazard change with time.

    Args:
        title: of which times.
        frame: one row per common column, and "all": `change` of its log hazard ratio from the first
            event to the last, with `se`; `chi2`, `df` and `p` of the hypothesis of no change.
        residuals: one row per event: its `time`, and for each column the log hazard ratio about it
            (scaled Schoenfeld residuals plus the coefficient's posterior mean).
        verdict: what the tests say.
    """

    title: str
    frame: pd.DataFrame
    residuals: pd.DataFrame
    verdict: str

    def __tables__(self) -> Shown:
        return Shown(self.title, self.frame, self.verdict)

    def plot(self, term: str, ax: "Axes | None" = None) -> "Axes":
        """Draw the log hazard ratio of a column over time: events, and means of tenths of them with 90% intervals.

        Args:
            term: a row of `frame`.
            ax: axes to draw on. Default None: new ones.

        Raises:
            KeyError: there is no such column.
        """
        from hierfl.plots.effects import hazard_ratio_course, new_axes

        if term not in self.residuals or term == "time":
            columns = ", ".join(self.residuals.columns[1:])
            raise NoSuchName(f"term is {term!r}: the columns are {columns}")
        return hazard_ratio_course(new_axes(ax), self.residuals["time"], self.residuals[term], term)


@one_at_a_time
@spelled
def proportional_hazards(
    fit: Snapshot | CoefficientDraws,
    *,
    transform: Transform = "km",
    draws: int = 1000,
    seed: int = 0,
) -> ProportionalHazards:
    """Test whether the common effects on the hazard are the same at all times.

        U = sum over events k of g(t_k) (x_k - xbar(t_k)),    chi2 = U' V^-1 U

    xbar is the mean of x over the rows at risk, weighted by exp(eta), eta the posterior mean of the
    log hazard, own coefficients of clients and groups included. V is the information on a
    coefficient theta of g(t) x, given the coefficients of x; U is taken at their best values by one
    Newton step. The baseline hazard is that of Cox's partial likelihood, whatever the family's is.
    Each client returns sums over its rows at risk at each event, so the check is for rows in one
    process.

    Args:
        fit: of a `hierfl.formula` for times: exponential, weibull or piecewise_exponential.
        transform: g of time, from 0 at the first event to 1 at the last: "km" (1 less the share
            beyond), "rank" of the events, "log" or "identity".
        draws: S, of the posterior.
        seed: of the draws.

    Raises:
        TypeError: the fit is of another model.
        ValueError: the family has no proportional hazards, a parameter has terms, times are
            censored on the left or in intervals, rows lack a covariate of `mi()`, there are no
            common columns or fewer than two events; or `transform` is unknown.
        RowsNotSaved: the rows were not saved with the fit.
    """
    expect(transform=(transform, get_args(Transform)))
    coefficients = drawn(fit, "proportional_hazards", draws=draws, seed=seed)
    for reason in _why_not(coefficients):
        raise ValueError(reason)
    names = list(coefficients.layout.common.columns)
    factor = _factor(coefficients)
    clients = range(len(coefficients.clients))
    rows_of_clients = [_of_client(coefficients, client, factor) for client in clients]
    time, event, entry, weight, eta, x = map(np.concatenate, zip(*rows_of_clients, strict=True))
    course = course_of(time, event, entry, weight * np.exp(eta - eta.mean()), x, weight)
    loc = (factor * coefficients.common[..., 0]).mean(0).numpy()
    lines, residuals = score_tests(course, transform, loc)
    frame = pd.DataFrame(lines, index=[*names, ALL])
    table = pd.DataFrame(np.column_stack([course.time, residuals]), columns=["time", *names])
    of = f"{coefficients.formula.declared.parts.response}, {len(course.time)} events"
    title = f"Proportional hazards of {of}, by {transform} of time"
    return ProportionalHazards(title, frame, table, verdict(frame))


def _why_not(draws: CoefficientDraws) -> Iterator[str]:
    """Yield why hazards cannot be checked, each with what to do."""
    family = draws.family.name
    if family not in PROPORTIONAL:
        yield f"the response is {family}, whose hazards are not proportional"
    for name in draws.with_terms:
        yield f"'{name}' has terms, so that hazards are not proportional: check a fit without them"
    if not draws.clients:
        yield "clients' rows are at their nodes: the check is for rows in one process"
    if not draws.layout.common.columns:
        yield "the formula has no common columns, whose effects could be checked"
    for name in draws.formula.declared.imputed:
        if not bool(has_covariate(draws.data, name).all()):
            yield f"rows lack '{name}', which mi() imputes from their times: leave these rows out"


def _factor(draws: CoefficientDraws) -> Tensor:
    """Return what takes a linear predictor to the log hazard at each draw, (S, 1): -shape of a Weibull."""
    eta = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(draws.count, 2)
    fn, ones = hazards(distribution(draws, eta, draws.parameters)), torch.ones_like(eta)
    log_hazard = fn.log_density(ones) + fn.cumulative_hazard(ones)
    return (log_hazard[:, 1] - log_hazard[:, 0])[:, None]


def _of_client(draws: CoefficientDraws, client: int, factor: Tensor) -> tuple[Any, ...]:
    """Return a client's times, events, entries, weights, mean log hazards, (n,), and columns, (n, P)."""
    rows = rows_of_client(draws.formula, draws.data, client)
    zeros = torch.zeros(rows.count, dtype=torch.float64)
    censored, entry = (rows.fields.get(name, zeros).numpy() for name in ("cens", "entry"))
    if (censored < 0.0).any() or (censored > 1.0).any():
        raise ValueError(
            "times are left- or interval-censored: the check is for right-censored times"
        )
    blocks = in_turn(rows, draws.count)
    eta = torch.cat([(factor * predictor(draws, some, client)).mean(0) for some in blocks])
    time, weight = rows.fields["y"].numpy(), rows.weights.numpy()
    return time, censored == 0.0, entry, weight, eta.numpy(), rows.common.numpy()


# ------------------------------------------------------------ events and the rows at risk
@dataclass(frozen=True, eq=False)
class HazardCourse:
    """At each event, in order of time: x - xbar (K, P), the covariance of x at risk (K, P, P), and its weight."""

    time: Floats
    away: Floats
    spread: Floats
    weight: Floats
    beyond: Floats  # Kaplan-Meier's share beyond the time before, (K,)


def course_of(
    time: Floats, event: Any, entry: Floats, risk: Floats, x: Floats, weight: Floats
) -> HazardCourse:
    """Return what Schoenfeld's residuals are made of; `risk` is the weight of each row times its exp(eta)."""
    if len(np.unique(time[event])) < 2:
        raise ValueError("events are at fewer than two times: nothing can be seen to change")
    order = np.argsort(time[event], kind="stable")
    when, own, counted = time[event][order], x[event][order], weight[event][order]
    different, at = np.unique(when, return_inverse=True)
    means, spreads, shares = [], [], []
    for t in different:
        there = (time >= t) & (entry < t)
        share = risk[there] / risk[there].sum()
        mean = share @ x[there]
        means.append(mean)
        spreads.append((share[:, None] * x[there]).T @ x[there] - np.outer(mean, mean))
        shares.append(1.0 - counted[when == t].sum() / weight[there].sum())
    beyond = np.concatenate([[1.0], np.cumprod(shares)[:-1]])
    return HazardCourse(when, own - np.array(means)[at], np.array(spreads)[at], counted, beyond[at])


def score_tests(
    course: HazardCourse, transform: Transform, loc: Floats
) -> tuple[dict[str, Floats], Floats]:
    """Return the columns of the frame, with the test of all in the end, and scaled residuals, (K, P)."""
    transforms: dict[str, Any] = {"rank": stats.rankdata, "log": np.log, "identity": np.asarray}
    g = 1.0 - course.beyond if transform == "km" else transforms[transform](course.time)
    weight = course.weight
    g = (g - g.min()) / np.ptp(g)
    first = (weight[:, None] * course.away).sum(0)
    second = ((weight * g)[:, None] * course.away).sum(0)
    plain, once, twice = (
        np.einsum("k,kij->ij", weight * g**power, course.spread) for power in (0, 1, 2)
    )
    step = np.linalg.pinv(plain, hermitian=True)
    score = second - once @ step @ first
    info = twice - once @ step @ once
    v = np.where(np.diag(info) > 0.0, np.diag(info), np.nan)
    df = np.append(np.where(np.isnan(v), np.nan, 1.0), np.linalg.matrix_rank(info, hermitian=True))
    chi2 = np.append(score**2 / v, score @ np.linalg.pinv(info, hermitian=True) @ score)
    columns = {"change": np.append(score / v, np.nan), "se": np.append(v**-0.5, np.nan)}
    columns |= {"chi2": chi2, "df": df, "p": stats.chi2.sf(chi2, df)}
    return columns, loc + len(g) * course.away @ step


def verdict(frame: pd.DataFrame) -> str:
    """Return what the tests say."""
    p = float(frame.loc[ALL, "p"])
    small = [str(name) for name in frame.index[:-1] if frame.loc[name, "p"] < SMALL]
    if np.isnan(p):
        return "Nothing can be seen to change with time: at each event, all rows at risk are equal."
    if p >= SMALL and not small:
        return f"No effect is seen to change with time (p = {p:.2g})."
    which = ", ".join(small) or "some column"
    return (
        f"The effect of {which} changes with time (p = {p:.2g} of all): a hazard ratio is a mean over "
        "time; see .plot(term), and fit periods apart."
    )
