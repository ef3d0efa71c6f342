"""Profiles of clients: own effects, ranks and standardized ratios, with their limits of a funnel plot.

Sources: Spiegelhalter 2005, Stat. Med. 24:1185, A.1.1; Goldstein and Spiegelhalter 1996, JRSS A 159:385; of limits
Clopper and Pearson 1934, Garwood 1936.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
import pandas as pd
import scipy  # which loads scipy.stats when it is used
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hierfl.core.arguments import NoSuchName, expect, spelled
from hierfl.core.intervals import percent, tails
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown
from hierfl.data.absent import is_absent
from hierfl.effects.drawn import CoefficientDraws, Drawing, Fitted, drawn
from hierfl.effects.estimates import Estimates, labeled, statistics
from hierfl.effects.imputed import completed
from hierfl.effects.predictor import mean_response, parameters_at, predictor
from hierfl.effects.predictor_rows import in_turn, typical

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Floats = NDArray[np.float64]
# Two-sided probability -> its name: two and three standard errors.
LIMITS = {0.95: "95%", 0.998: "99.8%"}


def ratio_interval(
    observed: float, expected: float, trials: float | None, *, prob: float
) -> tuple[float, float]:
    """Return exact limits of observed / expected: Clopper and Pearson's; without `trials` Garwood's."""
    tail = 0.5 - prob / 2
    if trials is None:
        low = scipy.stats.gamma.ppf(tail, observed) if observed else 0.0
        high = scipy.stats.gamma.ppf(1 - tail, observed + 1)
        return float(low) / expected, float(high) / expected
    low = scipy.stats.beta.ppf(tail, observed, trials - observed + 1) if observed else 0.0
    full = observed >= trials
    high = 1.0 if full else scipy.stats.beta.ppf(1 - tail, observed + 1, trials - observed)
    return float(low) * trials / expected, float(high) * trials / expected


def funnel_limits(expected: ArrayLike, rate: float | None, prob: float) -> tuple[Floats, Floats]:
    """Return limits (n,) of observed / expected at ratio 1: binomial, or Poisson for rate None."""
    at = np.asarray(expected, dtype=np.float64)
    fn = _counts(at, rate)
    limits = []
    for p in (0.5 - prob / 2, 0.5 + prob / 2):
        count = fn.ppf(p)
        above, below = fn.cdf(count), fn.cdf(count - 1)
        share = (above - p) / np.maximum(above - below, 1e-300)
        limits.append(np.maximum(count - share, 0.0) / at)
    return limits[0], limits[1]


def funnel_curves(expected: ArrayLike, rate: float | None) -> pd.DataFrame:
    """Return the limits of a funnel plot as curves: `limits`, `expected`, `low` and `high`."""
    events = np.asarray(expected, dtype=np.float64)
    at = np.geomspace(0.8 * events.min(), 1.1 * events.max(), 200)
    curves = []
    for prob, name in LIMITS.items():
        low, high = funnel_limits(at, rate, prob)
        curves.append(pd.DataFrame({"limits": name, "expected": at, "low": low, "high": high}))
    return pd.concat(curves, ignore_index=True)


def _counts(expected: Floats, rate: float | None) -> Any:
    if rate is None:
        return scipy.stats.poisson(expected)
    trials = np.maximum(np.round(expected / rate), 1.0)
    return scipy.stats.binom(trials, np.minimum(expected / trials, 1.0))


def beyond(observed: float, expected: float, rate: float | None) -> str:
    """Return the widest limits that observed / expected exceeds, or "inside"."""
    widest = "inside"
    for prob, name in LIMITS.items():
        low, high = funnel_limits([expected], rate, prob)
        if not low[0] <= observed / expected <= high[0]:
            widest = name
    return widest


RATIOS = tuple("observed expected smr smr_low smr_high ratio ratio_low ratio_high funnel".split())
COUNTED = ("bernoulli", "binomial", "poisson")  # families with a standardized ratio


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Estimates):
    """Each client's own effect, its rank, and its standardized ratio.

    Args:
        frame: one row per client: `client`; `effect` on the scale of the linear predictor, with
            `effect_sd`, `effect_low` and `effect_high`; `rank`, its posterior mean, `rank_low` and
            `rank_high`; `p_best` and `p_worst`. Of bernoulli, binomial and poisson responses also
            `observed`, `expected` under the average client, `smr` (observed / expected) with
            `smr_low` and `smr_high`, exact sampling limits; `ratio` (predicted / expected), the
            shrunk ratio of the model, with `ratio_low` and `ratio_high`; and `funnel`: "inside", or
            beyond the "95%" or "99.8%" limits. All intervals have the probability `prob`.
        rate: events expected per trial, over all clients, of bernoulli and binomial responses;
            None: counts without an upper end, or no ratio.
        draws: the draws of `effect`, of `rank` and, where there is one, of `ratio`, an
            xarray.Dataset of the dimensions `chain`, `draw` and `client`.
    """

    rate: float | None = None

    def __tables__(self) -> Shown:
        own = [name for name in self.frame if name == "client" or name not in RATIOS]
        tables = [("Effects and ranks", self.frame[own])]
        if "smr" in self.frame:
            tables.append(("Observed and expected", self.frame[["client", *RATIOS]]))
        return Shown(self.title, note=self.note, tables=tuple(tables))

    def plot_ranks(self, ax: Axes | None = None) -> Axes:
        """Draw the clients' effects with intervals, in the order of their mean ranks.

        Args:
            ax: axes to draw on. Default None: new ones.
        """
        from hierfl.plots.effects import client_ranks, new_axes
        from hierfl.plots.style import NAMED

        axes = new_axes(ax, lines=min(len(self.frame), NAMED))
        return client_ranks(axes, self.frame, percent(self.prob))

    def plot_funnel(self, ax: Axes | None = None) -> Axes:
        """Draw standardized ratios over expected events, with 95% and 99.8% limits.

        Args:
            ax: axes to draw on. Default None: new ones.

        Raises:
            ValueError: the response has no standardized ratio.
        """
        from hierfl.plots.effects import funnel, new_axes

        if "smr" not in self.frame:
            fix = f"it is for {' or '.join(COUNTED)} responses; use plot_ranks()"
            raise ValueError(f"there is no standardized ratio to draw: {fix}")
        return funnel(new_axes(ax), self.frame, funnel_curves(self.frame["expected"], self.rate))


@one_at_a_time
@spelled
def profile(
    fit: Fitted,
    column: str = "Intercept",
    *,
    best: Literal["low", "high"] = "low",
    **drawing: Unpack[Drawing],
) -> Profile:
    """Return each client's own effect, its rank, and its standardized ratio.

    The effect is how far the client's own coefficients move the linear predictor of a typical row
    (numbers at their means, categories at their reference levels) from that of the average client
    with the same columns and the same groups above it. Ranks need only draws.

    The standardized ratio needs rows. Each client returns its number of events and trials, and at
    each draw the sum of what its rows expect under the average client (all its own deviations zero)
    and under its own coefficients. These are sums over its rows; if it has few, its number of
    events reveals much about each (docs/disclosure.md). Sampling limits treat the expected events
    as known, at their posterior mean; the model's ratio includes their uncertainty.

    Args:
        fit: of a `hierfl.formula` with groups by client.
        column: "Intercept": the effect on a typical row. Or a column that has a coefficient for
            each client: how far that lies from the common one.
        best: "low" if low effects are good, as for mortality; "high" if high ones are.
        **drawing: `prob`, `draws` and `seed`.

    Raises:
        TypeError: the fit is of another model.
        KeyError: clients have no coefficient for that column.
        ValueError: the formula has no groups by client; or `best` is neither.
    """
    import xarray  # slow to import

    expect(best=(best, ("low", "high")))
    draws = drawn(fit, "profile", client=getattr(fit, "clients", None), **drawing)
    effects, prob = own_effects(draws, column), draws.prob
    frame = pd.DataFrame({"client": list(draws.clients)})
    numbers = statistics(effects, prob)
    frame["effect"] = numbers.pop("mean")
    frame = frame.assign(**{f"effect_{name}": value for name, value in numbers.items()})
    ranks = (effects if best == "low" else -effects).argsort(1).argsort(1).double() + 1.0
    frame = frame.assign(**_ranked(ranks, prob))
    of_each, rate = {"effect": effects, "rank": ranks}, None
    note = f"Rank 1 has the {'lowest' if best == 'low' else 'highest'} effect."
    counted = column == "Intercept" and draws.family.name in COUNTED
    if counted and is_absent(draws.data):
        note += " Standardized ratios are left out: they need the clients' rows."
    elif counted:
        frame, rate, of_each["ratio"] = _with_ratios(draws, frame, prob)
        note += " smr is observed / expected under the average client; ratio predicted / expected."
    what = (
        "own effect on a typical row" if column == "Intercept" else f"own coefficient of {column}"
    )
    return Profile(
        f"Clients' {what}, {percent(prob)} intervals",
        frame,
        xarray.Dataset({n: labeled(v, {"client": draws.clients}, n) for n, v in of_each.items()}),
        prob,
        draws.seed,
        note,
        rate,
    )


def own_effects(draws: CoefficientDraws, column: str) -> Tensor:
    """Return how far each client lies from the average one at each draw, (S, N), by `column`."""
    terms = draws.layout.at("clients")
    if not terms:
        raise ValueError(f"the formula has no groups by client: add (1 | {draws.formula.clients})")
    if draws.outputs > 1:
        what = f"a response of {draws.family.name} has {draws.outputs} effects per client"
        raise ValueError(f"{what}: profile one level as a bernoulli response")
    columns = [name for term in terms for name in term.columns]
    if column != "Intercept" and column not in columns:
        raise NoSuchName(f"no own coefficient of '{column}': they have {', '.join(columns)}")
    rows = typical(draws.formula, None, {})
    effects = []
    for client in range(len(draws.clients)):
        effect = torch.zeros(draws.count, dtype=torch.float64)
        for term in terms:
            own = draws.of_client(term, client)[..., 0]
            if column == "Intercept":
                effect = effect + own @ rows.groups[term.site][0]
            elif column in term.columns:
                effect = effect + own[:, term.columns.index(column)]
        effects.append(effect)
    return torch.stack(effects, 1)


def _ranked(ranks: Tensor, prob: float) -> dict[str, Any]:
    """Return mean ranks, intervals, and probabilities of first and last; rank 1 is the lowest."""
    low, high = np.quantile(ranks.numpy(), tails(prob), axis=0, method="inverted_cdf")
    return {
        "rank": ranks.mean(0).numpy(),
        "rank_low": low.astype(int),
        "rank_high": high.astype(int),
        "p_best": (ranks == 1.0).double().mean(0).numpy(),
        "p_worst": (ranks == ranks.shape[1]).double().mean(0).numpy(),
    }


def _with_ratios(
    draws: CoefficientDraws, frame: pd.DataFrame, prob: float
) -> tuple[pd.DataFrame, float | None, Tensor]:
    """Add observed and expected events and their ratios; return the rate a trial too, and draws of ratios, (S, N)."""
    records, ratios, is_bounded = [], [], draws.family.name != "poisson"
    events = trials = 0.0
    for client in range(len(draws.clients)):
        observed, size, expected, predicted = sums_of_client(draws, client)
        mean = float(expected.mean())
        low, high = ratio_interval(observed, mean, size if is_bounded else None, prob=prob)
        ratios.append(predicted / expected)
        shrunk = statistics(ratios[-1][:, None], prob)
        of_model = [float(shrunk[name][0]) for name in ("mean", "low", "high")]
        records.append((observed, mean, observed / mean, low, high, *of_model))
        events, trials = events + mean, trials + size
    rate = events / trials if is_bounded else None
    table = pd.DataFrame(records, columns=RATIOS[:-1])
    table["funnel"] = [beyond(row.observed, row.expected, rate) for row in table.itertuples()]
    return pd.concat([frame, table], axis=1), rate, torch.stack(ratios, 1)


def sums_of_client(draws: CoefficientDraws, client: int) -> tuple[float, float, Tensor, Tensor]:
    """Return a client's events, trials or rows, and events expected at each draw, (S,): average client's, own."""
    rows = completed(draws, draws.data, client, client)
    # deviations of groups within the client are its own too, and those of groups above it are not
    expected = torch.zeros(draws.count, dtype=torch.float64)
    predicted = torch.zeros(draws.count, dtype=torch.float64)
    for some in in_turn(rows, draws.count):
        for who, total in ((None, expected), (client, predicted)):
            values = parameters_at(draws, some, who)
            mean = mean_response(draws, predictor(draws, some, who), values, some)
            total += mean @ some.weights
    trials = rows.fields.get("trials", torch.ones_like(rows.weights))
    observed = float((rows.weights * rows.fields["y"]).sum())
    return observed, float((rows.weights * trials).sum()), expected, predicted
