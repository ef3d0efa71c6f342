"""The linear predictor of a regression: intercept and slopes, local or global, with priors."""

from collections.abc import Callable
from typing import Literal, TypedDict, get_args

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.data.batch import ClientBatch
from hierfl.models.likelihood import field
from hierfl.models.priors import Prior, check_scale, either, given, varying

Whose = Literal["varying", "global"]


class Coefficients(TypedDict, total=False):
    """Options of the linear predictor of `regression`, for F features and one output per class.

        eta_kn = a_k + x_kn . b_k
        a_k ~ Normal(alpha, s^2),    b_k ~ Normal(beta, t^2)  for each coefficient

    Sites, with the event shape E = () for one output and (classes,) for several:

    * `slope_loc` (beta) and `slope_scale` (t), global: (F, *E).
    * `intercept_loc` (alpha) and `intercept_scale` (s), global: E.
    * `slope` (b_k) and `intercept` (a_k), local: event shapes (F, *E) and E. With `centered=False`
      the sites are `slope_offset` and `intercept_offset`, and `slope` and `intercept` are
      deterministic.

    With "global", the coefficients are one global site, `slope` or `intercept`, with the prior of
    their loc. A prior is a distribution of one coefficient, a distribution of all of them, or a
    known number, which makes no site.

    Keys:
        intercept: "varying" (default), "global", or None for no intercept.
        slopes: "varying" (default) or "global".
        prior_loc: prior of slope_loc and intercept_loc. Default Normal(0, 2.5), for features of
            about unit scale: a prior of rstanarm (Gelman, Jakulin, Pittau and Su 2008,
            arXiv:0901.4011, argue for that scale).
        prior_scale: prior of slope_scale and intercept_scale. Default HalfNormal(1): coefficients
            of two clients rarely differ by more than 2 or 3. HalfCauchy has a longer tail;
            LogNormal avoids 0.
        intercept_loc: prior of intercept_loc alone. Default: `prior_loc`.
        intercept_scale: prior of intercept_scale alone. Default: `prior_scale`.
        centered: whether the local sites are the coefficients themselves. Default False: they are
            standardized offsets, which suits clients with few rows; see `priors.varying`.
    """

    intercept: Whose | None
    slopes: Whose
    prior_loc: Prior | None
    prior_scale: Prior | None
    intercept_loc: Prior | None
    intercept_scale: Prior | None
    centered: bool


class Predictor:
    """The linear predictor (C, B, *outputs): call it outside the clients plate, and what it returns inside."""

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
        centered: bool = False,
    ) -> None:
        expect(intercept=(intercept, (*get_args(Whose), None)), slopes=(slopes, get_args(Whose)))
        if x is None and intercept is None:
            raise ValueError(
                "x and intercept are both None: name a field of features, or keep the intercept"
            )
        self.x, self.outputs, self.centered = x, outputs, centered
        self.whose = {"intercept": intercept, "slope": slopes}
        first_loc = prior_loc if intercept_loc is None else intercept_loc
        first_scale = prior_scale if intercept_scale is None else intercept_scale
        self.loc = {"intercept": first_loc, "slope": prior_loc}
        self.scale = {"intercept": first_scale, "slope": prior_scale}
        for argument, prior in (("prior_scale", prior_scale), ("intercept_scale", intercept_scale)):
            if prior is not None:
                check_scale(argument, prior)

    def __call__(self, batch: ClientBatch) -> Callable[[], Tensor]:
        """Sample the global sites; return a function that samples local ones and predicts."""
        x = None if self.x is None else features(batch, self.x)
        slope = None if x is None else self._coefficient("slope", (x.shape[-1], *self.outputs))
        has = self.whose["intercept"] is not None
        intercept = self._coefficient("intercept", self.outputs) if has else None

        def predict() -> Tensor:
            summands = [intercept()] if intercept else []
            if x is not None and slope:
                letter = "k" * len(self.outputs)
                summands.append(torch.einsum(f"...d,...d{letter}->...{letter}", x, slope()))
            return summands[0] if len(summands) == 1 else summands[0] + summands[1]

        return predict

    def _coefficient(self, name: str, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        """Sample the global sites of one coefficient; return a function that gives it."""
        prior = either(self.loc[name], lambda: dist.Normal(0.0, 2.5))
        if self.whose[name] == "global":
            value = given(name, prior, shape)
            return lambda: value
        loc = given(f"{name}_loc", prior, shape)
        scale = given(
            f"{name}_scale", either(self.scale[name], lambda: dist.HalfNormal(1.0)), shape
        )
        return lambda: varying(name, loc, scale, centered=self.centered)


def features(batch: ClientBatch, name: str) -> Tensor:
    """Return a field as rows of features, (C, B, F), in the model's dtype."""
    x = field(batch, name)
    if x.dim() not in (2, 3):
        raise ValueError(
            f"field '{name}' has shape {tuple(x.shape[2:])} per row: "
            f"a regression needs a vector (F,) or a single number () per row"
        )
    return (x if x.dim() == 3 else x[..., None]).to(batch.counts.dtype)
