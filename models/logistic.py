"""Logistic regression with varying intercepts and slopes."""

from __future__ import annotations

from typing import Unpack

from hierfl.data.batch import ClientBatch
from hierfl.models.coefficients import Coefficients, Predictor
from hierfl.models.likelihood import Bernoulli
from hierfl.models.observe import observe
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


@recorded
def logistic(x: str | None = "x", y: str = "y", **coefficients: Unpack[Coefficients]) -> Model:
    """Build a logistic regression with varying intercepts and slopes.

        y_kn ~ Bernoulli(sigmoid(a_k + x_kn . b_k))

    Sites: those of `Coefficients`, and the observed one, named after the field `y`.

    Args:
        x: name of the field of features, (F,) or () per row. None: no slopes.
        y: name of the field of labels, 0 or 1, of any dtype.
        **coefficients: the keys of `Coefficients`.

    Raises:
        ValueError: as for `Predictor`.

    >>> logistic(slopes="global", centered=True).__name__
    'logistic'
    """
    predictor = Predictor(x, **coefficients)

    def logistic(batch: ClientBatch) -> None:
        own = predictor(batch)
        with batch.clients():
            logits = own()
            with batch.data():
                observe(y, Bernoulli(logits=logits), batch)

    return logistic
