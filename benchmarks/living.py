"""Clients that leave a fit and join it, beside fits from scratch: `python -m benchmarks.living [NAME ...]`.

NAME is one of the problems below, as formulas (`benchmarks.formula_problems`); without it, all of
them. Of each, the client with the most rows and the median one leave (`Fit.without`), and the
median one joins a fit of the others (`Fit.updated`), of 4 seeds. These, and default fits from
scratch of as many seeds, are compared with two fits of 10,000 draws together: means in their
posterior sds, and ratios of sds, of all global and all local numbers. A single run has about the
Monte Carlo error of a default fit from scratch; all seeds together show what a change of a fit adds.

    worst mean    the median over seeds of a run's worst mean; and that of all seeds together
    sds           the range of ratios of sds, all seeds together: global numbers; local ones

Every fit's means and sds are kept in `--out`, so that a run that is stopped goes on where it was.

`--nodes` compares both calls over nodes in this process with those on one machine, of one seed.
`--sensitivity` compares `diagnostics.sensitivity` with refits whose prior is scaled by 0.8 and 1.25
instead: the move of each global mean in sds.

Prints a table of bytes, errors and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray

import hierfl
from benchmarks import living_nodes
from benchmarks.formula_problems import PROBLEMS
from benchmarks.rounds_models import ALL
from hierfl import ClientBatch, ClientData, diagnostics

NAMES = ("radon", "heart", "nurses", "lung", "election88")
DRAWS, MANY = 4000, 10_000  # of a fit by default, and of the reference
SEEDS, REFERENCES = 4, 2
OF_HEART = ("age", "sex", "cp_typical", "cp_atypical", "cp_nonanginal")
CHANGES = ("largest leaves", "median leaves", "median joins")
MEASURED = ("worst mean", "all seeds", "sds, global", "sds, local", "CPU s")
COSTS = ("bytes", "others asked", "refused", "k-hat")
COLUMNS = ("problem", "what", "client", *COSTS, *MEASURED, *(f"scratch: {one}" for one in MEASURED))
Floats = NDArray[np.float64]


class Moments(NamedTuple):
    """Means and sds of the global and of the local numbers."""

    mean: tuple[Floats, Floats]
    sd: tuple[Floats, Floats]


@dataclass(frozen=True)
class Work:
    """The fits of one problem; what was measured is kept in a file."""

    name: str
    file: Path

    @cached_property
    def problem(self) -> tuple[hierfl.Formula, ClientData]:
        """The formula with its schema, and the rows."""
        frame = PROBLEMS[self.name].frame()
        model = PROBLEMS[self.name].model(frame)
        return model, model.data(frame)

    @cached_property
    def clients(self) -> dict[str, str]:
        """Which client leaves or joins."""
        data = self.problem[1]
        names = [data.names[k] for k in data.counts.argsort(descending=True).tolist()]
        return {what: names[0 if "largest" in what else len(names) // 2] for what in CHANGES}

    def rows(self, what: str) -> ClientData:
        """The rows after a change."""
        data = self.problem[1]
        return data if "joins" in what else self.others(what)

    def others(self, what: str) -> ClientData:
        """The rows without the client of a change."""
        data = self.problem[1]
        return data.select([one for one in data.names if one != self.clients[what]])

    @cache  # noqa: B019
    def whole(self, seed: int) -> tuple[hierfl.Fit, float]:
        """A fit of all rows, which clients leave, and its CPU seconds."""
        return cpu(lambda: self.fit(self.problem[1], seed))

    def fit(self, data: ClientData, seed: int, draws: int = DRAWS) -> hierfl.Fit:
        """A fit from scratch."""
        model: Any = self.problem[0]
        method = model if draws == DRAWS else hierfl.methods.two_stage(model, draws=draws)
        return hierfl.fit(method, data, seed=seed, progress=False)

    def kept(self, key: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure what is not in the file yet."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        known: dict[str, dict[str, Any]] = {}
        for line in lines:
            known |= json.loads(line)
        if key not in known:
            known[key] = work()
            with self.file.open("a") as end:
                end.write(json.dumps({key: known[key]}) + "\n")
        return known[key]

    def scratch(self, what: str, seed: int, draws: int = DRAWS) -> dict[str, Any]:
        """Measure a fit from scratch of the rows after a change."""

        def work() -> dict[str, Any]:
            if "joins" in what and draws == DRAWS:
                found, seconds = self.whole(seed)
            else:
                found, seconds = cpu(lambda: self.fit(self.rows(what), 500 + seed, draws))
            return {**recorded(found), "seconds": seconds}

        return self.kept(f"scratch, {what}, {seed}, {draws}", work)

    def changed(self, what: str, seed: int) -> dict[str, Any]:
        """Measure a change of a fit; where it is refused, the others may weight again."""

        def work() -> dict[str, Any]:
            client, joins = self.clients[what], "joins" in what
            before = self.fit(self.others(what), 100 + seed) if joins else self.whole(seed)[0]
            change: Callable[..., hierfl.Fit] = partial(before.without, client)
            if joins:
                change = partial(before.updated, self.problem[1].select([client]))
            refused = 0
            try:
                found, seconds = cpu(change)
            except hierfl.AnotherRound as error:
                print(f"{self.name}, {what}, seed {seed}: {error}", flush=True)
                found, seconds = cpu(partial(change, rounds=4))
                refused = 1
            new = found.history.iloc[len(before.history) :]
            return {
                **recorded(found),
                "seconds": seconds,
                "refused": refused,
                "bytes": int(new[["bytes_up", "bytes_down"]].to_numpy().sum()),
                "others asked": int(((new["bytes_up"] > 0) & (new["clients"] > 1)).sum()),
                "k-hat": float(new["k_hat"].iloc[-1]),
            }

        return self.kept(f"{what}, {seed}", work)


def cpu(work: Callable[[], hierfl.Fit]) -> tuple[hierfl.Fit, float]:
    """Return a fit and its CPU seconds."""
    began = time.process_time()
    return work(), time.process_time() - began


def recorded(fit: hierfl.Fit) -> dict[str, Any]:
    """Return means and sds of the global numbers and of the local ones, clients by name."""
    drawn = fit.draws(DRAWS)
    order = [fit.clients.index(name) for name in sorted(fit.clients)]
    found: dict[str, Any] = {}
    for level, sites in (("global", drawn.shared), ("local", drawn.own)):
        values = [v[:, order] if level == "local" else v for _, v in sorted(sites.items())]
        flat = [v.reshape(len(v), -1).double() for v in values]
        x = torch.cat(flat, 1) if flat else torch.zeros(2, 0)
        found |= {f"{level} mean": x.mean(0).tolist(), f"{level} sd": x.std(0).tolist()}
    return found


def together(records: Sequence[dict[str, Any]]) -> Moments:
    """Return the moments of the draws of several fits."""
    means, sds = [], []
    for level in ("global", "local"):
        mean, sd = (np.array([one[f"{level} {of}"] for one in records]) for of in ("mean", "sd"))
        means.append(mean.mean(0))
        sds.append(np.sqrt((sd**2).mean(0) + mean.var(0)))
    return Moments((means[0], means[1]), (sds[0], sds[1]))


def apart(records: Sequence[dict[str, Any]], known: Moments) -> list[str]:
    """Return the worst mean of single runs and of all together, and the ranges of ratios of sds."""

    def worst(found: Moments) -> float:
        each = zip(found.mean, known.mean, known.sd, strict=True)
        return max(float((np.abs(a - b) / s)[s > 0].max(initial=0.0)) for a, b, s in each)

    single, whole = [worst(together([one])) for one in records], together(records)
    ratios = [(a[b > 0] / b[b > 0]) for a, b in zip(whole.sd, known.sd, strict=True)]
    ranges = [f"{r.min():.2f} to {r.max():.2f}" if len(r) else "" for r in ratios]
    return [f"{statistics.median(single):.3f}", f"{worst(whole):.3f}", *ranges]


def lines(work: Work) -> Iterator[list[str]]:
    """Measure one problem."""
    every = [(work.changed(w, k), work.scratch(w, k)) for k in range(SEEDS) for w in CHANGES]
    for place, what in enumerate(CHANGES):
        changed, scratch = ([both[i] for both in every[place :: len(CHANGES)]] for i in (0, 1))
        known = together([work.scratch(what, k, MANY) for k in range(REFERENCES)])
        costs = [f"{max(one[name] for one in changed)}" for name in ("bytes", "others asked")]
        costs += [f"{sum(one['refused'] for one in changed)} of {SEEDS}"]
        costs += [f"{max(one['k-hat'] for one in changed):.2f}"]
        both = [
            [*apart(each, known), f"{statistics.median(one['seconds'] for one in each):.1f}"]
            for each in (changed, scratch)
        ]
        yield [work.name, what, work.clients[what], *costs, *both[0], *both[1]]


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
    """Return heart disease with five standardized columns."""
    raw = hierfl.datasets.heart_disease()
    names = list(raw.features["x"])
    x = raw.fields["x"].double()[:, [names.index(name) for name in OF_HEART]]
    return raw.with_fields(x=(x - x.mean(0)) / x.std(0), y=raw.fields["y"].double())


def moves(made: Callable[[float], Any], data: ClientData) -> pd.DataFrame:
    """Return by parameter the move of its mean by power scaling and by refits, at both alphas.

    The refits' have a Monte Carlo error of about 0.01: the means over seeds are compared.
    """
    draws = 10_000

    def fitted(by: float, seed: int) -> hierfl.Fit:
        return hierfl.fit(hierfl.methods.two_stage(made(by), draws=draws), data, seed=seed)

    tables, refits = [], []
    for seed in range(SEEDS):
        whole = fitted(1.0, seed)
        tables.append(diagnostics.sensitivity(whole).table.xs("prior", level="part"))
        means, sds = _means(whole, draws)
        again = [_means(fitted(alpha, seed), draws)[0] for alpha in (0.8, 1.25)]
        refits.append([((one - means) / sds).numpy() for one in again])
    found = pd.concat(tables).groupby(level=0, sort=False)[["at_0.8", "at_1.25"]].mean()
    found["k_hat"] = pd.concat(tables).groupby(level=0)["k_hat"].max()
    found[["refit_0.8", "refit_1.25"]] = np.mean(refits, 0).T
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
    parser.add_argument("--nodes", action="store_true", help="compare with one machine")
    parser.add_argument("--sensitivity", action="store_true", help="compare with scaled priors")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "living")
    parsed = parser.parse_args(args)
    warnings.simplefilter("ignore")
    if parsed.sensitivity:
        both = {"radon": (radon_scaled, ALL["radon"].data()), "heart": (heart_scaled, heart_data())}
        for name, (made, data) in both.items():
            print(name, moves(made, data).round(4).to_string(), sep="\n", flush=True)
        return
    if parsed.nodes:
        print(
            "| " + " | ".join(living_nodes.COLUMNS) + " |\n|" + "---|" * len(living_nodes.COLUMNS)
        )
        for name in parsed.names or NAMES:
            for line in living_nodes.lines(name, CHANGES, seed=100):
                print("| " + " | ".join(line) + " |", flush=True)
        return
    parsed.out.mkdir(parents=True, exist_ok=True)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for name in parsed.names or NAMES:
        for line in lines(Work(name, parsed.out / f"{name}.jsonl")):
            print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
