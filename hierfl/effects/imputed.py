"""What rows lack of the covariates of mi(): their draws given the response, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.noise import client_keys, fold, normals, root_key, uniforms, word
from hierfl.core.process import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.effects.drawn import CoefficientDraws, Drawing, drawn
from hierfl.effects.estimates import Estimates, labeled, statistics
from hierfl.effects.predictor import parameters_at, predictor, step_of
from hierfl.effects.predictor_rows import (
    DesignRows,
    Lacking,
    data_of,
    has_covariate,
    in_turn,
    rows_of_client,
    step_of_client,
)
from hierfl.formulas.formula import Frames
from hierfl.models.families.over_normal import FINE, OverNormal
from hierfl.posterior.snapshot import Snapshot

COLUMNS = ("row", "client", "column", "mean", "sd", "low", "high")  # of a table
IN_CACHE = 400_000  # points x draws x rows whose densities are held at once


class NothingMissing(ValueError):
    """All rows have the covariates of `mi()`."""


@one_at_a_time
@spelled
def imputed(
    fit: Snapshot | CoefficientDraws,
    newdata: Frames | Literal["rows"] = "rows",
    **drawing: Unpack[Drawing],
) -> Estimates:
    """Return the posterior of each missing value of the covariates of `mi()`, brms's `Ymi`.

        p(x | y, rest) ~ p(y | eta + step x) Normal(x; eta_x, sigma_x)

    At each draw of the parameters a row's value is drawn from this density: in closed form where
    the response is Normal or log-normal and not censored, and else by its inverse distribution
    function on a grid of the linear predictor (sds are up to 0.2% too large). Several values that
    one row lacks are drawn together. This needs the clients' rows: over nodes, each node computes
    its own table.

    Args:
        fit: of a `hierfl.formula` with `mi()`, with the clients' rows.
        newdata: frames of fitted clients, as `hierfl.fit` takes them. Without the column of the
            response, only the covariates say what x is. Default "rows": those of the fit.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per missing value: `row`, the label of the row in its frame (its position where
        labels repeat), `client` and `column`; a covariate's rows stand together, in the order of the
        frame. The draws have the dimension `value`, with these coordinates.

    Raises:
        TypeError: the fit is of another model.
        KeyError: a client of `newdata` was not fitted.
        ValueError: the formula has no `mi()`; or no row lacks a value.
        RowsNotSaved: `newdata` is "rows", and the rows were not saved with the fit.
    """
    draws = drawn(fit, "imputed", **drawing)
    formula, names = draws.formula, draws.formula.declared.imputed
    if not names:
        fix = "write mi(x) for a covariate x, and 'x | mi() ~ z' for what it depends on"
        raise ValueError(f"the formula '{formula.text}' imputes nothing: {fix}")
    data = draws.data
    if not isinstance(newdata, str):
        data = data_of(formula, newdata)[0]
    elif newdata != "rows":
        raise ValueError(f"newdata is {newdata!r}: give 'rows', of the fit, or frames of clients")
    values: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    for place, client in enumerate(data.names):
        rows = completed(draws, data, place, draws.position(client))
        for name, of in rows.lacking.items():
            at = of.gone.nonzero()[:, 0]
            values[name].append((at + data.offsets[place], of.values[:, at]))
    return _tabled(draws, data, {name: some for name, some in values.items() if some})


def _tabled(
    draws: CoefficientDraws,
    data: ClientData,
    drawn_values: Mapping[str, list[tuple[Tensor, Tensor]]],
) -> Estimates:
    names = draws.formula.declared.imputed
    if not drawn_values:
        raise NothingMissing(f"all rows have {' and '.join(names)}: there is nothing to impute")
    rows = data.frame_rows
    order = torch.arange(data.num_rows) if rows is None else rows.order.argsort()
    labels: Any = np.arange(data.num_rows) if rows is None else np.array(rows.labels, dtype=object)
    at, values, columns = [], [], []
    for name, some in drawn_values.items():
        place = torch.cat([rows_of_client for rows_of_client, _ in some])
        by_frame = order[place].argsort()
        at.append(place[by_frame])
        values.append(torch.cat([value for _, value in some], 1)[:, by_frame])
        columns += [name] * len(place)
    place, every = torch.cat(at), torch.cat(values, 1)
    frame = pd.DataFrame(
        {
            "row": labels[order[place].numpy()].tolist(),
            "client": np.array(data.names)[data.row_client[place].numpy()],
            "column": columns,
            **statistics(every, draws.prob),
        }
    )
    by_value = labeled(every, {"value": range(len(frame))}, "imputed")
    about = {n: ("value", frame[n].to_numpy()) for n in ("row", "client", "column")}
    return Estimates(
        f"Missing values of {', '.join(drawn_values)}, given what else is known",
        frame,
        by_value.assign_coords(about),
        draws.prob,
        draws.seed,
    )


# ------------------------------------------------------------ a client's rows
def completed(draws: CoefficientDraws, data: ClientData, place: int, client: int) -> DesignRows:
    """Return a client's rows, those at `place` of some data, with draws of the covariates that they lack."""
    formula = draws.formula
    rows = rows_of_client(formula, data, place)
    lost = {}
    for name in formula.declared.imputed:
        has = has_covariate(data, name)
        gone = has[int(data.offsets[place]) : int(data.offsets[place + 1])] == 0.0
        if bool(gone.any()):
            step = step_of_client(formula, data, place, name)
            lost[name] = Lacking(gone, step, torch.zeros(draws.count, len(gone)).double())
    if not lost:
        return rows
    rows = replace(rows, lacking=lost)
    some = torch.stack([of.gone for of in lost.values()]).any(0).nonzero()[:, 0]
    start = fold(root_key(draws.seed), word("imputed"))
    keys = fold(start, *client_keys([data.names[place]])[0])
    noise = [
        normals(fold(keys, word(name)), (draws.count, len(some)), torch.float64) for name in lost
    ]
    unit = uniforms(fold(keys, word("")), (2, draws.count, len(some)), torch.float64)
    first = 0
    for block in in_turn(rows.at(some), FINE * draws.count, IN_CACHE):
        at = slice(first, first + block.count)
        first += block.count
        drawn_here = _given_response(draws, block, client, [z[:, at] for z in noise], unit[..., at])
        for of, value in zip(lost.values(), drawn_here, strict=True):
            of.values[:, some[at]] = value * of.gone[some[at]]
    return rows


def _given_response(
    draws: CoefficientDraws, rows: DesignRows, client: int, noise: list[Tensor], unit: Tensor
) -> list[Tensor]:
    """Return draws of each covariate given the response, (S, n), from draws given the other covariates.

    x_k = eta_k + sigma_k (e_k + u_k (z - sum_j u_j e_j)), u_k = step_k sigma_k / sd of the predictor,
    z the standardized predictor given the response.
    """
    loc = predictor(draws, replace(rows, lacking={}), client)
    means, sds, shares = [], [], []
    for name, of in rows.lacking.items():
        own = replace(draws, parameter=draws.formula.parameters[name])
        means.append(predictor(own, rows.of_parameters[name], client))
        sds.append(draws.shared[f"sigma_{name}"][:, None])
        step = step_of(draws, of.step, rows, client)
        loc = loc + step * means[-1]
        shares.append(step * sds[-1])
    sd = torch.stack(shares).square().sum(0).sqrt()
    shares = [(share / sd).nan_to_num(0.0) for share in shares]
    before = sum(u * e for u, e in zip(shares, noise, strict=True))
    z = _standardized(draws, rows, client, loc, sd, unit) if "y" in rows.fields else before
    return [
        mean + scale * (e + u * (z - before))
        for mean, scale, e, u in zip(means, sds, noise, shares, strict=True)
    ]


def _standardized(
    draws: CoefficientDraws, rows: DesignRows, client: int, loc: Tensor, sd: Tensor, unit: Tensor
) -> Tensor:
    """Return draws of the standardized linear predictor given the responses of rows, (S, n)."""
    parameters, y = parameters_at(draws, rows, client), rows.fields["y"]
    family = draws.family
    fields = {name: rows.fields[name] for name in family.additions if name in rows.fields}
    if family.name in ("gaussian", "lognormal") and family.link == "identity" and not fields:
        noise = torch.special.ndtri(unit[0])
        y = y if family.name == "gaussian" else y.log()
        precision = 1.0 + (sd / parameters["sigma"]) ** 2
        return sd / parameters["sigma"] ** 2 * (y - loc) / precision + noise / precision.sqrt()

    def of(eta: Tensor) -> Any:
        rows_of = {name: value.expand(eta.shape) for name, value in fields.items()}
        return family.of(eta, **parameters, **rows_of)

    return OverNormal(of, loc, sd).standardized(y, unit)
