"""Bayesian R2: the share of the responses' variance that the model explains."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.process import one_at_a_time
from hierfl.effects.answer import Answer, labeled
from hierfl.effects.drawn import CoefficientDraws, Drawing, drawn
from hierfl.effects.imputed import completed
from hierfl.effects.predictor import distribution, mean_response, parameters_at, predictor
from hierfl.effects.predictor_rows import DesignRows, in_turn
from hierfl.posterior.snapshot import Snapshot

SHARES = ("conditional", "marginal")
# kind of response -> what it is, of which a share of variance means nothing
WITHOUT_VARIANCE = {
    **dict.fromkeys(("category", "ordered"), "in categories"),
    **dict.fromkeys(("counts", "shares"), "in several columns"),
    "angle": "angles",
}


@one_at_a_time
@spelled
def r2(fit: Snapshot | CoefficientDraws, **drawing: Unpack[Drawing]) -> Answer:
    """Return the Bayesian R2 of a formula, conditional on groups and marginal.

        conditional = var(mu) / (var(mu) + mean(v)),    marginal = var(mu_0) / (var(mu) + mean(v))

    At each draw mu is the expected response of each row, mu_0 that with all groups' deviations
    zero, and v the variance of the response given mu; variances and means are over the rows of all
    clients. v comes from the model, as in Gelman et al. 2019, American Statistician 73:307, section
    3; the common denominator is that of Nakagawa and Schielzeth 2013, Methods in Ecology and
    Evolution 4:133.

    Each client returns six sums over its rows at each draw.

    Args:
        fit: of a `hierfl.formula`, with the clients' rows.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        The rows `conditional`, by common columns and groups, and `marginal`, by common columns alone.

    Raises:
        TypeError: the fit is of another model.
        ValueError: the response is in categories, in several columns, or angles.
        RowsNotSaved: the rows were not saved with the fit.
    """
    draws = drawn(fit, "r2", **drawing)
    what = WITHOUT_VARIANCE.get(draws.family.kind)
    if what is not None:
        raise ValueError(
            f"a response of {draws.family.name} is {what}, which have no variance of one number: "
            "score its predictions, fit.predict(rows).scores()"
        )
    total = torch.zeros(6, draws.count, dtype=torch.float64)
    for client in range(len(draws.clients)):
        total = total + sums_of_client(draws, client)
    rows, mu, mu_square, plain, plain_square, noise = total
    fitted = mu_square / rows - (mu / rows) ** 2
    common = plain_square / rows - (plain / rows) ** 2
    shares = torch.stack([fitted, common], 1) / (fitted + noise / rows)[:, None]
    return Answer.of(
        f"Share of the variance of {draws.formula.declared.parts.response} that is explained",
        labeled(shares, {"share": SHARES}, "r2"),
        draws,
        index="share",
    )


def _without_groups(rows: DesignRows) -> DesignRows:
    """Return rows that name no group."""
    others = {name: replace(own, codes={}) for name, own in rows.of_parameters.items()}
    return replace(rows, codes={}, of_parameters=others)


def sums_of_client(draws: CoefficientDraws, client: int) -> Tensor:
    """Return a client's sums at each draw, (6, S): rows, mu, mu^2, mu_0, mu_0^2, variance of the response."""
    total = torch.zeros(6, draws.count, dtype=torch.float64)
    for some in in_turn(completed(draws, draws.data, client, client), draws.count):
        eta = predictor(draws, some, client)
        values, bare = parameters_at(draws, some, client), _without_groups(some)
        mu = mean_response(draws, eta, values, some)
        typical = parameters_at(draws, bare, None)
        plain = mean_response(draws, predictor(draws, bare, None), typical, some)
        # a Student t with nu <= 2 has an infinite variance, and torch's is nan where nu <= 1
        noise = distribution(draws, eta, values, some).variance.nan_to_num(
            nan=torch.inf, posinf=torch.inf
        )
        moments = torch.stack([torch.ones_like(mu), mu, mu**2, plain, plain**2, noise])
        total = total + (moments * some.weights).sum(-1)
    return total
