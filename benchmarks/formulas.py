"""Formulas on real data against pooled NUTS.

`HIERFL_NUMPYRO=PYTHON python -m benchmarks.formulas [NAME ...]`.

Each formula is fitted by `hierfl.fit(formula, frame)`, and compared with NUTS by NumPyro on all
rows together, in a process of its own: two chains of 1,000 + 4,000 steps, or of 1,000 + 15,000
non-centered ones, kept in the user's cache folder. Beside it stand the answers of one round of BFI,
and of a two-stage fixed-effects meta-analysis: each client's maximum a posteriori estimate and
curvature of the common coefficients, pooled by inverse variance.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from rich.console import Console
from rich.table import Table

import hierfl
from benchmarks.formula_nuts import Numbers, pooled_nuts
from benchmarks.formula_problems import PROBLEMS
from benchmarks.reference import cache
from hierfl.formulas.parse import response_of


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: of the problem.
        clients: N.
        rounds: of the fit.
        worst_mean: largest error of a posterior mean of a global site or a client's own, in
            posterior sds.
        worst_site: where.
        widest_site: where the ratio of sds is farthest from 1.
        sd_low: smallest ratio of posterior sds.
        sd_high: largest.
        k_hat: of the fit's weights.
        seconds: of the fit.
        nuts_seconds: of pooled NUTS.
        nuts_r_hat: of pooled NUTS.
        nuts_error: largest Monte Carlo standard error of pooled NUTS, in sds.
        nuts_diverging: share of its transitions that diverged.
        bfi: largest error of a common coefficient by one round of BFI, in posterior sds; None: it
            has no answer.
        meta: the same of the meta-analysis.
    """

    name: str
    clients: int
    rounds: int
    worst_mean: float
    worst_site: str
    widest_site: str
    sd_low: float
    sd_high: float
    k_hat: float
    seconds: float
    nuts_seconds: float
    nuts_r_hat: float
    nuts_error: float
    nuts_diverging: float
    bfi: float | None
    meta: float | None


def posterior(fit: hierfl.Fit, draws: int = 4000) -> tuple[Numbers, Numbers]:
    """Return mean and sd of each latent site, in the shapes of the program."""
    drawn = fit.draws(draws)
    both = {**drawn.shared, **{n: v.unsqueeze(2) for n, v in drawn.own.items()}}
    return (
        {n: v.double().mean(0).numpy() for n, v in both.items()},
        {n: v.double().std(0).numpy() for n, v in both.items()},
    )


def by_bfi(made: hierfl.Formula, data: hierfl.ClientData) -> Numbers | None:
    """Return the common coefficients by one round of BFI, with an intercept of each client's own; None: no answer.

    BFI has no hierarchy: the intercepts are "stratified", as in its R package, with a prior that is
    the same for all.
    """
    names = [n for n in made.layout.common.columns if n not in made.layout.above]
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
    mean, _ = posterior(fit)
    return dict(zip(names, mean["b"], strict=True))


def by_meta_analysis(made: hierfl.Formula, data: hierfl.ClientData) -> Numbers | None:
    """Return the common coefficients by a two-stage fixed-effects meta-analysis.

    Each client's estimates of its own intercept and of the columns that vary within it are pooled
    by the inverse of their covariances. A column that is constant at a client has no estimate
    there.
    """
    names = [n for n in made.layout.common.columns if n not in made.layout.above]
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
    x = x[:, [j for j, n in enumerate(made.layout.common.columns) if n not in made.layout.above]]
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


def _columns(made: hierfl.Formula, batch: hierfl.ClientBatch) -> np.ndarray:
    """Return the common columns of a client's rows, (n, P), whichever field holds them."""
    rows, found = batch.num_rows, {}
    for j, name in enumerate(made.layout.read):
        found[name] = batch.fields["x"][0, :, j].numpy()
    for j, name in enumerate(made.layout.above):
        found[name] = np.full(rows, float(batch.client_fields["above"][0, 0, j]))
    for name, term in made.layout.own.items():
        if name in made.layout.common.columns:
            z = batch.fields[f"z_{term.site}"][0]
            found[name] = z[:, term.columns.index(name)].numpy()
    return np.stack([found[name] for name in made.layout.common.columns], 1).astype(float)


def error(found: Numbers | None, nuts: Numbers) -> float | None:
    """Return the largest error of a common coefficient that varies within clients, in posterior sds."""
    if found is None:
        return None
    each = [np.abs(v - nuts[f"{n}/mean"]) / nuts[f"{n}/sd"] for n, v in found.items()]
    return float(max(np.max(e) for e in each))


def measured(name: str) -> Row:
    """Fit one problem and compare."""
    problem = PROBLEMS[name]
    frame = problem.frame()
    made = problem.model(frame)
    data = made.data(frame)
    began = time.perf_counter()
    fit = hierfl.fit(made, data, seed=0, progress=False)
    seconds = time.perf_counter() - began
    mean, sd = posterior(fit)
    nuts = pooled_nuts(made, data)
    errors, ratios, mcse, sites = [], [], [], []
    for site in mean:
        spread = nuts[f"{site}/sd"]
        moving = spread > 1e-12  # zeros above the diagonal of a Cholesky factor
        errors.append(
            (np.abs(mean[site] - nuts[f"{site}/mean"]) / np.where(moving, spread, 1))[moving]
        )
        ratios.append((sd[site] / np.where(moving, spread, 1))[moving])
        sites += [f"{site}{list(map(int, at))}" for at in np.argwhere(moving)]
        mcse.append((nuts[f"{site}/mcse"] / np.where(moving, spread, 1))[moving])
    flat, ratio = (np.concatenate([np.ravel(v) for v in each]) for each in (errors, ratios))
    k_hats = [r["k_hat"] for r in fit.progress.history if "k_hat" in r]
    return Row(
        name=name,
        clients=data.num_clients,
        rounds=fit.progress.round,
        worst_mean=float(flat.max()),
        worst_site=sites[int(flat.argmax())],
        widest_site=sites[int(np.abs(np.log(ratio)).argmax())],
        sd_low=float(ratio.min()),
        sd_high=float(ratio.max()),
        k_hat=float(k_hats[-1]) if k_hats else float("nan"),
        seconds=seconds,
        nuts_seconds=float(nuts["seconds"]),
        nuts_r_hat=float(nuts["r_hat"]),
        nuts_error=float(max(np.max(m) for m in mcse)),
        nuts_diverging=float(nuts["diverging"]),
        bfi=error(by_bfi(made, data), nuts),
        meta=error(by_meta_analysis(made, data), nuts),
    )


def shown(rows: list[Row]) -> Table:
    """Return the table."""
    table = Table(title="Formulas against pooled NUTS, errors in posterior sds")
    for column in (
        *("data", "clients", "rounds", "worst mean", "sd ratios", "k-hat", "s"),
        *("NUTS: s", "R-hat", "its error", "diverging", "BFI", "meta-analysis"),
    ):
        table.add_column(column, justify="left" if column == "data" else "right")
    for row in rows:
        others = ["none" if v is None else f"{v:.2f}" for v in (row.bfi, row.meta)]
        table.add_row(
            row.name,
            str(row.clients),
            str(row.rounds),
            f"{row.worst_mean:.3f}",
            f"{row.sd_low:.2f}-{row.sd_high:.2f}",
            f"{row.k_hat:.2f}",
            f"{row.seconds:.0f}",
            f"{row.nuts_seconds:.0f}",
            f"{row.nuts_r_hat:.3f}",
            f"{row.nuts_error:.3f}",
            f"{row.nuts_diverging:.2%}",
            *others,
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Run the problems that are named, and print the table of all that have been run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formulas", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PROBLEMS), metavar="NAME")
    args = parser.parse_args(argv)
    kept = cache() / "formulas.json"
    rows: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in args.names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows[name] = asdict(measured(name))
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(rows))
    Console(width=160).print(shown([Row(**rows[name]) for name in PROBLEMS if name in rows]))


if __name__ == "__main__":
    main()
