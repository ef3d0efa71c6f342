"""Regressions with varying intercepts and slopes: one linear predictor, any response family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Unpack

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.data.batch import ClientBatch
from hierfl.models import families
from hierfl.models.coefficients import Coefficients, Predictor
from hierfl.models.families import Response, ResponseFamily
from hierfl.models.likelihood import field, observe
from hierfl.models.priors import Prior, check_scale, given, is_distribution, varying
from hierfl.program.sites import Model, recorded

UNORDERED = ("category", "counts", "shares")  # kinds of responses whose classes have no order


@recorded
def regression(
    family: str | ResponseFamily = "gaussian",
    x: str | None = "x",
    y: str = "y",
    *,
    num_classes: int | None = None,
    priors: Mapping[str, Prior | str] | None = None,
    varying: str | Collection[str] = (),
    exposure: str | None = None,
    trials: str | None = None,
    cens: str | None = None,
    upper: str | None = None,
    entry: str | None = None,
    **coefficients: Unpack[Coefficients],
) -> Model:
    """Build a regression with varying intercepts and slopes.

        eta_kn = a_k + x_kn . b_k,    y_kn ~ family(eta_kn, parameters)

    Families are those of formulas (`hierfl.models.families`): gaussian, student, lognormal, gamma,
    beta, bernoulli, binomial, beta_binomial, poisson, negative_binomial, zero_inflated_poisson,
    categorical, cumulative, exponential, weibull, piecewise_exponential.

    Gelman and Hill's radon model is `regression(slopes="global", prior_loc=Normal(0, 1))`; Rubin's
    eight schools are `regression(x=None, priors={"sigma": "sigma"}, prior_loc=Normal(0, 5),
    prior_scale=HalfCauchy(5))`.

    In "categorical" every class has coefficients, a_k (classes,) and b_k (F, classes); none is the
    reference. The likelihood does not determine their mean over the classes, the prior does.
    Compare classes by differences of coefficients. In "cumulative" and "piecewise_exponential" the
    thresholds and baseline hazards are the common intercept: the clients' intercepts vary around 0.

    Sites:

    * those of `Coefficients`.
    * the family's parameters, global: `sigma`, `shape`, `phi`, `nu`, `zi`, `thresholds`,
      `log_hazard`.
    * for a parameter in `varying`, such as "sigma", also `sigma_spread` (), global, and `log_sigma`
      (C, 1), local: log sigma_k ~ Normal(log sigma, sigma_spread^2). With `centered=False` the
      local site is `log_sigma_offset`, and `log_sigma` is deterministic.
    * the observed site, named after the field `y`.

    Args:
        family: of the response, or its name. Default "gaussian".
        x: name of the field of features, (F,) or () per row. None: no slopes.
        y: name of the field of responses. Classes and levels are codes 0 to num_classes - 1.
        num_classes: number of classes, ordered levels or parts, 2 or more; of "categorical",
            "multinomial", "dirichlet" and ordinal families alone.
        priors: parameter of the family -> its prior; or its known value; or the name of the field
            that holds each row's known value. Default: the family's own for a response of mean 1
            and sd 1, so sigma has a half-StudentT(3, 0, 2.5). A spread such as "sigma_spread" has
            HalfNormal(0.5): the sigmas of two clients rarely differ by more than a factor of 4.
        varying: positive parameters of the family that differ between clients, such as ("sigma",).
            Default none.
        exposure: name of the field that holds the exposure e > 0 of each row, such as person-years
            or area, for families with a log link: eta_kn = log e_kn + a_k + x_kn . b_k. Default
            None: e = 1.
        trials: name of the field of numbers of trials; "binomial" and "beta_binomial" need it.
        cens: name of the field of censoring codes: 0 exact, 1 right, -1 left, 2 interval.
        upper: name of the field of upper ends of intervals.
        entry: name of the field of times from which on rows were observed.
        **coefficients: the keys of `Coefficients`.

    Raises:
        ValueError: the family is unknown or has no such parameter or field; `num_classes` is
            missing, less than 2 or not used; a parameter in `varying` is not one positive number or
            is known for each row; a prior of a positive parameter allows negative values; or as for
            `Predictor`.

    >>> regression("poisson", slopes="global", exposure="person_years").__name__
    'regression'
    """
    chosen = families.named(family) if isinstance(family, str) else family
    fields = {"trials": trials, "cens": cens, "upper": upper, "entry": entry}
    additions = {name: column for name, column in fields.items() if column is not None}
    chosen.expression(additions)  # refuses those that it does not have
    if exposure is not None and chosen.link != "log":
        raise ValueError(
            f"exposure is '{exposure}', but family '{chosen.name}' has the link '{chosen.link}': "
            f"only families with a log link have an exposure"
        )
    response = _response(chosen, num_classes)
    parameters = _Parameters(
        chosen,
        response,
        dict(priors or {}),
        (varying,) if isinstance(varying, str) else tuple(varying),
    )
    predictor = _predictor(chosen, x, num_classes, response, coefficients)

    def regression(batch: ClientBatch) -> None:
        own, own_parameters = predictor(batch), parameters(batch, centered=predictor.centered)
        addition_rows = {name: field(batch, column) for name, column in additions.items()}
        log_exposure = None if exposure is None else field(batch, exposure).log()
        with batch.clients():
            eta = own()
            if log_exposure is not None:
                eta = eta + log_exposure
            if chosen.kind in UNORDERED:
                eta = eta[..., 1:] - eta[..., :1]  # the log odds of each class against the first
            values = own_parameters()
            with batch.data():
                observe(y, chosen.of(eta, **values, **addition_rows), batch)

    return regression


def _response(family: ResponseFamily, num_classes: int | None) -> Response:
    """Return a response of mean 1 and sd 1, with the levels that the family needs."""
    if family.kind not in (*UNORDERED, "ordered"):
        if num_classes is not None:
            raise ValueError(
                f"num_classes is {num_classes}, but family '{family.name}' has no classes: leave it out"
            )
        return Response(1.0, 1.0)
    if num_classes is None:
        raise ValueError(f"family '{family.name}' needs the number of classes: give num_classes=")
    expect(num_classes=(num_classes, "[2, inf)"))
    return Response(1.0, 1.0, tuple(map(str, range(num_classes))))


def _predictor(
    family: ResponseFamily,
    x: str | None,
    num_classes: int | None,
    response: Response,
    coefficients: Coefficients,
) -> Predictor:
    """Return the linear predictor, around 0 if thresholds or hazards are the intercept."""
    if not family.has_intercept:
        if coefficients.get("intercept") == "global" or "intercept_loc" in coefficients:
            (instead,) = family.parameters(response)
            raise ValueError(
                f"family '{family.name}' has '{instead}' in place of a common intercept: "
                f"leave out intercept_loc, and take intercept='varying' or None"
            )
        coefficients = {**coefficients, "intercept_loc": 0.0}
    if family.kind in UNORDERED and num_classes is not None:
        return Predictor(x, (num_classes,), **coefficients)
    size = family.outputs(response)
    return Predictor(x, () if size == 1 else (size,), **coefficients)


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a family: global sites, known values or fields; positive ones may vary."""

    family: ResponseFamily
    response: Response
    priors: Mapping[str, Prior | str]
    differ: tuple[str, ...]

    def __post_init__(self) -> None:
        defaults = self.family.parameters(self.response)
        positive = {name for name, prior in defaults.items() if _is_positive(prior)}
        spreads = {f"{name}_spread" for name in self.differ}
        if problem := next(self._problems(defaults, positive, spreads), None):
            raise ValueError(problem)
        for name, prior in self.priors.items():
            if name in positive | spreads and not isinstance(prior, str):
                check_scale(name, prior)

    def _problems(
        self, defaults: Mapping[str, Prior], positive: set[str], spreads: set[str]
    ) -> Iterator[str]:
        """Yield what the family's parameters do not allow."""
        for name in self.differ:
            if name not in positive:
                choice = _choice(self.family, positive, "positive parameter")
                yield f"varying has '{name}', but {choice}"
            if isinstance(self.priors.get(name), str):
                yield (
                    f"'{name}' is the field '{self.priors[name]}', which gives the value of each "
                    "row: it cannot be in varying"
                )
        for name, prior in self.priors.items():
            if name not in {*defaults, *spreads}:
                choice = _choice(self.family, {*defaults, *spreads}, "parameter")
                yield f"priors has '{name}', but {choice}"
            elif isinstance(prior, str) and (name in spreads or not _is_number(defaults[name])):
                yield f"'{name}' is not one number a row: give a prior or its value"

    def __call__(self, batch: ClientBatch, *, centered: bool) -> Callable[[], dict[str, Tensor]]:
        """Sample the global sites; return a function that gives the parameters inside the plate."""
        shared, spreads = {}, {}
        for name, default in self.family.parameters(self.response).items():
            prior = self.priors.get(name, default)
            shape = tuple(default.shape()) if is_distribution(default) else ()
            shared[name] = (
                field(batch, prior) if isinstance(prior, str) else given(name, prior, shape)
            )
            if name in self.differ:
                spread = self.priors.get(f"{name}_spread", dist.HalfNormal(0.5))
                assert not isinstance(spread, str)
                spreads[name] = given(f"{name}_spread", spread)
        return lambda: {
            name: varying(f"log_{name}", value.log(), spreads[name], centered=centered).exp()
            if name in spreads
            else value
            for name, value in shared.items()
        }


def _is_number(prior: Prior) -> bool:
    return is_distribution(prior) and prior.shape() == torch.Size()


def _is_positive(prior: Prior) -> bool:
    """Return whether a prior is that of one number of which all positive values are possible."""
    if not _is_number(prior) or not is_distribution(prior):
        return False
    probes = torch.tensor([-1.0, 0.5, 2.0])
    return bool(prior.support.check(probes).tolist() == [False, True, True])


def _choice(family: ResponseFamily, names: Collection[str], what: str) -> str:
    if not names:
        return f"family '{family.name}' has no {what}"
    return f"family '{family.name}' has {' and '.join(map(repr, sorted(names)))}"
