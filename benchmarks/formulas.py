"""Formulas on real data against pooled NUTS.

`HIERFL_NUMPYRO=PYTHON python -m benchmarks.formulas [NAME ...]`.

Each formula is fitted by `hierfl.fit(formula, frame)`, and compared with NUTS by NumPyro on all
rows together, in a process of its own: two chains of 1,000 + 4,000 steps, or of 1,000 + 15,000
non-centered ones, kept in the user's cache folder. Beside it stand the answers of one round: of BFI;
of a two-stage fixed-effects meta-analysis, each client's maximum a posteriori estimate and curvature
of the common coefficients, pooled by inverse variance; and of DLMM where the response is Gaussian.
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
from rich.console import Console
from rich.table import Table

import hierfl
from benchmarks.formula_nuts import Numbers, pooled_nuts
from benchmarks.formula_problems import PROBLEMS
from benchmarks.one_round import (
    by_bfi,
    by_dlmm,
    by_meta_analysis,
    bytes_of_dlmm,
    sent_by_one,
    varying,
)
from benchmarks.reference import cache


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
        dlmm: the same of DLMM; None: the response is not Gaussian.
        fit_common: the same of the fit.
        sent: bytes that one client sends in all rounds of the fit.
        sent_bfi: to BFI.
        sent_dlmm: to DLMM.
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
    dlmm: float | None = None
    fit_common: float | None = None
    sent: int | None = None
    sent_bfi: int | None = None
    sent_dlmm: int | None = None


def posterior(fit: hierfl.Fit, draws: int = 4000) -> tuple[Numbers, Numbers]:
    """Return mean and sd of each latent site, in the shapes of the program."""
    drawn = fit.draws(draws)
    both = {**drawn.shared, **{n: v.unsqueeze(2) for n, v in drawn.own.items()}}
    return (
        {n: v.double().mean(0).numpy() for n, v in both.items()},
        {n: v.double().std(0).numpy() for n, v in both.items()},
    )


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
    bfi, dlmm = by_bfi(made, data), by_dlmm(made, data)
    common = varying(made, data)
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
        bfi=error(bfi[0] if bfi else None, nuts),
        meta=error(by_meta_analysis(made, data), nuts),
        dlmm=error(dlmm, nuts),
        fit_common=error({n: mean[n] for n in common}, nuts),
        sent=sent_by_one(fit),
        sent_bfi=bfi[1] if bfi else None,
        sent_dlmm=bytes_of_dlmm(made) if dlmm else None,
    )


def shown(rows: list[Row]) -> Table:
    """Return the table."""
    table = Table(title="Formulas against pooled NUTS, errors in posterior sds")
    for column in (
        *("data", "clients", "rounds", "worst mean", "sd ratios", "k-hat", "s"),
        *("NUTS: s", "R-hat", "its error", "diverging"),
        *("common: hierfl", "BFI", "meta-analysis", "DLMM", "bytes: hierfl", "BFI", "DLMM"),
    ):
        table.add_column(column, justify="left" if column == "data" else "right")
    for row in rows:
        each = (row.fit_common, row.bfi, row.meta, row.dlmm)
        others = ["none" if v is None else f"{v:.2f}" for v in each]
        sent = (row.sent, row.sent_bfi, row.sent_dlmm)
        others += ["none" if v is None else f"{v:,}" for v in sent]
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
