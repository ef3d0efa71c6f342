"""Clients that leave a fit and join it, beside fits from scratch: `python -m benchmarks.living [NAME ...]`.

NAME is one of the problems below, as formulas (`benchmarks.formula_problems`); without it, all of
them. Of each, the client with the most rows and the median one leave (`Fit.without`), and the
median one joins a fit of the others (`Fit.updated`). Both, and a fit from scratch of another seed
(`scratch`: worst mean, range of widths), are compared with a fit of 10,000 draws: means in its
posterior sds, of all global and local numbers, and 90 % intervals as ratios of widths.

`--sensitivity` compares `diagnostics.sensitivity` with refits whose prior is scaled by 0.8 and 1.25
instead: the move of each global mean in sds.

Prints a table of bytes, errors and CPU seconds; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import pyro
import pyro.distributions as dist
import torch

import hierfl
from benchmarks.formula_problems import PROBLEMS
from benchmarks.rounds_models import ALL
from hierfl import ClientBatch, ClientData, diagnostics

NAMES = ("radon", "heart", "nurses", "lung", "election88")
DRAWS, MANY = 4000, 10_000  # of a fit by default, and of the reference
COLUMNS: tuple[str, ...] = (
    "problem",
    "what",
    "client",
    "bytes",
    "others asked",
    "worst mean",
    "global",
    "sds",
)
COLUMNS = (*COLUMNS, "k-hat", "CPU s", "scratch", "scratch CPU s", "scratch bytes", "refused")


def cpu(work: Callable[[], hierfl.Fit]) -> tuple[hierfl.Fit, float]:
    """Return a fit and its CPU seconds."""
    began = time.process_time()
    return work(), time.process_time() - began


def compared(one: hierfl.Fit, other: hierfl.Fit) -> tuple[float, float, float, float]:
    """Return the worst mean, of all and of global numbers, in sds, and the range of ratios of widths."""
    ours, theirs = one.draws(DRAWS), other.draws(MANY)
    order = [one.clients.index(name) for name in other.clients]
    worst, ratios = {"own": 0.0, "shared": 0.0}, []
    for level in worst:
        for site, value in getattr(theirs, level).items():
            x = getattr(ours, level)[site]
            x = x[:, order] if level == "own" else x
            a, b = (v.reshape(len(v), -1).double() for v in (x, value))
            varies = b.std(0) > 0
            a, b = a[:, varies], b[:, varies]
            off = ((a.mean(0) - b.mean(0)) / b.std(0)).abs()
            worst[level] = max(worst[level], float(off.max())) if len(off) else worst[level]
            ratios += (_width(a) / _width(b)).tolist()
    return max(worst.values()), worst["shared"], min(ratios), max(ratios)


def _width(draws: torch.Tensor) -> torch.Tensor:
    """Return the widths of 90 % intervals: an sd of a heavy tail is not known by 4,000 draws."""
    low, high = draws.quantile(torch.tensor([0.05, 0.95], dtype=draws.dtype), 0)
    return high - low


def lines(name: str) -> Iterator[dict[str, Any]]:
    """Measure one problem."""
    problem = PROBLEMS[name]
    frame = problem.frame()
    model = problem.model(frame)
    data = model.data(frame)
    by_rows = data.counts.argsort(descending=True).tolist()
    largest, median = (data.names[by_rows[k]] for k in (0, len(by_rows) // 2))
    whole, _ = cpu(lambda: hierfl.fit(model, data, seed=0))
    for client in (largest, median):
        rest = data.select([one for one in data.names if one != client])
        what = {"problem": name, "what": "leaves", "client": client}
        yield {**what, **measured(partial(whole.without, client), model, rest, whole)}
    before = hierfl.fit(model, data.select([one for one in data.names if one != median]), seed=0)
    what = {"problem": name, "what": "joins", "client": median}
    yield {**what, **measured(partial(before.updated, data.select([median])), model, data, before)}


def measured(
    work: Callable[..., hierfl.Fit], model: hierfl.Formula, data: ClientData, before: hierfl.Fit
) -> dict[str, Any]:
    """Return what a change of a fit costs, and how far it and a fit from scratch are from the reference."""
    again, scratch = cpu(lambda: hierfl.fit(model, data, seed=1))
    reference = hierfl.fit(hierfl.methods.two_stage(model, draws=MANY), data, seed=2)
    own = compared(again, reference)
    base = {
        "scratch": [round(v, 3) for v in (own[0], *own[2:])],
        "scratch CPU s": round(scratch, 2),
        "scratch bytes": int(again.history[["bytes_up", "bytes_down"]].to_numpy().sum()),
    }
    try:
        found, seconds = cpu(work)
    except hierfl.AnotherRound as error:  # the others weight new draws
        base["refused"] = str(error)
        found, seconds = cpu(partial(work, rounds=4))
    worst, shared, low, high = compared(found, reference)
    new = found.history.iloc[len(before.history) :]
    sent = new["bytes_up"] > 0
    return {
        "bytes": int(new[["bytes_up", "bytes_down"]].to_numpy().sum()),
        "others asked": int((sent & (new["clients"] > 1)).sum()),
        "worst mean": round(worst, 3),
        "global": round(shared, 3),
        "widths": [round(low, 3), round(high, 3)],
        "k-hat": round(float(new["k_hat"].iloc[-1]), 2),
        "CPU s": round(seconds, 2),
        **base,
    }


# ------------------------------------------------------------------------------------ sensitivity
def radon_scaled(by: float) -> Callable[[ClientBatch], None]:
    """Return `radon_centered`, whose prior of the global sites has the power `by`."""
    root = by**-0.5  # a Normal or a half-Normal to a power is one of another scale

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, root))
        tau = pyro.sample("tau", dist.HalfNormal(root))
        slope = pyro.sample("slope", dist.Normal(torch.zeros(3), root).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(root))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(mu, tau))
            with batch.data():
                pyro.sample("y", dist.Normal(a + batch.x @ slope, sigma), obs=batch.y)

    return model


def heart_scaled(by: float) -> Callable[[ClientBatch], None]:
    """Return a logistic random intercept of four hospitals, whose prior has the power `by`."""
    root = by**-0.5

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, root))
        tau = pyro.sample("tau", dist.HalfNormal(root))
        slope = pyro.sample("slope", dist.Normal(torch.zeros(batch.x.shape[-1]), root).to_event(1))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(mu, tau))
            with batch.data():
                pyro.sample("y", dist.Bernoulli(logits=a + batch.x @ slope), obs=batch.y)

    return model


def heart_data() -> ClientData:
    """Return heart disease with standardized columns."""
    raw = hierfl.datasets.heart_disease()
    x = raw.fields["x"].double()
    return raw.with_fields(x=(x - x.mean(0)) / x.std(0), y=raw.fields["y"].double())


def moves(made: Callable[[float], Any], data: ClientData) -> pd.DataFrame:
    """Return by parameter the move of its mean by power scaling and by refits, at both alphas."""
    draws = 10_000

    def fitted(by: float, seed: int) -> hierfl.Fit:
        return hierfl.fit(hierfl.methods.two_stage(made(by), draws=draws), data, seed=seed)

    whole = fitted(1.0, 0)
    table = diagnostics.sensitivity(whole).table.xs("prior", level="part")
    values = _means(whole, draws)
    found = table[["at_0.8", "at_1.25", "k_hat"]].copy()
    for alpha in (0.8, 1.25):
        again = _means(fitted(alpha, 0), draws)
        found[f"refit_{alpha}"] = ((again[0] - values[0]) / values[1]).numpy()
    return found


def _means(fit: hierfl.Fit, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = fit.draws(draws).shared
    sites = [site.name for site in fit.program.latents.global_block.sites]
    flat = torch.cat([drawn[name].reshape(draws, -1).double() for name in sites], 1)
    return flat.mean(0), flat.std(0)


def main(args: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--sensitivity", action="store_true", help="compare with scaled priors")
    parsed = parser.parse_args(args)
    warnings.simplefilter("ignore")
    if parsed.sensitivity:
        both = {"radon": (radon_scaled, ALL["radon"].data()), "heart": (heart_scaled, heart_data())}
        for name, (made, data) in both.items():
            print(name, moves(made, data).round(4).to_string(), sep="\n", flush=True)
        return
    records = []
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for name in parsed.names or NAMES:
        for line in lines(name):
            records.append(line)
            print("| " + " | ".join(str(line.get(key, "")) for key in COLUMNS) + " |", flush=True)
    print(json.dumps(records))


if __name__ == "__main__":
    main()
