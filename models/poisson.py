"""Poisson regression with varying intercepts and slopes, and an exposure."""

from __future__ import annotations

from typing import Unpack

import pyro.distributions as dist

from hierfl.data.batch import ClientBatch
from hierfl.models.coefficients import Coefficients, Predictor
from hierfl.models.observe import field, observe
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


@recorded
def poisson(
    x: str | None = "x",
    y: str = "y",
    *,
    exposure: str | None = None,
    **coefficients: Unpack[Coefficients],
) -> Model:
    """y_kn ~ Poisson(e_kn exp(a_k + x_kn . b_k)), counts 0, 1, 2, ...

    Sites: those of `Coefficients`; the observed one, named as the field `y`.

    Args:
        x: the field of features, (D,) or () a row; None: no slopes.
        y: the field of counts.
        exposure: the field that holds e, > 0: person-years, area (an offset o is the exposure exp(o)). Default 1.
        **coefficients: as `Coefficients`.

    Raises:
        ValueError: as `Coefficients`.

    >>> poisson(slopes="global", exposure="person_years").__name__
    'poisson'
    """
    predictor = Predictor(x, **coefficients)

    def poisson(batch: ClientBatch) -> None:
        own = predictor(batch)
        at_risk = 1.0 if exposure is None else field(batch, exposure)
        with batch.clients():
            rate = at_risk * own().exp()
            with batch.data():
                observe(y, dist.Poisson(rate), batch)

    return poisson
