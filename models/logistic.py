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
    """y_kn ~ Bernoulli(sigmoid(a_k + x_kn . b_k)), labels 0/1.

    Sites: those of `Coefficients`; the observed one, named as the field `y`.

    Args:
        x: the field of features, (D,) or () a row; None: no slopes.
        y: the field of labels.
        **coefficients: as `Coefficients`.

    Raises:
        ValueError: as `Coefficients`.

    >>> logistic(slopes="global", centred=True).__name__
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
