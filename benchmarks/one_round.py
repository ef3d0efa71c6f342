"""What one round gives of a mixed model: BFI, a fixed-effects meta-analysis, and DLMM.

Each gives the common coefficients that vary within clients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.optimize import minimize

import hierfl
from benchmarks.formula_nuts import Numbers
from hierfl.formulas.declaration import response_of

FLOAT = 8  # bytes of a number
ENOUGH = {"maxiter": 5000, "xatol": 1e-6, "fatol": 1e-8}


def by_dlmm(made: hierfl.Formula, data: hierfl.ClientData) -> Numbers | None:
    """Return the common coefficients by DLMM: restricted maximum likelihood of all sites' sums.

    A site sends X'X, X'y, y'y and n. With random effects of covariance s^2 V and Z some columns of
    X, M = (1 + V Z'Z)^-1 V, the server maximizes over V, s and the coefficients profiled out,

        A = sum_k X'X - X'Z M Z'X,    r = sum_k y'y - y'Z M Z'y - b' A b,    A b = sum_k X'y - X'Z M Z'y
        -2 log L = (N - p) log r + log |A| + sum_k log |1 + V Z'Z|

    None: the model is not Gaussian with effects of the clients alone.

    Source: Luo et al. 2022, Nature Communications 13:1678 (`DLMM` in the R package pda).
    """
    terms = made.layout.groups
    if made.family.name != "gaussian" or [term.place for term in terms] != ["clients"]:
        return None
    names = ["Intercept", *made.layout.common.columns]
    random = [names.index(name) for name in terms[0].columns]
    sums, rows = [], 0
    for k in range(data.num_clients):
        batch = hierfl.full_batch(data, torch.tensor([k]))
        x, y = _columns(made, batch), batch.fields["y"][0].double().numpy()
        x = np.hstack([np.ones((len(x), 1)), x])
        sums.append((x.T @ x, x.T @ y, y @ y))
        rows += len(y)
    size = len(random)
    lower = np.tril_indices(size)

    def profiled(theta: np.ndarray) -> tuple[float, np.ndarray]:
        root = np.zeros((size, size))
        root[lower] = theta
        v, eye = root @ root.T, np.eye(size)
        a, b, square, total = 0.0, 0.0, 0.0, 0.0
        for xx, xy, yy in sums:
            zz, zx, zy = xx[np.ix_(random, random)], xx[random], xy[random]
            within = eye + v @ zz
            m = np.linalg.solve(within, v)
            a, b = a + xx - zx.T @ m @ zx, b + xy - zx.T @ m @ zy
            square, total = square + yy - zy @ m @ zy, total + np.linalg.slogdet(within)[1]
        found = np.linalg.solve(a, b)
        left = square - b @ found
        total += (rows - len(found)) * np.log(left) + np.linalg.slogdet(a)[1]
        return float(total), found

    start = np.eye(size)[lower] * 0.5
    best = minimize(lambda theta: profiled(theta)[0], start, method="Nelder-Mead", options=ENOUGH)
    fixed = dict(zip(names, profiled(best.x)[1], strict=True))
    return {n: fixed[n] for n in varying(made, data)}


def bytes_of_dlmm(made: hierfl.Formula) -> int:
    """Return the bytes that a site sends: the halves of X'X, X'y, y'y and n."""
    p = 1 + len(made.layout.common.columns)
    return FLOAT * (p * (p + 1) // 2 + p + 2)


def by_bfi(made: hierfl.Formula, data: hierfl.ClientData) -> tuple[Numbers, int] | None:
    """Return the common coefficients by one round of BFI, with an intercept of each client's own; None: no answer.

    The second is the bytes that a client sends.

    BFI has no hierarchy: the intercepts are "stratified", as in its R package, with a prior that is
    the same for all.
    """
    names = varying(made, data)
    scales = torch.tensor([float(made.all_priors[n].scale) for n in names])  # type: ignore[union-attr]
    columns = [
        _columns(made, hierfl.full_batch(data, torch.tensor([k]))) for k in range(data.num_clients)
    ]
    keep = [made.layout.common.columns.index(n) for n in names]
    x = torch.as_tensor(np.concatenate(columns)[:, keep]).to(data.fields["y"].dtype)
    fields: dict[str, Any] = {
        n: data.fields[n] for n in ("y", "trials", "cens") if n in data.fields
    }
    rows = hierfl.ClientData.from_arrays(data.row_client, names=data.names, x=x, **fields)
    family = made.family
    extra = [n for n in ("trials", "cens") if n in fields]

    def stratified(batch: hierfl.ClientBatch) -> None:
        b = pyro.sample("b", dist.Normal(torch.zeros(len(names)), scales).to_event(1))
        given = {
            n: pyro.sample(n, dist.LogNormal(0.0, 1.0))
            for n in family.parameters(response_of(made.declared, made.agreed))
        }
        with batch.clients():
            own = pyro.sample("own", dist.Normal(0.0, 10.0))
            with batch.data():
                eta = own + (batch.x * b).sum(-1)
                more = {n: getattr(batch, n) for n in extra}
                pyro.sample("y", family.of(eta, **given, **more), obs=batch.y)

    try:
        fit = hierfl.fit(hierfl.methods.bfi(stratified), rows)
    except (ValueError, RuntimeError):
        return None
    mean = fit.draws(4000).shared["b"].double().mean(0).numpy()
    return dict(zip(names, mean, strict=True)), sent_by_one(fit)


def sent_by_one(fit: hierfl.Fit) -> int:
    """Return the bytes that a client sends in all rounds."""
    return round(float((fit.history["bytes_up"] / fit.history["clients"]).sum()))


def by_meta_analysis(made: hierfl.Formula, data: hierfl.ClientData) -> Numbers | None:
    """Return the common coefficients by a two-stage fixed-effects meta-analysis.

    Each client's estimates of its own intercept and of the columns that vary within it are pooled
    by the inverse of their covariances. A column that is constant at a client has no estimate
    there.
    """
    names = varying(made, data)
    precision, shift = np.zeros((len(names), len(names))), np.zeros(len(names))
    for k in range(data.num_clients):
        found = _own_estimate(made, data, k)
        if found is None:
            continue
        at, curvature, which = found
        index = np.ix_(which, which)
        precision[index] += curvature
        shift[which] += curvature @ at
    if np.linalg.matrix_rank(precision) < len(names):
        return None
    return dict(zip(names, np.linalg.solve(precision, shift), strict=True))


def _own_estimate(
    made: hierfl.Formula, data: hierfl.ClientData, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return one client's maximum likelihood estimate of the varying columns and its precision, intercept out."""
    batch = hierfl.full_batch(data, torch.tensor([k]))
    x = _columns(made, batch)
    x = x[:, [made.layout.common.columns.index(n) for n in varying(made, data)]]
    which = np.flatnonzero(np.ptp(x, axis=0) > 0.0)
    if not len(which) or len(x) <= len(which) + 1:
        return None
    design = torch.as_tensor(np.hstack([np.ones((len(x), 1)), x[:, which]]))
    extra = {n: v[0].double() for n, v in batch.fields.items() if n in ("trials", "cens")}
    y = batch.fields["y"][0].double()
    family = made.family
    parameters = [] if family.name in ("bernoulli", "binomial") else [0.0]
    theta = torch.zeros(design.shape[1] + len(parameters), dtype=torch.float64, requires_grad=True)

    def loss(theta: torch.Tensor) -> torch.Tensor:
        eta = design @ theta[: design.shape[1]]
        named = {"gaussian": "sigma", "weibull": "shape"}.get(family.name)
        given = {named: theta[-1].exp()} if named else {}
        return -family.of(eta, **given, **extra).log_prob(y).sum()

    optimizer = torch.optim.LBFGS([theta], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(theta)
        value.backward()
        return value

    try:
        optimizer.step(closure)
    except ValueError:
        return None  # it runs off: a few times can be fitted exactly
    hessian = torch.autograd.functional.hessian(loss, theta.detach()).numpy()
    try:
        covariance = np.linalg.inv(hessian)[1 : 1 + len(which), 1 : 1 + len(which)]
        np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return None  # separated or constant labels: the client has no finite estimate
    estimate = theta.detach().numpy()[1 : 1 + len(which)]
    if np.abs(estimate).max() > 1e3:
        return None
    return estimate, np.linalg.inv(covariance), which


def varying(made: hierfl.Formula, data: hierfl.ClientData) -> list[str]:
    """Return the common columns that vary within some client."""
    each = [
        _columns(made, hierfl.full_batch(data, torch.tensor([k]))) for k in range(data.num_clients)
    ]
    moves = np.any([np.ptp(x, axis=0) > 0.0 for x in each], axis=0)
    return [n for n, moved in zip(made.layout.common.columns, moves, strict=True) if moved]


def _columns(made: hierfl.Formula, batch: hierfl.ClientBatch) -> np.ndarray:
    """Return the common columns of a client's rows, (n, P), whichever field holds them."""
    found = {}
    for j, name in enumerate(made.layout.read):
        found[name] = batch.fields["x"][0, :, j].numpy()
    for name, term in made.layout.own.items():
        if name in made.layout.common.columns:
            z = batch.fields[f"z_{term.site}"][0]
            found[name] = z[:, term.columns.index(name)].numpy()
    return np.stack([found[name] for name in made.layout.common.columns], 1).astype(float)
