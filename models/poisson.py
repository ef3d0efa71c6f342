"""Poisson regression with varying intercepts and slopes, and with an exposure."""

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
    """Build a Poisson regression with varying intercepts and slopes.

        y_kn ~ Poisson(e_kn exp(a_k + x_kn . b_k))

    Sites: those of `Coefficients`, and the observed one, named after the field `y`.

    Args:
        x: name of the field of features, (F,) or () per row. None: no slopes.
        y: name of the field of counts 0, 1, 2, ...
        exposure: name of the field that holds the exposure e > 0, such as person-years or area. An offset o
            is the exposure exp(o). Default None: e = 1.
        **coefficients: the keys of `Coefficients`.

    Raises:
        ValueError: as for `Predictor`.

    >>> poisson(slopes="global", exposure="person_years").__name__
    'poisson'
    """
    predictor = Predictor(x, **coefficients)

    def poisson(batch: ClientBatch) -> None:
        own = predictor(batch)
        exposed = 1.0 if exposure is None else field(batch, exposure)
        with batch.clients():
            rate = exposed * own().exp()
            with batch.data():
                observe(y, dist.Poisson(rate), batch)

    return poisson
