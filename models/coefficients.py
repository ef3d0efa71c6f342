"""What the regressions share: an intercept and slopes, each a client's own or global, and the priors above them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict, get_args

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.models.observe import field
from hierfl.models.priors import Prior, check_scale, either, given, varying

Whose = Literal["varying", "global"]


class Coefficients(TypedDict, total=False):
    """Options of every regression, of D features (and K classes, in `softmax`).

        eta_kn = a_k + x_kn . b_k,    a_k ~ Normal(alpha, s^2),    b_k ~ Normal(beta, t^2)  for each coefficient

    Sites: `slope_loc` (beta), `slope_scale` (t), `slope` (b_k), each of event shape (D,) or (D, K); `intercept_loc` (alpha),
    `intercept_scale` (s), `intercept` (a_k), of shape () or (K,); what is not centred has `slope_offset`, `intercept_offset`. A
    global coefficient is one site, `slope` or `intercept`, with the prior of its loc. A prior is a distribution of one
    coefficient or of all of them, or a number where it is known.

    Keys:
        intercept: "varying" (default), "global", or None for none.
        slopes: "varying" (default) or "global".
        prior_loc: of slope_loc and intercept_loc. Default Normal(0, 2.5), for features of about unit scale: a prior of
            rstanarm's (Gelman, Jakulin, Pittau and Su 2008, arXiv:0901.4011, argue for that scale).
        prior_scale: of slope_scale and intercept_scale. Default HalfNormal(1): coefficients of two clients rarely differ by
            more than 2 or 3. HalfCauchy has a longer tail; LogNormal stays off 0.
        intercept_loc: of intercept_loc alone; default: as `prior_loc`.
        intercept_scale: of intercept_scale alone; default: as `prior_scale`.
        centred: False (default) samples standardised offsets, better where clients have few rows; see `priors.varying`.
    """

    intercept: Whose | None
    slopes: Whose
    prior_loc: Prior | None
    prior_scale: Prior | None
    intercept_loc: Prior | None
    intercept_scale: Prior | None
    centred: bool


class Predictor:
    """The linear predictor of a regression: call it outside the clients plate, and its answer inside.

    Args:
        x: the field of features, (D,) or () a row; None: an intercept alone.
        outputs: () or (K,), the shape of a row's predictor.
        **options: of `Coefficients`.

    Raises:
        ValueError: another word than those allowed, no coefficient at all, or a prior of scales that allows negative ones.
    """

    def __init__(
        self,
        x: str | None,
        outputs: tuple[int, ...] = (),
        *,
        intercept: Whose | None = "varying",
        slopes: Whose = "varying",
        prior_loc: Prior | None = None,
        prior_scale: Prior | None = None,
        intercept_loc: Prior | None = None,
        intercept_scale: Prior | None = None,
        centred: bool = False,
    ) -> None:
        for name, value, words in (
            ("intercept", intercept, (*get_args(Whose), None)),
            ("slopes", slopes, get_args(Whose)),
        ):
            if value not in words:
                raise ValueError(
                    f"{name} is {value!r}; it must be one of {', '.join(map(repr, words))}"
                )
        if x is None and intercept is None:
            raise ValueError(
                "a regression on nothing: name a field of features, or keep the intercept"
            )
        self.x, self.outputs, self.centred, self.whose = (
            x,
            outputs,
            centred,
            {"intercept": intercept, "slope": slopes},
        )
        self.loc = {
            "intercept": prior_loc if intercept_loc is None else intercept_loc,
            "slope": prior_loc,
        }
        self.scale = {
            "intercept": prior_scale if intercept_scale is None else intercept_scale,
            "slope": prior_scale,
        }
        for argument, prior in (("prior_scale", prior_scale), ("intercept_scale", intercept_scale)):
            if prior is not None:
                check_scale(argument, prior)

    def __call__(self, batch: ClientBatch) -> Callable[[], Tensor]:
        """Sample the global sites; the answer, called inside the clients plate, the clients' own: (C, B, *outputs)."""
        x = None if self.x is None else features(batch, self.x)
        slope = None if x is None else self._coefficient("slope", (x.shape[-1], *self.outputs))
        intercept = (
            None
            if self.whose["intercept"] is None
            else self._coefficient("intercept", self.outputs)
        )

        def own() -> Tensor:
            parts = [intercept()] if intercept else []
            if x is not None and slope:
                k = "k" * len(self.outputs)
                parts.append(torch.einsum(f"...d,...d{k}->...{k}", x, slope()))
            return parts[0] if len(parts) == 1 else parts[0] + parts[1]

        return own

    def _coefficient(self, name: str, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        prior = either(self.loc[name], lambda: dist.Normal(0.0, 2.5))
        if self.whose[name] == "global":
            value = given(name, prior, shape)
            return lambda: value
        loc = given(f"{name}_loc", prior, shape)
        scale = given(
            f"{name}_scale", either(self.scale[name], lambda: dist.HalfNormal(1.0)), shape
        )
        return lambda: varying(name, loc, scale, centred=self.centred)


def features(batch: ClientBatch, name: str) -> Tensor:
    """A field as rows of features, (C, B, D), in the model's dtype; one number a row is one feature."""
    x = field(batch, name)
    if x.dim() not in (2, 3):
        raise ValueError(
            f"field '{name}' has shape {tuple(x.shape[2:])} a row: a regression needs rows of numbers, (D,) or ()"
        )
    return (x if x.dim() == 3 else x[..., None]).to(batch.counts.dtype)
