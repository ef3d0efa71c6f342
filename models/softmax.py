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
    """Build a softmax regression with varying intercepts and slopes.

        y_kn ~ Categorical(softmax(a_k + x_kn . b_k)),    a_k (classes,),  b_k (F, classes)

    Every class has coefficients; none is the reference. The likelihood does not determine their mean over the
    classes; the prior determines it, and so all classes are treated alike. Compare classes by differences of
    coefficients.

    Sites: those of `Coefficients`, and the observed one, named after the field `y`.

    Args:
        num_classes: number of classes, 2 or more.
        x: name of the field of features, (F,) or () per row. None: no slopes.
        y: name of the field of labels, 0 to num_classes - 1.
        **coefficients: the keys of `Coefficients`.

    Raises:
        ValueError: `num_classes` is less than 2; or as for `Predictor`.

    >>> softmax(3, centered=True).__name__
    'softmax'
    """
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}: it must be 2 or more")
    predictor = Predictor(x, (num_classes,), **coefficients)

    def softmax(batch: ClientBatch) -> None:
        own = predictor(batch)
        with batch.clients():
            logits = own()
            with batch.data():
                observe(y, dist.Categorical(logits=logits), batch)

    return softmax
