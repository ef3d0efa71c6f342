"""Simulation-based calibration: truths drawn from the prior, data from the truths, and where the truths rank among the guide's draws.

If the guide is the posterior, ranks are uniform and intervals cover as often as they say, whatever the prior; what a guide has too
narrow, too wide or off its place shows in them, site by site and client by client. All replications are fitted at once: the full
batch of all clients, one Adam step on the negative ELBO for all of them under `torch.vmap`, their noise keyed by replication.

Source: Talts et al. 2018, arXiv:1804.06788; the band: Säilynoja, Bürkner and Vehtari 2022, arXiv:2103.10522, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyro
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.diagnostics.simulated_data import Labels, drawn, with_labels
from hierfl.method import over_draws, slope
from hierfl.optimisers import Adam, Optimiser, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.read import read
from hierfl.program.sites import Family, Guide, Model, Values
from hierfl.program.stacking import stacked

AT_ONCE = 250  # replications carried at once
INTERVALS = (0.5, 0.9)
Ranks = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sbc:
    """Where the truth ranks among the draws.

    Args:
        shared: global site -> (R, *shape), how many of the guide's draws are below the truth, 0 to `draws`.
        own: local site -> (R, N, *shape).
        draws: of each fitted guide, L.
        clients: names, N.
        rows: of each client.
        elbo: of each replication's last step, (R,), in nats: one estimate, to see whether they have settled.
    """

    shared: dict[str, Ranks]
    own: dict[str, Ranks]
    draws: int
    clients: tuple[str, ...]
    rows: tuple[int, ...]
    elbo: NDArray[np.float64]

    @property
    def replications(self) -> int:
        """R."""
        return len(self.elbo)

    def quantities(self) -> Iterator[tuple[str, str, str | None, Ranks]]:
        """Site, which of its numbers, whose, and the ranks (R,) of each number that was drawn."""
        for site, ranks in self.shared.items():
            yield from ((site, place, None, column) for place, column in _numbers(ranks))
        for site, ranks in self.own.items():
            for k, client in enumerate(self.clients):
                yield from (
                    (site, place, client, column) for place, column in _numbers(ranks[:, k])
                )

    def table(self) -> pd.DataFrame:
        """A row a number: p of the chi-square test that its ranks are uniform, and how often its central intervals cover it."""
        size = dict(zip(self.clients, self.rows, strict=True))
        return pd.DataFrame(
            [
                {
                    "site": site,
                    "number": place,
                    "client": client,
                    "rows": size.get(client or ""),
                    **self._scores(ranks),
                }
                for site, place, client, ranks in self.quantities()
            ]
        )

    def coverage(self) -> pd.DataFrame:
        """A row a site: coverage over all its numbers, and clients."""
        found = {site: self._covered(ranks) for site, ranks in {**self.shared, **self.own}.items()}
        return pd.DataFrame.from_dict(found, orient="index").rename_axis("site")

    def coverage_by_rows(self) -> pd.DataFrame:
        """A row a local site and number of rows: coverage over its numbers and the clients of that size."""
        records = []
        for site, ranks in self.own.items():
            for size in sorted(set(self.rows)):
                those = [k for k, n in enumerate(self.rows) if n == size]
                records.append(
                    {
                        "site": site,
                        "rows": size,
                        "clients": len(those),
                        **self._covered(ranks[:, those]),
                    }
                )
        return pd.DataFrame(records)

    def ecdf(self, site: str, *, prob: float = 0.95) -> pd.DataFrame:
        """The empirical distribution of a site's ranks at each of L points in (0, 1), a column a number, and its simultaneous band.

        Raises:
            KeyError: there is no such site.
        """
        columns = {
            place if client is None else f"{client} {place}".strip(): ranks
            for name, place, client, ranks in self.quantities()
            if name == site
        }
        if not columns:
            raise KeyError(
                f"there is no site '{site}'; there are {', '.join([*self.shared, *self.own])}"
            )
        at = np.arange(1, self.draws + 1) / (self.draws + 1.0)
        found = {
            name: (r[:, None] < np.arange(1, self.draws + 1)).mean(0) for name, r in columns.items()
        }
        low, high = ecdf_band(self.replications, at, prob=prob)
        return pd.DataFrame(
            {"low": low, "high": high, **found}, index=pd.Index(at, name="fractional rank")
        )

    def _scores(self, ranks: Ranks) -> dict[str, float]:
        wanted = max(2, min(20, self.replications // 5))
        bins = max(b for b in range(1, wanted + 1) if (self.draws + 1) % b == 0)
        counts = np.bincount(ranks * bins // (self.draws + 1), minlength=bins)
        return {"p": float(stats.chisquare(counts).pvalue), **self._covered(ranks)}

    def _covered(self, ranks: Ranks) -> dict[str, float]:
        """How many ranks lie in the middle: of the L + 1 that there are, the share that the interval says."""
        middle = np.abs(2 * ranks - self.draws)  # L, L - 2, ...: how far out, in half ranks
        return {f"cover {p:.0%}": float((middle < p * (self.draws + 1)).mean()) for p in INTERVALS}


def sbc(
    model: Model,
    guide: Guide | Family,
    data_like: ClientData,
    *,
    replications: int = 500,
    draws: int = 99,
    steps: int = 1000,
    optimiser: Optimiser = Adam(0.05),  # noqa: B008 (frozen)
    particles: int = 4,
    seed: int = 0,
) -> Sbc:
    """Simulation-based calibration of a guide, every replication a data set of the model's own.

    Args:
        model: with a proper prior: sample statements alone, without params and factors.
        guide: a family, or a guide function.
        data_like: clients, and how many rows each has; the fields that the model does not observe are used as they are.
        replications: R.
        draws: L, of each fitted guide; L + 1 is best divisible by 20.
        steps: of each fit; the rate is the optimiser's own in the first half and falls to 0 over the second.
        optimiser: SGD, Adam or a torchopt transformation.
        particles: draws of the guide a step.
        seed: of the data sets, the steps and the draws.

    Raises:
        ProgramError: a model that data cannot be drawn from, or a guide that draws one client at a time.
        ValueError: no replication, draw or step.
    """
    if min(replications, draws, steps, particles) < 1:
        raise ValueError("replications, draws, steps and particles must be 1 or more")
    program = read(model, guide, data_like, seed=seed)
    if not program.keyed:
        raise ProgramError(
            "sbc fits all replications at once, and this guide draws one client at a time: take one of Normals"
        )
    batch = full_batch(data_like, torch.arange(data_like.num_clients), seed=seed)
    truth, labels = drawn(program, batch, count=replications, seed=seed)
    parts, elbo = [], []
    for ids in torch.arange(replications, dtype=torch.int32).split(AT_ONCE):
        mine = {name: v[ids.long()] for name, v in labels.items()}
        params, loss = _fitted(program, batch, mine, ids, steps, optimiser, particles)
        parts.append(
            _ranks(
                program,
                batch,
                params,
                mine,
                {n: v[ids.long()] for n, v in truth.items()},
                ids,
                draws,
            )
        )
        elbo.append(-loss)
    ranks = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    inner = {
        site.name: len(site.batch_shape) - 2 for site in program.latents.sites if site.is_local
    }
    inner |= {name: left for name, left in program.derived.items() if left is not None}
    own = {
        name: ranks[name].movedim(1 + left, 1).squeeze(2 + left).numpy()
        for name, left in inner.items()
    }
    return Sbc(
        {name: value.numpy() for name, value in ranks.items() if name not in inner},
        own,
        draws,
        tuple(data_like.names),
        tuple(data_like.counts.tolist()),
        torch.cat(elbo).double().numpy(),
    )


def _fitted(
    program: Program,
    batch: ClientBatch,
    labels: Labels,
    ids: Tensor,
    steps: int,
    optimiser: Optimiser,
    particles: int,
) -> tuple[Params, Tensor]:
    """Params of the guides of some replications, (R, ...), and the negative ELBO of the last step, (R,)."""
    shared, own = program.start()
    clients = batch.num_clients
    start = {**shared, **stacked(program, {k: v.expand(clients, *v.shape) for k, v in own.items()})}
    at = {k: v.expand(len(ids), *v.shape).clone() for k, v in start.items()}
    stepped = Stepped(at, optimiser.init(at))
    loss = torch.zeros(len(ids))

    def gradient(params: Params, label: Labels, one: Tensor, t: Tensor) -> tuple[Tree, Tensor]:
        rows = with_labels(batch, label).redrawn(one).redrawn(t)

        def negative_elbo(p: Params) -> Tensor:
            def drawn_once(b: ClientBatch) -> Tensor:
                terms = program.terms(p, b)
                return terms.nll.sum() + terms.local_kl.sum() + terms.global_kl

            return over_draws(drawn_once, rows, particles)

        return slope(negative_elbo, params)

    def move(at: Tree, label: Labels, rest: Tree) -> Tree:
        gradients, loss = torch.vmap(gradient, in_dims=(0, 0, 0, None))(
            at["params"], label, rest["ids"], rest["t"]
        )
        new = step(optimiser, gradients, Stepped(at["params"], at["state"]), rest["rate"])
        return {"params": new.params, "state": new.state, "loss": loss}

    now: Tree = {"params": stepped.params, "state": stepped.state}
    with pyro.validation_enabled(False), torch.no_grad():
        for t in range(steps):
            rate = torch.tensor(min(1.0, 2.0 * (1.0 - t / steps)))
            rest = {"ids": ids, "t": torch.tensor(t, dtype=torch.int32), "rate": rate}
            now = move(now, labels, rest)
            loss = now.pop("loss")
    return now["params"], loss


def _ranks(
    program: Program,
    batch: ClientBatch,
    params: Params,
    labels: Labels,
    truth: Values,
    ids: Tensor,
    draws: int,
) -> dict[str, Tensor]:
    """How many draws of each fitted guide are below the truth, (R, *shape), site by site."""

    def of_one(params: Params, label: Labels, truth: Values, one: Tensor) -> Values:
        rows = with_labels(batch, label).redrawn(one)

        def below(d: Tensor) -> Values:
            again = rows.redrawn(d)
            values = program.draw(params, again)
            return {**values, **program.derive(values, params, again)}

        after = 1_000_000_000 + torch.arange(draws, dtype=torch.int32)  # no step has these keys
        return tree_map(lambda drawn, true: (drawn < true).sum(0), torch.vmap(below)(after), truth)

    with pyro.validation_enabled(False), torch.no_grad():
        found: dict[str, Tensor] = torch.vmap(of_one, chunk_size=50)(params, labels, truth, ids)
    return found


def _numbers(ranks: Ranks) -> Iterator[tuple[str, Ranks]]:
    """Each number of a site, (R, *shape): its place, and its ranks."""
    for place in np.ndindex(ranks.shape[1:]):
        yield (f"[{', '.join(map(str, place))}]" if place else ""), ranks[(slice(None), *place)]


def ecdf_band(
    count: int, at: NDArray[np.float64], *, prob: float = 0.95, simulations: int = 2000
) -> NDArray[np.float64]:
    """Lower and upper bound, (2, len(at)), within which the whole ECDF of `count` uniform ranks lies with a probability.

    Pointwise binomial intervals of the level at which so many of simulated samples stay inside everywhere.

    Args:
        count: of ranks.
        at: points in (0, 1).
        prob: of the band.
        simulations: that the level is found by.
    """
    generator = np.random.Generator(np.random.Philox(0))
    cells = np.diff(at, prepend=0.0, append=1.0)
    below = generator.multinomial(count, cells, size=simulations)[:, :-1].cumsum(1)
    tail = 2.0 * np.minimum(stats.binom.cdf(below, count, at), stats.binom.sf(below - 1, count, at))
    level = np.quantile(tail.min(1), 1.0 - prob)
    return (
        np.stack(
            [stats.binom.ppf(level / 2.0, count, at), stats.binom.ppf(1.0 - level / 2.0, count, at)]
        )
        / count
    )
