"""The linear predictor and mean response of rows, for one client, a new one and the average one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName, expect_kind
from hierfl.effects.drawn import EACH, NEW, CoefficientDraws
from hierfl.effects.predictor_rows import DesignRows
from hierfl.formulas.layout import GroupTerm

Who = int | Literal["new"] | None
Scale = Literal["response", "link"]
SCALES = get_args(Scale)


def predictor(draws: CoefficientDraws, rows: DesignRows, who: Who) -> Tensor:
    """Return the linear predictor at each draw, (S, n), or (S, n, O) of several.

        eta = base + offset + x . b + sum over terms with a bar of z . (deviations of its group)

    A covariate that rows lack adds its draw times what a unit of it adds to eta.
    `who` is a client's position; "new": a new client per draw, with new groups where `rows` leaves
    them open; None: only the deviations of groups that `rows` names.
    """
    eta = draws.base[:, None] + rows.offset[:, None]
    eta = eta + torch.einsum("np,spo->sno", rows.common, draws.common)
    for term in draws.layout.groups:
        deviations = _deviations(draws, rows, term, who)
        if deviations is not None:
            eta = eta + torch.einsum("nq,snqo->sno", rows.groups[term.site], deviations)
    for own in rows.lacking.values():
        step = step_of(draws, own.step, rows, who)
        eta = eta + (own.values * step)[..., None]  # families with mi() have one predictor
    return eta[..., 0] if draws.outputs == 1 else eta


def step_of(draws: CoefficientDraws, step: DesignRows, rows: DesignRows, who: Who) -> Tensor:
    """Return what a unit of a covariate adds to the linear predictor of rows, (S, n), from what it adds to columns."""
    return predictor(draws, replace(step, codes=rows.codes), who) - draws.base


def _deviations(
    draws: CoefficientDraws, rows: DesignRows, term: GroupTerm, who: Who
) -> Tensor | None:
    """Return the deviations of each row's group, (S, n, q, O); None where they are zero."""
    codes = rows.codes.get(term.site)
    if term.place in ("above", "crossed") and codes is not None:
        return draws.groups(term)[:, codes]
    if term.place == "within" and isinstance(who, int) and codes is not None:
        return draws.groups(term, who)[:, codes]
    if term.place == "clients" and isinstance(who, int):
        deviations = draws.of_client(term, who)
    elif term.place == "above" and isinstance(who, int):
        deviations = draws.groups(term)[:, draws.group_above(term, who)]
    elif who == NEW:
        deviations = draws.of_new(term)
    else:
        return None
    return deviations[:, None].expand(-1, rows.count, -1, -1)


def parameters_at(draws: CoefficientDraws, rows: DesignRows, who: Who) -> dict[str, Tensor]:
    """Return the family's parameters at each draw: (S, 1, *event), or (S, n) of one with terms."""
    values = dict(draws.parameters)
    for name, own in draws.with_terms.items():
        eta = predictor(own, rows.of_parameters[name], who)
        values[name] = eta.exp() if own.family.link == "log" else eta.sigmoid()
    if draws.layout.steps:
        values["thresholds"] = draws.thresholds(rows.common)
    return values


def distribution(
    draws: CoefficientDraws,
    eta: Tensor,
    parameters: Mapping[str, Tensor],
    rows: DesignRows | None = None,
) -> Any:
    """Return the distribution of responses at each draw, uncensored; by default of one trial."""
    needs = {}
    predictors = eta if draws.outputs == 1 else eta[..., 0]
    for name in draws.family.required:
        values = None if rows is None else rows.fields.get(name)
        values = torch.ones_like(predictors[0]) if values is None else values
        needs[name] = values.expand(predictors.shape)
    return draws.family.of(eta, **parameters, **needs)


def mean_response(
    draws: CoefficientDraws,
    eta: Tensor,
    parameters: Mapping[str, Tensor],
    rows: DesignRows | None = None,
) -> Tensor:
    """Return the expected response (of a Student t its location), (S, n), or its levels' probabilities, (S, n, K)."""
    if draws.family.name == "student":
        return eta
    fn = distribution(draws, eta, parameters, rows)
    mean: Tensor = fn.probs if draws.family.kind in ("category", "ordered") else fn.mean
    return mean


def on_scale(
    draws: CoefficientDraws, rows: DesignRows, who: Who, scale: Scale
) -> tuple[Tensor, tuple[str, ...]]:
    """Return predictors or mean responses of rows, (S, n, L), and their L levels, ("",) of a number."""
    value = predictor(draws, rows, who)
    if scale == "link" and draws.layout.steps:
        raise ValueError("a row has a predictor for each threshold of cs(): use scale='response'")
    if scale == "response":
        value = mean_response(draws, value, parameters_at(draws, rows, who))
    if value.dim() == 2:
        return value[..., None], ("",)
    levels = draws.response.levels
    return value, levels[len(levels) - value.shape[-1] :]


def asked(draws: CoefficientDraws, client: Any) -> Iterator[tuple[str, Who]]:
    """Yield, once each, the clients that a user asks for: name and position, "new", or None (the average)."""
    if client is None:
        yield "", None
        return
    if isinstance(client, str):
        if client in (NEW, EACH) and client in draws.clients:
            what = f"client is {client!r}, which is also the name of a client"
            raise ValueError(f"{what}: for that one give client=[{client!r}]")
        if client == EACH:
            yield from ((name, k) for k, name in enumerate(draws.clients))
        if client in (NEW, EACH):
            yield NEW, "new"
            return
        client = [client]
    names = "a name or a list of names, 'new', 'each' or None"
    expect_kind(client, Iterable, "client", f"give {names}")
    for name in dict.fromkeys(map(str, client)):
        if name not in draws.clients:
            there = ", ".join(draws.clients[:8]) or "nobody: they are at the nodes"
            raise NoSuchName(f"client '{name}' was not fitted here, but {there}; give {names}")
        yield name, draws.clients.index(name)
