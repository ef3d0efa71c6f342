"""Linear regression with varying intercepts and slopes; its noise scale is global, local or known."""

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
    """Build a linear regression with varying intercepts and slopes.

        y_kn ~ Normal(a_k + x_kn . b_k, sigma^2)

    With varying noise sigma is local: log sigma_k ~ Normal(log sigma, spread^2).

    Gelman and Hill's radon model is
    `linear(slopes="global", prior_loc=Normal(0, 1), noise_scale=HalfNormal(1))`; Rubin's eight schools are
    `linear(x=None, noise_scale="sigma", prior_loc=Normal(0, 5), prior_scale=HalfCauchy(5))`.

    Sites:

    * those of `Coefficients`.
    * `noise_scale` (), global: sigma, unless it is known.
    * with varying noise, `noise_spread` (), global, and `log_noise` (C, 1), local: log sigma_k. With
      `centered=False` the local site is `log_noise_offset`, and `log_noise` is deterministic.
    * the observed site, named after the field `y`.

    Args:
        x: name of the field of features, (F,) or () per row. None: no slopes.
        y: name of the field of labels, real numbers.
        noise: "global", one sigma for all clients, or "varying", one for each.
        noise_scale: prior of sigma, a standard deviation; or its known value > 0; or the name of the field
            that holds the known standard deviation of each row. Default HalfNormal(1), for y of about unit
            scale.
        noise_spread: prior of spread, or its known value > 0. Default HalfNormal(0.5): the sigmas of two
            clients rarely differ by more than a factor of 4.
        **coefficients: the keys of `Coefficients`.

    Raises:
        ValueError: `noise` is neither "global" nor "varying"; `noise` is "varying" and `noise_scale` is a
            field; a prior of scales allows negative values or is a number that is not > 0; or as for
            `Predictor`.

    >>> linear(slopes="global", centered=True).__name__
    'linear'
    """
    if noise not in ("global", "varying"):
        raise ValueError(f"noise is {noise!r}: it must be 'global' or 'varying'")
    if noise == "varying" and isinstance(noise_scale, str):
        raise ValueError(
            f"noise_scale is the field '{noise_scale}', which gives the noise scale of each row: "
            f"it cannot be combined with noise='varying'"
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
        return lambda: varying("log_noise", scale.log(), spread, centered=predictor.centered).exp()

    def linear(batch: ClientBatch) -> None:
        own, own_sigma = predictor(batch), sigma(batch)
        with batch.clients():
            loc, scale = own(), own_sigma()
            with batch.data():
                observe(y, dist.Normal(loc, scale), batch)

    return linear
