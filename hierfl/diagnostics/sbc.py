"""Simulation-based calibration: ranks of prior draws among draws of the fitted guide.

Each replication draws parameters from the prior and data given them, fits the guide to the data,
and ranks the parameters. If the guide is the posterior, ranks are uniform and intervals cover at
their nominal rate, whatever the prior. All replications are fitted together, under `torch.vmap`.

Sources: Talts et al. 2018, arXiv:1804.06788; band: Säilynoja et al. 2022, arXiv:2103.10522.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import scipy  # which loads scipy.stats when it is used
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.arguments import NoSuchName, expect_count
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.trees import Tree, tree_map
from hierfl.core.user_warnings import warn
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.diagnostics.simulated_data import Labels, drawn, with_labels
from hierfl.method import over_draws, slope
from hierfl.optimizers import Adam, Optimizer, Stepped, step
from hierfl.posterior.draws import draws_of_samples
from hierfl.program.check_dependence import check_apart
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params, Program, ProgramError, stacked
from hierfl.program.read import read
from hierfl.program.sites import Family, Guide, Model, Values

AT_ONCE = 250  # replications carried at once
INTERVALS = (0.5, 0.9)
GAIN = 0.05  # nats of the ELBO for each number, by which a fit that has converged may still rise
Ranks = NDArray[np.int64]


def _unfinished(sbc: "Sbc") -> str:
    """Return that the fits were still improving, and what to do."""
    return (
        f"The fits had not converged: their ELBO still rose by {sbc.gain.mean():.3g} nats in the last "
        "quarter of the steps, so that the ranks are those of unfinished fits: use more steps, or a "
        "larger step size"
    )


@printed
@dataclass(frozen=True, eq=False)
class Sbc:
    """Ranks of the true values among the draws.

    Args:
        shared: global site -> (R, *shape), the number of the guide's draws below the true value, 0
            to L.
        own: local site -> (R, N, *shape).
        draws: L, of each fitted guide.
        clients: N names.
        rows: of each client.
        elbo: (R,) of each replication's last step, nats: one estimate, to see whether the fits have
            converged.
        gain: (R,) by how many nats the ELBO of each replication's fit was larger, on average, in the
            last quarter of the steps than in the quarter before; 0 of one step, and empty where the
            fits do not say.
    """

    shared: dict[str, Ranks]
    own: dict[str, Ranks]
    draws: int
    clients: tuple[str, ...]
    rows: tuple[int, ...]
    elbo: NDArray[np.float64]
    gain: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def __tables__(self) -> Shown:
        title = f"Ranks of {self.replications} replications among {self.draws} draws each"
        words = "Coverage of intervals by site; .table() tests the ranks of each number."
        if not self.converged:
            words += f"\n{_unfinished(self)}"
        return Shown(title, self.coverage(), words)

    @property
    def converged(self) -> bool:
        """Whether the fits no longer improved: by less than 0.05 nats per scalar, or within noise."""
        if not len(self.gain):
            return True
        numbers = sum(1 for _ in self.quantities())
        error = self.gain.std() / len(self.gain) ** 0.5
        return bool(self.gain.mean() <= max(GAIN * numbers, 3.0 * error))

    @property
    def replications(self) -> int:
        """R."""
        return len(self.elbo)

    def quantities(self) -> Iterator[tuple[str, str, str | None, Ranks]]:
        """Yield site, index, client and ranks (R,) of each number."""
        for site, ranks in self.shared.items():
            yield from ((site, place, None, column) for place, column in _numbers(ranks))
        for site, ranks in self.own.items():
            for k, client in enumerate(self.clients):
                yield from (
                    (site, place, client, column) for place, column in _numbers(ranks[:, k])
                )

    def table(self) -> pd.DataFrame:
        """Return, by scalar, the p-value of a chi-square test and the coverage of intervals."""
        size = dict(zip(self.clients, self.rows, strict=True))
        records = []
        for site, place, client, ranks in self.quantities():
            one = {"site": site, "number": place, "client": client, "rows": size.get(client or "")}
            records.append(one | self._scores(ranks))
        return pd.DataFrame(records)

    def coverage(self) -> pd.DataFrame:
        """Return coverage by site, over all its numbers and clients."""
        covered = {
            site: self._covered(ranks) for site, ranks in {**self.shared, **self.own}.items()
        }
        return pd.DataFrame.from_dict(covered, orient="index").rename_axis("site")

    def coverage_by_rows(self) -> pd.DataFrame:
        """Return coverage by local site and by the clients' number of rows."""
        records = []
        for site, ranks in self.own.items():
            for size in sorted(set(self.rows)):
                those = [k for k, n in enumerate(self.rows) if n == size]
                one = {"site": site, "rows": size, "clients": len(those)}
                records.append(one | self._covered(ranks[:, those]))
        return pd.DataFrame(records)

    def ecdf(self, site: str, *, prob: float = 0.95) -> pd.DataFrame:
        """Return the ECDF of a site's ranks at L points in (0, 1), with a simultaneous band.

        Raises:
            KeyError: the model has no such site.
        """
        columns = {
            place if client is None else f"{client} {place}".strip(): ranks
            for name, place, client, ranks in self.quantities()
            if name == site
        }
        if not columns:
            raise NoSuchName(
                f"there is no site '{site}': the sites are {', '.join([*self.shared, *self.own])}"
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
        return {"p": float(scipy.stats.chisquare(counts).pvalue), **self._covered(ranks)}

    def _covered(self, ranks: Ranks) -> dict[str, float]:
        """Return the coverage of central intervals: the share of ranks in the middle."""
        middle = np.abs(2 * ranks - self.draws)  # distance from the middle, in half ranks
        return {f"cover {p:.0%}": float((middle < p * (self.draws + 1)).mean()) for p in INTERVALS}


@one_at_a_time
def sbc(
    model: Model,
    guide: Guide | Family,
    data_like: ClientData,
    *,
    replications: int = 500,
    draws: int = 99,
    steps: int = 1000,
    optimizer: Optimizer = Adam(0.05),  # noqa: B008 (frozen)
    num_particles: int = 4,
    seed: int = 0,
) -> Sbc:
    """Run simulation-based calibration of a guide on data sets drawn from the model.

    Args:
        model: of sample statements alone, without params or factors, so that its prior is proper.
        guide: a family, or a guide function.
        data_like: the clients and their numbers of rows; fields that the model does not observe are
            used as they are.
        replications: R, 1 or more.
        draws: L, of each fitted guide; best where L + 1 is divisible by 20.
        steps: of each fit; the step size is the optimizer's in the first half, and falls linearly
            to 0 in the second.
        optimizer: SGD, Adam or a torchopt transformation.
        num_particles: draws of the guide per step.
        seed: of the data sets, the steps and the draws.

    Raises:
        ProgramError: data cannot be drawn from the model, or the guide draws one client at a time.
    """
    counts = {"replications": replications, "draws": draws, "steps": steps}
    for name, count in {**counts, "num_particles": num_particles}.items():
        expect_count(count, name)
    program = read(model, guide, data_like, seed=seed)
    if not program.in_vmap:
        raise ProgramError(
            "sbc fits all replications at once, and this program runs one client at a time: "
            "use a guide of Normals, and distributions that torch.vmap can compute"
        )
    check_apart(program, data_like)
    batch = full_batch(data_like, torch.arange(data_like.num_clients), seed=seed)
    truth, labels = drawn(program, batch, count=replications, seed=seed)
    parts, elbo, gain = [], [], []
    for ids in torch.arange(replications, dtype=torch.int32).split(AT_ONCE):
        mine, true = ({name: v[ids.long()] for name, v in of.items()} for of in (labels, truth))
        params, loss, rise = _fitted(program, batch, mine, ids, steps, optimizer, num_particles)
        parts.append(_ranks(program, batch, params, mine, true, ids, draws))
        elbo.append(-loss)
        gain.append(rise)
    ranks = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    by_level = draws_of_samples(program, ranks)
    calibration = Sbc(
        {name: value.numpy() for name, value in by_level.shared.items()},
        {name: value.numpy() for name, value in by_level.own.items()},
        draws,
        tuple(data_like.names),
        tuple(data_like.counts.tolist()),
        torch.cat(elbo).double().numpy(),
        torch.cat(gain).double().numpy(),
    )
    if not calibration.converged:
        warn(_unfinished(calibration))
    return calibration


def _fitted(
    program: Program,
    batch: ClientBatch,
    labels: Labels,
    ids: Tensor,
    steps: int,
    optimizer: Optimizer,
    num_particles: int,
) -> tuple[Params, Tensor, Tensor]:
    """Fit the guides of some replications: params (R, ...), the last loss (R,), and the late gain (R,)."""
    shared, own = program.start()
    clients = batch.num_clients
    start = {**shared, **stacked(program, {k: v.expand(clients, *v.shape) for k, v in own.items()})}
    at = {k: v.expand(len(ids), *v.shape).clone() for k, v in start.items()}
    now = Stepped(at, optimizer.init(at))
    loss = torch.zeros(len(ids))
    quarters = torch.zeros(2, len(ids))  # losses of the last two
    quarter = max(1, steps // 4)

    def gradient(params: Params, label: Labels, one: Tensor, t: Tensor) -> tuple[Tree, Tensor]:
        rows = with_labels(batch, label).redrawn(one).redrawn(t)

        def negative_elbo(p: Params) -> Tensor:
            def drawn_once(b: ClientBatch) -> Tensor:
                terms = program.terms(p, b)
                return terms.nll.sum() + terms.local_kl.sum() + terms.global_kl

            return over_draws(drawn_once, rows, num_particles)

        return slope(negative_elbo, params)

    gradients_of = torch.vmap(gradient, in_dims=(0, 0, 0, None))
    with unchecked(), torch.no_grad():
        for t in range(steps):
            at_step = torch.tensor(t, dtype=torch.int32)
            gradients, loss = gradients_of(now.params, labels, ids, at_step)
            rate = torch.tensor(min(1.0, 2.0 * (1.0 - t / steps)))
            now = step(optimizer, gradients, now, rate)
            if t >= steps - 2 * quarter:
                quarters[int(t >= steps - quarter)] += loss / quarter
    gain = quarters[0] - quarters[1] if steps > 1 else torch.zeros(len(ids))
    return now.params, loss, gain


def _ranks(
    program: Program,
    batch: ClientBatch,
    params: Params,
    labels: Labels,
    truth: Values,
    ids: Tensor,
    draws: int,
) -> dict[str, Tensor]:
    """Count, by site, the draws of each fitted guide that are below the true value, (R, *shape)."""

    def of_one(params: Params, label: Labels, truth: Values, one: Tensor) -> Values:
        rows = with_labels(batch, label).redrawn(one)

        def below(d: Tensor) -> Values:
            again = rows.redrawn(d)
            values = program.draw(params, again)
            return {**values, **program.derive(values, params, again)}

        after = 1_000_000_000 + torch.arange(draws, dtype=torch.int32)  # keys that no step has
        return tree_map(lambda drawn, true: (drawn < true).sum(0), torch.vmap(below)(after), truth)

    with unchecked(), torch.no_grad():
        found: dict[str, Tensor] = torch.vmap(of_one, chunk_size=50)(params, labels, truth, ids)
    return found


def _numbers(ranks: Ranks) -> Iterator[tuple[str, Ranks]]:
    for place in np.ndindex(ranks.shape[1:]):
        yield (f"[{', '.join(map(str, place))}]" if place else ""), ranks[(slice(None), *place)]


def ecdf_band(
    count: int, at: NDArray[np.float64], *, prob: float = 0.95, simulations: int = 2000
) -> NDArray[np.float64]:
    """Return a simultaneous band for the ECDF of `count` uniform ranks at points, (2, points).

    Pointwise binomial intervals, at the level at which a share `prob` of simulated samples stays
    inside everywhere.
    """
    generator = np.random.Generator(np.random.Philox(0))
    cells = np.diff(at, prepend=0.0, append=1.0)
    below = generator.multinomial(count, cells, size=simulations)[:, :-1].cumsum(1)
    tail = 2.0 * np.minimum(
        scipy.stats.binom.cdf(below, count, at), scipy.stats.binom.sf(below - 1, count, at)
    )
    level = np.quantile(tail.min(1), 1.0 - prob)
    ends = [scipy.stats.binom.ppf(tail, count, at) for tail in (level / 2.0, 1.0 - level / 2.0)]
    return np.stack(ends) / count
