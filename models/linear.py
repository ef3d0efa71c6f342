"""Linear regression with varying intercepts and slopes, and a noise scale that is global, each client's own, or known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Unpack

import pyro.distributions as dist
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.models.coefficients import Coefficients, Predictor
from hierfl.models.observe import field, observe
from hierfl.models.priors import Prior, check_scale, either, given, varying
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


@recorded
def linear(
    x: str | None = "x",
    y: str = "y",
    *,
    noise: Literal["global", "varying"] = "global",
    noise_scale: Prior | str | None = None,
    noise_spread: Prior | None = None,
    **coefficients: Unpack[Coefficients],
) -> Model:
    """y_kn ~ Normal(a_k + x_kn . b_k, sigma^2), or sigma_k^2 with log sigma_k ~ Normal(log sigma, spread^2).

    Gelman and Hill's radon is `linear(slopes="global", prior_loc=Normal(0, 1), noise_scale=HalfNormal(1))`; Rubin's eight schools
    `linear(x=None, noise_scale="sigma", prior_loc=Normal(0, 5), prior_scale=HalfCauchy(5))`.

    Sites: those of `Coefficients`; `noise_scale` (sigma, global); with varying noise `noise_spread` (global) and `log_noise`
    (log sigma_k, local); the observed one, named as the field `y`.

    Args:
        x: the field of features, (D,) or () a row; None: no slopes.
        y: the field of labels.
        noise: "global", one sigma, or "varying", each client's own.
        noise_scale: prior of sigma, or a number where it is known, or the field that holds each row's known standard deviation.
            Default HalfNormal(1), for y of about unit scale.
        noise_spread: prior of spread. Default HalfNormal(0.5): sigmas of two clients rarely differ by more than a factor 4.
        **coefficients: as `Coefficients`.

    Raises:
        ValueError: as `Coefficients`; another word for `noise`, or varying noise whose scale is known for each row.

    >>> linear(slopes="global", centred=True).__name__
    'linear'
    """
    if noise not in ("global", "varying"):
        raise ValueError(f"noise is {noise!r}; it must be 'global' or 'varying'")
    if noise == "varying" and isinstance(noise_scale, str):
        raise ValueError(
            f"noise_scale is the field '{noise_scale}', known for each row: it cannot vary as well"
        )
    for argument, prior in (("noise_scale", noise_scale), ("noise_spread", noise_spread)):
        if prior is not None and not isinstance(prior, str):
            check_scale(argument, prior)
    predictor = Predictor(x, **coefficients)

    def sigma(batch: ClientBatch) -> Callable[[], Tensor]:
        if isinstance(noise_scale, str):
            known_scale = field(batch, noise_scale)
            return lambda: known_scale
        scale = given("noise_scale", either(noise_scale, lambda: dist.HalfNormal(1.0)))
        if noise == "global":
            return lambda: scale
        spread = given("noise_spread", either(noise_spread, lambda: dist.HalfNormal(0.5)))
        return lambda: varying("log_noise", scale.log(), spread, centred=predictor.centred).exp()

    def linear(batch: ClientBatch) -> None:
        own, own_sigma = predictor(batch), sigma(batch)
        with batch.clients():
            loc, scale = own(), own_sigma()
            with batch.data():
                observe(y, dist.Normal(loc, scale), batch)

    return linear
