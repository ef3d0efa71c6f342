"""Survival curves of a formula's times: by client, for a new client and for the average one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.process import one_at_a_time
from hierfl.effects.conditional_effects import chosen, few, fixed
from hierfl.effects.drawn import EACH, CoefficientDraws, Drawing, Fitted, drawn
from hierfl.effects.estimates import Estimates, labeled
from hierfl.effects.predictor import asked, distribution, parameters_at, predictor
from hierfl.effects.predictor_rows import typical
from hierfl.models.families.survival import hazards

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 50  # of the default times


@dataclass(frozen=True, eq=False, repr=False)
class Survival(Estimates):
    """The probability that a time is beyond t.

    Args:
        response: the column of the times.
        by: the column of which each value has a curve of its own; None: there is none.
    """

    response: str = ""
    by: str | None = None

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the curves with bands.

        Args:
            ax: axes to draw on. Default None: new ones.
        """
        from hierfl.plots.effects import conditional_effect, new_axes

        axes = conditional_effect(
            new_axes(ax), self.frame, "time", by=self.by, label="share beyond"
        )
        axes.set(xlabel=self.response, ylim=(0.0, 1.02))
        return axes


@one_at_a_time
@spelled
def survival(
    fit: Fitted,
    *,
    by: str | None = None,
    at: Mapping[str, Any] | None = None,
    times: Sequence[float] | None = None,
    client: str | Sequence[str] | None = EACH,
    **drawing: Unpack[Drawing],
) -> Survival:
    """Return survival curves of a row at typical values, from time 0 on.

        S(t) = P(T > t) = exp(-H(t)),    H the cumulative hazard

    No rows are read. A new client's mean curve is that of a person at an unknown client.

    Args:
        fit: of a `hierfl.formula` for times: exponential, weibull, lognormal or
            piecewise_exponential.
        by: a column that the formula reads, each value of which has a curve of its own: a
            category's levels; a number's mean, and one sd below and above it. Default None.
        at: column -> value, as in `fit.effects`.
        times: 0 or later, in the unit of the response. Default None: 50 times up to twice the mean
            of the response, censored times included.
        client: as in `effects`. Default "each": every client, and a new one.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per client, value of `by` and time: `client` ("" for the average client, "new" for a
        new one), the column `by` where there is one, and `time`.

    Raises:
        TypeError: the fit is of another model.
        KeyError: the formula reads no such column; or a client was not fitted.
        ValueError: the response is no time; or a time is below 0 or not finite.
    """
    draws = drawn(fit, "survival", client=client, **drawing)
    if draws.family.kind != "time":
        raise ValueError(f"the response is {draws.family.name}, no time: fit a family of times")
    when = _checked(draws, times)
    levels = {} if by is None else {by: few(chosen(draws.formula, [by], at)[by])}
    rows = typical(draws.formula, at, levels)
    names, curves = [], []
    for name, who in asked(draws, client):
        eta = predictor(draws, rows, who)[..., None].expand(-1, -1, len(when))
        flat = eta.reshape(draws.count, -1)
        every = when.repeat(rows.count).expand_as(flat)
        values = {}
        for parameter, value in parameters_at(draws, rows, who).items():
            of_rows = parameter in draws.with_terms and value.shape[1] > 1
            values[parameter] = value.repeat_interleave(len(when), 1) if of_rows else value
        hazard: Tensor = hazards(distribution(draws, flat, values)).cumulative_hazard(every)
        names.append(name)
        curves.append(torch.exp(-hazard).reshape(eta.shape))
    response = draws.formula.declared.parts.response
    dims = {"client": names, **levels, "time": when.tolist()}
    return Survival.of(
        f"{response}: share beyond{fixed(draws.formula, levels, at)}",
        labeled(torch.stack(curves, 1), dims, response),
        draws,
        response=response,
        by=by,
    )


def _checked(draws: CoefficientDraws, times: Sequence[float] | None) -> Tensor:
    """Return the times, float64; refuse one below 0 or not finite, and none at all."""
    if times is None:
        return torch.linspace(0.0, 2.0 * draws.response.mean, POINTS, dtype=torch.float64)
    values = np.asarray(times, dtype=np.float64).reshape(-1)
    if not len(values) or not (np.isfinite(values) & (values >= 0.0)).all():
        what = f"times are {list(times)}"
        raise ValueError(f"{what}: give one or more that are finite and 0 or later")
    return torch.as_tensor(values)
