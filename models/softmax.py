"""Softmax (multinomial logistic) regression with varying intercepts and slopes."""

from __future__ import annotations

from typing import Unpack

import pyro.distributions as dist

from hierfl.data.batch import ClientBatch
from hierfl.models.coefficients import Coefficients, Predictor
from hierfl.models.observe import observe
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


@recorded
def softmax(
    num_classes: int, x: str | None = "x", y: str = "y", **coefficients: Unpack[Coefficients]
) -> Model:
    """y_kn ~ Categorical(softmax(a_k + x_kn . b_k)), a_k (K,) and b_k (D, K), labels 0..K-1.

    Every class has coefficients, none is the reference: the likelihood leaves their mean over the classes free and the prior
    holds it, so that no class is treated unlike another. Compare classes by differences of coefficients.

    Sites: those of `Coefficients`; the observed one, named as the field `y`.

    Args:
        num_classes: K, 2 or more.
        x: the field of features, (D,) or () a row; None: no slopes.
        y: the field of labels.
        **coefficients: as `Coefficients`.

    Raises:
        ValueError: as `Coefficients`; fewer than two classes.

    >>> softmax(3, centred=True).__name__
    'softmax'
    """
    if num_classes < 2:
        raise ValueError(
            f"num_classes is {num_classes}: a softmax chooses among two classes or more"
        )
    predictor = Predictor(x, (num_classes,), **coefficients)

    def softmax(batch: ClientBatch) -> None:
        own = predictor(batch)
        with batch.clients():
            logits = own()
            with batch.data():
                observe(y, dist.Categorical(logits=logits), batch)

    return softmax
