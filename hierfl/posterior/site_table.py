"""The posterior as a table: a row for each number of each site, of each client for local sites."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import transform_to

from hierfl.core.intervals import PROB, tails
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.posterior.arviz_groups import EXPAND, labels_of
from hierfl.posterior.client_loop import each_client
from hierfl.posterior.corrected import corrected
from hierfl.posterior.draws import Draws, known_sites, posterior_draws
from hierfl.posterior.layer_summaries import (
    STATISTICS,
    Network,
    by_layer,
    drawn_by_layer,
    of_all_clients,
    split,
)
from hierfl.posterior.shrinkage import Shrinkage, shrinkage, width_of
from hierfl.posterior.snapshot import (
    Snapshot,
    all_sites,
    by_state_alone,
    lacks_rows,
    learned_params,
)
from hierfl.program.program import Params
from hierfl.program.sites import Values

COLUMNS = ("site", "entry", "client", "mean", "sd", "low", "high", "shrinkage", "shrinkage_error")
# local networks are summarized sooner where clients are many
LEAST_EXPAND, MOST_ROWS = 50, 1_000_000
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SiteTable:
    """The table, `points` without sd, the `first` draws or None; `unknown` sites, and what is `unshrunk`, lack rows."""

    frame: pd.DataFrame
    spread: tuple[str, ...]
    points: tuple[str, ...]
    not_finite: tuple[str, ...]
    by_layer: tuple[str, ...]
    unknown: tuple[str, ...]
    unshrunk: tuple[str, ...]
    first: Draws | None


@one_at_a_time
def site_table(
    fit: Snapshot, *, draws: int, seed: int = 0, keep: int = 0, prob: float = PROB
) -> SiteTable:
    """Tabulate mean, sd, interval and shrinkage of every number; keep the first `keep` draws."""
    expand = min(EXPAND, max(LEAST_EXPAND, MOST_ROWS // len(fit.clients)))
    no_rows, names = lacks_rows(fit), known_sites(fit)
    fit = by_state_alone(fit)
    keep_sites, large = split(posterior_draws(fit, draws=1, seed=seed, keep=names), None, expand)
    how: dict[str, Any] = {"draws": draws, "seed": seed, "width": width_of(fit.program)}
    chunks = drawn_by_layer(fit, keep_sites, large, **how) if names else iter(())
    if fit.progress.corrected and not no_rows:  # as `Fit.posterior` does
        large, together = by_layer(corrected(fit, draws, seed=seed).draws, expand)
        chunks = iter([together])
    of_learned, learned = by_layer(_learned(fit), expand)
    first_chunks: list[Draws] = []
    summaries = _summarized(_noted(chunks, first_chunks, 0 if large else keep), prob)
    summaries |= _summarized([learned], prob)
    networks = {**large, **of_learned}
    local = [name for name, site in summaries.items() if site.is_local and name not in networks]
    pulled = shrinkage(fit, local, seed=seed)
    frames = [
        _frame(fit, name, site, networks.get(name), pulled.get(name))
        for name, site in summaries.items()
    ]
    return SiteTable(
        frame=pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=COLUMNS),
        spread=tuple(name for name, site in summaries.items() if site.is_spread),
        points=tuple(
            name for name, site in summaries.items() if site.is_finite and not site.is_spread
        ),
        not_finite=tuple(name for name, site in summaries.items() if not site.is_finite),
        by_layer=tuple(networks),
        unknown=tuple(name for name in all_sites(fit.program) if name not in names),
        unshrunk=tuple(
            name for name in local if no_rows and name not in {**pulled, **fit.program.derived}
        ),
        first=of_all_clients(first_chunks) if first_chunks else None,
    )


def frame_of_draws(fit: Snapshot, draws: Draws, prob: float = PROB) -> pd.DataFrame:
    """Tabulate draws in the columns of a `SiteTable`, without shrinkage."""
    sites = _summarized([draws], prob)
    frames = [_frame(fit, name, site, None, None) for name, site in sites.items()]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=COLUMNS)


# -------------------------------------------------------------------------------------------- draws
def _noted(chunks: Iterable[Draws], first_chunks: list[Draws], count: int) -> Iterator[Draws]:
    """Yield the draws of chunks of clients, and keep the first `count` of each chunk."""
    for chunk in chunks:
        if count:
            first_chunks.append(tree_map(torch.clone, chunk.some(slice(count))))
        yield chunk


def _learned(fit: Snapshot) -> Draws:
    specs = {spec.name: spec for spec in learned_params(fit)}

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
        return {name: transform_to(spec.constraint)(params[name]) for name, spec in specs.items()}

    shared: Values = {}
    by_param: dict[str, list[Tensor]] = {}
    for chunk in each_client(fit, one) if specs else ():
        for name, value in chunk.found.items():  # (C, *shape), local ones with a client of size 1
            if specs[name].is_local:
                by_param.setdefault(name, []).append(value.squeeze(-specs[name].axis))
            else:
                shared[name] = value[:1]
    return Draws(shared, {name: torch.cat(part)[None] for name, part in by_param.items()})


# ------------------------------------------------------------------------------------------ numbers
@dataclass(frozen=True, eq=False)
class _Site:
    """Mean, sd and interval ends of a site, (4, C, *shape), C = 1 if global; NaN at a point estimate."""

    at: Numbers
    is_local: bool

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.at[0]).all())

    @property
    def is_spread(self) -> bool:
        return not bool(np.isnan(self.at[1]).all())


def _summarized(chunks: Iterable[Draws], prob: float) -> dict[str, _Site]:
    shared: dict[str, _Site] = {}
    own: dict[str, list[Numbers]] = {}
    for chunk in chunks:
        for name, value in chunk.shared.items():
            if name not in shared:  # the same in every chunk
                shared[name] = _Site(numbers_of(value[:, None], prob), False)
        for name, value in chunk.own.items():
            own.setdefault(name, []).append(numbers_of(value, prob))
    return shared | {name: _Site(np.concatenate(pieces, 1), True) for name, pieces in own.items()}


def numbers_of(value: Tensor, prob: float) -> Numbers:
    """Return mean, sd and interval ends of draws (S, ...), (4, ...); NaN at a point estimate."""
    values = value.detach().double().numpy()
    finite = np.isfinite(values).all(0)
    safe = np.where(finite, values, 0.0)
    ends = np.quantile(safe, tails(prob), axis=0)
    numbers = np.stack([safe.mean(0), safe.std(0, ddof=min(1, len(safe) - 1)), *ends])
    is_point = (safe == safe[:1]).all(0)
    numbers[0] = np.where(is_point, safe[0], numbers[0])
    numbers[1:, is_point] = np.nan
    numbers[:, ~finite] = np.nan
    return numbers


def _frame(
    fit: Snapshot, name: str, site: _Site, network: Network | None, pulled: Shrinkage | None
) -> pd.DataFrame:
    clients = fit.clients if site.is_local else ("",)
    if network is not None:
        entries = [f"{layer} {what}".strip() for layer in network.layers for what in STATISTICS]
    else:
        entries = entries_of(fit, name, site.at.shape[2:])
    places = list(product(entries, clients))
    flat = site.at.reshape(4, len(clients), -1).transpose(0, 2, 1).reshape(4, -1)
    columns: dict[str, Any] = {
        "site": name,
        "entry": [entry for entry, _ in places],
        "client": [client for _, client in places],
        **dict(zip(COLUMNS[3:7], flat, strict=True)),
        **dict.fromkeys(COLUMNS[7:], np.full(len(places), np.nan)),
    }
    if pulled is not None:
        parts = [part.double().numpy().reshape(len(clients), -1).T.reshape(-1) for part in pulled]
        columns |= dict(zip(COLUMNS[7:], parts, strict=True))
    return pd.DataFrame(columns, columns=list(COLUMNS), index=range(len(places)))


def in_right_digits(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table to print: shrinkage in the decimals that its Monte Carlo error leaves, without the error."""
    error = frame["shrinkage_error"].to_numpy(float)
    places = np.floor(-np.log10(np.maximum(2.0 * error, 1e-3)))
    decimals = np.where(np.isnan(places), 0, np.maximum(places, 0)).astype(int)
    values = frame["shrinkage"].to_numpy(float)
    rounded = [
        round(value, places) for value, places in zip(values, decimals.tolist(), strict=True)
    ]
    return frame.assign(shrinkage=rounded).drop(columns="shrinkage_error")


def entries_of(fit: Snapshot, name: str, shape: Sequence[int]) -> list[str]:
    """Label a site's numbers by the labels of its dimensions."""
    return [", ".join(map(str, entry)) for entry in product(*labels_of(fit, name, shape).values())]
